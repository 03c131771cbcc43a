"""What must be equal on all ranks, compared before any work."""

import hashlib
import importlib.metadata

import mpi4py
import torch
from torch.nn.parameter import is_lazy

from fedmpi.comm.agreement import check_equal, difference
from fedmpi.comm.sums.mpi import mpi_name
from fedmpi.ground.machine.versions import source_digest, versions
from fedmpi.ground.text import Log

log = Log(__name__)


def check_software(link):
    """Check that all ranks run the same fedmpi; other versions of what it stands on are only said. Collective.

    Raises:
        AgreedUserError: on every rank.
    """
    if link.size == 1:
        return
    found = all_versions()
    check_equal(link, {"fedmpi": found.pop("fedmpi")}, "install the same fedmpi everywhere")
    others = difference(link, found)
    if others and link.rank == 0:
        log.warning(f"the ranks differ: {others}; numbers may round differently")


def all_versions():
    """Name -> version of fedmpi, with a digest of its files, and of what it stands on."""
    found = versions()
    found["fedmpi"] += f" ({source_digest()})"
    return found | {"mpi4py": mpi4py.__version__, "h5py": importlib.metadata.version("h5py"), "MPI": mpi_name()}


SHOWN = 4  # values of a tensor in a message


def check_same_model(link, module, hint, is_hashed=lambda tensor: True):
    """Check that all ranks hold the same model: names, shapes, types, order in memory, and values. Collective.

    Args:
        hint: the end of the message, after the model's name.
        is_hashed: called with a parameter or buffer: whether its values must be equal, too.

    Raises:
        AgreedUserError: on every rank, with the first entry that differs, and on which ranks.
    """
    entries = {}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "buffer"
        if is_lazy(tensor):
            entries[f"{kind} '{name}'"] = "without a shape yet"
            continue
        words = [f"{list(tensor.shape)}", f"{tensor.dtype}"]
        if not tensor.is_contiguous():
            words.append(f"with strides {tensor.stride()}")
        if kind == "parameter" and not tensor.requires_grad:
            words.append("frozen")
        if is_hashed(tensor):
            words.append(f"with {describe_values(tensor)}")
        entries[f"{kind} '{name}'"] = " ".join(words)
    check_equal(link, entries, f"model {type(module).__name__} {hint}")


def describe_values(tensor):
    """The values of a tensor as text, which are equal if the texts are."""
    return f"values {tensor.tolist()}" if tensor.numel() <= SHOWN else f"hash {digest(tensor)}"


def digest(tensor):
    """16 characters that differ if the values of two tensors differ."""
    content = tensor.detach().cpu().contiguous().reshape(-1)
    content = content.view(torch.uint8) if content.numel() else content  # an empty one may have a stride of 0
    return hashlib.blake2b(content.numpy(), digest_size=8).hexdigest()
