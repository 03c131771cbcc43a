"""Which tests run only now and then: those marked `rarely`, unless what they test has changed.

``@pytest.mark.rarely("fedmpi/comm", "launch")`` is for a test that takes long and fails only if files in these places
change. It runs with ``--all``, if its file is named on the command line, and if a place, or the test's own file,
differs from the state in `GREEN`: the last one on which ``./launch/test.sh --all`` passed.
"""

import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent
GREEN = ROOT / "tests" / "all_passed"  # a commit


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
