"""Which rank reads which rows of a file that all ranks share, so that together they read it about once."""

import numpy as np

MOST_READ = 1.25  # times that the ranks may read the file in all before they rather exchange rows


class ClientRows:
    """The training rows of a rank's clients: bytes read and memory are proportional to its share.

    Parts that lie together in the file are read by their owner. Of parts that are scattered over
    it every rank would have to unpack every chunk; then each rank reads one contiguous piece of
    the file and hands the rows to their owners (`collect`).

    Args:
        source: a `fedmpi.data.source.Source`. parts: sorted indices of every client of the federation.
        clients: range of this rank's clients. rank, num_ranks: of the link.
    """

    def __init__(self, source, parts, clients, rank, num_ranks):
        self._parts, self._clients, self._num_rows = parts, clients, len(source.labels["train"])
        self._num_ranks, self._chunk = num_ranks, source.rows_at_once
        self._is_direct = self._chunks_touched() <= MOST_READ * self._num_chunks
        if self._is_direct:
            self._rows = {client: source.read("train", parts[client]) for client in clients}
        else:
            self._begin, end = self._piece(rank)
            self._rows = source.read("train", np.arange(self._begin, end))

    @property
    def _num_chunks(self):
        return -(-self._num_rows // self._chunk)

    def _chunks_touched(self):
        """How many chunks would be unpacked if every client read its own part.

        Less one per client: where parts are blocks, neighbours share the chunk at their edge.
        """
        return sum(len(np.unique(part // self._chunk)) - 1 for part in self._parts) + 1

    def _piece(self, rank):
        """(begin, end) of the rows that a rank reads for all: whole chunks."""
        edges = (self._num_chunks * r // self._num_ranks * self._chunk for r in (rank, rank + 1))
        return tuple(min(edge, self._num_rows) for edge in edges)

    def collect(self, link):
        """client -> [n, ...] rows of this rank's clients, in the order of their indices.

        Collective on the link. Needs memory for three times the rank's share while it works.
        """
        if self._is_direct:
            return self._rows
        if self._num_ranks == 1:
            return {client: self._rows[self._parts[client]] for client in self._clients}
        ranges = link.allgather([self._clients.start, self._clients.stop]).astype(int)
        begin, end = self._begin, self._begin + len(self._rows)
        wanted = [[self._within(client, begin, end) - begin for client in range(*edges)] for edges in ranges]
        wanted = [np.concatenate(of_rank) for of_rank in wanted]
        self._rows = link.alltoallv(self._rows, wanted)
        return self._sort_out(ranges[link.rank])

    def _within(self, client, begin, end):
        part = self._parts[client]
        return part[np.searchsorted(part, begin) : np.searchsorted(part, end)]

    def _sort_out(self, clients):
        """The received rows by client: they came piece by piece, and in each piece client by client."""
        pieces = [self._piece(rank) for rank in range(self._num_ranks)]
        taken = {client: [] for client in range(*clients)}
        offset = 0
        for piece in pieces:
            for client, rows in taken.items():
                number = len(self._within(client, *piece))
                rows.append(self._rows[offset : offset + number])
                offset += number
        return {client: np.concatenate(rows) for client, rows in taken.items()}
