"""What the tests of jobs share."""

from helpers import ROOT

SLURM = ROOT / "slurm"
TINY = ("--rounds", 3, "--local-steps", 2, "--algorithm", "fedavg", "--threads", 1)


def options(**given):
    """Options of sbatch: nodes=2 is "--nodes=2"."""
    return [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]


def closing(log, name):
    """The value beside `name` in the closing table of a run."""
    lines = [line.split(None, 1) for line in log.splitlines() if line.startswith("  ")]
    return next(words[1] for words in lines if words[0] == name)
