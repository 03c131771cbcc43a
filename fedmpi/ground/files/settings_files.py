"""Reading settings files, which may come from strangers: files of a limited size, without YAML's surprises.

YAML 1.1 reads ``010`` as 8, ``1:30`` as 90, ``yes`` as true and ``2024-01-01`` as a date. Here these are text, which
a setting of another type refuses. Aliases, tags and repeated keys are refused.
"""

import pathlib
import re
import stat
from collections.abc import Mapping
from typing import Any

import yaml

from fedmpi.ground.errors import UserError, attempt
from fedmpi.ground.text import short

LARGEST_FILE = 1 << 20  # bytes; a settings file has a few thousand
DEEPEST = 20  # levels of nesting
LONGEST_NUMBER = 400  # digits
# Texts that YAML 1.1 reads as other numbers than a person does: 010 as 8 (octal), and 1:30 as 90 (base 60).
AMBIGUOUS = re.compile(r"[-+]?0[0-9_]+|[-+]?[0-9]+(:[0-9]+)+(\.[0-9]*)?")


_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is ten times as fast
_SafeDumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Loader(_SafeLoader):
    """YAML without repeated keys and surprising words."""

    yaml_implicit_resolvers: dict[str, Any] = {}

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.YAMLError(f"line {key.start_mark.line + 1}: a key that is not a word")
            if key.value in seen:
                raise yaml.YAMLError(f"line {key.start_mark.line + 1}: the key {key.value} appears twice")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _check_events(text: str) -> None:
    """Check that a YAML text has no aliases, tags and deep nesting."""
    depth = 0
    for event in yaml.parse(text, _Loader):
        where = f"line {event.start_mark.line + 1}"
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError(f"{where}: an alias (*): write the value again")
        if getattr(event, "tag", None) is not None:
            raise yaml.YAMLError(f"{where}: a tag ({event.tag}): expected plain values")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise yaml.YAMLError(f"{where}: nested more than {DEEPEST} levels deep")


def _resolve(tag: str, pattern: str, first: Any, loader: Any = _Loader) -> None:
    loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"^(?:{pattern})$"), first)


_resolve("bool", "true|True|TRUE|false|False|FALSE", "tTfF")
_resolve("null", "~|null|Null|NULL|", ["~", "n", "N", ""])
_resolve("int", "[-+]?(?:0|[1-9][0-9_]*)", "-+0123456789")
_resolve(
    "float",
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9_]+)(?:[eE][-+][0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
    "-+0123456789.",
)


def read_settings_file(path: pathlib.Path, where: str, marks_quoted: bool = False) -> dict[str, Any]:
    """The content of a YAML or TOML file (if it ends in .toml): a dict of words, numbers, lists and dicts.

    `where` begins messages. `marks_quoted`: whether texts in quotes are `Quoted`.

    Raises:
        UserError: one line, if it is no regular file, cannot be read, or contains something else.
    """
    with attempt("read", where, Exception):  # both parsers raise errors of many kinds
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{where}: cannot be read: expected a regular file")
        if status.st_size > LARGEST_FILE:
            raise UserError(f"{where}: cannot be read: has {status.st_size:,} bytes: expected at most {LARGEST_FILE:,}")
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".toml":
            content = _read_toml(text, where)
            content = _quoted(content) if marks_quoted else content
        else:
            _check_events(text)
            content = yaml.load(text, _FileLoader if marks_quoted else _Loader)  # noqa: S506  they accept less
        if not isinstance(content, dict):
            raise UserError(f"{where}: expected settings like 'rounds: 100', one per line")
        _check(content)
    return content


def _read_toml(text: str, where: str) -> dict[str, Any]:
    try:
        import tomllib
    except ImportError:
        raise UserError(f"{where}: TOML files need Python 3.11 or newer; write it as YAML") from None
    return tomllib.loads(text)


def _quoted(value: object) -> Any:
    """The content of a TOML file, all texts of which stand in quotes, with these as `Quoted`."""
    if isinstance(value, dict):
        return {key: _quoted(inner) for key, inner in value.items()}
    return Quoted(value) if isinstance(value, str) else value


class Quoted(str):
    """A text that stands in quotes in a settings file, or in TOML: it is that text, also if it looks like a number."""


class _FileLoader(_Loader):
    """A loader that gives texts in quotes as `Quoted`."""


def _construct_text(loader: Any, node: Any) -> Any:
    text = loader.construct_scalar(node)
    return Quoted(text) if node.style in ("'", '"', "|", ">") else text


_FileLoader.add_constructor("tag:yaml.org,2002:str", _construct_text)


class _ValueLoader(_Loader):
    """A loader of single values, which also reads 1e-3 as a number and yes, no, on and off as true and false."""


_resolve(
    "float", r"[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+|[-+]?\.[0-9]+[eE][-+]?[0-9]+", "-+0123456789.", _ValueLoader
)
_resolve("bool", "yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF", "yYnNoO", _ValueLoader)


def read_value(text: str) -> Any:
    """The value that the text of a setting means, whatever its type: a number, a word, a list, ...

    Raises:
        ValueError: if it is not one.
    """
    if not text.strip() or text.lstrip().startswith("#"):
        return text
    try:
        _check_events(text)
        value = yaml.load(text, _ValueLoader)  # noqa: S506  a safe loader that accepts less
        _check(value)
    except yaml.YAMLError:
        return text
    return text if isinstance(value, str) else value


class _Dumper(_SafeDumper):
    """YAML whose texts are read as these texts: in quotes if they would be something else without."""


def is_plain(text: str) -> bool:
    """Whether a text is read as itself where it stands without quotes, and not as a number or another value."""
    try:
        return isinstance(read_value(text), str) and not AMBIGUOUS.fullmatch(text.strip())
    except (ValueError, RecursionError):
        return False


def _represent_text(dumper: Any, text: str) -> Any:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if is_plain(text) else "'")


_Dumper.add_representer(str, _represent_text)


def settings_text(settings: Mapping[str, Any]) -> str:
    """A nested dict of settings as the text of a settings file, which `read_settings_file` reads as the same dict."""
    return str(yaml.dump(settings, Dumper=_Dumper, sort_keys=False))


def _check(value: object, depth: int = 0) -> None:
    """Check that a value read from a file holds nothing but words, numbers, lists and dicts, in a few levels."""
    if depth > DEEPEST:
        raise ValueError(f"nested more than {DEEPEST} levels deep")
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise ValueError(f"the key {short(key, 50)}: expected a word")
            _check(inner, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            _check(inner, depth + 1)
    elif isinstance(value, int) and abs(value) >= 10**LONGEST_NUMBER:
        raise ValueError(f"a number of more than {LONGEST_NUMBER} digits")
