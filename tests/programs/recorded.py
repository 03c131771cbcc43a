"""Runs a program with a recorder around MPI: recorded.py FOLDER COMMAND ...

The command is that of a program in Python, with or without the interpreter before it. Each rank that is not killed
writes FOLDER/seen-RANK-PROCESS.json: the kinds of messages that it has sent, and lines about those of no kind.
"""

import atexit
import json
import os
import pathlib
import runpy
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "machinery"))


def leave(code, now=os._exit):
    """As `os._exit`, by which ranks end that others have left."""
    write()
    now(code)


os._exit = leave  # before fedmpi is imported, which keeps it

import recorder as recording  # noqa: E402

recorder = recording.install()
from mpi4py import MPI  # noqa: E402

FOLDER, RANK = pathlib.Path(sys.argv[1]), MPI.COMM_WORLD.rank


def write():
    seen = sorted(kind for kind, (_, size) in recorder.sent.items() if size)
    path = FOLDER / f"seen-{RANK}-{os.getpid()}.json"
    path.write_text(json.dumps({"seen": seen, "wrong": sorted({*recorder.wrong})}), encoding="utf-8")


atexit.register(write)
command = sys.argv[2:]
if pathlib.Path(command[0]).name.startswith("python"):
    command = command[1:]
if command[0] == "-m":
    sys.argv = command[1:]
    runpy.run_module(command[1], run_name="__main__", alter_sys=True)
else:
    sys.argv = command
    sys.path.insert(0, str(pathlib.Path(command[0]).resolve().parent))
    runpy.run_path(command[0], run_name="__main__")
