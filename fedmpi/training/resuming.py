"""How a run goes on from its newest checkpoint that is not damaged. `resume` is collective over all ranks."""

import platform

import torch

from fedmpi.comm.agreement import agree, share
from fedmpi.config.grammar import flatten
from fedmpi.config.run import role
from fedmpi.errors import UserError
from fedmpi.run_files import CHECKPOINTS, SERVER_STATE, find_checkpoints
from fedmpi.runs.checkpoint import (
    checkpoint_folder,
    client_file,
    client_folder,
    describe_layout,
    read_manifest,
    versions,
)
from fedmpi.runs.state_file import Damaged, read_state
from fedmpi.text import Log, short

log = Log(__name__)

MAY_DIFFER = ("rounds", "epochs", "resume", "clients")  # settings of a resumed run, besides those of speed and place
EVALUATION = ("eval_every", "evaluate", "evaluate_samples")  # of speed, unless evaluations decide what the result is


def resume(job, folder, run_name):
    """Go on from the newest checkpoint that is not damaged; damaged ones are named on standard error.

    Args:
        job: the `Job`. folder: path of the run folder. run_name: see `unique_name`.

    Returns:
        (the state of the training loop, name -> number; the manifest; the manifests up to it, the newest first).

    Raises:
        AgreedUserError: on every rank, if there is none, or its settings differ in what is learned.
    """
    link = job.link
    manifests = share(link, lambda: _read_manifests(folder))
    if manifests:
        agree(link, lambda: _check_settings(job, folder, manifests[0]))
        agree(link, lambda: _check_sees_checkpoints(job, folder, manifests[0]))
    for manifest in manifests:
        state, problem = {}, None
        try:
            state = _read_files(job, folder, manifest, run_name)
        except Damaged as damage:
            problem = str(damage)
        failing = link.first_rank_where(problem is not None)
        if failing is None:
            break
        if failing == link.rank:
            _say(f"checkpoint of round {manifest['round']} is damaged: {problem}")
    else:
        agree(link, lambda: _refuse(folder))
    shared = _share_state(link, state)
    agree(link, lambda: _restore(job, folder, {**shared, **state}))
    for client, written in manifest.get("lost", {}).items() if link.rank == 0 else ():
        _say(f"client {client} was lost and takes part again, {_since(written)}")
    loop = {name.removeprefix("loop/"): value for name, value in shared.items() if name.startswith("loop/")}
    return loop, manifest, [one for one in manifests if one["round"] <= manifest["round"]]


def _restore(job, folder, state):
    """Let the federation go on from a state. Not collective.

    Raises:
        UserError: if it is that of another run.
    """
    try:
        job.federation.restore(state)
    except (KeyError, RuntimeError, TypeError, ValueError, OverflowError, AttributeError) as error:
        what = f"{type(error).__name__}: {short(error)}"
        raise UserError(f"resume = {folder}: the state in its checkpoint is not that of this run: {what}") from None


def _say(text):
    log.warning(text)


def _since(written):
    """With which state a client that was lost takes part again, as text."""
    return "without a state" if written is None else f"with its state after round {written}"


def _refuse(folder):
    raise UserError(f"resume = {folder}: none of its checkpoints can be used; begin a new run with another --name")


def _read_manifests(folder):
    """The manifests that are not damaged, the newest first. Not collective."""
    found = []
    for number in find_checkpoints(folder):
        try:
            found.append(read_manifest(checkpoint_folder(folder, number)))
        except Damaged as damage:
            _say(f"checkpoint of round {number} is damaged: {damage}")
    return found


def _read_files(job, folder, manifest, run_name):
    """The state of this rank's clients and, on rank 0, the shared one. Not collective.

    Raises:
        Damaged: if a file is missing, or differs from what was written.
    """
    files, state = manifest["files"], {}
    for client in job.context.clients:
        name, written = client_file(client), manifest.get("lost", {}).get(str(client), manifest["round"])
        if written is None:
            continue  # lost before the first checkpoint: it begins without a state
        if name not in files:
            raise Damaged(f"there is no state of client {client}: the run had {manifest['clients']} clients")
        patterns = (job.config.run.checkpoint_clients, manifest["settings"].get("checkpoint_clients"))
        # Where the file would be written now, or was written then, or by an earlier version.
        places = [
            client_folder(pattern, folder, written, client, job.link.rank, inner) / name
            for pattern in patterns
            for inner in (run_name, manifest.get("run_name", ""), "")
        ]
        state |= read_state(next((path for path in places if path.exists()), places[-1]), *files[name])
    if job.link.rank == 0:
        state |= read_state(checkpoint_folder(folder, manifest["round"]) / SERVER_STATE, *files[SERVER_STATE])
    return state


def _check_settings(job, folder, manifest):
    """Check that the settings agree with those of a checkpoint in what is learned. Not collective.

    Raises:
        UserError: one line that lists those that differ, or says that the run is longer already.
    """
    now = flatten({**job.config.resolved, "clients": job.context.num_clients})
    then = flatten(manifest["settings"])
    changes = [
        f"{key} was {value}, now {now[key]}"
        for key, value in then.items()
        if key in now and now[key] != value and _must_agree(key, job.config.run) and key.partition(".")[0] != "paper"
    ]
    if manifest["clients"] != job.context.num_clients:
        changes.append(f"clients was {manifest['clients']}, now {job.context.num_clients}")
    if not changes and manifest["layout"] != describe_layout(job.flat):
        changes.append("the model's parameters, or their order in memory (channels_last)")
    if changes:
        raise UserError(
            f"resume = {folder}: the run has other settings: {', '.join(changes)}; give the former values, or begin a "
            "new run"
        )
    if manifest["round"] > job.num_rounds:
        raise UserError(
            f"resume = {folder}: rounds = {job.num_rounds}, but the run has already completed {manifest['round']} "
            "rounds: expected at least as many"
        )
    other = [f"{name} {old}" for name, old in manifest["versions"].items() if versions().get(name) != old]
    if other and job.link.rank == 0:
        _say(f"the checkpoint was written with {', '.join(other)}: results may differ in the last digits")


def _check_sees_checkpoints(job, folder, manifest):
    """Check that the run folder, in which rank 0 has found checkpoints, is not another folder here. Not collective.

    Raises:
        UserError: if this rank sees none, and needs them.
    """
    patterns = (job.config.run.checkpoint_clients, manifest["settings"].get("checkpoint_clients"))
    if job.context.clients and patterns == (None, None) and not (folder / CHECKPOINTS).is_dir():
        raise UserError(
            f"resume = {folder}: rank 0 has its checkpoints, but {platform.node()} has not: use a folder that all "
            "nodes share, or --checkpoint_clients FOLDER"
        )


def _must_agree(key, run):
    """Whether a setting influences what is learned."""
    if key in EVALUATION and (run.result == "best" or run.stop is not None or run.patience is not None):
        return True
    return role(key) not in ("speed", "place") and key not in MAY_DIFFER


def _share_state(link, state):
    """Rank 0's part of a state that all ranks share, on all ranks."""
    mine = {name: value for name, value in state.items() if not name.startswith("clients/")}
    described = share(link, lambda: [_describe(name, value) for name, value in mine.items()])
    shared = {}
    for name, kind, value in described:
        if kind is None:
            shared[name] = value
            continue
        tensor = mine[name] if link.rank == 0 else torch.empty(value, dtype=getattr(torch, kind))
        if tensor.numel():
            link.broadcast(tensor.contiguous().numpy())
        shared[name] = tensor
    return shared


def _describe(name, value):
    """(name, dtype, shape) of a tensor, (name, None, value) of a number."""
    if isinstance(value, torch.Tensor):
        return [name, str(value.dtype).removeprefix("torch."), list(value.shape)]
    return [name, None, value]
