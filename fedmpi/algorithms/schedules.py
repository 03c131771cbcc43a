"""How a step size falls with time: factors of `step_size`, as functions of t = 0, 1, 2, ..., and the settings that
choose one of them, which all algorithms have.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Protocol

from fedmpi.ground.errors import UserError
from fedmpi.ground.settings import setting


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
        return float(max(self.offset + self.rate * t, self.plateau) ** (-1 / 3))  # w_t + σ² t = max(w + σ² t, W)


@dataclasses.dataclass(frozen=True)
class StepDecay:
    """Multiplied by `factor` whenever t passes a multiple of `period`."""

    period: int
    factor: float

    def __call__(self, t: int) -> float:
        return float(self.factor ** (t // self.period))


@dataclasses.dataclass(frozen=True)
class CosineDecay:
    """From 1 down along half a cosine to `factor` at t = `period`; `factor` from then on."""

    period: int
    factor: float

    def __call__(self, t: int) -> float:
        done = min(t, self.period) / self.period
        return self.factor + (1 - self.factor) * (1 + math.cos(math.pi * done)) / 2


class Clock(Protocol):
    """What knows the time: the client or the server."""

    @property
    def iteration(self) -> int: ...  # local steps since the start
    @property
    def round_index(self) -> int: ...  # from 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheduled:
    """The settings of the step size's schedule, and what follows from them.

    Attributes:
        clock: what t of the schedule counts, "iteration" (local steps) or "round_index".
    """

    schedule: str = setting(
        "constant",
        "how the step size η falls with the time t (see schedule_every): constant; cube_root, η / (w_t + σ² t)^(1/3); "
        "step, multiplied by schedule_factor after every schedule_period; cosine, along half a cosine",
        among=("constant", "cube_root", "step", "cosine"),
    )
    schedule_every: int = setting(
        1, "t grows by 1 after so many local steps, or rounds in methods that change η only between rounds", least=1
    )
    schedule_offset: float = setting(1.0, "cube_root: w", above=0)
    schedule_rate: float = setting(1.0, "cube_root: σ²", least=0)
    schedule_plateau: float = setting(0.0, "cube_root: W in w_t = max(w, W - σ² t); with 0, w_t = w", least=0)
    schedule_period: int = setting(
        100, "step: t between two drops; cosine: t at which the step size stops falling", least=1
    )
    schedule_factor: float = setting(
        0.1, "step: factor at each drop; cosine: last step size divided by the first", least=0, most=1
    )

    if TYPE_CHECKING:
        step_size: float  # every algorithm declares it, with its own default

    clock: ClassVar[str] = "round_index"

    def eta(self, clock: Clock) -> float:
        """The current step size: `step_size` times its schedule.

        Args:
            clock: the client or the server, whose attribute named by the class's `clock` is t.
        """
        return self._eta_at(getattr(clock, self.clock))

    def alpha(self, clock: Clock, weight: float, scale: float | None) -> float:
        """The current weight of the fresh gradient: `weight` (α), or min(1, c η_{t-1}²) if c is given.

        Args:
            clock: see `eta`. weight: α in [0, 1]. scale: c > 0, or None.
        """
        if scale is None:
            return weight
        return min(1.0, scale * self._eta_at(getattr(clock, self.clock) - 1) ** 2)

    def _eta_at(self, t: int) -> float:
        return self._schedule(max(t, 0) // self.schedule_every) * self.step_size

    @functools.cached_property
    def _schedule(self) -> Callable[[int], float]:
        if not hasattr(self, "step_size"):
            raise UserError(
                f"algorithm {type(self).__name__}: it has no step size, which eta returns: expected a setting like "
                'step_size: float = fedmpi.setting(0.1, "η of the local steps", above=0)'
            )
        factors: dict[str, Callable[[int], float]] = {
            "constant": Constant(),
            "cube_root": CubeRoot(self.schedule_offset, self.schedule_rate, self.schedule_plateau),
            "step": StepDecay(self.schedule_period, self.schedule_factor),
            "cosine": CosineDecay(self.schedule_period, self.schedule_factor),
        }
        return factors[self.schedule]
