"""From a model class to a module; checks that it can be trained and saved, and is the same on all ranks."""

import contextlib
import functools
import inspect
import math
import random

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from fedmpi.comm.agreement import agree
from fedmpi.comm.job.equality import digest
from fedmpi.federation.frozen import freeze
from fedmpi.federation.nested import flatten
from fedmpi.ground.errors import UserError
from fedmpi.ground.generators import noise_kept, seed_all, states_outside_torch
from fedmpi.ground.registry import command_name
from fedmpi.ground.streams import FIRST, derive
from fedmpi.ground.text import Log
from fedmpi.ground.version import __version__
from fedmpi.models import find_model
from fedmpi.oracles.architecture import unwrapped
from fedmpi.oracles.autograd_kind import Autograd
from fedmpi.oracles.flat_module import FlatModule, check_whole, odd_kind
from fedmpi.oracles.micro_batches import micro_batches
from fedmpi.runs.model_files import check_savable
from fedmpi.training.early_stopping import check_goal, selection_goal

log = Log(__name__)

SHOWN = 3  # names in a message
_CONTAINERS = (list, dict, set)
_INNER = {*vars(torch.nn.Module())}  # attributes of torch's own, with parameters, parts and hooks; `training`
TRIED = 0.1  # standard deviation of what is added to parameters for a second look at a metric that is nan
REPLAYED = 1e-3  # difference of a gradient from a CUDA graph, relative: kernels that add atomically round at random


def build_model(config, context, task):
    """The model as a `FlatModule`, tried out on one sample of the data, which also initialises lazy layers.

    Torch's, numpy's and Python's generators are seeded before, so that all ranks build the same. Not collective.

    Raises:
        UserError: one line, if the module cannot be trained or saved.
    """
    seed = derive(config.data.seed, "model")
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    module = unwrapped(task.build_model(model_class(config, task), config.model_settings))
    _check_tensors(module)
    module = _move(module, context)
    in_evaluation = _parts_in_evaluation(module)
    with _untouched(module):
        task.try_out(module, context.clients[0])
    for name, tensor in _entries(module):
        if is_lazy(tensor):
            raise _wrong(module, f"'{name}' is not initialised by a pass over one sample")
    frozen_parts = freeze(module, config.layers.freeze)
    # The code of a compiled model cannot put gradients where they are wanted.
    is_compiled = getattr(config.oracle, "uses_torch_compile", False)
    flat = FlatModule(module, channels_last=True, direct_gradients=not is_compiled)
    others = {id(part) for part in (*flat.frozen_parts, *frozen_parts)}
    flat.frozen_parts += [*frozen_parts, *in_evaluation.values()]
    names = [name for name, part in in_evaluation.items() if id(part) not in others]
    if names and context.rank == 0:
        log.warning(
            f"model {type(module).__name__}: {_listed(names)} came in evaluation mode, unlike the model, and stays so "
            "(no dropout, the same batch statistics): call train() on it to train it in training mode"
        )
    check_savable(module, describe_model(config, task))
    return flat


def model_class(config, task):
    """The class of the model: the user's choice or the task's default; None for a task without a choice."""
    if config.model_class is None and config.task.has_model:
        return task.default_model if inspect.isclass(task.default_model) else find_model(task.default_model)
    return config.model_class


def describe_model(config, task):
    """The content of model.json, see `fedmpi.runs.model_files`."""
    constructor = task.constructor(model_class(config, task), config.model_settings)
    facts = {"fedmpi": __version__, "task": command_name(type(config.task)), "model": constructor}
    return {**facts, **task.describe_inputs()}


def _parts_in_evaluation(module):
    """Name -> part that the user has put into evaluation mode, of a model that is in training mode itself."""
    return {name: part for name, part in module.named_modules() if not part.training} if module.training else {}


@contextlib.contextmanager
def _untouched(module):
    """A context in which a pass leaves no trace in a module, but for parameters without a shape that it initialises."""
    tensors = {id(tensor): (tensor, tensor.clone()) for _, tensor in _entries(module) if not is_lazy(tensor)}
    buffers = [(owner, key, buffer) for owner in module.modules() for key, buffer in owner._buffers.items()]
    with torch.no_grad(), _attributes_kept(module):
        try:
            yield
        finally:
            for owner, key, buffer in buffers:
                if key in owner._buffers and not is_lazy(buffer):
                    owner._buffers[key] = buffer
            for tensor, before in tensors.values():
                tensor.data = before  # no copy into it: elements of an expanded one share memory


@contextlib.contextmanager
def _attributes_kept(module):
    """A context at whose end the plain attributes of a module's parts are as before: counters, flags, lists.

    They stay as the context leaves them if it has changed which parts or tensors there are: a flag may say so.
    """
    parts = [*module.modules()]
    is_lazy_somewhere = any(is_lazy(tensor) for _, tensor in _entries(module))
    names, before = [name for name, _ in _entries(module)], [dict(vars(part)) for part in parts]
    contents = [{k: v.copy() for k, v in kept.items() if type(v) in _CONTAINERS and k not in _INNER} for kept in before]
    try:
        yield
    finally:
        same = [*map(id, module.modules())] == [*map(id, parts)] and [name for name, _ in _entries(module)] == names
        for part, kept, inner in zip(parts, before, contents) if same and not is_lazy_somewhere else ():
            now = vars(part)
            for name, value in kept.items():
                if name not in _INNER and name in now and now[name] is not value:
                    now[name] = value
            for name, content in inner.items():
                _restore(kept[name], content)


def _restore(container, content):
    """Give a list, dict or set the content that it had."""
    if len(container) != len(content) or any(a is not b for a, b in zip(container, content)):
        container.clear()
        container.extend(content) if isinstance(container, list) else container.update(content)


def _listed(names):
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"


def _entries(module):
    """[(name, tensor)] of all parameters and buffers; one that has several names is listed under the first."""
    return [*module.named_parameters(), *module.named_buffers()]


def _wrong(module, problem):
    return UserError(f"model {type(module).__name__}: {problem}")


def _check_tensors(module):
    """Check that parameters and buffers are ordinary tensors with memory of their own.

    Raises:
        UserError: one line that names the first that is not.
    """
    check_whole(module)
    entries = _entries(module)
    for name, tensor in entries:
        kind = odd_kind(tensor)
        if kind is not None:
            raise _wrong(module, f"'{name}' is {kind}: expected dense tensors of real numbers")
        if getattr(tensor, "_post_accumulate_grad_hooks", None):
            raise _wrong(
                module, f"'{name}' has a post-accumulate-grad hook, which nothing calls here: use register_hook"
            )
    if not any(tensor.requires_grad for _, tensor in entries):
        raise UserError(f"model {type(module).__name__} has no trainable parameter")
    spans = sorted((*_span(tensor), name) for name, tensor in entries if not is_lazy(tensor) and tensor.numel())
    for (_, end, name), (start, _, other) in zip(spans, spans[1:]):
        if start < end:
            raise _wrong(module, f"'{name}' and '{other}' share memory: use one Parameter or buffer in both places")


def _span(tensor):
    """(first byte, byte after the last) of a dense tensor's memory."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _move(module, context):
    """The module on the context's device with its dtype; a buffer that several modules share stays shared."""
    shared = {}
    for owner in module.modules():
        for key, buffer in owner.named_buffers(recurse=False):
            shared.setdefault(id(buffer), []).append((owner, key))
    try:
        moved = module.to(context.device, context.dtype)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise _wrong(module, f"cannot be moved to {context.device}, {context.dtype}: {_line(error)}") from error
    for (owner, key), *others in shared.values():
        for other, name in others:
            other._buffers[name] = owner._buffers[key]
    return moved


def _line(error):
    return " ".join(f"{type(error).__name__}: {error}".split())


def try_loss(config, flat, task, samplers, learns=True):
    """One pass over a client's first minibatch, which leaves no trace in the model's tensors.

    It is one of training; if the model is only measured (not `learns`), in evaluation mode and without a gradient.
    It finds out whether the loss draws from numpy's or Python's generator (`task.draws_outside_torch`).
    Another pass follows over a minibatch of a single sample, if there is one: batch norm, for example, refuses it.
    Returns a line for the user, or "". Not collective.

    Raises:
        UserError: one line, if the pass fails, or the loss does not depend on the parameters or is not finite.
    """
    module, frozen, client = flat.module, _frozen(flat.module), next(iter(samplers))
    flat.train()
    if not learns:
        module.eval()
    try:
        with _trying(flat) as point, noise_kept(flat.x.device):
            seed_all(derive(config.data.seed, "try"), flat.x.device)
            losses = []
            for owner, indices in _to_try(config.data, samplers):
                carried = {}
                batch = task.batch(owner, indices, *((carried,) if task.carries else ()))
                before = states_outside_torch()
                losses.append(_one_pass(config, flat, task, batch, torch.empty_like(flat.x) if learns else None))
                task.draws_outside_torch |= states_outside_torch() != before
                _check_carried(carried)
            if flat.unused:
                _check_unused(flat, task, batch)
            if learns and getattr(config.oracle, "compile", "") == "cuda_graph":
                _try_captured(config, flat, task, batch, point)
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001  a user's module can raise anything
        raise _wrong(module, f"does not {'train' if learns else 'answer'}: {_line(error)}") from error
    flat.train()
    changed = [name for name, digest in _frozen(module).items() if digest != frozen.get(name)]
    if changed:
        raise _wrong(
            module,
            f"a pass changes the frozen parameter '{changed[0]}', which no average reaches: make it a buffer "
            "(buffers are averaged)",
        )
    flat.check()
    loss = losses[0]
    if not loss.isfinite().all():
        advice = task.why_not_finite() or "check the values of the data and the model's initial parameters"
        raise _wrong(
            module, f"the loss of client {client}'s first minibatch is {loss.item()} before any training: {advice}"
        )
    return _about_unused(flat.unused)


@torch.no_grad()
def try_metrics(flat, task, link):
    """One evaluation on a few samples, see `LoadedTask.try_metrics`. Collective on the link."""
    flat.module.eval()
    with _trying(flat), noise_kept(flat.x.device):
        task.try_metrics(flat.module, link)
    flat.train()


@torch.no_grad()
def try_goal(config, flat, task, link):
    """Check that the goal is measured, by an evaluation, if the settings choose by it. Collective on the link.

    A number that the untrained model does not have (a correlation with constant answers, for example) is looked for a
    second time, with other parameters.

    Raises:
        AgreedUserError: on every rank, in one line that says what is measured.
    """
    if config.evaluation.result != "best" and config.evaluation.patience is None:
        return
    given = "result = best" if config.evaluation.result == "best" else f"patience = {config.evaluation.patience}"
    flat.module.eval()
    for scale in (0, TRIED):
        with _trying(flat) as (x, _), noise_kept(flat.x.device):
            noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(derive(config.data.seed, "try")))
            x += scale * noise.to(x)
            metrics = task.evaluate(flat.module, link)
        name, _ = selection_goal(task.goal, metrics)
        if not math.isnan(metrics.get(name, 0.0)):
            break
    flat.train()
    agree(link, lambda: check_goal(task.goal, metrics, given))


@contextlib.contextmanager
def _trying(flat):
    """A context in which passes leave no trace in the model's tensors: (vector, buffers) where they work."""
    counters = flat.counters
    x, buffers = flat.x.clone(), flat.buffers.clone()
    flat.point_at(x, buffers)
    flat.point_counters_at([counter.clone() for counter in counters])
    try:
        with _attributes_kept(flat.module):
            yield x, buffers
    finally:
        flat.point_at(flat.x, flat.buffers)
        flat.point_counters_at(counters)


def _to_try(data, samplers):
    """[(client, indices)] of the first minibatch, and of the first one with a single sample."""
    (first, sampler), *_ = samplers.items()
    yield first, sampler(0)
    for client, sampler in samplers.items():
        draws = [sampler.batches_per_pass - 1] + [FIRST] * (data.first_batch_size is not None)
        single = next((indices for indices in map(sampler, draws) if len(indices) == 1), None)
        if single is not None:
            yield client, single
            return


def _frozen(module):
    """Name -> digest of the parameters that are not trained."""
    return {name: digest(tensor) for name, tensor in module.named_parameters() if not tensor.requires_grad}


def _one_pass(config, flat, task, batch, out):
    """The loss of a batch; its gradient too, into `out`, where the oracle uses it. `out`: None, if it is not wanted."""
    if out is None or not isinstance(config.oracle, Autograd):
        with torch.no_grad():
            loss = task.loss(flat.module, batch)
        flat.adopt()
        return loss

    if config.oracle.accumulate > 1:  # the whole may not fit into memory
        _, batch = micro_batches(batch, config.oracle.accumulate)[0]

    def loss_of(module):
        loss = task.loss(config.oracle.called(module), batch)
        if not loss.requires_grad:
            raise _wrong(module, "the loss does not depend on its parameters (a detached or no_grad computation?)")
        return loss

    return flat.gradient(loss_of, out)


def _check_carried(carried):
    """Check that a checkpoint can hold what a sample leaves to the next one; see `fedmpi.federation.client.Client`.

    Raises:
        UserError: if it cannot: `Client.state` would raise it after the first round that writes one.
    """
    try:
        flatten(carried, "carried")
    except TypeError as error:
        raise UserError(f"task: what a sample leaves to the next one, {error}") from None


def _try_captured(config, flat, task, batch, point):
    """Check that a gradient replayed from a CUDA graph is that of a plain pass.

    Raises:
        UserError: one line, if it is not, or cannot be captured.
    """
    if task.draws_outside_torch:
        raise UserError("compile = cuda_graph: the loss draws from numpy's or Python's generator: leave it out")
    rows, captured, _ = config.oracle.workspace(flat)
    seed = functools.partial(seed_all, derive(config.data.seed, "try"), flat.x.device)
    seed()
    flat.gradient(lambda module: task.loss(module, batch), rows[0])
    loss = captured.gradient(task.loss, seed, *point, batch, rows[1])
    if loss is not None and torch.dist(*rows) > REPLAYED * torch.linalg.vector_norm(rows[0]):
        raise UserError("compile = cuda_graph: a replayed pass gives another gradient than a plain one: leave it out")


def _check_unused(flat, task, batch):
    """Check that what `flat.gradient` finds unused has no gradient by ``loss.backward()`` either.

    Only that one reaches parameters inside reentrant checkpoints and of other functions that differentiate themselves.
    """
    for parameter in flat.parameters:
        parameter.grad = None
    task.loss(flat.module, batch).backward()
    flat.adopt()
    for name, parameter in zip(flat.names, flat.parameters):
        if name in flat.unused and parameter.grad is not None:
            raise _wrong(
                flat.module,
                f"only loss.backward(), not torch.autograd.grad, finds the gradient of '{name}': for checkpointing, "
                "use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)",
            )
        parameter.grad = None


def _about_unused(names):
    if not names:
        return ""
    return f"the loss does not use {_listed(names)}: the gradient there is 0"
