"""How a round grows with q, clients, ranks and parameters: a model of few numbers, fitted and projected.

Model: round = fixed + clients per rank * (client + q * step) + communication, where
communication = 2 ceil(log2 N) alpha + 2 (N - 1) / N * bytes * beta, the alpha-beta cost of an Allreduce
by reduce-scatter and allgather: alpha is a message's latency, 1 / beta a link's bandwidth.
"""

import dataclasses
import math
import re

import numpy as np

from fedmpi.errors import UserError


def steps_of_allreduce(num_ranks):
    """(messages one after the other, share of the bytes that a rank sends): factors of alpha and beta."""
    if num_ranks == 1:
        return 0, 0.0
    return 2 * math.ceil(math.log2(num_ranks)), 2 * (num_ranks - 1) / num_ranks


def fit(features, seconds):
    """Coefficients >= 0 of a linear model, with the least sum of squared relative errors.

    Args:
        features: [n, k]. seconds: [n], > 0.
    """
    features, seconds = np.asarray(features, float), np.asarray(seconds, float)
    active = list(range(features.shape[1]))
    while True:
        solution = np.linalg.lstsq(features[:, active] / seconds[:, None], np.ones(len(seconds)), rcond=None)[0]
        if (solution >= 0).all() or len(active) == 1:
            break
        del active[int(np.argmin(solution))]
    coefficients = np.zeros(features.shape[1])
    coefficients[active] = np.maximum(solution, 0)
    return coefficients


@dataclasses.dataclass
class Model:
    """The fitted numbers, all in seconds (beta: per byte)."""

    fixed: float
    client: float
    step: float
    alpha: float
    beta: float

    def local(self, local_steps, clients_per_rank=1):
        """Seconds of a round beside its communication."""
        return self.fixed + clients_per_rank * (self.client + local_steps * self.step)

    def communication(self, num_ranks, nbytes):
        """Seconds of summing `nbytes` over the ranks."""
        messages, share = steps_of_allreduce(num_ranks)
        return messages * self.alpha + share * nbytes * self.beta


def fit_link(num_ranks, sizes, seconds):
    """(alpha, beta) from sums of `sizes` bytes over `num_ranks` ranks."""
    messages, share = steps_of_allreduce(num_ranks)
    if messages == 0:
        return 0.0, 0.0
    return fit([[messages, share * nbytes] for nbytes in sizes], seconds)


def fit_rounds(points, seconds):
    """(fixed, client, step) from rounds without their communication; points: (q, clients per rank)."""
    return fit([[1, clients, clients * q] for q, clients in points], seconds)


@dataclasses.dataclass
class Projection:
    """Where to: N ranks of one client each, a link, and optionally another q and number of bytes.

    Attributes:
        N, q: numbers; q None: the workload's. bw: bytes/s, lat: s; None: as fitted.
        parameters: of the model; None: the workload's.
    """

    N: int
    bw: float | None = None
    lat: float | None = None
    q: int | None = None
    parameters: int | None = None


UNITS = {
    "bw": {"B/s": 1, "KB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9, "Gb/s": 1.25e8, "GiB/s": 2**30},
    "lat": {"s": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9},
}


def read_projection(text):
    """A `Projection` from "N=1024,bw=25GB/s,lat=2us" (also q= and parameters=).

    Raises:
        UserError: one line: what came, what is allowed.
    """
    expected = 'expected like "N=1024,bw=25GB/s,lat=2us", also q=10, parameters=1e6'
    values = {}
    for word in text.split(","):
        key, _, value = word.strip().partition("=")
        match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*([A-Za-z/]*)", value)
        if key not in ("N", "bw", "lat", "q", "parameters") or not match:
            raise UserError(f"--project {word}: {expected}")
        unit = match[2]
        if unit not in UNITS.get(key, {"": 1}):
            raise UserError(f"--project {word}: expected a unit of {', '.join(UNITS.get(key, {})) or 'none'}")
        try:
            number = float(match[1]) * UNITS.get(key, {"": 1})[unit]
        except ValueError:
            raise UserError(f"--project {word}: {expected}") from None
        if number <= 0:
            raise UserError(f"--project {word}: expected a number > 0")
        if key not in UNITS and number != int(number):
            raise UserError(f"--project {word}: expected a whole number")
        values[key] = number if key in UNITS else int(number)
    if "N" not in values:
        raise UserError(f"--project {text}: {expected}")
    return Projection(**values)


def project(model, projection, local_steps, parameters, nbytes):
    """(seconds of local work, seconds of communication) of a round on what a projection describes."""
    here = dataclasses.replace(
        model,
        alpha=model.alpha if projection.lat is None else projection.lat,
        beta=model.beta if projection.bw is None else 1 / projection.bw,
    )
    scaled = nbytes * (projection.parameters or parameters) / parameters
    return here.local(projection.q or local_steps), here.communication(projection.N, scaled)
