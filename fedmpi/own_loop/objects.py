"""The states of what else changes in a user's own loop: optimizers, schedules, generators, loaders."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from fedmpi.federation.nested import flatten, unflatten
from fedmpi.ground.errors import UserError

PREFIX, NAMES, BEGAN = "objects", "object names", "objects began"
AFTER_STEP = (LRScheduler, AveragedModel)  # a loop may call them before or after fed.step
LATE = (*AFTER_STEP, torch.optim.Optimizer)  # a schedule sets an optimizer's step size
CONSTANTS = (bool, int, float, str, tuple, list, type(None))


class Objects:
    """Named objects with `state_dict` and `load_state_dict`, or `torch.Generator`s. Not collective.

    Args:
        objects: name -> object. The generators of the process are one more.

    Raises:
        UserError: if no checkpoint can contain the state that one of them has now; it says where in the state.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = {**objects, "generators of the process": Generators()}
        self._now = {name: _settings(stateful) for name, stateful in objects.items()}
        self._began = self._now  # the settings when the run began
        self.check()  # tried before the first step

    @property
    def lacks_schedule(self) -> bool:
        """Whether a schedule sets an optimizer's step size, and none is among them."""
        groups = [
            g for part in self._objects.values() if isinstance(part, torch.optim.Optimizer) for g in part.param_groups
        ]
        has_schedule = any(isinstance(stateful, LRScheduler) for stateful in self._objects.values())
        return not has_schedule and any("initial_lr" in group for group in groups)

    @property
    def may_be_late(self) -> bool:
        """Whether one of them may be called after `fed.step`, where a checkpoint is made, and before the next step."""
        return any(isinstance(stateful, AFTER_STEP) for stateful in self._objects.values())

    def state(self, is_late: bool = False) -> dict[str, Any]:
        """Name -> tensor or number; copies. `is_late`: only of those that may be called after `fed.step`."""
        flat = self._flat(is_late)
        return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in flat.items()}

    def check(self) -> None:
        """Raise UserError if no checkpoint can contain the state that one of them has now."""
        self._flat()

    def _flat(self, is_late: bool = False) -> dict[str, Any]:
        flat = {} if is_late else {**flatten([*self._objects], NAMES), **flatten(self._began, BEGAN)}
        for number, (name, stateful) in enumerate(self._objects.items()):
            if not is_late or isinstance(stateful, LATE):
                prefix, state = f"{PREFIX}/{number}", state_of(stateful)
                try:
                    flat |= flatten(state, prefix)
                except TypeError as error:
                    found = str(error).replace(prefix, f"'{name}'", 1)
                    raise UserError(f"objects: the state of {found}") from error
        return flat

    def restore(self, flat: Mapping[str, Any]) -> list[str]:
        """Take what `state` gave; returns lines about settings that the program has now and the checkpoint has not.

        Raises:
            UserError: if these are other objects, or one of them does not take its state.
        """
        known = unflatten(flat, NAMES)
        if set(known) != set(self._objects):
            here, there = (", ".join(sorted(names)) for names in (self._objects, known))
            raise UserError(f"objects: the checkpoint has {there}; the program has {here}: expected the same names")
        for name, stateful in self._objects.items():
            state = unflatten(flat, f"{PREFIX}/{known.index(name)}")
            try:
                give(stateful, state)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
                raise UserError(f"objects: '{name}' does not take the state of the checkpoint: {problem}") from error
        self._began = unflatten(flat, BEGAN)
        return [f"'{name}': {', '.join(changes)}" for name in self._now if (changes := self._changes(name))]

    def _changes(self, name: str) -> list[str]:
        """Settings of an object that the program gives another value than when the run began."""
        now, began, used = self._now[name], self._began[name], _settings(self._objects[name])
        return [
            f"{key} is {now[key]!r} in the program, {began[key]!r} when the run began, and {used[key]!r} from now on"
            for key in began
            if key in now and now[key] != began[key] and used.get(key, now[key]) != now[key]
        ]

    def generators(self) -> dict[str, Any]:
        """Name -> state of those that are random generators."""
        return {name: state_of(thing) for name, thing in self._objects.items() if isinstance(thing, _GENERATORS)}

    def set_generators(self, states: Mapping[str, Any]) -> None:
        """Take what `generators` gave."""
        for name, state in states.items():
            give(self._objects[name], state)

    def knows_place_of(self, loader: Any) -> bool:
        """Whether a loader is among them, with a place in its pass."""
        return any(stateful is loader for stateful in self._objects.values())


class Generators:
    """The generators of torch, numpy and Python, whose state is the process's."""

    def state_dict(self) -> dict[str, Any]:
        device = torch.get_device_module()
        gpu = device.get_rng_state() if torch.accelerator.is_available() and device.is_initialized() else None
        of_numpy = np.random.get_state(legacy=False)
        return {"torch": torch.get_rng_state(), "gpu": gpu, "numpy": of_numpy, "python": random.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])
        if state["gpu"] is not None:
            torch.get_device_module().set_rng_state(state["gpu"])
        of_numpy, (version, numbers, gauss) = state["numpy"], state["python"]
        np.random.set_state({**of_numpy, "state": {**of_numpy["state"], "key": np.asarray(of_numpy["state"]["key"])}})
        random.setstate((version, tuple(numbers), gauss))


_GENERATORS = (torch.Generator, Generators)


def state_of(stateful: Any) -> Any:
    """The state of an object of a loop."""
    return stateful.get_state() if isinstance(stateful, torch.Generator) else stateful.state_dict()


def give(stateful: Any, state: Any) -> None:
    """Let an object take a state that `state_of` gave."""
    if isinstance(stateful, torch.Generator):
        stateful.set_state(state)
    else:
        stateful.load_state_dict(state)


def _settings(stateful: Any) -> dict[str, Any]:
    """Name -> number or text of what a program has chosen for an optimizer, or for a schedule of step sizes."""
    found: dict[str, Any] = {}
    if isinstance(stateful, torch.optim.Optimizer):
        for number, group in enumerate(stateful.param_groups):
            where = f" of group {number}" if len(stateful.param_groups) > 1 else ""
            found |= {f"{key}{where}": value for key, value in group.items() if key != "params"}
    elif isinstance(stateful, LRScheduler):
        found = {key: value for key, value in vars(stateful).items() if not key.startswith("_")}
    found = {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in found.items()}
    return {key: value for key, value in found.items() if _is_constant(value)}


def _is_constant(value: Any) -> bool:
    is_list = isinstance(value, tuple | list)
    return type(value) in CONSTANTS and (not is_list or all(type(part) in CONSTANTS[:4] for part in value))
