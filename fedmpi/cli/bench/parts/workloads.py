"""FedAvg on three fixed workloads against loops written without fedmpi."""

from fedmpi.cli.bench import baselines
from fedmpi.cli.bench.results import format_ms, format_ratio
from fedmpi.cli.bench.timing import Case
from fedmpi.ground.text import format_table

TARGETS = {"cnn": 0.9, "mlp": 0.6, "many_clients": 0.8}  # of the flat loop's time
LOOPS = ("loop, flat", "loop, per tensor", "loop, PeriodicModelAverager")


def measure(bench):
    """Print the table. Collective."""
    bench.results.print("", "fixed workloads: FedAvg against loops without fedmpi and its speed settings")
    if bench.quick:
        bench.results.print("  --quick: smaller workloads, to which the targets do not apply")
    has_gloo = baselines.join_gloo(bench.link)
    rows = []
    for workload, target in TARGETS.items():
        rounds = bench.open_rounds(workload, "--algorithm", "fedavg")
        cases = [Case("fedmpi", rounds.run), Case("floor", rounds.floor), *_loops(rounds, has_gloo)]
        times = bench.time_cases(cases)
        rounds.close()
        for name, case_times in times.items():
            bench.results.record(f"workload/{workload}/{name}", case_times)
        ratios = {name: times["fedmpi"] / times[name] for name in LOOPS if name in times}
        for name, ratio in ratios.items():
            bench.results.record(f"workload/{workload}/fedmpi to {name}", ratio, "")
        shown = [format_ratio(ratios[name]) if name in ratios else "-" for name in LOOPS]
        floor = format_ratio(times["fedmpi"] / times["floor"])
        rows.append([workload, format_ms(times["fedmpi"]), floor, *shown, f"{target}"])
    titles = ["workload", "round ms", "round/floor", *(f"/{name}" for name in LOOPS), "target /loop, flat"]
    bench.results.print(*format_table(titles, rows))
    if any("-" in row for row in rows):
        bench.results.print("  -: PeriodicModelAverager supports one client per rank, on two or more ranks of one node")
    if bench.link.oversubscribed:
        bench.results.print("  more ranks than cores: the ranks of the loops spin while they wait, which slows them")


def _loops(rounds, has_gloo):
    """The baselines as cases, on the same model and data; the one with gloo if it can run."""
    config, loop = rounds.config, baselines.loops_by_hand(rounds)
    comm = rounds.link.comm
    loops = [baselines.flat_loop(comm, loop()), baselines.per_tensor_loop(comm, loop())]
    if has_gloo and rounds.num_clients == comm.size:
        loops.append(baselines.model_averager_loop(loop(), config.rounds.local_steps))
    return [Case(name, run_round, keeps_memory=False) for name, run_round in zip(LOOPS, loops)]
