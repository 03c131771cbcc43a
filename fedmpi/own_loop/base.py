"""What joining and averaging have in common: one client per rank, whose local steps are made from outside."""

import dataclasses
import functools
import gc
import json
import math
import os
import weakref
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar, overload

import torch

from fedmpi.aggregation.sending import Sending
from fedmpi.algorithms.base import Algorithm
from fedmpi.comm.agreement import agree, check_equal, difference
from fedmpi.comm.job.equality import check_same_model, describe_values
from fedmpi.comm.job.opening import TIMEOUT, check_alone, close_link, open_link
from fedmpi.comm.job.replicas import check_result
from fedmpi.federation import own_steps
from fedmpi.federation.client_state import copied
from fedmpi.federation.losses import ENDED, FAILED, PAUSED
from fedmpi.federation.participation import Plan, draw_participants
from fedmpi.federation.private import private_places
from fedmpi.federation.rounds import Federation
from fedmpi.federation.state import state_before
from fedmpi.federation.variables import Variables
from fedmpi.ground.errors import UserError
from fedmpi.ground.machine.cores import choose_threads, library_threads
from fedmpi.ground.registry import command_name, plain
from fedmpi.ground.text import Log
from fedmpi.own_loop.checks import as_text, compared_values, private_names
from fedmpi.own_loop.passes import Passes
from fedmpi.own_loop.recording import REQUEST_BITS, TASK, Recording

log = Log(__name__)

Batch = TypeVar("Batch")
DIGEST_BITS = 20  # two digests are among the bits that ranks exchange, see `Federation.begin_round`

_open_loops = weakref.WeakSet[Any]()  # `OwnLoop`s


@dataclasses.dataclass(frozen=True)
class Choices:
    """Arguments of `fedmpi.average`, aggregation and stages as a `Sending`.

    Also whether the loop is recorded, so that it may be resumed, to the same bits.
    """

    buffers: str
    private: str | None
    participation: float
    seed: int
    sending: Sending
    is_recorded: bool


class OwnLoop:
    """This rank as one client of a federation whose local steps the user's own loop makes.

    All methods are collective unless they say otherwise: every rank makes the same calls.

    Args:
        model: the `torch.nn.Module`. algorithm: an `Algorithm`. make_oracle: function(`Client`) -> oracle.
        link: a `Link` over the ranks. flat: the model as a `FlatModule`.
        local_steps: q. weight: > 0, of this rank in every average.
        choices: a `Choices`.

    Attributes:
        rank, size: number of this rank, and how many there are.
        federation: the `Federation`.
        has_optimizers: whether torch's optimizers make the steps.
        averaged: whether the last step ended with an average: all ranks have the same model then.
        round_loss: mean loss of the last round over all clients; nan if unknown.
    """

    has_optimizers = False

    def __init__(
        self,
        model: torch.nn.Module,
        algorithm: Algorithm,
        make_oracle: Callable[[Any], Any],
        link: Any,
        flat: Any,
        local_steps: int,
        weight: float,
        choices: Choices,
    ) -> None:
        self._link, self._flat = link, flat
        self.rank: int = link.rank
        self.size: int = link.size
        agree(link, check_alone, tells=True)
        self._process = os.getpid()
        self._ranks = {int(rank) for rank in link.allgather([link.world_rank], "machinery")[:, 0]}
        agree(link, self._check_only_loop, tells=True)
        self._threads = _take_share_of_cores(link, by_load=not choices.is_recorded)
        weights, hidden_weights = None, None
        if getattr(choices.sending.aggregation, "hidden_weights", False):
            hidden_weights = {link.rank: weight}
        else:
            weights = _weights_of_ranks(link, weight)
        draw = functools.partial(draw_participants, link.size, choices.participation, choices.seed)
        self._drawn = functools.lru_cache(maxsize=1)(draw) if choices.participation < 1 else None
        plan = Plan(
            link.size, local_steps, self._drawn, weights=weights, seed=choices.seed, hidden_weights=hidden_weights
        )
        hides = bool(choices.sending.aggregation.hides)
        places, own = _begin_equal(flat, link, weight, choices.buffers, choices.private, hides)
        self._own_names = private_names(flat.module, choices.buffers, choices.private)
        parameters: Any = (*places, flat.buffer_parts, flat.names, flat.shapes)
        variables = Variables(flat.x, flat.buffers, flat.segments, None, *parameters)
        oracles, sending = {link.rank: make_oracle}, choices.sending
        self.federation = agree(link, lambda: Federation(algorithm, link, oracles, plan, variables, sending))
        self._client = self.federation.clients[0]
        self._digest: tuple[Any, int] | None = None  # (step size, its bits in `_step_size_bits`)
        self.federation.private.give(self._client, *own)
        link.traffic.restore({})
        flat.point_at(self._current(), self._client.buffers)
        # Of the current round: whether it has begun, its local steps so far, the other exchanges, the losses of all.
        self._in_round, self._done = False, 0
        self._made = 0  # steps of this rank since the beginning or the state that it has loaded
        self._works = True  # whether this rank takes part in it
        self._later: list[Any] = []
        self._begun: dict[str, Any] = {}  # see `state_before`, of the exchange after its local steps
        self._losses: list[Any] = []
        self._accounts: dict[str, float] | None = None  # what `accounts` returns after `finish`
        self.averaged, self.round_loss = True, float("nan")
        self._recorded: Any = None  # a `Recorded`
        _open_loops.add(self)

    def _check_only_loop(self) -> None:
        """Raise UserError if an open loop of the same ranks has parameters of this one's model."""
        own = {id(parameter): name for name, parameter in zip(self._flat.names, self._flat.parameters)}

        def found() -> list[str]:
            others = [loop for loop in _open_loops if self.size > 1 and loop._ranks == self._ranks]
            return [own[id(p)] for loop in others for p in loop._flat.parameters if id(p) in own]

        if found():
            gc.collect()  # loops that were dropped
        if names := found():
            raise UserError(
                f"model {type(self._flat.module).__name__}: a federation of the same ranks that is open has its "
                f"parameter '{names[0]}', too: expected one, or others of groups of ranks (comm); finish() ends one"
            )

    def _record(self, recording: Recording | None, objects: Mapping[str, Any], settings: dict[str, Any]) -> None:
        """From now on, record the rounds, if that is wanted; go on from a checkpoint, if there is one."""
        if recording is not None:
            from fedmpi.own_loop.recorded import Recorded  # with files of all kinds, which take a while to load

            algorithm = self.federation.algorithm
            facts = {**settings, "clients": self.size, "task": {"name": TASK}}
            facts["algorithm"] = {"name": settings["algorithm"], **dataclasses.asdict(algorithm)}
            self._recorded = Recorded(self, recording, objects, json.loads(json.dumps(facts, default=as_text)))

    @property
    def steps(self) -> int:
        """Local steps so far, also those before the checkpoint from which the loop goes on. Not collective."""
        return int(self.federation.round_index * self.federation.plan.local_steps + self._done)

    @property
    def takes_part(self) -> bool:
        """Whether this rank makes the next local step: it is one of the round's participants. Not collective."""
        return self._drawn is None or self.rank in self._drawn(self.federation.round_index)

    def accounts(self) -> dict[str, float]:
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
            **federation.facts(),
        }

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """As many batches on every rank as the rank with the most has: shorter loaders start again.

        Without it, ranks whose data are of different sizes would make different numbers of steps, and wait for
        each other forever.

        Args:
            loader: has a length and can be iterated several times, like a `torch.utils.data.DataLoader`.

        Raises:
            UserError: on every rank, if the loader of one has no length or no batch, or can be iterated only once; on
                one rank, if a pass has fewer batches than the loader's length says.
        """
        self._check_open()
        self._announce(PAUSED)
        length = agree(self._link, lambda: _length(loader), tells=True)
        number = int(self._link.allgather([length], "your numbers").max())
        passes = self._recorded.passes if self._recorded else Passes()
        yield from passes.batches(loader, length, number)

    def any(self, flag: object) -> bool:
        """Whether `flag` is true on any rank; the same on all, so that loops can end together."""
        return bool(self._ask([bool(flag)])[:, 0].any())

    @overload
    def mean(self, value: float, weight: float | None = None) -> float: ...

    @overload
    def mean(self, value: torch.Tensor, weight: float | None = None) -> torch.Tensor: ...

    def mean(self, value: Any, weight: float | None = None) -> Any:
        """Weighted mean of a metric over the ranks, the same on all.

        Args:
            value: a number, or a tensor of the same shape on every rank. It is not looked at where the weight is 0.
            weight: >= 0, of this rank (its number of test samples, say); None: its weight in the averages.

        Returns:
            a float, or a tensor like `value` (float64 if that has no floating-point type); nan if all weights are 0.

        Raises:
            UserError: on every rank, if a weight is negative or not finite, or the shapes differ.
        """
        weight = self._own_weight() if weight is None else float(weight)
        tensor = torch.as_tensor(value).detach()
        numbers = [weight, *tensor.double().reshape(-1).tolist()]
        if self.federation.aggregation.hides:
            mean = self._hidden_mean(*numbers)
        else:
            everyone = self._ask(numbers)
            weights, values = torch.from_numpy(everyone[:, 0]), torch.from_numpy(everyone[:, 1:])
            if not ((weights >= 0) & (weights < math.inf)).all():
                raise UserError(f"mean: the ranks' weights are {weights.tolist()}: expected finite numbers >= 0")
            taken = weights > 0
            mean = (weights[taken, None] * values[taken]).sum(0) / weights.sum()
        if not isinstance(value, torch.Tensor):
            return mean.reshape(tensor.shape).tolist()
        return mean.reshape(tensor.shape).to(tensor.device, tensor.dtype if tensor.is_floating_point() else mean.dtype)

    def _own_weight(self) -> float:
        """This rank's weight in the averages; 1 if all are equal."""
        plan, rank = self.federation.plan, self._link.rank
        return float(plan.weights[rank] if plan.weights else (plan.hidden_weights or {}).get(rank, 1.0))

    def _hidden_mean(self, weight: float, *values: float) -> torch.Tensor:
        """The weighted mean of each of some values, of which no rank sees those of another one."""
        if self._accounts is not None or self._link.add_hidden is None:
            called = self.federation.aggregation.called
            raise UserError(f"mean after finish: {called} can hide numbers no more: expected the call before it")
        self._announce(PAUSED)
        check_equal(self._link, {"the number of values": str(len(values))}, "expected the same on all ranks")
        is_weight = 0 <= weight < math.inf
        agree(self._link, lambda: is_weight or _no_weight(weight))
        total, *sums = self._hidden_sums([weight, *(weight * value if weight else 0.0 for value in values)])
        return torch.tensor([number / total if total else math.nan for number in sums], dtype=torch.float64)

    def _hidden_sums(self, numbers: list[float]) -> list[float]:
        """The sums over all ranks, which have called `_announce`, of which no rank sees the terms of another one."""
        assert self._link.add_hidden is not None
        return list(self._link.add_hidden([[number] for number in numbers]))

    def _ask(self, values: list[float]) -> Any:
        """[ranks, n] the [n] numbers of all ranks, also after `finish`."""
        link, watch = self._link, self._link.roll_call
        if self._accounts is None:
            self._announce(PAUSED)
        else:
            link = open_link(link.comm, watch.limit if watch else TIMEOUT)
        try:
            check_equal(link, {"the number of values": str(len(values))}, "expected the same on all ranks")
            return link.allgather(values, "your numbers")
        finally:
            if link is not self._link:
                close_link(link)

    def finish(self) -> None:
        """Average what the last round has, and give the model memory of its own; it is a plain module then."""
        if self._accounts is not None:
            return
        self.end_round()
        self._keep_private()
        self._take_averages(())
        self.federation.private.give_back(self._client)
        self._announce(ENDED)
        if self._recorded:
            self._recorded.finish()
        self._accounts = self.accounts()
        made = self._link.allgather([self._made], "machinery")[:, 0].astype(int).tolist()
        if len(set(made)) > 1 and self._link.rank == 0:
            steps = ", ".join(f"rank {rank}: {number}" for rank, number in enumerate(made[:8]))
            log.warning(f"the ranks made different numbers of steps ({steps}): the last average has some with fewer")
        flat, own = self._flat, self._own_names
        flat.release(self._current(), self._client.buffers)
        self.federation.private.clean()  # the model has them
        check_result(self.federation)
        hint, frozen = "has frozen parameters that a rank has changed", compared_values(flat.module, "average", own)
        check_same_model(self._link, flat.module, hint, frozen.__contains__)
        whole = [(n, b) for n, b in flat.module.named_buffers() if not (n in own or b.is_floating_point())]
        texts = {f"buffer '{name}'": describe_values(buffer).removeprefix("values ") for name, buffer in whole}
        differs = difference(self._link, texts)
        if differs and self._link.rank == 0:
            log.warning(f"{differs}: integer and complex buffers are not averaged")
        torch.set_num_threads(self._threads or torch.get_num_threads())
        _open_loops.discard(self)
        close_link(self._link)

    def end_round(self) -> None:
        """Average now what a round has that has begun; between two rounds, do nothing."""
        self._adopt(ends=True)
        if self._in_round:
            self._advance(ends=True)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state as name -> tensor, number or list of numbers, also within a round. Not collective.

        `torch.save` can write it; each rank writes its own.
        """
        self._flat.adopt()
        self.federation.private.keep(self._client)
        state: dict[str, Any] = copied(self.federation.state(self._begun if self._in_round else None))
        state["loop/agreed_buffers"] = self.federation.store.tail.sent.agreed.clone()
        scratch = {f"loop/rows/{name}": self._client.rows[name].clone() for name in self.federation.algorithm.scratch}
        if start := self.federation.round_start:
            state |= {f"loop/start/{name}": row.clone() for name, row in start.rows.items()}
            state["loop/start_buffers"] = start.buffers.clone()
        if self._in_round:
            state |= self._state_in_round()
        return state | scratch | {f"loop/{name}": value for name, value in self._owner().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called on the same rank. Not collective.

        Raises:
            UserError: if it is the state of another rank, model or algorithm.
        """
        self._check_open()
        for name, own_value in self._owner().items():
            if name != "step" and (theirs := state.get(f"loop/{name}", own_value)) != own_value:
                raise UserError(f"the state was taken with {name} {theirs}: expected {name} {own_value}, as here")
        try:
            self.federation.restore(state)
            for name in self.federation.algorithm.scratch:
                self._client.rows[name].copy_(state[f"loop/rows/{name}"])
            if "loop/agreed_buffers" in state:
                self.federation.store.tail.sent.agree_on(state["loop/agreed_buffers"])
            self._done, self._in_round = int(state["loop/step"]), False
            if start := self.federation.round_start:
                start.restore({name: state[f"loop/start/{name}"] for name in start.rows}, state["loop/start_buffers"])
        except (KeyError, RuntimeError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"the state does not belong to this rank, model and algorithm: {error}") from None
        self.averaged = self._done == 0
        self.federation.private.give_back(self._client)
        if self._done:
            self._begin_round(self._done)
            self._restore_in_round(state)
        self._flat.point_at(self._current(), self._client.buffers)

    def _state_in_round(self) -> dict[str, Any]:
        """What only a round that has begun needs, to end as it would have."""
        federation, losses = self.federation, self._client.oracle.losses
        found = {f"loop/before/{name}": value for name, value in copied(federation.left_out.before_turn).items()}
        found["loop/num_reported"] = federation.num_reported
        if len(self._client.numbers):
            found["loop/numbers"] = self._client.numbers.clone()
        return found | ({"loop/losses": torch.stack(losses)} if losses else {})

    def _restore_in_round(self, state: Mapping[str, Any]) -> None:
        federation, oracle = self.federation, self._client.oracle
        federation.num_reported = int(state["loop/num_reported"])
        self._client.numbers.copy_(state.get("loop/numbers", self._client.numbers))
        oracle.losses = list(state.get("loop/losses", torch.empty(0)).to(federation.server.x.device).unbind())
        prefix = "loop/before/"
        before = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        if federation.left_out.is_on and self._works and not before:
            raise UserError(
                "the state was taken within a round without faulty = leave_out: expected the same, or a state between "
                "two rounds"
            )
        federation.left_out.before_turn = copied(before)

    def _owner(self) -> dict[str, Any]:
        """What a state belongs to, and the local step after which it was taken."""
        algorithm = plain(command_name(type(self.federation.algorithm)))
        q = self.federation.plan.local_steps
        return {
            "rank": self._link.rank,
            "ranks": self._link.size,
            "algorithm": algorithm,
            "local_steps": q,
            "step": self._done,
        }

    def _step_size_bits(self) -> int:
        """A digest of the step size beside its complement: if ranks differ, the OR of all has a bit in both."""
        step_size = getattr(self.federation.algorithm, "step_size", None)
        if self._digest is None or step_size is not self._digest[0]:  # a digest takes longer than the look
            every = (1 << DIGEST_BITS) - 1
            found = zlib.crc32(as_text(step_size).encode()) & every
            self._digest = step_size, found | (found ^ every) << DIGEST_BITS
        return self._digest[1]

    def set_model(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from other values of the model: those of rank 0 on all ranks, but private ones; between two rounds.

        An outer optimizer does not take the difference for a move; its moments stay, as all rows that are no models.

        Args:
            state: name -> tensor, as `state_dict()` of the model; entries that are missing stay as they are.

        Raises:
            UserError: on every rank, within a round, or for a name or shape that the model does not have.
        """
        self._check_open()
        flat, store, x = self._flat, self.federation.store, self.federation.server.x
        private, traffic = self.federation.private, dataclasses.asdict(self._link.traffic)
        self._announce(PAUSED)
        agree(self._link, lambda: self._check_state(state))
        self._adopt()
        self._keep_private()
        frozen = [value for name, value in flat.module.named_parameters() if name not in flat.names]
        with torch.no_grad():
            for name, value in {**dict(flat.module.named_buffers()), **flat.named_values(x, store.buffers)}.items():
                if name in state:
                    value.copy_(state[name])
            flat.adopt()
            for tensor in (x, store.buffers, *flat.counters, *frozen):
                _take_rank_0s(self._link, tensor)
        self._link.traffic.restore(traffic)
        store.tail.sent.agree_on(store.buffers)
        for names, rows in ((store.server_rows(), store.server_rows()), (self._client.own, self._client.rows)):
            for name in names:
                if name.startswith("x_"):  # models of former steps and rounds
                    rows[name].copy_(x)
            private.clean()
            private.give_back(self._client)
        own_steps.keep_start(self.federation)
        flat.point_at(self._current(), self._client.buffers)

    def _check_state(self, state: object) -> None:
        if not self.averaged:
            raise UserError("set_model: a round has begun: call it after a step with fed.averaged")
        if not isinstance(state, Mapping):
            raise UserError(f"set_model: state is a {type(state).__name__}: expected a state dict of the model")
        values = self._flat.module.state_dict()
        for name, value in state.items():
            shape = getattr(value, "shape", None)
            if not isinstance(value, torch.Tensor) or name not in values or values[name].shape != shape:
                kind = "tensor" if shape is None else f"tensor of shape {list(shape)}"
                raise UserError(f"set_model: '{name}' is a {type(value).__name__}: the model has no such {kind}")

    def _adopt(self, ends: bool = False) -> None:
        """Take what the loop has assigned to the model's tensors since the last step, see `FlatModule.adopt`."""
        try:
            if ends:
                self._flat.check()
            self._flat.adopt()
        except UserError as error:
            self._announce(FAILED, error)

    def _start(self) -> None:
        """The initial estimates; private values are in the rows before and after it."""
        self._keep_private()
        self.federation.start()
        self.federation.private.give_back(self._client)
        own_steps.keep_start(self.federation)

    def _keep_private(self) -> None:
        """Between two rounds the private values are in the rows, so that the loop has this rank's own model."""
        if not self._in_round:
            self.federation.private.keep(self._client)

    def _advance(self, ends: bool = False) -> None:
        """Make the next local step, and what follows it up to the step after it; or end the round before it."""
        self._check_open()
        if self._recorded and self._recorded.is_pending:
            self._recorded.write_pending()
        federation, client = self.federation, self._client
        if not self._in_round:
            with self._link.collective():
                self._begin_round(0)
        if ends:
            own_steps.shorten(federation, client, self._done)
        else:
            if self._works:
                own_steps.local_step(federation, client, self._done)
            self._done += 1
            self._made += 1
            if self._recorded and self._done < client.num_steps:
                self._recorded.after_step()
        self.averaged = False
        if self._done == client.num_steps:
            with self._link.collective():
                if self._works:
                    federation.end_turn(client)
                self._end_round()
        self._link.progress[:] = self._link.progress[0] + 1, self._done

    def _check_open(self) -> None:
        if self._accounts is not None:
            raise UserError("the federation has ended: finish() was called")
        if self._process != os.getpid():
            raise UserError("this process was forked from the rank that has the federation: only that one can use it")

    def _begin_round(self, first_step: int) -> None:
        """Everything of a round before its local step number `first_step`."""
        check_alone()
        if self._recorded:
            self._recorded.begin_round(first_step)
        federation, self._works = self.federation, self.takes_part
        if self._works and not first_step:
            self._keep_private()
        due = list(enumerate(federation.begin_round(self._request)))
        steps = next((number for number, exchange in due if exchange.work is None), None)
        if steps is None:
            raise UserError("this algorithm makes no local steps of the loop: use it with fedmpi.train")
        earlier = [] if first_step else due[:steps]  # they have been made if the round goes on in its middle
        self._losses = [(exchange, federation.run_exchange(exchange, number)) for number, exchange in earlier]
        self._later = due[steps:]
        self._begun = state_before(federation)
        federation.begin_exchange(due[steps][1], steps)
        self._client.num_steps = federation.plan.local_steps
        if self._works:
            federation.begin_turn(self._client, first_step)
        self._in_round = True

    def _end_round(self) -> None:
        """The average after the local steps, and what follows it."""
        if self._recorded:
            self._recorded.end_meeting()
        federation, (_, steps), *later = self.federation, *self._later
        self._losses.append((steps, federation.end_exchange()))
        self._losses += [(exchange, federation.run_exchange(exchange, number)) for number, exchange in later]
        self.round_loss = federation.end_round(self._losses)
        self._in_round, self._done, self.averaged = False, 0, True
        self._take_averages(self._client.skipped)
        federation.private.give_back(self._client)
        own_steps.keep_start(self.federation)
        found = federation.requests >> REQUEST_BITS
        if found & found >> DIGEST_BITS & (1 << DIGEST_BITS) - 1:
            raise UserError(
                f"at the average after round {federation.round_index} the ranks had different step sizes: "
                "expected the same schedule on all ranks"
            )
        if self._recorded or self._flat.has_masters:
            self._flat.point_at(self._current(), self._client.buffers)
        if self._recorded:
            self._recorded.after_round(self.round_loss)

    def _take_averages(self, kept: Collection[str]) -> None:
        """Let the client's rows that skip rounds be the averages now, but for those of `kept`."""
        averages = self.federation.store.averaged_rows()
        for name in set(self.federation.store.skipping).difference(kept):
            self._client.rows[name].copy_(averages[name])

    def _request(self) -> int:
        """See `Federation.begin_round`."""
        # Within a round a loop may set another step size: one of them is compared.
        bits = self._step_size_bits() if self.federation.averages_local_steps else 0
        return bits << REQUEST_BITS | (self._recorded.request() if self._recorded else 0)

    def _announce(self, event: int, error: UserError | None = None) -> None:
        if self._recorded:
            self._recorded.end_meeting()
        self.federation.reports.announce(event, self.federation.round_index, error)

    def _current(self) -> torch.Tensor:
        """[dim] the model that this rank has now."""
        return self._client.rows.get("x", self.federation.server.x)


def _weights_of_ranks(link: Any, weight: float) -> list[float] | None:
    """All ranks' weights; None if they are equal. Collective on the link."""
    weights = link.allgather([weight], "weights")[:, 0]
    if not (weights > 0).all():
        raise UserError(f"weight = {weights.min():g}: expected a number > 0 on every rank")
    return None if (weights == weights[0]).all() else list(weights.tolist())


def _begin_equal(
    flat: Any, link: Any, weight: float, buffers: str, private: str | None, hides: bool
) -> tuple[Any, Any]:
    """Give all ranks the parameters of rank 0, and equal buffers. Collective on the link.

    The messages of `flat`, a `FlatModule`, become those of a user's own loop. For the others see `fedmpi.average`.
     `hides`: whether no rank may see what others have.
    Returns (the private slices of (x, buffers), this rank's own (x, buffers)).

    Raises:
        UserError: on every rank, if buffers differ and should not.
    """
    flat.changed_by, flat.remedy = "the loop", "call finish(), and then join or average again"
    places = agree(link, lambda: private_places(flat, private) if private else ((), ()), tells=True)
    own = flat.x.clone(), flat.buffers.clone()
    for tensor in (flat.x, flat.buffers, *(flat.counters if buffers == "rank0" else ())):
        _take_rank_0s(link, tensor)
    if buffers == "average" and flat.num_buffers and hides:
        if link.first_rank_where(not torch.equal(own[1], flat.buffers)) is not None:
            raise UserError(
                "buffers = average: the ranks' models begin with different buffers, and their first average would show "
                "what the aggregation hides: expected equal ones (load the same file on all ranks), or buffers='rank0'"
            )
    elif buffers == "average" and flat.num_buffers:
        total = link.allgather([weight], "weights").sum()
        for part in flat.buffer_parts:
            own_part, first = part.of(own[1]).double(), part.of(flat.buffers).double()
            moves = torch.where(own_part == first, 0.0, own_part - first).mul_(weight)  # equal ones stay as they are
            link.allreduce(moves, "buffers")
            part.of(flat.buffers).copy_(first + moves / total)
    return places, own


def _take_share_of_cores(link: Any, by_load: bool) -> int | None:
    """Set torch's threads to this rank's share, if nobody has set them and all ranks would use all cores.

    Returns how many there were before, if they were changed.
    """
    (threads, chosen_by), before = choose_threads(link, by_load=by_load), int(torch.get_num_threads())
    if threads >= before or before not in library_threads():
        return None
    torch.set_num_threads(threads)
    if link.rank == 0:
        change = f"torch uses {threads} of its {before} threads on this rank ({chosen_by or 'its share of the cores'})"
        log.warning(f"{change}: torch.set_num_threads or OMP_NUM_THREADS choose otherwise")
    return before


def _take_rank_0s(link: Any, tensor: torch.Tensor) -> None:
    """Give a tensor the bits that it has on rank 0. Collective on the link."""
    host = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    if host.numel():
        link.broadcast(host.reshape(-1).view(torch.uint8).numpy(), "model")
        tensor.detach().copy_(host)


def _length(loader: Any) -> int:
    """How many batches a loader has in a pass.

    Raises:
        UserError: if it does not say, has none, or has only one pass.
    """
    kind = f"batches: the loader is a {type(loader).__name__}"
    if isinstance(loader, Iterator):
        raise UserError(f"{kind}, which can be iterated only once: expected one like a DataLoader")
    try:
        length = len(loader)
    except (TypeError, NotImplementedError):
        raise UserError(f"{kind} without a length: end such loops together, by fed.any(batch is None)") from None
    if length == 0:
        raise UserError("batches: the loader has no batch")
    return length


def _no_weight(weight: float) -> None:
    raise UserError(f"mean: a rank's weight is {weight}: expected a finite number >= 0")
