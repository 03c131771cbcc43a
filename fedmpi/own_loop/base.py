"""What joining and averaging have in common: one client per rank, whose local steps are made from outside."""

import functools
import sys
import time
import weakref
import zlib
from numbers import Integral, Real

import torch
from torch.nn.parameter import is_lazy

from fedmpi.comm.agreement import agree
from fedmpi.comm.launch import OUTPUT_SECONDS
from fedmpi.comm.link import Traffic
from fedmpi.comm.mpi import MPILink
from fedmpi.config.foreign_names import OURS
from fedmpi.errors import UserError
from fedmpi.federation.participation import Plan
from fedmpi.federation.rounds import Federation
from fedmpi.federation.variables import Variables
from fedmpi.settings import LARGEST, nearest
from fedmpi.text import short


class OwnLoop:
    """This rank as one client of a federation whose local steps the user's own loop makes.

    All methods are collective unless they say otherwise: every rank makes the same calls.

    Args:
        model: the `torch.nn.Module`. algorithm: an `Algorithm`. make_oracle: function(`Client`) -> oracle.
        link: a `Link` over the ranks. flat: the model as a `FlatModule`.
        local_steps: q. weight: > 0, of this rank in every average.

    Attributes:
        federation: the `Federation`.
        averaged: whether the last step ended with an average: all ranks have the same model then.
        round_loss: mean loss of the last round over all clients; nan if unknown.
    """

    def __init__(self, model, algorithm, make_oracle, link, flat, local_steps, weight=1.0):
        self._link, self._flat = link, flat
        agree(link, lambda: _check_parameters(flat))
        agree(link, lambda: _check_same_model(model, flat, local_steps, link))
        weights = link.allgather([weight])[:, 0]
        if not (weights > 0).all():
            raise UserError(f"weight = {weights.min():g}: expected a number > 0 on every rank")
        weights = None if (weights == weights[0]).all() else weights.tolist()
        plan = Plan(link.size, local_steps, weights=weights)
        variables = Variables(flat.x, flat.buffers, flat.segments)
        self.federation = agree(link, lambda: Federation(algorithm, link, {link.rank: make_oracle}, plan, variables))
        self._client = self.federation.clients[0]
        self._copy_model_of_rank_0()
        flat.point_at(self._current(), self._client.buffers)
        self._steps, self._done = None, 0  # the generator of the current round; the local steps made in it
        self._accounts = None  # what `accounts` returns after `finish`
        self.averaged, self.round_loss = True, float("nan")

    def accounts(self):
        """Rounds, gradients, bytes and seconds so far, under the names of a run's records. Not collective.

        "local_seconds" is all the time between two averages, the user's own code included.
        """
        if self._accounts is not None:
            return dict(self._accounts)
        federation, traffic = self.federation, self._link.traffic
        return {
            "round": federation.round_index,
            "gradients": federation.num_gradients,
            "bytes": traffic.nbytes,
            "collectives": traffic.collectives,
            "local_seconds": federation.seconds["local"],
            "communication_seconds": federation.seconds["communication"],
        }

    def batches(self, loader):
        """As many batches on every rank as the rank with the most has: shorter loaders start again.

        Without it, ranks whose data are of different sizes would make different numbers of steps, and wait for
        each other forever.

        Args:
            loader: has a length and can be iterated several times, like a `torch.utils.data.DataLoader`.

        Raises:
            UserError: if the loader of this rank has no batch.
        """
        number = int(self._link.allgather([len(loader)]).max())
        if len(loader) == 0:
            raise UserError("batches: the loader has no batch")
        while number > 0:
            for batch in loader:
                yield batch
                number -= 1
                if number == 0:
                    return

    def finish(self):
        """Average what the last round has, and give the model memory of its own; it is a plain module then."""
        if self._accounts is not None:
            return
        if self._steps is not None:
            self._advance(ends=True)
        self.federation.end()
        self._accounts = self.accounts()
        flat, x = self._flat, self._current()
        flat.point_at(x.clone(), self._client.buffers.clone())
        for parameter in flat.parameters:
            parameter.data = parameter.data.clone()
        self._link.close()
        _open_links.discard(self._link)

    def state_dict(self):
        """This rank's state as name -> tensor, number or list of numbers, also within a round. Not collective.

        `torch.save` can write it; each rank writes its own.
        """
        state = {name: _copied(value) for name, value in self.federation.state().items()}
        scratch = {f"loop/rows/{name}": self._client.rows[name].clone() for name in self.federation.algorithm.scratch}
        return state | scratch | {"loop/step": self._done}

    def load_state_dict(self, state):
        """Go on where `state_dict` was called on the same rank. Not collective.

        Raises:
            UserError: if it is the state of another rank, model or algorithm.
        """
        try:
            self.federation.restore(state)
            for name in self.federation.algorithm.scratch:
                self._client.rows[name].copy_(state[f"loop/rows/{name}"])
        except (KeyError, RuntimeError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"the state does not belong to this rank, model and algorithm: {error}") from None
        self._done, self._steps = int(state["loop/step"]), None
        self.averaged = self._done == 0
        if self._done:
            self._begin_round(self._done)
        self._flat.point_at(self._current(), self._client.buffers)

    def _advance(self, ends=False):
        """Make the next local step, and what follows it up to the step after it; or end the round before it."""
        if self._accounts is not None:
            raise UserError("the federation has ended: finish() was called")
        if self._steps is None:
            self._begin_round(0)
        try:
            self._steps.send(True if ends else None)
            self._done += 1
            self.averaged = False
        except StopIteration as end:
            self.round_loss, self._steps, self._done, self.averaged = end.value, None, 0, True

    def _begin_round(self, first_step):
        """Everything of a round before its local step number `first_step`."""
        self._steps = self.federation.steps(first_step)
        next(self._steps)

    def _current(self):
        """[dim] the model that this rank has now."""
        return self._client.rows.get("x", self.federation.server.x)

    def _copy_model_of_rank_0(self):
        """Give all ranks the parameters and float buffers of rank 0; the traffic for it is not counted."""
        store, x = self.federation.store, self.federation.server.x
        values, before = torch.cat([x, store.buffers]), store.outgoing.clone()
        block = store.outgoing[: values.numel()]
        block.copy_(values) if self._link.rank == 0 else block.zero_()
        self._link.allreduce(block)
        values.copy_(block)
        store.outgoing.copy_(before)
        x.copy_(values[: x.numel()])
        store.buffers.copy_(values[x.numel() :])
        self._link.traffic = Traffic()


def open_link(comm, model, **values):
    """The `Link` of an mpi4py communicator, or of all ranks. Collective.

    Args:
        comm, model: of `join` or `average`. values: name -> number.

    Raises:
        UserError: on every rank, if one of the other arguments has another type or range than expected.
    """
    link = MPILink(comm)
    _end_job_on_error(link)
    agree(link, lambda: _check_arguments(model, values))
    return link


def _check_arguments(model, values):
    """Raise UserError unless a model can be laid out and each number is allowed; not collective."""
    if not isinstance(model, torch.nn.Module):
        raise UserError(f"model is a {type(model).__name__}: expected a torch.nn.Module")
    for name, value in values.items():
        is_whole, may_be_0 = name in ("local_steps", "every"), name == "weight_decay"
        is_number = isinstance(value, Integral if is_whole else Real) and 0 <= value <= LARGEST
        if not (is_number and (value or may_be_0)) and not (name == "clip_norm" and value is None):
            found = short(repr(value) if isinstance(value, str) else value)
            allowed = f"{'whole ' * is_whole}number {'>=' if may_be_0 else '>'} 0"
            raise UserError(f"{name} = {found}: expected a {allowed}, at most {LARGEST:g}")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise UserError(
                f"model {type(model).__name__}: '{name}' has no shape yet: pass a batch through the model before"
            )


def known_settings(owner, names, settings):
    """The settings, if `owner` has all of them.

    Args:
        owner: text, whose settings they are. names: of its settings. settings: name -> value.

    Raises:
        UserError: one line, for the first that it does not have.
    """
    for name in settings:
        if name not in names:
            ours = OURS.get(name, "").removeprefix("algorithm.")
            hint = f"; its name in fedmpi is {ours}" if ours in names else nearest(name, names)
            raise UserError(f"unknown setting {name}: {owner} has {', '.join(names)}{hint}")
    return settings


def _check_parameters(flat):
    """Raise UserError unless all parameters can lie in one row; not collective."""
    kinds = {(parameter.dtype, parameter.device) for parameter in flat.parameters}
    if len(kinds) > 1 or next(iter(kinds))[0] not in (torch.float32, torch.float64):
        found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise UserError(
            f"the trainable parameters are {found}: expected all of them in float32 or float64 and on one device "
            "(torch.autocast computes in bfloat16 with parameters in float32)"
        )


def _check_same_model(model, flat, local_steps, link):
    """Raise UserError unless all ranks have the same model, but for the values of trainable parameters. Collective."""
    names = zlib.crc32(repr((flat.names, flat.shapes)).encode())
    frozen = 0
    for parameter in model.parameters():
        if not parameter.requires_grad:
            frozen = zlib.crc32(parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy(), frozen)
    facts = {"trainable parameters": names, "local steps": local_steps, "frozen parameters": frozen}
    everywhere = link.allgather([*facts.values(), flat.num_buffers])
    for what, found in zip([*facts, "float buffers"], everywhere.T):
        if len({*found}) > 1:
            other = int((found != found[0]).argmax())
            raise UserError(
                f"rank {other} has other {what} than rank 0: expected the same model and settings on all ranks"
            )


def _copied(value):
    return value.clone() if isinstance(value, torch.Tensor) else value


_open_links = weakref.WeakSet()  # whose ranks may wait for this one


def _end_job_on_error(link):
    """From now on, let an error that nobody catches end all ranks: the others would wait for this one forever."""
    if link.size == 1:
        return
    if not _open_links:
        sys.excepthook = functools.partial(_abort, sys.excepthook)
    _open_links.add(link)


def _abort(report, kind, error, trace):
    """Report an error that ends this rank, and end the others."""
    if issubclass(kind, UserError):
        print(f"fedmpi: error: {error}" if str(error) else "", file=sys.stderr, flush=True)
    else:
        report(kind, error, trace)
    for link in list(_open_links):
        sys.stderr.flush()
        time.sleep(OUTPUT_SECONDS)
        link.abort(2 if issubclass(kind, UserError) else 1)
