"""How this process was started: whether it is a rank of a launcher, or a worker of one."""

import os
import re


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


def started_by(environment=None):
    """(the launcher of a process, how many processes it started or more, the number of this one).

    `environment`: of that process; None: of this one.
    """
    found, environment = [], {**os.environ, **hidden} if environment is None else environment
    for launcher, names in LAUNCHERS.items():
        size, number = (environment.get(name, "") for name in names)
        if number.isdigit():
            is_known = size.isdigit()
            at_least = int(size) if is_known else int(number) + 1
            found.append((not is_known, f"{launcher} ({names[not is_known]})", at_least, int(number)))
    # The first that says how many there are; if none does, there are those up to this one.
    return min(found, key=lambda candidate: candidate[0], default=(True, "no launcher", 1, 0))[1:]


def leave_job():
    """In a worker, which imports the user's program anew: if that begins MPI, then alone.

    As a second process of its rank, MPICH would end the job, and Open MPI would wait forever.
    """
    for name in [name for name in os.environ if name.startswith(("PMI_", "PMIX_", "OMPI_COMM_WORLD_"))]:
        left_by_worker.append((name, os.environ.pop(name)))


left_by_worker = []  # (name, value) of the variables that made this process a rank


# By these, other libraries would take the ranks for the workers of one job of theirs.
READ_BY_OTHERS = re.compile("(PMI|OMPI_COMM_WORLD|MV2_COMM_WORLD)_(SIZE|RANK)")


def hide_variables():
    """Remove from the environment what says that this process is one of several ranks; fedmpi still knows it."""
    for name in filter(READ_BY_OTHERS.fullmatch, [*os.environ]):
        hidden[name] = os.environ.pop(name)


hidden = {}  # name -> value of the variables that `hide_variables` has removed
