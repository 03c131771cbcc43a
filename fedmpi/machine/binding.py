"""Which cores a rank runs on: those near its GPU, where the system tells which they are.

It has run with one GPU in a node only. A mistake here could make a run slower, and does not change its results.
"""

import pathlib

import torch

from fedmpi.machine.cores import run_on, usable_cores
from fedmpi.machine.devices import number_on_node


def bind_to_near_cores(device, link):
    """Let this process run only on the cores near its GPU, if the ranks of the node have room there. Collective.

    Called after the number of torch's threads is set, and before they start and inherit it. What a launcher has bound
    more closely stays.
    """
    near = near_cores(device)
    places = link.allgather([number_on_node(f"cores {near}") if near else -1.0])[:, 0]
    num_sharing = int((places == places[link.rank]).sum())
    cores = cores_to_use(usable_cores(), near, num_sharing * torch.get_num_threads())
    if cores:
        run_on(cores)


def cores_to_use(usable, near, num_threads):
    """The cores to which a rank is bound, ascending; [] to leave it where it is.

    Args:
        usable: numbers of the cores on which it may run. near: of those near its GPU, [] if that is not known.
        num_threads: of all ranks that are to run on the near ones.
    """
    both = sorted({*usable} & {*near})
    return both if num_threads <= len(both) < len(usable) else []


def near_cores(device):
    """Numbers of the cores near a GPU; [] for the CPU, or if the system does not say."""
    if device.type == "cpu":
        return []
    return cores_near(pci_address(torch.get_device_module(device).get_device_properties(device)))


def pci_address(properties):
    """Where a GPU is on the PCI bus, like "0000:3b:00.0"; "" if torch does not say."""
    numbers = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    return "" if None in numbers else "{:04x}:{:02x}:{:02x}.0".format(*numbers)


def cores_near(address, devices="/sys/bus/pci/devices"):
    """Numbers of the cores near the device at a PCI address; [] if the system does not say."""
    try:
        text = (pathlib.Path(devices) / address / "local_cpulist").read_text()
        ends = [[int(end) for end in part.split("-")] for part in text.strip().split(",") if part]
    except (OSError, ValueError):
        return []
    return [core for first, *last in ends for core in range(first, (last or [first])[0] + 1)]
