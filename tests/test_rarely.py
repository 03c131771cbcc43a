"""Tests that run rarely run when what they test has changed, and nobody can forget them."""

from rarely import ROOT, SLOW, goes_through, has_changed, rooms


def test_a_place_is_a_file_or_all_in_a_folder():
    changed = ["fedmpi/comm/sums/mpi.py", "setup.py"]
    assert has_changed(["fedmpi/comm"], changed) and has_changed(["launch", "setup.py"], changed)
    assert not has_changed(["fedmpi/co", "fedmpi/common", "launch", "setup"], changed)
    assert not has_changed(["fedmpi/comm"], [])


def test_if_it_is_unknown_what_has_changed_everything_has():
    assert has_changed(["fedmpi/comm"], None)


def test_rooms_are_named_once():
    assert rooms(["fedmpi/comm/a.py", "fedmpi/comm/b.py", "docs/data.md"]) == ["docs", "fedmpi/comm"]


def test_what_a_test_file_goes_through_is_what_it_names_and_what_that_imports(tmp_path):
    file = tmp_path / "test_report.py"
    file.write_text("from fedmpi.cli.report import figures\n")
    places = goes_through(file)
    assert {"fedmpi/cli/report", "fedmpi/runs", "fedmpi/ground/errors.py"} <= {*places}  # errors.py: imported by runs
    assert not has_changed(places, ["fedmpi/cli/bench/rounds.py", "fedmpi/cli/predict/__main__.py", "docs/data.md"])
    file.write_text("from helpers import train\nSCRIPT = 'launch/mpirun.sh'\n")
    goes_through.cache_clear()
    places = goes_through(file)
    for path in (
        "fedmpi/comm/sums/mpi.py",
        "fedmpi/algorithms/fafed.py",
        "fedmpi/data/partitions/iid.py",
        "fedmpi/launch/mpirun.sh",
    ):
        assert has_changed(places, [path]), path
    file.write_text("import fedmpi\nfed = fedmpi.join(model)\n")
    goes_through.cache_clear()
    assert has_changed(goes_through(file), ["fedmpi/own_loop/join.py"])


def test_every_room_is_gone_through_by_slow_tests():
    files = [file for name in SLOW for file in (ROOT / "tests" / name).rglob("test_*.py")]
    gone_through = {place for file in files for place in goes_through(file)}
    assert {f"fedmpi/{path.parent.name}" for path in (ROOT / "fedmpi").glob("*/__init__.py")} <= gone_through
