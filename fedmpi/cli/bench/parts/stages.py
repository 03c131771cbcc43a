"""What stages cost, which process what a client sends: rounds without any, and with some that change nothing."""

from fedmpi.aggregation.stages import Stage
from fedmpi.aggregation.stages.norm_bound import NormBound
from fedmpi.cli.bench.timing import Case
from fedmpi.ground.text import format_table

NONE = "no stage"


class Nothing(Stage):
    """A stage that changes nothing."""

    def apply(self, sent):
        pass


class NothingFromStart(Nothing):
    """The same, but the rows that the round began with are kept for it."""

    needs_start = True


def measure(bench):
    """Print the table. Collective.

    One rank of several clients keeps these rows anyway; a rank of one client copies them once a round.
    """
    workload = bench.workload or ("fashion" if bench.quick else "mlp")
    algorithm = bench.algorithms[0]
    opened = {NONE: bench.open_rounds(workload, "--algorithm", algorithm)}
    stages = {"a stage": Nothing(), "with the start": NothingFromStart()}
    stages |= {"norm_bound, no move is longer": NormBound(bound=1e9), "norm_bound, all are": NormBound(bound=1e-3)}
    for name, stage in stages.items():
        opened[name] = bench.open_rounds(workload, "--algorithm", algorithm, stages=[stage])
    times = bench.time_cases([Case(name, rounds.run) for name, rounds in opened.items()])
    rows = bench.results.against(f"stages/{workload}", times, NONE)
    bench.results.print("", f"stages: a round of {algorithm} on {workload}")
    bench.results.print(*format_table(["", "round ms", f"/{NONE}"], rows))
    for rounds in opened.values():
        rounds.close()
