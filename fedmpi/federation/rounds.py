"""The loop: rounds of exchanges, each the work of some clients and the average after it.

`Federation` runs the same on N ranks and in one process with all clients (`fedmpi.simulate`): that depends only on the
link over which it sums.
"""

import math
import time

import numpy as np
import torch

from fedmpi.aggregation.layout import Moment
from fedmpi.comm.agreement import agreed_error
from fedmpi.comm.link import RanksLost, describe_clients
from fedmpi.federation.client import named_in_errors
from fedmpi.federation.losses import FAILED, Losses, Reports, when_in
from fedmpi.federation.parts import assemble
from fedmpi.federation.passage import Passage
from fedmpi.federation.start import make_initial_estimates
from fedmpi.federation.state import check_parts, copied, go_back, kept_state, restore_state, state_of
from fedmpi.federation.variables import Iterate
from fedmpi.ground.errors import Diverged, UserError
from fedmpi.ground.registry import command_name
from fedmpi.ground.text import Log

log = Log(__name__)


class Federation:
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
    `begin_turn`, `local_step` and `end_turn` instead of `work` (`fedmpi.own_loop`).

    All state that outlasts a round is in its clients, its server, its aggregation and stages, and itself. If ranks are
    lost in a round and the link goes on without them (`Link.survive`), the round is repeated from its start: it is then
    one that was planned without them.

    Args:
        algorithm, link, plan, variables: an `Algorithm`, a `Link`, a `Plan` and the `Variables`.
        oracles: client number -> function(`Client`) -> oracle, for this rank's clients in order.
        sending: a `Sending`: what becomes of the clients' rows.
        observe: called as `observe(federation, round_index, step, client)` after the start, after
            every local step of a client, and after every round's last average (step None).
        poison: see `RowStore`.

    Attributes, besides those of `Parts`:
        round_index: of the next round, from 0.
        present: set of the clients that took part in the previous round; all of them before round 0.
        lost: frozenset of the clients whose ranks are lost; they are absent from every round.
        num_gradients: evaluated so far by all clients of all ranks. num_reported: of this rank's, those that are in it.
        seconds: of this rank, in "local" steps and in "communication" (waiting included).
        selected: the `Iterate` that `select` remembered, or None.
        left_out: clients that are left out of the current round, or were of the last one (`Sending.faulty`).
        num_left_out: how many were so far, in all rounds. leaves_out: whether `Sending.faulty` is "leave_out".
        before_turn: if so, the state of the client whose turn it is, as its turn began.
        requests: the requests of all ranks in the current round so far, or in the last one: the OR of their bits.

    Raises:
        UserError: if the algorithm names its rows in a wrong way, see `check_rows`.
    """

    def __init__(self, algorithm, link, oracles, plan, variables, sending=None, observe=None, poison=False):
        self.algorithm, self.link, self.plan = algorithm, link, plan
        parts = assemble(algorithm, link, oracles, plan, variables, sending, poison)
        self.aggregation, self.stages, self.store = parts.aggregation, parts.stages, parts.store
        self.server, self.server_seen_by_clients = parts.server, parts.server_seen_by_clients
        self.clients, self.private, self.named = parts.clients, parts.private, parts.named
        most = int(link.allgather([len(oracles)]).max()) if self.aggregation.is_reproducible else 0
        self.reports = Reports(link, most, self.store.sent)
        self._observe = observe or (lambda *args: None)
        self.lost = frozenset()
        self.present = set(range(plan.num_clients))
        self.round_index = 0
        self.num_gradients, self.num_reported = 0, 0
        self.seconds, self._began = {"local": 0.0, "communication": 0.0}, 0.0
        self.selected = None
        self.requests, self._request = 0, int
        self._exchange, self._moment, self._losses = None, None, None  # of the current exchange
        self.leaves_out = sending is not None and sending.faulty == "leave_out"
        self.before_turn = {}
        self._passage = Passage(self.store, self.stages, algorithm.kinds, self.leaves_out)
        self.left_out, self.num_left_out = frozenset(), 0
        self._serial = -1  # of the current exchange, see `Moment`
        self._places = ()  # of the current round's exchanges among all of the algorithm
        self._is_start_kept = False  # for the next round, by `keep_start`
        check_parts(self)

    def start(self):
        """Before round 0: the initial estimates, averaged if the algorithm exchanges any."""
        make_initial_estimates(self)
        self._observe(self, -1, None, None)

    def run_round(self, request=int):
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

    def begin_round(self, request=int):
        """Begin the next round; returns its `Exchange`s, in order.

        Args:
            request: function without arguments, called whenever the ranks exchange their losses; it returns a whole
                number, of which the bits are this rank's requests to all (a checkpoint is due, a signal has come).
                `int` returns 0: none.
        """
        self.enter_round(lambda lost: self.plan.round(self.round_index, lost))
        self.requests, self._request, self.left_out = 0, request, frozenset()
        exchanges = self.algorithm.exchanges()
        self._places = [n for n, each in enumerate(exchanges) if each.due is None or each.due(self.server)]
        return [exchanges[place] for place in self._places]

    def change_algorithm(self, algorithm):
        """Go on with other settings of the algorithm, also within a round; returns this round's exchanges, as above."""
        self.algorithm, exchanges = algorithm, algorithm.exchanges()
        due = [exchanges[place] for place in self._places]
        if self._moment is not None and self._moment.round_index == self.round_index:
            self._exchange = due[self._moment.number]
        return due

    def end_round(self, losses):
        """End a round with [(`Exchange`, its loss)], and return the round's loss: see `run_round`."""
        self.present = set(self.server.round.participants)
        self._observe(self, self.round_index, None, None)
        self.round_index += 1
        # The loss of the local steps, if the algorithm has any with a loss, otherwise that of other work.
        ordered = sorted(losses, key=lambda pair: pair[0].work is not None)
        return next((loss for _, loss in ordered if not math.isnan(loss)), math.nan)

    def run_exchange(self, exchange, number):
        """Exchange number `number` of a round, from 0; returns and raises what `end_exchange` does. Collective."""
        for client in self.begin_exchange(exchange, number):
            self.work(client)
        return self.end_exchange()

    def begin_exchange(self, exchange, number):
        """Begin one exchange of a round; returns the `Client`s of this rank that take part."""
        self._began = time.perf_counter()
        current, store = self.server.round, self.store
        weights = self.plan.weights_in(current, exchange.alone)
        self.link.enter(f"the local steps of {current}")
        if number == 0 and store.kept_start and not self._is_start_kept:
            self.keep_start()
        self._is_start_kept = False
        store.begin_exchange(exchange.rows, number == 0)
        self._exchange, self._serial = exchange, self._serial + 1
        self._moment = Moment(current.index, number, exchange.rows, store.region, self._serial, self.plan.seed)
        self._give_start()
        try:
            self.aggregation.begin(self._moment, weights)
        except UserError as error:  # on every rank
            raise agreed_error(self.link, f"{current}: {error}" if self.link.rank == 0 else None) from None
        self._losses = Losses(store.block.device.type != "cpu", weights if self.plan.weights else None)
        return [client for client in self.clients if client.index in weights]

    def work(self, client):
        """The turn of a client that takes part: its local steps, or the other work of the exchange."""
        with named_in_errors(client):
            self.begin_turn(client)
            if self._exchange.work is not None:
                self._exchange.work(client, self.server_seen_by_clients, client.oracle)
            else:
                for step in range(client.num_steps):
                    self.local_step(client, step)
            self.end_turn(client)

    def begin_turn(self, client, first_step=0):
        """Give a client its rows, and begin its local steps if the exchange is about these.

        Args:
            first_step: number of the local step to begin with, to go on in the middle of a round. All rows, also the
                scratch rows, and `before_turn` must be as they were then; only with one client on the rank.
        """
        self.store.begin_turn(self.clients.index(client))
        self.private.give_back(client)
        if self.leaves_out and first_step == 0:
            self.before_turn = copied(client.state())
        if self._exchange.work is None:
            client.num_steps = self.plan.steps_of(client.index, client.round_index)
            client.oracle.expect(client.num_steps - first_step)
            if first_step == 0:
                self.algorithm.download(client, self.server_seen_by_clients)

    def local_step(self, client, step):
        """One local step of the client whose turn it is."""
        client.step_index = step
        self.algorithm.local_step(client, self.server_seen_by_clients, client.oracle)
        self._observe(self, self.round_index, step, client)

    def shorten(self, client, num_steps):
        """Let a round have fewer local steps; the same must be done for all clients."""
        client.num_steps = num_steps
        self.show_round(self.server.round.shortened(num_steps))

    def end_turn(self, client):
        """Complete what a client sends, let it pass the stages, tell the algorithm, and give it to the aggregation."""
        self._losses.add(client)
        if self.averages_local_steps:
            try:
                client.oracle.adopt()
            except UserError as error:
                self.reports.announce(FAILED, self.round_index, error)
            self.algorithm.upload(client, self.server_seen_by_clients, client.oracle)
            self._losses.add_if_none(client)  # other passes than those of the local steps
        self.private.take(client)
        counts = self._passage.go(client, self._moment, self.aggregation.weights[client.index], self._losses)
        if counts:
            self._tell_sent(client)
        else:
            client.undo(self.before_turn)
        self.store.end_turn(self.clients.index(client), client.index, is_left_out=not counts)

    def _tell_sent(self, client):
        """Let the algorithm take note of what a client sends, with the private coordinates, which it does not send."""
        self.private.give_back(client)
        self.algorithm.sent(client, self.server_seen_by_clients)
        self.private.take(client)

    def end_exchange(self):
        """Average what the participants of all ranks have sent; returns the mean loss. Collective on the link.

        Raises:
            Diverged: on every rank, if a client's loss, or a row that it sends, is not finite.
            RanksLost: on all ranks that are left, if others were lost since the round began.
        """
        self._losses.collect()
        began, gradients = time.perf_counter(), sum(client.num_gradients for client in self.clients)
        self.seconds["local"] += began - self._began
        report = self.reports.exchange(self._losses, gradients - self.num_reported, self._request(), self.round_index)
        self.num_reported = gradients
        self._check_lost()
        self.num_gradients += report.num_gradients
        self.requests |= report.requests
        stages = [stage.called for stage in self.stages.values()]
        report.check_finite(self.server.round_index, self._exchange.rows, self.store.sent.parts, stages)
        self._send_buffers(report.flags)
        if report.num_left_out:
            self._go_on_without()
        self.link.enter(f"the sum of {self.server.round}")
        self.store.average()
        self._check_lost()
        self._check_average()
        self.seconds["communication"] += time.perf_counter() - began
        self.use_averages(self._exchange.then, self.aggregation.weights)
        return report.mean

    def _go_on_without(self):
        """Average without the clients that are left out. Collective on the link.

        Raises:
            Diverged: on every rank, if none is left. UserError: on every rank, if too few are left.
        """
        out = frozenset(map(int, self.link.allgatherv(self._losses.left_out)))
        self.left_out, self.num_left_out = self.left_out | out, self.num_left_out + len(out)
        when, who = when_in(self.server.round_index), describe_clients(out)
        if not set(self.aggregation.weights) - out:
            raise Diverged(f"{when}: {who}, all that take part, have a loss or rows that are not finite")
        if self.link.rank == 0:
            log.warning(f"{when}: {who} left out: a loss or values of a row are not finite")
        try:
            self.aggregation.leave_out(out)
        except UserError as error:  # on every rank
            raise agreed_error(self.link, f"{when}: {error}" if self.link.rank == 0 else None) from None
        current, absent = self.server.round, self.lost | self.left_out
        fewer = self.plan.start(absent) if current.index < 0 else self.plan.round(current.index, absent)
        is_shortened = current.nominal_steps < fewer.nominal_steps
        self.show_round(fewer.shortened(current.nominal_steps) if is_shortened else fewer)

    def _send_buffers(self, flags):
        """From now on, send the buffers that a client of any rank has changed, too.

        Raises:
            UserError: on every rank, if one of them is summed apart from the rows, which its part must see.
        """
        self.store.send(flags)
        is_seen = self.aggregation.is_mean and self.aggregation.exposes_rows
        parts = [*self.stages.values(), *([] if is_seen else [self.aggregation])]
        if parts and (names := self.store.sent.wide_names()):
            raise UserError(
                f"buffer '{names[0]}' has float64 values, or very large ones, in a model of another type, and changes: "
                f"{command_name(type(parts[0]))} would not see it; expected a buffer of the model's type"
            )
        if any(flags):
            self._give_start()  # the buffers have other places

    def keep_start(self):
        """What the server has now is what the next round begins with; for loops that work in its rows before it does.

        Only if the aggregation or a stage needs it.
        """
        if self.store.kept_start:
            self.store.keep_start()
            self.private.clear(*self.store.kept_start)
            self._is_start_kept = True

    def restore_start(self, rows, buffers):
        """The same, with copies of what `RowStore.kept_start` gave."""
        own_rows, own_buffers = self.store.kept_start
        for name, row in rows.items():
            own_rows[name].copy_(row)
        own_buffers.copy_(buffers)
        self._is_start_kept = True

    def _give_start(self):
        """Give the aggregation what the round began with, if it needs that."""
        if self.aggregation.needs_start or self.aggregation.codec:
            zeros = {name for name, kind in self.algorithm.kinds.items() if kind == "difference"}
            self.aggregation.start = self.store.start_block(zeros)[self._moment.region]

    @property
    def averages_local_steps(self):
        """Whether the current exchange is the one after the local steps."""
        return self._exchange.work is None

    def facts(self):
        """What the parts say about themselves: name, like "aggregation_epsilon" -> number."""
        found = {
            f"{name.removeprefix('stages/')}_{key}": float(value)
            for name, part in self.named.items()
            for key, value in part.facts().items()
        }
        return found | ({"times_left_out": float(self.num_left_out)} if self.leaves_out else {})

    def use_averages(self, then, participants):
        """Do what follows an average, `then(server)` or nothing, also for the private parts of participants."""
        if then is not None:
            then(self.server)
        self.private.compute(then, [client for client in self.clients if client.index in participants])

    def _check_lost(self):
        if self.link.lost_clients() != self.lost:
            raise RanksLost

    def _check_average(self):
        """Check an aggregation that may make values infinite or nan, or other ones on each rank. Collective.

        Raises:
            Diverged: on every rank, with the row. UserError: on every rank, if their values differ.
        """
        if self.aggregation.keeps_finite or not self._exchange.rows:
            return
        rows, when = self.store.averaged_rows(), when_in(self.server.round_index)
        rows = {name: rows[name] for name in self._exchange.rows}
        bad = [name for name, row in rows.items() if not _is_finite(row)]
        of_ranks = self.link.allgather([bool(bad), *map(_digest, rows.values())])
        if of_ranks[:, 0].any():
            row = bad[0] if bad else "of another rank"
            raise Diverged(f"{when}: {self.aggregation.called} made values of row {row} that are not finite")
        if different := [name for name, column in zip(rows, of_ranks.T[1:]) if len(set(column)) > 1]:
            problem = f"{when}: {self.aggregation.called} gave ranks different values of row {different[0]}"
            expected = "expected that average(out) fills `out` with the same bits on every rank"
            raise agreed_error(self.link, f"{problem}: {expected}" if self.link.rank == 0 else None)

    def select(self, value=math.nan):
        """Remember the current averaged model as the candidate for the result, with its value (larger is better)."""
        self.selected = Iterate(self.round_index, self.server.x.clone(), self.store.buffers.clone(), value)

    def state(self, begun=None):
        """Everything that this rank needs to go on after a round, see `state_of`."""
        return state_of(self, begun)

    def restore(self, state):
        """Go on where another federation with the same settings returned its `state`, see `restore_state`.

        It is called instead of `start`, with the state of this rank's clients.
        """
        restore_state(self, state)
        self.num_reported = sum(client.num_gradients for client in self.clients)

    def enter_round(self, plan):
        """Begin a `Round`, `plan(clients that are lost)`: for the server and for every client."""
        self.lost = self.link.lost_clients()
        self.show_round(plan(self.lost))
        for client in self.clients:
            client.step_index, client.was_absent = -1, client.index not in self.present

    def show_round(self, current):
        """Let the server and all clients be in a `Round`."""
        for holder in (self.server, self.server_seen_by_clients, *self.clients):
            holder.round = current


def _is_finite(row):
    """Whether all values are finite; one pass over the memory, for finite values may have an infinite sum."""
    return bool(row.sum().isfinite()) or bool(row.isfinite().all())


def _digest(row):
    """A number below 2^32 that is the same for the same bits, and most likely another one for others."""
    words = row.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[row.element_size()])
    if row.device.type != "cpu":
        return int(words.sum(dtype=torch.int64)) % 2**32
    array = words.numpy()  # whose sums of whole numbers take a third of the time
    return int(np.add.reduce(array, dtype=max(array.dtype, np.int32))) % 2**32
