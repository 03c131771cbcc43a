"""A cost model of a round, fitted to measurements and projected to other hardware.

round = fixed + clients per rank * (client + q * step) + communication, where
communication = 2 ceil(log2 N) alpha + 2 (N - 1) / N * bytes * beta, the alpha-beta cost of an Allreduce
by reduce-scatter and allgather: alpha is a message's latency, 1 / beta a link's bandwidth.
"""

import dataclasses
import math
import re

import numpy as np

from fedmpi.ground.errors import UserError


@dataclasses.dataclass
class CostModel:
    """The fitted numbers, all in seconds (beta: per byte)."""

    fixed: float
    client: float
    step: float
    alpha: float
    beta: float

    def local(self, local_steps, clients_per_rank=1):
        """Seconds of a round without its communication."""
        return self.fixed + clients_per_rank * (self.client + local_steps * self.step)

    def communication(self, num_ranks, nbytes):
        """Seconds of one Allreduce of `nbytes`."""
        messages, share = allreduce_costs(num_ranks)
        return messages * self.alpha + share * nbytes * self.beta


def allreduce_costs(num_ranks):
    """(messages one after the other, share of the bytes that a rank sends): factors of alpha and beta."""
    if num_ranks == 1:
        return 0, 0.0
    return 2 * math.ceil(math.log2(num_ranks)), 2 * (num_ranks - 1) / num_ranks


def fit(features, seconds):
    """[k] coefficients >= 0 by which [n, k] features give [n] seconds > 0, of least squared relative errors."""
    from sklearn.linear_model import LinearRegression  # takes long to import

    features, seconds = np.asarray(features, float), np.asarray(seconds, float)
    model = LinearRegression(fit_intercept=False, positive=True)
    return model.fit(features / seconds[:, None], np.ones(len(seconds))).coef_


def fit_link(num_ranks, sizes, seconds):
    """(alpha, beta) from Allreduces of `sizes` bytes over `num_ranks` ranks."""
    messages, share = allreduce_costs(num_ranks)
    if messages == 0:
        return 0.0, 0.0
    return fit([[messages, share * nbytes] for nbytes in sizes], seconds)


def fit_rounds(points, seconds):
    """(fixed, client, step) from rounds without their communication; points: (q, clients per rank)."""
    return fit([[1, clients, clients * q] for q, clients in points], seconds)


@dataclasses.dataclass
class Projection:
    """What to predict a round for: hardware and sizes; one client per rank.

    Attributes:
        num_ranks: N. bandwidth: bytes/s, latency: s, of the link between ranks, or between nodes if there are several
            ranks on a node; None: as fitted.
        local_steps: q, num_parameters: of the model; None: those of the workload.
        ranks_per_node: they sum among themselves as was measured, and the nodes among each other over their links.
    """

    num_ranks: int
    bandwidth: float | None = None
    latency: float | None = None
    local_steps: int | None = None
    num_parameters: int | None = None
    ranks_per_node: int = 1


KEYS = {
    "N": "num_ranks", "bw": "bandwidth", "lat": "latency", "q": "local_steps", "parameters": "num_parameters",
    "per_node": "ranks_per_node",
}  # fmt: skip
UNITS = {
    "bw": {"B/s": 1, "KB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9, "Gb/s": 1.25e8, "GiB/s": 2**30},
    "lat": {"s": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9},
}
NUMBER = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[0-9]+)?"


def read_projection(text):
    """A `Projection` from text like "N=1024,bw=25GB/s,lat=2us,q=10,parameters=1e6".

    Raises:
        UserError: one line: what was given, what is allowed.
    """
    expected = 'expected like "N=1024,bw=25GB/s,lat=2us", also q=10, parameters=1e6, per_node=8'
    values = {}
    for item in text.split(","):
        key, _, value = item.strip().partition("=")
        match = re.fullmatch(rf"({NUMBER})\s*([A-Za-z/]*)", value)
        if key not in KEYS or not match:
            raise UserError(f"--project {item}: {expected}")
        units = UNITS.get(key, {"": 1})
        if match[2] not in units:
            raise UserError(f"--project {item}: expected a unit of {', '.join(filter(None, units)) or 'none'}")
        number = float(match[1]) * units[match[2]]
        if not 0 < number < math.inf:
            raise UserError(f"--project {item}: expected a finite number > 0")
        if key not in UNITS and number != int(number):
            raise UserError(f"--project {item}: expected a whole number")
        values[KEYS[key]] = number if key in UNITS else int(number)
    if "num_ranks" not in values:
        raise UserError(f"--project {text}: {expected}")
    projection = Projection(**values)
    if projection.num_ranks % projection.ranks_per_node:
        raise UserError(f"--project {text}: expected N to be a multiple of per_node")
    return projection


def project(model, projection, local_steps, nbytes):
    """(seconds of local work, seconds of communication) of a round with a projection's ranks and link."""
    there = dataclasses.replace(
        model,
        alpha=model.alpha if projection.latency is None else projection.latency,
        beta=model.beta if projection.bandwidth is None else 1 / projection.bandwidth,
    )
    communication = there.communication(projection.num_ranks // projection.ranks_per_node, nbytes)
    if projection.ranks_per_node > 1:
        communication += model.communication(projection.ranks_per_node, nbytes)
    return there.local(local_steps), communication
