"""Names and rare codes that are planted in one silo's data appear nowhere outside of it with the default settings."""

import json

import pytest
from helpers import PROGRAMS, launchers, start

# What the table says: by it the test sees that it would find a name.
KNOWN = {
    "name of the silo": {"sent as names", "in clients.json"},
    "word with --least 1": {"sent as words", "in model.json"},
}
FEW = (
    "category",
    "category of one of the files of tables",
    "not a number",
    "names in the file, by doctor",
    "word",
    "error of a metric",
    *KNOWN,
)


def check(ranks, out, planting, *cases, mpi="default"):
    job = start(ranks, PROGRAMS / "planted.py", out, planting, *cases, mpi=mpi, is_forked=False)
    assert job.returncode == 0, job.stdout + job.stderr
    lines = [json.loads(line[len("FOUND ") :]) for line in job.stdout.splitlines() if line.startswith("FOUND ")]
    assert len(lines) >= max(len(cases), 1)
    for line in lines:
        if line["case"] in KNOWN:
            assert KNOWN[line["case"]] <= {*line["outside"]}, line
        else:
            assert not line["outside"], line
        assert line["errors"] in (0, ranks), line
    return {line["case"]: line["errors"] > 0 for line in lines}


@pytest.mark.rarely
def test_no_name_leaves_its_silo(tmp_path):
    ended = check(2, tmp_path, "1", *FEW)
    assert ended == dict(zip(FEW, (False, False, True, True, False, True, False, False)))
    # Only the silo itself sees what is wrong; the others know where.
    printed = [(tmp_path / "case-not-a-number" / f"printed-{rank}.txt").read_text() for rank in (0, 1)]
    assert "on rank 1: an error in line 9, which that rank prints" in printed[0]
    assert "line 9 has plAnted-1-nAme in column age" in printed[1]


@pytest.mark.rarely
@pytest.mark.parametrize("mpi", launchers())
@pytest.mark.parametrize("planting", ["1", "all"])
def test_no_name_leaves_its_silo_by_any_door(tmp_path, planting, mpi):
    assert len(check(2, tmp_path, planting, mpi=mpi)) > 40


@pytest.mark.rarely
def test_no_name_leaves_one_of_three_silos(tmp_path):
    check(3, tmp_path, "2", *FEW)
