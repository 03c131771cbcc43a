"""Folder trees with files that fedmpi did not make, and what must be equal before and after a program has run there."""

import os
import stat

KINDS = ["file", "file", "file", "folder", "empty", "link", "pipe"]


def plant(draw, folder, outside, names, is_own=lambda folder, name: False, depth=0):
    """Put foreign files, folders, links and pipes into a folder where nothing of that name is.

    Args:
        draw: a `random.Random`. outside: a folder with `file`, elsewhere. names: that may be drawn.
        is_own: called with a folder and a name: whether a file of that name is fedmpi's own there.

    Returns:
        their paths.
    """
    planted = []
    for name in draw.sample(names, min(len(names), draw.randint(1, 4))):
        path, kind = folder / name, draw.choice(KINDS)
        if os.path.lexists(path) or is_own(folder, name):
            continue
        put(draw, path, kind, outside)
        if kind == "folder" and depth < 2:
            planted += plant(draw, path, outside, names, is_own, depth + 1)
        planted.append(path)
    return planted


def put(draw, path, kind, outside):
    """Make one foreign thing; see `plant`."""
    if kind in ("file", "read-only file"):
        path.write_bytes(draw.randbytes(draw.randint(1, 300)))
        path.chmod(0o444 if kind == "read-only file" else 0o644)
    elif kind == "link":
        path.symlink_to(draw.choice([outside / "file", outside, "/nowhere", path.parent]))
    elif kind == "hard link":
        os.link(outside / "file", path)
    elif kind == "device":
        path.symlink_to(draw.choice(["/dev/null", "/dev/zero", "/dev/full"]))
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()


def image(path):
    """What must be equal before and after: kind and content."""
    mode = os.lstat(path).st_mode
    if stat.S_ISLNK(mode):
        return "link", os.readlink(path)
    return stat.S_IFMT(mode), path.read_bytes() if stat.S_ISREG(mode) else b""


def snapshot(folder):
    """Path below a folder -> its `image`; also of the folder itself."""
    return {path.relative_to(folder): image(path) for path in [folder, *folder.rglob("*")]}
