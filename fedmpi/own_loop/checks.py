"""What `join` and `average` check of their arguments before any work, on each rank and between the ranks."""

import dataclasses
import inspect
import numbers
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from fedmpi.comm.agreement import agree, check_equal
from fedmpi.comm.job.equality import check_same_model, check_software
from fedmpi.config.foreign_names import our_names, similar
from fedmpi.federation.private import matching
from fedmpi.ground.errors import UserError
from fedmpi.ground.settings import LARGEST, nearest
from fedmpi.ground.text import short
from fedmpi.oracles.flat_module import check_whole, odd_kind

BUFFERS = ("equal", "rank0", "average")


def check_same(
    link: Any, module: torch.nn.Module, algorithm: Any, arguments: dict[str, Any], buffers: str, private: str | None
) -> None:
    """Check that all ranks run the same fedmpi, with the same model, but for trained values, and the same settings.

    Collective on the link.

    Args:
        algorithm: an `Algorithm`, whose fields are settings. arguments: name -> value of the others.
        buffers, private: see `fedmpi.average`.

    Raises:
        AgreedUserError: on every rank, with the first that differs, and on which ranks.
    """
    check_software(link)
    own = agree(link, lambda: private_names(module, buffers, private), tells=True)
    arguments = {**arguments, "buffers": buffers, "private": private or None}
    fields = {field.name: getattr(algorithm, field.name) for field in dataclasses.fields(algorithm)}
    texts = {name: as_text(value) for name, value in {**arguments, **fields}.items()}
    check_equal(link, texts, "expected the same on all ranks, but for weight")
    compared = compared_values(module, buffers, own)
    hint = 'must be the same on all ranks; buffers="rank0" or "average" makes buffers equal, private="NAME" keeps parts'
    check_same_model(link, module, hint, compared.__contains__)


def compared_values(module: torch.nn.Module, buffers: str, own: Collection[str]) -> set[torch.Tensor]:
    """The tensors whose values must be equal on all ranks: frozen parameters, and buffers if that is asked for."""
    tensors = {name: parameter for name, parameter in module.named_parameters() if not parameter.requires_grad}
    tensors |= module.named_buffers() if buffers == "equal" else {}
    return {tensor for name, tensor in tensors.items() if name not in own}


def private_names(module: torch.nn.Module, buffers: str, private: str | None) -> Collection[str]:
    """The names that `private` selects; raises UserError for a wrong argument. Not collective."""
    if buffers not in BUFFERS:
        raise UserError(f"buffers = {buffers!r}: expected one of {', '.join(BUFFERS)}{nearest(buffers, BUFFERS)}")
    if not isinstance(private, str | None):
        raise UserError(f"private = {private!r}: expected names with commas between them, like 'head,bn'")
    return matching(module, private, "private") if private else ()


def check_may_differ(given: Any) -> dict[str, Any]:
    """The argument as a setting, if it is given; raises UserError for a wrong value. Not collective."""
    if given not in (None, "code"):
        raise UserError(f'may_differ = {given!r}: expected "code" or None')
    return {"may_differ": given} if given else {}


def as_text(value: Any) -> str:
    """A setting's value so that equal ones have equal texts; of an object its class."""
    if isinstance(value, numbers.Real):
        return f"{float(value)!r}"
    return str(value) if isinstance(value, str | tuple | list | dict | None) else type(value).__qualname__


def check_arguments(model: Any, **values: Any) -> None:
    """Raise UserError unless a model can be laid out and each number is allowed; not collective."""
    if not isinstance(model, torch.nn.Module):
        raise UserError(f"model is a {type(model).__name__}: expected a torch.nn.Module")
    for name, value in values.items():
        is_whole, may_be_0 = name in ("local_steps", "every", "seed"), name in ("weight_decay", "seed")
        most = 1 if name == "participation" else LARGEST
        kind: Any = numbers.Integral if is_whole else numbers.Real
        is_number = isinstance(value, kind) and 0 <= value <= most
        if not (is_number and (value or may_be_0)) and not (name == "clip_norm" and value is None):
            found = short(repr(value) if isinstance(value, str) else value)
            allowed = f"{'whole ' * is_whole}number {'>=' if may_be_0 else '>'} 0"
            raise UserError(f"{name} = {found}: expected a {allowed}, at most {most:g}")
    check_whole(model)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise UserError(
                f"model {type(model).__name__}: '{name}' has no shape yet: pass a batch through the model before"
            )
        if (kind := odd_kind(tensor)) is not None and not tensor.is_complex():  # complex buffers stay each rank's own
            raise UserError(f"model {type(model).__name__}: '{name}' is {kind}: expected dense tensors in one piece")


def check_known(
    owner: str, names: Collection[str], settings: Iterable[str], function: Callable[..., Any] | None = None
) -> None:
    """Check that `owner` (a text) has settings of these names, among all of its `names`.

    `function`: takes the settings; one of its other arguments may have been meant.

    Raises:
        UserError: one line, for the first that it does not have.
    """
    arguments = inspect.signature(function).parameters if function else ()
    for name in settings:
        if name not in names:
            known = {f"algorithm.{setting}" for setting in names}
            ours = [key for key in our_names(name, known, owner.rpartition(" ")[2]) if key in known]
            said = " or ".join(key.removeprefix("algorithm.") for key in ours)
            hint = f"; its name in fedmpi is {said}" if said else similar(name, [*names, *arguments])
            raise UserError(f"unknown setting {name}: {owner} has {', '.join(names)}{hint}")
