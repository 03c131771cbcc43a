"""What a module is beside its tensors: the kinds of its parts, their settings, and a digest of their code.

Modules of equal names and shapes can compute different things. A run records what its model was, so that trained
tensors are not put into another one unnoticed.
"""

import hashlib
import sys
import types
import typing
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

PYTHON = f"{sys.implementation.cache_tag} "  # of digests of code: that of another version cannot be compared
LONGEST = 200  # characters of a setting
_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)
_OF_EVERY_MODULE = {*vars(nn.Module()), "training"}
_DROPOUTS = nn.modules.dropout._DropoutNd


class Part(typing.NamedTuple):
    """One module of a tree.

    Attributes:
        kind: name of its class. settings: name -> text of its plain attributes; "" is what torch prints of it.
        code: digest of its methods, of this version of Python; "" of torch's own classes.
        is_lazy: whether its settings come with its first pass.
    """

    kind: str
    settings: dict[str, str]
    code: str = ""
    is_lazy: bool = False


def unwrapped(module: nn.Module) -> nn.Module:
    """The user's own module, inside `torch.compile`, `DataParallel` and `DistributedDataParallel`."""
    while True:
        if isinstance(module, _WRAPPERS):
            module = module.module
        elif isinstance(inner := module._modules.get("_orig_mod"), nn.Module):
            module = inner
        else:
            return module


def describe(module: nn.Module) -> dict[str, Part]:
    """Name -> `Part` of all modules in a tree; the module itself is ""."""
    return {name: _part(part) for name, part in module.named_modules()}


def as_json(parts: dict[str, Part], later: nn.Module | None = None) -> dict[str, list[typing.Any]]:
    """What `describe` returned, for JSON; without the settings that `later`, the module at the end, has otherwise.

    Those are no settings, but counters and the like.
    """
    now = parts if later is None else describe(later)
    kept = {}
    for name, part in parts.items():
        same = now[name].settings if name in now else {}
        settings = {key: text for key, text in part.settings.items() if same.get(key) == text}
        kept[name] = [part.kind, settings, part.code]
    return kept


def difference(
    recorded: typing.Any, parts: dict[str, Part], ignored: Callable[[str], bool] = lambda name: False
) -> str:
    """How a module, as `describe` gives it, differs from the one that `as_json` recorded, as text; "" if it does not.

    `ignored`: whether a part of this name may differ.
    """
    if not isinstance(recorded, dict):  # of a folder without the record, or of another program
        return ""
    for name, entry in recorded.items():
        if not _is_entry(entry) or ignored(name):
            continue
        where, kind = f"its part '{name}'" if name else "it", str(entry[0])
        if name not in parts:
            return f"{where} is missing, the run's is a {kind}"
        part = parts[name]
        if part.kind != kind:
            return f"{where} is a {part.kind}, the run's is a {kind}"
        for key, text in {} if part.is_lazy else entry[1].items():
            now = part.settings.get(key, "none")
            if now != text:
                label = f"{key} = " if key else ""
                return f"{where} is a {kind} with {label}{now}, the run's has {label}{text}"
    new = next((name for name in parts if name not in recorded and not ignored(name)), None)
    return "" if new is None else f"its part '{new}', a {parts[new].kind}, is not in the run's"


def other_code(recorded: typing.Any, parts: dict[str, Part]) -> str:
    """The class of the first part whose code is not that which was recorded; "" if there is none."""
    for name, entry in recorded.items() if isinstance(recorded, dict) else ():
        if _is_entry(entry) and str(entry[2]).startswith(PYTHON) and name in parts and parts[name].code != entry[2]:
            return parts[name].kind
    return ""


def _is_entry(entry: typing.Any) -> bool:
    return isinstance(entry, list) and len(entry) == 3 and isinstance(entry[1], dict)


def _part(module: nn.Module) -> Part:
    cls: typing.Any = type(module)
    is_lazy = isinstance(module, LazyModuleMixin)
    if is_lazy and module.cls_to_become is not None:
        cls = module.cls_to_become
    is_torchs = cls.__module__.startswith("torch.nn.")
    is_dropout = isinstance(module, _DROPOUTS)  # which acts in training only
    printed = "" if is_dropout else " ".join(module.extra_repr().split())[:LONGEST]
    settings = {"": printed} if printed else {}
    if not is_dropout and not (is_torchs and printed):
        settings |= {name: text for name, value in vars(module).items() if (text := _as_text(name, value)) is not None}
    return Part(cls.__name__, settings, "" if is_torchs else _code_of(module), is_lazy)


def _as_text(name: str, value: object) -> str | None:
    """A plain attribute as text; None if it is no setting: an object, a place, or what acts in training only."""
    if name in _OF_EVERY_MODULE or "drop" in name.lower():
        return None
    if isinstance(value, str) and ("/" in value or "\\" in value or value.partition(":")[0] in ("cpu", "cuda", "mps")):
        return None
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return str(value)[:LONGEST]
    if isinstance(value, tuple | list):
        texts = [_as_text("", item) for item in value[:LONGEST]]
        return None if None in texts else f"[{', '.join(map(str, texts))}]"[:LONGEST]
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        return value.__name__
    return None


def _code_of(module: nn.Module) -> str:
    """A digest of the methods that a module's classes define, but __init__, and of functions among its attributes."""
    found = hashlib.blake2b(digest_size=8)
    for cls in type(module).__mro__:
        if cls.__module__.partition(".")[0] in ("torch", "builtins"):
            continue
        for name, value in vars(cls).items():
            code = getattr(getattr(value, "__func__", value), "__code__", None)  # also of static methods
            if code is not None and name != "__init__":
                _add_code(found, name, code)
    for name, value in vars(module).items():
        if isinstance(value, types.FunctionType):
            _add_code(found, name, value.__code__)
    return PYTHON + found.hexdigest()


def _add_code(found: typing.Any, name: str, code: types.CodeType) -> None:
    """Add a function's code to a digest, without its lines' numbers and its text."""
    constants: list[typing.Any] = list(code.co_consts)
    if constants and isinstance(constants[0], str):  # its documentation, if it has one
        del constants[0]
    found.update(f"{name} {code.co_names} {code.co_freevars}".encode())
    found.update(code.co_code)
    for constant in constants:
        if isinstance(constant, types.CodeType):
            _add_code(found, constant.co_name, constant)
        else:
            text = sorted(map(repr, constant)) if isinstance(constant, frozenset) else repr(constant)
            found.update(str(text).encode(errors="replace"))
