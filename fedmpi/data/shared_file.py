"""Ranks read one file together, so that all of them read it about once."""

import numpy as np

MAX_READ_FACTOR = 1.25  # times that the ranks may read the file in total; beyond that they exchange rows instead


class ClientRows:
    """The training rows of a rank's clients; bytes read and memory are proportional to their number.

    If each client's part is contiguous in the file, the client's rank reads it. If the parts are scattered,
    every rank would have to decompress every chunk; then each rank reads one contiguous piece of
    the file, and `collect` sends its rows to the ranks of their clients.

    Args:
        source: a `fedmpi.data.source.Source`. parts: sorted sample indices of every client of the federation.
        clients: range of this rank's clients. rank, num_ranks: of the link.
    """

    def __init__(self, source, parts, clients, rank, num_ranks):
        self._parts, self._clients, self._num_rows = parts, clients, len(source.labels["train"])
        self._num_ranks, self._chunk = num_ranks, source.rows_at_once
        self._is_direct = self._chunks_touched() <= MAX_READ_FACTOR * self._num_chunks
        if self._is_direct:
            self._rows = {client: source.read("train", parts[client]) for client in clients}
        else:
            self._begin, end = self._piece(rank)
            self._rows = source.read("train", np.arange(self._begin, end))

    @property
    def _num_chunks(self):
        return -(-self._num_rows // self._chunk)

    def _chunks_touched(self):
        """Number of chunks that all ranks would decompress if every client's part were read directly.

        One less per client: neighbouring blocks share the chunk at their edge, which is counted for both.
        """
        return sum(len(np.unique(part // self._chunk)) - 1 for part in self._parts) + 1

    def _piece(self, rank):
        """(begin, end) of the rows that a rank reads for all: whole chunks."""
        edges = (self._num_chunks * r // self._num_ranks * self._chunk for r in (rank, rank + 1))
        return tuple(min(edge, self._num_rows) for edge in edges)

    def collect(self, link):
        """client -> [n, ...] rows of this rank's clients, in the order of their indices.

        Collective on the link. While it runs, it needs three times the memory of the rank's rows.
        """
        if self._is_direct:
            return self._rows
        if self._num_ranks == 1:
            return {client: self._rows[self._parts[client]] for client in self._clients}
        ranges = link.allgather([self._clients.start, self._clients.stop], "machinery").astype(int)
        begin, end = self._begin, self._begin + len(self._rows)
        wanted = [  # rank -> positions in this rank's piece of the rows to send there, client by client
            np.concatenate([self._indices_within(client, begin, end) - begin for client in range(*clients)])
            for clients in ranges
        ]
        received, self._rows = link.alltoallv(self._rows, wanted, "samples"), None  # frees the piece
        return self._group_by_client(received)

    def _indices_within(self, client, begin, end):
        """The indices of a client's part that are in begin..end-1."""
        part = self._parts[client]
        return part[np.searchsorted(part, begin) : np.searchsorted(part, end)]

    def _group_by_client(self, received):
        """client -> rows, of rows received piece by piece and, within each piece, client by client."""
        rows = {client: [] for client in self._clients}
        offset = 0
        for piece in map(self._piece, range(self._num_ranks)):
            for client, pieces in rows.items():
                num_rows = len(self._indices_within(client, *piece))
                pieces.append(received[offset : offset + num_rows])
                offset += num_rows
        return {client: np.concatenate(pieces) for client, pieces in rows.items()}
