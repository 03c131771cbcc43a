"""The files of one checkpoint on their way to the disk: written at once, or by a thread while training goes on."""

import mmap
import threading

import torch

from fedmpi.runs.checkpoint import make_checkpoint_folder, sync_folder
from fedmpi.runs.state_file import write_state

WRITING, FAILED = 16, 32  # bits of `Federation.requests`, above those of `fedmpi.training.signals`
LARGE_TENSOR = 1 << 20  # bytes; copies go into memory of their own, which returns to the system


class CheckpointWriter:
    """The files of one checkpoint on their way to the disk.

    Args:
        number: of rounds. files: [(path, state)]. position: where the records end. members: the ranks that write.
        identity: of the run.

    Attributes:
        sizes: name -> (bytes, checksum) of the files written so far. problem: what went wrong, in one line, or None.
    """

    def __init__(self, number, files, position, members, identity):
        self.number, self._files, self.position, self.members = number, files, position, members
        self._identity = identity
        self.sizes, self.problem, self._thread = {}, None, None

    @property
    def bits(self):
        """WRITING until the end, then 0 or FAILED."""
        is_writing = self._thread is not None and self._thread.is_alive()
        return WRITING if is_writing else FAILED if self.problem else 0

    def start(self):
        """Begin to write while training goes on."""
        self._thread = threading.Thread(target=self.run, name="checkpoint", daemon=True)
        self._thread.start()

    def run(self):
        """Write the files."""
        path = None
        try:
            for path, state in self._files:
                make_checkpoint_folder(path.parent, self._identity)
                self.sizes[path.name] = write_state(path, state)
            for folder in {path.parent for path, _ in self._files}:
                sync_folder(folder)
        except OSError as error:
            self.problem = f"{path}: {error.strerror or error}"
        except BaseException as error:  # noqa: BLE001  a thread's error is lost otherwise
            self.problem = f"{path}: {type(error).__name__}: {error}"
        self._files = []  # their memory is free from now on

    def wait(self):
        """Return when the files are written."""
        if self._thread is not None:
            self._thread.join()


def copied(files):
    """Files with copies of their tensors."""
    return [
        (path, {name: _copy(value) if isinstance(value, torch.Tensor) else value for name, value in state.items()})
        for path, state in files
    ]


def _copy(tensor):
    """A copy in the memory of the CPU; a large one in memory that malloc does not keep."""
    if tensor.nbytes < LARGE_TENSOR:
        return tensor.detach().cpu().clone()
    memory = torch.frombuffer(mmap.mmap(-1, tensor.nbytes), dtype=tensor.dtype)
    return memory.view(tensor.shape).copy_(tensor.detach())


def available_memory():
    """Bytes of this machine's memory that are available without swapping; 0 if the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return 0
