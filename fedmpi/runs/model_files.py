"""Models on disk: the tensors (safetensors, HDF5), how to build the module again, and what its inputs are.

``model.json`` contains

    model:  {"class": dotted path of a `torch.nn.Module`, "arguments": name -> value} or null; an argument may be
            such a dict itself.
    task:   name of the task.
    input:  shape of one input; the module takes (value / divide_by - mean) / std, channels before height and width.
    class_names, feature_names, words: if the data have them.
    columns: of data from a table: how its columns become features (`fedmpi.data.formats.features.Columns`).
"""

import importlib
import io
import json
import math
import sys

import h5py
import safetensors.torch
import torch
from torch import nn

from fedmpi.errors import UserError
from fedmpi.run_files import CLIENT_MODEL, FORMER_MODEL, MODEL, MODEL_AND_ROWS, MODEL_DESCRIPTION

LAST_PART = f"{MODEL}.ready"  # the file until all ranks have said that the run has ended


def save_model(folder, named_values, rows, description):
    """Write the model files into a run folder; each is written completely or not at all.

    model.safetensors, by which a run is complete, gets its name from `complete`.

    Args:
        folder: a `pathlib.Path`.
        named_values: name -> tensor, as `torch.nn.Module.state_dict()` names parameters and buffers.
        rows: name -> [dim] tensor: the averaged and the server's rows (x, m, v, ...), for HDF5 only.
        description: the content of model.json.

    Raises:
        UserError: if a file cannot be written (full disk).
    """
    for name, content in _encode(_plain(named_values), rows, description):
        _write(folder / (LAST_PART if name == MODEL else name), content)


def complete(folder):
    """Give the last file that `save_model` wrote its name; nothing, if that is done.

    Raises:
        UserError: if it cannot be renamed.
    """
    try:
        if (folder / LAST_PART).exists():
            (folder / LAST_PART).replace(folder / MODEL)
    except OSError as error:
        raise UserError(f"{folder / MODEL}: cannot be written: {error.strerror}") from None


def _plain(named_values):
    """The same tensors on the CPU, each contiguous in memory of its own, as safetensors wants them."""
    return {name: value.detach().cpu().contiguous().clone() for name, value in named_values.items()}


def _encode(plain, rows, description):
    """(file name, its content) of each model file, one after the other; see `save_model`."""
    yield MODEL_AND_ROWS, _hdf5(plain, rows)
    yield MODEL_DESCRIPTION, (json.dumps(description, indent=1) + "\n").encode()
    yield MODEL, safetensors.torch.save(plain, metadata={"format": "pt"})


def check_savable(module, description):
    """Try to write the model files of a module, of each tensor one value, and to read them; nothing is left.

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
        first = {name: value.detach().reshape(-1)[:1].cpu().clone() for name, value in state.items()}
        content = dict(_encode(first, {}, description))
        if safetensors.torch.load(content[MODEL]).keys() != state.keys():
            raise UserError(f"{model}: its state dict has a name that {MODEL} cannot hold: {', '.join(state)}")
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001  a user's state_dict can raise anything
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{model}: its state dict cannot be saved: {why}") from error


def save_client_model(path, named_values):
    """Write one client's model, completely or not at all; its folder is made.

    Raises:
        UserError: if it cannot be written.
    """
    try:
        path.parent.mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"{path.parent}: cannot be created: {error.strerror}") from None
    _write(path, safetensors.torch.save(_plain(named_values), metadata={"format": "pt"}))


def load_model(folder, model=None, client=None):
    """The trained module of a run folder, in evaluation mode, on the CPU.

    Args:
        folder: a `pathlib.Path`.
        model: a `torch.nn.Module`, or a function without arguments that makes one, instead of the class that
            model.json names; None: that class.
        client: number of the client whose own model is wanted, of a run with personal layers; None: the averaged one.

    Returns:
        the module; its attribute `fedmpi` is the content of model.json.

    Raises:
        UserError: one line: what is missing, or does not fit.
    """
    state, description = read_state(folder, client), read_description(folder)
    if model is None:
        model = _build(folder, description.get("model"))
    elif not isinstance(model, nn.Module):
        model = model()
    try:
        model.to(next((value.dtype for value in state.values() if value.is_floating_point()), None))
        model.load_state_dict(state)
    except RuntimeError as error:
        raise UserError(f"{folder}: does not fit {type(model).__name__}: {' '.join(str(error).split())}") from None
    model.fedmpi = description
    return model.eval()


def has_client_models(folder):
    """Whether a run folder contains a model of each client, because layers were personal."""
    return any(folder.glob(CLIENT_MODEL.format(client="*")))


def read_state(folder, client=None):
    """Name -> tensor of the trained model, from model.safetensors or, in earlier versions' folders, model.pt.

    Args:
        folder, client: see `load_model`.

    Raises:
        UserError: if there is none, or it is damaged.
    """
    names = (MODEL, FORMER_MODEL) if client is None else (CLIENT_MODEL.format(client=client),)
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        if not folder.is_dir():
            hint = "no such folder"
        elif client is None:
            hint = "the run did not end"
        else:
            hint = "expected a client's number" if has_client_models(folder) else "its layers are not personal"
        raise UserError(f"{folder}: contains no {names[0]} ({hint})")
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        return torch.load(path, weights_only=True)
    except Exception as error:  # noqa: BLE001  both libraries raise errors of many kinds for damaged files
        raise UserError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None


def read_description(folder):
    """The content of a run folder's model.json; {} in folders of earlier versions, which have none.

    Raises:
        UserError: if it cannot be read.
    """
    path = folder / MODEL_DESCRIPTION
    try:
        description = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(description, dict):
        raise UserError(f"{path}: expected a dict")
    return description


def prepare_inputs(description, samples):
    """Samples as they are in a data file, as inputs of the trained module.

    Args:
        description: the content of model.json.
        samples: [n, ...] array: of images [n, height, width] or [n, height, width, channels].

    Returns:
        [n, *shape] float32 tensor.

    Raises:
        UserError: if the model has no such inputs, or they have another shape.
    """
    facts = description.get("input")
    if not facts:
        raise UserError(f"a model of task {description.get('task')} takes no samples from a file")
    values = torch.as_tensor(samples).to(torch.float32)
    mean, std = (torch.tensor(facts[name]).squeeze() for name in ("mean", "std"))
    inputs = (values / facts["divide_by"] - mean) / std
    if inputs.dim() == 4:
        inputs = inputs.permute(0, 3, 1, 2)
    shape = tuple(facts["shape"])
    if math.prod(inputs.shape[1:]) != math.prod(shape) or (inputs.dim() == 4 and tuple(inputs.shape[1:]) != shape):
        raise UserError(f"samples are {list(values.shape[1:])}: the model takes inputs of shape {list(shape)}")
    return inputs.reshape(-1, *shape)


def _class_named(folder, path):
    """A class of modules by its dotted path. A run folder is data: what it names is not imported, but for fedmpi's.

    Raises:
        UserError: if it is neither fedmpi's nor imported already.
    """
    module_name, _, class_name = path.rpartition(".")
    is_ours = module_name.partition(".")[0] == "fedmpi"
    module = importlib.import_module(module_name) if is_ours else sys.modules.get(module_name)
    cls = getattr(module, class_name, None)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise UserError(
            f"{folder}: its model is of class {path[:200]}, which is not imported: import {module_name[:200]} first if "
            "you trust it, or give the model: load(folder, model)"
        )
    return cls


def _build(folder, constructor):
    """The module that model.json describes, with initial parameters."""
    if not constructor:
        raise UserError(
            f"{folder}: {MODEL_DESCRIPTION} does not say how to build the model: give it, load(folder, model)"
        )
    try:
        cls = _class_named(folder, str(constructor["class"]))
        arguments = constructor["arguments"].items()
        given = {k: _build(folder, v) if isinstance(v, dict) and "class" in v else v for k, v in arguments}
        return cls(**given)
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001  importing and building a user's module can raise anything
        text = " ".join(str(error).split())
        raise UserError(f"{folder}: the model cannot be built: {type(error).__name__}: {text}") from error


def save_hdf5(path, named_values, rows):
    """Write the HDF5 file; arguments and errors are those of `save_model`, with the file's path."""
    _write(path, _hdf5(named_values, rows))


def _hdf5(named_values, rows):
    """The content of the HDF5 file."""
    # In memory first: the HDF5 library crashes if the disk fills up while it writes.
    hdf5 = io.BytesIO()
    with h5py.File(hdf5, "w") as file:
        for name, value in named_values.items():
            file[f"model/{name}"] = value.detach().cpu().contiguous().numpy()
        for name, row in rows.items():
            file[f"rows/{name}"] = row.detach().cpu().numpy()
    return hdf5.getbuffer()


def _write(path, content):
    """Write a file that appears only when it is complete.

    Raises:
        UserError: if it cannot be written.
    """
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
