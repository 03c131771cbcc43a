"""Fixed point: whole numbers, whose sum does not depend on the order."""

import dataclasses
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedmpi.aggregation.codecs.base import Codec

Array = npt.NDArray[Any]

BITS = 62  # of 64: the sum of all words has a sign, and stays below 2^62
STEP = 8  # exponents are multiples of it: few values, which change rarely
LOWEST = -1080  # an exponent that only zeros have: the smallest number above 0 is 2^-1074
# In which a value becomes a word, and a sum a mean.
WIDER: dict[torch.dtype, Any] = {torch.float32: np.float64, torch.float64: np.longdouble}


@dataclasses.dataclass(kw_only=True)
class Fixed(Codec):
    """Whole numbers of 64 bits: twice the bytes of float32, and exact sums.

    In it, the aggregation `mean` is the aggregation `reproducible`, which writes and reads the words: it knows how
    large the values of all clients are.
    """

    is_linear = True

    def encode(self, moves: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError(type(self).__doc__)

    def decode(self, words: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError(type(self).__doc__)


def put_words(values: Array, factor: Any, wide: Array, words: Array) -> None:
    """words = values times `factor`, rounded; `wide` is memory of `WIDER`, at least as long."""
    wide = wide[: len(values)]
    np.copyto(wide, values)
    np.rint(np.multiply(wide, factor, out=wide), out=wide)
    np.copyto(words, wide, casting="unsafe")


def put_values(words: Array, divisor: Any, wide: Array, values: Array) -> None:
    """values = words divided by a number; `wide` as of `put_words`."""
    wide = wide[: len(words)]
    np.copyto(wide, words)
    np.divide(wide, divisor, out=wide)
    np.copyto(values, wide, casting="same_kind")


def exponent_above(largest: float) -> int:
    """The lowest E, a multiple of `STEP`, with |largest| < 2^E; 0 of what is not finite."""
    if not largest or not math.isfinite(largest):
        return 0 if largest else LOWEST
    return -(-math.frexp(largest)[1] // STEP) * STEP


def fraction_bits(exponent: int, num_terms: int) -> int:
    """F: words are multiples of 2^-F. The sum of `num_terms` words of values below 2^exponent is below 2^BITS."""
    return BITS - exponent - (num_terms - 1).bit_length()


def factor_of(value: float, fraction: Any, dtype: torch.dtype) -> Any:
    """value 2^fraction, in the wider type of `dtype`; `fraction`: a whole number, or an array of them."""
    wide = WIDER[dtype]
    return np.ldexp(wide(value), np.minimum(fraction, np.finfo(wide).maxexp - BITS))
