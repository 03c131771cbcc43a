"""Where the time of a round goes.

The parts are timed from outside: wrappers around the algorithm, the reports, the sums and the oracles take the
time of their methods. On a GPU its own events take it: nothing waits for them before the end of a round.
"""

import contextlib
import dataclasses
import time

import numpy as np

from fedmpi.cli.bench.timing import moment, seconds_between, wait_for_gpu

ALGORITHM_METHODS = ("start", "server_start", "client_start", "download", "local_step", "upload")
ORACLE_PARTS = {
    "draw": "data", "draw_first": "data", "whole": "data", "gradient": "gradient", "gradient_pair": "gradient",
}  # fmt: skip
REPORT_PARTS, AGGREGATION_PARTS = {"exchange": "waiting"}, {"average": "communication"}


def break_down(rounds, seconds):
    """Seconds of the parts of a round, from as many rounds as `seconds` allow. Collective.

    Args:
        rounds: a `Rounds`.

    Returns:
        dict: "gradient", "update" (of rows, by the algorithm), "data" (making minibatches),
        "communication" (sums over the rank's clients and over the ranks), "waiting" (for the slowest
        rank, when the ranks exchange their losses), "overhead" (the rest); means over the ranks.
    """
    clock = _Clock()
    federation = rounds.federation
    algorithm, reports, store, link = federation.algorithm, federation.reports, federation.store, federation.link
    aggregation = store.aggregation
    oracles = [client.oracle for client in federation.clients]
    federation.algorithm, federation.reports = _TimedAlgorithm(algorithm, clock), _Timed(reports, clock, REPORT_PARTS)
    store.aggregation = _Timed(aggregation, clock, AGGREGATION_PARTS)
    for client, oracle in zip(federation.clients, oracles):
        client.oracle = _Timed(oracle, clock, ORACLE_PARTS)
    try:
        begin = time.perf_counter()
        clock.round(rounds.run)
        once = link.allgather([time.perf_counter() - begin]).max()
        number = int(np.clip(seconds / once, 3, 200))
        for _ in range(number - 1):
            clock.round(rounds.run)
    finally:
        federation.algorithm, federation.reports, store.aggregation = algorithm, reports, aggregation
        for client, oracle in zip(federation.clients, oracles):
            client.oracle = oracle
    parts = {part: spent / number for part, spent in clock.seconds.items()}
    return dict(zip(parts, link.allgather(list(parts.values())).mean(0).tolist()))


class _Clock:
    """Adds up seconds per part of a round; a part that runs inside another is not counted in the other."""

    def __init__(self):
        parts = ("gradient", "update", "data", "communication", "waiting", "overhead")
        self.seconds = dict.fromkeys(parts, 0.0)
        self._open = []  # names of the open parts, outermost first
        self._spans = []  # (part, part around it or None, moment of its begin, of its end) in this round

    def round(self, run):
        """Call `run`, one round: what is in no part of it is overhead."""
        with self.part("overhead"):
            run()
        wait_for_gpu()
        for name, around, begin, end in self._spans:
            spent = seconds_between(begin, end)
            self.seconds[name] += spent
            if around:
                self.seconds[around] -= spent
        self._spans.clear()

    @contextlib.contextmanager
    def part(self, name):
        around = self._open[-1] if self._open else None
        self._open.append(name)
        begin = moment()
        yield
        self._spans.append((name, around, begin, moment()))
        self._open.pop()

    def timed(self, name, function):
        def call(*args, **options):
            with self.part(name):
                return function(*args, **options)

        return call


class _Timed:
    """Wraps an object and times some of its methods; `parts`: name of the method -> part."""

    def __init__(self, wrapped, clock, parts):
        self._wrapped = wrapped
        for method, part in parts.items():
            setattr(self, method, clock.timed(part, getattr(wrapped, method)))

    def __getattr__(self, name):
        return getattr(self._wrapped, name)


class _TimedAlgorithm(_Timed):
    """Wraps an algorithm: its methods, without the oracle calls inside them, are the update."""

    def __init__(self, wrapped, clock):
        super().__init__(wrapped, clock, dict.fromkeys(ALGORITHM_METHODS, "update"))
        self._clock = clock

    def exchanges(self):
        def timed(function):
            return function and self._clock.timed("update", function)

        return tuple(
            dataclasses.replace(exchange, work=timed(exchange.work), then=timed(exchange.then))
            for exchange in self._wrapped.exchanges()
        )
