"""Train a model over silos: ``mpirun -np 4 python -m fedmpi.train``; ``--help`` lists the settings.

A program calls `main` with the words of a command line, on every rank:

>>> import fedmpi
>>> fedmpi.train.main(["--clients", "4", "--rounds", "3", "--name", "example"])  # doctest: +ELLIPSIS
round 1/3: train_loss ...
round 3/3: train_loss ...
  algorithm        fafed
  clients          4 on 1 ranks
...
"""

import sys
from collections.abc import Sequence

from fedmpi.program.ranks import run_program, show


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, or print what was asked for (--help, --list, --print_config). Collective.

    Args:
        arguments: the words of the command line; None: those of this process.

    An error of the user ends the process with one line and exit code 2; see `run_program`.
    """
    run_program(_run, sys.argv[1:] if arguments is None else list(arguments))


def _run(arguments, link):
    from fedmpi.comm.agreement import agree, share
    from fedmpi.config.build import resolve
    from fedmpi.config.layers import read_layers
    from fedmpi.config.resume import read_resumed
    from fedmpi.training.loop import train

    layers = agree(link, lambda: read_layers(arguments))
    resumed = share(link, lambda: read_resumed(layers.assignments))  # only rank 0 needs to reach the run folder
    config = agree(link, lambda: resolve(layers, resumed))
    if isinstance(config, str):
        if link.rank == 0:
            show(config)
        return
    for note in config.notes if link.rank == 0 else ():
        print(f"fedmpi: {note}", file=sys.stderr, flush=True)
    train(config, link)


if __name__ == "__main__":
    main()
