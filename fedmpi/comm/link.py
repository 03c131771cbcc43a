"""What a federation asks of the ranks that it runs on: sums of model vectors and small agreements."""

import abc
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedmpi.comm.summation_order import Partials
from fedmpi.comm.traffic import Traffic


class Slices(list[torch.Tensor]):
    """A slice of every vector, all of the same place.

    Attributes:
        place: where they lie in the vectors. clients: whose vectors these are, if an aggregation reduces them.
    """

    clients: Sequence[int] = ()

    def __init__(self, vectors: Iterable[torch.Tensor], place: slice) -> None:
        super().__init__(vectors)
        self.place = place


Reduce = Callable[[Slices], torch.Tensor]  # see `Link.exchange_slices`


class Copy:
    """A vector for values that all ranks have.

    Attributes:
        vector: [n], zeros at first; to be read, and to be written to by all ranks at once and equally.
    """

    def __init__(self, vector: torch.Tensor) -> None:
        self.vector = vector

    def take(self, values: torch.Tensor) -> None:
        """Let it have other [n] values, the same on all ranks; collective."""
        self.vector.copy_(values)


class RanksLost(Exception):
    """Ranks were lost during a sum; raised on all that are left, which repeat the round (see `Link.survive`)."""


class Link(abc.ABC):
    """The ranks of a job, as seen by one of them. All methods are collective: every rank makes the same calls.

    Attributes:
        rank, size: this rank's number and the number of ranks.
        local_rank, local_size: the same among the ranks of this node. usable_cores: of the node; free_cores: of these.
        num_nodes: that the ranks are on. oversubscribed: whether this node has more ranks than cores.
        traffic: the `Traffic` of this rank.
        summed_by: how the last block was summed, as text for the closing table.
        members: of the ranks that are left, the numbers with which they were started; lost: those of the others.
        lost_in: lost rank -> the phase in which it was lost.
        survives: whether `survive` was called. clients: the numbers of each started rank's clients, after `watch`.
        phase: what the ranks do currently, see `enter`.
        progress: [local steps that this rank has made, those since its last average], for the message if it ends early.
        how_to_resume: function without arguments, see `can_be_resumed`.
    """

    traffic: Traffic
    phase = "the preparation"
    members: Sequence[int] = (0,)
    lost: Sequence[int] = ()
    clients: Sequence[Sequence[int]] = ()
    survives = False
    lost_in: Mapping[int, str] = types.MappingProxyType({})
    rank, size = 0, 1
    local_rank, local_size = 0, 1
    num_nodes, usable_cores, free_cores, oversubscribed = 1, 1, 1, False
    summed_by = "nothing to sum"

    how_to_resume: Callable[[], str] = staticmethod(lambda: "")

    @abc.abstractmethod
    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        """[numel] zeros where `average` is fastest; it stays valid as long as a tensor in it is held."""

    def allocate_copy(self, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> "Copy":
        """A `Copy` of [numel] values that all ranks have; ranks of a node may have one together."""
        return Copy(torch.zeros(numel, dtype=dtype, device=device))

    @abc.abstractmethod
    def average(self, block: torch.Tensor, divisor: float, out: torch.Tensor) -> None:
        """out = (sum of `block` over all ranks) / divisor, with the same bits on every rank.

        Args:
            block: [n] float32 or float64, contiguous, the same n and dtype on every rank; overwritten.
            divisor: a number, the same on every rank.
            out: [n]; may be `block` itself.
        """

    @abc.abstractmethod
    def combine(self, vectors: list[torch.Tensor], partials: Partials, divisor: float, out: torch.Tensor) -> None:
        """out = (sum of all ranks' partial sums) / divisor, added in the order of `partials`.

        The bits are the same for every number of ranks and nodes, every transport and every MPI library.

        Args:
            vectors: [n] each: this rank's vectors, one for each slot, all of them parts of one block that
                `allocate` gave; they may be overwritten.
            partials: a `fedmpi.comm.summation_order.Partials`, the same on every rank. divisor: the same on every rank.
            out: [n]; may be the first of the vectors.
        """

    @abc.abstractmethod
    def add_integers(self, block: torch.Tensor) -> None:
        """Sum a vector over all ranks in place, modulo 2^32 or 2^64: the order of the ranks does not matter.

        Args:
            block: [n] int32 or int64, contiguous, the same n on every rank: words without a sign.

        Raises:
            RanksLost: see `survive`; the block then contains neither its own words nor the sum.
        """

    @abc.abstractmethod
    def exchange_slices(
        self, vectors: list[torch.Tensor], reduce: Reduce, out: torch.Tensor, dtype: torch.dtype | None = None
    ) -> None:
        """Let each rank reduce one slice of all ranks' vectors, and give all ranks the whole result.

        In memory that a node's ranks share nothing is copied, if each rank has at most one vector, and it is `out`.

        Args:
            vectors: list of [n], contiguous; a rank may have none or several.
            reduce: function of `Slices`, [m] each, m > 0, of all vectors in the order of the ranks, one or more -> [m].
                It is called any number of times, for different places that are all of [n] once, and must not change
                the slices.
            out: [n], of the same type on every rank; it may be one of the vectors.
            dtype: of the vectors; None: that of `out`.
        """

    @abc.abstractmethod
    def allgather_vectors(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """[one vector per rank, in their order]: every rank's [n_r] contiguous `vector` of one type; n_r may differ."""

    @abc.abstractmethod
    def allgather(self, values: npt.ArrayLike) -> npt.NDArray[Any]:
        """[size, n] float64: every rank's [n] `values`, in rank order."""

    @abc.abstractmethod
    def allgatherv(self, values: npt.ArrayLike) -> npt.NDArray[Any]:
        """[sum of n_r] float64: all ranks' [n_r] `values`, one after the other; n_r may differ."""

    @abc.abstractmethod
    def alltoallv(self, rows: npt.NDArray[Any], wanted: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """[m, ...] the rows that the other ranks send to this one, in rank order.

        Args:
            rows: [n, ...] array of this rank; dtype and shape of a row are the same on every rank.
            wanted: for each rank, the indices into `rows` of what it is sent, in that order.
        """

    @abc.abstractmethod
    def broadcast(self, array: npt.NDArray[Any]) -> None:
        """Give all ranks rank 0's values, in place: a contiguous numpy array, of the same size on every rank."""

    @abc.abstractmethod
    def barrier(self) -> None:
        """Wait for all ranks."""

    def watch(self, limit: float, clients: Sequence[Sequence[int]] = ()) -> None:  # noqa: B027  one process never waits
        """From now on, end the job if the ranks wait for others longer than `limit` seconds, and name those.

        Args:
            clients: the numbers of each rank's clients, for the message; () if they are not known yet.
        """

    def enter(self, phase: str) -> None:
        """Say what the ranks do from now on, as text, for the message about ranks that do not arrive. Not collective.

        It is the only place that changes `phase`.
        """
        self.phase = phase

    def can_be_resumed(self, how: Callable[[], str]) -> None:
        """Say how: a function without arguments -> how the user can resume the run, or "", for the same message."""
        self.how_to_resume = how

    def survive(self) -> None:  # noqa: B027  one process is never left
        """From now on, the ranks that are left go on when others are lost.

        A sum then raises `RanksLost`; any other collective is repeated among the ranks that are left. Blocks must be
        allocated by the transport "allreduce", and `alltoallv` must not be called any more.
        """

    def lost_clients(self) -> frozenset[int]:
        """The clients of the ranks that are lost."""
        return frozenset(client for rank in self.lost for client in self.clients[rank])

    def num_present(self, num_clients: int) -> int:
        """How many of all clients are not lost."""
        return num_clients - len(self.lost_clients())

    @abc.abstractmethod
    def close(self) -> None:
        """Free what `allocate` gave; the link cannot be used afterwards."""

    def allreduce(self, block: torch.Tensor) -> None:
        """Sum a contiguous 1-d tensor over all ranks, in place; see `average`."""
        self.average(block, 1, block)

    def first_rank_where(self, condition: bool) -> int | None:
        """The lowest rank whose `condition` is true, or None."""
        return lowest_true(self.allgather([float(condition)]))


def lowest_true(flags: npt.NDArray[Any]) -> int | None:
    """The first row of a [size, 1] array that is not 0, or None."""
    return int(np.argmax(flags[:, 0])) if flags.any() else None


def describe_clients(clients: Iterable[int]) -> str:
    """Clients' numbers as text: "client 3", "clients 3 to 5", "clients 1, 4"."""
    numbers = sorted(clients)
    if len(numbers) == 1:
        return f"client {numbers[0]}"
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"clients {numbers[0]} to {numbers[-1]}"
    return f"clients {', '.join(map(str, numbers))}"
