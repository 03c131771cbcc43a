"""--aggregation reproducible: the same bits on any number of ranks and nodes, by each transport and each MPI."""

import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import h5py
import pytest
from helpers import ROOT, execute, launch_words, start, train

FOUND = {}
SPIED = ("-m", "spied_files", "--clients", 3, "--aggregation", "masked", "--algorithm", "scaffold", "--rounds", 3)
SPIED += ("--checkpoint_every", 1, "--model", "mlp", "--model.hidden", 1400)  # 105,010 parameters
AS_USER = "u=$((2000 + ${OMPI_COMM_WORLD_RANK:-$PMI_RANK})); export HOME=$HOME/$u; mkdir $HOME; chown $u $HOME; "
AS_USER += 'exec setpriv --reuid $u --regid $u --clear-groups "$@"'


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
    [
        (4, "masked", "hidden 7"),
        (4, "masked_cases", "same bits in "),
        (2, "masked_tasks", "same bits in 17 runs"),
        (3, "spied", "hidden: allreduce"),
    ],
)
def test_masked_sums_have_the_same_bits_and_show_no_rows(any_mpi, ranks, program, last):
    done = start(ranks, "-m", program, mpi=any_mpi, timeout=1500, is_forked=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith(last)


def looked_at(done):
    """[files, files of shared memory, processes of other users] that each of 3 ranks has looked at."""
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("looked at")]
    assert len(lines) == 3
    return [[int(number) for number in re.findall(r"\d+", line)] for line in lines]


@pytest.mark.rarely("fedmpi/comm", "fedmpi/aggregation", "fedmpi/runs", "fedmpi/training")
def test_no_file_shows_rows(tmp_path, any_mpi):
    """Clients' checkpoints lie in a folder of each rank's user, unless the user names another: here the run folder."""
    out, state = tmp_path / "out", tmp_path / "state"
    env = {"LOOKED_AT": str(out), "XDG_STATE_HOME": str(state)}
    done = start(3, *SPIED, "--out", out, mpi=any_mpi, env=env, is_forked=False)
    assert min(files for files, _, _ in looked_at(done)) >= 10
    place = state / "fedmpi" / "checkpoints"
    assert done.stderr.count(f"its clients' rows in a folder of its user, {place}, not in the run folder") == 1
    assert place.stat().st_mode & 0o777 == 0o700 and not list(out.rglob("client-*"))
    assert {file.name for file in place.rglob("client-*")} == {f"client-000{c}.safetensors" for c in range(3)}
    shutil.rmtree(out)
    done = start(3, *SPIED, "--out", out, "--checkpoint_clients", out, mpi=any_mpi, env=env, is_forked=False)
    assert done.returncode != 0 and "has a row of this rank's clients" in done.stderr
    files = [*place.rglob("*.safetensors"), *out.rglob("client-*"), *out.rglob("server.safetensors")]
    assert len(files) >= 8 and all(file.stat().st_mode & 0o77 == 0 for file in files)


@pytest.mark.rarely("fedmpi/comm", "fedmpi/aggregation", "fedmpi/runs", "fedmpi/training")
def test_other_users_see_no_rows(any_mpi):
    """Each rank is a user of its own, which root alone can do; what each MPI needs for it is in docs/privacy.md."""
    as_other = ["setpriv", "--reuid", "2000", "--clear-groups", sys.executable, "-c", "import torch"]
    if os.getuid() or subprocess.run(as_other, check=False, capture_output=True).returncode:
        pytest.skip("not root, or other users cannot start this Python")
    if any_mpi == "openmpi":
        options, env = OPENMPI_OF_USERS, {"PMIX_MCA_psec": "none", "PMIX_MCA_gds": "hash"}
    else:
        options, env = (), {"UCX_TLS": "tcp,self", "MPIR_CVAR_NOLOCAL": "1"}
    with tempfile.TemporaryDirectory() as folder:
        shared = pathlib.Path(folder)
        shared.chmod(0o777)
        command, variables = launch_words(3, *SPIED, "--out", shared / "out", mpi=any_mpi, options=options)
        place = command.index(sys.executable)
        command[place:place] = ["sh", "-c", AS_USER, "-"]
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "programs"), *sys.path])
        env |= {"LOOKED_AT": folder, "HOME": folder, "XDG_STATE_HOME": "", "PYTHONPATH": path}
        found = looked_at(execute(command, env=variables | env))
        assert min(others for _, _, others in found) >= 2
        assert sorted(files for files, _, _ in found)[1] >= 10, "those of the run folder, which rank 0 has written"
        assert len(list(shared.rglob(".local/state/fedmpi/checkpoints/*/*/client-*"))) >= 3


OPENMPI_OF_USERS = ("--mca", "pml", "ob1", "--mca", "btl", "self,tcp")


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
