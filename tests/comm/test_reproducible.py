"""--aggregation reproducible: the same bits on any number of ranks and nodes, by each transport and each MPI."""

import hashlib

import h5py
import pytest
from helpers import start, train

FOUND = {}


@pytest.mark.rarely("fedmpi/comm", "fedmpi/aggregation", "fedmpi/federation")
def test_same_bits_in_every_placement(any_mpi):
    done = start(4, "-m", "reproducible", mpi=any_mpi)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("same bits:")]
    assert len(lines) == 4
    assert lines == FOUND.setdefault("lines", lines)  # those of the MPI before


@pytest.mark.rarely("fedmpi/comm", "fedmpi/aggregation", "fedmpi/federation")
@pytest.mark.parametrize(
    ("ranks", "program", "last"),
    [(4, "masked", "hidden 7"), (4, "masked_cases", "same bits in "), (3, "spied", "hidden: allreduce")],
)
def test_masked_sums_have_the_same_bits_and_show_no_rows(any_mpi, ranks, program, last):
    done = start(ranks, "-m", program, mpi=any_mpi, timeout=1500, is_forked=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith(last)


def bits(out):
    """The hash of all rows of the only run under `out`."""
    (folder,) = out.iterdir()
    with h5py.File(folder / "model.h5") as file:
        rows = [file["rows"][name][:].tobytes() for name in sorted(file["rows"])]
    return hashlib.sha256(b"".join(rows)).hexdigest()


@pytest.mark.parametrize("settings", [("--model", "batchnorm.Net", "--weighting", "samples", "--participation", 0.6)])
def test_a_trained_model_does_not_depend_on_the_number_of_ranks(tmp_path, settings):
    found = set()
    for ranks in (1, 3):
        out = tmp_path / str(ranks)
        done = train(ranks, out, "--clients", 5, "--rounds", 3, "--aggregation", "reproducible", *settings)
        assert done.returncode == 0, done.stderr
        found.add(bits(out))
    assert len(found) == 1
