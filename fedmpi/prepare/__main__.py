"""List, prepare and show data sets, and split them over clients: ``python -m fedmpi data --help``."""

import sys

from fedmpi.comm.agreement import agree
from fedmpi.comm.job.parser import Parser
from fedmpi.comm.job.single import run_single
from fedmpi.ground.errors import UserError
from fedmpi.prepare.commands import listing, partition, prepare, show, statistics

DESCRIPTION = """\
Make the HDF5 files of data sets, show their contents, and split them over clients.

    python -m fedmpi data list
    python -m fedmpi data prepare NAME [--from PATH]
    python -m fedmpi data show FILE
    python -m fedmpi data partition DATA [--plot FILE.png] [--write 'silo_{client}.h5'] [settings of training]
    mpirun -np 4 python -m fedmpi data statistics 'silo_{client}.h5' [--out columns.json]"""


def main(arguments=None):
    """Entry point; `arguments` default to those of the process. Collective over all ranks for ``statistics``."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["statistics"] and not {"--help", "-h"} & {*arguments}:
        from fedmpi.comm.job.ranks import run_program  # imports MPI

        run_program(_run_on_ranks, arguments)
    else:
        run_single(_run, arguments)


def make_parser():
    """The parser of the program's options."""
    parser = Parser(prog="fedmpi data", description=DESCRIPTION)
    commands = parser.add_subparsers(dest="command", required=True)
    for command in (listing, prepare, show, partition, statistics):
        command.add_parser(commands)
    return parser


def _run_on_ranks(arguments, link):
    """A program that is collective on the link."""
    options = agree(link, lambda: make_parser().parse_args(arguments), tells=True)
    options.run(options, link)


def _run(arguments):
    parser = make_parser()
    options, settings = parser.parse_known_args(arguments)
    if settings and options.run is not partition.run:
        raise UserError(f"unknown option {settings[0]} (see {parser.prog} {options.command} --help)")
    options.settings = settings
    options.run(options)


if __name__ == "__main__":
    main()
