"""How large the values are that clients send: what an aggregation of whole numbers has to know before it adds them."""

import itertools
import math
from collections.abc import Sequence

from fedmpi.aggregation.codecs.fixed import exponent_above
from fedmpi.federation.losses import NUM_TERMS, Losses, RoundReport, terms_of, when_in
from fedmpi.federation.rows import RowStore
from fedmpi.ground.errors import Diverged


class Scales:
    """Exponents of what clients send, for an aggregation with `needs_exponents`; for others, it does nothing.

    There is one of each row of an exchange, of the float buffers behind the rows together, of each buffer that is
    summed in float64, and of each number.

    Args:
        store: the `RowStore`.

    Attributes:
        most: how many there are at most, with those of `terms_of`; 0 if the aggregation needs none.
    """

    def __init__(self, store: RowStore) -> None:
        self._store, self._sent, beside = store, store.tail.sent, store.layout.beside
        numbers = beside.dim * len(beside.rows) if beside is not None else 0
        most = len(store.layout.rows) + 1 + sum(self._sent.is_wide) + numbers + NUM_TERMS
        # Where ranks do not know the weights of others, these are added, too.
        self._sums_weights = bool(getattr(store.aggregation, "hidden_weights", False))
        self.most = most + self._sums_weights if store.aggregation.needs_exponents else 0

    def begin(self, losses: Losses, num_rows: int) -> None:
        """Let the `Losses` of an exchange of so many rows find its exponents."""
        if not self.most:
            return
        others = itertools.count(num_rows + 1)
        self._of_rows, self._sent_before = [*range(num_rows)], {*self._sent.sent}
        self._of_buffers = [next(others) if is_wide else num_rows for is_wide in self._sent.is_wide]
        self._of_numbers = [next(others) for _ in self._store.beside.numbers]
        places = [*self._of_rows, *self._of_buffers, *self._of_numbers]
        losses.measure(places, self._store.aggregation.weights, num_rows + 1, self._sums_weights)

    def give(self, exponents: Sequence[int], losses: Losses, num_gradients: int, index: int) -> None:
        """Tell the aggregations what they need before they average, see `Aggregation.scale`.

        Args:
            exponents: of all ranks. num_gradients: of this rank, that were not reported before. index: of the round.

        Raises:
            Diverged: on every rank, if a buffer that is sent for the first time was not finite before.
        """
        if not self.most:
            return
        store, sent, found = self._store, self._sent, list(exponents)
        heaviest = 2.0 ** found[-1] if self._sums_weights else max(store.aggregation.weights.values())
        for k in sent.sent - self._sent_before:  # of clients that have not changed it, values that all ranks know
            largest = float(sent.parts[k].of(sent.agreed).abs().max()) * heaviest
            if not math.isfinite(largest):
                raise Diverged(f"{when_in(index)}: buffer '{sent.parts[k].name}' has values that are not finite")
            found[self._of_buffers[k]] = max(found[self._of_buffers[k]], exponent_above(largest))
        rows = [(store.layout.dim, found[place]) for place in self._of_rows]
        terms = terms_of(losses, num_gradients)
        exponents_of_terms = found[len(found) - len(terms) :]
        store.aggregation.scale(
            [*rows, (sent.sizes[0], found[len(rows)])], list(zip(terms, exponents_of_terms, strict=True))
        )
        for aggregation in store.beside.used:
            numbers = [(1, found[place]) for place in self._of_numbers]
            buffers = [(sent.parts[k].numel, found[self._of_buffers[k]]) for k in sent.wide_in_order()]
            aggregation.scale([*numbers, *buffers], [])

    def take(self, report: RoundReport) -> tuple[float, int]:
        """(mean loss, number of gradients), which the ranks have reported or, after `give`, added with the rows."""
        if not self.most:
            return report.mean, report.num_gradients
        total, number, num_gradients, *_ = self._store.aggregation.sums
        return total / number if number else math.nan, int(num_gradients)
