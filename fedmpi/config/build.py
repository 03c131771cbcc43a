"""A run's settings from the command line, files and presets: classes chosen, values typed and checked.

Settings are those of the program's sections (`fedmpi.config.sections`), and one choice each of algorithm, task, oracle,
model, partition, ... A choice is a name and that class's own settings:
``--algorithm fafed --algorithm.step_size 0.01``, or in a file

    algorithm: {name: fafed, step_size: 0.01}     # or just  algorithm: fafed
"""

import copy
import dataclasses
import functools
import json
import pathlib
import re
import types
import typing
from collections.abc import Mapping
from typing import Any

from torch import nn

from fedmpi import aggregation, algorithms, models, oracles, tasks
from fedmpi.aggregation import codecs
from fedmpi.aggregation import stages as own_stages
from fedmpi.aggregation.base import Aggregation
from fedmpi.aggregation.codecs.base import Codec
from fedmpi.aggregation.sending import Sending
from fedmpi.aggregation.stages.base import Stage
from fedmpi.algorithms.base import Algorithm
from fedmpi.config.foreign_names import our_name, similar
from fedmpi.config.grammar import (
    FLAGS,
    SHORT,
    SWITCHES,
    Assignments,
    Given,
    as_text,
    check_repeated,
    find_key,
    flatten,
    kinds,
    last_text,
    typed,
)
from fedmpi.config.help import Declared, declared_settings, help_text, list_text
from fedmpi.config.layers import Layers
from fedmpi.config.resume import Resumed, assignments_above, resumed_folder
from fedmpi.config.sections import Sections
from fedmpi.data import partitions
from fedmpi.data.partitions.base import Partition
from fedmpi.ground.errors import UserError
from fedmpi.ground.files.settings_files import AMBIGUOUS, is_plain, settings_text
from fedmpi.ground.registry import BROKEN, command_name, find, known
from fedmpi.ground.settings import LARGEST, nearest, per_rank
from fedmpi.ground.text import short
from fedmpi.oracles import OracleKind
from fedmpi.tasks.base import BaseTask

PER_CLIENT = re.compile(r"\{(client|rank)")  # in a path
LARGEST_INTEGER = 10**18  # what the libraries below compute with


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chosen(Sections):
    """The resolved settings of a program: everything needed to repeat it. A subclass adds its sections.

    Attributes:
        algorithm: an `Algorithm`. task: a `Task`. oracle: an `OracleKind`.
        model_class, model_settings: a `torch.nn.Module` class and its keyword arguments; None and
            {} for the task's default model and for tasks without a model.
        partition: a `Partition`, or None if the task has none.
        sending: a `Sending`, the aggregation, the stages and the codec.
        resolved: nested dict of all of it, as written to the run folder and by --print_config.
        notes: lines that the program prints on rank 0 before it starts.
        origin: folder of the settings file that the user gave, or None.
    """

    algorithm: Algorithm
    task: BaseTask
    oracle: OracleKind
    model_class: Any
    model_settings: dict[str, Any]
    partition: Partition | None
    sending: Sending
    resolved: dict[str, Any]
    notes: tuple[str, ...] = ()
    origin: pathlib.Path | None = None


Kind = typing.TypeVar("Kind", bound=Chosen)
Classes = dict[str, Any]  # group -> the class that is chosen, or None


class Choice(typing.NamedTuple):
    """A group of settings that is the choice of a class: where classes are, their base, the default's name."""

    package: types.ModuleType
    base: type[Any]
    default: str | None


CHOICES = {
    "algorithm": Choice(algorithms, Algorithm, "fafed"),
    "task": Choice(tasks, BaseTask, "classification"),
    "oracle": Choice(oracles, OracleKind, "autograd"),
    "model": Choice(models, nn.Module, None),
    "partition": Choice(partitions, Partition, "even"),
    "aggregation": Choice(aggregation, Aggregation, "mean"),
    "codec": Choice(codecs, Codec, None),
}
STAGES = "stages"  # the group of which several classes are chosen: --stages a,b, with settings like --stages.a.bound


def resolve(
    layers: Layers, resumed: Resumed | None, kind: type[Kind], objects: Mapping[str, Any] | None = None
) -> Kind | str:
    """Settings from a command line's `Layers` and, below them, those of the run that is resumed.

    Args:
        resumed: what `fedmpi.config.resume.read_resumed` found for them.
        kind: what is returned, a `Chosen` with the program's sections.
        objects: group -> object that a program gives instead of the choice of a class; of "model" also a function.

    Returns:
        the settings, or a text to print instead of running (--help, --list, --print_config).

    Raises:
        UserError: one line: what was given, what is allowed.
    """
    flags, paper, notes = layers.flags, layers.paper, layers.notes
    if "list" in flags:
        return "\n".join([list_text(str(flags["list"]), CHOICES), *BROKEN.values()])
    objects = objects or {}
    assignments = assignments_above(resumed, layers, kind.marked("each_start"), objects)
    classes: Classes = {}
    for group in CHOICES:
        given = objects.get(group)
        classes[group] = _choose(group, last_text(assignments, group), classes) if given is None else type(given)
    stages = [] if STAGES in objects else _choose_stages(last_text(assignments, STAGES))
    classes |= {f"{STAGES}.{command_name(cls)}": cls for cls in stages}
    _check_objects(objects, assignments)
    _check_partition(classes["task"], assignments)
    settings = declared_settings(kind, {group: None if group in objects else cls for group, cls in classes.items()})
    if "help" in flags:
        return help_text(kind, classes, settings)
    texts = _texts(assignments, settings, classes)
    for where, layer in zip(layers.files, layers.layers):
        check_repeated([key for key, _ in layer], lambda key: find_key(key, settings) or key, where)
    values = _typed(settings, texts)
    paper = paper or (resumed["paper"] if resumed else {})
    config = _build(kind, classes, values | resumed_folder(resumed), objects, stages)
    resolved = config.resolved | ({"paper": paper} if paper else {})
    if "print_config" in flags:
        return settings_text(resolved).rstrip()
    origin = pathlib.Path(str(flags["config"])).parent if "config" in flags else None
    all_notes = tuple(dict.fromkeys([*notes, *BROKEN.values()]))
    return dataclasses.replace(config, resolved=resolved, notes=all_notes, origin=origin)


def _choose(group: str, name: str | None, chosen: Classes) -> Any:
    """The class chosen for a group, or None for a model that is left to the task, or no codec.

    If the user names none, a task or an algorithm chosen before may name its own: the black-box
    attack chooses the two-point oracle, the AUC task its partition.
    """
    choice = CHOICES[group]
    if name in (None, "null") or (group == "codec" and name == "none"):
        wishes = [getattr(cls, group, None) for cls in (chosen.get("task"), chosen.get("algorithm"))]
        name = next((wish for wish in wishes if isinstance(wish, str)), choice.default)
    return None if name is None else find(group, name, choice.package, choice.base)


def _choose_stages(text: str | None) -> list[Any]:
    """The classes of ``--stages``: names separated by commas, or a list in a file."""
    names = [] if text in (None, "null") else [name for name in re.split(r"[\s,\[\]\"']+", text) if name]
    return [find("stage", name, own_stages, Stage) for name in names]


def _texts(assignments: Assignments, settings: Mapping[str, Declared], classes: Classes) -> dict[str, str]:
    """Key -> text of the assignments that are not choices of a class."""
    names = {
        key: find_key(key, settings)
        for key in dict.fromkeys(key for key, _ in assignments if key not in (*CHOICES, STAGES))
    }
    unknown = [key for key, name in names.items() if name is None]
    if unknown:
        others = [short(key, 50) for key in unknown[1:4]]
        others += [f"and {len(unknown) - 4:,} more"] if len(unknown) > 4 else []
        _unknown(unknown[0], settings, classes, f"; also unknown: {', '.join(others)}" if others else "")
    return {name: text for key, text in assignments if (name := names.get(key)) is not None}


def _unknown(key: str, settings: Mapping[str, Declared], classes: Classes, others: str) -> typing.NoReturn:
    """Raise the `UserError` for a key that no setting has; `others`: its end, about further keys."""
    key = short(key, 100)
    offered = {*settings, *CHOICES, *SHORT}
    if hint := our_name(key, offered, command_name(classes["algorithm"])):
        raise UserError(f"unknown setting {key}{hint} (more such names: docs/coming_from.md){others}")
    group, _, name = key.rpartition(".") if key.startswith(f"{STAGES}.") else key.partition(".")
    if group not in classes or not name:
        every = [*settings, *CHOICES, STAGES, *FLAGS, *SWITCHES, *SHORT]
        raise UserError(f"unknown setting {key}{similar(key, every)}; --help lists them{others}")
    if classes[group] is None:
        raise UserError(f"unknown setting {key}: choose the {group} by name first (--{group} NAME){others}")
    known_here = [setting.removeprefix(f"{group}.") for setting in settings if setting.startswith(f"{group}.")]
    has = f"{group} {command_name(classes[group])} has {', '.join(known_here) or 'no settings'}"
    raise UserError(f"unknown setting {key}: {has}{nearest(name, known_here)}{others}")


def _typed(settings: Mapping[str, Declared], texts: Mapping[str, str]) -> dict[str, Any]:
    """Key -> typed value of every setting."""
    values = {key: setting.default for key, setting in settings.items()}
    for key, text in texts.items():
        # What a program gave is shown as Python writes it: '3' is a text.
        shown = repr(text.value) if isinstance(text, Given) and not text.is_lenient else text
        hint = settings[key].type
        expected = f"{key} = {short(shown, 100)}: expected"
        if "\0" in text:
            raise UserError(f"{expected} a text without the character 0")
        words = f"{expected} {_type_in_words(hint)}"
        if str not in kinds(hint) and not isinstance(text, Given) and AMBIGUOUS.fullmatch(text.strip()):
            raise UserError(f"{words}, without leading zeros and colons (see --help)")
        try:
            values[key] = typed(text, hint)
        except (ValueError, RecursionError):
            raise UserError(f"{words} (see --help)") from None
        if isinstance(values[key], int) and abs(values[key]) >= LARGEST_INTEGER:
            raise UserError(f"{expected} a whole number of fewer than 19 digits")
        if isinstance(values[key], float) and abs(values[key]) > LARGEST:
            raise UserError(f"{expected} a number of at most {LARGEST:g}")
    return values


def _type_in_words(hint: Any) -> str:
    """A type as users read it, like "a whole number or null"."""
    words: dict[Any, str] = {Any: "a number, a text, true or false, null, or a list of them"}
    words |= {float: "a finite number", int: "a whole number", bool: "true or false", str: "text", type(None): "null"}
    if len(kinds(hint)) > 1:
        return " or ".join(map(_type_in_words, kinds(hint)))
    return words.get(hint, getattr(hint, "__name__", str(hint)) if isinstance(hint, type) else str(hint))


def _check_objects(objects: Mapping[str, Any], assignments: Assignments) -> None:
    """Check that no settings are given for a group whose object is given."""
    for key, _ in assignments:
        if key.partition(".")[0] in objects:
            group = key.partition(".")[0]
            raise UserError(f"{key}: {group} is given as an object: set this on the object")


def _build(
    kind: type[Kind], classes: Classes, values: dict[str, Any], objects: Mapping[str, Any], stage_classes: list[Any]
) -> Kind:
    """The `kind` of typed values; see `resolve` for `objects`."""

    def make(group: str) -> Any:
        return objects[group] if group in objects else classes[group](**of(group))

    def of(group: str) -> dict[str, Any]:
        prefix = f"{group}."
        return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}

    sections: dict[str, Any] = kind.filled(values)
    task = make("task")
    used = {group: classes[group] for group in CHOICES if classes[group] is not None and _uses(task, group)}
    stages = objects.get(STAGES) or [cls(**of(f"{STAGES}.{command_name(cls)}")) for cls in stage_classes]
    resolved: dict[str, Any] = {key: value for section in sections.values() for key, value in vars(section).items()}
    resolved |= {"resume": None}  # a settings file repeats a run from its beginning
    resolved |= {group: {"name": _written_name(group, cls), **of(group)} for group, cls in used.items()}
    resolved |= {group: _written(group, instance) for group, instance in objects.items() if group in used}
    resolved[STAGES] = {"name": ",".join(_stage_name(type(stage)) for stage in stages) or None}
    resolved[STAGES] |= {command_name(type(stage)): _fields(stage) for stage in stages if _fields(stage)}
    codec = make("codec") if classes["codec"] else None
    chosen: dict[str, Any] = {
        "algorithm": make("algorithm"),
        "task": task,
        "oracle": make("oracle"),
        "model_class": _maker(objects["model"]) if "model" in objects else classes["model"],
        "model_settings": of("model"),
        "partition": make("partition") if "partition" in used else None,
        "sending": Sending(make("aggregation"), tuple(stages), codec, values["faulty"]),
    }
    return kind(**sections, **chosen, resolved=resolved)


def same_on_all_ranks(config: Chosen | str) -> dict[str, str]:
    """Name -> text of the settings that must be equal on all ranks: whose fields do not say `per_rank`.

    Instead of a `Chosen` it may be a text to print.
    """
    if isinstance(config, str):
        return {"--help, --list or --print_config": "given"}
    parts = {"algorithm.": config.algorithm, "task.": config.task, "oracle.": config.oracle}
    parts |= {"aggregation.": config.sending.aggregation, "codec.": config.sending.codec or config.sending.aggregation}
    own = {f"{prefix}{name}" for prefix, part in parts.items() for name in per_rank(type(part))}
    own |= config.marked("per_rank")
    flat = flatten({**config.resolved, "resume": config.flat()["resume"], "paper": None})
    texts = {key: _told_apart(value) for key, value in flat.items() if key not in own}
    return {key: "a path with {client}" if PER_CLIENT.search(text) else text for key, text in texts.items()}


def _told_apart(value: Any) -> str:
    """A value as a text that no other value has: a text that looks like a number is in quotes."""
    return json.dumps(value) if isinstance(value, str) and not is_plain(value) else as_text(value)


def _maker(model: Any) -> Any:
    """A function that makes the model from what a program gave: a copy, which training may change, of a module.

    Also of one that a function returns: it may be the program's own.
    """
    if isinstance(model, type) or not callable(model) and not isinstance(model, nn.Module):
        return model
    if not isinstance(model, nn.Module):

        @functools.wraps(model, updated=())
        def make_copy(*arguments: Any, **settings: Any) -> Any:
            made = model(*arguments, **settings)
            try:
                return copy.deepcopy(made)
            except RuntimeError:  # of a module with tensors that autograd made, which cannot be copied
                return made

        return make_copy

    def make() -> Any:
        return copy.deepcopy(model)

    make.__name__ = type(model).__name__
    return make


def _written(group: str, instance: Any) -> dict[str, Any]:
    """An object as settings.yaml shows it: its class, and its fields where YAML can hold them."""
    if not isinstance(instance, CHOICES[group].base):
        return {"name": getattr(instance, "__qualname__", type(instance).__name__)}
    return {"name": _written_name(group, type(instance)), **_fields(instance)}


def _fields(instance: Any) -> dict[str, Any]:
    """An object's fields as YAML can hold them."""
    fields = dataclasses.fields(instance) if dataclasses.is_dataclass(instance) else ()
    values = {field.name: getattr(instance, field.name) for field in fields}
    simple = (str, int, float, bool, type(None))
    return {name: value if isinstance(value, simple) else type(value).__name__ for name, value in values.items()}


def _stage_name(cls: type) -> str:
    """See `_written_name`."""
    ours = known(own_stages, Stage)
    return command_name(cls) if ours.get(command_name(cls)) is cls else f"{cls.__module__}.{cls.__qualname__}"


def _check_partition(task: type[BaseTask], assignments: Assignments) -> None:
    """Check that a partition is named only with a task whose data it can split."""
    named = {key: text for key, text in assignments if key.partition(".")[0] == "partition" and text != "null"}
    if named and not _uses(task, "partition"):
        key, text = next(iter(named.items()))
        raise UserError(
            f"{key} = {short(text, 100)}: task {command_name(task)} has no data to partition: leave it out "
            "(a preset's or a file's: --partition null)"
        )


def _uses(task: type[BaseTask] | BaseTask, group: str) -> bool:
    """Whether a task uses the class chosen for a group."""
    has_partition = task.has_model if task.has_partition is None else task.has_partition
    return {"model": task.has_model, "partition": has_partition}.get(group, True)


def _written_name(group: str, cls: type) -> str:
    """A class's name in a settings file: its short name if it is one of fedmpi's, its dotted path otherwise."""
    ours = known(CHOICES[group].package, CHOICES[group].base)
    return command_name(cls) if ours.get(command_name(cls)) is cls else f"{cls.__module__}.{cls.__qualname__}"
