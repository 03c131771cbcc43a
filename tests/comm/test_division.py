"""Divisions on a device other than the CPU; torch's device `meta` stands in for it."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fedmpi.comm.solo import divide
from fedmpi.comm.sums.window import divide_and_spread


class Divisors(TorchDispatchMode):
    """Notes on which devices the divisors are."""

    def __init__(self):
        super().__init__()
        self.devices = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in (torch.ops.aten.div, torch.ops.aten.div_):
            self.devices.append(args[1].device.type if isinstance(args[1], torch.Tensor) else "number")
        return function(*args, **(kwargs or {}))


def test_the_divisor_of_a_block_on_a_device_lies_there():
    # By a number, a GPU multiplies with the reciprocal: sums in a given order would have other bits than the CPU's.
    blocks = [torch.empty(4, device="meta") for _ in range(2)]
    with Divisors() as divisors:
        divide(blocks[0], 3, blocks[1])
        divide_and_spread(blocks, 3)
    assert divisors.devices == ["meta", "meta"]


def test_it_divides_on_the_cpu_as_before():
    block = torch.arange(1.0, 5.0)
    divide(block, 3, block)
    assert torch.equal(block, torch.arange(1.0, 5.0) / 3)
