"""The loop: rounds of exchanges, each the work of some clients and the average after it.

`Federation` runs the same on N ranks and in one process with all clients (`fedmpi.simulate`): that depends only on the
link over which it sums.
"""

import math
import time

from fedmpi.aggregation.base import Layout, Moment
from fedmpi.aggregation.sending import Sending
from fedmpi.aggregation.stages.base import Sent
from fedmpi.algorithms.base import Exchange
from fedmpi.errors import UserError
from fedmpi.federation.buffers import SentBuffers
from fedmpi.federation.client import Client, Server, named_in_errors
from fedmpi.federation.losses import ENDED, FAILED, PAUSED, Losses, announce, exchange_reports
from fedmpi.federation.private import PrivateParts
from fedmpi.federation.rows import RowStore, check_rows
from fedmpi.federation.state import restore_state, state_of
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

    A round is `begin_round`; for each exchange `begin_exchange`, the turns of this rank's participants, and
    `end_exchange`; then `end_round`. `run_round` does all of it. A loop that makes the local steps itself calls
    `begin_turn`, `local_step` and `end_turn` (`fedmpi.own_loop`).

    All state that outlasts a round is in its clients, its server, its aggregation and stages, and itself; `state`
    returns it, `restore` takes it.

    Args:
        algorithm: an `Algorithm`.
        link: a `fedmpi.comm.link.Link`: sums over the ranks.
        oracles: client number -> function(`Client`) -> oracle, for this rank's clients in order.
        plan: a `Plan`: which clients take part in a round, for how many steps, with which weight.
        variables: the `Variables`.
        sending: a `Sending`: what becomes of the clients' rows.
        observe: called as `observe(federation, round_index, step, client)` after the start, after
            every local step of a client, and after every round's last average (step None).
        poison: see `RowStore`.

    Attributes:
        aggregation: the `Aggregation`; stages: name -> `Stage`; both open.
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

    def __init__(self, algorithm, link, oracles, plan, variables, sending=None, observe=None, poison=False):
        check_rows(algorithm)
        sending = sending or Sending()
        self.algorithm, self.link, self.plan = algorithm, link, plan
        x, buffers = variables.x, variables.buffers
        buffers = x.new_empty(0) if buffers is None else buffers
        whole = [BufferPart("the float buffers", 0, buffers.numel(), x.dtype)] if buffers.numel() else []
        parts = whole if variables.buffer_parts is None else variables.buffer_parts
        sent = SentBuffers(buffers.to(x), parts, in_order=not sending.aggregation.leaves_out_constants)
        segments = variables.segments or [slice(0, x.numel())]
        numel = len(algorithm.exchanged) * x.numel() + sent.sizes[0]
        parameters = (tuple(segments), tuple(variables.names), tuple(variables.shapes))
        layout = Layout(algorithm.exchanged, x.numel(), numel, x.dtype, x.device, *parameters)
        self.aggregation, self.stages = sending.opened(link, layout, oracles)
        # The most clients of a rank; 0 if only the sum of their losses is exchanged.
        self._most = int(link.allgather([len(oracles)]).max()) if self.aggregation.is_reproducible else 0
        self.store = RowStore(
            algorithm, x.numel(), sent, len(oracles), x.dtype, x.device, poison=poison, aggregation=self.aggregation
        )
        averaged, own = self.store.averaged_rows(), self.store.server_rows()
        self.server = Server({**averaged, **own}, plan.num_clients, segments, x.numel(), variables.ascent)
        self.server_seen_by_clients = Server(own, plan.num_clients, segments, x.numel(), variables.ascent)
        self.clients = [self._make_client(position, *item) for position, item in enumerate(oracles.items())]
        self.server.x.copy_(x)
        self.private = PrivateParts(self.store, variables, self.clients)
        if any(stage.needs_start for stage in self.stages.values()):
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
        self._exchange, self._moment, self._losses = None, None, None  # of the current exchange

    def _make_client(self, position, index, make_oracle):
        rows, buffers = self.store.client_rows(position), self.store.work_buffers
        client = Client(index, rows, self.algorithm.client_rows, buffers)
        for stage, one in self.stages.items():
            client.kept |= {f"{stage}.{name}": self.store.new_rows() for name in one.kept_rows}
        client.oracle = make_oracle(client)
        return client

    def start(self):
        """Before round 0: the initial estimates, averaged if the algorithm exchanges any.

        The float buffers stay as they were: only some start exchanges would average them.
        """
        buffers, algorithm = self.store.buffers.clone(), self.algorithm
        self._set_round(self.plan.start(self.lost))
        if algorithm.exchanged_at_start:
            self.run_exchange(Exchange(algorithm.exchanged_at_start, algorithm.start, algorithm.server_start), 0)
        else:
            self._every_client(lambda client, server: algorithm.start(client, server, client.oracle))
            self._use_averages(algorithm.server_start, self.clients)
        self.store.buffers.copy_(buffers)
        self._every_client(algorithm.client_start)
        self._observe(self, -1, None, None)

    def _every_client(self, action):
        """Do something in the turn of every client of this rank; nothing is averaged."""
        self.store.begin_exchange((), first_in_round=True)
        for position, client in enumerate(self.clients):
            self.store.begin_turn(position)
            self.private.give_back(client)
            action(client, self.server_seen_by_clients)
            self.private.take(client)

    def run_round(self):
        """One round: local steps of the participants, then the averages.

        Returns:
            mean training loss of the round's local steps over all clients (nan if unknown); of an algorithm
            without local steps, that of what its clients do instead.

        Raises:
            Diverged: on every rank, if a loss is not finite anywhere; before it is averaged.
            UserError: if the participants are not different clients.
        """
        losses = []
        for number, exchange in enumerate(self.begin_round()):
            losses.append((exchange, self.run_exchange(exchange, number)))
        return self.end_round(losses)

    def begin_round(self):
        """Begin the next round; returns its `Exchange`s, in order."""
        self._set_round(self.plan.round(self.round_index, self.lost))
        self.requests = 0
        return [one for one in self.algorithm.exchanges() if one.due is None or one.due(self.server)]

    def end_round(self, losses):
        """End a round after its exchanges.

        Args:
            losses: list of (`Exchange`, what `end_exchange` returned).

        Returns:
            see `run_round`.
        """
        self.present = set(self.server.round.participants)
        self._observe(self, self.round_index, None, None)
        self.round_index += 1
        # The loss of the local steps, if the algorithm has any with a loss, otherwise that of other work.
        ordered = sorted(losses, key=lambda pair: pair[0].work is not None)
        return next((loss for _, loss in ordered if not math.isnan(loss)), math.nan)

    def run_exchange(self, exchange, number):
        """One exchange of a round: the work of this rank's participants, and the average. Collective on the link.

        If all participants are lost meanwhile, the remaining clients take part instead, as in a round that was planned
        without the lost ones.

        Args:
            exchange: an `Exchange`. number: its number in the round.

        Returns:
            mean loss over all clients.
        """
        while True:
            for client in self.begin_exchange(exchange, number):
                with named_in_errors(client):
                    self.begin_turn(client)
                    if exchange.work is not None:
                        exchange.work(client, self.server_seen_by_clients, client.oracle)
                    else:
                        for step in range(client.num_steps):
                            self.local_step(client, step)
                    self.end_turn(client)
            loss, is_done = self.end_exchange()
            if is_done:
                return loss

    def begin_exchange(self, exchange, number):
        """Begin one exchange of a round.

        Returns:
            list of the `Client`s of this rank that take part.
        """
        self._drop_lost()
        self.worked.begin()
        current, store = self.server.round, self.store
        weights = dict(zip(current.participants, current.weights))
        if exchange.alone:
            drawn = self.plan.draw_one(current)
            weights = {drawn: self.plan.weight_of(drawn)}
        self.link.phase = f"the local steps of {self._where()}"
        store.begin_exchange(exchange.rows, number == 0)
        self._exchange, self._moment = exchange, Moment(current.index, number, exchange.rows, store.region)
        self.aggregation.begin(self._moment, weights)
        self._losses = Losses(on_gpu=store.block.device.type != "cpu")
        return [client for client in self.clients if client.index in weights]

    def begin_turn(self, client, first_step=0):
        """Give a client its rows, and begin its local steps if the exchange is about these.

        Args:
            first_step: number of the local step to begin with, to go on in the middle of a round. All rows, also the
                scratch rows, must be as they were then; only with one client on the rank.
        """
        self.store.begin_turn(self.clients.index(client))
        self.private.give_back(client)
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
        self._show_round(self.server.round.shortened(num_steps))

    def end_turn(self, client):
        """Complete what a client sends, let it pass the stages, and give it to the aggregation."""
        exchange, store = self._exchange, self.store
        self._losses.add(client)
        if exchange.work is None:
            try:
                client.oracle.adopt()
            except UserError as error:
                self.refuse(error)
            self.algorithm.upload(client, self.server_seen_by_clients, client.oracle)
            self._losses.add_if_none(client)  # other passes than those of the local steps
        self.private.take(client)
        buffers = store.checked_buffers()
        self._losses.check_rows(client, store.turn(), exchange.rows, buffers)
        for name, stage in self.stages.items():
            self._apply(name, stage, client)
        store.end_turn(self.clients.index(client), client.index)

    def _apply(self, name, stage, client):
        """One stage on the rows that a client sends."""
        rows, start = self._exchange.rows, self.store.start_rows() if stage.needs_start else None
        stage.apply(
            Sent(
                client.index,
                self.aggregation.weights[client.index],
                self._moment,
                {row: client.rows[row] for row in rows},
                start and {row: start[row] for row in rows},
                {kept: client.kept[f"{name}.{kept}"] for kept in stage.kept_rows},
            )
        )

    def end_exchange(self):
        """Average what the participants of all ranks have sent. Collective on the link.

        Returns:
            (mean loss over all clients, whether there is an average; there is none if all participants are lost).
        """
        self._losses.collect()
        self.seconds["local"] += self.worked.end()
        began = time.perf_counter()
        exchange, loss, lost = self._exchange, self._agree_on_loss(), None
        self.link.phase = f"the sum of {self._where()}"
        averaged = self.store.average()
        while lost != self.lost:  # the mean loss is that of the clients that are left
            lost = self.lost
            if self._drop_lost():
                loss = self._agree_on_loss()
        self.seconds["communication"] += time.perf_counter() - began
        if averaged:
            self._use_averages(exchange.then, [client for client in self.clients if client.index in averaged])
        return loss, bool(averaged) or exchange.alone

    def _where(self):
        index = self.server.round.index
        return "the start" if index < 0 else f"round {index + 1}"

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

    def _agree_on_loss(self):
        """Mean loss over all clients; Diverged on every rank if one client's, or a row that it sends, is not finite.

        In the same message the ranks add up how many gradients they have evaluated, and exchange their requests.
        """
        gradients = sum(client.num_gradients for client in self.clients)
        report = exchange_reports(
            self.link,
            self._losses,
            gradients - self._reported,
            self.request(),
            self._most,
            self.round_index,
            self.store.sent.flags(),
        )
        self._reported = gradients
        self.num_gradients += report.num_gradients
        self.requests |= report.requests
        report.check_finite(self.server.round_index, self._exchange.rows, self.store.sent.parts)
        self.store.send(report.flags)
        return report.mean

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
