"""The losses of a round, and which of its values are not finite."""

import math


class Losses:
    """The losses of a rank's clients in one exchange.

    Attributes:
        total: their sum; totals: of each client. number: of losses.
        bad_client: the first client with a value that is not finite, or -1; bad_row: the position of its row with
            that value, -1 if it is the sum of its losses.
    """

    def __init__(self):
        self.total, self.totals, self.number, self.bad_client, self.bad_row = 0.0, [], 0, -1, -1

    def check_rows(self, client, block, names):
        """Find values that are not finite in what a client is about to send: a last gradient has no loss after it.

        Args:
            block: the client's rows that are exchanged now, contiguous. names: of these rows.
        """
        # One pass over the memory. Finite values may have an infinite sum.
        if self.bad_client >= 0 or block.sum().isfinite():
            return
        rows = [client.rows[name] for name in names]
        bad = next((n for n, row in enumerate(rows) if not row.isfinite().all()), None)
        if bad is not None:
            self.bad_client, self.bad_row = client.index, bad

    def add(self, client):
        """Take the losses that a client's oracle has collected."""
        total, number = client.oracle.take_losses()
        self.total, self.number = self.total + total, self.number + number
        self.totals.append(total)
        if not math.isfinite(total) and self.bad_client in (-1, client.index):
            self.bad_client, self.bad_row = client.index, -1
