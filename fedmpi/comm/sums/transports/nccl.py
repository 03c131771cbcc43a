"""Sums by NCCL, through torch.distributed.

It has not run on a GPU, so its first averages are compared with MPI's. On the CPU gloo stands in for NCCL, so that all
but NCCL itself is tested.
"""

import datetime
import socket
import threading

import torch

from fedmpi.comm.solo import divide
from fedmpi.comm.sums.transports.base import COMPARED, SMALLEST_GAIN, Transport, Unavailable, lies_in
from fedmpi.ground.errors import AgreedUserError

ADDRESS_BYTES = 128  # of "host:port" in the message that opens the group
OPENING = datetime.timedelta(seconds=60)  # for finding each other
CONNECTING = 120.0  # seconds, for the first sum
LONGEST_SUM = datetime.timedelta(days=7)  # a sum waits for the slowest rank; --timeout is for ranks that do not answer


class Nccl(Transport):
    """Blocks on a device, summed by a process group of torch.distributed that belongs to this transport alone.

    MPI only tells the ranks where they find each other. A default group of the user's is not touched.
    """

    name = "nccl"
    preference = 3
    description = "NCCL"
    num_compared = COMPARED

    def __init__(self, topology):
        super().__init__(topology)
        self._group, self._store, self._blocks = None, None, []

    @classmethod
    def suits(cls, facts):
        return facts.device == "cuda" and not facts.gpus_are_shared and facts.nbytes >= SMALLEST_GAIN

    def allocate(self, numel, dtype, device):
        block = torch.zeros(numel, dtype=dtype, device=device)
        if self._group is None:
            self._open(device)
        self._blocks.append(block)
        return block

    def owns(self, block):
        return any(lies_in(block, own) for own in self._blocks)

    def average(self, block, divisor, out):
        self._group.allreduce([block]).wait()  # on a GPU only its stream waits, so the division comes after the sum
        divide(block, divisor, out)

    def close(self):
        self._blocks, self._group, self._store = [], None, None

    def _open(self, device):
        """Make the group, and sum one number with it, because NCCL connects the ranks in its first sum. Collective.

        Raises:
            Unavailable: on all ranks, if it fails.
            AgreedUserError: on all ranks, if one is not connected in time: what it waits for cannot be ended.
        """
        world, problem, is_late, group = self.topology.world, "", False, None
        try:
            store, address = self._listen() if world.rank == 0 else (None, "")
        except (OSError, RuntimeError) as error:
            store, address, problem = None, "", str(error)
        address = _first_text(world, address)
        try:
            if not address:
                raise RuntimeError(problem or "rank 0 cannot be reached")
            host, _, port = address.rpartition(":")
            if store is None:
                store = torch.distributed.TCPStore(host, int(port), world.size, is_master=False, timeout=OPENING)
            group = _in_time(lambda: _connect(store, world, device), CONNECTING)
        except TimeoutError:
            is_late = True
        except (AttributeError, OSError, RuntimeError, ValueError) as error:
            problem = " ".join(str(error).split()) or type(error).__name__
        late = world.first_rank_where(is_late)
        if late is not None:
            text = f"transport = nccl: it did not connect rank {late} in {CONNECTING:g} s; use --transport staged"
            raise AgreedUserError(text, world.rank == late)
        failing = world.first_rank_where(bool(problem))
        if failing is not None:
            raise Unavailable(problem or f"rank {failing} cannot use it")
        self._group, self._store = group, store
        self.description = "NCCL" if device.type == "cuda" else "gloo in the place of NCCL"

    def _listen(self):
        """(the store that rank 0 serves, "host:port" at which the others find it)."""
        store = torch.distributed.TCPStore(
            "0.0.0.0", 0, self.topology.world.size, is_master=True, timeout=OPENING, wait_for_workers=False
        )
        return store, f"{'127.0.0.1' if self.topology.num_nodes == 1 else _address()}:{store.port}"


def _address():
    """Where other nodes find this one; its name, if its own tables know only an address inside the machine."""
    address = socket.gethostbyname(socket.gethostname())
    return socket.gethostname() if address.startswith("127.") else address


def _in_time(action, limit):
    """What `action()` returns or raises, called in a thread; TimeoutError if it takes longer, and it goes on there."""
    found = []

    def act():
        try:
            found.append((action(), None))
        except Exception as error:  # noqa: BLE001  raised again below
            found.append((None, error))

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(limit)
    if not found:
        raise TimeoutError
    result, error = found[0]
    if error is not None:
        raise error
    return result


def _connect(store, world, device):
    """The process group of all ranks, after a first sum."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)  # of this thread
    group = _make_group(store, world, device)
    first_sum = torch.ones(1, device=device)
    group.allreduce([first_sum]).wait()
    if first_sum.item() != world.size:
        raise RuntimeError(f"a sum of ones over {world.size} ranks is {first_sum.item():g}")
    return group


def _make_group(store, world, device):
    """The process group of all ranks: of NCCL for a GPU, of gloo for the CPU."""
    if device.type == "cpu":
        return torch.distributed.ProcessGroupGloo(store, world.rank, world.size, timeout=LONGEST_SUM)
    if device.type != "cuda":
        raise ValueError(f"NCCL does not serve devices of type {device.type}; use --transport staged")
    options = torch.distributed.ProcessGroupNCCL.Options()  # AttributeError if torch has no NCCL
    options._timeout = LONGEST_SUM
    return torch.distributed.ProcessGroupNCCL(store, world.rank, world.size, options)


def _first_text(world, text):
    """Rank 0's text, on all ranks. Collective."""
    return world.allgather_bytes(text.encode().ljust(ADDRESS_BYTES))[0].decode().strip()
