"""Which of a client's training samples are kept aside, to choose settings by."""

import math

import numpy as np

from fedmpi.streams import generator


def hold_out(num_samples, share, seed, client):
    """A client's samples that it trains on, and those kept aside.

    Args:
        num_samples: n of the client. share: in [0, 1); ⌊share n⌋ samples are kept aside, drawn from
            the stream (seed, "holdout", client).

    Returns:
        (kept, held): int64 indices in ascending order; where none are held, `kept` is a slice, which
        copies nothing.
    """
    num_held = math.floor(share * num_samples + 1e-9)
    if not num_held:
        return slice(None), np.empty(0, dtype=np.int64)
    order = generator(seed, "holdout", client).permutation(num_samples)
    return np.sort(order[num_held:]), np.sort(order[:num_held])
