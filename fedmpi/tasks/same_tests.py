"""Proof that the test data which a program gives as an object, for all ranks in common, are the same on all of them."""

import hashlib

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from fedmpi.data.same_files import allgather_salted, common_salt, in_groups
from fedmpi.ground.errors import AgreedUserError
from fedmpi.ground.generators import generators_kept, seed_all

FEW = 10  # items that are compared of a Dataset that reads or computes its items
HINT = (
    "expected the same on all ranks, each of which evaluates a part of them (fedmpi.Task.test_of gives each client "
    "test data of its own)"
)


def check_same_tests(link, dataset):
    """Check that a Dataset, or None, is the same on all ranks before labels of it are exchanged. Collective.

    Compared are the lengths and, of tensors, arrays, lists and tuples in memory, all values; of another Dataset, `FEW`
    items that are spread over it, read with the same seeds. Items that differ each time they are read are left out.

    Raises:
        AgreedUserError: on every rank.
    """
    if link.size == 1 or link.first_rank_where(dataset is not None) is None:
        return
    salt = common_salt(link)
    parts = _parts(dataset)
    if not in_groups(allgather_salted(link, salt, " ".join(parts))):
        return
    # Some may draw from generators of their own, or from the clock.
    varies = link.allgather([first != second for first, second in zip(parts, _parts(dataset))], "machinery").any(0)
    parts = [part for part, is_left_out in zip(parts, varies) if not is_left_out]
    different = in_groups(allgather_salted(link, salt, " ".join(parts)))
    if different:
        raise AgreedUserError(f"the test data are others on different ranks ({different}): {HINT}", link.rank == 0)


def _parts(dataset):
    """[FEW + 1] texts: digests of items, or "" if all values are in memory; then their digest, or the length."""
    found = "none" if dataset is None else _in_memory(dataset)
    return [*_items(dataset), f"{_length(dataset)} items"] if found is None else [*[""] * FEW, found]


def _in_memory(dataset):
    """The digest of all values of a Dataset whose items are in memory; None for another one."""
    kind = type(dataset)
    if kind is ConcatDataset:
        inner = [_in_memory(part) for part in dataset.datasets]
        return None if None in inner else " ".join(inner)
    if kind is Subset and type(dataset.dataset) is TensorDataset:
        indices = torch.as_tensor(list(dataset.indices), dtype=torch.int64)
        return " ".join(_digest(values[indices.to(values.device)]) for values in dataset.dataset.tensors)
    if kind is TensorDataset:
        return " ".join(map(_digest, dataset.tensors))
    return _digest(dataset) if kind in (torch.Tensor, np.ndarray, list, tuple) else None


def _length(dataset):
    try:
        return len(dataset)
    except Exception:  # noqa: BLE001  the user's; reading says what is wrong
        return 0


def _items(dataset):
    """[FEW] digests of items that are spread over a Dataset."""
    found, length = [], _length(dataset)
    with generators_kept():
        for number, index in enumerate(np.linspace(0, max(0, length - 1), FEW).astype(int).tolist()):
            seed_all(number, torch.device("cpu"))
            try:
                found.append(_digest(dataset[index]))
            except Exception as error:  # noqa: BLE001  the user's; reading says what is wrong
                found.append(type(error).__name__)
    return found


def _digest(value):
    digest = hashlib.sha256()
    _add(digest, value)
    return digest.hexdigest()


def _add(digest, value):
    """Add a value to a digest: tensors, arrays, images and numbers in lists, tuples and dicts; of others the type."""
    digest.update(f"{type(value).__name__};".encode())
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = value.to_dense() if value.layout != torch.strided else value
        digest.update(f"{value.dtype}{list(value.shape)}".encode())
        value = value.resolve_conj().resolve_neg().contiguous().reshape(-1)
        digest.update(value.view(torch.uint8).numpy() if value.numel() else b"")
    elif isinstance(value, np.ndarray) and value.dtype.kind != "O":
        digest.update(f"{value.dtype.str}{value.shape}".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, dict):
        for key, inner in value.items():
            _add(digest, key)
            _add(digest, inner)
    elif isinstance(value, list | tuple | np.ndarray):
        digest.update(f"{len(value)};".encode())
        for inner in value:
            _add(digest, inner)
    elif isinstance(value, bytes):
        digest.update(value)
    elif isinstance(value, str | int | float | complex | bool | np.generic | None):
        digest.update(f"{value!r};".encode())
    elif hasattr(value, "tobytes") and hasattr(value, "size"):  # an image of Pillow
        digest.update(f"{value.size}".encode())
        digest.update(value.tobytes())
