"""A two-point gradient: all its directions in one batched pass, one by one, and as separate calls."""

import functools

import torch

from fedmpi.cli.bench.results import format_ms, format_ratio
from fedmpi.cli.bench.timing import Case
from fedmpi.ground.text import format_table

NUM_DIRECTIONS = 20  # b2
BATCHED = "all at once"
SEPARATE = f"{NUM_DIRECTIONS} calls of one direction"
SEPARATE_PLAIN = f"{SEPARATE}, without vmap"
TARGET = 0.5  # of the time of separate calls
BATCH_SIZE = 25  # as in the FAFedZO paper


def measure(bench):
    """Print the table. Collective.

    A call with one direction evaluates the loss at two points; the case "one by one" is a single call
    that evaluates all b2 + 1 points in a loop.
    """
    workload = bench.workload or "fashion"
    common = f"--algorithm fedzo --local_steps 1 --batch_size {BATCH_SIZE} --oracle.directions".split()
    in_loop = ["--oracle.evaluation", "one_by_one"]
    batched = bench.open_rounds(workload, *common, str(NUM_DIRECTIONS))
    looped = bench.open_rounds(workload, *common, str(NUM_DIRECTIONS), *in_loop)
    single = bench.open_rounds(workload, *common, "1")
    single_plain = bench.open_rounds(workload, *common, "1", *in_loop)
    times = bench.time_cases(
        [
            Case(BATCHED, functools.partial(_evaluate_gradients, batched)),
            Case(SEPARATE, functools.partial(_evaluate_gradients, single, NUM_DIRECTIONS)),
            Case(SEPARATE_PLAIN, functools.partial(_evaluate_gradients, single_plain, NUM_DIRECTIONS)),
            Case("one by one", functools.partial(_evaluate_gradients, looped)),
            Case(f"{NUM_DIRECTIONS} bare forward passes", functools.partial(_evaluate_losses, looped)),
        ]
    )
    rows = []
    for name, case_times in times.items():
        bench.results.record(f"directions/{workload}/{name}", case_times)
        if name == BATCHED:
            rows.append([name, format_ms(case_times), "", ""])
            continue
        share = times[BATCHED] / case_times
        bench.results.record(f"directions/{workload}/{BATCHED} to {name}", share, "")
        target = f"{TARGET}" if name in (SEPARATE, SEPARATE_PLAIN) else ""
        rows.append([name, format_ms(case_times), format_ratio(share), target])
    bench.results.print(
        "",
        f"directions: a two-point gradient of {workload}, b2 = {NUM_DIRECTIONS}, batch {BATCH_SIZE}",
        f"  {batched.dim:,} parameters, {torch.get_num_threads()} threads; all cases are forward passes without graphs",
        *format_table(["", "ms", f"{BATCHED}/this", "target"], rows),
    )
    for rounds in (batched, looped, single, single_plain):
        rounds.close()


def _evaluate_gradients(rounds, number=1):
    """`number` gradients of this rank's first client, each on a new sample."""
    oracle = rounds.federation.clients[0].oracle
    for _ in range(number):
        oracle.gradient(rounds.federation.server.x, oracle.draw())


@torch.no_grad()
def _evaluate_losses(rounds):
    """As many losses as there are directions, on one sample, by the module alone."""
    flat, task = rounds.job.flat, rounds.job.task
    batch = rounds.federation.clients[0].oracle.draw().batch
    flat.point_at(rounds.federation.server.x)
    for _ in range(NUM_DIRECTIONS):
        task.loss(flat.module, batch)
