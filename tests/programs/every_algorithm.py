"""Two rounds of every algorithm on the digits, in one process per rank; prints a line for each."""

import math
import sys

import fedmpi.algorithms
from fedmpi.algorithms import Algorithm
from fedmpi.comm.job.ranks import run_program
from fedmpi.ground.registry import known
from fedmpi.training.build import prepare
from fedmpi.training.config import read_command_line


def program(arguments, link):
    for name in known(fedmpi.algorithms, Algorithm):
        words = [
            "--algorithm",
            name,
            "--clients",
            "4",
            "--local-steps",
            "2",
            "--participation",
            "0.75",
            "--threads",
            "1",
        ]
        federation = prepare(read_command_line(words), link).federation
        federation.start()
        losses = [federation.run_round() for _ in range(2)]
        if link.rank == 0:
            print(name, *losses)
        assert all(map(math.isfinite, losses)), name
        assert federation.server.x.isfinite().all(), name


run_program(program, sys.argv[1:])
