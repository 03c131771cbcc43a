"""What MkDocs adds to the pages in this folder: README and its neighbours, all settings, the navigation."""

import pathlib
import re

from mkdocs.structure.files import File

from fedmpi.config.build import CHOICES
from fedmpi.config.help import settings_reference

ROOT = pathlib.Path(__file__).resolve().parent.parent
ELSEWHERE = {
    "README.md": "index.md",
    "reproduction/README.md": "reproduction.md",
    **{name: name for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")},
}
# The order of the pages; those that are not listed follow, those that are not there are left out.
ORDER = (
    "index", "coming_from", "data", "personal", "own_task", "own_loop", "python", "algorithms", "objectives",
    "settings", "sweeps", "reports", "papers", "reproduction", "cluster", "checkpoints", "failures", "gpu", "speed",
    "how_it_works",
)  # fmt: skip
LAST = ("CONTRIBUTING", "SECURITY", "CHANGELOG")


def on_page_markdown(markdown, **_):
    """Links between files of the repository as links between pages."""
    return _links(markdown)


def _links(text):
    text = re.sub(r"\]\((?:\.\./)?docs/", "](", text)
    return re.sub(r"\]\((?:\.\./)?reproduction/README\.md", "](reproduction.md", text)


def on_files(files, config):
    """Add the pages that are made from files elsewhere."""
    for name, page in ELSEWHERE.items():
        text = _links((ROOT / name).read_text(encoding="utf-8")).replace("](README.md", "](index.md")
        files.append(File.generated(config, page, content=re.sub(r"`docs/(\w+)\.md`", r"[\1](\1.md)", text)))
    files.append(File.generated(config, "settings.md", content=settings_reference(CHOICES)))
    names = {pathlib.PurePath(file.src_uri).stem for file in files.documentation_pages()}
    listed = [name for name in ORDER if name in names]
    others = sorted(names - set(ORDER) - set(LAST))
    config.nav = [f"{name}.md" for name in (*listed, *others, *LAST)]
    return files
