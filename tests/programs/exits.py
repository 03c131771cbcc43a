"""A loop whose rank 1 (rank 0 too, if HOW begins with "all_") ends in a certain way: python exits.py HOW."""

import concurrent.futures
import os
import signal
import sys
import time
import traceback

import torch
from mpi4py import MPI
from torch import nn

import fedmpi

RANK = MPI.COMM_WORLD.rank
STEPS, EVERY, LAST = 30, 5, 23
TIMEOUT = 5


def wrapped(loop):
    """As Jupyter and click call programs: errors are shown, and the process goes on."""
    try:
        loop()
    except BaseException:  # noqa: BLE001
        traceback.print_exc()


def in_a_thread(loop):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(loop)


def loop(how, joins=False):
    """`STEPS` steps, or `LAST` on the rank that ends."""
    torch.manual_seed(RANK)
    model = nn.Linear(3, 2)
    if how == "late" and RANK == 1:
        sys.exit(4)  # before it opens anything
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    make = fedmpi.join if joins else fedmpi.average
    words = (model, "fedavg") if joins else (model, optimizer)
    fed = make(*words, **{"local_steps" if joins else "every": EVERY}, timeout=TIMEOUT)
    ends = RANK == 1 or how.startswith("all_")
    for step in range(STEPS):
        if step == LAST and ends:
            end(how.removeprefix("all_"))
            return
        if joins:
            fed.step(lambda: model(torch.ones(3)).square().sum())
        else:
            model(torch.ones(3)).square().sum().backward()
            optimizer.step()
            fed.step()
    fed.finish()


def end(how):
    kinds = {
        "raise": ValueError("no such batch"), "exit": SystemExit(3), "caught": ValueError("no such batch"),
        "interrupt": KeyboardInterrupt(),
    }  # fmt: skip
    if how == "return" or how == "two":
        return
    if how == "exit3":
        sys.exit(3)
    if how in ("exit0", "thread"):
        sys.exit(0)
    if how in ("os_exit0", "os_exit5"):
        os._exit(int(how[-1]))
    if how == "stuck":
        time.sleep(1000)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1000)  # a launcher may let it continue while it ends the job
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise kinds[how]


def main(how):
    plain = how.removeprefix("all_")
    if plain == "two":  # several federations are open
        kept = fedmpi.average(nn.Linear(2, 2), every=2, timeout=TIMEOUT)
        kept.step()
        loop(how, joins=True)
    elif plain == "between":  # a federation that has ended and one that the others begin
        for number in range(2):
            if number and RANK == 1:
                sys.exit(3)
            fedmpi.average(nn.Linear(2, 2), every=2).finish()
    elif plain == "caught" or plain == "interrupt":
        wrapped(lambda: loop(how))
    elif plain == "thread":
        in_a_thread(lambda: loop(how))
    else:
        loop(how, joins=plain == "exit3")


if __name__ == "__main__":
    main(sys.argv[1])
