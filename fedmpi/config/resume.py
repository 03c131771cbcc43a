"""Which run a command line resumes, and the settings of that run; needs neither torch nor MPI."""

import contextlib
import json
import pathlib
from collections.abc import Collection
from typing import Any, TypedDict

from fedmpi.config.grammar import Assignments, Given, as_text, flatten, last_text, read_file, split_paper
from fedmpi.config.layers import Layers
from fedmpi.ground.errors import UserError
from fedmpi.ground.files.own_files import check_folder
from fedmpi.ground.files.run_files import (
    CHECKPOINTS,
    MANIFEST,
    RUNS,
    SETTINGS,
    check_files,
    find_checkpoints,
    find_within,
    had_checkpoints,
    has_checkpoint,
    is_complete,
)

AUTO = "auto"


class Resumed(TypedDict):
    """A run that is resumed: its folder, its settings and what they say about a paper; JSON can hold it."""

    folder: str
    settings: dict[str, Any]
    paper: dict[str, Any]


def read_resumed(assignments: Assignments) -> Resumed | None:
    """The run that a command line resumes; None if a new one begins.

    Raises:
        UserError: one line, if the folder is not a run folder, or contains no checkpoint.
    """
    text = last_text(assignments, "resume")
    try:
        return None if text in (None, "null") else _read(text, assignments)
    except OSError as error:
        raise UserError(f"resume = {text}: cannot be read: {error.strerror}") from None


def _read(text: str, assignments: Assignments) -> Resumed | None:
    """`read_resumed` of the setting's text."""
    out, name = (last_text(assignments, key) for key in ("out", "name"))
    name = None if name == "null" else name
    if text.lower() == AUTO:
        if name is None:
            raise UserError("resume = auto: expected --name, which says which run to continue")
        folder = pathlib.Path(out or RUNS) / name
        if not (folder / SETTINGS).is_file() or not _is_resumable(folder):
            if had_checkpoints(folder):
                seen = "checkpoints were written there, and none can be seen now"
                raise UserError(f"resume = auto: {folder}: {seen}; if they are lost, choose another --name")
            check_folder(folder, "run")
            return None
    else:
        folder = pathlib.Path(text)
        if not (folder / SETTINGS).is_file():
            found = find_checkpoints(folder)[:1]
            hint = f"; --init {folder / CHECKPOINTS}/{found[0]:06d} begins a new run from its model" if found else ""
            raise UserError(f"resume = {folder}: not a run folder (it contains no {SETTINGS}){hint}")
        if not _is_resumable(folder):
            raise UserError(f"resume = {folder}: it contains no checkpoint")
        given = pathlib.Path(out or folder.parent) / (name or folder.name)
        if given.resolve() != folder.resolve():
            raise UserError(f"resume = {folder}: the run continues in that folder; leave --out and --name out")
    if folder.is_symlink():
        folder = folder.resolve()
    check_files(folder)
    settings, paper = split_paper(read_file(folder / SETTINGS), folder / SETTINGS)
    if settings.get("clients") is None:  # one client per rank, of which there may be another number now
        settings = {**settings, "clients": _num_clients(folder)}
    return {"folder": str(folder), "settings": settings, "paper": paper}


def _num_clients(folder: pathlib.Path) -> int | None:
    """How many clients a run has, by its newest checkpoint that can be read; None if there is none."""
    for checkpoint in (
        *(folder / CHECKPOINTS / f"{number:06d}" for number in find_checkpoints(folder)),
        *find_within(folder),
    ):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            manifest = json.loads((checkpoint / MANIFEST).read_bytes())
            return int(manifest["settings"]["clients"])
    return None


def _is_resumable(folder: pathlib.Path) -> bool:
    """Whether a run can be resumed: it has a checkpoint, or it is complete (training then says so)."""
    return has_checkpoint(folder) or is_complete(folder)


def assignments_above(
    resumed: Resumed | None, layers: Layers, not_taken: Collection[str], objects: Collection[str]
) -> Assignments:
    """The assignments of a command line's `Layers`, which override the settings of the resumed run, if there is one.

    The settings `not_taken` are left out. So are those of a group whose object is given anew (`objects`): they are
    compared with the object's when its checkpoint is read.
    """
    if resumed is None:
        return layers.assignments
    values = flatten(resumed["settings"])  # as the run had them
    texts = [(key, Given(value, True) if isinstance(value, str) else as_text(value)) for key, value in values.items()]
    return layers.above(
        [(key, text) for key, text in texts if not {key, key.partition(".")[0]} & {*not_taken, *objects}]
    )


def resumed_folder(resumed: Resumed | None) -> dict[str, str]:
    """The settings `resume`, `out` and `name` that name a resumed run's folder; {} for a new run."""
    if resumed is None:
        return {}
    folder = pathlib.Path(resumed["folder"])
    return {"resume": str(folder), "out": str(folder.parent), "name": folder.resolve().name}
