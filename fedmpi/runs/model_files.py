"""Models and rows on disk: HDF5, and a state dict for plain PyTorch."""

import io

import h5py
import torch

from fedmpi.errors import UserError
from fedmpi.run_files import MODEL, MODEL_AND_ROWS


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
    # In memory first: the HDF5 library crashes if the disk fills up while it writes.
    hdf5 = io.BytesIO()
    with h5py.File(hdf5, "w") as file:
        for name, value in plain.items():
            file[f"model/{name}"] = value.numpy()
        for name, row in rows.items():
            file[f"rows/{name}"] = row.detach().cpu().numpy()
    _write(folder / MODEL_AND_ROWS, hdf5)
    # The one file that is not HDF5 or text: torch.load(..., weights_only=True) reads it. It contains
    # tensors under their names, and loading it in this way runs no pickled code.
    state_dict = io.BytesIO()
    torch.save(plain, state_dict)
    _write(folder / MODEL, state_dict)


def _write(path, content):
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(content.getbuffer())
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
