"""Which run a command line goes on with, and its settings as the lowest layer; needs neither torch nor MPI."""

import pathlib

from fedmpi.config.grammar import assignments_of, last_text, read_file, rename, split_paper
from fedmpi.config.run import Run
from fedmpi.errors import UserError
from fedmpi.run_files import CHECKPOINTS, FORMER_MODEL, MANIFEST, MODEL, SETTINGS
from fedmpi.settings import former_names

AUTO = "auto"
NOT_TAKEN = ("out", "name", "ranks", "resume")  # settings that a resumed run does not take from its folder


def read_resumed(assignments):
    """The run that a command line goes on with.

    Args:
        assignments: list of assignments, see `fedmpi.config.grammar`.

    Returns:
        None if a new run begins, else a dict for JSON: "folder", its "settings" and "paper".

    Raises:
        UserError: one line, if the folder is not one of a run, or has no checkpoint.
    """
    text = last_text(assignments, "resume")
    if text in (None, "null"):
        return None
    out, name = (last_text(assignments, key) for key in ("out", "name"))
    if text.lower() == AUTO:
        if name in (None, "null"):
            raise UserError("resume = auto: expected --name, which says which run to continue")
        folder = pathlib.Path(out or Run.out) / name
        if not (folder / SETTINGS).is_file() or not _may_go_on(folder):
            return None
    else:
        folder = pathlib.Path(text)
        if not (folder / SETTINGS).is_file():
            raise UserError(f"resume = {folder}: not a run folder (it contains no {SETTINGS})")
        if not _may_go_on(folder):
            raise UserError(f"resume = {folder}: it contains no checkpoint")
        given = pathlib.Path(out or folder.parent) / (name or folder.name)
        if given.resolve() != folder.resolve():
            raise UserError(f"resume = {folder}: the run continues in that folder; leave --out and --name out")
    settings, paper = split_paper(read_file(folder / SETTINGS), folder / SETTINGS)
    return {"folder": str(folder), "settings": settings, "paper": paper}


def has_checkpoint(folder):
    """Whether a run folder has a checkpoint, damaged or not."""
    return any((folder / CHECKPOINTS).glob(f"*/{MANIFEST}"))


def _may_go_on(folder):
    return has_checkpoint(folder) or any((folder / name).is_file() for name in (MODEL, FORMER_MODEL))


def under(layers, resumed):
    """The assignments of a command line's `Layers`, with the settings of the resumed run below them."""
    if resumed is None:
        return layers.assignments
    assignments, _ = rename(assignments_of(resumed["settings"]), former_names(Run))
    return layers.above([(key, text) for key, text in assignments if key not in NOT_TAKEN])


def place(resumed):
    """The settings that say where a resumed run goes on; {} for a new one."""
    if resumed is None:
        return {}
    folder = pathlib.Path(resumed["folder"])
    return {"resume": str(folder), "out": str(folder.parent), "name": folder.resolve().name}
