"""Processes of this machine, on Linux: which is which, which started which, and whether one is stopped."""

import contextlib
import hashlib
import os
import pathlib
import platform
import signal
import time

MACHINE_BYTES = 7  # of a hash, so that it is a positive int64
_STATE, _PARENT, _START = 0, 1, 19  # fields of /proc/PID/stat after the name, see proc(5)


def describe_process():
    """(machine, number, start) that identify this process, as whole numbers; only equal machines can send a signal.

    The machine is 0 if the system does not say it: such a process gets no signal.
    """
    stat = _stat(os.getpid())
    if stat is None:
        return 0, os.getpid(), 0
    booted = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    machine = f"{booted} {os.readlink('/proc/self/ns/pid')} {platform.node()}"
    return int.from_bytes(hashlib.blake2b(machine.encode(), digest_size=MACHINE_BYTES).digest(), "little"), *stat[1:]


def kill_process(machine, process, start):
    """Kill a process of this machine; nothing, if it is another machine's or has ended."""
    if _is_here(machine, process, start):
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGKILL)


def is_stopped(machine, process, start):
    """Whether a process of this machine is stopped, or waits for a disk."""
    return _is_here(machine, process, start) and _stat(process)[_STATE] in "TtD"


def _is_here(machine, process, start):
    stat = _stat(process)
    return machine == describe_process()[0] != 0 and stat is not None and stat[1:] == (process, start)


def seconds_since_start():
    """How long this process has been running; 0.0 where /proc does not say it."""
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])  # field 22 of proc(5): since the machine's start
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, IndexError, ValueError):
        return 0.0


def open_closed_streams():
    """Open what is closed of standard input, output and error, or the next file is, and gets what is printed."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)


# Who started the process -> (variable with the number of processes started, variable with the number of this one). The
# innermost launcher comes first: ranks of an mpirun inside a SLURM job also inherit SLURM's variables from its daemon.
LAUNCHERS = {
    "the launcher": ("PMI_SIZE", "PMI_RANK"),  # MPICH and its relatives, srun --mpi=pmi2
    "mpirun of Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "flux run": ("FLUX_JOB_SIZE", "FLUX_TASK_RANK"),
    "the launcher of PALS": ("", "PALS_RANKID"),
    "torchrun or a relative": ("WORLD_SIZE", "RANK"),
    "srun": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    "the launcher of PMIx": ("", "PMIX_RANK"),
}


def started_by(environment=os.environ):
    """(the launcher of a process, how many processes it started or more, the number of this one)."""
    found = []
    for launcher, names in LAUNCHERS.items():
        size, number = (environment.get(name, "") for name in names)
        if number.isdigit():
            is_known = size.isdigit()
            at_least = int(size) if is_known else int(number) + 1
            found.append((not is_known, f"{launcher} ({names[not is_known]})", at_least, int(number)))
    # The first that says how many there are; if none does, there are those up to this one.
    return min(found, key=lambda one: one[0], default=(True, "no launcher", 1, 0))[1:]


def leave_job():
    """In a worker, which imports the user's program anew: if that begins MPI, then alone.

    As a second process of its rank, MPICH would end the job, and Open MPI would wait forever.
    """
    for name in [name for name in os.environ if name.startswith(("PMI_", "PMIX_", "OMPI_COMM_WORLD_"))]:
        left_by_worker.append((name, os.environ.pop(name)))


left_by_worker = []  # (name, value) of the variables that made this process a rank


def ancestors(process=None):
    """Yield (number, name) of the processes above one, by default this one, its parent first; on Linux."""
    process = os.getppid() if process is None else int(_read_stat(process)[1][_PARENT])
    while process > 0 and (found := _read_stat(process)) is not None:
        name, fields = found
        yield process, name
        process = int(fields[_PARENT])


def _stat(process):
    """(state, number, start) of a process; None if there is none, or on another system than Linux."""
    found = _read_stat(process)
    return None if found is None else (found[1][_STATE], process, int(found[1][_START]))


def _read_stat(process):
    """(name, the fields after it) in /proc/PID/stat; None if there is no such file."""
    try:
        text = pathlib.Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    name, _, rest = text.partition("(")[2].rpartition(")")
    return name, rest.split()
