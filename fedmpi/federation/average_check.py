"""Checks of what an aggregation has made: finite values, the same on every rank."""

import numpy as np
import torch

from fedmpi.comm.agreement import agreed_error
from fedmpi.federation.losses import when_in
from fedmpi.federation.parts import Parts
from fedmpi.ground.errors import Diverged


def check_average(federation: Parts, names: tuple[str, ...]) -> None:
    """Check an aggregation that may make values infinite or nan, or other ones on each rank. Collective.

    Args:
        names: of the rows that were averaged.

    Raises:
        Diverged: on every rank, with the row. UserError: on every rank, if their values differ.
    """
    aggregation, link = federation.aggregation, federation.link
    if aggregation.keeps_finite:
        return
    rows, numbers = federation.store.averaged_rows(), federation.server.numbers
    rows = {f"row {name}": rows[name] for name in names} | ({"the numbers": numbers} if len(numbers) else {})
    if not rows:
        return
    when = when_in(federation.server.round_index)
    bad = [name for name, row in rows.items() if not _is_finite(row)]
    of_ranks = link.allgather([bool(bad), *map(_digest, rows.values())], "average digests")
    if of_ranks[:, 0].any():
        row = bad[0] if bad else "a row of another rank"
        raise Diverged(f"{when}: {aggregation.called} made values of {row} that are not finite")
    if different := [name for name, column in zip(rows, of_ranks.T[1:]) if len(set(column)) > 1]:
        problem = f"{when}: {aggregation.called} gave ranks different values of {different[0]}"
        expected = "expected that average(out) fills `out` with the same bits on every rank"
        raise agreed_error(link, f"{problem}: {expected}" if link.rank == 0 else None)


def _is_finite(row: torch.Tensor) -> bool:
    """Whether all values are finite; one pass over the memory, for finite values may have an infinite sum."""
    return bool(row.sum().isfinite()) or bool(row.isfinite().all())


def _digest(row: torch.Tensor) -> int:
    """A number below 2^32 that is the same for the same bits, and most likely another one for others."""
    words = row.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[row.element_size()])
    if row.device.type != "cpu":
        return int(words.sum(dtype=torch.int64)) % 2**32
    array = words.numpy()  # whose sums of whole numbers take a third of the time
    return int(np.add.reduce(array, dtype=max(array.dtype, np.int32))) % 2**32
