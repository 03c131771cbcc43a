"""Sums on nodes of unequal numbers of ranks, on one core: some nodes are oversubscribed and others are not.

Argument: the colours of the ranks, see `transports`.
"""

import os
import sys

import transports

os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])

if __name__ == "__main__":
    transports.main(sys.argv[1])
