"""Loops that get in each other's way: python other_loops.py HOW."""

import os
import signal
import sys
import threading

import torch
from mpi4py import MPI
from torch import nn

import fedmpi

RANK = MPI.COMM_WORLD.rank


class Alarm(Exception):
    pass


def loop(model, steps=20, **options):
    fed = fedmpi.average(model, torch.optim.SGD(model.parameters(), 0.1), every=2, timeout=60, **options)
    for _ in range(steps):
        step(fed, model)
    fed.finish()


def step(fed, model):
    model(torch.ones(3)).square().sum().backward()
    fed.step()


def two(options):
    """Two federations of one model, whose ranks are the same or, with `options`, not."""
    model = nn.Linear(3, 2)
    first = fedmpi.average(model, every=2, **options)
    loop(model)
    first.finish()


def dropped():
    """One that nobody has ended, and nobody holds."""
    model = nn.Linear(3, 2)
    fedmpi.average(model, every=2).step()
    loop(model)


def threads(comms):
    """A loop in each of two threads."""
    both = [threading.Thread(target=loop, args=(nn.Linear(3, 2), 500), kwargs={"comm": comm}) for comm in comms]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()


def one_after_the_other():
    for _ in range(2):
        thread = threading.Thread(target=loop, args=(nn.Linear(3, 2),))
        thread.start()
        thread.join()
    loop(nn.Linear(3, 2))


def interrupted():
    """An exception in the middle of a sum, which the program survives."""
    model, number = nn.Linear(3, 2), 0
    fed = fedmpi.average(model, every=1, timeout=600)
    if RANK == 1:
        signal.pause()  # the other one waits in its first sum

    def wake(*_):
        raise Alarm

    signal.signal(signal.SIGALRM, wake)
    signal.setitimer(signal.ITIMER_REAL, 2)
    while number < 20:
        try:
            step(fed, model)
        except Alarm:
            print("survived", flush=True)
        number += 1
    fed.finish()


def retried():
    """A closure that fails is called again: the bits are those of one that does not fail."""
    results = []
    for fails in (False, True):
        torch.manual_seed(RANK)
        model, calls = nn.Linear(3, 2), 0
        fed = fedmpi.join(model, "fafed", local_steps=2, step_size=0.1)

        def closure(model=model, fails=fails):
            nonlocal calls
            calls += 1
            if fails and RANK == 1 and calls in (1, 4, 6):
                raise Alarm
            return model(torch.ones(3)).square().sum()

        for _ in range(6):
            while True:
                try:
                    fed.step(closure)
                    break
                except Alarm:
                    pass
        fed.finish()
        results.append(model.weight.detach().clone())
    print("equal" if torch.equal(*results) else f"differ: {results}", flush=True)


def forked():
    """A child of a rank that goes on with the rank's loop."""
    model = nn.Linear(3, 2)
    fed = fedmpi.average(model, every=2)
    step(fed, model)
    child = os.fork()
    if not child:
        try:
            fed.step()
        except fedmpi.UserError as error:
            print(error, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    step(fed, model)
    fed.finish()


def main(how):
    if how == "nested":  # of another group of ranks
        group = MPI.COMM_WORLD.Split(RANK // 2, RANK)
        two({"comm": group})
    elif how in ("threads", "comms"):
        threads([MPI.COMM_WORLD.Dup() if how == "comms" else None for _ in range(2)])
    else:
        {
            "two": lambda: two({}), "dropped": dropped, "after": one_after_the_other, "sum": interrupted,
            "retried": retried, "forked": forked,
        }[how]()  # fmt: skip
    print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
