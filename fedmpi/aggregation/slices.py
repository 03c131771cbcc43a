"""Aggregations that need all clients' rows at once: each rank reduces a slice of them, in a codec or as they are."""

import torch

from fedmpi.aggregation.codecs.base import Codec
from fedmpi.aggregation.layout import Layout, Moment
from fedmpi.aggregation.words import of_length, reduce_words
from fedmpi.comm.link import Link
from fedmpi.comm.vectors import Reduce, Slices
from fedmpi.ground.part import Part
from fedmpi.ground.registry import command_name


class Slicing(Part):
    """What an aggregation has for that: `reduce_slices`.

    Attributes:
        link: the `Link`. layout: the `Layout`. moment: the current `Moment`.
        weights: number -> weight of the clients that take part, on all ranks.
        kept: number -> the region that a client of this rank sends.
        codec: the `Codec` in which rows travel, or None.
    """

    link: Link
    layout: Layout
    moment: Moment
    weights: dict[int, float]
    kept: dict[int, torch.Tensor]
    codec: Codec | None = None
    clients_of_ranks: list[list[int]]  # of all ranks that were started

    @property
    def called(self) -> str:
        """Its name in messages."""
        written = f" in codec {command_name(type(self.codec))}" if vars(self).get("codec") is not None else ""
        return f"aggregation {command_name(type(self))}{written}"

    def kept_regions(self) -> list[torch.Tensor]:
        """What this rank's clients have sent, in the order of their numbers."""
        return [self.kept[client] for client in sorted(self.kept)]

    def reduce_slices(self, reduce: Reduce, out: torch.Tensor) -> None:
        """Let every rank reduce one slice of what `add` has kept of all participants; for `average`.

        Where one client works alone (CE-LSGD draws one), its rows are taken as they are.

        Args:
            reduce: see `Link.exchange_slices`; its `Slices` are in the order of the ranks and of their clients, whose
                numbers they have, too.
            out: see `average`.
        """
        of_present = (self.clients_of_ranks[rank] for rank in self.link.members)
        clients = [client for of_rank in of_present for client in sorted(of_rank) if client in self.weights]

        def of_several(slices: Slices) -> torch.Tensor:
            slices.clients = clients
            if len(slices) == 1:
                return slices[0]
            return of_length(slices[0].numel(), reduce(slices), f"{self.called}: what reduces slices returned")

        if self.codec is None:
            self.link.exchange_slices(self.kept_regions(), of_several, out, kind="slices")
        else:
            reduce_words(self, self.codec, of_several, out)

    @property
    def are_numbers(self) -> bool:
        """Whether the current exchange is one of what is averaged beside the rows."""
        return all(self.layout.kinds.get(row) == "number" for row in self.moment.rows)

    @property
    def end_of_rows(self) -> int:
        """Where the float buffers begin in the current region."""
        return len(self.moment.rows) * self.layout.dim

    def clamp_squares(self, out: torch.Tensor) -> None:
        """A mean of squares is never below 0: mend it in an `out` that a codec has written."""
        dim = self.layout.dim
        for number, row in enumerate(self.moment.rows):
            if self.layout.kinds.get(row) == "square":
                out[number * dim : (number + 1) * dim].clamp_(min=0)
