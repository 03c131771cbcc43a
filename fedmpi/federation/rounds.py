"""The loop: rounds, local steps, one average after them. Only this module uses both ranks and algorithms.

`Federation` runs the same on N ranks and in one process with all clients (`fedmpi.simulate`): that depends only on the
link over which it sums.
"""

import math
import time

from fedmpi.algorithms.base import Exchange
from fedmpi.comm.link import RanksLost
from fedmpi.errors import UserError
from fedmpi.federation.buffers import SentBuffers
from fedmpi.federation.client import Client, Server
from fedmpi.federation.losses import ENDED, FAILED, PAUSED, Losses, announce, exchange_reports
from fedmpi.federation.private import PrivateParts
from fedmpi.federation.rows import RowStore, check_rows
from fedmpi.federation.state import restore_state, state_of
from fedmpi.federation.sums import make_sums
from fedmpi.federation.variables import Iterate
from fedmpi.federation.work_clock import WorkClock
from fedmpi.oracles.flat_module import BufferPart


class Federation:
    """One rank's part of a federation: its clients, the replicated server, and the rounds.

    Collective: every rank of the link makes the same calls. Here one process has both clients:

    >>> import fedmpi, torch
    >>> from fedmpi.comm.link import SoloLink
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

    All state that outlasts a round is in its clients, its server and itself; `state` returns it, `restore` takes it.

    Args:
        algorithm: an `Algorithm`.
        link: a `fedmpi.comm.link.Link`: sums over the ranks.
        oracles: client number -> function(`Client`) -> oracle, for this rank's clients in order.
        plan: a `Plan`: which clients take part in a round, for how many steps, with which weight.
        variables: the `Variables`.
        uploads: `Upload` stages that a client's rows pass before they are summed, in order.
        observe: called as `observe(federation, round_index, step, client)` after the start, after
            every local step of a client, and after every round's last average (step None).
        poison: see `RowStore`.

    Attributes:
        store: the `RowStore`. server: the `Server`. clients: list of `Client`, those of this rank.
        private: the `PrivateParts`.
        round_index: of the next round, from 0.
        present: set of the clients that took part in the previous round; all of them before round 0.
        lost: frozenset of the clients whose ranks are lost; they are absent from every round.
        num_gradients: evaluated so far by all clients of all ranks.
        seconds: of this rank, in "local" steps and in "communication" (waiting included).
        worked: the `WorkClock`.
        selected: the `Iterate` that `select` remembered, or None.
        request: function without arguments, called whenever the ranks exchange their losses; it returns a whole number,
            of which the bits are this rank's requests to all (a checkpoint is due, a signal has come).
        requests: the requests of all ranks in the current round so far, or in the last one: the OR of their bits.

    Raises:
        UserError: if the algorithm names its rows in a wrong way, see `check_rows`.
    """

    def __init__(self, algorithm, link, oracles, plan, variables, uploads=(), observe=None, poison=False):
        check_rows(algorithm)
        self.algorithm, self.link, self.plan, self.uploads = algorithm, link, plan, tuple(uploads)
        x, buffers = variables.x, variables.buffers
        buffers = x.new_empty(0) if buffers is None else buffers
        whole = [BufferPart("the float buffers", 0, buffers.numel(), x.dtype)] if buffers.numel() else []
        parts = whole if variables.buffer_parts is None else variables.buffer_parts
        sent = SentBuffers(buffers.to(x), parts)
        # The most clients of a rank; 0 if only the sum of their losses is exchanged.
        self._most = 0 if link.reduction == "plain" else int(link.allgather([len(oracles)]).max())
        sums = make_sums(link, oracles)
        self.store = RowStore(algorithm, x.numel(), sent, len(oracles), x.dtype, x.device, poison, sums)
        averaged, own = self.store.averaged_rows(), self.store.server_rows()
        segments = variables.segments or [slice(0, x.numel())]
        self.server = Server({**averaged, **own}, plan.num_clients, segments, x.numel(), variables.ascent)
        self.server_seen_by_clients = Server(own, plan.num_clients, segments, x.numel(), variables.ascent)
        self.clients = [self._make_client(position, *item) for position, item in enumerate(oracles.items())]
        self.server.x.copy_(x)
        self.private = PrivateParts(self.store, variables, self.clients)
        if any(upload.needs_start for upload in self.uploads):
            self.store.keep_start()
        self._observe = observe or (lambda *args: None)
        self.lost = frozenset()
        self._reported = 0  # gradients of this rank that are in `num_gradients` already
        self.present = set(range(plan.num_clients))
        self.round_index = 0
        self.num_gradients = 0
        self.seconds, self.worked = {"local": 0.0, "communication": 0.0}, WorkClock()
        self.selected = None
        self.request, self.requests = lambda: 0, 0

    def _make_client(self, position, index, make_oracle):
        rows, buffers = self.store.client_rows(position), self.store.work_buffers
        client = Client(index, rows, self.algorithm.client_rows, buffers)
        for upload in self.uploads:
            for name in upload.kept_rows:
                client.kept[f"{type(upload).__name__}.{name}"] = self.store.new_rows()
        client.oracle = make_oracle(client)
        return client

    def start(self):
        """Before round 0: the initial estimates, averaged if the algorithm exchanges any.

        The float buffers stay as they were: only some start exchanges would average them.
        """
        buffers = self.store.buffers.clone()
        exchange = Exchange(self.algorithm.exchanged_at_start, self.algorithm.start, self.algorithm.server_start)
        self._set_round(self.plan.start(self.lost))
        if exchange.rows:
            _finish(self._exchange(exchange, first_in_round=True))
        else:
            self.store.begin_exchange((), first_in_round=True)
            for position, client in enumerate(self.clients):
                self.store.begin_turn(position)
                self.private.give_back(client)
                self.algorithm.start(client, self.server_seen_by_clients, client.oracle)
                self.private.take(client)
            self._use_averages(self.algorithm.server_start, self.clients)
        self.store.buffers.copy_(buffers)
        self.store.begin_exchange((), first_in_round=True)
        for position, client in enumerate(self.clients):
            self.store.begin_turn(position)
            self.private.give_back(client)
            self.algorithm.client_start(client, self.server_seen_by_clients)
            self.private.take(client)
        self._observe(self, -1, None, None)

    def run_round(self):
        """One round: local steps of the participants, then the averages.

        Returns:
            mean training loss of the round's local steps over all clients (nan if unknown); of an algorithm
            without local steps, that of what its clients do instead.

        Raises:
            Diverged: on every rank, if a loss is not finite anywhere; before it is averaged.
            UserError: if the participants are not different clients.
        """
        return _finish(self.steps())

    def steps(self, first_step=0):
        """`run_round` as a generator, which stops before each local step of each client.

        It yields the client whose local step comes next, and returns what `run_round` returns. ``send(True)`` in place
        of ``next`` ends the client's local steps before that one; the same must be done for all clients.

        Args:
            first_step: number of the local step to begin with, to go on in the middle of a round. All rows, also the
                scratch rows, must be as they were then; only with one client on the rank.
        """
        self._set_round(self.plan.round(self.round_index, self.lost))
        self.requests = 0
        due = [e for e in self.algorithm.exchanges() if e.due is None or e.due(self.server)]
        losses = [math.nan] * len(due)
        for number, exchange in enumerate(due):
            if exchange.work is None or not first_step:
                losses[number] = yield from self._exchange(exchange, number == 0, first_step)
                first_step = 0  # later exchanges of the round start at their beginning
        self.present = set(self.server.round.participants)
        self._observe(self, self.round_index, None, None)
        self.round_index += 1
        # The loss of the local steps, if the algorithm has any with a loss, otherwise that of other work.
        of_local_steps = [loss for exchange, loss in zip(due, losses) if exchange.work is None]
        return next((loss for loss in (*of_local_steps, *losses) if not math.isnan(loss)), math.nan)

    def end(self):
        """Check that all ranks end after the same round. Collective on the link.

        Raises:
            UserError: on every rank, if another one begins to average while this one ends, or the other way round.
        """
        announce(ENDED, self.link, self._most, self.round_index, self.store.sent.flags())

    def pause(self):
        """Check that all ranks exchange something else than rounds now. Collective on the link.

        Raises:
            UserError: on every rank, if another one ends or begins to average.
        """
        announce(PAUSED, self.link, self._most, self.round_index, self.store.sent.flags())

    def refuse(self, error):
        """End the job on all ranks with a `UserError` that this rank has met before an exchange.

        Raises:
            AgreedUserError: with its text on the lowest rank that has one.
        """
        announce(FAILED, self.link, self._most, self.round_index, self.store.sent.flags(), error)

    def select(self, value=math.nan):
        """Remember the current averaged model as the candidate for the result.

        Args:
            value: by which it was selected, larger is better.
        """
        self.selected = Iterate(self.round_index, self.server.x.clone(), self.store.buffers.clone(), value)

    def state(self):
        """Everything that this rank needs to go on after a round, see `fedmpi.federation.state.state_of`."""
        return state_of(self)

    def restore(self, state):
        """Go on where another federation with the same settings returned its `state`; call it instead of `start`.

        Args:
            state: what `state` returned, with the clients of this rank; tensors are copied. A client without a state
                begins like one that was absent in all rounds so far.

        Raises:
            KeyError: if something is missing.
        """
        for client in restore_state(self, state):
            self._begin_anew(client)
        self._reported = sum(client.num_gradients for client in self.clients)

    def _begin_anew(self, client):
        """Give a client whose state is lost that of one that was absent in all rounds so far."""
        self.store.begin_exchange((), first_in_round=True)
        self.store.begin_turn(self.clients.index(client))
        self._show_round(self.plan.start())
        self.algorithm.client_start(client, self.server_seen_by_clients)

    def _set_round(self, current):
        """Begin a `Round`: for the server and for every client."""
        self._show_round(current)
        for client in self.clients:
            client.step_index = -1
            client.was_absent = client.index not in self.present

    def _show_round(self, current):
        for holder in (self.server, self.server_seen_by_clients, *self.clients):
            holder.round = current

    def _exchange(self, exchange, first_in_round, first_step=0):
        """Let the participants work, then average their rows; see `steps`. Collective on the link.

        If all participants are lost meanwhile, the remaining clients take part instead, as in a round that was planned
        without the lost ones.
        """
        weights = {}
        while not weights:
            self._drop_lost()
            loss, weights = yield from self._work_and_average(exchange, first_in_round, first_step)
            if not weights:
                self.store.undo()
            if exchange.alone:
                break
        if weights:
            self._use_averages(exchange.then, [client for client in self.clients if client.index in weights])
        return loss

    def _work_and_average(self, exchange, first_in_round, first_step):
        """The participants' turns and their average; returns what `_average` returns."""
        self.worked.begin()
        current, store = self.server.round, self.store
        weights = dict(zip(current.participants, current.weights))
        if exchange.alone:
            drawn = self.plan.draw_one(current)
            weights = {drawn: self.plan.weight_of(drawn)}
        where = "the start" if current.index < 0 else f"round {current.index + 1}"
        self.link.phase = f"the local steps of {where}"
        store.begin_exchange(exchange.rows, first_in_round, weights)
        losses = Losses(on_gpu=store.block.device.type != "cpu")
        turns = [(position, client) for position, client in enumerate(self.clients) if client.index in weights]
        for position, client in turns:
            store.begin_turn(position)
            self.private.give_back(client)
            yield from self._work(exchange, client, first_step)
            self.private.take(client)
            for upload in self.uploads:
                self._apply(upload, exchange, client)
            buffers = store.checked_buffers()
            losses.check_rows(client, store.turn(), exchange.rows, buffers)
            store.end_turn(position, weights[client.index])
            losses.add(client)
        losses.collect()
        self.seconds["local"] += self.worked.end()
        worked_until = time.perf_counter()
        loss, weights = self._average(exchange, losses, weights, where)
        self.seconds["communication"] += time.perf_counter() - worked_until
        return loss, weights

    def _average(self, exchange, losses, weights, where):
        """Average the participants' rows; if ranks are lost meanwhile, do it again without their clients.

        Args:
            losses: `Losses` of this rank. weights: client -> weight, of all participants. where: the round as text.

        Returns:
            (mean loss, the weights of those whose rows were averaged).
        """
        while True:
            try:
                loss = self._agree_on_loss(losses, exchange.rows)
                if self._drop_lost():
                    weights = {client: weight for client, weight in weights.items() if client not in self.lost}
                self.link.phase = f"the sum of {where}"
                if weights:
                    self.store.average(sum(weights.values()), weights)
                return loss, weights
            except RanksLost:
                continue

    def _drop_lost(self):
        """Count the clients of lost ranks as absent from this round on; returns whether there are new ones."""
        lost = self.link.lost_clients()
        if lost == self.lost:
            return False
        self.lost, current = lost, self.server.round
        self._show_round(self.plan.start(lost) if current.index < 0 else self.plan.round(current.index, lost))
        return True

    def _use_averages(self, then, clients):
        """Do what follows an average (`then(server)` or None), for the server and for its clients' private parts."""
        if then is not None:
            then(self.server)
        for client in clients:
            self.private.compute(then, client)
        self.private.clean()

    def _apply(self, upload, exchange, client):
        """One upload stage on the rows that a client sends."""
        start = self.store.start_rows() if upload.needs_start else None
        upload.apply(
            client,
            {name: client.rows[name] for name in exchange.rows},
            start and {name: start[name] for name in exchange.rows},
            {name: client.kept[f"{type(upload).__name__}.{name}"] for name in upload.kept_rows},
        )

    def _work(self, exchange, client, first_step):
        """One client's turn: its local steps, or what the exchange asks for instead; see `steps`."""
        try:
            if exchange.work is not None:
                exchange.work(client, self.server_seen_by_clients, client.oracle)
            else:
                yield from self._local_steps(client, first_step)
        except BaseException as error:
            error.fedmpi_client = client.index  # for the message that ends the job
            raise

    def _local_steps(self, client, first_step):
        algorithm, server = self.algorithm, self.server_seen_by_clients
        client.num_steps = self.plan.steps_of(client.index, client.round_index)
        client.oracle.expect(client.num_steps - first_step)
        if first_step == 0:
            algorithm.download(client, server)
        for step in range(first_step, client.num_steps):
            if (yield client):
                client.num_steps = step
                self._show_round(self.server.round.shortened(step))
                break
            client.step_index = step
            algorithm.local_step(client, server, client.oracle)
            self._observe(self, self.round_index, step, client)
        try:
            client.oracle.adopt()
        except UserError as error:
            self.refuse(error)
        algorithm.upload(client, server, client.oracle)

    def _agree_on_loss(self, losses, names):
        """Mean loss over all clients; Diverged on every rank if one client's, or a row that it sends, is not finite.

        In the same message the ranks add up how many gradients they have evaluated, and exchange their requests.
        """
        gradients = sum(client.num_gradients for client in self.clients)
        report = exchange_reports(
            self.link,
            losses,
            gradients - self._reported,
            self.request(),
            self._most,
            self.round_index,
            self.store.sent.flags(),
        )
        self._reported = gradients
        self.num_gradients += report.num_gradients
        self.requests |= report.requests
        report.check_finite(self.server.round_index, names, self.store.sent.parts)
        self.store.send(report.flags)
        return report.mean


def _finish(generator):
    """Run a generator to its end and return its value."""
    while True:
        try:
            next(generator)
        except StopIteration as end:
            return end.value
