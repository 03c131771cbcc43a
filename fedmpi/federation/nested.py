"""Nested values as names -> tensors and numbers, so that files can hold them without a pickle."""

import torch

_KINDS = {tuple: "tuple", list: "list", dict: "dict"}


def flatten(value, name):
    """Name -> tensor or number, of nested dicts, tuples and lists of tensors, numbers and None.

    Raises:
        TypeError: if it contains anything else.
    """
    if isinstance(value, torch.Tensor | int | float):
        return {name: value}
    if value is None:
        return {f"{name}/none": 0}
    if type(value) not in _KINDS:
        raise TypeError(f"{name} is a {type(value).__name__}: expected tensors and numbers in tuples, lists, dicts")
    items = value.items() if isinstance(value, dict) else enumerate(value)
    flat = {f"{name}/{_KINDS[type(value)]}": len(value)}
    for key, inner in items:
        flat |= flatten(inner, f"{name}/{key}")
    return flat


def unflatten(flat, name, device):
    """The value that `flatten` took apart; tensors are copied to a device."""
    if name in flat:
        value = flat[name]
        return value.to(device, copy=True) if isinstance(value, torch.Tensor) else value
    if f"{name}/none" in flat:
        return None
    kind = next((kind for kind in _KINDS.values() if f"{name}/{kind}" in flat), None)
    if kind is None:
        raise KeyError(name)
    if kind == "dict":
        inner = [key[len(name) + 1 :].split("/")[0] for key in flat if key.startswith(f"{name}/")]
        return {key: unflatten(flat, f"{name}/{key}", device) for key in dict.fromkeys(inner) if key != "dict"}
    items = [unflatten(flat, f"{name}/{number}", device) for number in range(int(flat[f"{name}/{kind}"]))]
    return tuple(items) if kind == "tuple" else items
