"""Models and rows on disk: HDF5, and a state dict for plain PyTorch."""

import h5py
import torch

from fedmpi.errors import UserError


def save_model(folder, named_values, rows):
    """Write model.h5 and model.pt into a folder.

    Args:
        folder: a `pathlib.Path`.
        named_values: name -> tensor, as `torch.nn.Module.state_dict()` names parameters and buffers.
        rows: name -> [dim] tensor: the averaged and the server's rows (x, m, v, ...), for HDF5 only.

    Raises:
        UserError: if a file cannot be written (full disk).
    """
    plain = {name: value.detach().cpu().contiguous().clone() for name, value in named_values.items()}
    try:
        with h5py.File(folder / "model.h5", "w") as file:
            for name, value in plain.items():
                file[f"model/{name}"] = value.numpy()
            for name, row in rows.items():
                file[f"rows/{name}"] = row.detach().cpu().numpy()
        # The one file that is not HDF5 or text: what torch.load(..., weights_only=True) reads. It
        # holds tensors under their names, and loading it so runs no pickled code.
        torch.save(plain, folder / "model.pt")
    except (OSError, RuntimeError) as error:
        raise UserError(f"{folder}: the model cannot be written: {error}") from None
