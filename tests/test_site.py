"""The site is built from the repository by one command, its links lead somewhere, its navigation has all pages."""

import html.parser
import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
import urllib.parse

import pytest
import yaml
from helpers import ROOT

import fedmpi

GROUPS = ["Start", "Data", "Loops and methods", "Cluster", "Papers", "Reference"]
NEEDED = {"zensical": ("zensical",), "mkdocs": ("mkdocs", "material")}
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def write_pages(folder):
    """The sources of the site, as ``docs/build_pages.py`` writes them, in a folder; returns that of the pages."""
    (folder / "docs").mkdir(parents=True)
    for name in ("mkdocs.yml", "docs/docstrings.py"):
        shutil.copy(ROOT / name, folder / name)
    place = importlib.util.spec_from_file_location("build_pages", ROOT / "docs" / "build_pages.py")
    module = importlib.util.module_from_spec(place)
    place.loader.exec_module(module)
    module.write_pages(folder / "build" / "pages")
    return folder / "build" / "pages"


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    return write_pages(tmp_path_factory.mktemp("pages") / "source")


def environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


def is_here(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


class Reader(html.parser.HTMLParser):
    """The links of a page, what it loads, and its anchors."""

    def __init__(self, path):
        super().__init__()
        self.links, self.loads, self.anchors = [], [], set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.anchors |= {given.get("id"), given.get("name")}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if tag in ("script", "img", "link") and given.get("rel") not in ("canonical", "prev", "next"):
            self.loads += [given[key] for key in ("src", "href") if given.get(key)]


def navigation():
    """[(group, [(title, page)])] of mkdocs.yml."""
    found = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    groups = [pair for each in found for pair in each.items()]
    return [(group, [pair for one in entries for pair in one.items()]) for group, entries in groups]


def test_the_navigation_has_six_groups_short_titles_and_every_page_once(pages):
    assert [group for group, _ in navigation()] == GROUPS
    entries = [entry for _, group in navigation() for entry in group]
    assert sorted(page for _, page in entries) == sorted(path.name for path in pages.glob("*.md"))
    assert [title for title, _ in entries if len(title) > 30] == []
    assert len({title for title, _ in entries}) == len(entries)


def test_code_fits_into_a_window_of_1280_pixels(pages):
    """Programs and commands by their length; longer lines of outputs are in blocks of a smaller type."""
    for page in sorted(pages.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        shown = re.sub(r'<div class="wide" markdown>.*?</div>', "", text, flags=re.DOTALL)
        assert [line for _, body in BLOCK.findall(shown) for line in body.splitlines() if len(line) > 120] == [], page


def test_sections_with_a_page_of_their_own_are_complete_there_and_nowhere_else(pages):
    texts = {path.stem: path.read_text(encoding="utf-8") for path in pages.glob("*.md")}
    whole = (ROOT / "docs" / "how_it_works.md").read_text(encoding="utf-8")
    own = whole.partition("## What leaves a silo\n")[2].strip()
    assert own.splitlines()[-1] in texts["what_leaves"] and own.splitlines()[-1] not in texts["how_it_works"]
    assert "](what_leaves.md)" in texts["how_it_works"]
    assert "### " not in texts["tables"] and "## Tables that stay in their silos" in texts["tables"]


@pytest.mark.rarely(
    "CHANGELOG.md", "CONTRIBUTING.md", "README.md", "SECURITY.md", "docs", "fedmpi", "mkdocs.yml", "reproduction"
)
@pytest.mark.parametrize("tool", NEEDED)
def test_the_site_is_built_and_its_links_names_and_settings_are_there(tool, tmp_path):
    missing = [name for name in (*NEEDED[tool], "mkdocstrings_handlers.python") if not is_here(name)]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    write_pages(tmp_path / "source")
    words = [sys.executable, "-m", tool, "build", "--strict"]
    options = {"cwd": tmp_path / "source", "env": environment(), "capture_output": True, "text": True}
    ended = subprocess.run(words, **options)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    site = tmp_path / "source" / "site"
    every_link_leads_to_a_page_and_an_anchor(site)
    pages_load_nothing_from_elsewhere(site)
    the_page_of_functions_has_signatures_and_every_argument_of_train(site)
    the_settings_are_in_sections_below_a_filter(site)
    if shutil.which("chromium"):
        the_filter_leaves_the_rows_with_its_words_and_no_empty_table(site)


def every_link_leads_to_a_page_and_an_anchor(site):
    read = {path: Reader(path) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(read) == sum(len(group) for _, group in navigation())
    wrong = []
    for path, page in read.items():
        for link in [*page.links, *page.loads]:
            parts = urllib.parse.urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchor = urllib.parse.unquote(parts.fragment)
            is_right = target.is_file() and (not anchor or target not in read or anchor in read[target].anchors)
            wrong += [] if is_right or anchor == "__skip" else [f"{path.relative_to(site)}: {link}"]
    assert wrong == []


def pages_load_nothing_from_elsewhere(site):
    for path in site.rglob("*.html"):
        assert [one for one in Reader(path).loads if urllib.parse.urlsplit(one).netloc] == [], path


def the_page_of_functions_has_signatures_and_every_argument_of_train(site):
    text = (site / "api" / "index.html").read_text(encoding="utf-8")
    places = []
    for name in (*(name for name in fedmpi.__all__ if name not in ("__version__", "algorithms")), "Run", "Trace"):
        found = re.search(rf'id="fedmpi\.(\w+\.)*{name}"', text)
        assert found, name
        heading, _, after = text[found.start() :].partition("</h3>")
        assert re.search(rf"\b{name}\b", re.sub("<[^>]+>", "", after[:3000])), f"{name} has no signature"
        assert name == "UserError" or "doc-signature" in after[:300], f"{name} has no signature below its heading"
        places.append((found.start(), name))
    first = [name for _, name in sorted(places)]
    assert first[:4] == ["train", "average", "join", "simulate"] and first[-1] == "Federation"
    for name in inspect.signature(fedmpi.train).parameters:
        assert re.search(rf"<code[^>]*>{name}</code>", text), f"train: {name}"


def the_settings_are_in_sections_below_a_filter(site):
    text = (site / "settings" / "index.html").read_text(encoding="utf-8")
    assert text.index('id="filter"') < text.index(">The run<")
    for key in ("participation", "algorithm.fresh_weight", "task.removed_share", "partition.concentration"):
        assert f"<code>{key}</code>" in text
    for section in ("rounds", "data", "folder", "faults", "algorithm", "partition"):
        assert f'id="{section}"' in text


def the_filter_leaves_the_rows_with_its_words_and_no_empty_table(site):
    page = site / "settings" / "index.html"
    (page.parent / "filtered.html").write_text(
        page.read_text(encoding="utf-8").replace("</body>", f"<script>{FILL}</script></body>"), encoding="utf-8"
    )
    browser = ["chromium", "--headless=new", "--no-sandbox", "--virtual-time-budget=5000", "--dump-dom"]
    ended = subprocess.run(
        [*browser, (page.parent / "filtered.html").as_uri()], capture_output=True, text=True, timeout=300
    )
    assert "<title>first_batch_size 1 of 1</title>" in ended.stdout, re.findall("<title>.*</title>", ended.stdout)


# Write into the title: the visible settings, and how many of the visible boxes of tables have one.
FILL = """addEventListener("load", () => setTimeout(() => {
  const field = document.getElementById("filter");
  field.value = "first_batch_size";
  field.dispatchEvent(new Event("input"));
  const visible = (words) => [...document.querySelectorAll(words)].filter((one) => one.getClientRects().length);
  const names = visible("article tbody tr td:first-child").map((one) => one.textContent.trim());
  const boxes = visible("article table, article .md-typeset__scrollwrap:not(:has(table tbody))");
  document.title = names.join() + " " + names.length + " of " + boxes.length;
}, 500));"""
