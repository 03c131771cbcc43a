"""fedmpi.train whose rank 0 needs long to remove old checkpoints, as on a slow disk."""

import time

from fedmpi.runs.checkpoints import writer
from fedmpi.train import main

usual = writer.remove_checkpoints


def slowly(*arguments):
    """What it stands for, later."""
    time.sleep(0.3)
    usual(*arguments)


writer.remove_checkpoints = slowly

if __name__ == "__main__":
    main()
