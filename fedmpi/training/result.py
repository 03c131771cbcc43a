"""Which iterate is the result of a run."""

import dataclasses
import math

import torch


@dataclasses.dataclass(frozen=True)
class Iterate:
    """An averaged model: the round after which it was, x [dim] and its float buffers."""

    round: int
    x: torch.Tensor
    buffers: torch.Tensor


class OutputRule:
    """The iterate that is to be the result, if not the last: the best seen, or that of a round drawn beforehand."""

    def __init__(self, rule, chosen_round, goal):
        self._rule, self._chosen, (self._metric, self._sign) = rule, chosen_round, goal
        self._iterate, self._best = None, -math.inf

    def see(self, number, federation, metrics):
        """Look at the model after round `number`."""
        if self._rule == "uniform":
            wanted = number == self._chosen
        elif self._rule == "best":
            value = self._sign * metrics.get(self._metric, math.nan)
            wanted = value > self._best
            self._best = max(self._best, value) if wanted else self._best
        else:
            wanted = False
        if wanted:
            self._iterate = Iterate(number, federation.server.x.clone(), federation.store.buffers.clone())

    def result(self):
        """(the `Iterate`, or None for the last; words that say which)."""
        if self._iterate is None:
            return None, "last iterate"
        how = "best by " + self._metric if self._rule == "best" else "drawn uniformly"
        return self._iterate, f"iterate of round {self._iterate.round} ({how})"
