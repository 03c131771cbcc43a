"""The front of all programs: ``fedmpi COMMAND``, or ``python -m fedmpi COMMAND``, also under mpirun and srun."""

import importlib
import sys

from fedmpi.comm.job.parser import Parser
from fedmpi.comm.job.program import is_first_rank
from fedmpi.comm.job.single import run_single
from fedmpi.ground.errors import UserError
from fedmpi.ground.settings import nearest
from fedmpi.ground.version import __version__

# Command -> (module with its `main`, what it does); those on ranks are started by mpirun or srun.
COMMANDS = {
    "train": ("fedmpi.train", "train a model over silos, on ranks"),
    "data": ("fedmpi.prepare.__main__", "prepare, show and list data sets, and split them over clients"),
    "doctor": ("fedmpi.cli.doctor.__main__", "check machines, MPI and settings before a run, on ranks"),
    "evaluate": ("fedmpi.cli.evaluate.__main__", "measure a trained model on the silos, on ranks"),
    "predict": ("fedmpi.cli.predict.__main__", "predict with a trained model"),
    "report": ("fedmpi.cli.report.__main__", "figures, tables and a page of runs, also while they go on"),
    "sweep": ("fedmpi.cli.sweep.__main__", "many runs, and the best of their settings"),
    "bench": ("fedmpi.cli.bench.__main__", "how fast communication rounds are on this machine, on ranks"),
    "completion": ("fedmpi.cli.completion.__main__", "completion of commands and settings in a shell"),
}
EPILOG = """\
On ranks: mpirun -np 4 python -m fedmpi train --rounds 50 (python -m fedmpi.train is the same). Each command has a
--help of its own."""


def main(arguments=None):
    """Entry point; `arguments` default to those of the process. Collective for the commands on ranks."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words and words[0] in COMMANDS:
        sys.argv[1:] = words[1:]  # as if the command had been started by its own name
        importlib.import_module(COMMANDS[words[0]][0]).main()
    elif is_first_rank():
        run_single(_run, words)
    else:  # rank 0 says it
        sys.exit(0 if words and words[0] in ("--help", "-h", "--version") else 2)


def make_parser():
    """The parser of what precedes a command."""
    commands = "\n".join(f"  {name:<12}{text}" for name, (_, text) in COMMANDS.items())
    usage, epilog = "fedmpi COMMAND [ARGUMENTS]", f"commands:\n{commands}\n\n{EPILOG}"
    parser = Parser(prog="fedmpi", usage=usage, description="Federated learning over MPI.", epilog=epilog)
    parser.add_argument("--version", action="version", version=f"fedmpi {__version__}")
    parser.add_argument("command", metavar="COMMAND", help="one of those below")
    return parser


def _run(arguments):
    """Say what commands there are.

    Raises:
        UserError: if a command is missing or unknown.
    """
    words = arguments or ["--help"]
    command = make_parser().parse_args(words[:1]).command
    raise UserError(f"unknown command {command}{nearest(command, COMMANDS)}: expected {', '.join(COMMANDS)}")


if __name__ == "__main__":
    main()
