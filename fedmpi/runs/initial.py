"""A trained model from a file, from which a new run starts."""

import pathlib
import stat
from collections.abc import Collection
from fnmatch import fnmatchcase as fnmatch
from typing import Any

import safetensors.torch
import torch

from fedmpi.federation.private import matching
from fedmpi.ground.errors import UserError
from fedmpi.ground.files.hdf5 import data_sets, readable
from fedmpi.ground.files.own_files import check_regular
from fedmpi.ground.files.run_files import CHECKPOINTS, MANIFEST, MODEL, MODEL_AND_ROWS, SERVER_STATE, find_checkpoints
from fedmpi.ground.text import Log
from fedmpi.oracles.architecture import difference, other_code
from fedmpi.runs.checkpoints.files import (
    Damaged,
    checkpoint_folder,
    describe_layout,
    read_manifest,
    read_state,
)
from fedmpi.runs.model_files import read_description, with_frozen

log = Log(__name__)

WANTED = "expected model.safetensors or model.h5 of a run, its folder, a checkpoint of it, or a file of torch.save"


def read_initial(path: str, flat: Any, left_out: str | None = None, is_strict: bool = True) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name.

    Args:
        path: text of the setting `init`.
        flat: the `FlatModule` that will take them; it says the shapes of a checkpoint's rows.
        left_out: the setting `init_except`: patterns of names that are not read, whatever their shapes; or None.
        is_strict: whether the model must be built as that of the run, if its folder says how that was.

    Returns:
        name -> tensor, with every name of the module's `state_dict()` that is not left out; from a checkpoint, without
        integer buffers.

    Raises:
        UserError: one line, if it cannot be read, or is of another model.
    """
    try:
        file = _find(path)
        values = _of_checkpoint(file, flat) if file.is_dir() else _read(file)
    except Damaged as damage:
        raise UserError(f"init = {path}: {damage}") from None
    except FileNotFoundError:
        raise UserError(f"init = {path}: no such file; {WANTED}") from None
    except Exception as error:  # noqa: BLE001  each library has its own errors for files of another kind
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"init = {path}: cannot be read: {reason}; {WANTED}") from None
    names = matching(flat.module, left_out, "init_except") if left_out else set()
    if names and left_out:  # of the model; other names that the file has there are those of its own layers
        parts = [part.strip() for part in left_out.split(",")]
        names |= {name for name in values for part in parts if any(fnmatch(name, glob) for glob in (part, f"{part}.*"))}
    values = {name: value for name, value in values.items() if name not in names}
    recorded = read_manifest(file) if file.is_dir() else read_description(file.parent)
    if frozen := {} if file.is_dir() else recorded.get("frozen"):
        taken = {"frozen": {name: text for name, text in frozen.items() if name not in names}}
        values = with_frozen(f"init = {path}", flat.module, values, taken, is_strict)
    _check(path, values, flat, names)
    if is_strict:
        _check_architecture(path, recorded.get("architecture"), flat, left_out)
    return values


def initial_files(path: str) -> list[pathlib.Path]:
    """Paths of the files from which `read_initial` takes the model, to compare them between the ranks.

    Raises:
        UserError: if there is no such file.
    """
    try:
        found = _find(path)
        found.stat()
        files = [found / MANIFEST, found / SERVER_STATE] if found.is_dir() else [found]
        return [file for file in files if file.is_file()]  # `read_initial` says what is wrong with other ones
    except FileNotFoundError:
        raise UserError(f"init = {path}: no such file; {WANTED}") from None
    except (UserError, OSError) as error:
        raise UserError(f"init = {path}: cannot be read: {error}; {WANTED}") from None


def _find(path: str) -> pathlib.Path:
    """The model file, or the folder of the checkpoint, that the setting `init` names."""
    file = pathlib.Path(path)
    if any((file / name).exists() for name in (CHECKPOINTS, MODEL_AND_ROWS, MODEL)):  # a run folder
        rounds = find_checkpoints(file)
        whole = next((file / name for name in (MODEL_AND_ROWS, MODEL) if check_regular(file / name)), None)
        file = whole or (checkpoint_folder(file, rounds[0]) if rounds else file / MODEL_AND_ROWS)
    return file.parent if file.stem == pathlib.Path(SERVER_STATE).stem else file


def _check_architecture(path: str, recorded: Any, flat: Any, left_out: str | None) -> None:
    """Check that a model is built as the recorded one, in what is not left out; other code is only said."""
    patterns = [part.strip() for part in (left_out or "").split(",") if part.strip()]

    def is_ignored(name: str) -> bool:  # the model with other layers is another one
        return bool(patterns) and (not name or any(fnmatch(name, glob) for p in patterns for glob in (p, f"{p}.*"))
                                   or any(p.startswith(f"{name}.") for p in patterns))  # fmt: skip

    if other := difference(recorded, flat.architecture, is_ignored):
        raise UserError(
            f"init = {path}: is of another model: {other}; --init_strict false takes its values all the same"
        )
    if edited := other_code(recorded, flat.architecture):
        log.warning(f"init = {path}: the code of {edited} has changed since it was trained")


def _read(file: pathlib.Path) -> dict[str, torch.Tensor]:
    """The tensors of a model file."""
    if not stat.S_ISREG(file.stat().st_mode):  # reading a FIFO or a device might never end
        raise UserError("is not a regular file")
    if file.suffix == ".safetensors":
        return safetensors.torch.load_file(file)
    if file.suffix in (".h5", ".hdf5"):
        with readable(file) as content:
            return {name: torch.as_tensor(item[()]) for name, item in data_sets(content["model"])}
    return dict(torch.load(file, weights_only=True))  # of plain PyTorch: tensors only


def _of_checkpoint(folder: pathlib.Path, flat: Any) -> dict[str, torch.Tensor]:
    """The averaged model of a checkpoint, as the tensors of a module like `flat`'s."""
    manifest = read_manifest(folder)
    if manifest["layout"] != describe_layout(flat):
        raise Damaged("it is of a model with other parameters, or with another order in memory (channels_last)")
    state = read_state(folder / SERVER_STATE, *manifest["server"])
    values = flat.named_values(state["server/x"].to(flat.x), state["server/buffers"].to(flat.x))
    values = {name: value.clone() for name, value in values.items() if value.is_floating_point()}
    flat.point_at(flat.x, flat.buffers)
    return values


def _check(path: str, values: dict[str, torch.Tensor], flat: Any, left_out: Collection[str]) -> None:
    """Check all names and shapes but those that are left out."""
    expected = {name: tuple(value.shape) for name, value in flat.named_values(flat.x, flat.buffers).items()}
    found = {name: tuple(value.shape) for name, value in values.items()}
    wrong = [f"{name} is missing" for name, value in flat.module.state_dict().items()
             if name not in found and name not in left_out and value.is_floating_point()]  # fmt: skip
    wrong += [f"{name} is not in the model" for name in found if name not in expected]
    wrong += [
        f"{name} has shape {list(found[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if wrong:
        more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        raise UserError(f"init = {path}: does not fit the model: {', '.join(wrong[:4])}{more}")
