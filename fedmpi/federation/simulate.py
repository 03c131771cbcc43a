"""Run an algorithm in one process with all clients, on functions instead of models and data."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from fedmpi.aggregation.sending import Sending
from fedmpi.algorithms.base import Algorithm
from fedmpi.comm.solo import SoloLink
from fedmpi.federation.client import Client
from fedmpi.federation.client_state import SKIPPED
from fedmpi.federation.observer import Observer
from fedmpi.federation.participation import Plan
from fedmpi.federation.rounds import Federation
from fedmpi.federation.variables import Variables
from fedmpi.ground.errors import UserError
from fedmpi.oracles import FunctionOracle, LossFunctionOracle


class Trace(list[dict[str, Any]]):
    """What `fedmpi.simulate` returns: a list of records, one for every moment; `rounds` has one for every round.

    >>> import fedmpi
    >>> fedavg = fedmpi.algorithms.FedAvg(step_size=0.5)
    >>> trace = fedmpi.simulate(fedavg, lambda i, x, sample: x - i, x0=[4.0], num_clients=2, rounds=3, local_steps=1)
    >>> [record["x"].tolist() for record in trace.rounds]
    [[2.25], [1.375], [0.9375]]
    """

    def __init__(self) -> None:
        super().__init__()
        self._clients: list[tuple[int, ...]] = []  # of each round: its participants

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """One record (a dict) per round, in order: the state after its communication, so ``rounds[-1]`` is the result.

        `round` counts from 0; `x` is the server's x, [dim], a numpy array of simulate's dtype; `participants` is the
        tuple of the clients that took part; `rows` is as in the list's records: the server's rows [dim], x and the
        clients' rows [num_clients, dim]. The state before round 0 is not in it: that is ``trace[0]``.
        """
        after = [record for record in self if record["step"] is None and record["round"] >= 0]
        return [
            {"round": record["round"], "x": record["rows"]["x"][0], "participants": clients, "rows": record["rows"]}
            for record, clients in zip(after, self._clients)
        ]


def simulate(
    algorithm: Algorithm,
    gradient: Callable[[int, torch.Tensor, int], Any] | None = None,
    x0: Any = None,
    num_clients: int = 3,
    rounds: int = 4,
    local_steps: int | Callable[[int], int] = 2,
    participants: Callable[[int], Iterable[int]] | None = None,
    dtype: torch.dtype = torch.float64,
    *,
    chosen: Callable[[int], int] | None = None,
    segments: Sequence[slice] | None = None,
    shapes: Sequence[Sequence[int]] | None = None,
    ascent: slice | None = None,
    ascent_scale: float = 1.0,
    loss: Callable[[int, torch.Tensor, int], Any] | None = None,
    directions: Callable[[int, int], Any] | None = None,
    smoothing: float = 1e-3,
    sending: Sending | None = None,
    weights: Any = None,
) -> Trace:
    """Run an algorithm on given gradients, or on given losses, and return its rows at every moment.

    The loop is the one of the real run (`fedmpi.federation`); only the oracle and the link differ.
    Two clients with f_i(x) = ½ (x - i)², one local step a round:

    >>> import fedmpi
    >>> fedavg = fedmpi.algorithms.FedAvg(step_size=0.5)
    >>> trace = fedmpi.simulate(fedavg, lambda i, x, sample: x - i, x0=[4.0], num_clients=2, rounds=1, local_steps=1)
    >>> for record in trace:
    ...     print(record["round"], record["step"], record["rows"]["x"].tolist())
    -1 None [[4.0], [4.0]]
    0 0 [[2.0], [2.5]]
    0 None [[2.25], [2.25]]

    Args:
        algorithm: an `Algorithm`, for example ``FAFED(step_size=0.1)``.
        gradient: `gradient(client, x, sample) -> [dim]`, x a [dim] tensor, sample the number of the
            client's earlier draws; -1 for the initial batch, and -2 for all data of the client, whose
            gradient some methods use (MimeAdam). A method that compares two gradients calls it twice
            with the same sample.
        x0: [dim] the common starting point: a tensor, an array or a list.
        num_clients: N. rounds: number of rounds. local_steps: q, or `local_steps(client) -> int`.
        participants: `participants(round_index) -> clients` that take part; None: all.
        dtype: of every row.
        chosen: `chosen(round_index) -> client` that works alone in methods that draw one (CE-LSGD);
            None: drawn uniformly from the round's participants.
        segments: slices of x that layer-wise methods (Fed-LAMB) scale one by one; None: one layer.
        shapes: of the parameters of which x consists, one after the other, for methods that need matrices (FedMuon):
            x = (W, b) of a layer with 2 inputs and 3 outputs has shapes [(3, 2), (3,)]. They give the segments, too.
        ascent: the slice of x in which a min-max problem ascends, ``slice(d1, None)`` for
            x = (θ, w) with θ of length d1; `gradient` returns the plain gradient of F. None: a
            minimisation. ascent_scale: factor of that block's gradient. Momenta and control variates
            in the trace have the sign of (∇_θ, -∇_w).
        loss, directions: instead of `gradient`, `loss(client, x, sample) -> number` and
            `directions(client, sample) -> [b2, dim]`, used as they are: gradients are then two-point
            estimates with the radius `smoothing` (μ). Both points of a pair use the same directions.
        weights: > 0, of every client in all averages (its number of samples, say): a list, an array or a tensor; None:
            all equal.
        sending: a `fedmpi.Sending`: what becomes of the clients' rows; None: their mean.

    Returns:
        a `Trace`, a list of records (dicts): one after the start (round -1), one after every local step, one
        after every round's communication (after the second one if a round has two averages). `round`
        counts from 0; `step` counts the round's local steps from 0 and is None after the start and
        after a communication; `rows` maps each row's name to a numpy array: a client's exchanged rows
        and own rows as [num_clients, dim], the server's own as [dim], and x always as
        [num_clients, dim]. During a round the exchanged rows of an absent client are those that the
        round began with. Its attribute `rounds` has one record per round: `round`, `x` [dim], `participants`, `rows`.

    Raises:
        UserError: if x0 is missing, if neither `gradient` nor `loss` with `directions` is given, or if
            another argument is out of its range.
    """
    if not isinstance(algorithm, Algorithm):
        raise UserError(f"simulate: algorithm = {algorithm!r}: expected an instance, like FedAvg(step_size=0.1)")
    if x0 is None:
        raise UserError("simulate: expected x0, the starting point")
    if num_clients < 1:
        raise UserError(f"simulate: num_clients = {num_clients}: expected at least 1")
    make_oracle = _oracle_of(gradient, loss, directions, smoothing, ascent, ascent_scale)
    x0 = torch.as_tensor(x0, dtype=dtype).detach().reshape(-1)
    segments, shapes = _layers(len(x0), segments, shapes)
    recorder = _Recorder(algorithm, num_clients)
    federation = Federation(
        algorithm,
        SoloLink(),
        dict.fromkeys(range(num_clients), make_oracle),
        Plan(num_clients, local_steps, participants, chosen, weights=weights),
        Variables(x0, segments=segments, ascent=ascent, shapes=shapes),
        sending,
        observer=recorder,
        poison=True,
    )
    federation.start()
    for _ in range(rounds):
        federation.run_round()
    return recorder.trace


def _layers(
    dim: int, segments: Sequence[slice] | None, shapes: Sequence[Sequence[int]] | None
) -> tuple[list[slice] | None, tuple[tuple[int, ...], ...]]:
    """(segments, shapes) of x as `Variables` has them."""
    if shapes is None:
        return None if segments is None else list(segments), ()
    ends = list(itertools.accumulate(map(math.prod, shapes), initial=0))
    if segments is not None or ends[-1] != dim:
        raise UserError(f"simulate: shapes = {shapes}: expected shapes with {dim} elements together, and no segments")
    return [slice(*edges) for edges in itertools.pairwise(ends)], tuple(tuple(shape) for shape in shapes)


def _oracle_of(
    gradient: Any, loss: Any, directions: Any, smoothing: float, ascent: slice | None, ascent_scale: float
) -> Callable[[Any], FunctionOracle]:
    """`make(client) -> oracle`, on gradients or on losses."""
    if gradient is not None and loss is None and directions is None:
        return lambda client: FunctionOracle(gradient, client, ascent, ascent_scale)
    if gradient is not None or loss is None or directions is None:
        raise UserError("simulate: expected either gradient, or loss and directions")
    if not smoothing > 0:
        raise UserError(f"simulate: smoothing = {smoothing}: expected a number > 0 (μ)")
    return lambda client: LossFunctionOracle(loss, directions, client, smoothing, ascent, ascent_scale)


class _Recorder(Observer):
    """Collects the rows of clients that work in turn into records of all clients at one moment."""

    def __init__(self, algorithm: Algorithm, num_clients: int) -> None:
        self.trace = Trace()
        self._num_clients = num_clients
        self._shown = (*algorithm.exchanged, *algorithm.client_rows)
        self._steps: dict[int, dict[int, Any]] = {}  # step -> client -> rows, of the current round
        self._before: dict[int, Any] = {}  # client -> rows when the current round began
        self._server_before: dict[str, Any] = {}

    def after_step(self, federation: Federation, client: Client) -> None:
        rows = {name: getattr(client, name).numpy().copy() for name in self._shown}
        self._steps.setdefault(client.step_index, {})[client.index] = rows

    def after_round(self, federation: Federation) -> None:
        round_index = federation.current.index
        for number, moved in sorted(self._steps.items()):
            self._add(round_index, number, {**self._before, **moved}, self._server_before)
        self._steps = {}
        self._before, self._server_before = self._between_rounds(federation), self._server(federation)
        self._add(round_index, None, self._before, self._server_before)
        if round_index >= 0:
            self.trace._clients.append(federation.current.participants)

    def _between_rounds(self, federation: Federation) -> dict[int, Any]:
        """Rows of every client between two rounds: the averages, and its own rows."""
        averaged, found = federation.store.averaged_rows(), {}
        for client in federation.clients:
            rows = client.rows | averaged | {name: client.kept[SKIPPED][name] for name in client.skipped}
            found[client.index] = {name: rows[name].numpy().copy() for name in self._shown}
        return found

    def _server(self, federation: Federation) -> dict[str, Any]:
        rows = {name: row.numpy().copy() for name, row in federation.store.server_rows().items()}
        return {name: np.stack([row] * self._num_clients) if name == "x" else row for name, row in rows.items()}

    def _add(self, round_index: int, step: int | None, clients: dict[int, Any], server: dict[str, Any]) -> None:
        rows = {name: np.stack([clients[c][name] for c in range(self._num_clients)]) for name in self._shown}
        self.trace.append({"round": round_index, "step": step, "rows": {**rows, **server}})
