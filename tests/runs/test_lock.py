"""The lock of a run folder: one owner, whether or not the file system has `flock`, and whichever node it is on."""

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest
from helpers import forked

from fedmpi.ground.errors import UserError
from fedmpi.runs import lock
from fedmpi.runs.lock import RunLock

HOLD = "import pathlib, sys, time; from fedmpi.runs.lock import RunLock; RunLock(pathlib.Path(sys.argv[1])); print(1, flush=True); time.sleep(100)"  # noqa: E501


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    for name, seconds in {"OUTLIVES": 0.4, "LIFETIME": 1.0, "REFRESH": 0.1, "SETTLES": 0.3}.items():
        monkeypatch.setattr(lock, name, seconds)


@pytest.fixture(params=["flock", "no flock"])
def file_system(request, monkeypatch):
    """File systems with `flock`, and one without: it says so."""
    if request.param == "no flock":
        monkeypatch.setattr(lock, "_flock", lambda file: None)
    return request.param


@contextlib.contextmanager
def other_process(folder):
    """A process that holds the lock."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "1\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def owner(folder):
    return json.loads((folder / ".lock").read_text())


def test_one_process_holds_it_and_is_named(tmp_path, file_system, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    with other_process(tmp_path) as process:
        words = (
            rf"^run folder {tmp_path}: job 4711 \(process {process.pid} on \S+, since [-\d: ]+\) is still writing to it"
        )
        with pytest.raises(UserError, match=words):
            RunLock(tmp_path)
    RunLock(tmp_path).release()  # a killed owner has none
    assert (tmp_path / ".lock").read_bytes() == b""


def test_a_stopped_owner_still_holds_it(tmp_path, file_system):
    with other_process(tmp_path) as process:
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(UserError, match=f"process {process.pid} on"):
            RunLock(tmp_path)


def test_a_job_that_is_ending_is_waited_for(tmp_path, file_system, monkeypatch):
    monkeypatch.setattr(lock, "OUTLIVES", 20)
    with other_process(tmp_path) as process:
        os.kill(process.pid, signal.SIGTERM)
        RunLock(tmp_path).release()


def test_another_nodes_owner_lives_as_long_as_it_writes(tmp_path, file_system, monkeypatch):
    first = RunLock(tmp_path)
    monkeypatch.setattr(lock, "_this_node", lambda: ("node2", "another start"))
    monkeypatch.setattr(lock, "_flock", lambda file: True if file_system == "flock" else None)  # not the first's
    with pytest.raises(UserError, match=f"process {os.getpid()} on"):
        RunLock(tmp_path)
    first._ends.set()  # it dies: nothing is written any more, and nothing says so
    began = time.monotonic()
    second = RunLock(tmp_path)
    assert time.monotonic() - began >= 1.0 and owner(tmp_path)["host"] == "node2"
    second.release()


def test_a_reused_process_number_is_another_process(tmp_path, file_system):
    (tmp_path / ".lock").write_text(json.dumps({**lock._this_process(), "start": "1", "token": "x"}))
    RunLock(tmp_path).release()


@pytest.mark.parametrize("content", [b"", b"\0" * 100])
def test_an_empty_lock_is_nobodys(tmp_path, content):
    (tmp_path / ".lock").write_bytes(content)
    RunLock(tmp_path).release()


@pytest.mark.parametrize("content", [b"{", b"[]", b"7", b'{"pid": []}', b"[" * 900, bytes(range(256))])
def test_what_is_no_lock_stays_as_it_is(tmp_path, file_system, content):
    (tmp_path / ".lock").write_bytes(content)
    with pytest.raises(UserError, match="lock: fedmpi did not write it"):
        RunLock(tmp_path)
    assert (tmp_path / ".lock").read_bytes() == content


def test_an_owner_that_was_taken_for_dead_notices(tmp_path):
    first = RunLock(tmp_path)
    first.check()
    (tmp_path / ".lock").write_text(json.dumps({"host": "node2", "pid": 1, "token": "another"}))
    deadline = time.monotonic() + 10
    while not first.is_doubtful and time.monotonic() < deadline:
        time.sleep(0.05)
    assert first.is_doubtful
    with pytest.raises(UserError, match=r"another job \(process 1 on node2, since None\) has taken it over"):
        first.check()
    first.release()
    assert "another" in (tmp_path / ".lock").read_text()  # it is not the first's to empty


def test_an_owner_that_was_suspended_looks_again_before_it_writes(tmp_path):
    first = RunLock(tmp_path)
    assert not first.is_doubtful
    first._ends.set()  # as if it were suspended: its name is not written any more
    time.sleep(3 * lock.REFRESH)
    assert first.is_doubtful
    first.check()
    first.release()


@pytest.mark.rarely
@pytest.mark.alone
def test_a_forked_child_does_not_hold_it(tmp_path):
    first = RunLock(tmp_path)
    child = forked(time.sleep, 30)
    try:
        first._ends.set()
        first._close()  # as if the first had been killed: its file is closed, and nothing is written
        RunLock(tmp_path).release()
    finally:
        child.kill()
        child.join()


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_a_lock_that_is_no_file_is_refused(tmp_path, kind):
    path = tmp_path / ".lock"
    {"link": lambda: path.symlink_to("/etc/hostname"), "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}[kind]()
    with pytest.raises(UserError, match=r"\.lock: is a link, a folder, a FIFO or a device"):
        RunLock(tmp_path)


def _take(folder, barrier, results):
    barrier.wait()
    try:
        RunLock(folder)
        results.put("holds it")
        time.sleep(3)
    except UserError as error:
        results.put(str(error))
    results.close()
    results.join_thread()
    os._exit(0)


@pytest.mark.rarely
@pytest.mark.alone
def test_of_many_processes_that_take_a_dead_owners_lock_one_gets_it(tmp_path, file_system):
    dead = {"host": "node2", "boot": "", "pid": 1, "token": "x", "count": 1}
    (tmp_path / ".lock").write_text(json.dumps(dead))
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(5), context.Queue()
    processes = [forked(_take, tmp_path, barrier, results) for _ in range(5)]
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert found.count("holds it") == 1, found
