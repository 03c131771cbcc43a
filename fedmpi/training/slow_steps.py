"""The line about local steps that take far longer than they compute: why, and what to set."""

import math
import platform

import torch

from fedmpi.ground.machine.cores import core_quota, seconds_without_core
from fedmpi.ground.text import Log

log = Log(__name__)

LONG = 5.0  # seconds of local steps that are compared with their CPU time
SMALLEST_SHARE = 0.5  # of CPU time in them; less is said


class SlowSteps:
    """Compares wall and CPU time of a rank's local steps, and prints one line if they are far apart; for `observe`.

    The first rank of a node does it for all of the node. Steps on a GPU need no CPU time and are not compared.

    Args:
        link: a `Link`. device: of the rank.
    """

    def __init__(self, link, device):
        self._rank, self._is_done = link.rank, device.type != "cpu" or link.local_rank != 0
        self._before = 0.0, 0.0, seconds_without_core()

    def __call__(self, federation, round_index, step, client):
        """After a local step or a round, see `Federation`."""
        if self._is_done:
            return
        wall = federation.worked.wall()
        if wall - self._before[0] < LONG:
            return
        now = wall, federation.worked.cpu(), seconds_without_core()
        took, computed = now[0] - self._before[0], now[1] - self._before[1]
        if computed < SMALLEST_SHARE * took:
            waited = None if None in (now[2], self._before[2]) else now[2] - self._before[2]
            log.warning(
                f"rank {self._rank} on {platform.node()}: local steps of {computed:.1f} s CPU time took "
                f"{took:.1f} s: {_why(took - computed, waited)}"
            )
            self._is_done = True
        self._before = now


def _why(missing, waited):
    """What the steps waited for and what the user can do, as text.

    `missing`: seconds in which they did not compute; `waited`: of their threads for a core, None: unknown.
    """
    if waited is not None and waited < missing / 2:
        return "they waited, but not for a core; if it was for data, use a faster disk or more --task.workers"
    quota, threads = core_quota(), torch.get_num_threads()
    others = f"other processes, or the quota of {quota:g} cores," if math.isfinite(quota) else "other processes"
    fewer = "set --threads 1, " if threads > 1 else ""
    return f"{others} left no core to them; {fewer}start fewer ranks on this node, or end the other processes"
