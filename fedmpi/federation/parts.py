"""What a rank's part of a federation is made of, and how it is put together."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fedmpi.aggregation.base import Aggregation
from fedmpi.aggregation.sending import Sending
from fedmpi.aggregation.stages.base import Stage
from fedmpi.algorithms.base import Algorithm
from fedmpi.algorithms.check import check_rows, skipping_rows
from fedmpi.comm.link import Link
from fedmpi.comm.ranks import RanksLost
from fedmpi.federation.buffers import SentBuffers
from fedmpi.federation.client import Client, Server
from fedmpi.federation.client_state import SKIPPED
from fedmpi.federation.layout import layout_of
from fedmpi.federation.left_out import LeftOut
from fedmpi.federation.participation import Plan
from fedmpi.federation.private import PrivateParts
from fedmpi.federation.round import Round
from fedmpi.federation.round_start import RoundStart
from fedmpi.federation.rows import RowStore
from fedmpi.federation.variables import Iterate, Variables
from fedmpi.ground.errors import UserError
from fedmpi.ground.part import Part
from fedmpi.ground.registry import command_name
from fedmpi.oracles.base import Oracle
from fedmpi.oracles.flat_module import BufferPart

MakeOracle = Callable[[Client], Oracle[Any]]


class Parts:
    """What one rank's part of a federation is made of, and how far it is: all but the rounds. Making it is collective.

    Args:
        algorithm, link, plan, variables: an `Algorithm`, a `Link`, a `Plan` and the `Variables`.
        oracles: client number -> function(`Client`) -> oracle, for this rank's clients in order.
        sending: a `Sending`: what becomes of the clients' rows. poison: see `RowStore`.

    Attributes:
        aggregation: open. stages: name -> `Stage`. store: the `RowStore`. clients: list of `Client`, of this rank.
        server: the `Server`. server_seen_by_clients: without the exchanged rows, which belong to the clients while
            they work.
        private: the `PrivateParts`. left_out: the `LeftOut`. round_start: the `RoundStart`; None: nothing needs it.
        named: name -> `fedmpi.ground.part.Part`, what has facts and a state of its own.
        current: the `Round`, or the last one. round_index: of the next round, from 0.
        present: set of the clients that took part in the previous round; all of them before round 0.
        lost: frozenset of the clients whose ranks are lost; they are absent from every round.
        longest: the largest number of local steps of a client in a round, q.
        num_gradients: evaluated so far by all clients of all ranks. num_reported: of this rank's, those that are in it.
        seconds: of this rank, in "local" steps and in "communication" (waiting included).
        selected: the `Iterate` that was selected as a candidate for the result, or None.

    Raises:
        UserError: if the algorithm names its rows in a wrong way, see `check_rows`.
    """

    current: Round

    def __init__(
        self,
        algorithm: Algorithm,
        link: Link,
        oracles: Mapping[int, MakeOracle],
        plan: Plan,
        variables: Variables,
        sending: Sending | None = None,
        poison: bool = False,
    ) -> None:
        check_rows(algorithm)
        sending, x = sending or Sending(), variables.x
        _check_alone(algorithm, sending.aggregation)
        _check_weights(plan, sending.aggregation)
        self.algorithm, self.link, self.plan = algorithm, link, plan
        sent = _sent_buffers(variables, in_order=bool(sending.codec) or not sending.aggregation.leaves_out_constants)
        if sent.parts and 0 < len(algorithm.exchanged) == len(skipping_rows(algorithm)):
            raise UserError(
                f"algorithm {command_name(type(algorithm))}: all its exchanges skip rounds (due), and the model has "
                "float buffers, which are averaged in every round: expected rows of an exchange without due"
            )
        segments = variables.segments or [slice(0, x.numel())]
        parameters = (tuple(segments), tuple(variables.names), tuple(variables.shapes))
        self.longest = plan.start().nominal_steps
        layout = layout_of(algorithm, x.numel(), sent, x.dtype, x.device, self.longest, parameters)
        self.aggregation, self.stages = sending.opened(link, layout, oracles)
        self.store = store = RowStore(
            algorithm, x.numel(), sent, len(oracles), x.dtype, x.device, poison=poison, aggregation=self.aggregation
        )
        own = store.server_rows()
        of_problem = plan.num_clients, segments, x.numel(), variables.ascent, variables.shapes
        self.server = Server({**store.averaged_rows(), **own}, *of_problem)
        self.server_seen_by_clients = Server(own, *of_problem)
        self.clients = []
        for position, (index, make_oracle) in enumerate(oracles.items()):
            client = Client(index, store.client_rows(position), algorithm.client_rows, store.tail.work)
            client.oracle = make_oracle(client)
            if store.skipping:
                client.kept[SKIPPED] = store.skipped_rows(position)
            self.clients.append(client)
        self.named = _named(self.aggregation, self.stages, self.clients)
        for name, part in self.named.items():
            for client in self.clients if part.kept_rows else ():
                new_rows = (store.beside if part is self.aggregation.beside else store.tail).new_rows
                part.kept_of[client.index] = {kept: new_rows() for kept in part.kept_rows}
                client.kept |= {f"{name}.{kept}": rows for kept, rows in part.kept_of[client.index].items()}
        self.server.x.copy_(x)
        self.private = PrivateParts(store, variables, self.clients)
        self.round_start: RoundStart | None = None
        needs_start = self.aggregation.needs_start or any(stage.needs_start for stage in self.stages.values())
        if needs_start or self.aggregation.codec:
            differences = {name for name, kind in algorithm.kinds.items() if kind == "difference"}
            self.round_start = RoundStart(store, self.private, differences)
        self.left_out = LeftOut(sending.faulty == "leave_out")
        self.lost: frozenset[int] = frozenset()
        self.present = set(range(plan.num_clients))
        self.round_index = 0
        self.num_gradients, self.num_reported = 0, 0
        self.seconds, self._began = {"local": 0.0, "communication": 0.0}, 0.0
        self.selected: Iterate | None = None

    def facts(self) -> dict[str, float]:
        """What the parts say about themselves: name, like "aggregation_epsilon" -> number."""
        found = {
            f"{name.removeprefix('stages/')}_{key}": float(value)
            for name, part in self.named.items()
            for key, value in part.facts().items()
        }
        return found | ({"times_left_out": float(self.left_out.number)} if self.left_out.is_on else {})

    def select(self, value: float = math.nan) -> None:
        """Remember the current averaged model as the candidate for the result, with its value (larger is better)."""
        self.selected = Iterate(self.round_index, self.server.x.clone(), self.store.buffers.clone(), value)

    def check_lost(self) -> None:
        """Raise `RanksLost` if ranks were lost since the round began."""
        if self.link.lost_clients() != self.lost:
            raise RanksLost

    def enter_round(self, plan: Callable[[frozenset[int]], Round]) -> None:
        """Begin a `Round`, `plan(clients that are lost)`: for the server and for every client."""
        self.lost = self.link.lost_clients()
        self.show_round(plan(self.lost))
        for client in self.clients:
            client.step_index, client.was_absent = -1, client.index not in self.present

    def show_round(self, current: Round) -> None:
        """Let the server and all clients be in a `Round`."""
        self.current = current
        for holder in (self.server, self.server_seen_by_clients, *self.clients):
            holder.round = current

    def use_averages(self, then: Callable[[Any], None] | None, participants: Iterable[int]) -> None:
        """Do what follows an average, `then(server)` or nothing, also for the private parts of participants."""
        if then is not None:
            then(self.server)
        self.private.compute(then, [client for client in self.clients if client.index in participants])


def _named(aggregation: Aggregation, stages: dict[str, Stage], clients: list[Client]) -> dict[str, Part]:
    """Name -> every `Part` of this rank."""
    found: dict[str, Part | None] = {"aggregation": aggregation, "numbers": aggregation.beside}
    found["codec"] = aggregation.codec
    found |= {f"stages/{name}": stage for name, stage in stages.items()}
    found["oracle"] = clients[0].oracle.kind if clients else None
    return {name: part for name, part in found.items() if part is not None}


def _check_weights(plan: Plan, aggregation: Aggregation) -> None:
    """Raise UserError if ranks do not know all weights, and the aggregation needs to."""
    if plan.hidden_weights is not None and not getattr(aggregation, "hidden_weights", False):
        raise UserError(
            f"aggregation {command_name(type(aggregation))} divides by the sum of all clients' weights, and ranks do "
            "not know those of others: expected aggregation masked with hidden_weights"
        )


def _check_alone(algorithm: Algorithm, aggregation: Aggregation) -> None:
    """Raise UserError if one client's rows would become the server's, and the aggregation hides or compares rows."""
    least, is_alone = aggregation.least_clients, any(exchange.alone for exchange in algorithm.exchanges())
    if is_alone and (least > 1 or not aggregation.exposes_rows):
        does = f"needs at least {least}" if least > 1 else "hides what single clients send (exposes_rows = False)"
        raise UserError(
            f"algorithm {command_name(type(algorithm))} lets one client work alone in a part of each round, and "
            f"aggregation {command_name(type(aggregation))} {does}: expected another algorithm or aggregation"
        )


def _sent_buffers(variables: Variables, in_order: bool) -> SentBuffers:
    """The `SentBuffers` of some `Variables`."""
    x, buffers = variables.x, variables.buffers
    buffers = x.new_empty(0) if buffers is None else buffers
    whole = [BufferPart("the float buffers", 0, buffers.numel(), x.dtype)] if buffers.numel() else []
    parts = whole if variables.buffer_parts is None else variables.buffer_parts
    return SentBuffers(buffers.to(x), parts, in_order=in_order)
