"""Train a model over silos: ``mpirun -np 4 python -m fedmpi.train``; ``--help`` lists the settings."""

import sys

from fedmpi.program.ranks import run_program, show


def _run(arguments, link):
    from fedmpi.comm.agreement import agree
    from fedmpi.config.build import read_command_line
    from fedmpi.training.build import train

    config = agree(link, lambda: read_command_line(arguments))
    if isinstance(config, str):
        if link.rank == 0:
            show(config)
        return
    for note in config.notes if link.rank == 0 else ():
        print(f"fedmpi: {note}", file=sys.stderr, flush=True)
    train(config, link)


def main(arguments=None):
    """Entry point; `arguments` default to those of the process."""
    run_program(_run, sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    main()
