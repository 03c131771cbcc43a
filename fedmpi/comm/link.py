"""What a federation asks of the ranks that it runs on: sums of model vectors and small agreements."""

import abc
from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt
import torch

from fedmpi.comm.crosses import OWN, Crossed
from fedmpi.comm.ranks import Ranks, lowest_true
from fedmpi.comm.traffic import Traffic
from fedmpi.comm.vectors import Copy, Gathering, Reduce


class Link(Ranks, abc.ABC):
    """The verbs of one rank. All methods are collective: every rank makes the same calls.

    A verb that sends what silos have takes the `kind` of the message, one of `fedmpi.comm.crosses.KINDS`. Errors apart
    (`agree`), those without one send `machinery`.

    Attributes, besides those of `Ranks` (`rank`, `size`, which ranks are left, and so on):
        traffic: the `Traffic` of this rank. crossed: the kinds of messages so far; none where there is one rank.
        summed_by: how the last block was summed, as text for the closing table.
        add_hidden: collective function of this rank's terms of some sums, at most one for each client or rank -> the
            sums over all ranks, nan with a term that is not finite, in which no rank sees others' terms; or None.
    """

    add_hidden: Callable[[list[list[float]]], list[float]] | None = None
    traffic: Traffic
    crossed: Crossed
    summed_by = "nothing to sum"

    @abc.abstractmethod
    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        """[numel] zeros where `average` is fastest; it stays valid as long as a tensor in it is held."""

    def allocate_copy(self, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Copy:
        """A `Copy` of [numel] values that all ranks have; ranks of a node may have one together."""
        return Copy(torch.zeros(numel, dtype=dtype, device=device))

    @abc.abstractmethod
    def average(self, block: torch.Tensor, divisor: float, out: torch.Tensor, kind: str = OWN) -> None:
        """out = (sum of `block` over all ranks) / divisor, with the same bits on every rank.

        Args:
            block: [n] float32 or float64, contiguous, the same n and dtype on every rank; overwritten.
            divisor: a number, the same on every rank.
            out: [n]; may be `block` itself.
        """

    @abc.abstractmethod
    def add_integers(self, block: torch.Tensor, kind: str = OWN) -> None:
        """Sum a vector over all ranks in place, modulo 2^32 or 2^64: the order of the ranks does not matter.

        Args:
            block: [n] int32 or int64, contiguous, the same n on every rank: words without a sign.

        Raises:
            RanksLost: see `Ranks.survive`; the block then contains neither its own words nor the sum.
        """

    @abc.abstractmethod
    def exchange_slices(
        self,
        vectors: list[torch.Tensor],
        reduce: Reduce,
        out: torch.Tensor,
        dtype: torch.dtype | None = None,
        kind: str = OWN,
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
    def allgather_vectors(self, vector: torch.Tensor, kind: str = OWN) -> list[torch.Tensor]:
        """[one vector per rank, in their order]: every rank's [n_r] contiguous `vector` of one type; n_r may differ."""

    @abc.abstractmethod
    def allgather(self, values: npt.ArrayLike, kind: str = OWN) -> npt.NDArray[Any]:
        """[size, n] float64: every rank's [n] `values`, in rank order."""

    def begin_allgather(self, values: npt.ArrayLike, kind: str = OWN) -> Gathering:
        """`allgather`, which goes on while this rank does something else that is not collective."""
        return Gathering(self.allgather(values, kind))

    @abc.abstractmethod
    def allgatherv(self, values: npt.ArrayLike, kind: str = OWN) -> npt.NDArray[Any]:
        """[sum of n_r] float64: all ranks' [n_r] `values`, one after the other; n_r may differ."""

    @abc.abstractmethod
    def alltoallv(
        self, rows: npt.NDArray[Any], wanted: Sequence[npt.NDArray[Any]], kind: str = OWN
    ) -> npt.NDArray[Any]:
        """[m, ...] the rows that the other ranks send to this one, in rank order.

        Args:
            rows: [n, ...] array of this rank; dtype and shape of a row are the same on every rank.
            wanted: for each rank, the indices into `rows` of what it is sent, in that order.
        """

    @abc.abstractmethod
    def broadcast(self, array: npt.NDArray[Any], kind: str = OWN) -> None:
        """Give all ranks rank 0's values, in place: a contiguous numpy array, of the same size on every rank."""

    @abc.abstractmethod
    def barrier(self) -> None:
        """Wait for all ranks."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free what `allocate` gave; the link cannot be used afterwards."""

    def allreduce(self, block: torch.Tensor, kind: str = OWN) -> None:
        """Sum a contiguous 1-d tensor over all ranks, in place; see `average`."""
        self.average(block, 1, block, kind)

    def first_rank_where(self, condition: bool) -> int | None:
        """The lowest rank whose `condition` is true, or None."""
        return lowest_true(self.allgather([float(condition)], "machinery"))
