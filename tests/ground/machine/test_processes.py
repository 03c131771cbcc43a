"""Processes of a machine: a number that may belong to another machine gets no signal."""

import os

from fedmpi.ground.machine import processes


def test_a_machine_that_does_not_say_which_start_it_is_gets_no_signal(monkeypatch):
    """Two containers of one name on two machines could be equal, down to a process's number."""
    machine, number, start = processes.describe_process()
    assert machine > 0 and number == os.getpid() and start > 0
    monkeypatch.setattr(processes, "boot", lambda: "")
    assert processes.describe_process() == (0, os.getpid(), 0)
    assert not processes.is_stopped(machine, number, start) and not processes.is_stopped(0, number, 0)
