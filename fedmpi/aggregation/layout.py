"""What the vectors of an aggregation contain, and which average it is."""

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class Layout:
    """What the vectors of an aggregation contain: rows one after the other, then float buffers of the model.

    Attributes:
        rows: names of the exchanged rows, in order. dim: length of each of them, d. kinds: name of a row -> what it is,
            see `fedmpi.algorithms.base`.
        numel: of all rows and buffers. dtype, device: of all of it.
        segments: slice of a row for each parameter of the model; names, shapes: of these parameters, () if unknown.
        beside: of what is averaged in float64 beside the rows, or None: numbers are one row, "numbers", of kind
            "number", and buffers of a wider type than the rows lie behind it.
    """

    rows: tuple[str, ...]
    dim: int
    numel: int
    dtype: torch.dtype
    device: torch.device | str
    segments: tuple[slice, ...] = ()
    names: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    kinds: dict[str, str] = dataclasses.field(default_factory=dict)
    beside: "Layout | None" = None

    def rows_of(self, block: torch.Tensor) -> torch.Tensor:
        """All rows of a block, [number of rows * dim]."""
        return block[: len(self.rows) * self.dim]

    def behind(self, block: torch.Tensor) -> torch.Tensor:
        """What lies behind the rows of a block: float buffers."""
        return block[len(self.rows) * self.dim :]

    def named(self, block: torch.Tensor) -> dict[str, torch.Tensor]:
        """Name -> [dim] row of a block, views."""
        return dict(zip(self.rows, self.rows_of(block).view(-1, self.dim)))

    def place_of(self, rows: tuple[str, ...]) -> slice:
        """The slice of a block that holds consecutive `rows`, with the buffers if it ends with the last row.

        Raises:
            ValueError: if they are not consecutive.
        """
        if not rows:
            return slice(0, 0)
        first = self.rows.index(rows[0])
        stop = first + len(rows)
        if self.rows[first:stop] != tuple(rows):
            raise ValueError(f"{rows}: not consecutive in the exchanged rows {self.rows}")
        return slice(first * self.dim, self.numel if stop == len(self.rows) else stop * self.dim)


@dataclasses.dataclass(frozen=True)
class Moment:
    """Which average it is.

    Attributes:
        round_index: from 0; -1 in the start. number: of the exchange within the round, from 0.
        rows: names of the rows that are averaged. region: their place in the vectors of the `Layout`, with the float
            buffers if these are averaged too.
        serial: number of the exchange among all that this process makes in the federation, from 0. A round that is
            repeated has other numbers: for nonces under a key that does not outlive the process.
        seed: of the run. What all ranks are to draw equally comes from it, the round and the exchange
            (`fedmpi.ground.streams.generator`); a round that is repeated draws the same.
    """

    round_index: int
    number: int
    rows: tuple[str, ...]
    region: slice
    serial: int = 0
    seed: int = 0
