"""Writes the pages of the site into build/pages, and builds them into site/: ``python docs/build_pages.py``.

README.md is the first page. The pages of this folder are copied, with links that fit; those of `PARTS` are cut out of
longer ones. All settings, and the functions and classes, are written from the code. mkdocs.yml has the navigation.

    python docs/build_pages.py                # needs: pip install 'fedmpi[docs]'; then `zensical serve` shows the site
    python docs/build_pages.py --pages FOLDER # writes the pages there, and builds nothing
"""

import argparse
import functools
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from fedmpi.aggregation import stages  # noqa: E402
from fedmpi.aggregation.stages.base import Stage  # noqa: E402
from fedmpi.algorithms.schedules import Scheduled  # noqa: E402
from fedmpi.cli.train import Arguments  # noqa: E402
from fedmpi.config.build import CHOICES  # noqa: E402
from fedmpi.config.help import FLAG_HELP, declared_settings, type_name  # noqa: E402
from fedmpi.ground.registry import known  # noqa: E402
from fedmpi.training.settings import RunSettings  # noqa: E402

PAGES = ROOT / "build" / "pages"
WIDTH = 120  # characters of code that fit at 1280 pixels
ELSEWHERE = {
    "README.md": "index.md",
    "reproduction/README.md": "reproduction.md",
    **{name: name for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")},
}
# Page -> (page that it is a part of, its first and last section, title): what is looked for by itself.
PARTS = {
    "what_leaves": ("how_it_works", "What leaves a silo", "What leaves a silo", "What leaves a silo"),
    "tables": ("data", "Tables", "Tables that stay in their silos", "Tables: one CSV file per hospital"),
    "new_algorithm": ("algorithms", "Write an algorithm", "Numbers, and rows that skip rounds", "Add an algorithm"),
    "use_model": ("python", "The trained model", "Predictions", "Use the trained model"),
    "stopping": ("python", "Ending early", "Which data evaluations use", "Stop early, keep the best model"),
    "metrics": ("reports", "Metrics and averages", "Metrics and averages", "Metrics and class weights"),
}
# What a program may use, as a reader needs it: heading -> names and where each is defined.
API = {
    "Functions": {
        "train": "cli.train.train",
        "average": "own_loop.average.average",
        "join": "own_loop.join.join",
        "simulate": "federation.simulate.simulate",
        "load": "load",
        "load_run": "load_run",
        "figure": "cli.report.figure",
        "setting": "ground.settings.setting",
    },
    "Classes that you give, or derive yours from": {
        "Recording": "own_loop.recording.Recording",
        "Algorithm": "algorithms.base.Algorithm",
        "Exchange": "algorithms.base.Exchange",
        "Task": "tasks.custom.Task",
        "Part": "runs.loop.part.Part",
        "Sending": "aggregation.sending.Sending",
        "FederatedCallback": "huggingface.FederatedCallback",
        "FederatedTrainer": "huggingface.FederatedTrainer",
    },
    "What comes back": {
        "Run": "training.api.Run",
        "RunFolder": "runs.folder.RunFolder",
        "Trace": "federation.simulate.Trace",
        "UserError": "ground.errors.UserError",
    },
    "Inside": {"Federation": "federation.rounds.Federation"},
}


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("--pages", metavar="FOLDER", help="write the pages there, and build nothing")
    parser.add_argument("--tool", choices=("zensical", "mkdocs"), default="zensical", help="what builds the site")
    given = parser.parse_args()
    write_pages(pathlib.Path(given.pages or PAGES))
    if not given.pages:
        # --clean, of zensical: it would not notice that a docstring has changed.
        words = [sys.executable, "-m", given.tool, "build", "--strict", "--clean"]
        raise SystemExit(subprocess.run(words, cwd=ROOT).returncode)


def write_pages(folder):
    """Write all pages, and what they show, into a folder, instead of what is there."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(
        ROOT / "docs" / "pictures", folder / "pictures", ignore=shutil.ignore_patterns("*.py", "__pycache__")
    )
    docs = ROOT / "docs"
    (folder / "comparison").mkdir()  # programs that pages link to
    for path in [*docs.glob("*.css"), *docs.glob("comparison/*.py")]:
        shutil.copy(path, folder / path.relative_to(docs))
    for name, text in all_pages().items():
        (folder / f"{name}.md").write_text(text, encoding="utf-8")


def all_pages():
    """Name -> text in Markdown."""
    pages = {path.stem: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))}
    for name, page in ELSEWHERE.items():
        text = (ROOT / name).read_text(encoding="utf-8").replace("](README.md", "](index.md")
        pages[page.removesuffix(".md")] = re.sub(r"`docs/(\w+)\.md`", r"[\1](\1.md)", text)
    pages["index"] = re.sub(r"<(table|tr|td|th|div|details)\b", r"<\1 markdown", pages["index"])
    # Beside the first page stands the navigation, without the headings of this page.
    pages["index"] += "\n<style>.md-sidebar--primary .md-nav--secondary { display: none; }</style>\n"
    pages = {name: _wide(_links(text)) for name, text in pages.items()}
    _cut(pages)
    return {**pages, "settings": settings_page(), "api": api_page()}


def _links(text):
    """Links between files of the repository as links between pages."""
    text = re.sub(r"\]\((?:\.\./)?docs/", "](", text)
    text = re.sub(r"\]\(\.\./(CONTRIBUTING|SECURITY|CHANGELOG)\.md", r"](\1.md", text)
    text = re.sub(r'(src|href|srcset)="docs/', r'\1="', text)
    return re.sub(r"\]\((?:\.\./)?reproduction/(?:README|results/[\w/]+)\.md", "](reproduction.md", text)


def _wide(text):
    """Outputs with lines that are too long as blocks of a smaller type, see pages.css."""
    return re.sub(r"^```text\n.*?^```$", _smaller, text, flags=re.DOTALL | re.MULTILINE)


def _smaller(block):
    lines = block[0].splitlines()
    return f'<div class="wide" markdown>\n\n{block[0]}\n\n</div>' if max(map(len, lines)) > WIDTH else block[0]


def _cut(pages):
    """Make pages of their own of the sections in `PARTS`; links to these sections then lead there."""
    moved = {}  # (page, anchor) -> link
    for part, (whole, first, last, title) in PARTS.items():
        before, begin, rest = pages[whole].partition(f"## {first}\n")
        end = re.compile(r"^## ", re.MULTILINE).search(rest, rest.index(f"## {last}\n") + 3 if last != first else 0)
        body, after = (rest[: end.start()], rest[end.start() :]) if end else (rest, "")
        assert begin and body, f"{whole}.md has no section {first}"
        headings = re.findall(r"^##+ (.+)$", f"{begin}{body}", re.MULTILINE)
        moved |= {(whole, _anchor(one)): f"{part}.md#{_anchor(one)}" for one in headings}
        moved[whole, _anchor(first)] = f"{part}.md"
        whole_title = re.search(r"^# (.+)$", before, re.MULTILINE)[1]
        pages[whole] = f"{before}**[{title}]({part}.md)** has a page of its own.\n\n{after}"
        files = ": its commands may use files from there" if "```" in body else ""
        head = f"# {title}\n\nThis page continues [{whole_title}]({whole}.md){files}.\n\n"
        pages[part] = f"{head}{body if first == last else begin + body}"
    for name, text in pages.items():
        pages[name] = re.sub(r"\]\((?:(\w+)\.md)?#([\w-]+)\)", functools.partial(_moved, name, moved), text)


def _moved(page, moved, link):
    """A link to a section, as it must be on a page."""
    whole, anchor = link[1] or (PARTS[page][0] if page in PARTS else page), link[2]
    target = moved.get((whole, anchor), f"{whole}.md#{anchor}")
    return f"]({target.removeprefix(f'{page}.md')})" if target.startswith(f"{page}.md#") else f"]({target})"


def _anchor(heading):
    """The anchor of a heading, as Python-Markdown makes it."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def api_page():
    """What a program may use, from the docstrings, as a page that mkdocstrings fills."""
    parts = ["# Functions and classes", "This page is written from the docstrings."]
    for title, names in API.items():
        parts.append(f"## {title}")
        for name, path in names.items():
            parts.append(f"::: fedmpi.{path}\n    options: {{heading: {name}, toc_label: {name}}}")
            if name == "train":
                parts.append("**All settings of a run are arguments, too:**")
                parts += _sections({field: kind for field, kind in Arguments.__annotations__.items()}, "####")
    return "\n\n".join(parts) + "\n"


def _sections(types, level):
    """The settings of a run by sections; `types`: name -> type where it is another one."""
    of_run, parts = declared_settings(RunSettings, {}), []
    for name, cls in RunSettings.classes().items():
        about = (cls.__doc__ or "").strip().split("\n")[0]
        parts += [f"{level} {name.capitalize()}", about]
        parts.append(table([one for one in of_run.values() if one.group == name], types))
    return parts


def settings_page():
    """All settings of a run and of every class that can be chosen, as a page in Markdown."""
    of_run = declared_settings(RunSettings, {})
    parts = [
        "# All settings",
        "Write `--rounds 50` on the command line, `rounds: 50` in a file, and `rounds=50` in `fedmpi.train`. This page "
        "is written from the code.",
        FILTER,
        "## The run",
        *_sections({}, "###"),
        "### On the command line only",
        ", ".join(f"`--{flag}`" for flag in FLAG_HELP) + ". In a shell, Tab completes options and names after "
        "`fedmpi train`, `fedmpi data` and so on, with the package `fedmpi[completion]` and, in bash: "
        "`fedmpi completion bash > ~/.fedmpi.bash`, and the line `. ~/.fedmpi.bash` in `~/.bashrc`; zsh and tcsh "
        "likewise.",
    ]
    for group, choice in CHOICES.items():
        default = f"; the default is `{choice.default}`" if choice.default else ""
        parts.append(f"## {group.capitalize()}\n\nChosen by `--{group} NAME`{default}.")
        schedule = _table_of(Scheduled, group, of_run) if group == "algorithm" else []
        if schedule:
            parts += [
                "### Schedule of the step size (learning rate)",
                "Every algorithm has these settings.",
                table(schedule),
            ]
        for name, cls in known(choice.package, choice.base).items():
            # Dataclasses that differ in nothing are equal: what is in the schedule with another default stays.
            parts += _section(
                f"{group} {name}", cls, [one for one in _table_of(cls, group, of_run) if one not in schedule]
            )
        if group == "aggregation":
            parts.append("## Stages\n\nChosen by `--stages NAME,NAME`; by default there are none.")
            for name, cls in known(stages, Stage).items():
                parts += _section(f"stage {name}", cls, _table_of(cls, f"stages.{name}", of_run))
    return "\n\n".join(part for part in parts if part) + "\n"


def _table_of(cls, group, of_run):
    """The settings of a class that can be chosen for `group`, without those of a run."""
    return [one for key, one in declared_settings(RunSettings, {group: cls}).items() if key not in of_run]


def _section(title, cls, settings):
    """Heading, first line of the docstring, and settings of a class."""
    return [f"### {title}", (cls.__doc__ or "").strip().split("\n")[0].replace("|", "\\|"), table(settings)]


def table(settings, types=None):
    """A table of `Declared` settings in Markdown; "" if there are none."""
    lines = []
    for one in settings:
        kind = (types or {}).get(one.key) or type_name(one.type)
        default = f"`{one.default}`" if one.default is not None else "none" if "None" in type_name(one.type) else ""
        lines.append(f"| `{one.key}` | {escaped(kind)} | {default} | {escaped(one.help)} |")
    return "\n".join(["| setting | type | default | meaning |", "| --- | --- | --- | --- |", *lines]) if lines else ""


def escaped(text):
    """A text for a cell of a table."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


# A field that leaves the rows with all its words, also those of the headings above. Without JavaScript there is none.
FILTER = """<input id="filter" type="search" placeholder="Filter, like: step size" aria-label="Filter settings" hidden>

<script>
document.addEventListener("DOMContentLoaded", function () {
  var field = document.getElementById("filter"), headings = {H2: "", H3: ""};
  var plain = function (part) { return part.textContent.toLowerCase().replace(/_/g, " ") + " "; };
  var parts = Array.from(field.closest("article").querySelectorAll("h2, h2 ~ h3, h2 ~ p, h2 ~ * tr"));
  parts = parts.filter(function (part) { return !part.querySelector("th"); }).map(function (part) {
    if (part.tagName in headings) headings[part.tagName] = plain(part);
    if (part.tagName === "H2") headings.H3 = "";
    var above = headings.H2 + headings.H3;
    return {part: part, kind: part.tagName, text: part.tagName === "TR" ? above + plain(part) : above};
  });
  field.hidden = false;
  field.addEventListener("input", function () {
    var words = field.value.toLowerCase().replace(/_/g, " ").split(/\\s+/).filter(Boolean);
    var below = {H2: false, H3: false};
    parts.slice().reverse().forEach(function (one) {  // from the end: a heading is shown if something below it is
      var visible = words.every(function (word) { return one.text.includes(word); });
      if (one.kind in below) {
        visible = visible || below[one.kind];
        below.H2 = one.kind === "H3" && (below.H2 || visible);
        below.H3 = false;
      } else if (one.kind === "TR") below.H3 = below.H3 || visible;
      one.part.hidden = !visible;
    });
    document.querySelectorAll("article table").forEach(function (table) {
      table.hidden = !table.querySelector("tbody tr:not([hidden])");
    });
  });
});
</script>"""


if __name__ == "__main__":
    main()
