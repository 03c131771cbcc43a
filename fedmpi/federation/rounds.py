"""The loop: rounds, local steps, one average after them; the only place where MPI and algorithms meet.

`Federation` runs the same for N ranks and for one process with all clients (`fedmpi.simulate`): the
link that it is given decides what "all" means.
"""

import math
import time

from fedmpi.algorithms.base import Exchange
from fedmpi.errors import Diverged, UserError
from fedmpi.federation.client import Client, Server
from fedmpi.federation.rows import RowStore, check_rows
from fedmpi.streams import generator


class Federation:
    """One rank's part of a federation: its clients, the replicated server, and the rounds.

    Collective: every rank of the link makes the same calls. Here one process has both clients:

    >>> import fedmpi, torch
    >>> from fedmpi.comm.link import SoloLink
    >>> from fedmpi.oracles import FunctionOracle
    >>> oracles = {i: lambda state, i=i: FunctionOracle(lambda client, x, sample: x - client, i) for i in range(2)}
    >>> fedavg, x0 = fedmpi.algorithms.FedAvg(step_size=0.5), torch.tensor([4.0])
    >>> federation = fedmpi.Federation(fedavg, SoloLink(), oracles, 2, x0, torch.empty(0), local_steps=1)
    >>> federation.start()
    >>> loss = federation.run_round()
    >>> federation.server.x
    tensor([2.2500])

    Args:
        algorithm: an `Algorithm`.
        link: sums over the ranks (`fedmpi.comm`).
        oracles: client number -> function(state) -> oracle, for this rank's clients in order.
        num_clients: N over all ranks.
        x0, buffers0: [dim] and [num_buffers] initial model, the same on every rank.
        local_steps: q, or `local_steps(client) -> int` where clients differ.
        participants: `participants(round_index) -> clients` of a round; None: all.
        chosen: `chosen(round_index) -> client` that works where only one does; None: drawn uniformly.
        weights: a number > 0 per client, its weight in every average; None: all alike.
        observe: called as `observe(federation, round_index, step, client)` after the start, after
            every local step of a client, and after every round's last average (step None).
        poison: see `RowStore`.
        seed: of the run; what ranks draw alike comes from it.
        segments: slices of the parameter tensors in x, for layer-wise methods; None: x is one layer.
        ascent: the slice of x in which a min-max problem ascends; None: a minimisation.

    Raises:
        UserError: if the algorithm's rows are not as they should be, or a client has no local step.
    """

    def __init__(
        self,
        algorithm,
        link,
        oracles,
        num_clients,
        x0,
        buffers0,
        local_steps,
        participants=None,
        chosen=None,
        weights=None,
        observe=None,
        poison=False,
        seed=0,
        segments=None,
        ascent=None,
    ):
        check_rows(algorithm)
        self.algorithm, self.link = algorithm, link
        self.store = RowStore(
            algorithm, x0.numel(), buffers0.numel(), len(oracles), x0.dtype, x0.device, poison, link.allocate
        )
        averaged, kept = self.store.averaged_rows(), self.store.server_rows()
        segments = segments or [slice(0, x0.numel())]
        self.server = Server({**averaged, **kept}, num_clients, segments, x0.numel(), ascent)
        self.server_seen_by_clients = Server(kept, num_clients, segments, x0.numel(), ascent)
        self.clients = [
            Client(index, self.store.client_rows(position), make(self.store))
            for position, (index, make) in enumerate(oracles.items())
        ]
        self.server.x.copy_(x0)
        self.store.buffers.copy_(buffers0)
        self._local_steps = local_steps if callable(local_steps) else lambda client: local_steps
        steps = [self._local_steps(client) for client in range(num_clients)]
        if min(steps) < 1:
            raise UserError(f"local_steps = {min(steps)}: expected at least 1 for every client")
        self._nominal_steps = max(steps)
        self._participants = participants or (lambda round_index: range(num_clients))
        self._chosen = chosen
        self._weights = weights or [1] * num_clients
        self._observe = observe or (lambda *args: None)
        self._seed = seed
        self._present = set(range(num_clients))  # who took part in the previous round
        self.round_index = 0
        self.num_gradients = 0  # evaluated so far by all clients together, on every rank alike
        self.seconds = {"local": 0.0, "communication": 0.0}

    def start(self):
        """Before round 0: the initial estimates, averaged if the algorithm exchanges any.

        The float buffers stay as they were: only some start exchanges would average them.
        """
        buffers = self.store.buffers.clone()
        exchange = Exchange(self.algorithm.exchanged_at_start, self.algorithm.start, self.algorithm.server_start)
        everybody = range(self.server.num_clients)
        if exchange.rows:
            self._exchange(exchange, everybody, first_in_round=True)
        else:
            for position, client in enumerate(self.clients):
                self.store.begin_turn(position, True, slice(0, 0))
                self.algorithm.start(client, self.server_seen_by_clients, client.oracle)
            self.algorithm.server_start(self.server)
        self.store.buffers.copy_(buffers)
        for position, client in enumerate(self.clients):
            self.store.begin_turn(position, True, slice(0, 0))
            self.algorithm.client_start(client, self.server_seen_by_clients)
        self._observe(self, -1, None, None)

    def run_round(self):
        """One round: local steps of the participants, then the averages.

        Returns:
            mean training loss of the round's local steps over all clients (nan where unknown).

        Raises:
            Diverged: on every rank alike, if a loss is not finite anywhere; before it is averaged.
            UserError: if the participants are not different clients.
        """
        participants = [int(c) for c in self._participants(self.round_index)]
        everybody = range(self.server.num_clients)
        if not participants or len({*participants}) < len(participants) or not {*participants} <= {*everybody}:
            raise UserError(
                f"participants of round {self.round_index} = {participants}: expected at least one of the clients "
                f"0 to {everybody[-1]}, and each of them once"
            )
        weight = sum(self._weights[c] for c in participants)
        for seen in (self.server, self.server_seen_by_clients):
            seen.round_index = self.round_index
            seen.iteration = (self.round_index + 1) * self._nominal_steps
            seen.num_participants = len(participants)
            seen.participation = weight / sum(self._weights)
            seen.num_steps = sum(self._weights[c] * self._local_steps(c) for c in participants) / weight
        for client in self.clients:
            client.round_index = self.round_index
            client.was_absent = client.index not in self._present
        due = [e for e in self.algorithm.exchanges() if e.due is None or e.due(self.server)]
        losses = [
            self._exchange(exchange, participants, first_in_round=number == 0) for number, exchange in enumerate(due)
        ]
        self._present = set(participants)
        self._observe(self, self.round_index, None, None)
        self.round_index += 1
        return next((loss for loss in losses if not math.isnan(loss)), math.nan)

    def _exchange(self, exchange, participants, first_in_round):
        """Let the workers work, then average their rows. Collective on the link."""
        begun = time.perf_counter()
        workers = list(participants)
        if exchange.alone:
            workers = [self._choose(workers)]
        region = self.store.region(exchange.rows)
        loss_sum, num_losses, worked, bad_client = 0.0, 0, 0, -1
        for position, client in enumerate(self.clients):
            if client.index not in workers:
                continue
            self.store.begin_turn(position, first_in_round, region)
            self._work(exchange, client)
            self.store.end_turn(position, region, self._weights[client.index], worked)
            client_sum, client_num = client.oracle.take_losses()
            loss_sum, num_losses, worked = loss_sum + client_sum, num_losses + client_num, worked + 1
            if not math.isfinite(client_sum) and bad_client < 0:
                bad_client = client.index
        worked_until = time.perf_counter()
        loss = self._agree_on_loss(loss_sum, num_losses, bad_client)
        summed = self.store.sum(region, worked)
        self.link.average(summed, sum(self._weights[client] for client in workers), out=self.store.block[region])
        self.seconds["local"] += worked_until - begun
        self.seconds["communication"] += time.perf_counter() - worked_until
        if exchange.then is not None:
            exchange.then(self.server)
        return loss

    def _choose(self, participants):
        """The one client that works in an exchange where only one does; every rank draws the same."""
        if self._chosen is not None:
            return int(self._chosen(self.round_index))
        return int(generator(self._seed, "alone", self.round_index).choice(participants))

    def _work(self, exchange, client):
        """One client's turn: its local steps, or what the exchange asks for instead."""
        try:
            self._turn(exchange, client)
        except BaseException as error:
            error.fedmpi_client = client.index  # for the message that ends the job
            raise

    def _turn(self, exchange, client):
        algorithm, server = self.algorithm, self.server_seen_by_clients
        if exchange.work is not None:
            exchange.work(client, server, client.oracle)
            return
        client.num_steps = self._local_steps(client.index)
        client.oracle.expect(client.num_steps)
        algorithm.download(client, server)
        for step in range(client.num_steps):
            client.step_index = step
            client.iteration = self.round_index * self._nominal_steps + step + 1
            algorithm.local_step(client, server, client.oracle)
            self._observe(self, self.round_index, step, client)
        algorithm.upload(client, server, client.oracle)

    def _agree_on_loss(self, loss_sum, num_losses, bad_client):
        """Mean loss over all clients; Diverged on every rank if one client's is not finite.

        The ranks also add up here how many gradients they have evaluated: it costs no message of its own.
        """
        gradients = sum(client.oracle.num_gradients for client in self.clients)
        everywhere = self.link.allgather([loss_sum, num_losses, bad_client, gradients]).tolist()
        totals, numbers, _, gradients = zip(*everywhere)
        self.num_gradients = int(sum(gradients))
        for rank, (total, _, client, _) in enumerate(everywhere):
            if client >= 0:
                moment = "in the initial gradients" if self.server.round_index < 0 else f"in round {self.round_index}"
                raise Diverged(
                    f"{moment}: the loss of client {int(client)} on rank {rank} is {total}; "
                    "try a smaller step size or more clipping"
                )
        return sum(totals) / sum(numbers) if any(numbers) else math.nan
