"""Models on disk: the tensors (safetensors, HDF5), how to build the module again, and what its inputs are.

``model.json`` contains

    model:  {"class": dotted path of a `torch.nn.Module`, "arguments": name -> value} or null; an argument may be
            such a dict itself.
    task:   name of the task.
    input:  shape of one input; the module takes (value / divide_by - mean) / std, channels before height and width.
    class_names, feature_names, words: if the data have them.
    architecture: name of each part -> [its class, its settings, a digest of its code] (`fedmpi.oracles.architecture`).
    frozen: name -> fingerprint of each tensor that was not trained, if these are not in the files (`fingerprint`).
    columns: of data from a table: how its columns become features (`fedmpi.prepare.formats.features.Columns`).
"""

import contextlib
import importlib
import inspect
import io
import json
import math
import numbers
import os
import pathlib
import sys
import zlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import h5py
import numpy as np
import safetensors.torch
import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from fedmpi.data.samples import check_normalisation, input_shape
from fedmpi.ground.errors import UserError
from fedmpi.ground.files.own_files import check_regular
from fedmpi.ground.files.run_files import CLIENT_MODEL, MODEL, MODEL_AND_ROWS, MODEL_DESCRIPTION
from fedmpi.ground.generators import generators_kept
from fedmpi.ground.text import Log, short
from fedmpi.oracles.architecture import describe, difference, other_code, unwrapped
from fedmpi.oracles.flat_module import give_own_memory

log = Log(__name__)
Tensors = dict[str, torch.Tensor]  # by their names in a state dict

LARGEST_DESCRIPTION = 1 << 26  # bytes
LARGEST_BUFFER = 3 * 10**7  # values, of a model with few parameters: a mask of 5000 by 5000 fits
LAST_PART = f"{MODEL}.ready"  # the file until all ranks have said that the run has ended


def save_model(
    folder: pathlib.Path,
    named_values: Tensors,
    rows: Tensors | None,
    description: dict[str, Any],
) -> None:
    """Write the model files into a run folder; each is written completely or not at all.

    model.safetensors, by which a run is complete, gets its name from `complete`.

    Args:
        folder: a `pathlib.Path`.
        named_values: name -> tensor, as `torch.nn.Module.state_dict()` names parameters and buffers.
        rows: name -> [dim] tensor: the averaged and the server's rows (x, m, v, ...), for HDF5 only; None: no HDF5.
        description: the content of model.json.

    Raises:
        UserError: if a file cannot be written (full disk).
    """
    for name, content in _encode(_plain(named_values), rows, description):
        _write(folder / (LAST_PART if name == MODEL else name), content)


def complete(folder: pathlib.Path) -> None:
    """Give the last file that `save_model` wrote its name; nothing, if that is done.

    Raises:
        UserError: if it cannot be renamed.
    """
    try:
        if (folder / LAST_PART).exists():
            (folder / LAST_PART).replace(folder / MODEL)
    except OSError as error:
        raise UserError(f"{folder / MODEL}: cannot be written: {error.strerror}") from None


def _plain(named_values: Tensors) -> Tensors:
    """The same tensors on the CPU, each contiguous in memory of its own, as safetensors wants them."""
    return {name: value.detach().cpu().contiguous().clone() for name, value in named_values.items()}


def _encode(plain: Tensors, rows: Tensors | None, description: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(file name, its content) of each model file, one after the other; see `save_model`."""
    if rows is not None:
        yield MODEL_AND_ROWS, _hdf5(plain, rows)
    yield MODEL_DESCRIPTION, (json.dumps(description, indent=1) + "\n").encode()
    yield MODEL, safetensors.torch.save(plain, metadata={"format": "pt"})


def fingerprint(tensor: torch.Tensor) -> str:
    """A text for a tensor's type, shape and values: the sum of its words, and a checksum of 1000 values in order."""
    values = tensor.detach().contiguous().reshape(-1)
    samples = values[:: max(1, values.numel() // 1000)].contiguous().view(torch.uint8).cpu().numpy()
    words = values.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(values.itemsize, torch.int64))
    total = int(words.sum(dtype=torch.int64)) & (1 << 64) - 1
    return f"{values.dtype} {list(tensor.shape)} {total:x} {zlib.crc32(samples):x}"


def check_savable(module: nn.Module, description: dict[str, Any], has_rows: bool = True) -> None:
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
        rows: Tensors | None = {} if has_rows else None
        first = {name: value.detach().reshape(-1)[:1].cpu().clone() for name, value in state.items()}
        for name, value in first.items():
            _check_type(model, name, value, description, rows)
        content = dict(_encode(first, rows, description))
        if safetensors.torch.load(content[MODEL]).keys() != state.keys():
            raise UserError(f"{model}: its state dict has a name that {MODEL} cannot hold: {', '.join(state)}")
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001  a user's state_dict can raise anything
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{model}: its state dict cannot be saved: {why}") from error


def _check_type(model: str, name: str, value: torch.Tensor, description: dict[str, Any], rows: Tensors | None) -> None:
    """Check that the model files can hold a value of a tensor."""
    try:
        dict(_encode({name: value}, rows, description))
    except (KeyError, TypeError):
        raise UserError(
            f"{model}: '{name}' is of type {value.dtype}, which the model files cannot hold: expected another type, or "
            "register_buffer(..., persistent=False)"
        ) from None


def save_client_model(path: pathlib.Path, named_values: Tensors) -> None:
    """Write one client's model, completely or not at all; its folder is made.

    Raises:
        UserError: if it cannot be written.
    """
    try:
        path.parent.mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"{path.parent}: cannot be created: {error.strerror}") from None
    _write(path, safetensors.torch.save(_plain(named_values), metadata={"format": "pt"}))


@generators_kept(devices=())  # building a model draws its initial values
def load_model(
    folder: pathlib.Path,
    model: Any = None,
    client: int | None = None,
    trusted: Collection[str] = (),
    strict: bool = True,
) -> Any:
    """The trained module of a run folder, in evaluation mode, on the CPU.

    Args:
        folder: a `pathlib.Path`.
        model: a `torch.nn.Module`, or a function without arguments that makes one, instead of the class that
            model.json names; None: that class.
        client: number of the client whose own model is wanted, of a run with private layers; None: the only model.
        trusted: names of imported modules of which a function may make the model.
        strict: whether the model must be built as that of the run, if the folder says how that was; False: names and
            shapes of its tensors suffice.

    Returns:
        the module; its attribute `fedmpi` is the content of model.json.

    Raises:
        UserError: one line: what is missing, does not fit, or that each client has a model of its own.
    """
    if client is None and has_client_models(folder):
        raise UserError(f"{folder}: each client has a model of its own (--private): choose one, like client=0")
    state, description = read_state(folder, client), read_description(folder)
    if model is None:
        model = _build_limited(folder, description.get("model"), state, trusted)
    try:
        model = model if isinstance(model, nn.Module) else model()
        inner = unwrapped(model)
        with _restored_on_error(inner):
            parts = describe(inner)  # before `load_values` initialises what has no shape yet
            if not description.get("frozen"):
                inner.to(next((value.dtype for value in state.values() if value.is_floating_point()), None))
            load_values(inner, with_frozen(folder, inner, state, description, strict))
            if strict:
                _check_architecture(folder, description.get("architecture"), parts)
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001  a damaged file can contain tensors of any kind
        raise UserError(f"{folder}: does not fit {type(model).__name__}: {' '.join(str(error).split())}") from None
    model.fedmpi = description
    return model.eval()


def with_frozen(
    where: object, module: nn.Module, state: Tensors, description: dict[str, Any], strict: bool = True
) -> Tensors:
    """The saved tensors with those of a module that were not trained, and are not in the run's files.

    Args:
        where: the folder, for the message. module: has them. state: name -> tensor.
        description: see `read_description`.
        strict: whether they must have the values beside which the others were trained.

    Raises:
        UserError: if they have other values.
    """
    frozen = description.get("frozen")
    if not frozen:
        return state
    own = module.state_dict()
    values = {name: own[name] for name in frozen if name in own and name not in state}
    for name, value in values.items() if strict else ():
        if fingerprint(value) != frozen[name]:
            raise UserError(
                f"{where}: has the trained tensors only, and '{name}', which was not trained, has other values in this "
                "model than in the run's: expected the model with which the run began"
            )
    return {**values, **state}


def _check_architecture(folder: pathlib.Path, recorded: Any, parts: Any) -> None:
    """Check that a model, as `describe` gives it, is built as the recorded one; other code is only said."""
    if other := difference(recorded, parts):
        raise UserError(
            f"{folder}: is of another model: {other}; load(folder, model, strict=False) takes its values all the same"
        )
    if edited := other_code(recorded, parts):
        log.warning(f"{folder}: the code of {edited} has changed since it was trained")


@contextlib.contextmanager
def _restored_on_error(module: nn.Module) -> Iterator[None]:
    """A context after which a module's tensors are as before, if it ends by an error."""
    tensors = [tensor for tensor in (*module.parameters(), *module.buffers()) if not is_lazy(tensor)]
    before = [(tensor, tensor.data, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    except BaseException:
        for tensor, data, values in before:
            tensor.data = data
            if not torch.equal(data, values):
                data.copy_(values)
        raise


def load_values(module: nn.Module, values: Tensors) -> None:
    """`module.load_state_dict(values)`, also if a tensor of the module was made by `expand`.

    Raises:
        Exception: of any kind, if the values do not fit.
    """
    give_own_memory(module)
    for name, tensor in module.state_dict().items():
        if name in values and values[name].is_floating_point() != tensor.is_floating_point():
            raise TypeError(f"{name} is {values[name].dtype}, expected {tensor.dtype}")
    module.load_state_dict(values)


def has_client_models(folder: pathlib.Path) -> bool:
    """Whether a run folder contains a model of each client, because layers were personal."""
    return os.path.isdir(folder) and any(folder.glob(CLIENT_MODEL.format(client="*")))


def model_file(folder: pathlib.Path, client: int | None = None) -> pathlib.Path:
    """The path of the file with the trained tensors.

    Raises:
        UserError: if there is none.
    """
    if client is not None and (not isinstance(client, numbers.Integral) or not 0 <= client < 2**63):
        raise UserError(f"client = {short(client)}: expected the number of a client, 0 or more")
    path = folder / (MODEL if client is None else CLIENT_MODEL.format(client=client))
    if client is not None and os.path.islink(path.parent):
        raise UserError(f"{path.parent}: is a link: expected a folder; copy the folder itself")
    if not check_regular(path):
        if not os.path.isdir(folder):
            hint = "no such folder"
        elif client is None:
            hint = "the run did not end"
        else:
            hint = "expected a client's number" if has_client_models(folder) else "its layers are not personal"
        raise UserError(f"{folder}: contains no {path.relative_to(folder)} ({hint})")
    return path


def read_state(folder: pathlib.Path, client: int | None = None) -> Tensors:
    """Name -> tensor of the trained model; for the arguments see `load_model`.

    Raises:
        UserError: if there is none, or it is damaged.
    """
    path = model_file(folder, client)
    try:
        return safetensors.torch.load_file(path)
    except Exception as error:  # noqa: BLE001  the library raises errors of many kinds for damaged files
        raise UserError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None


def read_description(folder: pathlib.Path) -> dict[str, Any]:
    """The content of a run folder's model.json; {} if it has none, like the folder of a plain model file.

    Raises:
        UserError: if it cannot be read.
    """
    path = folder / MODEL_DESCRIPTION
    if not check_regular(path):
        return {}
    if path.stat().st_size > LARGEST_DESCRIPTION:
        raise UserError(f"{path}: has {path.stat().st_size:,} bytes: expected at most {LARGEST_DESCRIPTION:,}")
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read: {short(error)}") from None
    if not isinstance(description, dict):
        raise UserError(f"{path}: expected a dict")
    frozen = description.get("frozen") or {}
    if not isinstance(frozen, dict) or not all(map(_is_text, frozen.values())):
        raise UserError(f"{path}: frozen is {type(frozen).__name__} {short(frozen)}: expected name -> text")
    for key in ("class_names", "feature_names"):
        names = description.get(key) or []
        if not isinstance(names, list) or not all(map(_is_text, names)):
            raise UserError(f"{path}: {key} is {type(names).__name__} {short(names)}: expected a list of texts")
    return description


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value == value.encode(errors="ignore").decode()  # without half characters


def prepare_inputs(description: dict[str, Any], samples: Any) -> torch.Tensor:
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
    with np.errstate(over="ignore"):  # the caller refuses what is not finite
        values = torch.from_numpy(np.array(samples, dtype=np.float64))
    given = tuple(values.shape[1:])
    try:
        shape, per_value, mean, std = (facts[name] for name in ("shape", "divide_by", "mean", "std"))
        if list(input_shape(given)) != shape and len(given) > 2 and shape in ([*given], [1, *given]):
            values = values.movedim(1, -1) if shape == [*given] else values.unsqueeze(-1)  # channels first, or none
            given = tuple(values.shape[1:])
        is_flat = math.prod(given) == math.prod(shape) and (len(given) == 1 or (len(given) == 2 and len(shape) == 1))
        if list(input_shape(given)) != shape and not is_flat:
            raise UserError(f"samples are {list(given)}: the model takes inputs of shape {shape}")
        check_normalisation(mean, std, given, f"{MODEL_DESCRIPTION}: ")
        if not 0 < per_value < math.inf:
            raise ValueError(f"divide_by is {per_value}")
        mean, std = (torch.tensor(numbers, dtype=torch.float64).squeeze() for numbers in (mean, std))
        inputs = ((values / per_value - mean) / std).float()
        return (inputs.movedim(-1, 1) if inputs.dim() >= 4 else inputs).reshape(-1, *shape)
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        expected = "expected the shape, divide_by, mean and std that a run writes"
        raise UserError(f"{MODEL_DESCRIPTION}: input: {expected}: {type(error).__name__}: {short(error)}") from None


def _class_named(folder: pathlib.Path, path: str, trusted: Collection[str]) -> Any:
    """A class of modules, or a function that makes one, by its dotted path.

    A run folder is data: what it names is not imported, but for fedmpi's, and only functions of trusted modules are
    called: it could name any.

    Raises:
        UserError: if it may not be used.
    """
    module_name, _, class_name = path.rpartition(".")
    is_ours = module_name.partition(".")[0] == "fedmpi"
    module = importlib.import_module(module_name) if is_ours else sys.modules.get(module_name)
    cls = getattr(module, class_name, None)
    if isinstance(cls, type) and issubclass(cls, nn.Module) or (inspect.isfunction(cls) and module_name in trusted):
        return cls
    ways = f"give the model, load(folder, model), or predict with --import {module_name[:200]} if you trust it"
    if module is None:
        ways = f"import {module_name[:200]} first if you trust it, or {ways}"
        raise UserError(f"{folder}: its model is {path[:200]}, which is not imported: {ways}")
    kind = "a function, and it is not called unasked" if inspect.isfunction(cls) else "no class of modules"
    raise UserError(f"{folder}: its model is {path[:200]}, which is {kind}: {ways}")


def _build_limited(folder: pathlib.Path, constructor: Any, state: Tensors, trusted: Collection[str]) -> nn.Module:
    """See `_build`; a model that is far larger than the trained tensors `state` is refused before it fills the memory.

    Raises:
        UserError: if it is, or the model cannot be built.
    """

    left = 100 * sum(1000 + value.numel() for value in state.values()) + 10**6
    left_for_buffers = most = left + LARGEST_BUFFER

    def check(left: float) -> None:
        if left < 0:
            raise UserError(f"{folder}: {MODEL_DESCRIPTION} describes a far larger model than the one that was saved")

    def count(module: nn.Module, name: str, parameter: Any) -> None:
        nonlocal left
        left -= 1000 + (0 if is_lazy(parameter) else parameter.numel())
        check(left)

    def count_buffer(module: nn.Module, name: str, buffer: Any) -> None:
        nonlocal left_for_buffers
        left_for_buffers -= 1000 + (0 if buffer is None or is_lazy(buffer) else buffer.numel())
        check(left_for_buffers)

    hooks = (register_module_parameter_registration_hook(count), register_module_buffer_registration_hook(count_buffer))
    try:
        with _Sizes(lambda size: check(most - size)):
            return _build(folder, constructor, trusted)
    finally:
        for hook in hooks:
            hook.remove()


class _Sizes(TorchDispatchMode):
    """A context in which `check` gets the number of values of every new tensor before there is memory for it."""

    def __init__(self, check: Callable[[float], object]) -> None:
        super().__init__()
        self._check = check

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sizes = args[0] if args and isinstance(args[0], (list, tuple)) else args
        if sizes and all(type(size) in (int, float) for size in sizes):  # of empty, zeros, ...; or of arange, eye
            self._check(max(map(abs, sizes)) if sizes is args else math.prod(sizes))
        return function(*args, **(kwargs or {}))


def _build(folder: pathlib.Path, constructor: Any, trusted: Collection[str]) -> nn.Module:
    """The module that model.json describes, with initial parameters."""
    if not constructor:
        raise UserError(
            f"{folder}: {MODEL_DESCRIPTION} does not say how to build the model: give it, load(folder, model)"
        )
    try:
        cls = _class_named(folder, str(constructor["class"]), trusted)
        arguments = constructor["arguments"].items()
        given = {k: _build(folder, v, trusted) if isinstance(v, dict) and "class" in v else v for k, v in arguments}
        model = cls(**given)
        if not isinstance(model, nn.Module):
            raise TypeError(f"{constructor['class']} makes a {type(model).__name__}")
        return model
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001  importing and building a user's module can raise anything
        text = " ".join(str(error).split())
        raise UserError(f"{folder}: the model cannot be built: {type(error).__name__}: {text}") from error


def save_hdf5(path: pathlib.Path, named_values: Tensors, rows: Tensors) -> None:
    """Write the HDF5 file; arguments and errors are those of `save_model`, with the file's path."""
    _write(path, _hdf5(named_values, rows))


def _hdf5(named_values: Tensors, rows: Tensors) -> memoryview:
    """The content of the HDF5 file."""
    # In memory first: the HDF5 library crashes if the disk fills up while it writes.
    hdf5 = io.BytesIO()
    with h5py.File(hdf5, "w") as file:
        for name, value in named_values.items():
            file[f"model/{name}"] = value.detach().cpu().contiguous().numpy()
        for name, row in rows.items():
            file[f"rows/{name}"] = row.detach().cpu().numpy()
    return hdf5.getbuffer()


def _write(path: pathlib.Path, content: Any) -> None:
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
