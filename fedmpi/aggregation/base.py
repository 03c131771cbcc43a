"""What an aggregation is: one object per rank that turns the participants' rows into the server's."""

import abc
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import ClassVar

import numpy as np
import torch

from fedmpi.aggregation.layout import Layout, Moment
from fedmpi.aggregation.slices import Slicing
from fedmpi.aggregation.words import takes_weight
from fedmpi.comm.link import Link
from fedmpi.ground.errors import UserError
from fedmpi.ground.settings import check


@dataclasses.dataclass(kw_only=True)
class Aggregation(Slicing):
    """Base of all aggregations; its settings are its fields.

    In every exchange a federation calls `begin`, then `add` after each turn of a client of this rank, then `average`.
    A class that needs all rows at once overrides `average` alone; here is the median of the clients:

    >>> import dataclasses, fedmpi, torch
    >>> from fedmpi.aggregation import Aggregation
    >>> @dataclasses.dataclass(kw_only=True)
    ... class Median(Aggregation):
    ...     def average(self, out):
    ...         def middle(slices):
    ...             return torch.stack(slices).quantile(0.5, dim=0)
    ...
    ...         self.reduce_slices(middle, out)
    >>> fedavg = fedmpi.algorithms.FedAvg(step_size=0.5)
    >>> def gradient(client, x, sample):
    ...     return x - (0.0, 1.0, 100.0)[client]
    >>> trace = fedmpi.simulate(fedavg, gradient, x0=[9.0], rounds=30, sending=fedmpi.Sending(Median()))
    >>> trace[-1]["rows"]["x"].round(6).tolist()
    [[1.0], [1.0], [1.0]]

    Attributes:
        link: the `Link`. layout: the `Layout`. clients: numbers of this rank's clients, in the order of their turns.
        block: [numel] the memory in which the only client of a rank works, and where the averages are then.
        moment: the current `Moment`. weights: number -> weight of the clients that take part, on all ranks.
        kept: number -> region that `add` has taken, of this rank's clients.
        start: [n] with `needs_start`, what the round began with: a copy of the rows of the current region, 0 for
            differences, and of the buffers. Where no client has changed a buffer, rows have the same values.
        codec: the `Codec` in which rows travel, or None; with it, there is `start`, too.
        beside: another object of the class for what is averaged in float64 beside the rows (`Layout.beside`), or None.
            Its rows are numbers, and it has no codec; its `start` is 0.
    """

    # False: the rows of a client are in memory that no other process of the node can read.
    exposes_rows: ClassVar[bool] = True
    hides: ClassVar[str] = ""  # what it hides, and from whom: for the closing table and fedmpi doctor
    # Whether it is the weighted mean: there may then be buffers of a wider type than the rows.
    is_mean: ClassVar[bool] = False
    # Whether it has to know before `average` how large values are: the federation then calls `scale`.
    needs_exponents: ClassVar[bool] = False
    # Whether averages of finite rows are finite; otherwise the federation looks for values that are not.
    keeps_finite: ClassVar[bool] = False
    # Whether it reads `start`.
    needs_start: ClassVar[bool] = False
    # Whether it sends rows by `reduce_slices` alone: they may then travel in a codec that is not linear.
    takes_codecs: ClassVar[bool] = False
    # Which kinds of messages, of `fedmpi.comm.crosses.KINDS`, its `average` sends.
    crosses: ClassVar[frozenset[str]] = frozenset({"slices"})
    # How many clients have to take part in every exchange.
    least_clients: ClassVar[int] = 1
    # Whether `out` may be shorter than what was added: float buffers that no client has changed stand last and are left
    # out. Such a class defines `reorder_end`.
    leaves_out_constants: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check(self, "aggregation.")

    def open(self, link: Link, layout: Layout, clients: Iterable[int]) -> None:
        """Get the memory. Collective on the link; called once, before the first exchange."""
        self.link, self.layout, self.clients = link, layout, list(clients)
        ends = link.allgather([len(self.clients)], "machinery")[:, 0].astype(int).cumsum()
        everyone = link.allgatherv(self.clients, "machinery").astype(int)
        self.clients_of_ranks = [of.tolist() for of in np.split(everyone, ends[:-1])]
        self.block = self.allocate(layout.numel)
        self.start, self.kept = self.block[:0], {}
        self.codec, self.beside = None, None
        self._adds_weighted = takes_weight(self.add, self.called)
        self._is_out_free = type(self).add is Aggregation.add and len(self.clients) != 1

    def allocate(self, numel: int) -> torch.Tensor:
        """[numel] zeros where the link sums fastest, or, without `exposes_rows`, of this process alone. Collective."""
        layout = self.layout
        if self.exposes_rows:
            return self.link.allocate(numel, layout.dtype, layout.device)
        return torch.zeros(numel, dtype=layout.dtype, device=layout.device)

    def begin(self, moment: Moment, weights: dict[int, float]) -> None:
        """Prepare an exchange. The same on every rank; not collective.

        Raises:
            UserError: if fewer than `least_clients` take part.
        """
        self.moment, self.weights = moment, dict(weights)
        self._check_number()
        self.kept = {}
        if self.codec is not None:
            self.codec.begin(moment)

    def _check_number(self) -> None:
        if len(self.weights) < self.least_clients:
            raise UserError(
                f"{self.called} needs at least {self.least_clients} clients that take part, "
                f"not {len(self.weights)}: expected more participants, or another aggregation"
            )

    def take(self, client: int, region: torch.Tensor) -> None:
        """Call `add`, which may do without the weight."""
        self.add(client, region, *([self.weights[client]] if self._adds_weighted else []))

    def skip(self, client: int, region: torch.Tensor) -> None:  # noqa: B027  most keep what they have so far
        """Take note that a client of this rank is left out, instead of `add`; its [n] region may be overwritten."""

    def leave_out(self, clients: Iterable[int]) -> None:
        """From now on, the exchange is one without some clients of all ranks; before `average`. Not collective.

        Raises:
            UserError: on all ranks, if too few are left.
        """
        self.weights = {client: weight for client, weight in self.weights.items() if client not in set(clients)}
        self._check_number()

    def add(self, client: int, region: torch.Tensor, weight: float) -> None:
        """Take what a client of this rank sends. Not collective. A class may define it as ``add(client, region)``, too.

        Args:
            client: its number, one of those that take part.
            region: [n] the rows that are averaged now, contiguous, not yet multiplied by the weight; it may be
                overwritten, and contains something else after the call.
            weight: of the client, as in `weights`.
        """
        # Alone on its rank, a client works in the block, where the rows stay.
        self.kept[client] = region if len(self.clients) == 1 else region.clone()

    def scale(self, exponents: Sequence[tuple[int, int]], terms: Sequence[tuple[list[float], int]]) -> None:
        """With `needs_exponents`, before `average`, which every exchange then calls: how large values are.

        Args:
            exponents: [(length, E)] of stretches of the region, rows first, the same on every rank: E is a multiple of
                8, |weight · value| < 2^E of all clients. The last may be longer than what is averaged.
            terms: [(this rank's terms of a number, at most one for each client, their E)]; `average` puts the sums over
                all ranks into `sums`.
        """
        self.exponents, self.terms = exponents, terms
        self.sums: Sequence[float] = ()

    def spoil(self, out: torch.Tensor) -> None:
        """Before `average`: what it does not fill is then found, as far as its memory is not that of a region."""
        if self._is_out_free:
            out.fill_(math.nan)

    @abc.abstractmethod
    def average(self, out: torch.Tensor) -> None:
        """Put what becomes of the rows of all ranks into `out`, with the same bits on every rank. Collective.

        If ranks are lost meanwhile, the link raises `RanksLost`; the federation then repeats the round from its start
        without them.

        Args:
            out: [n] the region of the server's block; on a rank with one client it is the one that was added.
        """

    def reorder_end(self, order: torch.Tensor) -> None:
        """Put the last elements of what was added into another order, [k] positions among them."""
        raise NotImplementedError(f"{type(self).__name__} leaves out constants: expected that it defines reorder_end")
