"""The one grammar of settings: how values are written on the command line, in settings files, presets and sweep plans.

All of them are read as assignments, pairs of a setting's key and the text of its value: ("rounds", "100"),
("algorithm", "fafed"), ("algorithm.step_size", "0.01"). Keys may be written with hyphens for underscores and in
upper case. The text `null` is the default of a setting whose default is "none". Types are checked afterwards
(`fedmpi.config.build`). Needs neither torch nor MPI.
"""

import contextlib
import datetime
import json
import os
import pathlib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fedmpi.config.presets import is_paper
from fedmpi.config.sections import GROUPS
from fedmpi.ground.errors import UserError
from fedmpi.ground.files.settings_files import Quoted, read_settings_file, read_value
from fedmpi.ground.registry import plain
from fedmpi.ground.text import short

SWITCHES = ("print_config", "traceback", "help")  # flags without a value
FLAGS = ("preset", "config", "list")  # flags with one
SHORT = {"data": "task.data", "autocast": "oracle.autocast", "compile": "oracle.compile"}  # short key -> key
SHORT |= {"accumulate": "oracle.accumulate"}
SHORT |= {"own_files": "task.own_files", "baselines.step_sizes": "baselines_step_sizes"}
Assignments = list[tuple[str, str]]  # a setting's key and the text of its value
Flags = dict[str, str | bool]  # flag -> its text, or True for one of `SWITCHES`
INSTEAD = {"rounds": "epochs", "local_steps": "local_epochs"}  # if the second is set, it replaces the first


def spelling(key: object) -> str:
    """A key in its one spelling: "--Local-Steps" is "local_steps".

    What follows a dot keeps its case until the class is known: it may be an argument of a user's class (`find_key`).
    """
    group, dot, name = str(key).strip().removeprefix("--").replace("-", "_").partition(".")
    return f"{group.lower()}{dot}{name}"


def find_key(key: str, known: Iterable[str]) -> str | None:
    """The known key that `key` means: itself, or the one that differs in upper and lower case only, or None."""
    return key if key in known else next((candidate for candidate in known if candidate.lower() == key.lower()), None)


class Given(str):
    """The text of a value that a program gave, or that stands in quotes in a file: it is not read as another one.

    Attributes:
        value: what was given. is_lenient: whether a text may also be read as a number, as that of a file.
    """

    value: Any
    is_lenient: bool

    def __new__(cls, value: Any, is_lenient: bool = False) -> "Given":
        word = os.fsdecode(value) if isinstance(value, os.PathLike) else value
        text = super().__new__(cls, word if isinstance(word, str) else json.dumps(word))
        text.value, text.is_lenient = value, is_lenient
        return text


def as_text(value: Any) -> str:
    """The value of a setting in a file as the text that it would be on the command line."""
    if isinstance(value, Quoted):
        return Given(str(value), is_lenient=True)
    return str(value) if isinstance(value, (str, datetime.date, datetime.time)) else json.dumps(value, default=str)


def parse_command_line(arguments: Iterable[str]) -> tuple[Assignments, Flags]:
    """(list of assignments, {flag: its text, or True for one of `SWITCHES`}) of words like "--rounds", "9", "--seed=1".

    Raises:
        UserError: one line: what was given, what is expected.
    """
    assignments: Assignments = []
    flags: Flags = {}
    rest = list(arguments)
    while rest:
        argument = "--help" if rest[0] == "-h" else rest[0]
        rest.pop(0)
        if not argument.startswith("--"):
            raise UserError(f"'{argument}': expected an option, like --rounds 100 (see --help)")
        option, has_value, text = argument.partition("=")
        key = spelling(option)
        if key in SWITCHES:
            flags[key] = True
            continue
        if not has_value:
            if not rest or rest[0].startswith("--"):
                raise UserError(f"{option}: expected a value after it (see --help)")
            text = rest.pop(0)
        if key in FLAGS:
            flags[key] = text
        else:
            assignments.append((key, text))
    return assignments, flags


def read_file(path: str | os.PathLike[str], flag: str = "", marks_quoted: bool = False) -> dict[str, Any]:
    """The content of a YAML file, or TOML if it ends in .toml: a dict. `flag`: how the user named it, for the message.

    `marks_quoted`: see `read_settings_file`.

    Raises:
        UserError: one line, if it cannot be read or contains something else.
    """
    return read_settings_file(pathlib.Path(path), f"{flag} {path}".strip(), marks_quoted)


def split_paper(content: dict[str, Any], where: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the settings in a file's content, what it says about a paper's result or {}); see `fedmpi.config.presets`.

    Raises:
        UserError: one line that begins with `where`, if "paper" is not as in a preset.
    """
    paper = content.get("paper") or {}
    if not is_paper(paper):
        raise UserError(f"{where}: paper: expected source, printed and methods as in a preset")
    return {key: value for key, value in content.items() if key != "paper"}, _unmarked(paper)


def _unmarked(value: Any) -> Any:
    """A value of a file in which texts that stand in quotes are not marked; it is written as it is."""
    if isinstance(value, dict):
        return {_unmarked(key): _unmarked(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_unmarked(inner) for inner in value]
    return str(value) if isinstance(value, Quoted) else value


def flatten(settings: Mapping[str, Any], where: object = "settings") -> dict[str, Any]:
    """A nested settings dict as key -> value: {"algorithm": {"name": "fafed"}} is {"algorithm": "fafed"}.

    Raises:
        UserError: one line that begins with `where`, if a setting is there twice, in two spellings.
    """
    written: list[tuple[str, Any]] = []
    for key, value in settings.items():
        is_group = "." not in key or key.startswith("stages.")
        inner = value if isinstance(value, dict) and value and is_group else {"name": value}
        for name, inner_value in inner.items():
            settings_of_stage = inner_value if key == "stages" and isinstance(inner_value, dict) else {}
            written += [(f"{key}.{name}.{setting}", value) for setting, value in settings_of_stage.items()]
            written += [] if settings_of_stage else [(key if name == "name" else f"{key}.{name}", inner_value)]
    check_repeated([key for key, _ in written], lambda key: SHORT.get(spelling(key), spelling(key)), where)
    return {spelling(key): value for key, value in written}


def check_repeated(keys: Iterable[str], current: Callable[[str], str], where: object) -> None:
    """Check that no two keys of one file are the same setting; on a command line, the last one counts.

    Args:
        current: function from a key to the setting's current name. where: the file's name.
    """
    first: dict[str, str] = {}
    for key in keys:
        name = current(key)
        if name in first:
            raise UserError(
                f"{where}: gives {short(name, 100)} twice, as {short(first[name], 100)} and as {short(key, 100)}: "
                "leave one of them out"
            )
        first[name] = key


def assignments_of(settings: Mapping[str, Any], where: object = "settings") -> Assignments:
    """The assignments of a nested settings dict, like those that `parse_command_line` finds; see `flatten`."""
    return [(key, as_text(value)) for key, value in flatten(settings, where).items()]


def merge(layers: Iterable[Assignments], methods: Mapping[str, Any]) -> Assignments:
    """One list of assignments from several layers; later layers override earlier ones.

    A layer that chooses another class than the layers before it also drops their settings of the old
    class: the new one has its own defaults. In the same way --rounds on the command line drops a file's epochs.

    Args:
        layers: lists of assignments. methods: algorithm -> its settings, used if a layer chooses that algorithm
            instead of an earlier layer's.
    """
    methods = {plain(name): settings or {} for name, settings in methods.items()}
    merged: Assignments = []
    for layer in layers:
        assignments = [(SHORT.get(key, key), text) for key, text in layer]
        for group in GROUPS:
            old, new = (last_text(pairs, group) for pairs in (merged, assignments))
            if old is not None and new is not None and plain(old) != plain(new):
                merged = [(key, text) for key, text in merged if key.partition(".")[0] != group]
                settings = methods.get(plain(new), {}) if group == "algorithm" else {}
                merged += [(f"{group}.{name}", as_text(value)) for name, value in settings.items()]
        dropped = {INSTEAD[key] for key, _ in assignments if key in INSTEAD}
        merged = [(key, text) for key, text in merged if key not in dropped] + assignments
    return merged


def typed(text: str, hint: Any) -> Any:
    """The value of a text as a type like int, str | None, list[float], Literal["a", "b"] or Any; see also `Given`.

    Raises:
        ValueError: if the text does not have the type.
    """
    if isinstance(text, Given):
        try:
            return _as_it_is(text.value, hint)
        except ValueError:
            if not text.is_lenient:
                raise
    for kind in kinds(hint):
        if typing.get_origin(kind) is typing.Literal and text in typing.get_args(kind):
            return str(text)
        if kind is str:
            return None if text == "null" and type(None) in kinds(hint) else text
        try:
            return _converted(read_value(str(text)), kind)
        except ValueError:
            continue
    raise ValueError


def _as_it_is(value: Any, hint: Any) -> Any:
    """A value as a type: only whole numbers become floats, paths texts, and lists and tuples each other."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value) if str in kinds(hint) else value
        hint = str  # no other type holds a path, for the record could not
    if type(value) in kinds(hint):
        return value
    for kind in kinds(hint):
        with contextlib.suppress(ValueError):
            return _converted(value, kind)
    raise ValueError


def kinds(hint: Any) -> list[Any]:
    """The types that a union consists of, or the one type; in both cases, null comes last."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return sorted(typing.get_args(hint) if is_union else (hint,), key=lambda kind: kind is type(None))


def _converted(value: Any, kind: Any) -> Any:
    """A value of a file as a type; raises ValueError if it does not have it."""
    origin, inner = typing.get_origin(kind) or kind, typing.get_args(kind)
    is_among = origin is typing.Literal and any(type(value) is type(word) and value == word for word in inner)
    if kind in (Any, object) or is_among:
        return value
    if origin in (typing.Union, types.UnionType):
        for member in kinds(kind):
            with contextlib.suppress(ValueError):
                return _converted(value, member)
    if kind is float and type(value) is int:
        return float(value)
    if kind is type(None) and value is None:
        return value
    if origin is list and isinstance(value, tuple):
        value = list(value)
    if origin is tuple and isinstance(value, list | tuple):
        each = [inner[0]] * len(value) if inner[1:] == (...,) else inner or [Any] * len(value)
        return tuple(_converted(entry, entry_kind) for entry, entry_kind in zip(value, each, strict=True))
    # A list is also the value of a Sequence or an Iterable, a dict that of a Mapping.
    is_container = isinstance(value, list | tuple | dict) and isinstance(origin, type) and isinstance(value, origin)
    if type(value) is not origin and not is_container:
        raise ValueError
    if isinstance(value, list | tuple) and inner:
        return type(value)(_converted(entry, inner[0]) for entry in value)
    if isinstance(value, dict) and len(inner) == 2:
        return {_converted(key, inner[0]): _converted(entry, inner[1]) for key, entry in value.items()}
    return value


def last_text(assignments: Assignments, key: str) -> str | None:
    """The last text that some assignments give to a key, or None."""
    return next((text for k, text in reversed(assignments) if k == key), None)
