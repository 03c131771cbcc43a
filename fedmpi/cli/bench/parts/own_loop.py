"""fedmpi.average and fedmpi.join in a user's own loop, against one flat Allreduce written by hand."""

from torch.nn import functional

from fedmpi.cli.bench import baselines
from fedmpi.cli.bench.results import format_ms, format_ratio
from fedmpi.cli.bench.timing import Case
from fedmpi.ground.text import format_table
from fedmpi.own_loop.average import average
from fedmpi.own_loop.join import join

WORKLOADS = ("cnn", "mlp")
TARGET = 1.03  # of the time of the loop by hand


def measure(bench):
    """Print the table. Collective."""
    bench.results.print("", "a user's own loop: local SGD with fedmpi.average, with fedmpi.join, and written by hand")
    rows = []
    for workload in WORKLOADS:
        rounds = bench.open_rounds(workload, "--algorithm", "fedavg", "--clients", str(bench.link.size))
        cases, close = _cases(rounds)
        times = bench.time_cases(cases)
        close()
        rounds.close()
        for name, case_times in times.items():
            bench.results.record(f"own_loop/{workload}/{name}", case_times)
        ratios = [times[name] / times["by hand"] for name in ("average", "join")]
        for name, ratio in zip(("average", "join"), ratios):
            bench.results.record(f"own_loop/{workload}/{name} to by hand", ratio, "")
        rows.append([workload, format_ms(times["by hand"]), *map(format_ratio, ratios), f"{TARGET}"])
    titles = ["workload", "by hand ms", "average/", "join/", "target"]
    bench.results.print(*format_table(titles, rows))


def _cases(rounds):
    """(the loops as cases, a function that ends them)."""
    config, comm, loop = rounds.config, rounds.link.comm, baselines.loops_by_hand(rounds)
    averaged, joined = loop(), loop()
    fed = average(averaged.module, averaged.optimizer, every=config.rounds.local_steps, comm=comm)
    other = join(joined.module, "fedavg", config.rounds.local_steps, comm, step_size=baselines.STEP_SIZE)

    def join_round():
        for inputs, labels in joined.batches(0):
            other.step(lambda x=inputs, y=labels: functional.cross_entropy(joined.module(x), y))

    def close():
        fed.finish()
        other.finish()

    rounds_of = {
        "by hand": baselines.flat_loop(comm, loop()),
        "average": lambda: averaged.steps(0, fed.step),
        "join": join_round,
    }
    return [Case(name, run_round, keeps_memory=False) for name, run_round in rounds_of.items()], close
