"""The parts of the benchmark: one module each, whose function `measure(bench)` takes a `Benchmark`.

A part times, prints tables and records its measurements in `bench.results`. The first line of its
docstring is its description in ``--help``.
"""

from fedmpi.cli.bench.parts import (
    checkpoint,
    directions,
    gpu_link,
    jobs,
    link,
    own_loop,
    rates,
    round,
    scaling,
    settings,
    stages,
    workloads,
)

PARTS = {
    "link": link,
    "gpu_link": gpu_link,
    "round": round,
    "workloads": workloads,
    "own_loop": own_loop,
    "settings": settings,
    "scaling": scaling,
    "directions": directions,
    "jobs": jobs,
    "checkpoint": checkpoint,
    "stages": stages,
    "rates": rates,
}
ONLY_BY_NAME = ("rates",)  # takes minutes, and measures no time
