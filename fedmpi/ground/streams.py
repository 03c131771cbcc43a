"""Random streams, each derived from what it is for and never from global state.

A stream's key is (seed, purpose, client, round or step), so the numbers that a client draws do not
depend on which rank holds it, on what other clients drew, or on where a run was resumed.
"""

import hashlib

import numpy as np

# A client's minibatches are numbered 0, 1, 2, ... in the order of its draws. Two further batches have these numbers:
FIRST = -1  # the initial batch, which may be larger
WHOLE = -2  # all data of the client


def derive(seed: int, *purpose: object) -> int:
    """A 63-bit seed for the stream named by `purpose` (words and integers) under `seed`."""
    text = "/".join(map(str, (seed, *purpose)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(seed: int, *purpose: object) -> "np.random.Generator":
    """A fresh `numpy.random.Generator` at the beginning of the stream named by `purpose`."""
    return np.random.Generator(np.random.Philox(derive(seed, *purpose)))
