"""The manifest of the results: every file of numbers with its hash, and the commits whose runs are in it."""

import hashlib

from reproduction.csv_files import read_rows, write_tables

NAME = "manifest.csv"
COLUMNS = ("file", "sha256", "bytes", "rows", "commits")
FOLDERS = ("small", "mlp", "full", "orders", "tuning")


def entries(folder):
    """The rows of the manifest of a folder of results, as text.

    Raises:
        UserError: if a file of numbers is damaged.
    """
    paths = [path for name in FOLDERS for path in sorted((folder / name).glob("*.csv"))]
    paths += [path for path in sorted(folder.glob("*.csv")) if path.name != NAME]
    return [_entry(folder, path) for path in paths]


def _entry(folder, path):
    content = path.read_bytes()
    commits = ()
    if b"commit" in content.partition(b"\n")[0].split(b","):
        commits = dict.fromkeys(row["commit"] for row in read_rows(path) if row["commit"])
    return {
        "file": path.relative_to(folder).as_posix(),
        "sha256": hashlib.sha256(content).hexdigest(),
        "bytes": str(len(content)),
        "rows": str(content.count(b"\n") - 1),
        "commits": " ".join(commits),
    }


def write(folder):
    """Write the manifest of a folder of results; returns its path."""
    write_tables((folder / NAME, COLUMNS, entries(folder)))
    return folder / NAME


def differences(folder):
    """(file, hash in the manifest or "", hash of the file or "") of every file that is not as the manifest says."""
    listed = {row["file"]: row["sha256"] for row in read_rows(folder / NAME, COLUMNS)}
    there = {row["file"]: row["sha256"] for row in entries(folder)}
    names = dict.fromkeys([*listed, *there])
    return [(name, listed.get(name, ""), there.get(name, "")) for name in names if listed.get(name) != there.get(name)]
