"""Nested values as names -> tensors, so that files can hold them without a pickle: `flatten`, and back: `unflatten`."""

import collections
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Path = tuple[Any, ...]  # name and keys of a value within a nested one
DEEPEST = 100  # levels; a list that contains itself has no last one
LONGEST = 10_000  # bits of an integer: reading text with more than 4,300 digits is an error in Python
EXPECTED = "tensors, numpy arrays, numbers, texts, bytes, None, and lists, tuples, sets and dicts of them"
_DICTS = (dict, collections.OrderedDict, collections.Counter)
_KINDS = {kind.__name__: kind for kind in (tuple, set, frozenset, collections.deque, torch.Size, *_DICTS)}
_FACTORIES = {kind.__name__: kind for kind in (int, float, str, list, dict, set)}  # of a defaultdict
PACKED_INTEGERS = {f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8)}


def flatten(value: Any, name: str) -> dict[str, Any]:
    """Name -> tensor or number, of a nested value: all names begin with `name`.

    Args:
        value: see `EXPECTED`. All keep their types; a tensor its dtype, layout in memory and kind of device, and
            whether it is the same one at several places. State dicts of torch are such, and states of generators.

    Raises:
        TypeError: with the place of the first other value.
    """
    if type(value) is dict and not value:
        return {f"{name}/dict": 0}
    tensors = _Written()
    text = json.dumps(_describe(value, tensors, (name,)))
    flat = {f"{name}/{number}": tensor for number, tensor in enumerate(tensors.written)}
    return {f"{name}/nested": torch.tensor([*text.encode()], dtype=torch.uint8), **flat}


def unflatten(flat: Mapping[str, Any], name: str, device: torch.device | str | None = None) -> Any:
    """The value that `flatten` took apart; its tensors are copied to a device, None: to the kind where they were.

    A kind that this machine lacks is the CPU.
    """
    if f"{name}/dict" in flat:
        return {}
    return build(json.loads(bytes(flat[f"{name}/nested"].tolist())), Tensors(flat, name, device))


def _describe(value: Any, tensors: "_Written", path: Path) -> Any:
    """A value as JSON can hold it; its tensors are added to `tensors`: id -> (original, what is written)."""
    kind = type(value)
    if value is None or kind in (bool, str, float) or (kind is int and value.bit_length() <= LONGEST):
        return value
    if len(path) > DEEPEST:
        raise TypeError(f"{_shown(path[:4])}... is nested more than {DEEPEST} levels deep")
    if kind is list:
        return [_describe(part, tensors, (*path, number)) for number, part in enumerate(value)]
    if kind in (torch.Tensor, torch.nn.Parameter) and _is_plain(value):
        return _describe_tensor(value, tensors)
    if isinstance(value, np.ndarray | np.generic) and _is_plain_array(kind, array := np.asarray(value)):
        found = {"array": tensors.add(value, _bits(array.tobytes())), "type": array.dtype.str}
        return {**found, "shape": list(array.shape), "scalar": kind is not np.ndarray}
    if kind in (bytes, bytearray):
        return {kind.__name__: tensors.add(value, _bits(value))}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind in (torch.dtype, torch.device):
        return {kind.__name__: str(value).removeprefix("torch.")}
    if kind in _DICTS:
        found = {kind.__name__: _describe_items(value, tensors, path)}
        versions = vars(value).get("_metadata") if kind is collections.OrderedDict else None  # of a module's state dict
        return found if versions is None else {**found, "metadata": _describe(versions, tensors, (*path, "_metadata"))}
    if kind is collections.defaultdict and getattr(value.default_factory, "__name__", None) in (None, *_FACTORIES):
        factory = value.default_factory and value.default_factory.__name__
        if factory is None or value.default_factory is _FACTORIES[factory]:
            return {"defaultdict": _describe_items(value, tensors, path), "factory": factory}
    if kind.__name__ in _KINDS and kind is _KINDS[kind.__name__]:
        found = {kind.__name__: [_describe(part, tensors, (*path, number)) for number, part in enumerate(value)]}
        return {**found, "longest": value.maxlen} if kind is collections.deque else found
    called = f"a {kind.__name__}"
    if isinstance(value, torch.Tensor):
        called = f"a {kind.__name__} of type {value.dtype} and layout {value.layout} on {value.device}"
    raise TypeError(f"{_shown(path)} is {called}: expected {EXPECTED}")


def _describe_items(value: Mapping[Any, Any], tensors: "_Written", path: Path) -> list[list[Any]]:
    for key in value:
        if isinstance(key, torch.Tensor):
            raise TypeError(f"{_shown(path)} has a tensor as a key: expected numbers, texts or tuples of them")
    return [
        [_describe(key, tensors, (*path, "a key")), _describe(part, tensors, (*path, key))]
        for key, part in value.items()
    ]


def _shown(path: Path) -> str:
    """Where a value is: objects['schedule']['gamma']."""
    return str(path[0]) + "".join(f"[{key!r:.60}]" for key in path[1:])


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is no more than numbers in memory, each of whole bytes."""
    name = str(tensor.dtype).removeprefix("torch.")
    is_packed = name.startswith(("bits", "float4", "q")) or name in PACKED_INTEGERS
    return tensor.layout == torch.strided and not (tensor.is_meta or tensor.is_nested or is_packed)


def _is_plain_array(kind: type, array: npt.NDArray[Any]) -> bool:
    """Whether an array, or a scalar of some `kind`, has only numbers, texts or dates, of the same size."""
    if kind not in (np.ndarray, array.dtype.type):  # a class of its own
        return False
    return not array.dtype.hasobject and array.dtype.names is None and np.dtype(array.dtype.str) == array.dtype


def _bits(value: bytes | bytearray) -> torch.Tensor:
    return torch.frombuffer(bytearray(value), dtype=torch.uint8) if len(value) else torch.empty(0, dtype=torch.uint8)


class _Written:
    """The tensors that are written of a nested value, in their order; the same original is written once."""

    def __init__(self) -> None:
        self.written: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}
        self._originals: list[Any] = []  # they stay alive

    def add(self, original: Any, written: torch.Tensor) -> int:
        """The number of a tensor; `original` stays alive, so that nothing else has its id."""
        if id(original) not in self._numbers:
            self._numbers[id(original)] = len(self.written)
            self.written.append(written)
            self._originals.append(original)
        return self._numbers[id(original)]


def _describe_tensor(value: torch.Tensor, tensors: "_Written") -> dict[str, Any]:
    described: dict[str, Any] = {"tensor": tensors.add(value, value.detach().resolve_conj().resolve_neg())}
    if not value.is_contiguous() and _is_dense(value):
        described["stride"] = list(value.stride())
    if value.device.type != "cpu":
        described["device"] = value.device.type
    if type(value) is torch.nn.Parameter:
        described["parameter"] = value.requires_grad
    return described


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements fill its memory without gaps, in any order of its dimensions."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride()), key=lambda pair: pair[1]):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


class Tensors:
    """The tensors of a flat value, each made once."""

    def __init__(self, flat: Mapping[str, Any], name: str, device: torch.device | str | None) -> None:
        self._flat, self._name, self._device = flat, name, device
        self._made: dict[int, torch.Tensor] = {}

    def __call__(self, described: dict[str, Any]) -> torch.Tensor:
        number = described["tensor"]
        if number not in self._made:
            value = self._flat[f"{self._name}/{number}"]
            device = self._device or _available(described.get("device", "cpu"))
            if "stride" in described:
                value = torch.empty_strided(value.shape, described["stride"], dtype=value.dtype).copy_(value)
            value = value.to(device, copy=True)
            is_parameter = "parameter" in described
            self._made[number] = torch.nn.Parameter(value, described["parameter"]) if is_parameter else value
        return self._made[number]

    def bits(self, number: int) -> bytearray:
        return bytearray(self._flat[f"{self._name}/{number}"].numpy().tobytes())


def _available(kind: str) -> str:
    """A kind of device; the CPU if this machine has none of it."""
    return kind if kind == "cpu" or torch.get_device_module(kind).is_available() else "cpu"


def build(described: Any, tensors: "Tensors") -> Any:
    """The value that `_describe` described; `tensors` is a `Tensors`."""
    if isinstance(described, list):
        return [build(part, tensors) for part in described]
    if not isinstance(described, dict):
        return described
    if "tensor" in described:
        return tensors(described)
    kind, content = next(iter(described.items()))
    if kind == "array":
        array = np.ndarray(described["shape"], described["type"], tensors.bits(content))
        return array[()] if described["scalar"] else array
    if kind in ("bytes", "bytearray"):
        return bytes(tensors.bits(content)) if kind == "bytes" else tensors.bits(content)
    if kind == "complex":
        return complex(*content)
    if kind in ("dtype", "device"):
        return getattr(torch, content) if kind == "dtype" else torch.device(content)
    if kind in ("dict", "OrderedDict", "Counter", "defaultdict"):
        items = [(build(key, tensors), build(part, tensors)) for key, part in content]
        if kind == "defaultdict":
            return collections.defaultdict(_FACTORIES.get(described["factory"]), items)
        made: Any = _KINDS[kind](dict(items))
        if "metadata" in described:
            made._metadata = build(described["metadata"], tensors)
        return made
    items = build(content, tensors)
    return collections.deque(items, described["longest"]) if kind == "deque" else _KINDS[kind](items)
