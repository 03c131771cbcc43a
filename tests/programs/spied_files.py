"""fedmpi.train whose ranks look for their clients' rows in what others can read: files, and other users' processes.

The arguments are those of fedmpi.train. In each exchange, a rank looks into the files of shared memory, and at the end
into every file that has changed since it began in the folders of LOOKED_AT (separated by colons); if it is not root,
into those of other users. Of processes of this program that belong to another user, /proc must show nothing but their
command. Every rank prints one line.
"""

import contextlib
import os
import pathlib
import sys
import time

import numpy as np

from fedmpi.aggregation.masked import Masked
from fedmpi.federation import Federation
from fedmpi.train import main

BEGAN = time.time() - 1
SHARED = pathlib.Path("/dev/shm")
pieces = set()
seen = {"others": 0, "shared": 0}


def keep(values):
    """Take note of pieces of what others must not see."""
    data = np.ascontiguousarray(values)
    found = (data[begin : begin + 16].tobytes() for begin in range(0, data.size - 16, max(16, data.size // 8)))
    pieces.update(piece for piece in found if len({*piece}) > 8)


def end_turn(federation, client, end_turn=Federation.end_turn):
    end_turn(federation, client)
    for row in client.rows.values():
        keep(row.numpy())


def encoded(masked, number, dtype, encoded=Masked._encoded):
    for place, total in encoded(masked, number, dtype):
        keep(total.numpy().copy())
        yield place, total
    look_around()


def look_around():
    """What can be seen while the ranks are in an exchange."""
    mapped = {line.split()[-1] for line in pathlib.Path("/proc/self/maps").read_text().splitlines()}
    for file in SHARED.iterdir():
        with contextlib.suppress(OSError):
            if str(file) in mapped or file.stat().st_uid != os.getuid():  # of this job, or of another user
                check(file.read_bytes(), file)
                seen["shared"] += 1
    for folder in pathlib.Path("/proc").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if folder.name.isdecimal() and folder.stat().st_uid != os.getuid():
                command = (folder / "cmdline").read_bytes()
                if b"spied_files" in command and b"mpirun" not in command and os.getuid():
                    check(command, folder)
                    for name in ("mem", "environ", "maps", "fd", "stack"):
                        with contextlib.suppress(PermissionError):
                            content = os.listdir(folder / name) if name == "fd" else (folder / name).open("rb").name
                            raise AssertionError(f"{folder / name} can be read: {content}")
                    seen["others"] += 1


def check(content, where):
    assert not any(piece in content for piece in pieces), f"{where} has a row of this rank's clients"


def look_at_files():
    """How many files, of other users if ranks are not root, have changed since the beginning; none has a row."""
    number = 0
    for folder in os.environ["LOOKED_AT"].split(":"):
        for file in pathlib.Path(folder).rglob("*"):
            with contextlib.suppress(OSError):
                status = file.stat()
                if file.is_file() and status.st_mtime > BEGAN and not 0 < os.getuid() == status.st_uid:
                    check(file.read_bytes(), file)
                    number += 1
    return number


Federation.end_turn, Masked._encoded = end_turn, encoded

if __name__ == "__main__":
    code = 0
    try:
        main()
    except SystemExit as ended:
        code = ended.code
    if not code:
        assert len(pieces) > 100, len(pieces)
        print(
            f"looked at {look_at_files()} files, {seen['shared']} of shared memory, {seen['others']} processes",
            flush=True,
        )
    sys.exit(code)
