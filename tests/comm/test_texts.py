"""What fedmpi says of clients, and of a launcher whose processes are alone."""

import types

import pytest

from fedmpi.comm.ranks import describe_clients
from fedmpi.comm.start import launch

OTHER_MPI = "this mpirun belongs to another MPI than mpi4py's, {} (python -m mpi4py --mpi-library)"
BY_SRUN = "mpi4py uses {}, which needs srun --mpi={}, or its own mpirun instead of srun"


def test_clients_in_words():
    assert [describe_clients(one) for one in ({3}, [5, 3, 4], {4, 1}, [0, 1, 2, 4])] == [
        "client 3",
        "clients 3 to 5",
        "clients 1, 4",
        "clients 0, 1, 2, 4",
    ]


@pytest.mark.parametrize(("vendor", "kind"), [("MPICH", "pmi2"), ("Open MPI", "pmix")])
@pytest.mark.parametrize(
    ("launcher", "slurm", "mpich", "expected"),
    [
        ("torchrun or a relative (WORLD_SIZE)", False, False, "fedmpi's ranks are those of MPI: start the program with "
         "mpirun -np, without torchrun"),
        ("the launcher (PMI_SIZE)", False, True, OTHER_MPI),
        ("the launcher (PMI_SIZE)", True, True, OTHER_MPI),
        ("the launcher (PMI_SIZE)", True, False, BY_SRUN),
        ("srun (SLURM_STEP_NUM_TASKS)", True, False, BY_SRUN),
        ("mpirun of Open MPI (OMPI_COMM_WORLD_SIZE)", True, False, OTHER_MPI),
    ],
)  # fmt: skip
def test_the_remedy_depends_on_the_launcher(monkeypatch, launcher, slurm, mpich, expected, vendor, kind):
    monkeypatch.setattr(launch, "MPI", types.SimpleNamespace(get_vendor=lambda: (vendor, (5, 0))))  # of either
    for name, is_set in (("SLURM_STEP_NUM_TASKS", slurm), ("MPI_LOCALNRANKS", mpich)):
        monkeypatch.setenv(name, "2") if is_set else monkeypatch.delenv(name, raising=False)
    for is_direct in (True, False):
        monkeypatch.setattr(launch, "started_directly", lambda is_direct=is_direct: is_direct)
        variable = launcher.split()[-1].strip("()")
        more = f", or {variable} comes from an outer job: unset it" * (expected == OTHER_MPI and not is_direct)
        assert launch._remedy(launcher) == expected.format(vendor, kind) + more


@pytest.mark.parametrize(("local", "expected"), [({}, 7), ({"MPI_LOCALRANKID": "1"}, 1), ({"MPI_LOCALRANKID": "?"}, 7)])
def test_the_number_on_a_machine_is_the_launchers_or_that_of_all(monkeypatch, local, expected):
    for name in ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"):
        monkeypatch.delenv(name, raising=False)
    for name, text in local.items():
        monkeypatch.setenv(name, text)
    assert launch._number_here(7) == expected
