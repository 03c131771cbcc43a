"""How a run goes on from its newest checkpoint that is not damaged. `resume` is collective over all ranks."""

import pathlib
import platform
from collections.abc import Mapping
from typing import Any

import torch

from fedmpi.comm.agreement import agree, share
from fedmpi.comm.link import Link
from fedmpi.config.grammar import flatten
from fedmpi.ground.errors import UserError
from fedmpi.ground.files.run_files import CHECKPOINTS, SERVER_STATE, find_checkpoints
from fedmpi.ground.machine.versions import versions
from fedmpi.ground.text import Log, short
from fedmpi.oracles.architecture import difference, other_code
from fedmpi.runs.checkpoints.files import (
    Damaged,
    checkpoint_folder,
    client_file,
    describe_layout,
    own_place,
    read_manifest,
    read_state,
)
from fedmpi.runs.checkpoints.within import CheckpointWithin
from fedmpi.runs.loop.run import Run

log = Log(__name__)


def resume(
    run: Run, clients_folder: str | None, run_name: str, within: CheckpointWithin
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Go on from the newest checkpoint that is not damaged; damaged ones are named on standard error.

    Args:
        run: a `fedmpi.runs.loop.run.Run`. clients_folder: where clients' files are, see `client_file`, or None.
        run_name: see `unique_name`. within: the `CheckpointWithin`, from which the run goes on if it is newer.

    Returns:
        (the state of the training loop, name -> number; the manifests up to that checkpoint, the newest first).

    Raises:
        AgreedUserError: on every rank, if there is none, or its settings differ in what is learned.
    """
    link, folder = run.link, run.folder
    manifests = share(link, lambda: _read_manifests(folder))
    for inner in within.find(manifests[0]["round"] if manifests else 0):
        if (loop := _resume_within(run, within, inner)) is not None:
            return loop, [inner, *manifests]
    if manifests:
        agree(link, lambda: _check_settings(run, manifests[0]))
        agree(link, lambda: _check_sees_checkpoints(run, clients_folder, manifests[0]))
    while manifests:
        state, problem = {}, None
        try:
            state = _read_files(run, clients_folder, manifests[0], run_name)
        except Damaged as damage:
            problem = f"checkpoint of round {manifests[0]['round']} is damaged: {damage}"
        failing = link.first_rank_where(problem is not None)
        if failing is None:
            break
        if failing == link.rank:
            log.warning(problem)
        del manifests[0]
    agree(link, lambda: manifests or _refuse(folder))
    shared = _share_state(link, state)
    agree(link, lambda: _restore(run, {**shared, **state}))
    for client, file in manifests[0]["clients"].items() if link.rank == 0 else ():
        if file is None or file[0] != manifests[0]["round"]:
            since = "without a state" if file is None else f"with its state after round {file[0]}"
            log.warning(f"client {client} was lost and takes part again, {since}")
    return {name.removeprefix("loop/"): shared[name] for name in shared if name.startswith("loop/")}, manifests


def _resume_within(run: Run, within: CheckpointWithin, manifest: dict[str, Any]) -> dict[str, Any] | None:
    """Go on from the checkpoint within a round; the state of the training loop, or None if a rank's file is damaged."""
    link, state, problem = run.link, {}, None
    agree(link, lambda: _check_settings(run, manifest))
    try:
        state = within.read(manifest)
    except Damaged as damage:
        problem = f"checkpoint within round {manifest['round'] + 1} is damaged: {damage}"
        log.warning(problem)
    if link.first_rank_where(problem is not None) is not None:
        return None
    loop = _share_state(link, {name: value for name, value in state.items() if name.startswith("loop/")})
    agree(link, lambda: _restore(run, state))
    return {name.removeprefix("loop/"): value for name, value in loop.items()}


def _refuse(folder: pathlib.Path) -> None:
    raise UserError(f"resume = {folder}: none of its checkpoints can be used; begin a new run with another --name")


def _read_manifests(folder: pathlib.Path) -> list[dict[str, Any]]:
    """The manifests that are not damaged, the newest first. Not collective."""
    found = []
    for number in find_checkpoints(folder):
        try:
            found.append(read_manifest(checkpoint_folder(folder, number)))
        except Damaged as damage:
            log.warning(f"checkpoint of round {number} is damaged: {damage}")
    return found


def _read_files(run: Run, clients_folder: str | None, manifest: dict[str, Any], run_name: str) -> dict[str, Any]:
    """The state of this rank's clients and, on rank 0, the shared one. Not collective.

    Raises:
        Damaged: if a file is missing, or differs from what was written.
    """
    state: dict[str, Any] = {}
    for client in run.clients:
        if (file := manifest["clients"][str(client)]) is None:
            continue  # lost before the first checkpoint: it begins without a state
        # Where the file would be written now, or was written then.
        paths = [
            client_file(pattern, run.folder, file[0], client, run.link.rank, inner)
            for pattern in _patterns(run, clients_folder, manifest)
            for inner in (run_name, manifest["run_name"])
        ]
        state |= read_state(next((path for path in paths if path.exists()), paths[-1]), *file[1:])
    if run.link.rank == 0:
        state |= read_state(checkpoint_folder(run.folder, manifest["round"]) / SERVER_STATE, *manifest["server"])
    return state


def _patterns(run: Run, clients_folder: str | None, manifest: Mapping[str, Any]) -> list[str | None]:
    """Where clients' files are written now, and where they may have been written then, see `client_file`."""
    places = [] if run.federation.aggregation.exposes_rows else [str(own_place())]
    return [clients_folder, manifest["settings"].get("checkpoint_clients"), *places]


def _restore(run: Run, state: dict[str, Any]) -> None:
    """Let the federation go on from a state. Not collective.

    Raises:
        UserError: if it is that of another run.
    """
    try:
        run.restore(state)
    except (KeyError, RuntimeError, TypeError, ValueError, OverflowError, AttributeError) as error:
        reason = f"{type(error).__name__}: {short(error)}"
        raise UserError(
            f"resume = {run.folder}: the state in its checkpoint is not that of this run: {reason}"
        ) from None


def _check_settings(run: Run, manifest: Mapping[str, Any]) -> None:
    """Check that the settings agree with those of a checkpoint in what is learned. Not collective.

    Raises:
        UserError: one line that lists those that differ, or says that the run is longer already.
    """
    now, folder = flatten(run.settings), run.folder
    then = flatten(manifest["settings"])
    changes = [
        f"{key} was {value}, now {now[key]}"
        for key, value in then.items()
        if key in now and now[key] != value and not {key, key.partition(".")[0]} & {"paper", *run.may_change}
    ]
    if not changes and manifest["layout"] != describe_layout(run.flat):
        changes.append("the model's parameters, or their order in memory (channels_last)")
    recorded = manifest["architecture"]
    if not changes and (other_model := difference(recorded, run.flat.architecture)):
        raise UserError(
            f"resume = {folder}: the model is another one: {other_model}; give the former model, or begin a new run "
            "(--init reads a checkpoint, also into another model with --init_strict false)"
        )
    if changes:
        raise UserError(
            f"resume = {folder}: the run has other settings: {', '.join(changes)}; give the former values, or begin a "
            "new run"
        )
    if (edited := other_code(recorded, run.flat.architecture)) and run.link.rank == 0:
        log.warning(f"resume = {folder}: the code of {edited} has changed since the checkpoint was written")
    if manifest["round"] > run.num_rounds:
        raise UserError(
            f"resume = {folder}: rounds = {run.num_rounds}, but the run has already completed {manifest['round']} "
            "rounds: expected at least as many"
        )
    found = versions()
    other = [f"{name} {old}" for name, old in manifest["versions"].items() if found.get(name, old) != old]
    if other and run.link.rank == 0:
        log.warning(f"the checkpoint was written with {', '.join(other)}: results may differ in the last digits")


def _check_sees_checkpoints(run: Run, clients_folder: str | None, manifest: Mapping[str, Any]) -> None:
    """Check that the run folder, in which rank 0 has found checkpoints, is not another folder here. Not collective.

    Raises:
        UserError: if this rank sees none, and needs them.
    """
    folder = run.folder
    if run.clients and not any(_patterns(run, clients_folder, manifest)) and not (folder / CHECKPOINTS).is_dir():
        raise UserError(
            f"resume = {folder}: rank 0 has its checkpoints, but {platform.node()} has not: use a folder that all "
            "nodes share, or --checkpoint_clients FOLDER"
        )


def _share_state(link: Link, state: Mapping[str, Any]) -> dict[str, Any]:
    """Rank 0's part of a state that all ranks share, on all ranks."""
    shared = {name: value for name, value in state.items() if not name.startswith("clients/")}
    tensors = {name: value for name, value in shared.items() if isinstance(value, torch.Tensor)}
    numbers, described = share(
        link,
        lambda: [
            {name: value for name, value in shared.items() if name not in tensors},
            [(name, str(value.dtype).removeprefix("torch."), value.shape) for name, value in tensors.items()],
        ],
        "checkpoints",
    )
    for name, dtype, shape in described:
        tensor = tensors[name] if link.rank == 0 else torch.zeros(shape, dtype=getattr(torch, dtype))
        if tensor.numel():
            link.broadcast(tensor.reshape(-1).view(torch.uint8).numpy(), "checkpoints")
        numbers[name] = tensor
    return dict(numbers)
