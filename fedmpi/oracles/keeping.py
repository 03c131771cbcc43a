"""Passes that leave no trace in a client's buffers."""

import contextlib
from collections.abc import Iterator

from fedmpi.oracles.base import Client
from fedmpi.oracles.flat_module import FlatModule


def buffers_kept(flat: FlatModule, client: Client) -> contextlib.AbstractContextManager[None]:
    """A context after which the client's float and integer buffers are as before it."""
    return _buffers_restored(flat, client) if flat.num_buffers or client.counters else contextlib.nullcontext()


@contextlib.contextmanager
def _buffers_restored(flat: FlatModule, client: Client) -> Iterator[None]:
    counters = client.counters
    state = (client.buffers, *counters)
    before = [value.clone() for value in state]
    try:
        yield
    finally:
        for value, old in zip(state, before):
            value.copy_(old)
        client.counters = counters
        flat.point_counters_at(counters)
