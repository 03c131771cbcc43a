"""Whether the clients of a rank can take each local step at once, which is tried on a minibatch."""

import functools
import textwrap

import torch

from fedmpi.federation.client import Client
from fedmpi.federation.stack import Stack
from fedmpi.oracles.base import LocalObjective, noise_kept
from fedmpi.oracles.stacked import StackedOracle
from fedmpi.registry import command_name

TOLERANCE = 0.01  # of the norm of a gradient: what rounding, also that of TF32, stays below


def make_stack(config, algorithm, task, flat, samplers):
    """(the `Stack` of this rank or None, why there is none as text or ""). Not collective.

    Args:
        config: a `Config`. task: a `LoadedTask`. flat: a `FlatModule`.
        samplers: client -> its sampler, of this rank's clients.
    """
    why_not = _declared_reason(config, algorithm, task, flat) or _tried_reason(config, task, flat, samplers)
    if not why_not and len(samplers) == 1:
        why_not = "this rank has one client"
    if why_not:
        return None, why_not
    size = min(config.run.stack, len(samplers))
    return Stack(size, functools.partial(StackedOracle, config.oracle.stacked(flat, task))), ""


def _declared_reason(config, algorithm, task, flat):
    run, oracle, name = config.run, config.oracle, command_name(type(config.algorithm))
    reasons = {
        f"the local step of {name}, as it is set, cannot be computed for several clients at once": (
            not algorithm.stackable
        ),
        "gradients of several clients are not computed with autocast": getattr(oracle, "autocast", "off") != "off",
        f"oracle {command_name(type(oracle))}, as it is set, computes the gradient of one client at a time": (
            oracle.stacked(flat, task) is None
        ),
        "the bits would depend on which clients share a rank, which reduction = reproducible excludes": (
            run.reduction == "reproducible"
        ),
        "the model has buffers, like the statistics of batch-norm layers": flat.num_buffers or flat.counters,
        "the task keeps a state from one minibatch to the next": task.carries,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _tried_reason(config, task, flat, samplers):
    """Compare the gradients of two equal minibatches at once with the gradient of one, as it is always computed."""
    client, sampler = next(iter(samplers.items()))
    kind = config.oracle.robust()
    objective = LocalObjective(flat, task, sampler, config.run.seed)
    oracle = kind.make(Client(client, buffers=flat.buffers), objective, kind.workspace(flat.x))
    z = flat.x.clone()
    flat.point_at(z, flat.buffers)
    flat.train()
    try:
        with noise_kept(z.device):
            xi = oracle.sample(0)
            at_once, _ = kind.stacked(flat, task)(torch.stack([z, z]), [xi, xi])
            _, g = oracle.evaluate(z, xi)
    except Exception as error:  # noqa: BLE001  a user's module can raise anything
        if "random operation" in str(error):
            return "the model or the loss draws random numbers, like dropout"
        return f"torch.func cannot compute their gradients at once ({type(error).__name__}: {_first_line(error)})"
    finally:
        flat.point_at(flat.x, flat.buffers)
    if not torch.equal(z, flat.x):
        return "a pass changes the parameters"
    if not (at_once - g).norm(dim=1).max() <= TOLERANCE * g.norm():
        return "torch.func computes other gradients of this model"
    return ""


def _first_line(error):
    return textwrap.shorten(next(iter(str(error).strip().splitlines()), ""), 100, placeholder=" ...")
