"""What each speed setting gains: a round with the setting changed, against the default."""

from fedmpi.cli.bench.timing import Case
from fedmpi.ground.errors import AgreedUserError
from fedmpi.ground.text import format_table

DEFAULT = "default"
CHANGES = {
    "plain Allreduce": ["--transport", "allreduce"],
    "bf16 autocast": ["--autocast", "bf16"],
    "CUDA graphs": ["--compile", "cuda_graph"],
    "compile default": ["--compile", "default"],
    "compile reduce-overhead": ["--compile", "reduce-overhead"],
}


def measure(bench):
    """Print the table. Collective."""
    workload = bench.workload or ("fashion" if bench.quick else "cnn")
    algorithm = bench.algorithms[-1]
    default = bench.open_rounds(workload, "--algorithm", algorithm)
    opened, impossible = {}, []
    for name, change in CHANGES.items():
        try:
            opened[name] = bench.open_rounds(workload, "--algorithm", algorithm, *change)
        except AgreedUserError:  # no compiler for torch.compile, or --set contradicts
            impossible.append(name)
    if bench.link.oversubscribed:
        spinning = opened["ranks wait spinning"] = bench.open_rounds(workload, "--algorithm", algorithm)
        spinning.link.topology.waiter.oversubscribed = False
    cases = [
        Case(DEFAULT, default.run),
        Case("malloc's defaults", default.run, keeps_memory=False),
        *(Case(name, rounds.run) for name, rounds in opened.items()),
    ]
    times = bench.time_cases(cases)
    rows = bench.results.against(f"settings/{workload}", times, DEFAULT)
    bench.results.print("", f"settings: a round of {algorithm} on {workload}")
    bench.results.print(*format_table(["", "round ms", f"/{DEFAULT}"], rows))
    bench.results.print(*(f"  {name}: not possible here, or not with --set" for name in impossible))
    for rounds in (default, *opened.values()):
        rounds.close()
