"""One silo, and the server that all ranks replicate, as an algorithm sees them."""

from typing import Any

import torch

from fedmpi.federation.holder import Holder
from fedmpi.federation.variables import blocks
from fedmpi.oracles.base import Oracle


class Client(Holder):
    """One silo: its rows, the current round, and the oracle that answers for its data.

    It owns all of its state that crosses a round (`fedmpi.federation.client_state`).

    Args:
        index: the client's number in the federation, from 0.
        rows: name -> [dim] tensor, those that an algorithm sees. own: names of the rows that belong to this client
            alone, and stay from round to round.
        buffers: [num_buffers] the float buffers of the model during the client's turn; None: none.

    Attributes:
        oracle: set after construction, because an oracle is made for a client.
        round: the current `Round`. num_steps: local steps in it. step_index: the current one, from 0.
        was_absent: whether the client missed the previous round.
        num_draws: samples drawn so far, the position in the client's data. num_undone: of these, those in turns that
            were undone. num_gradients: evaluated so far.
        counters: the model's integer buffers as this client left them.
        carried: what one sample leaves to the next one (a recurrent state): name -> number, tensor or nested
            tuples of tensors.
        skipped: names of the rows that skip rounds with which the client begins its next round as it left them.
        kept: "part.name" of the rows that a `fedmpi.ground.part.Part` keeps for it -> name of the row -> vector.
    """

    oracle: Oracle[Any]

    def __init__(
        self,
        index: int,
        rows: dict[str, torch.Tensor] | None = None,
        own: tuple[str, ...] = (),
        buffers: torch.Tensor | None = None,
    ) -> None:
        super().__init__(rows or {})
        self.index, self.own = index, own
        self.buffers = torch.empty(0) if buffers is None else buffers
        self.num_steps, self.step_index = 0, -1
        self.was_absent = False
        self.num_draws, self.num_undone, self.num_gradients = 0, 0, 0
        self.counters: list[torch.Tensor] = []
        self.carried: dict[str, Any] = {}
        self.skipped: set[str] = set()
        self.kept: dict[str, dict[str, torch.Tensor]] = {}

    @property
    def iteration(self) -> int:
        """t, local steps since the start by the clock that all clients share, from 1; 0 during the start."""
        if self.round is None or self.round.index < 0:
            return 0
        return self.round.first_iteration + self.step_index + 1

    @property
    def is_last_step(self) -> bool:
        """Whether the current local step is the last of the round: an average follows."""
        return self.step_index == self.num_steps - 1


class Server(Holder):
    """The state that every rank replicates: the same arithmetic everywhere, nothing is broadcast.

    Args:
        rows: name -> [dim] tensor.
        num_clients: N.
        segments: slices of the parameter tensors in a [dim] row.
        dim: length of a row. ascent: the slice of a row in which a min-max problem ascends, or None.
        shapes: of the parameter tensors; (): each has one dimension.

    Attributes:
        round: the current `Round`; num_participants, participation, num_steps and iteration are its.
    """

    def __init__(
        self,
        rows: dict[str, torch.Tensor],
        num_clients: int,
        segments: list[slice],
        dim: int,
        ascent: slice | None = None,
        shapes: tuple[tuple[int, ...], ...] = (),
    ) -> None:
        super().__init__(rows)
        self.segments, self.num_clients = segments, num_clients
        self.shapes = shapes or tuple((part.stop - part.start,) for part in segments)
        self.primal, self.dual = blocks(dim, ascent)

    @property
    def iteration(self) -> int:
        """t at the end of the round's local steps; 0 at the start."""
        return 0 if self.round is None else self.round.iteration

    @property
    def num_participants(self) -> int:
        """|S| of the round."""
        return self.num_clients if self.round is None else len(self.round.participants)

    @property
    def participation(self) -> float:
        """The participants' share in the weight of all clients, |S| / N."""
        return 1.0 if self.round is None else self.round.participation

    @property
    def num_steps(self) -> float:
        """K, mean of the participants' local steps in the round."""
        return 0 if self.round is None else self.round.num_steps

    @property
    def most_steps(self) -> int:
        """The largest number of local steps of a client in the round."""
        return 0 if self.round is None else self.round.nominal_steps
