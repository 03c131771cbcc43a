"""A run on several ranks, of which one is killed: killed_ranks.py RANK AT SECONDS WORDS, the words of fedmpi.train.

Rank RANK gets SIGKILL that many seconds after its local step number AT, from 1, of this start, whatever it does then;
with AT 0 it is not killed. States are written after every local step.
"""

import itertools
import os
import signal
import sys
import threading

from fedmpi.comm.sums.mpi import MPILink
from fedmpi.federation.turns import Turns
from fedmpi.runs.checkpoints import writer
from fedmpi.runs.loop import within
from fedmpi.training.config import read_command_line
from fedmpi.training.loop import train

RANK, AT, SECONDS, *WORDS = sys.argv[1:]


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def main():
    within.LONG = writer.LONG = 0
    link, usual, made = MPILink(), Turns.after_step, itertools.count(1)

    def after_step(turns, federation, client):
        usual(turns, federation, client)
        if link.rank == int(RANK) and next(made) == int(AT):
            threading.Timer(float(SECONDS), die).start() if float(SECONDS) else die()

    Turns.after_step = after_step
    train(read_command_line([*WORDS, "--threads", "1", "--checkpoint-minutes", "1e-9", "--resume", "auto"]), link)


if __name__ == "__main__":
    main()
