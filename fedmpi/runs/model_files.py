"""Models and rows on disk: HDF5, and a state dict for plain PyTorch."""

import io

import h5py
import torch

from fedmpi.errors import UserError
from fedmpi.files import MODEL, MODEL_AND_ROWS


def save_model(folder, named_values, rows):
    """Write the two model files into a run folder; each is written completely or not at all.

    Args:
        folder: a `pathlib.Path`.
        named_values: name -> tensor, as `torch.nn.Module.state_dict()` names parameters and buffers.
        rows: name -> [dim] tensor: the averaged and the server's rows (x, m, v, ...), for HDF5 only.

    Raises:
        UserError: if a file cannot be written (full disk).
    """
    plain = {name: value.detach().cpu().contiguous().clone() for name, value in named_values.items()}
    for name, content in _encode(plain, rows):
        _write(folder / name, content)


def _encode(plain, rows):
    """(file name, its content) of each model file, one after the other; see `save_model`."""
    # In memory first: the HDF5 library crashes if the disk fills up while it writes.
    hdf5 = io.BytesIO()
    with h5py.File(hdf5, "w") as file:
        for name, value in plain.items():
            file[f"model/{name}"] = value.numpy()
        for name, row in rows.items():
            file[f"rows/{name}"] = row.detach().cpu().numpy()
    yield MODEL_AND_ROWS, hdf5
    # The one file that is not HDF5 or text: torch.load(..., weights_only=True) reads it. It contains
    # tensors under their names, and loading it in this way runs no pickled code.
    state_dict = io.BytesIO()
    torch.save(plain, state_dict)
    yield MODEL, state_dict


def check_savable(module):
    """Try to write the model files of a module, of each tensor one value, and throw them away.

    Raises:
        UserError: one line that names the entry of its state dict that cannot be saved, if one can be named.
    """
    model = f"model {type(module).__name__}"
    try:
        state = module.state_dict()
        for name, value in state.items():
            if not isinstance(value, torch.Tensor):
                raise UserError(
                    f"{model}: the entry '{name}' of its state dict is a {type(value).__name__}: expected tensors "
                    "only, nothing else is saved"
                )
        for _ in _encode({name: value.detach().reshape(-1)[:1].cpu() for name, value in state.items()}, {}):
            pass
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001  a user's state_dict can raise anything
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{model}: its state dict cannot be saved: {why}") from error


def _write(path, content):
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(content.getbuffer())
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
