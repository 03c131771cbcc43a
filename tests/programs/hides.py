"""After `hide_launcher` this process looks alone to other libraries, and is a rank of fedmpi's all the same."""

import os
import sys

from fedmpi.comm.start.launch import hide_launcher
from fedmpi.comm.start.process import started_by

hide_launcher()

import fedmpi  # noqa: E402


def main():
    from torch import nn

    sizes = [os.environ.get(name) for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")]
    assert sizes == [None] * 3 and started_by()[1] == 2
    fed = fedmpi.average(nn.Linear(1, 1), every=1)
    assert fed.size == 2 and started_by()[2] == fed.rank
    if sys.argv[1:] == ["ends"] and fed.rank == 1:
        sys.exit(3)
    fed.step()
    fed.finish()
    print("well")


if __name__ == "__main__":
    main()
