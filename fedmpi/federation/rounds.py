"""The loop: rounds of exchanges, each the work of some clients and the average after it.

`Federation` runs the same on N ranks and in one process with all clients (`fedmpi.simulate`): that depends only on the
link over which it sums.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from fedmpi.aggregation.layout import Moment
from fedmpi.aggregation.sending import Sending
from fedmpi.algorithms.base import Algorithm, Exchange
from fedmpi.algorithms.check import number_of
from fedmpi.comm.agreement import agreed_error
from fedmpi.comm.link import Link
from fedmpi.comm.ranks import RanksLost
from fedmpi.federation.average_check import check_average
from fedmpi.federation.changed_buffers import check_seen
from fedmpi.federation.client import Client
from fedmpi.federation.errors import named_in_errors
from fedmpi.federation.losses import FAILED, Losses, Reports
from fedmpi.federation.observer import Observer
from fedmpi.federation.participation import Plan
from fedmpi.federation.parts import MakeOracle, Parts
from fedmpi.federation.passage import Passage
from fedmpi.federation.scales import Scales
from fedmpi.federation.start import make_initial_estimates
from fedmpi.federation.state import check_parts, go_back, kept_state, restore_state, state_of
from fedmpi.federation.variables import Variables
from fedmpi.ground.errors import UserError


class Federation(Parts):
    """One rank's part of a federation: its clients, the replicated server, and the rounds.

    Collective: every rank of the link makes the same calls. Here one process has both clients:

    >>> import fedmpi, torch
    >>> from fedmpi.comm.solo import SoloLink
    >>> from fedmpi.federation import Plan, Variables
    >>> from fedmpi.oracles import FunctionOracle
    >>> def make(client):
    ...     return FunctionOracle(lambda index, x, sample: x - index, client)
    >>> fedavg, start = fedmpi.algorithms.FedAvg(step_size=0.5), Variables(torch.tensor([4.0]))
    >>> federation = fedmpi.Federation(fedavg, SoloLink(), {0: make, 1: make}, Plan(num_clients=2), start)
    >>> federation.start()
    >>> loss = federation.run_round()
    >>> federation.server.x
    tensor([2.2500])

    A round is `begin_round`; for each exchange `begin_exchange`, the `work` of this rank's participants, and
    `end_exchange`; then `end_round`. `run_round` does all of it. A loop that makes the local steps itself calls
    `begin_turn` and `end_turn` instead of `work` (`fedmpi.federation.own_steps`, `fedmpi.own_loop`).

    All state that outlasts a round is in its clients, its server, its aggregation and stages, and itself. If ranks are
    lost in a round and the link goes on without them (`Ranks.survive`), the round is repeated from its start, planned
    without them.

    Args, besides those of `Parts`:
        observer: an `Observer`, which hears of the rounds.

    Attributes, besides those of `Parts`:
        requests: the requests of all ranks in the current round so far, or in the last one: the OR of their bits.
        exchange: the current `Exchange`; moment: its `Moment`.
    """

    exchange: Exchange
    moment: Moment

    def __init__(
        self,
        algorithm: Algorithm,
        link: Link,
        oracles: Mapping[int, MakeOracle],
        plan: Plan,
        variables: Variables,
        sending: Sending | None = None,
        observer: Observer | None = None,
        poison: bool = False,
    ) -> None:
        super().__init__(algorithm, link, oracles, plan, variables, sending, poison)
        self._scales = Scales(self.store)
        self.reports = Reports(link, self.store.tail.sent, self._scales.most)
        self.observer = observer or Observer()
        self.requests = 0
        self._request: Callable[[], int] = int
        self.places: list[int] = []  # of the current round's exchanges among all of the algorithm
        self._skipped = set[str]()  # rows that skip the current round
        self._serial = -1  # of the current exchange, see `Moment`
        self._passage = Passage(self)
        check_parts(self)

    def start(self) -> None:
        """Before round 0: the initial estimates, averaged if the algorithm exchanges any."""
        make_initial_estimates(self, self.run_exchange)
        self.observer.after_round(self)

    def run_round(self, request: Callable[[], int] = int) -> float:
        """One round: local steps of the participants, then the averages; for `request` see `begin_round`.

        Returns:
            mean training loss of the round's local steps over all clients (nan if unknown); of an algorithm
            without local steps, that of what its clients do instead.

        Raises:
            Diverged: on every rank, if a loss is not finite anywhere; before it is averaged.
            UserError: if the participants are not different clients.
        """
        kept = kept_state(self)
        while True:
            try:
                losses = []
                for number, exchange in enumerate(self.begin_round(request)):
                    for client in self.begin_exchange(exchange, number):
                        self.work(client)
                    losses.append((exchange, self.end_exchange()))
                return self.end_round(losses)
            except RanksLost:
                go_back(self, kept)

    def begin_round(self, request: Callable[[], int] = int) -> list[Exchange]:
        """Begin the next round; returns its `Exchange`s, in order.

        Args:
            request: function without arguments, called whenever the ranks exchange their losses; it returns a whole
                number, of which the bits are this rank's requests to all (a checkpoint is due, a signal has come).
                `int` returns 0: none.
        """
        self.enter_round(lambda lost: self.plan.round(self.round_index, lost))
        self.requests, self._request, self.left_out.clients = 0, request, frozenset()
        exchanges = self.algorithm.exchanges()
        self.places = [n for n, each in enumerate(exchanges) if each.due is None or each.due(self.server)]
        due = [exchanges[place] for place in self.places]
        self._skipped = set(self.store.skipping).difference(*(exchange.rows for exchange in due))
        return due

    def run_exchange(self, exchange: Exchange, number: int) -> float:
        """Exchange number `number` of a round, from 0; returns and raises what `end_exchange` does. Collective."""
        for client in self.begin_exchange(exchange, number):
            self.work(client)
        return self.end_exchange()

    def begin_exchange(self, exchange: Exchange, number: int) -> list[Client]:
        """Begin one exchange of a round; returns the `Client`s of this rank that take part."""
        self._began = time.perf_counter()
        current, store = self.current, self.store
        weights = self.plan.weights_in(current, exchange.alone)
        self.link.enter(f"the local steps of {current}")
        if self.round_start is not None:
            self.round_start.begin_exchange(number)
        self.observer.begin_exchange(self, number)
        store.begin_exchange(exchange.rows, number == 0, number_of(exchange.numbers, self.longest))
        self.exchange, self._serial = exchange, self._serial + 1
        self.moment = Moment(current.index, number, exchange.rows, store.region, self._serial, self.plan.seed)
        if self.round_start is not None:
            self.round_start.give()
        self.server.numbers = store.beside.averages
        for client in self.clients:
            client.numbers = store.beside.numbers
        try:
            self.aggregation.begin(self.moment, weights)
            if store.beside.used:
                self._serial += 1
                store.beside.begin(dataclasses.replace(self.moment, serial=self._serial), weights)
        except UserError as error:  # on every rank
            raise agreed_error(self.link, f"{current}: {error}" if self.link.rank == 0 else None) from None
        self._losses = Losses(store.block.device.type != "cpu", weights if self.plan.is_weighted else None)
        self._scales.begin(self._losses, len(exchange.rows))
        return [client for client in self.clients if client.index in weights]

    def work(self, client: Client) -> None:
        """The turn of a client that takes part: its local steps, or the other work of the exchange."""
        with named_in_errors(client):
            self.begin_turn(client)
            if self.exchange.work is not None:
                self.exchange.work(client, self.server_seen_by_clients, client.oracle)
            else:
                for step in range(client.num_steps):
                    client.step_index = step
                    self.algorithm.local_step(client, self.server_seen_by_clients, client.oracle)
                    self.observer.after_step(self, client)
            self.end_turn(client)

    def begin_turn(self, client: Client, first_step: int = 0) -> None:
        """Give a client its rows, and begin its local steps if the exchange is about these.

        Args:
            first_step: number of the local step to begin with, to go on in the middle of a round. All rows, also the
                scratch rows, and `LeftOut.before_turn` must be as they were then; only with one client on the rank.
        """
        self.store.begin_turn(self.clients.index(client), client.skipped, is_new=first_step == 0)
        self.private.give_back(client)
        if first_step == 0:
            self.left_out.begin_turn(client)
        if self.exchange.work is None:
            client.num_steps = self.plan.steps_of(client.index, client.round_index)
            client.oracle.expect(client.num_steps - first_step)
            if first_step == 0:
                self.algorithm.download(client, self.server_seen_by_clients)

    def end_turn(self, client: Client) -> None:
        """Complete what a client sends, let it pass the stages, tell the algorithm, and give it to the aggregation."""
        self.observer.end_turn(self, client)
        self._losses.add(client)
        if self.exchange.work is None:
            try:
                client.oracle.adopt()
            except UserError as error:
                self.reports.announce(FAILED, self.round_index, error)
            self.algorithm.upload(client, self.server_seen_by_clients, client.oracle)
            self._losses.add_if_none(client)  # other passes than those of the local steps
        self.private.take(client)
        counts = self._passage.go(client, self.moment, self.aggregation.weights[client.index], self._losses)
        if counts:
            client.skipped |= self._skipped
            self.private.give_back(client)  # the algorithm sees the private coordinates, which are not sent
            self.algorithm.sent(client, self.server_seen_by_clients)
            self.private.take(client)
        else:
            self.left_out.undo_turn(client)
        self.store.end_turn(self.clients.index(client), client.index, is_left_out=not counts)

    def end_exchange(self) -> float:
        """Average what the participants of all ranks have sent; returns the mean loss. Collective on the link.

        Raises:
            Diverged: on every rank, if a client's loss, or a row that it sends, is not finite.
            RanksLost: on all ranks that are left, if others were lost since the round began.
        """
        self._losses.collect()
        began, gradients = time.perf_counter(), sum(client.num_gradients for client in self.clients)
        self.seconds["local"] += began - self._began
        unreported = gradients - self.num_reported
        report = self.reports.exchange(self._losses, unreported, self._request(), self.round_index)
        self.check_lost()
        self.requests |= report.requests
        tail, rows = self.store.tail, self.exchange.rows
        stages = [stage.called for stage in self.stages.values()]
        report.check_finite(self.server.round_index, rows, tail.sent.parts, stages)
        tail.send(report.flags, self.aggregation)
        check_seen(self, any(report.flags))
        if report.num_left_out:
            aggregations = [self.aggregation, *self.store.beside.used]
            self.left_out.leave_out(self._losses.left_out, self.current, self.link, aggregations)
            self.show_round(self.left_out.fewer(self.current, self.plan, self.lost))
        self.link.enter(f"the sum of {self.current}")
        self._scales.give(report.exponents, self._losses, unreported, self.server.round_index)
        self.store.average()
        if self.aggregation.exposes_rows:  # a sum that hides rows is never made again without some of them
            self.check_lost()
        check_average(self, rows)
        self.seconds["communication"] += time.perf_counter() - began
        for client in self.clients:
            client.skipped.difference_update(rows)
        self.use_averages(self.exchange.then, self.aggregation.weights)
        mean, num_gradients = self._scales.take(report)
        self.num_gradients, self.num_reported = self.num_gradients + num_gradients, gradients
        return mean

    def end_round(self, losses: list[tuple[Exchange, float]]) -> float:
        """End a round with [(`Exchange`, its loss)], and return the round's loss: see `run_round`."""
        self.present = set(self.current.participants)
        self.observer.after_round(self)
        self.round_index += 1
        # The loss of the local steps, if the algorithm has any with a loss, otherwise that of other work.
        ordered = sorted(losses, key=lambda pair: pair[0].work is not None)
        return next((loss for _, loss in ordered if not math.isnan(loss)), math.nan)

    @property
    def averages_local_steps(self) -> bool:
        """Whether the current exchange is the one after the local steps."""
        return self.exchange.work is None

    def state(self, begun: dict[str, Any] | None = None) -> dict[str, Any]:
        """Everything that this rank needs to go on after a round, see `state_of`."""
        return state_of(self, begun)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where another federation with the same settings returned its `state`, see `restore_state`.

        It is called instead of `start`, with the state of this rank's clients.
        """
        restore_state(self, state)
