"""An algorithm on its own: all clients in one process, on functions instead of models and data."""

import functools

import numpy as np
import torch

from fedmpi.algorithms.base import Algorithm
from fedmpi.comm.link import SoloLink
from fedmpi.errors import UserError
from fedmpi.federation.rounds import Federation
from fedmpi.oracles import FunctionOracle, LossFunctionOracle


def simulate(
    algorithm,
    gradient=None,
    x0=None,
    num_clients=3,
    rounds=4,
    local_steps=2,
    participants=None,
    dtype=torch.float64,
    *,
    chosen=None,
    segments=None,
    ascent=None,
    ascent_scale=1.0,
    loss=None,
    directions=None,
    smoothing=1e-3,
):
    """Run an algorithm on given gradients, or on given losses, and return everything it did.

    The loop is the one of the real run (`fedmpi.federation`); only the oracle and the link differ.

    Args:
        algorithm: an `Algorithm`, for example ``FAFED(step_size=0.1)``.
        gradient: `gradient(client, x, sample) -> [dim]`, x a [dim] tensor, sample the number of the
            client's earlier draws; the initial batch, and all data where a method asks for its
            gradient (MimeAdam), are sample -1. A method that compares two
            gradients calls it twice with the same sample.
        x0: [dim] the common starting point: a tensor, an array or a list.
        num_clients: N. rounds: number of rounds. local_steps: q, or `local_steps(client) -> int`.
        participants: `participants(round_index) -> clients` that take part; None: all.
        dtype: of every row.
        chosen: `chosen(round_index) -> client` that works alone in methods that draw one (CE-LSGD);
            None: drawn uniformly from the round's participants.
        segments: slices of x that layer-wise methods (Fed-LAMB) scale one by one; None: one layer.
        ascent: the slice of x in which a min-max problem ascends, ``slice(d1, None)`` for
            x = (θ, w) with θ of length d1; `gradient` returns the plain gradient of F. None: a
            minimisation. ascent_scale: factor of that block's gradient. Momenta and control variates
            in the trace have the sign of (∇_θ, -∇_w).
        loss, directions: instead of `gradient`, `loss(client, x, sample) -> number` and
            `directions(client, sample) -> [b2, dim]`, used as they are: gradients are then two-point
            estimates with the radius `smoothing` (μ). Both points of a pair use the same directions.

    Returns:
        list of records (dicts): one after the start (round -1), one after every local step, one
        after every round's communication (where it averages twice, after the second time). `round`
        counts from 0; `step` counts the round's local steps from 0 and is None after a start or a
        communication; `rows` maps each row's name to a numpy array: a client's exchanged and kept
        rows as [num_clients, dim], the server's own as [dim], and x always as [num_clients, dim].
        During a round the exchanged rows of absent clients are those the round began with.

    Raises:
        UserError: if x0 is missing, neither `gradient` nor `loss` with `directions` is given, or
            another argument is not what it should be.
    """
    if not isinstance(algorithm, Algorithm):
        raise UserError(f"simulate: algorithm = {algorithm!r}: expected an instance, like FedAvg(step_size=0.1)")
    if x0 is None:
        raise UserError("simulate: expected x0, the starting point")
    if num_clients < 1:
        raise UserError(f"simulate: num_clients = {num_clients}: expected at least 1")
    make_oracle = _oracle_of(gradient, loss, directions, smoothing, ascent, ascent_scale)
    x0 = torch.as_tensor(x0, dtype=dtype).detach().reshape(-1)
    recorder = _Recorder(algorithm, num_clients, local_steps)
    federation = Federation(
        algorithm,
        SoloLink(),
        {index: functools.partial(make_oracle, index) for index in range(num_clients)},
        num_clients,
        x0,
        x0.new_empty(0),
        local_steps,
        participants=participants,
        chosen=chosen,
        observe=recorder,
        poison=True,
        segments=segments,
        ascent=ascent,
    )
    federation.start()
    for _ in range(rounds):
        federation.run_round()
    return recorder.trace


def _oracle_of(gradient, loss, directions, smoothing, ascent, ascent_scale):
    """`make(index, state) -> oracle` of a client, on gradients or on losses."""
    if gradient is not None and loss is None and directions is None:
        return lambda index, state: FunctionOracle(gradient, index, ascent, ascent_scale)
    if gradient is not None or loss is None or directions is None:
        raise UserError("simulate: expected either gradient, or loss and directions")
    if not smoothing > 0:
        raise UserError(f"simulate: smoothing = {smoothing}: expected a number > 0 (μ)")
    return lambda index, state: LossFunctionOracle(loss, directions, index, smoothing, ascent, ascent_scale)


class _Recorder:
    """Sorts what clients do in turn into records that hold all clients at one moment."""

    def __init__(self, algorithm, num_clients, local_steps):
        self.trace = []
        self._num_clients, self._local_steps = num_clients, local_steps
        self._shown = (*algorithm.exchanged, *algorithm.client_rows)
        self._steps = {}  # step -> client -> rows, of the running round

    def __call__(self, federation, round_index, step, client):
        if client is not None:
            rows = {name: getattr(client, name).numpy().copy() for name in self._shown}
            self._steps.setdefault(step, {})[client.index] = rows
            return
        resting = self._resting(federation)
        for step in sorted(self._steps):
            self._add(federation, round_index, step, {**self._before, **self._steps[step]}, self._server_before)
        self._steps = {}
        self._before, self._server_before = resting, self._server(federation)
        self._add(federation, round_index, None, resting, self._server_before)

    def _resting(self, federation):
        """Rows of every client between rounds: the averages, and what it keeps."""
        averaged = federation.store.averaged_rows()
        return {
            client.index: {name: averaged.get(name, getattr(client, name)).numpy().copy() for name in self._shown}
            for client in federation.clients
        }

    def _server(self, federation):
        rows = {name: row.numpy().copy() for name, row in federation.store.server_rows().items()}
        return {name: np.stack([row] * self._num_clients) if name == "x" else row for name, row in rows.items()}

    def _add(self, federation, round_index, step, clients, server):
        rows = {name: np.stack([clients[c][name] for c in range(self._num_clients)]) for name in self._shown}
        self.trace.append({"round": round_index, "step": step, "rows": {**rows, **server}})
