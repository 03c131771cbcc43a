"""Which tests run only now and then: those marked `rarely`, unless what they test has changed.

``@pytest.mark.rarely("fedmpi/comm", "launch")`` is for a test that takes long and fails only if files in these places
change. It runs with ``--all``, if its file is named on the command line, and if a place, or the test's own file,
differs from the state in `GREEN`: the last one on which ``./launch/test.sh --all`` passed. A file may be marked as a
whole, with ``@pytest.mark.always`` at those of its tests that run all the same: one of each kind of start and end.

All tests in `SLOW` are such tests without a mark: most of them start programs. They test the rooms that their file
names and all that these import in turn. The first of each file runs all the same. A mark
without places means these rooms, too.
"""

import functools
import pathlib
import re
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
GREEN = ROOT / "tests" / "all_passed"  # a commit
SLOW = ("cli", "comm/job", "config/presets", "fuzz", "launch", "own_loop", "runs/checkpoints", "slurm", "training")
SLOW += ("test_public_face.py", "test_python_api.py")
BESIDE = ("docs", "examples", "launch", "reproduction", "slurm")  # places outside the package
DEEP = ("cli", "comm", "config", "ground", "runs")  # rooms whose parts count as rooms
FOUND_BY_NAME = ("aggregation", "algorithms", "config/presets", "data", "models", "oracles", "tasks")  # with plug-ins
# What jobs of SLURM go through.
SLURM = ("slurm", "launch", "reproduction/job.sbatch", "tests/slurm")
SLURM += tuple(f"fedmpi/{room}" for room in ("cli/doctor", "cli/sweep", "comm", "runs"))


def changed_since_green():
    """(paths that differ from the state in `GREEN`, in words since when); None for the paths if that is unknown."""
    commit = GREEN.read_text(encoding="ascii").strip() if GREEN.is_file() else ""
    known = _git("cat-file", "-e", f"{commit}^{{commit}}") if commit else None
    if known is None:
        return None, "it is unknown on which state all tests passed"
    changed = _git("diff", "--name-only", commit)
    new = _git("ls-files", "--others", "--exclude-standard")
    return sorted({*changed.splitlines(), *new.splitlines()}), f"since {commit[:10]}, on which all tests passed"


def has_changed(places, changed):
    """Whether a changed path is one of some places, or lies in one; slurm/ and launch/ are in fedmpi/, too."""
    paths = {path.removeprefix("fedmpi/") for path in changed or ()} | {*(changed or ())}
    return changed is None or any(path == place or path.startswith(f"{place}/") for path in paths for place in places)


@functools.cache
def goes_through(file):
    """The places that a test file goes through: what it names, and what that imports in turn.

    Args:
        file: a `pathlib.Path`. A file with tests that start programs goes through all of ``fedmpi.train``.
    """
    text, imports = file.read_text(encoding="utf-8"), _imports()
    named = {_room(words) for words in re.findall(r"\bfedmpi[./](\w+)(?:[./](\w+))?", text)}
    named |= {"train", *FOUND_BY_NAME} if re.search(r"^from helpers import", text, re.MULTILINE) else set()
    named |= set() if named <= imports.keys() else {*imports}  # an object, like fedmpi.join: it may be anywhere
    found = set()
    while named:
        found |= named
        named = {other for name in named for other in imports.get(name, ())} - found
    beside = [place for place in BESIDE if re.search(rf"\b{place}\b", text)]
    return [str(_path(name).relative_to(ROOT)) for name in sorted(found)] + beside


@functools.cache
def _imports():
    """Room, or file beside the rooms, of the package -> those that it imports anywhere in its files."""
    found = {}
    for path in sorted((ROOT / "fedmpi").rglob("*.py")):
        name = _room(path.relative_to(ROOT / "fedmpi").with_suffix("").parts)
        text = path.read_text(encoding="utf-8")
        others = {_room(words) for words in re.findall(IMPORT, text, re.MULTILINE)}
        for package, names in re.findall(r"^\s*from fedmpi(?:\.(\w+))? import ([\w, ]+)", text, re.MULTILINE):
            others |= {_room((package, word) if package else (word,)) for word in re.findall(r"\w+", names)}
        others |= {*FOUND_BY_NAME} if "ground/registry" in others else set()
        found.setdefault(name, {"__init__"}).update(other for other in others if _path(other).exists())
    return found


IMPORT = r"^\s*(?:from|import) fedmpi\.(\w+)(?:\.(\w+))?"


def _room(words):
    """The room of a path or dotted name below the package; of those in `DEEP`, the part of it."""
    return "/".join(words[:2]).removesuffix("/__init__").rstrip("/") if words[0] in DEEP else words[0]


def _path(room):
    path = ROOT / "fedmpi" / room
    return path if path.is_dir() else path.with_suffix(".py")


def rooms(changed):
    """The places of changed paths, short enough to be printed."""
    return sorted({"/".join(path.split("/")[: 2 if path.startswith(("fedmpi/", "tests/")) else 1]) for path in changed})


def _git(*words):
    ended = subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True)
    return ended.stdout if ended.returncode == 0 else None
