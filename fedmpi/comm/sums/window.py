"""Memory that the ranks of a node share, and sums over it without messages."""

import contextlib
import errno
import mmap
import os
import secrets

import torch

from fedmpi.comm.solo import as_operand
from fedmpi.comm.start.shared_memory import OURS, SHARED_FOLDER
from fedmpi.ground.errors import UserError

CACHE_LINE = 64  # bytes; two ranks never write to the same one
STRIP = 65536  # elements of each vector that are in the cache at once, per thread


class NoWindow(Exception):
    """The node's shared memory does not hold the block."""


class NodeWindow:
    """One vector per rank of a node, each of them readable and writable by all ranks.

    Collective on `node`. Each rank's memory ends with the last tensor that shares its storage, not with the window: a
    view that is still held stays valid.

    Args:
        node: `Communicator` of ranks that share memory.
        numel, dtype: of every rank's vector; the same on all ranks.

    Attributes:
        vectors: [numel] each, in rank order; zeros at first. mine: this rank's own.

    Raises:
        NoWindow: on all ranks or on none, if there is too little shared memory.
    """

    def __init__(self, node, numel, dtype):
        self._node, self._itemsize = node, dtype.itemsize
        nbytes = -(-numel * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE  # no page has two owners
        memory = _map_together(node, nbytes)
        self.vectors = [
            torch.frombuffer(memory, dtype=dtype, count=numel, offset=rank * nbytes) for rank in range(node.size)
        ]
        self.mine = self.vectors[node.rank]
        self._begin = self.mine.data_ptr()

    def offset(self, vector):
        """Where a contiguous vector begins in `mine`, in elements; None if it is not part of it.

        Raises:
            UserError: if torch has moved `mine`, and all that lies in it, to memory that the other ranks do not see.
        """
        if self.mine.data_ptr() != self._begin:
            raise UserError(
                "the model's memory was moved by share_memory(), or because its tensors were sent to another process: "
                "send copies, like {name: value.clone() for name, value in model.state_dict().items()}"
            )
        offset = vector.data_ptr() - self._begin
        return offset // self._itemsize if 0 <= offset < self.mine.numel() * self._itemsize else None

    def slices(self, start, stop, number):
        """[start, stop) as `number` consecutive slices, cut at multiples of a cache line."""
        return slices(start, stop, number, self._itemsize)

    def reduce(self, part, finish=None):
        """Sum a slice of all vectors into the first vector. Not collective.

        Pairwise in rank order, (a0 + a1) + (a2 + a3), as `RowStore` adds the clients of a rank: the
        bits depend neither on how the vectors are sliced nor on which rank is first. The slice of the other
        vectors is overwritten.

        Args:
            part: a slice of a vector.
            finish: `finish(strips)`, called while a strip of the slice is in the cache, with that strip of every
                vector; the first one contains the sum.
        """
        for strip in self.strips(part):
            strips = [vector[strip] for vector in self.vectors]
            distance = 1
            while distance < len(strips):
                for left in range(0, len(strips) - distance, 2 * distance):
                    strips[left].add_(strips[left + distance])
                distance *= 2
            if finish is not None:
                finish(strips)

    def strips(self, where):
        """A slice as consecutive short ones that pass through the cache."""
        strip = STRIP * torch.get_num_threads()
        return [slice(begin, min(begin + strip, where.stop)) for begin in range(where.start, where.stop, strip)]

    def synchronise(self):
        """Make the writes of every rank of the node visible to all of them. Collective on the node."""
        self._node.barrier()  # the messages that it waits for order the writes, too

    def free(self):
        """Let go of the vectors. Not collective."""
        self.vectors, self.mine = [], None


class NodeCopy:
    """A vector of values that all ranks have, once for the ranks of a node: each writes its part of it.

    Collective on `node`. For the arguments and NoWindow see `NodeWindow`.

    Attributes:
        vector: [numel], zeros at first; to be read, and to be written to by all ranks at once and equally.
    """

    def __init__(self, node, numel, dtype):
        self._node = node
        page = mmap.PAGESIZE // dtype.itemsize
        share = -(-numel // (node.size * page)) * page  # elements; no page has two owners
        memory = _map_together(node, share * dtype.itemsize)
        self.vector = torch.frombuffer(memory, dtype=dtype, count=numel)
        self._part = slice(min(numel, node.rank * share), min(numel, (node.rank + 1) * share))

    def take(self, values):
        """Let it have other [numel] values, the same on all ranks of the node; for them all if it returns."""
        self.vector[self._part].copy_(values[self._part])
        self._node.barrier()  # the messages that it waits for order the writes, too


def _map_together(node, nbytes):
    """Memory of `nbytes` for each rank of a node, one after the other, which all of them map. Collective on `node`.

    It is a file without a name as soon as all ranks have opened it: nothing is left behind by a job that is killed.

    Returns:
        an `mmap.mmap` of zeros.

    Raises:
        NoWindow: on all ranks or on none.
    """
    path = f"{SHARED_FOLDER}/{OURS}{node.allgather_bytes(secrets.token_bytes(16))[0].hex()}"
    is_first, file = node.rank == 0, -1

    def agreed(action):
        """What an action returns; it fails on all ranks if it fails on one."""
        result, code = None, 0
        try:
            result = action()
        except OSError as error:
            code = error.errno or errno.EIO
        code = max(int.from_bytes(other, "little") for other in node.allgather_bytes(code.to_bytes(4, "little")))
        if code in (errno.ENOSPC, errno.EDQUOT):
            raise NoWindow(f"{SHARED_FOLDER} has less than {nbytes * node.size:,} bytes left")
        if code:
            raise NoWindow(f"{SHARED_FOLDER} cannot be used: {os.strerror(code)}")
        return result

    try:
        file = agreed(lambda: os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600) if is_first else file)
        file = agreed(lambda: file if is_first else os.open(path, os.O_RDWR | os.O_NOFOLLOW))
        # Each its own part: a page lies in the memory (NUMA node) of the core that asks for it first.
        agreed(lambda: os.posix_fallocate(file, node.rank * nbytes, nbytes))
        return agreed(lambda: mmap.mmap(file, node.size * nbytes))
    finally:
        if is_first:
            with contextlib.suppress(OSError):
                os.unlink(path)
        if file >= 0:
            os.close(file)


def slices(start, stop, number, itemsize):
    """[start, stop) as `number` consecutive slices, cut at multiples of a cache line."""
    line = CACHE_LINE // itemsize
    inner = [(start + (stop - start) * part // number) // line * line for part in range(1, number)]
    edges = [start, *(max(start, edge) for edge in inner), stop]
    return [slice(a, b) for a, b in zip(edges, edges[1:])]


def divide_and_spread(parts, divisor):
    """Divide the first of some vectors by `divisor` and copy it to the others."""
    if divisor != 1:
        parts[0].div_(as_operand(divisor, parts[0]))
    for part in parts[1:]:
        part.copy_(parts[0])
