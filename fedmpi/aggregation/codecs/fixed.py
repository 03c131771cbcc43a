"""Fixed point: whole numbers, whose sum does not depend on the order."""

import dataclasses
import functools
import math
from collections.abc import Sequence
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


def scratch(number: int) -> dict[Any, Array]:
    """Memory of every type in which `put_words` and `put_values` compute: type -> [number]."""
    return {kind: np.empty(number, kind) for kind in (np.float32, np.float64, np.longdouble)}


def put_words(values: Array, weight: float, unit: Any, memory: dict[Any, Array], words: Array) -> None:
    """words = values times weight times `unit`, rounded; `unit` is of `unit_of`, or an array of such."""
    kind, factor = unit.dtype.type, weight * unit
    if np.ndim(unit) == 0 and (exact := _as_power(factor, values.dtype)):
        kind, factor = values.dtype.type, exact  # values stay as they are; what becomes too small is rounded to 0
    scaled = memory[kind][: len(values)]
    if kind is not values.dtype.type:
        np.copyto(scaled, values)
        values = scaled
    np.multiply(values, factor, out=scaled)
    np.rint(scaled, out=scaled)
    np.copyto(words, scaled, casting="unsafe")


def put_values(words: Array, divisor: Any, memory: dict[Any, Array], values: Array) -> None:
    """values = words divided by a number of the wider type, or an array of such."""
    kind, exact = divisor.dtype.type, np.ndim(divisor) == 0 and _as_power(1 / divisor, np.dtype(np.float64))
    quotients = memory[np.float64 if exact else kind][: len(words)]
    np.copyto(quotients, words, casting="same_kind")
    if exact:
        np.multiply(quotients, exact, out=quotients)
    else:
        np.divide(quotients, divisor, out=quotients)
    np.copyto(values, quotients, casting="same_kind")


def put_mean_of_two(
    values: Sequence[tuple[float, Array]], unit: Any, divisor: Any, memory: dict[Any, Array], mean: Array
) -> bool:
    """mean = the sum of the words of two [(weight, float32 vector)], divided; without words, if that gives the same.

    The sum of two whole numbers of 24 bits, rounded to 53 bits and then to 24, is the sum in float32.

    Returns:
        whether it does: not if weights or divisor are no powers of two.
    """
    if len(values) != 2 or mean.dtype != np.float32 or np.ndim(unit):
        return False
    kind = np.dtype(np.float32)
    first, second = (_as_power(weight * unit, kind) for weight, _ in values)
    if not (first and second and (inverse := _as_power(1 / (divisor * unit), kind))):
        return False
    other = memory[np.float32][: len(mean)]
    np.multiply(values[1][1], second, out=other)
    np.rint(other, out=other)
    np.multiply(values[0][1], first, out=mean)
    np.rint(mean, out=mean)
    np.add(mean, other, out=mean)
    np.multiply(mean, inverse, out=mean)
    np.add(mean, 0, out=mean)  # no word is -0
    return True


@functools.lru_cache
def _as_power(factor: Any, kind: np.dtype[Any]) -> Any:
    """A power of two in a type, if a factor is one that products with finite values of the type have exactly; or 0."""
    is_one = np.finfo(kind).tiny <= factor <= np.finfo(kind).max and np.frexp(factor)[0] == 0.5
    return kind.type(factor if is_one else 0)


def exponent_above(largest: float) -> int:
    """The lowest E, a multiple of `STEP`, with |largest| < 2^E; 0 of what is not finite."""
    if not largest or not math.isfinite(largest):
        return 0 if largest else LOWEST
    return -(-math.frexp(largest)[1] // STEP) * STEP


def fraction_bits(exponent: int, num_terms: int) -> int:
    """F: words are multiples of 2^-F. The sum of `num_terms` words of values below 2^exponent is below 2^BITS."""
    return BITS - exponent - (num_terms - 1).bit_length()


def unit_of(fraction: int, dtype: torch.dtype) -> Any:
    """2^fraction, in the wider type of `dtype`; less if a sum of words divided by it would not be a number."""
    wide = WIDER[dtype]
    return np.ldexp(wide(1), min(fraction, np.finfo(wide).maxexp - BITS))
