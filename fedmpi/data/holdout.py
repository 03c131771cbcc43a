"""Which of a client's training samples are held out, to choose settings by."""

import math

import numpy as np

from fedmpi.ground.streams import generator


def hold_out(num_samples, share, seed, client, groups=None):
    """A client's samples to train on, and those held out.

    Args:
        num_samples: n of the client. share: in [0, 1); ⌊share n⌋ samples are held out, drawn from
            the stream (seed, "holdout", client). client: the client's number.
        groups: [n] numbers; ⌊share m⌋ of the m groups are held out, and no group is divided. None: each is its own.

    Returns:
        (training, held_out): int64 indices in ascending order; if none are held out, `training` is a slice,
        so that indexing with it copies nothing.
    """
    if groups is not None:
        is_held = np.isin(groups, (known := np.unique(groups))[hold_out(len(known), share, seed, client)[1]])
        return np.flatnonzero(~is_held), np.flatnonzero(is_held)
    num_held_out = math.floor(share * num_samples + 1e-9)
    if not num_held_out:
        return slice(None), np.empty(0, dtype=np.int64)
    order = generator(seed, "holdout", client).permutation(num_samples)
    return np.sort(order[num_held_out:]), np.sort(order[:num_held_out])
