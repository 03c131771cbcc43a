"""How a step size falls with time: factors of `step_size`, as functions of t = 0, 1, 2, ...

An algorithm asks for its step size of the moment by `self.eta(client)` (`fedmpi.algorithms.base`),
which says what t counts; the settings named `schedule...` choose one of these.
"""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Constant:
    """1 at any time."""

    def __call__(self, t):
        return 1.0


@dataclasses.dataclass(frozen=True)
class CubeRoot:
    """(w_t + σ² t)^(-1/3), the rate that the analyses of FAFED and STEM ask for.

    Source: FAFED, Eq. (5), η_t = ρ h̄ / (w_t + t)^(1/3) with w_t = max(w, W - t), so that the
    factor stays at W^(-1/3) until t = W - w; step_size is ρ h̄ there and κ̄ in STEM.

    Args:
        offset: w > 0. rate: σ² >= 0, 1 in FAFED. plateau: W, 1728 L³ q³ h̄³ in FAFED's theory.
    """

    offset: float = 1.0
    rate: float = 1.0
    plateau: float = 0.0

    def __call__(self, t):
        return max(self.offset + self.rate * t, self.plateau) ** (-1 / 3)


@dataclasses.dataclass(frozen=True)
class StepDecay:
    """Multiplied by `factor` after every `period`."""

    period: int
    factor: float

    def __call__(self, t):
        return self.factor ** (t // self.period)


@dataclasses.dataclass(frozen=True)
class CosineDecay:
    """From 1 down to `factor` at t = `period` along half a cosine; `factor` from then on."""

    period: int
    factor: float

    def __call__(self, t):
        done = min(t, self.period) / self.period
        return self.factor + (1 - self.factor) * (1 + math.cos(math.pi * done)) / 2
