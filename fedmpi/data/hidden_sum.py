"""Sums over all ranks of which no rank sees another one's part.

Every two ranks share random numbers, which one adds to its part and the other subtracts from its own: what a rank
sends to all is without meaning alone, and only in the sum the random numbers vanish. Numbers are whole multiples of
2^-1074, so the sum is exact in whatever order. A rank that knows all other parts can subtract them: of two ranks, each
always can.
"""

import itertools
import math
import os
from fractions import Fraction

import numpy as np

DIGITS = 1074  # binary ones after the point: those of the smallest float64
BYTES = 288  # of a number modulo 2^(8 BYTES): float64 have 1024 binary digits before the point


def hidden_sum(link, values):
    """[n] float64: the sums of all ranks' [n] finite numbers, correctly rounded. Collective on the link."""
    return np.array([part / 2**DIGITS for part in _totals(link, np.asarray(values, np.float64).tolist())])


def exact_hidden_sum(link, values):
    """The sums, as `Fraction`s, of all ranks' n numbers: float64, or sums of them. Collective on the link."""
    return [Fraction(part, 2**DIGITS) for part in _totals(link, values)]


def _totals(link, values):
    """The sums of all ranks' n numbers, times 2^DIGITS. Collective."""
    parts, modulus = [_as_whole(value) for value in values], 2 ** (8 * BYTES)
    if link.size > 1:
        masks = np.frombuffer(os.urandom(BYTES * len(parts) * link.size), np.uint8).reshape(-1, BYTES)
        wanted = [np.arange(len(parts)) + len(parts) * rank for rank in range(link.size)]
        received = link.alltoallv(masks, wanted, "hidden sums")
        for place in range(len(parts)):
            for rank in range(link.size):
                parts[place] += _number(masks[wanted[rank][place]]) - _number(received[wanted[rank][place]])
        own = np.frombuffer(b"".join((part % modulus).to_bytes(BYTES, "little") for part in parts), np.uint8)
        everyone = link.alltoallv(own.reshape(-1, BYTES), [np.arange(len(parts))] * link.size, "hidden sums")
        parts = [sum(map(_number, everyone[place :: len(parts)])) % modulus for place in range(len(parts))]
        parts = [part - modulus if part >= modulus // 2 else part for part in parts]
    return parts


def exact_sum(values):
    """The sum of finite float64 as a `Fraction`, of which nothing is rounded."""
    values, parts = np.asarray(values, np.float64).tolist(), []
    while part := math.fsum(itertools.chain(values, parts)):
        parts.append(-part)
    return -sum(map(Fraction, parts), Fraction())


def _as_whole(value):
    numerator, denominator = value.as_integer_ratio()
    return numerator * (2**DIGITS // denominator)


def _number(row):
    return int.from_bytes(row.tobytes(), "little")
