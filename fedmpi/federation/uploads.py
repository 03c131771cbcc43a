"""What happens to a client's rows between its last local step and the sum: masks, noise, clipping, compression.

A federation applies its uploads in order. Without any, nothing is copied and nothing is called.
"""

import abc


class Upload(abc.ABC):
    """Base of the stages that a client's rows pass before they are summed.

    Attributes:
        needs_start: whether `apply` reads the rows that the round began with; the store then keeps a copy of them.
        kept_rows: names of the sets of rows that the stage keeps for each client from round to round (the error that
            compression feeds back, for example); zeros at first.
    """

    needs_start = False
    kept_rows = ()

    @abc.abstractmethod
    def apply(self, client, rows, start, kept):
        """Change the rows of a client in place, before its weight is applied.

        Called once in every exchange of every participating client, also in the exchange of the start.

        Args:
            client: the `Client` whose rows these are; `client.index` and `client.round` name it and the round.
            rows: name -> [dim] of the rows that this exchange averages.
            start: name -> [dim] of the same rows as the round began with; None unless `needs_start`.
            kept: name in `kept_rows` -> {name of a row -> [dim]}.
        """
