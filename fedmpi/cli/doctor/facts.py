"""What one rank finds out about itself and its node."""

import dataclasses
import platform
import time

import torch

from fedmpi.comm.job.equality import all_versions
from fedmpi.ground.errors import UserError
from fedmpi.ground.machine.cores import choose_threads, online_cores, usable_cores
from fedmpi.ground.machine.devices import device_key, near_cores, pick_device


@dataclasses.dataclass(frozen=True)
class RankFacts:
    """One rank.

    Attributes:
        rank: its number. node: the node's name. leader: the lowest rank of its node, which identifies the node.
        cores: numbers of the cores that it may run on. cores_online: of the node. threads: that it will use.
        device: in words ("cpu", "cuda:0 (NVIDIA H100)"), or "" if there is no such device. device_key: identifies the
            physical device of a GPU, "" for a CPU. device_error: why there is none, or "".
        versions: name -> version of what must be the same on all ranks.
        time: seconds since 1970.
        near_cores: numbers of the cores that are near the GPU, [] if the system does not say.
    """

    rank: int
    node: str
    leader: int
    cores: list
    cores_online: int
    threads: int
    device: str
    device_key: str
    device_error: str
    versions: dict
    time: float
    near_cores: list = dataclasses.field(default_factory=list)


def describe_rank(link, device):
    """The `RankFacts` of this rank, for the run's setting `device`. Collective on the link's node."""
    neighbours = link.topology.node
    leader = int(neighbours.allgather([link.rank])[0, 0])
    name, key, error, near = "", "", "", []
    try:
        chosen = pick_device(device, link)
        key = device_key(chosen)
        name = (
            f"{chosen} ({torch.get_device_module(chosen).get_device_properties(chosen).name})" if key else str(chosen)
        )
        near = near_cores(chosen)
    except UserError as met:
        error = str(met)
    return RankFacts(
        rank=link.rank,
        node=platform.node().partition(".")[0],
        leader=leader,
        cores=usable_cores(),
        cores_online=online_cores(),
        threads=choose_threads(link)[0],
        device=name,
        device_key=key,
        device_error=error,
        versions=all_versions(),
        time=time.time(),
        near_cores=near,
    )
