"""What joining and averaging have in common: one client per rank, whose local steps are made from outside."""

import dataclasses
import functools
import numbers
import sys
import time
import weakref
import zlib

import torch

from fedmpi.comm.agreement import agree, check_equal
from fedmpi.comm.launch import OUTPUT_SECONDS
from fedmpi.comm.link import Traffic
from fedmpi.comm.mpi import MPILink
from fedmpi.config.foreign_names import OURS
from fedmpi.errors import UserError
from fedmpi.federation.participation import Plan
from fedmpi.federation.private import matching, private_places
from fedmpi.federation.rounds import Federation
from fedmpi.federation.variables import Variables
from fedmpi.settings import LARGEST, nearest


class OwnLoop:
    """This rank as one client of a federation whose local steps the user's own loop makes.

    All methods are collective unless they say otherwise: every rank makes the same calls.

    Args:
        model: the `torch.nn.Module`. algorithm: an `Algorithm`. make_oracle: function(`Client`) -> oracle.
        link: a `Link` over the ranks. flat: the model as a `FlatModule`.
        local_steps: q. weight: > 0, of this rank in every average.
        start: the arguments (buffers, private) of `fedmpi.average`.

    Attributes:
        federation: the `Federation`.
        averaged: whether the last step ended with an average: all ranks have the same model then.
        round_loss: mean loss of the last round over all clients; nan if unknown.
    """

    def __init__(self, model, algorithm, make_oracle, link, flat, local_steps, weight, start):
        self._link, self._flat = link, flat
        agree(link, lambda: _check_same_model(model, flat, local_steps, link))
        weights = link.allgather([weight])[:, 0]
        if not (weights > 0).all():
            raise UserError(f"weight = {weights.min():g}: expected a number > 0 on every rank")
        weights = None if (weights == weights[0]).all() else weights.tolist()
        plan = Plan(link.size, local_steps, weights=weights)
        places, own = _begin_equal(flat, link, weight, *start)
        variables = Variables(flat.x, flat.buffers, flat.segments, None, *places, flat.buffer_parts)
        self.federation = agree(link, lambda: Federation(algorithm, link, {link.rank: make_oracle}, plan, variables))
        self._client = self.federation.clients[0]
        self.federation.private.give(self._client, *own)
        link.traffic = Traffic()
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
        self._adopt()
        if self._steps is not None:
            self._advance(ends=True)
        self._keep_private()
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
        self._flat.adopt()
        self._keep_private()
        state = {name: _copied(value) for name, value in self.federation.state().items()}
        state["loop/agreed_buffers"] = self.federation.store.sent.agreed.clone()
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
            self.federation.store.sent.agree_on(state["loop/agreed_buffers"])
        except (KeyError, RuntimeError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"the state does not belong to this rank, model and algorithm: {error}") from None
        self._done, self._steps = int(state["loop/step"]), None
        self.averaged = self._done == 0
        self.federation.private.give_back(self._client)
        if self._done:
            self._begin_round(self._done)
        self._flat.point_at(self._current(), self._client.buffers)

    def set_model(self, state):
        """Go on from other values of the model: those of rank 0 on all ranks, but private ones; between two rounds.

        An outer optimizer does not take the difference for a move; its moments stay, as all rows that are no models.

        Args:
            state: name -> tensor, as `state_dict()` of the model; entries that are missing stay as they are.

        Raises:
            UserError: on every rank, within a round, or for a name or shape that the model does not have.
        """
        flat, store, x = self._flat, self.federation.store, self.federation.server.x
        private, traffic = self.federation.private, dataclasses.replace(self._link.traffic)
        agree(self._link, lambda: self._check_state(state))
        self._adopt()
        self._keep_private()
        frozen = [value for name, value in flat.module.named_parameters() if name not in flat.names]
        with torch.no_grad():
            for name, value in {**dict(flat.module.named_buffers()), **flat.named_values(x, store.buffers)}.items():
                if name in state:
                    value.copy_(state[name])
            for tensor in (x, store.buffers, *flat.counters, *frozen):
                _take_rank_0s(self._link, tensor)
        self._link.traffic = traffic
        store.sent.agree_on(store.buffers)
        for names, rows in ((store.server_rows(), store.server_rows()), (self._client.own, self._client.rows)):
            for name in names:
                if name.startswith("x_"):  # models of former steps and rounds
                    rows[name].copy_(x)
            private.clean()
            private.give_back(self._client)
        flat.point_at(self._current(), self._client.buffers)

    def _check_state(self, state):
        if not self.averaged:
            raise UserError("set_model: a round has begun: call it after a step with fed.averaged")
        values = self._flat.module.state_dict()
        for name, value in state.items():
            if name not in values or values[name].shape != value.shape:
                raise UserError(f"set_model: the model has no '{name}' of shape {list(value.shape)}")

    def _adopt(self):
        """Take what the loop has assigned to the model's tensors since the last step, see `FlatModule.adopt`."""
        try:
            self._flat.adopt()
        except UserError as error:
            self.federation.refuse(error)

    def _start(self):
        """The initial estimates; private values are in the rows before and after it."""
        self._keep_private()
        self.federation.start()
        self.federation.private.give_back(self._client)

    def _keep_private(self):
        """Between two rounds the private values are in the rows, so that the loop has this rank's own model."""
        if self._steps is None:
            self.federation.private.keep(self._client)

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
            self.federation.private.give_back(self._client)

    def _begin_round(self, first_step):
        """Everything of a round before its local step number `first_step`."""
        if not first_step:
            self._keep_private()
        self._steps = self.federation.steps(first_step)
        next(self._steps)

    def _current(self):
        """[dim] the model that this rank has now."""
        return self._client.rows.get("x", self.federation.server.x)


def _begin_equal(flat, link, weight, buffers, private):
    """Give all ranks the parameters of rank 0, and equal buffers. Collective on the link.

    Args:
        flat: a `FlatModule`, whose messages become those of a user's own loop. weight: of this rank in averages.
        buffers, private: see `fedmpi.average`.

    Returns:
        (the private slices of (x, buffers), this rank's own (x, buffers)).

    Raises:
        UserError: on every rank, if buffers differ and should not.
    """
    flat.changed_by, flat.remedy = "the loop", "call finish(), and then join or average again"
    places = agree(link, lambda: _check_buffers(flat, buffers, private))
    own = flat.x.clone(), flat.buffers.clone()
    is_private = matching(flat.module, private, "private") if private else ()
    entries = {}
    for name, value in flat.module.named_buffers():
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        shown = f" with values {value.tolist()}" if value.numel() <= SHOWN else f" with hash {zlib.crc32(content):08x}"
        compared = buffers == "equal" and name not in is_private
        entries[f"buffer '{name}'"] = f"{list(value.shape)} {value.dtype}" + shown * compared
    hint = "expected the same model on all ranks"
    if buffers == "equal":
        hint = 'give buffers="rank0" or "average" to begin with equal ones, or private="NAME" to keep them apart'
    check_equal(link, entries, hint)
    for tensor in (flat.x, flat.buffers, *(flat.counters if buffers == "rank0" else ())):
        _take_rank_0s(link, tensor)
    if buffers == "average" and flat.num_buffers:
        total = link.allgather([weight]).sum()
        for part in flat.buffer_parts:
            mine, first = part.of(own[1]).double(), part.of(flat.buffers).double()
            moves = torch.where(mine == first, 0.0, mine - first).mul_(weight)  # so that equal ones stay as they are
            link.allreduce(moves)
            part.of(flat.buffers).copy_(first + moves / total)
    return places, own


SHOWN = 4  # values of a buffer in a message


def _check_buffers(flat, buffers, private):
    """What `private` selects; raises UserError for a wrong argument. Not collective."""
    if buffers not in BUFFERS:
        raise UserError(f"buffers = {buffers!r}: expected one of {', '.join(BUFFERS)}{nearest(buffers, BUFFERS)}")
    return ((), ()) if private is None else private_places(flat, private)


BUFFERS = ("equal", "rank0", "average")


def _take_rank_0s(link, tensor):
    """Give a tensor the bits that it has on rank 0. Collective on the link."""
    host = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    if host.numel():
        link.broadcast(host.reshape(-1).view(torch.uint8).numpy())
        tensor.detach().copy_(host)


def open_link(comm, model, local_steps, weight):
    """The `Link` of an mpi4py communicator, or of all ranks. Collective.

    Raises:
        UserError: if one of the other arguments of `join` or `average` has another type than expected.
    """
    if not isinstance(model, torch.nn.Module):
        raise UserError(f"model is a {type(model).__name__}: expected a torch.nn.Module")
    for name, value, kind in (("local_steps", local_steps, numbers.Integral), ("weight", weight, numbers.Real)):
        if not isinstance(value, kind) or abs(value) > LARGEST:
            raise UserError(f"{name} is a {type(value).__name__}: expected a number of at most {LARGEST:g}")
    link = MPILink(comm)
    _end_job_on_error(link)
    return link


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


def _check_same_model(model, flat, local_steps, link):
    """Raise UserError unless all ranks have the same model, but for the values of trainable parameters. Collective."""
    names = zlib.crc32(repr((flat.names, flat.shapes)).encode())
    frozen = 0
    for parameter in model.parameters():
        if not parameter.requires_grad:
            frozen = zlib.crc32(parameter.detach().cpu().contiguous().view(torch.uint8).numpy(), frozen)
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
