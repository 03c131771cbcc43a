"""The texts of ``--help`` and ``--list``, and what can be set of a class."""

import argparse
import dataclasses
import inspect
import pathlib
import re
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from fedmpi.aggregation import stages
from fedmpi.aggregation.stages.base import Stage
from fedmpi.config.presets import preset_names, summary
from fedmpi.config.sections import Sections
from fedmpi.ground.errors import UserError
from fedmpi.ground.registry import command_name, known
from fedmpi.ground.settings import nearest
from fedmpi.ground.text import table

USAGE = "mpirun -np RANKS python -m fedmpi.train [--SETTING VALUE ...] (hyphens and underscores are the same)"
FLAG_HELP = {
    "preset": "NAME: settings of a paper's experiment (--list presets); --config and the command line override it",
    "config": "PATH: settings from a YAML or TOML file; the command line overrides it",
    "print_config": "print all settings of the run as a settings file, and exit",
    "list": "WHAT: list the algorithms, tasks, oracles, models, partitions, aggregations, codecs, stages or presets",
    "traceback": "if there is an error, also print its traceback",
    "help": "print this text for the chosen algorithm, task, oracle, model and partition, and exit",
}


@dataclasses.dataclass(frozen=True)
class Declared:
    """A setting as its class declares it: key, section or group, type, default and help text."""

    key: str
    group: str
    type: Any
    default: Any
    help: str


def declared_settings(kind: type[Sections], classes: Mapping[str, Any]) -> dict[str, Declared]:
    """Key -> `Declared` of a program's sections and the chosen classes: group -> class, or None if none is chosen."""
    settings = [
        Declared(name, section, *rest) for section, cls in kind.classes().items() for name, *rest in _settings_of(cls)
    ]
    for group, cls in classes.items():
        settings += [Declared(f"{group}.{name}", group, *rest) for name, *rest in (_settings_of(cls) if cls else ())]
    return {setting.key: setting for setting in settings}


def help_text(kind: type[Sections], classes: Mapping[str, Any], settings: Mapping[str, Declared]) -> str:
    """What ``--help`` prints: the settings of `declared_settings` by sections, and by the chosen classes."""
    parser = argparse.ArgumentParser(usage=USAGE, add_help=False)
    titles = {name: about(name, cls) for name, cls in kind.classes().items()}
    for group, cls in classes.items():
        chosen = command_name(cls) if cls else "the task's own"
        titles[group] = f"{group}: {chosen} (--{group} NAME chooses another; --list {group}s)"
        if group.startswith("stages."):
            titles[group] = f"{group} (--stages NAME,NAME chooses stages; --list stages)"
    for group, title in titles.items():
        section = parser.add_argument_group(title)
        for setting in settings.values():
            if setting.group == group:
                kind_of_value = type_name(setting.type).replace("None", "null")
                default = "null" if setting.default is None else setting.default
                text = f"{setting.help or 'argument of the class'} (type: {kind_of_value}, default: {default})"
                section.add_argument(f"--{setting.key}", help=text.replace("%", "%%"), metavar="VALUE")
    section = parser.add_argument_group("other options")
    for flag, text in FLAG_HELP.items():
        section.add_argument(f"--{flag}", action="store_true", help=text)
    return parser.format_help()


def about(section: str, cls: type) -> str:
    """A section and what it is about, like "folder (where a run is recorded, ...)"."""
    first = (cls.__doc__ or "").strip().split("\n")[0].rstrip(".")
    return f"{section} ({first[:1].lower()}{first[1:]})"


def list_text(wanted: str, choices: Mapping[str, Any]) -> str:
    """What ``--list WHAT`` ("algorithms", "preset", ...) prints; `choices`: group -> `fedmpi.config.build.Choice`.

    Raises:
        UserError: if there is nothing of that name.
    """
    groups = {f"{group}s": group for group in (*choices, "preset", "stage")}
    group = groups.get(wanted if wanted.endswith("s") else f"{wanted}s")
    if group is None:
        raise UserError(f"--list {wanted}: expected one of {', '.join(groups)}{nearest(wanted, groups)}")
    if group == "preset":
        return table([(name, summary(name)) for name in preset_names()], indent="")
    package, base = (stages, Stage) if group == "stage" else choices[group][:2]
    rows = [(name, (cls.__doc__ or "").strip().split("\n")[0]) for name, cls in known(package, base).items()]
    if group != "algorithm":
        return table(rows, indent="")
    text = pathlib.Path(__file__).with_name("costs.txt").read_text(encoding="utf-8")  # measured by a test
    others = [row for row in rows if not re.search(rf"^{re.escape(row[0])} ", text, re.MULTILINE)]
    return f"{text}\n{table(others, indent='')}" if others else text.rstrip("\n")


def type_name(kind: Any) -> str:
    """A type as help texts call it, like "float | None"."""
    name = kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)
    return name.replace("typing.", "")


def _settings_of(cls: Any) -> Iterable[tuple[str, Any, Any, str]]:
    """[(name, type, default, help)] of what a user can set of a class."""
    if dataclasses.is_dataclass(cls):
        types = typing.get_type_hints(cls)
        return [(field.name, types[field.name], field.default, _help(field)) for field in dataclasses.fields(cls)]
    types = typing.get_type_hints(cls.__init__ if inspect.isclass(cls) else cls)
    settings: list[tuple[str, Any, Any, str]] = []
    for name, parameter in inspect.signature(cls).parameters.items():
        is_given = name in ("shape", "num_classes")  # by the data
        if not is_given and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            default = None if parameter.default is parameter.empty else parameter.default
            # Files and the record hold a tuple as a list.
            plain = typing.Union[tuple, Any] if isinstance(default, tuple) else Any  # noqa: UP007
            settings.append((name, types.get(name, plain), default, ""))
    return settings


def _help(field: "dataclasses.Field[Any]") -> str:
    text, among = field.metadata.get("help", ""), field.metadata.get("among")
    return f"{text} [{' | '.join(map(str, among))}]" if among else text
