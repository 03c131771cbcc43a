"""What a checkpoint costs in rounds, if a thread writes it or training waits; its speed against a plain file's."""

import os
import pathlib
import shutil
import tempfile

import torch

from fedmpi.cli.bench.results import format_ms, format_rate, format_ratio
from fedmpi.cli.bench.timing import Case
from fedmpi.cli.bench.workloads import WORKLOADS
from fedmpi.comm.agreement import share
from fedmpi.ground.files.own_files import write_mark
from fedmpi.ground.text import format_bytes, format_table
from fedmpi.runs.checkpoints.files import pieces, write_state
from fedmpi.runs.checkpoints.writer import Checkpoints
from fedmpi.runs.lock import RunLock
from fedmpi.runs.loop.run import Run
from fedmpi.runs.recorder import Recorder
from fedmpi.runs.settings import FolderSettings

MOST_ROUNDS = 100  # in a turn
TARGET = 0.7  # of the disk's sequential speed
BESIDE, AT_ONCE = "a checkpoint beside them", "a checkpoint at once"


def measure(bench):
    """Print two tables; the files are written into a folder here that is removed afterwards. Collective."""
    workload = bench.workload or ("fashion" if bench.quick else "mlp")
    rounds = bench.open_rounds(workload, "--algorithm", bench.algorithms[-1])
    rank = rounds.link.rank
    folder = pathlib.Path(share(rounds.link, lambda: tempfile.mkdtemp(prefix="bench-checkpoint-", dir=".")))
    if rank == 0:
        write_mark(folder, "run")  # what is in it is fedmpi's
    recorder = Recorder(RunLock(folder), 1) if rank == 0 else None
    identity = share(rounds.link, lambda: recorder.identity)
    try:
        checkpoints = Checkpoints(_run(rounds, folder, identity, recorder), FolderSettings())
        _measure_rounds(bench, workload, rounds, checkpoints)
        _measure_speed(bench, workload, rounds, folder)
    finally:
        if recorder is not None:
            recorder.close()
            shutil.rmtree(folder, ignore_errors=True)
    rounds.close()


def _run(rounds, folder, identity, recorder):
    """The `Run` of the rounds, as checkpoints need it."""
    federation, context = rounds.federation, rounds.job.context
    return Run(
        link=rounds.link,
        federation=federation,
        flat=rounds.job.flat,
        clients=context.clients,
        num_clients=context.num_clients,
        num_rounds=rounds.job.num_rounds,
        settings=rounds.job.settings,
        folder=folder,
        identity=identity,
        recorder=lambda: recorder,
        record=lambda loss: {},
        state=federation.state,
        restore=federation.restore,
    )


def _measure_rounds(bench, workload, rounds, checkpoints):
    """Some rounds, the same with a checkpoint written while they go on, and with one written at once."""
    alone = bench.time_cases([Case("round", rounds.run)], bench.seconds / 4)["round"]

    def round_with_request():
        rounds.federation.run_round(checkpoints.request)

    def at_once():
        round_with_request()
        checkpoints.write_now()

    written = bench.time_cases([Case("written", at_once)], bench.seconds / 4)["written"].median - alone.median
    number = min(MOST_ROUNDS, max(2, round(2 * written / alone.median)))

    def beside():
        checkpoints.begin()
        for _ in range(number):
            round_with_request()
            if checkpoints.is_due():
                checkpoints.begin()
        checkpoints.finish()

    def first_at_once():
        checkpoints.write_now()
        without()

    def without():
        for _ in range(number):
            rounds.run()

    times = bench.time_cases([Case("none", without), Case(BESIDE, beside), Case(AT_ONCE, first_at_once)])
    rows = []
    for name, case_times in times.items():
        more = [(took - plain) / alone.median for took, plain in zip(case_times.seconds, times["none"].seconds)]
        cost = sorted(more)[len(more) // 2]
        bench.results.record(f"checkpoint/{workload}/{name}", case_times)
        bench.results.record(f"checkpoint/{workload}/{name}/rounds", cost, "rounds")
        rows.append([name, format_ms(case_times), f"{cost:.2f}" if name != "none" else ""])
    bench.results.print(
        "",
        f"checkpoints of {workload}: {WORKLOADS[workload].description}; {' '.join(bench.overrides)}".rstrip("; "),
        f"  {rounds.num_clients} clients on {bench.link.size} ranks, {rounds.dim:,} parameters",
        *format_table([f"{number} rounds with", "ms", "a checkpoint costs, in rounds"], rows),
    )


def _measure_speed(bench, workload, rounds, folder):
    """The file of rank 0's state against its bytes in one plain file, both flushed to the disk."""
    state = rounds.federation.state()
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    nbytes = sum(tensor.nbytes for tensor in tensors)
    is_first = rounds.link.rank == 0

    def plain():
        if is_first:
            _write_plain(folder / "plain", tensors)

    def as_state():
        if is_first:
            write_state(folder / "state.safetensors", state)

    times = bench.time_cases([Case("plain file", plain), Case("state file", as_state)])
    ratio = times["plain file"] / times["state file"]
    bench.results.record(f"checkpoint/{workload}/share of the disk's speed", ratio, "")
    rows = []
    for name, case_times in times.items():
        bench.results.record(f"checkpoint/{workload}/{name}", case_times)
        is_state = name == "state file"
        rows.append(
            [
                name,
                format_ms(case_times),
                format_rate(nbytes, case_times.median),
                *([format_ratio(ratio), f"{TARGET}"] * is_state),
            ]
        )
    rows[0] += ["", ""]
    bench.results.print(
        "",
        f"  {format_bytes(nbytes)} of rank 0, written and flushed to the disk",
        *format_table(["", "ms", "GB/s", "share of plain", "target"], rows),
    )


def _write_plain(path, tensors):
    """Write the tensors' bytes one after the other, in the pieces of a state file, and flush them to the disk."""
    with open(path, "wb") as file:
        for piece in pieces(b"", tensors):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
