"""A command line and the files that it names, as layers of assignments; needs neither torch nor MPI."""

import dataclasses
import pathlib
from collections.abc import Iterable
from typing import Any

from fedmpi.config.grammar import (
    INSTEAD,
    Assignments,
    Flags,
    assignments_of,
    last_text,
    merge,
    parse_command_line,
    read_file,
    split_paper,
)
from fedmpi.config.presets import preset_path
from fedmpi.ground.errors import UserError
from fedmpi.ground.files.run_files import RECORDS


@dataclasses.dataclass(frozen=True)
class Layers:
    """The assignments of a preset, a file and the command line, in this order.

    Attributes:
        layers: list of lists of assignments.
        flags: flag -> its text, or True for one of `SWITCHES`.
        paper: what a preset says about a paper's result, or {}.
        notes: lines for the user, about a name that is taken.
        files: what the user calls the files, which are all layers but the last.
    """

    layers: list[Assignments]
    flags: Flags
    paper: dict[str, Any]
    notes: list[str]
    files: list[str]

    @property
    def assignments(self) -> Assignments:
        """Those of all layers as one list."""
        return self.above([])

    def above(self, lowest: Assignments) -> Assignments:
        """The assignments of all layers as one list; they override those in `lowest`."""
        return merge([lowest, *self.layers], self.paper.get("methods", {}))


def read_layers(arguments: Iterable[str] | tuple[Assignments, Flags]) -> Layers:
    """The `Layers` of a command line, without the program's name, or of what `parse_command_line` makes of one.

    Raises:
        UserError: one line: what was given, what is allowed.
    """
    assignments, flags = arguments if isinstance(arguments, tuple) else parse_command_line(arguments)
    given = {key for key, text in assignments if text != "null"}
    for key, other in INSTEAD.items():
        if {key, other} <= given:
            raise UserError(f"--{key} and --{other}: expected only one of them")
    files = [("--preset", preset_path(str(flags["preset"])))] if "preset" in flags else []
    files += [("--config", pathlib.Path(str(flags["config"])))] if "config" in flags else []
    layers: list[Assignments] = []
    paper: dict[str, Any] = {}
    taken: list[str] = []
    for flag, path in files:
        settings, its_paper = split_paper(read_file(path, flag, marks_quoted=True), f"{flag} {path}")
        if settings.get("name") == path.absolute().parent.name and (path.parent / RECORDS).is_file():
            taken.append(f"{path.parent} exists: the new run folder gets a number (--name chooses another name)")
            del settings["name"]
        layers.append(assignments_of(settings, f"{flag} {path}"))
        paper = its_paper or paper
    notes = taken if last_text(assignments, "name") is None else []
    return Layers([*layers, assignments], flags, paper, notes, [f"{flag} {path}" for flag, path in files])
