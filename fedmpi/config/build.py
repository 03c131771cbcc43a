"""The settings of a run: typed dataclasses, a YAML or TOML file, and the command line.

Six groups: the run itself, and one choice each of algorithm, task, oracle, model and partition. A choice is
a name and that class's own settings: ``--algorithm fafed --algorithm.step_size 0.01``, or in a file

    algorithm: {name: fafed, step_size: 0.01}     # or just  algorithm: fafed
"""

import dataclasses
import inspect
import json
import os
import pathlib
import types
import typing

import jsonargparse
import yaml
from torch import nn

import fedmpi.algorithms
import fedmpi.data.partitions
import fedmpi.models
import fedmpi.oracles
import fedmpi.tasks
from fedmpi.algorithms.base import Algorithm
from fedmpi.config.run import Run
from fedmpi.data.partitions.base import Partition
from fedmpi.errors import UserError
from fedmpi.federation import costs
from fedmpi.oracles import OracleKind
from fedmpi.presets import is_paper, preset_names, preset_path, summary
from fedmpi.registry import command_name, find, known
from fedmpi.settings import nearest
from fedmpi.tasks.base import Task


@dataclasses.dataclass(frozen=True)
class Config:
    """A run as resolved: everything needed to repeat it.

    Attributes:
        run: a `Run`. algorithm: an `Algorithm`. task: a `Task`. oracle: an `OracleKind`.
        model_class, model_settings: a `torch.nn.Module` class and its keyword arguments; None and
            {} where the task's default model or no model is meant.
        partition: a `Partition`, or None where the task has none.
        resolved: nested dict of all of it, as written to the run folder and by --print_config.
    """

    run: Run
    algorithm: Algorithm
    task: Task
    oracle: OracleKind
    model_class: type | None
    model_settings: dict
    partition: Partition | None
    resolved: dict


# group -> (package that holds the classes, their base class, default name)
CHOICES = {
    "algorithm": (fedmpi.algorithms, Algorithm, "fafed"),
    "task": (fedmpi.tasks, Task, "classification"),
    "oracle": (fedmpi.oracles, OracleKind, "autograd"),
    "model": (fedmpi.models, nn.Module, None),
    "partition": (fedmpi.data.partitions, Partition, "even"),
}
SHORT = {"data": "task.data", "autocast": "oracle.autocast"}  # what may be written for what
INSTEAD = {"rounds": "epochs", "local_steps": "local_epochs"}  # the second, where it is set, stands for the first
FLAGS = {
    "preset": "NAME: settings of an experiment of the papers (--list presets); --config and the command line go first",
    "config": "PATH: settings from a YAML or TOML file; the command line goes first",
    "print_config": "print the settings as resolved, in the form of a file, and end",
    "list": "WHAT: print the known algorithms, tasks, oracles, models, partitions or presets, and end",
    "traceback": "show where an error arose",
    "help": "this text, for the chosen algorithm, task, oracle, model and partition",
}


def read_command_line(arguments):
    """Settings from a command line.

    Args:
        arguments: list of words, without the program's name.

    Returns:
        a `Config`, or a `str` to print instead of running (--help, --list, --print_config).

    Raises:
        UserError: one line: what came, what is allowed.
    """
    words, flags = _split_words(arguments)
    if "list" in flags:
        return _list(flags["list"])
    files = [("--preset", preset_path(flags["preset"]))] if "preset" in flags else []
    files += [("--config", pathlib.Path(flags["config"]))] if "config" in flags else []
    contents = [_read(path, flag) for flag, path in files]
    paper = next((content["paper"] for content in reversed(contents) if content.get("paper")), {})
    words = _merge([*map(_file_words, contents), words], paper.get("methods", {}))
    classes = {}
    for group in CHOICES:
        classes[group] = _choose(group, _last_value(words, group), classes)
    parser, keys = _parser(classes)
    if "help" in flags:
        return parser.format_help()
    _check_keys(words, keys, classes)
    values = _parse(parser, words, keys)
    config = _build(classes, values, paper)
    return yaml.safe_dump(config.resolved, sort_keys=False).rstrip() if "print_config" in flags else config


def _split_words(arguments):
    """([(key, text), ...], {flag: text}) from the words of a command line."""
    words, flags = [], {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word == "-h":
            word = "--help"
        if not word.startswith("--"):
            raise UserError(f"'{word}': expected an option, like --rounds 100 (see --help)")
        key, has_value, text = word[2:].partition("=")
        key = key.replace("-", "_")
        if key in ("print_config", "help", "traceback"):
            flags[key] = True
            continue
        if not has_value:
            if not rest or rest[0].startswith("--"):
                raise UserError(f"--{key}: expected a value after it (see --help)")
            text = rest.pop(0)
        if key in ("preset", "config", "list"):
            flags[key] = text
        else:
            words.append((key, text))
    return words, flags


def _read(path, flag):
    """The content of a settings file, a dict; `flag` is how the user named it."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".toml":
            import tomllib

            content = tomllib.loads(text)
        else:
            content = yaml.safe_load(text)
    except ImportError:
        raise UserError(f"{flag} {path}: TOML files need Python 3.11 or newer; write it as YAML") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{flag} {path}: cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UserError(f"{flag} {path}: expected settings like 'rounds: 100', one a line")
    if not is_paper(content.get("paper") or {}):
        raise UserError(f"{flag} {path}: paper: is no setting; expected source, printed and methods as in a preset")
    return content


def _file_words(content):
    """The settings of a file in the form of `_split_words`, so that both are checked alike."""
    words = []
    for key, value in content.items():
        if key == "paper":
            continue
        if not isinstance(value, dict):
            words.append((str(key), _as_word(value)))
            continue
        for inner, inner_value in value.items():
            words.append((str(key) if inner == "name" else f"{key}.{inner}", _as_word(inner_value)))
    return words


def _merge(layers, methods):
    """Words of several layers as one list, later layers going first.

    A layer that chooses another class than those before it drops what they say of the old one: its
    settings would be wrong for the new one, which has its own defaults. In the same way --rounds on
    the command line undoes a file's epochs.

    Args:
        layers: lists of words. methods: algorithm -> its settings, where a layer chooses another algorithm.
    """
    merged = []
    for layer in layers:
        words = [(SHORT.get(key, key), text) for key, text in layer]
        for group in CHOICES:
            old, new = (_plain(_last_value(some, group)) for some in (merged, words))
            if None not in (old, new) and old != new:
                merged = [(key, text) for key, text in merged if key.partition(".")[0] != group]
                settings = (methods.get(new) or {}) if group == "algorithm" else {}
                merged += [(f"{group}.{key}", _as_word(value)) for key, value in settings.items()]
        undone = {INSTEAD[key] for key, _ in words if key in INSTEAD}
        merged = [(key, text) for key, text in merged if key not in undone] + words
    return merged


def _plain(name):
    return None if name is None else name.lower().replace("-", "_")


def _as_word(value):
    return value if isinstance(value, str) else json.dumps(value)


def _last_value(words, key):
    values = [text for k, text in words if k == key]
    return values[-1] if values else None


def _choose(group, name, chosen):
    """The class chosen for a group, or None where the task decides (a model that is not named).

    Where the user names none, a task or an algorithm chosen before may name its own: the black-box
    attack comes with the two-point oracle, the AUC task with its partition.
    """
    package, base, default = CHOICES[group]
    if name in (None, "null"):
        wishes = [getattr(cls, group, None) for cls in (chosen.get("task"), chosen.get("algorithm"))]
        name = next((wish for wish in wishes if isinstance(wish, str)), default)
    return None if name is None else find(group, name, package, base)


def _settings_of(cls):
    """[(name, type, default, help with the allowed words)] of what a user can set of a class."""
    if dataclasses.is_dataclass(cls):
        hints = typing.get_type_hints(cls)
        return [(f.name, hints[f.name], f.default, _help(f)) for f in dataclasses.fields(cls)]
    settings = []
    for name, parameter in inspect.signature(cls).parameters.items():
        if name in ("shape", "num_classes") or parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            continue
        hint = typing.get_type_hints(cls.__init__).get(name, typing.Any)
        settings.append((name, hint, parameter.default, ""))
    return settings


def _help(field):
    text, among = field.metadata.get("help", ""), field.metadata.get("among")
    return f"{text} [{' | '.join(map(str, among))}]" if among else text


def _parser(classes):
    """(parser, its keys) for the chosen classes."""
    parser = jsonargparse.ArgumentParser(
        usage="mpirun -np RANKS python -m fedmpi.train [--SETTING VALUE ...] (hyphens may stand for underscores)",
        add_help=False,
        exit_on_error=False,
    )
    keys = {}
    group = parser.add_argument_group("the run")
    for name, hint, default, text in _settings_of(Run):
        group.add_argument(f"--{name}", type=hint, default=default, help=text, metavar="VALUE")
        keys[name] = (hint, default)
    for kind, cls in classes.items():
        title = f"{kind}: {command_name(cls)}" if cls else f"{kind}: the task's own"
        group = parser.add_argument_group(f"{title} (--{kind} NAME chooses another; --list {kind}s)")
        for name, hint, default, text in _settings_of(cls) if cls else ():
            default = None if default is inspect.Parameter.empty else default
            group.add_argument(f"--{kind}.{name}", type=hint, default=default, help=text, metavar="VALUE")
            keys[f"{kind}.{name}"] = (hint, default)
    group = parser.add_argument_group("and")
    for flag, text in FLAGS.items():
        group.add_argument(f"--{flag}", action="store_true", help=text)
    return parser, keys


def _check_keys(words, keys, classes):
    for key, _ in words:
        if key in keys or key in CHOICES:
            continue
        kind, _, inner = key.partition(".")
        if kind in CHOICES and inner:
            cls = classes[kind]
            if cls is None:
                raise UserError(f"unknown setting {key}: choose the {kind} by name first (--{kind} NAME)")
            known_here = [k.partition(".")[2] for k in keys if k.startswith(f"{kind}.")]
            raise UserError(
                f"unknown setting {key}: {kind} {command_name(cls)} has {', '.join(known_here) or 'no settings'}"
                f"{nearest(inner, known_here)}"
            )
        every = [*keys, *CHOICES, *FLAGS, *SHORT]
        raise UserError(f"unknown setting {key}{nearest(key, every)}; --help lists them")


def _parse(parser, words, keys):
    """key -> typed value."""
    chosen = {key: text for key, text in words if key not in CHOICES}
    for key, text in chosen.items():
        try:
            parser.parse_args([f"--{key}={text}"])
        except (jsonargparse.ArgumentError, TypeError, ValueError, SystemExit):
            hint = keys[key][0]
            raise UserError(f"{key} = {text}: expected {_in_words(hint)} (see --help)") from None
    namespace = parser.parse_args([f"--{key}={text}" for key, text in chosen.items()])
    return {key: namespace[key] for key in keys}


def _in_words(hint):
    """What a setting of some type may be."""
    words = {float: "a finite number", int: "a whole number", bool: "true or false", str: "words", type(None): "null"}
    if isinstance(hint, types.UnionType):
        return " or ".join(map(_in_words, typing.get_args(hint)))
    return words.get(hint, getattr(hint, "__name__", str(hint)) if isinstance(hint, type) else str(hint))


def _build(classes, values, paper):
    def of(kind):
        return {k.partition(".")[2]: v for k, v in values.items() if k.startswith(f"{kind}.")}

    run = Run(**{k: v for k, v in values.items() if "." not in k})
    if run.data_dir is None and os.environ.get("FEDMPI_DATA"):
        run = dataclasses.replace(run, data_dir=os.environ["FEDMPI_DATA"])
    task = classes["task"](**of("task"))
    has_partition = task.has_model if task.has_partition is None else task.has_partition
    if not task.has_model and classes["model"]:
        raise UserError(f"task {command_name(classes['task'])} has no choice of model: leave --model out")
    if run.holdout and not task.can_hold_out:
        raise UserError(f"holdout = {run.holdout}: task {command_name(classes['task'])} keeps no data aside")
    resolved = dataclasses.asdict(run)
    for kind, cls in classes.items():
        has_it = {"model": task.has_model, "partition": has_partition}.get(kind, True)
        if cls is not None and has_it:
            resolved[kind] = {"name": _spelled(kind, cls), **of(kind)}
    if paper:
        resolved["paper"] = paper
    return Config(
        run=run,
        algorithm=classes["algorithm"](**of("algorithm")),
        task=task,
        oracle=classes["oracle"](**of("oracle")),
        model_class=classes["model"],
        model_settings=of("model"),
        partition=classes["partition"](**of("partition")) if has_partition else None,
        resolved=resolved,
    )


def _spelled(kind, cls):
    """How a settings file names a class: by its short name if it is one of ours."""
    package, base, _ = CHOICES[kind]
    ours = known(package, base)
    return command_name(cls) if ours.get(command_name(cls)) is cls else f"{cls.__module__}.{cls.__qualname__}"


def _list(what):
    kinds = {f"{kind}s": kind for kind in (*CHOICES, "preset")}
    kind = kinds.get(what if what.endswith("s") else f"{what}s")
    if kind is None:
        raise UserError(f"--list {what}: expected one of {', '.join(kinds)}{nearest(what, kinds)}")
    if kind == "algorithm":
        return costs.table()
    if kind == "preset":
        rows = [(name, summary(name)) for name in preset_names()]
    else:
        package, base, _ = CHOICES[kind]
        rows = [(name, (cls.__doc__ or "").strip().split("\n")[0]) for name, cls in known(package, base).items()]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)
