"""How a step size falls with time: factors of `step_size`, as functions of t = 0, 1, 2, ...

An algorithm asks for its current step size by `self.eta(client)` (`fedmpi.algorithms.base`), which
says what t counts; the settings named `schedule...` choose one of these.
"""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Constant:
    """1 for all t."""

    def __call__(self, t: int) -> float:
        return 1.0


@dataclasses.dataclass(frozen=True)
class CubeRoot:
    """(w_t + σ² t)^(-1/3) with w_t = max(w, W - σ² t), the rate of the analyses of FAFED and STEM.

    The factor stays at W^(-1/3) until σ² t = W - w, and falls from then on.

    Source: FAFED, Eq. (5), η_t = ρ h̄ / (w_t + t)^(1/3), which has σ² = 1; step_size is ρ h̄ there
    and κ̄ in STEM.

    Args:
        offset: w > 0. rate: σ² >= 0. plateau: W >= 0; 0: w_t = w. It is 1728 q³ N² in FAFED's theory and 8000 q³ N² in
            FMGDA's (printed: 1728): with their q = (T/N²)^(1/3) longer than a run, so the step size never falls.
    """

    offset: float = 1.0
    rate: float = 1.0
    plateau: float = 0.0

    def __call__(self, t: int) -> float:
        return max(self.offset + self.rate * t, self.plateau) ** (-1 / 3)  # w_t + σ² t = max(w + σ² t, W)


@dataclasses.dataclass(frozen=True)
class StepDecay:
    """Multiplied by `factor` whenever t passes a multiple of `period`."""

    period: int
    factor: float

    def __call__(self, t: int) -> float:
        return self.factor ** (t // self.period)


@dataclasses.dataclass(frozen=True)
class CosineDecay:
    """From 1 down along half a cosine to `factor` at t = `period`; `factor` from then on."""

    period: int
    factor: float

    def __call__(self, t: int) -> float:
        done = min(t, self.period) / self.period
        return self.factor + (1 - self.factor) * (1 + math.cos(math.pi * done)) / 2
