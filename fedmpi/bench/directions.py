"""A two-point gradient: all its directions in one pass, against other ways to ask for the same losses."""

import functools

import torch

from fedmpi.bench.measure import Contestant
from fedmpi.bench.output import milliseconds, ratio, table

NUM_DIRECTIONS = 20  # b2
AT_ONCE = "all at once"
SEPARATE = f"{NUM_DIRECTIONS} calls of one direction"
SEPARATE_PLAIN = f"{SEPARATE}, without vmap"
TARGET = 0.5  # of separate calls
BATCH = ["--batch_size", "25"]  # as in the FAFedZO paper


def measure(open_rounds, contest, results, workload):
    """Time them against each other, print a table and keep the numbers. Collective.

    A call of one direction evaluates two points; "one by one" is a single call that evaluates all b2 + 1
    in a loop.

    Args:
        open_rounds: `open_rounds(workload, *words) -> Rounds`. contest: `contest(rivals) -> times`.
        results: a `Results`.
    """
    words = ["--algorithm", "fedzo", "--local_steps", "1", *BATCH, "--oracle.directions"]
    at_once = open_rounds(workload, *words, str(NUM_DIRECTIONS))
    in_turn = open_rounds(workload, *words, str(NUM_DIRECTIONS), "--oracle.evaluation", "one_by_one")
    single = open_rounds(workload, *words, "1")
    single_plain = open_rounds(workload, *words, "1", "--oracle.evaluation", "one_by_one")
    times = contest(
        [
            Contestant(AT_ONCE, functools.partial(_gradient, at_once)),
            Contestant(SEPARATE, functools.partial(_gradient, single, NUM_DIRECTIONS)),
            Contestant(SEPARATE_PLAIN, functools.partial(_gradient, single_plain, NUM_DIRECTIONS)),
            Contestant("one by one", functools.partial(_gradient, in_turn)),
            Contestant(f"{NUM_DIRECTIONS} bare forward passes", functools.partial(_forward, in_turn)),
        ]
    )
    rows = []
    for name, one in times.items():
        share = times[AT_ONCE] / one
        results.keep(f"directions/{workload}/{name}", one)
        if name != AT_ONCE:
            results.keep(f"directions/{workload}/{AT_ONCE} to {name}", share, "")
        target = f"{TARGET}" if name in (SEPARATE, SEPARATE_PLAIN) else ""
        rows.append([name, milliseconds(one), "" if name == AT_ONCE else ratio(share), target])
    results.say("", f"directions: a two-point gradient of {workload}, b2 = {NUM_DIRECTIONS}, batch {BATCH[1]}")
    results.say(
        f"  {at_once.dim:,} parameters, {torch.get_num_threads()} threads; all are forward passes without graphs"
    )
    results.say(*table(["", "ms", f"{AT_ONCE}/it", "target"], rows))
    for rounds in (at_once, in_turn, single, single_plain):
        rounds.close()


def _gradient(rounds, number=1):
    """So many gradients of a rank's first client, each on a sample of its own."""
    oracle = rounds.federation.clients[0].oracle
    for _ in range(number):
        oracle.gradient(rounds.federation.server.x, oracle.draw())


@torch.no_grad()
def _forward(rounds):
    """One sample and the losses of as many passes through the module as there are directions."""
    flat, task = rounds.training.flat, rounds.training.task
    batch = rounds.federation.clients[0].oracle.draw().batch
    flat.point_at(rounds.federation.server.x)
    for _ in range(NUM_DIRECTIONS):
        task.loss(flat.module, batch)
