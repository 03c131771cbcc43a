"""Tests that run rarely run when what they test has changed, and nobody can forget them."""

from rarely import has_changed, rooms


def test_a_place_is_a_file_or_all_in_a_folder():
    changed = ["fedmpi/comm/mpi.py", "setup.py"]
    assert has_changed(["fedmpi/comm"], changed) and has_changed(["launch", "setup.py"], changed)
    assert not has_changed(["fedmpi/co", "fedmpi/common", "launch", "setup"], changed)
    assert not has_changed(["fedmpi/comm"], [])


def test_if_it_is_unknown_what_has_changed_everything_has():
    assert has_changed(["fedmpi/comm"], None)


def test_rooms_are_named_once():
    assert rooms(["fedmpi/comm/a.py", "fedmpi/comm/b.py", "docs/data.md"]) == ["docs", "fedmpi/comm"]
