"""The generators that a model or a user's code draws from: seeding them, and leaving them as they were."""

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def seed_noise(seed: int, device: torch.device) -> None:
    """Seed the generator that modules on `device` draw dropout masks from."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.get_device_module(device).default_generators[device.index or 0].manual_seed(seed)


def seed_all(seed: int, device: torch.device) -> None:
    """Seed all generators that a user's code draws from: torch's on `device` and on the CPU, numpy's and Python's."""
    seed_noise(seed, device)
    if device.type != "cpu":
        torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def states_outside_torch() -> tuple[Any, ...]:
    """The states of numpy's and Python's generators, which can be compared."""
    key: Any
    _, key, *rest = np.random.get_state()
    return key.tolist(), rest, random.getstate()


@contextlib.contextmanager
def generators_kept(devices: Any = None) -> Iterator[None]:
    """A context at whose end torch's (of some GPUs, None: all), numpy's and Python's generators are as they were."""
    of_numpy, of_python = np.random.get_state(), random.getstate()
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            np.random.set_state(of_numpy)
            random.setstate(of_python)


def noise_kept(device: torch.device) -> Any:
    """A context at whose end the generators that modules on `device` draw from are as they were."""
    on_gpu = device.type != "cpu"
    return torch.random.fork_rng([device] if on_gpu else [], device_type=device.type if on_gpu else "cuda")
