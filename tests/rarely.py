"""Which tests run only now and then: those marked `rarely`, unless what they test has changed.

``@pytest.mark.rarely("fedmpi/comm", "launch")`` is for a test that takes long and fails only if files in these places
change. It runs with ``--all``, if its file is named on the command line, and if a place, or the test's own file,
differs from the state in `GREEN`: the last one on which ``./launch/test.sh --all`` passed. A file may be marked as a
whole, with ``@pytest.mark.always`` at those of its tests that run all the same: one of each kind of start and end.
"""

import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent
GREEN = ROOT / "tests" / "all_passed"  # a commit
# What every training goes through.
LOOP = (
    "setup.py",
    *[
        f"fedmpi/{room}"
        for room in ("aggregation", "algorithms", "comm", "federation", "machine", "membership", "models")
    ],
    *[f"fedmpi/{room}" for room in ("oracles", "errors.py", "settings.py", "streams.py", "registry.py", "text.py")],
)
PROGRAM = (
    *LOOP,
    *[f"fedmpi/{room}" for room in ("checkpoints", "config", "data", "program", "runs", "tasks", "training")],
    *[f"fedmpi/{file}.py" for file in ("train", "own_files", "run_files")],
)


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
    """Whether a changed path is one of some places, or lies in one of them."""
    return changed is None or any(path == place or path.startswith(f"{place}/") for path in changed for place in places)


def rooms(changed):
    """The places of changed paths, short enough to be printed."""
    return sorted({"/".join(path.split("/")[: 2 if path.startswith(("fedmpi/", "tests/")) else 1]) for path in changed})


def _git(*words):
    ended = subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True)
    return ended.stdout if ended.returncode == 0 else None
