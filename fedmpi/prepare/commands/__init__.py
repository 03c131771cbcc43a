"""The commands of ``python -m fedmpi data``, one module each.

A module has `add_parser(commands)`, which adds the command's options, and `run(options)`, which does its work.
"""

import os


def add_data_dir(parser):
    """Add the option --data-dir."""
    default = os.environ.get("FEDMPI_DATA") or "."
    text = "folder of the data files; default: the variable FEDMPI_DATA, or the current folder"
    parser.add_argument("--data-dir", metavar="FOLDER", default=default, help=text)
