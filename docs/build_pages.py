"""What MkDocs adds to the pages in this folder: README and its neighbours, all settings, the Python functions and
classes from their docstrings, the navigation."""

import pathlib
import re

from mkdocs.structure.files import File

import fedmpi
from fedmpi.config.build import CHOICES
from fedmpi.config.help import FLAG_HELP, about, declared_settings, type_name
from fedmpi.ground.registry import known
from fedmpi.training.settings import RunSettings

ROOT = pathlib.Path(__file__).resolve().parent.parent
ELSEWHERE = {
    "README.md": "index.md",
    "reproduction/README.md": "reproduction.md",
    **{name: name for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")},
}
# The order of the pages; those that are not listed follow, those that are not there are left out.
ORDER = (
    "index", "coming_from", "data", "personal", "baselines", "own_task", "own_loop", "fine_tuning", "python", "api",
    "which_method", "algorithms", "periods", "objectives", "settings", "sweeps", "reports", "papers", "theory",
    "reproduction", "cluster", "checkpoints", "failures", "aggregation", "privacy", "gpu", "speed", "how_it_works",
    "core",
)  # fmt: skip
LAST = ("CONTRIBUTING", "SECURITY", "CHANGELOG")


def on_page_markdown(markdown, **_):
    """Links between files of the repository as links between pages."""
    return _links(markdown)


def _links(text):
    text = re.sub(r"\]\((?:\.\./)?docs/", "](", text)
    return re.sub(r"\]\((?:\.\./)?reproduction/(?:README|results/[\w/]+)\.md", "](reproduction.md", text)


def on_files(files, config):
    """Add the pages that are made from files elsewhere."""
    for name, page in ELSEWHERE.items():
        text = _links((ROOT / name).read_text(encoding="utf-8")).replace("](README.md", "](index.md")
        files.append(File.generated(config, page, content=re.sub(r"`docs/(\w+)\.md`", r"[\1](\1.md)", text)))
    files.append(File.generated(config, "settings.md", content=settings_page()))
    files.append(File.generated(config, "api.md", content=api_page()))
    names = {pathlib.PurePath(file.src_uri).stem for file in files.documentation_pages()}
    listed = [name for name in ORDER if name in names]
    others = sorted(names - set(ORDER) - set(LAST))
    config.nav = [f"{name}.md" for name in (*listed, *others, *LAST)]
    return files


def api_page():
    """What a program may use, from the docstrings, as a page that mkdocstrings fills."""
    names = {"train": "cli.train.train", "load": "load", "load_run": "load_run"}
    names |= {name: f"{module}.{name}"[len("fedmpi.") :] for name, module in sorted(fedmpi._DEFINED_IN.items())}
    names |= {name: f"huggingface.{name}" for name in ("FederatedCallback", "FederatedTrainer")}
    names |= {"Run": "training.api.Run", "RunFolder": "runs.folder.RunFolder"}
    parts = [f"::: fedmpi.{path}\n    options: {{heading: {name}, toc_label: {name}}}" for name, path in names.items()]
    return "\n\n".join(["# Functions and classes", "This page is generated from the docstrings.", *parts]) + "\n"


def settings_page():
    """All settings of a run and of every class that can be chosen, as a page in Markdown."""
    of_run = declared_settings(RunSettings, {})
    sections = []
    for name, cls in RunSettings.classes().items():
        sections += [f"### {about(name, cls)}", table(one for one in of_run.values() if one.group == name)]
    parts = [
        "# Settings",
        "Write `--rounds 50` on the command line and `rounds: 50` in a file. This page is generated from the code.",
        "In a shell, Tab completes options and names after `fedmpi train`, `fedmpi data` and so on, with the "
        "package `fedmpi[completion]` and, in bash: `fedmpi completion bash > ~/.fedmpi.bash`, and the line "
        "`. ~/.fedmpi.bash` in `~/.bashrc`; zsh and tcsh likewise.",
        "## The run",
        *sections,
        "Flags of the command line: " + ", ".join(f"`--{flag}`" for flag in FLAG_HELP) + ".",
    ]
    for group, choice in CHOICES.items():
        default = f"; the default is `{choice.default}`" if choice.default else ""
        parts.append(f"## {group.capitalize()}\n\nChosen by `--{group} NAME`{default}.")
        for name, cls in known(choice.package, choice.base).items():
            what = (cls.__doc__ or "").strip().split("\n")[0]
            settings = [one for key, one in declared_settings(RunSettings, {group: cls}).items() if key not in of_run]
            parts += [f"### {group} {name}", what.replace("|", "\\|"), table(settings)]
    return "\n\n".join(part for part in parts if part) + "\n"


def table(settings):
    """A table of `Declared` settings in Markdown; "" if there are none."""
    lines = []
    for one in settings:
        default = "" if one.default is None else f"`{one.default}`"
        lines.append(f"| `{one.key}` | {escaped(type_name(one.type))} | {default} | {escaped(one.help)} |")
    return "\n".join(["| setting | type | default | meaning |", "| --- | --- | --- | --- |", *lines]) if lines else ""


def escaped(text):
    """A text for a cell of a table."""
    return text.replace("|", "\\|").replace("<", "&lt;")
