"""The transports give the same sums, on any number of ranks and nodes, and leave nothing behind."""

import pathlib
import re

import h5py
import numpy as np
import pytest
from helpers import start, train

pytestmark = pytest.mark.rarely

SHARED = pathlib.Path("/dev/shm")
# Nodes with unequal numbers of ranks are among them: some of their ranks sum no slice.
CASES = [(1, "real"), (3, "real,011,001"), (4, "0011"), (5, "real,01010")]


def result(out):
    """[dim] x of the run whose folder lies in `out`."""
    (folder,) = out.iterdir()
    with h5py.File(folder / "model.h5") as file:
        return file["rows/x"][:]


def said(done, name):
    """The value beside `name` in the closing table."""
    assert done.returncode == 0, done.stderr
    lines = [line.split(None, 1) for line in done.stdout.splitlines() if line.strip()]
    return next(words[1] for words in lines if words[0] == name)


def sums_agree(ranks, colours, **more):
    done = start(ranks, "-m", "transports", colours, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "done"
    assert done.stdout.count("equal:") == 16 * len(colours.split(","))


@pytest.mark.parametrize(("ranks", "colours"), CASES)
def test_sums_agree(ranks, colours):
    sums_agree(ranks, colours)


@pytest.mark.parametrize(("ranks", "colours"), [(3, "001"), (4, "0100")])
def test_sums_agree_if_only_some_nodes_are_oversubscribed(ranks, colours):
    """MPI does not match one rank's blocking collective with another's nonblocking one."""
    done = start(ranks, "-m", "unequal_nodes", colours, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "done"


@pytest.mark.always
def test_sums_of_two_ranks_agree(any_mpi):
    sums_agree(2, "real", mpi=any_mpi)


@pytest.mark.parametrize(("ranks", "clients", "participation"), [(2, 4, 1), (3, 5, 0.6)])
def test_training_does_not_depend_on_the_transport(tmp_path, ranks, clients, participation):
    runs = {}
    for transport, words in {"allreduce": "Allreduce", "auto": "shared memory"}.items():  # 3 rows are above 64 KiB
        done = train(
            ranks, tmp_path / transport, "--rounds", 4, "--clients", clients, "--participation", participation,
            "--transport", transport
        )  # fmt: skip
        assert said(done, "communication").endswith(f", {words}")
        assert "5 Allreduces" in said(done, "sent")  # the start and four rounds
        runs[transport] = result(tmp_path / transport)
    np.testing.assert_allclose(runs["auto"], runs["allreduce"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("transport", "words"),
    [
        ("staged", "shared memory of the host, staged"),
        ("nccl", "gloo in the place of NCCL"),
    ],
)
def test_transports_for_gpus_also_train_on_the_cpu(tmp_path, transport, words):
    """On the CPU copies stand in for those to a GPU, and gloo for NCCL."""
    runs = {}
    for name in (transport, "allreduce"):
        done = train(2, tmp_path / name, "--rounds", 3, "--clients", 3, "--dtype", "float64", "--transport", name)
        assert said(done, "communication").endswith(f", {words if name == transport else 'Allreduce'}")
        runs[name] = result(tmp_path / name)
    np.testing.assert_allclose(runs[transport], runs["allreduce"], rtol=1e-12, atol=1e-12)


def test_doubtful_sums_end_a_run_on_all_ranks():
    """Of transports that have not run on a GPU, the first sums are compared with MPI's."""
    done = start(2, "-m", "doubtful_sums")
    assert done.returncode == 0, done.stdout + done.stderr
    expected = []
    for name in ("staged", "nccl"):
        differ = f"transport = {name}: its sums differ from MPI's; use --transport allreduce"
        expected += [(0, name, "right"), (1, name, "right")]
        expected += [(rank, f"{name}, wrong", differ) for rank in (0, 1)]
        expected += [(rank, f"{name}, left to compare", "1") for rank in (0, 1)]
    late = "transport = nccl: it did not connect rank 0 in 2 s; use --transport staged"  # it waits for rank 1
    expected += [(rank, "late", late) for rank in (0, 1)]
    without = "transport = shared: some ranks have no GPU; use --transport auto"
    expected += [(rank, "unequal, auto", "1 by Allreduce") for rank in (0, 1)]
    expected += [(rank, "unequal, shared", without) for rank in (0, 1)]
    assert done.stdout.splitlines() == [f"rank {rank}, {what}: {text}" for rank, what, text in expected]


def test_gpu_memory_is_asked_for_by_name_only(tmp_path):
    done = train(2, tmp_path, "--rounds", 2, "--transport", "cuda_aware")
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("fedmpi: error")]
    assert "transport = cuda_aware: it needs rows on a GPU, and they are on the CPU; use --transport auto" in line


def test_small_blocks_take_allreduce(tmp_path):
    done = train(2, tmp_path, "--task", "quadratic", "--rounds", 2)
    assert said(done, "communication").endswith(", Allreduce")


@pytest.mark.always
def test_one_rank_sums_nothing(tmp_path):
    done = train(1, tmp_path, "--rounds", 2, "--clients", 2, "--transport", "shared")
    assert said(done, "communication").endswith(", nothing to sum")


def test_no_room_for_a_window(tmp_path):
    """A node's shared memory is full: all ranks use Allreduce, and one line says why."""
    done = start(2, "-m", "no_window", "--rounds", 2, "--out", tmp_path)
    assert said(done, "communication").endswith(", Allreduce")
    (line,) = [line for line in done.stderr.splitlines() if "transport" in line]
    assert line.startswith("fedmpi: transport shared is not used: /dev/shm has less than")


@pytest.mark.parametrize("ranks", [2, 3])
def test_no_room_for_the_window_that_the_user_named(tmp_path, ranks):
    """Also if only one of two nodes has no room."""
    done = start(ranks, "-m", "no_window", "--rounds", 2, "--transport", "shared", "--out", tmp_path)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("fedmpi: error")]
    assert "transport = shared:" in line
    assert line.endswith("use --transport auto")


@pytest.mark.always
@pytest.mark.skipif(not SHARED.is_dir(), reason="no /dev/shm here")
@pytest.mark.parametrize("end", ["in_order", "abort"])
def test_nothing_is_left_in_shared_memory(tmp_path, end):
    done = start(2, "-m", "leaves_window", end)
    opened = re.findall("window open:(.*)", done.stdout)
    assert len(opened) == 2, done.stderr
    assert (done.returncode == 0) == (end == "in_order")
    # On an abort MPICH itself leaves about 1 MiB a rank; the window would be 8 MiB.
    left = [SHARED / name for name in set(" ".join(opened).split()) if (SHARED / name).exists()]
    assert not [path for path in left if path.stat().st_size >= 8 << 20]
