"""Which clients a rank holds, which of them take part in a round, and for how many steps."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

from fedmpi.federation.round import Round
from fedmpi.ground.errors import UserError
from fedmpi.ground.streams import generator
from fedmpi.ground.text import short

NONE: frozenset[int] = frozenset()
FARTHEST = 1e20  # from 1: rows of float32 times it, and their sums, are finite


def spread(num_clients: int, num_ranks: int) -> list[range]:
    """The clients of each rank, a list of `range`: consecutive numbers, counts that differ by at most one.

    Raises:
        UserError: if there are fewer clients than ranks.
    """
    if num_clients < num_ranks:
        fewer = f"at most {num_clients} ranks" if num_clients > 1 else "one rank (without mpirun, or mpirun -np 1)"
        raise UserError(
            f"clients = {num_clients}: expected at least one client per rank, and {num_ranks} ranks were started: "
            f"start {fewer}, or ask for more clients (--clients {num_ranks})"
        )
    edges = [num_clients * rank // num_ranks for rank in range(num_ranks + 1)]
    return [range(a, b) for a, b in zip(edges, edges[1:])]


def draw_participants(num_clients: int, participation: float, seed: int, round_index: int) -> list[int]:
    """The clients of a round: max(1, ⌊participation N⌋) of N without replacement, sorted.

    Every rank draws the same from the stream (seed, "participants", round): no message is needed.
    """
    num = max(1, math.floor(participation * num_clients + 1e-9))
    if num >= num_clients:
        return list(range(num_clients))
    drawn = generator(seed, "participants", round_index).choice(num_clients, num, replace=False)
    return sorted(int(c) for c in drawn)


def checked_weights(weights: Any, num_clients: int) -> list[float]:
    """The weights of clients 0, 1, ... as a list, from a list, an array or a tensor.

    Raises:
        UserError: if they are not one number for each client, from 1 / FARTHEST to FARTHEST.
    """
    if isinstance(weights, str | bytes | Mapping | Set) or not isinstance(weights, Iterable):  # a set has no order
        raise UserError(f"weights = {short(repr(weights))}: expected a list, an array or a tensor, a number per client")
    given = weights.tolist() if hasattr(weights, "tolist") else list(weights)
    given = given if isinstance(given, list) else [given]
    if len(given) != num_clients:
        raise UserError(f"weights: {len(given)} given: expected one for each of the {num_clients} clients")
    for client, weight in enumerate(given):
        try:
            is_weight = not isinstance(weight, str | bytes) and 0 < float(weight) < math.inf
        except (TypeError, ValueError, OverflowError):
            is_weight = False
        if not is_weight:
            raise UserError(f"weights: client {client} has {short(repr(weight))}: expected a finite number > 0")
        if not 1 / FARTHEST <= weight <= FARTHEST:
            raise UserError(
                f"weights: client {client} has {weight}: expected {1 / FARTHEST:g} to {FARTHEST:g}, so that sums of "
                "weighted rows are finite; only the weights' ratios matter"
            )
    return [weight if isinstance(weight, int | float) else float(weight) for weight in given]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which clients take part in which round, for how many steps, and with which weight; the same on every rank.

    Args:
        num_clients: N over all ranks.
        local_steps: q, or `local_steps(client) -> int` if clients differ.
        dealt_steps: `dealt_steps(round_index, client) -> int` if they differ from round to round; the clock that
            clients share then advances by the largest of `local_steps`, and a client's own may run ahead of it.
        participants: `participants(round_index) -> clients` of a round; None: all.
        chosen: `chosen(round_index) -> client` that works if only one does; None: drawn uniformly.
        weights: a number > 0 per client, its weight in every average: a list, an array or a tensor; None: all equal.
        seed: of the run; what all ranks draw comes from it.
        hidden_weights: instead of `weights`: number -> weight of this rank's clients, which no other rank knows; for an
            aggregation with `hidden_weights`. In a `Round` all clients then weigh the same.

    Raises:
        UserError: if there is no client, a client has no local step, or the weights are wrong (see `checked_weights`).
    """

    num_clients: int
    local_steps: int | Callable[[int], int] = 1
    participants: Callable[[int], Iterable[int]] | None = None
    chosen: Callable[[int], int] | None = None
    weights: Sequence[float] | None = None
    seed: int = 0
    dealt_steps: Callable[[int, int], int] | None = None
    hidden_weights: Mapping[int, float] | None = None

    def __post_init__(self) -> None:
        if self.num_clients < 1:
            raise UserError(f"num_clients = {self.num_clients}: expected at least 1")
        if min(self._steps) < 1:
            raise UserError(f"local_steps = {min(self._steps)}: expected at least 1 for every client")
        if self.weights is not None:  # an array has no truth value
            object.__setattr__(self, "weights", checked_weights(self.weights, self.num_clients))

    @functools.cached_property
    def _steps(self) -> list[int]:
        return [self.steps_of(client) for client in range(self.num_clients)]

    @functools.cached_property
    def _all_weights(self) -> list[float]:
        return [1] * self.num_clients if self.weights is None else list(self.weights)

    @property
    def is_weighted(self) -> bool:
        """Whether clients' weights may differ."""
        return bool(self.weights or self.hidden_weights)

    def steps_of(self, client: int, round_index: int = -1) -> int:
        """Number of local steps of a client in a round; -1: in no round in particular."""
        if self.dealt_steps is not None and round_index >= 0:
            return self.dealt_steps(round_index, client)
        return self.local_steps(client) if callable(self.local_steps) else self.local_steps

    def weights_in(self, current: Round, alone: bool) -> dict[int, float]:
        """Number -> weight of the clients in an exchange of the round `current`: all, or one that works alone."""
        clients = [self.draw_one(current)] if alone else current.participants
        return {client: (self.hidden_weights or {}).get(client, self._all_weights[client]) for client in clients}

    def start(self, lost: frozenset[int] = NONE) -> Round:
        """The `Round` before the first one: all clients that are not lost take part, and no local step is made."""
        all_clients = tuple(c for c in range(self.num_clients) if c not in lost)
        weights = tuple(self._all_weights[c] for c in all_clients)
        return Round(-1, 0, all_clients, weights, 0, sum(weights) / sum(self._all_weights), max(self._steps))

    def round(self, index: int, lost: frozenset[int] = NONE) -> Round:
        """The `Round` number `index`.

        Args:
            lost: clients that are lost: absent, whatever the plan says. If all participants are lost, all other
                clients take part.

        Raises:
            UserError: if the participants are not different clients.
        """
        all_clients = range(self.num_clients)
        participants = [int(c) for c in (self.participants(index) if self.participants else all_clients)]
        if not participants or len({*participants}) < len(participants) or not {*participants} <= {*all_clients}:
            raise UserError(
                f"participants of round {index} = {participants}: expected at least one of the clients "
                f"0 to {all_clients[-1]}, and each of them once"
            )
        if lost:
            present = [c for c in participants if c not in lost]
            participants = present or [c for c in all_clients if c not in lost]
        weights = [self._all_weights[c] for c in participants]
        weight, nominal = sum(weights), max(self._steps)
        steps = [self._steps[c] if self.dealt_steps is None else self.dealt_steps(index, c) for c in participants]
        return Round(
            index=index,
            iteration=(index + 1) * nominal,
            participants=tuple(participants),
            weights=tuple(weights),
            num_steps=sum(w * k for w, k in zip(weights, steps)) / weight,
            participation=weight / sum(self._all_weights),
            nominal_steps=nominal,
        )

    def draw_one(self, current: Round) -> int:
        """The client that works alone in an exchange of the round `current`; all ranks draw the same.

        Raises:
            UserError: if `chosen` names one that does not take part in the round.
        """
        if self.chosen is not None:
            client = int(self.chosen(current.index))
            if client not in current.participants:
                raise UserError(
                    f"chosen of round {current.index} = {client}: expected one of its participants "
                    f"{', '.join(map(str, current.participants))}"
                )
            return client
        return int(generator(self.seed, "alone", current.index).choice(current.participants))
