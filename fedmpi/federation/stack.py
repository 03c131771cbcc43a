"""Several clients of a rank that take each local step at once: their rows are the rows of matrices."""

import torch

from fedmpi.federation.client import Stepping


class StackedClient(Stepping):
    """Some clients as an algorithm's `local_step` sees them: every row is [k, dim], row j that of client j.

    It has what these clients share (round, num_steps, step_index, ...). What they do not share, like `index` or
    `num_draws`, is an AttributeError.

    Args:
        clients: list of `Client`, which make equally many steps. rows: name -> [k, dim].
        oracle: answers for all of them: vectors are [k, dim], and a sample is one of each client.
    """

    def __init__(self, clients, rows, oracle):
        super().__init__(rows)
        self.round, self.num_steps, self.step_index = clients[0].round, clients[0].num_steps, -1
        self.oracle = oracle


class Stack:
    """Memory for the rows of K clients during their local steps; between them it contains nothing that is needed.

    Args:
        size: K, the largest number of clients.
        make_oracle: function(their oracles) -> oracle of all of them, see `StackedClient`.
    """

    def __init__(self, size, make_oracle):
        self.size, self._make_oracle = size, make_oracle
        self._rows = {}  # name -> [size, dim], from the first use on
        self._places = {}  # number of a client -> its row in them

    def __contains__(self, client):
        return client.index in self._places

    def put(self, client):
        """Copy the rows of a client, whose turn it is, into the next place."""
        place = self._places[client.index] = len(self._places)
        for name, row in client.rows.items():
            if name not in self._rows:
                self._rows[name] = torch.empty(self.size, len(row), dtype=row.dtype, device=row.device)
            self._rows[name][place].copy_(row)

    def join(self, clients):
        """The `StackedClient` of clients that were `put` one after the other."""
        first = self._places[clients[0].index]
        rows = {name: matrix[first : first + len(clients)] for name, matrix in self._rows.items()}
        return StackedClient(clients, rows, self._make_oracle([client.oracle for client in clients]))

    def take(self, client):
        """Copy the rows back to a client whose turn it is; before others are put, all must be taken."""
        place = self._places.pop(client.index)
        for name, row in client.rows.items():
            row.copy_(self._rows[name][place])
