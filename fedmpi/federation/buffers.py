"""Which float buffers of a model the ranks average: those that training changes, and not masks, tables and scalers."""

from collections.abc import Iterable, Sequence

import torch

from fedmpi.oracles.flat_module import BufferPart

Run = tuple[BufferPart, bool, slice]
BUFFERS = "float buffers"  # their name among the rows that a client sends
BITS = 48  # of flags in a float64 of the message about losses
LARGE = 1e30  # from here on, the sum of some ranks' weighted values may be infinite in float32
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes of an element -> what compares its bits


class SentBuffers:
    """The float buffers of a model, and their places in what is summed over the ranks.

    A buffer is sent from the first exchange on in which a client of any rank has changed it; the ranks agree on it by
    flags in their message about losses. The others are constants, equal on all ranks, which nothing touches: a sum of
    n equal values, divided by n, is not always the value, and that of masks may be infinite.

    Values are summed in the dtype of the rows, behind them. In a float32 model, float64 buffers and masks of very large
    numbers are summed in float64, in a block of their own.

    Args:
        initial: [num_buffers] values on which all ranks agree.
        parts: [`fedmpi.oracles.flat_module.BufferPart`], all buffers in this vector.
        in_order: whether they stay in the order of the model, and are given to the aggregation as a whole, however few
            of the averages are used.

    Attributes:
        parts: the same. sent: set of the positions in `parts` that are sent. is_wide: which are summed in float64.
        agreed: [num_buffers] the values of those that are not sent.
        sizes, sent_sizes: (elements in the dtype of the rows, elements in float64) of all, and of those that are sent.
    """

    def __init__(self, initial: torch.Tensor, parts: Iterable[BufferPart] = (), in_order: bool = False) -> None:
        self.parts, self._dtype, self._in_order = list(parts), initial.dtype, in_order
        self.is_wide = [
            part.dtype.itemsize > initial.dtype.itemsize or _is_large(part.of(initial)) for part in self.parts
        ]
        self.sizes = [sum(p.numel for p, wide in zip(self.parts, self.is_wide) if wide == kind) for kind in (0, 1)]
        self.sent: set[int] = set()
        self._changed: set[int] = set()
        self.agree_on(initial)

    def agree_on(self, values: torch.Tensor, sent: Iterable[int] | None = None) -> None:
        """Begin anew with other values that are the same on all ranks; `sent`: positions, None: as before."""
        self.agreed, self._changed = values.clone(), set()
        self.sent = self.sent if sent is None else set(sent)
        self._lay_out()

    def _lay_out(self) -> None:
        """Give each buffer its place: first those that are sent, in the order of the model, then the others."""
        ends, self.sent_sizes = [0, 0], [0, 0]
        self._places: dict[int, slice] = {}
        for k in sorted(range(len(self.parts)), key=lambda k: (k not in self.sent and not self._in_order, k)):
            part, kind = self.parts[k], self.is_wide[k]
            self._places[k] = slice(ends[kind], ends[kind] + part.numel)
            ends[kind] += part.numel
            if k in self.sent or self._in_order:
                self.sent_sizes[kind] = ends[kind]
        self._checked: tuple[tuple[int, int] | None, dict[int, torch.Tensor]] = (
            None,
            {},
        )  # what `checked` returns, made once
        self.others = [k for k in range(len(self.parts)) if k not in self.sent]
        self._known: dict[tuple[int, ...], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._all_runs, self._sent_runs = self._runs(range(len(self.parts))), self._runs(sorted(self.sent))
        self._other_runs: list[
            tuple[slice, list[int]]
        ] = []  # neighbours among the others: (their place in the vector, positions)
        for k in self.others:
            place, members = self.parts[k].place(self._dtype.itemsize), [k]
            if self._other_runs and self._other_runs[-1][1][-1] == k - 1:
                before, earlier = self._other_runs.pop()
                place, members = slice(before.start, max(before.stop, place.stop)), [*earlier, k]
            self._other_runs.append((place, members))

    def _runs(self, positions: Iterable[int]) -> list[Run]:
        """[(part, kind, its place)]: neighbours of the rows' dtype as one, so that they are copied at once."""
        runs: list[Run] = []
        for k in positions:
            part, kind, place = self.parts[k], self.is_wide[k], self._places[k]
            if runs and part.dtype == runs[-1][0].dtype == self._dtype and kind == runs[-1][1]:
                last, _, before = runs[-1]
                if last.offset + last.numel == part.offset and before.stop == place.start:
                    runs[-1] = last._replace(numel=last.numel + part.numel), kind, slice(before.start, place.stop)
                    continue
            runs.append((part, kind, place))
        return runs

    def _views(
        self, runs: list[Run], values: torch.Tensor, tails: Sequence[torch.Tensor]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """[(a buffer's values, its place in what is summed)], views that are made once for each pair of vectors."""
        key = runs is self._sent_runs, values.data_ptr(), *(tail.data_ptr() for tail in tails)
        if key not in self._known:
            self._known[key] = [(part.of(values), tails[kind][place]) for part, kind, place in runs]
        return self._known[key]

    def pack(self, values: torch.Tensor, tails: Sequence[torch.Tensor]) -> None:
        """Copy a client's buffers into (the end of its rows, the float64 block), and notice which it has changed.

        `values` [num_buffers] lie in the same memory as long as they exist, like `tails`.
        """
        for buffer, tail in self._views(self._all_runs, values, tails):
            tail.copy_(buffer)
        if not self.others:
            return
        size = self._dtype.itemsize
        bits, agreed = values.view(_INTEGERS[size]), self.agreed.view(_INTEGERS[size])
        for run, members in self._other_runs:
            if not torch.equal(bits[run], agreed[run]):
                places = {k: self.parts[k].place(size) for k in members}
                self._changed |= {k for k, place in places.items() if not torch.equal(bits[place], agreed[place])}

    def wide_names(self) -> list[str]:
        """Names of the buffers that are sent, and summed in float64."""
        return [self.parts[k].name for k in sorted(self.sent) if self.is_wide[k]]

    def wide_in_order(self) -> list[int]:
        """Positions of the buffers that are summed in float64, in the order in which they lie there."""
        wide = (k for k, is_wide in enumerate(self.is_wide) if is_wide)
        return sorted(wide, key=lambda k: self._places[k].start)

    def put(self, values: torch.Tensor, tail: torch.Tensor) -> None:
        """Copy buffers into the end of some rows, but for those that are summed in float64."""
        for part, is_wide, place in self._all_runs:
            if not is_wide:
                tail[place].copy_(part.of(values))

    def put_constants(self, tail: torch.Tensor, is_zero: bool = False) -> None:
        """Let buffers that no client has changed, as far as this rank knows, be as agreed, or 0, in the end of rows."""
        for k in self.others:
            if not (self.is_wide[k] or k in self._changed):
                tail[self._places[k]] = 0 if is_zero else self.parts[k].of(self.agreed)

    def unpack(self, tails: Sequence[torch.Tensor], values: torch.Tensor) -> None:
        """Copy the averages of the buffers that are sent to where the model has them."""
        for buffer, tail in self._views(self._sent_runs, values, tails):
            buffer.copy_(tail)

    def checked(self, values: torch.Tensor) -> dict[int, torch.Tensor]:
        """Position -> values of the buffers that have to be finite: those that are or will be sent."""
        key = values.data_ptr(), len(self._changed)
        if key != self._checked[0]:
            self._checked = key, {k: self.parts[k].of(values) for k in sorted(self.sent | self._changed)}
        return self._checked[1]

    def flags(self) -> list[int]:
        """Which buffers a client of this rank has changed, of those not sent so far: bits of whole numbers."""
        bits = [int(k in self._changed) for k in self.others]
        groups = (bits[begin : begin + BITS] for begin in range(0, len(bits), BITS))
        return [sum(bit << place for place, bit in enumerate(group)) for group in groups]

    def send(self, flags: list[int]) -> list[torch.Tensor] | None:
        """From now on, send the buffers that a rank has changed: numbers as `flags` returns them, joined by OR.

        Returns None; or if there are new ones, where each element is in the order before, for both kinds.
        """
        new = {k for n, k in enumerate(self.others) if flags[n // BITS] >> n % BITS & 1}
        self._changed.clear()
        if not new:
            return None
        before = self._places
        self.sent |= new
        self._lay_out()
        if self._in_order:
            return None
        orders: list[list[int]] = [[], []]
        for k in sorted(self._places, key=lambda k: self._places[k].start):
            orders[self.is_wide[k]] += range(before[k].start, before[k].stop)
        return [torch.tensor(order, dtype=torch.int64) for order in orders]


def _is_large(values: torch.Tensor) -> bool:
    """Whether a buffer has finite values of `LARGE` and more, like the lowest number of its type in a mask."""
    values = values.float()
    return not values.is_meta and bool(((values.abs() >= LARGE) & values.isfinite()).any())
