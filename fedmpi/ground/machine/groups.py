"""Control groups: the folders in which Linux limits the cores and the memory of a job (containers, SLURM)."""

import contextlib
import os
import pathlib
from collections.abc import Iterator


def control_groups(controller: str, root: pathlib.Path = pathlib.Path("/")) -> Iterator[tuple[int, pathlib.Path]]:
    """Yield (version, folder) of this process's control groups that may limit something, and of those around them.

    They are of version 2 or 1, wherever the system has mounted them; what a container does not show is left out.
    `controller` is "cpu" or "memory"; `root` is the folder of /proc and /sys (for tests).
    """
    with contextlib.suppress(OSError, ValueError):
        groups = {}
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            number, controllers, path = line.split(":", 2)
            if (number, controllers) == ("0", ""):
                groups[2] = path
            elif controller in controllers.split(","):
                groups[1] = path
        for line in (root / "proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
            before, _, after = line.partition(" - ")
            top, folder = (word.replace("\\040", " ") for word in before.split(" ")[3:5])
            kind, *_, options = after.split(" ")
            version = 2 if kind == "cgroup2" else int(kind == "cgroup" and controller in options.split(","))
            if version in groups:
                inner = pathlib.PurePosixPath(os.path.relpath(groups[version], top))
                inside = ["."] if ".." in inner.parts else [inner, *inner.parents]
                yield from ((version, root / folder.lstrip("/") / group) for group in inside)
