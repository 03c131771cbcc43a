"""What a transport is."""

import abc
import dataclasses

SMALLEST_GAIN = 64 << 10  # bytes of a block; below, what others than Allreduce do first costs more than it gains
COMPARED = 2  # averages: a first one could be right because the memory is still zero


class Unavailable(Exception):
    """The transport cannot serve a block here; raised on all ranks or on none. The text says why."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """What decides which transports suit a block; the same on all ranks.

    Attributes:
        nbytes: of the block. device: type of the device on which it is to lie, "cpu" or "cuda"; "" if some ranks
            have it on the CPU and others on a GPU.
        smallest_node: number of ranks on the node with the fewest. num_nodes: that the ranks are on.
        gpus_are_shared: whether several ranks use the same GPU.
    """

    nbytes: int
    device: str
    smallest_node: int
    num_nodes: int
    gpus_are_shared: bool = False


class Transport(abc.ABC):
    """One way to sum blocks over the ranks. Collective: every rank makes the same calls in the same order.

    A transport averages the blocks that it allocated. It may rely on this: every rank fills its own block, then
    all ranks call `average`; between two averages no rank writes to another rank's block.

    Attributes:
        name: on the command line.
        preference: of the transports that suit a block, ``--transport auto`` takes the one with the largest; in this
            order they are also asked which of them owns a block.
        description: for the closing table of a run.
        num_compared: how many averages are still to be compared with MPI's of the same blocks in host memory, because
            the transport has not run where it belongs.

    Args:
        topology: the `Topology` of the ranks.
    """

    name = ""
    preference = 0
    description = ""
    num_compared = 0

    def __init__(self, topology):
        self.topology = topology

    @classmethod
    @abc.abstractmethod
    def suits(cls, facts):
        """Whether ``--transport auto`` should use it for a block with such `Facts`."""

    @abc.abstractmethod
    def allocate(self, numel, dtype, device):
        """[numel] zeros.

        Raises:
            Unavailable: on all ranks or on none, if there is no such memory.
        """

    @abc.abstractmethod
    def owns(self, block):
        """Whether `block` is, or is part of, a block that this transport allocated."""

    @abc.abstractmethod
    def average(self, block, divisor, out):
        """out = (sum of `block` over all ranks) / divisor; see `Link.average`."""

    def neighbours(self, block):
        """The same part of the blocks of all ranks of this node, in rank order; None if a rank cannot read the others'.

        They hold what their owners wrote before the last collective call on the node.
        """
        return None

    def close(self):  # noqa: B027  most transports have nothing to free
        """Free the blocks; using them afterwards may end the process."""


def lies_in(part, block):
    """Whether a vector is part of a block."""
    return 0 <= part.data_ptr() - block.data_ptr() < block.nbytes and part.device == block.device


def choose(facts, classes, named="auto"):
    """The transport classes to try for a block with such `Facts`, in order; `named` by the user, or "auto"."""
    if named != "auto":
        return [cls for cls in classes if cls.name == named]
    return sorted((cls for cls in classes if cls.suits(facts)), key=lambda cls: -cls.preference)
