"""What the ranks find out together. All functions are collective on the link unless they say otherwise."""

import contextlib
import dataclasses
import json
import os
import pathlib
import secrets
import sys
import time

import numpy as np
import torch

from fedmpi.cli.doctor.checks import FAILED, OK, SKIPPED, WARNING, Check, check_data, check_memory
from fedmpi.cli.doctor.facts import RankFacts
from fedmpi.comm.agreement import allgather_lines
from fedmpi.federation.buffers import SentBuffers
from fedmpi.federation.memory import num_bytes
from fedmpi.federation.rows import RowStore
from fedmpi.ground.errors import AgreedUserError, UserError
from fedmpi.ground.machine.devices import memory_of
from fedmpi.ground.machine.memory import available_memory
from fedmpi.ground.text import format_bytes
from fedmpi.oracles.flat_module import BufferPart
from fedmpi.training.build import STEPS, Job, make_model
from fedmpi.training.model import build_model, model_class

SUM_ELEMENTS = 1 << 16  # of the test sum: enough for shared memory to be used
LOOK_SECONDS = 5.0  # that another node may need to see a new file: network file systems cache folders


def allgather_texts(link, text):
    """Every rank's text, in rank order; line breaks become blanks."""
    return allgather_lines(link, [" ".join(text.splitlines())], "machines")


def allgather_facts(link, facts):
    """The `RankFacts` of all ranks."""
    return [RankFacts(**json.loads(text)) for text in allgather_texts(link, json.dumps(dataclasses.asdict(facts)))]


def try_sum(link, transport, device="cpu"):
    """(whether a test sum over the ranks on `device` is right on all of them, how it was made, as text).

    Raises:
        UserError: on every rank, if there is no such transport here.
    """
    link.transport = transport
    block = link.allocate(SUM_ELEMENTS, torch.float32, device)
    block.copy_(torch.arange(SUM_ELEMENTS) % 251 + link.rank)
    link.allreduce(block, "machines")
    expected = (torch.arange(SUM_ELEMENTS) % 251) * link.size + link.size * (link.size - 1) // 2
    return link.first_rank_where(not torch.equal(block.cpu(), expected.to(block.dtype))) is None, link.summed_by


def check_needs(link, ranks, config):
    """The checks of data, memory and run folder: list of `Check`. It makes the first steps of a run."""
    job, error = Job(config, link, learns=False), ""
    try:
        for step in STEPS[: STEPS.index(make_model)]:
            step(job)
    except AgreedUserError as met:
        error = str(met)
        if met.is_printed and link.rank:
            print(f"fedmpi: {error}", file=sys.stderr, flush=True)
    data = check_data(error, str(getattr(config.task, "data", "no files")), link.size)
    if error:
        size, memory = 0, Check("memory", SKIPPED, "needs the data")
    else:
        sizes, error = _try_model(config, job.context, job.task)
        size, memory = _check_rows(link, ranks, config, job.context, sizes, _gather_errors(link, error))
    return [data, memory, _check_folder(link, pathlib.Path(config.folder.out), size)]


def _try_model(config, context, task):
    """((parameters, float buffers) of the model or None, an error's text or ""); not collective.

    The model is built without memory if its class allows it, so that a model that is too large does no harm.
    """
    try:
        with torch.device("meta"):
            module = task.build_model(model_class(config, task), config.model_settings)
        parameters = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
        return (parameters, sum(buffer.numel() for buffer in module.buffers() if buffer.is_floating_point())), ""
    except UserError as error:
        return None, str(error)
    except Exception:  # noqa: BLE001  a user's class, or a task's, may need numbers
        try:
            flat = build_model(config, context, task)
            return (flat.dim, flat.num_buffers), ""
        except UserError as error:
            return None, str(error)


def _gather_errors(link, error):
    """A text for each rank that has an error. Only that rank prints it, for it may quote a silo's data."""
    if error and link.rank:
        print(f"fedmpi: rank {link.rank}: {error}", file=sys.stderr, flush=True)
    texts = allgather_texts(link, "it prints why" if error else "")
    return [error, *texts[1:]] if link.rank == 0 else texts


def _check_rows(link, ranks, config, context, sizes, errors):
    """(bytes of a rank's rows, the `Check` of memory)."""
    failing = next((rank for rank, text in enumerate(errors) if text), None)
    if failing is not None:
        return 0, Check("memory", FAILED, f"rank {failing}: {errors[failing]}", "choose another --model")
    dim, num_buffers = sizes
    buffers = torch.empty(num_buffers, dtype=context.dtype, device="meta")
    sent = SentBuffers(buffers, [BufferPart("", 0, num_buffers, context.dtype)])
    store = RowStore(config.algorithm, dim, sent, len(context.clients), context.dtype, device="meta")
    rows = num_bytes(store) + 3 * dim * context.dtype.itemsize  # and the model, its vector, a gradient
    on_gpu = context.device.type != "cpu"
    if on_gpu:
        left = (memory_of(context.device) or [None])[0]
    elif (left := available_memory(link.local_size)) is not None:
        left *= link.local_size
    found = link.allgather([rows, float("nan") if left is None else left], "machines")
    needed, lefts = found[:, 0].tolist(), found[:, 1].tolist()
    alone = [dataclasses.replace(facts, leader=facts.rank) for facts in ranks] if on_gpu else ranks
    return rows, check_memory(alone, needed, lefts)


def _check_folder(link, out, rows):
    """The `Check` that the run folders' folder can be written, has room, and is seen by all ranks."""
    number = int(link.allgather([secrets.randbits(48)], "machinery")[0, 0])
    token = out / f".fedmpi-doctor-{number}"
    error, room = "", float("inf")
    if link.rank == 0:
        try:
            room = _write_token(out, token)
        except OSError as met:
            error = f"{met.filename or out}: cannot be written: {met.strerror}"
    error, room = allgather_texts(link, error)[0], link.allgather([room], "machines")[0, 0]
    blind = [] if error else np.flatnonzero(link.allgather([not _appears(token)], "machinery")[:, 0]).tolist()
    link.barrier()
    if link.rank == 0:
        with contextlib.suppress(OSError):  # on a file system that is read-only, there is no such file
            token.unlink()
    if error:
        return Check("run folder", FAILED, error, "choose a folder with room that you may write: --out")
    needed = 3 * rows  # a result and two checkpoints, each at most as large as the rows
    if room < needed:
        text = f"{out} has room for {format_bytes(room)}; a run needs up to {format_bytes(needed)}"
        return Check("run folder", FAILED, text, "free space, or choose another folder: --out")
    text = f"{out.absolute()} has room for {format_bytes(room)}"
    if blind:
        text = f"{out.absolute()} is not the same folder on rank {blind[0]} as on rank 0"
        return Check("run folder", WARNING, text, "only rank 0 writes there; to resume, choose a shared folder: --out")
    return Check("run folder", OK, text + (" and is shared" if link.size > 1 else ""))


def _write_token(out, token):
    """Write a small file and return how many bytes are free beside it."""
    out.mkdir(parents=True, exist_ok=True)
    with open(token, "xb") as file:
        file.write(bytes(1 << 16))
        file.flush()
        os.fsync(file.fileno())
    stat = os.statvfs(out)
    return float(stat.f_bavail * stat.f_frsize)


def _appears(path):
    until = time.monotonic() + LOOK_SECONDS
    while not path.exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True
