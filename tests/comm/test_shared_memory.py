"""What fedmpi does where MPI would find little shared memory; real jobs with it are in tests/comm/job."""

import os
import types

import pytest

from fedmpi.comm.start import shared_memory

MIB = 1 << 20


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """A function that prepares 14 ranks of this machine for shared memory of some size; the folder is tmp_path."""
    monkeypatch.setattr(shared_memory, "SHARED_FOLDER", str(tmp_path))
    monkeypatch.setattr(shared_memory.os, "environ", {"MPI_LOCALNRANKS": "14", "MPI_LOCALRANKID": "0"})

    def prepare(size, left=None, flags=0, **variables):
        free = (size if left is None else left) // 512
        found = types.SimpleNamespace(f_blocks=size // 512, f_frsize=512, f_bavail=free, f_flag=flags)
        monkeypatch.setattr(shared_memory.os, "statvfs", lambda folder: found)
        os.environ.update(variables)
        shared_memory.prepare_shared_memory()
        return {name: os.environ[name] for name in shared_memory.SMALLER if name in os.environ}

    return prepare


def refused(capsys, prepare, *given, **settings):
    """The one line with which the process ends."""
    with pytest.raises(SystemExit) as ended:
        prepare(*given, **settings)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_a_small_memory_is_used_sparingly(memory):
    """Twice 14 times 5.4 MB is enough of it; what the user has set stays."""
    assert memory(152 * MIB) == {} == memory(145 * MIB)
    assert memory(144 * MIB) == {"MPIR_CVAR_CH4_SHM_POSIX_IQUEUE_NUM_CELLS": "8", "UCX_TLS": "^posix"}
    assert memory(5 * MIB, UCX_TLS="self")["UCX_TLS"] == "self"


def test_too_little_is_one_line_of_the_first_rank(memory, capsys, tmp_path, monkeypatch):
    expected = "expected 4,102 KiB that 14 ranks can write (in a container: --shm-size)\n"
    assert refused(capsys, memory, 4 * MIB) == f"fedmpi: error: {tmp_path} has 4,096 KiB left: {expected}"
    assert (
        refused(capsys, memory, 64 * MIB, flags=os.ST_RDONLY) == f"fedmpi: error: {tmp_path} is read-only: {expected}"
    )
    large = expected.replace("4,102", "73,828")
    assert refused(capsys, memory, 1024 * MIB, left=MIB) == f"fedmpi: error: {tmp_path} has 1,024 KiB left: {large}"
    assert refused(capsys, memory, 4 * MIB, MPI_LOCALRANKID="1") == ""
    monkeypatch.setattr(shared_memory, "SHARED_FOLDER", str(tmp_path / "missing"))
    line = refused(capsys, memory, 1024 * MIB, MPI_LOCALRANKID="0")
    assert line == f"fedmpi: error: {tmp_path}/missing is missing: {large}"
    memory(0, MPI_LOCALNRANKS="1")  # alone, it needs none


def test_files_of_killed_jobs_are_named_if_they_are_the_users(memory, capsys, tmp_path, monkeypatch):
    names = ["mpich_shm_1", "osc_1", "sm_segment.1", "ucx_shm_1", "vader_segment.1"]
    for name in [*names, "fedmpi-rows-1", "another's"]:
        (tmp_path / name).touch()
    line = refused(capsys, memory, MIB)
    _, command = line.split("; if no job of yours runs, killed ones have left files: rm ")
    assert sorted(command.split()) == [f"{tmp_path}/{name}" for name in names]
    monkeypatch.setattr(shared_memory.os, "getuid", lambda: -1)
    assert refused(capsys, memory, MIB).endswith("--shm-size)\n")


@pytest.mark.parametrize("in_container", [True, False])
def test_open_mpi_in_a_container_has_files_in_its_launchers_folder(memory, tmp_path, monkeypatch, in_container):
    monkeypatch.setattr(shared_memory, "container", lambda: in_container)
    name = "OMPI_MCA_btl_sm_backing_directory"
    memory(152 * MIB, PMIX_SERVER_TMPDIR=str(tmp_path / "missing"))
    assert name not in os.environ
    memory(152 * MIB, PMIX_SERVER_TMPDIR=str(tmp_path))
    assert os.environ.get(name) == (str(tmp_path) if in_container else None)
