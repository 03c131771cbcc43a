"""Whose error it is."""

import contextlib
from collections.abc import Iterator

from fedmpi.federation.client import Client


@contextlib.contextmanager
def named_in_errors(client: Client) -> Iterator[None]:
    """A context whose errors carry the number of the client at work, for the message that ends the job."""
    try:
        yield
    except BaseException as error:
        error.fedmpi_client = client.index  # type: ignore[attr-defined]  # read where the job ends
        raise
