"""Rounds of each algorithm against their floor (gradients and one Allreduce), and where the time goes."""

from fedmpi.cli.bench.breakdown import break_down
from fedmpi.cli.bench.results import format_ms, format_ratio
from fedmpi.cli.bench.timing import Case
from fedmpi.cli.bench.workloads import WORKLOADS
from fedmpi.ground.text import format_bytes, format_table


def measure(bench):
    """Print two tables per workload: rounds, and the parts of a round. Collective."""
    default = ["fashion"] if bench.quick else ["fashion", "cnn"]
    for workload in [bench.workload] if bench.workload else default:
        # Load what is loaded on first use now, so that it does not count as the first algorithm's memory.
        bench.open_rounds(workload, "--algorithm", bench.algorithms[0]).close()
        opened = {name: bench.open_rounds(workload, "--algorithm", name) for name in bench.algorithms}
        cases = []
        for name, rounds in opened.items():
            cases += [Case(f"{name} round", rounds.run), Case(f"{name} floor", rounds.floor)]
        times = bench.time_cases(cases)
        first_opened = next(iter(opened.values()))
        title = f"rounds of {workload}: {WORKLOADS[workload].description}; {' '.join(bench.overrides)}"
        bench.results.print("", title.rstrip("; "))
        bench.results.print(
            f"  {first_opened.num_clients} clients on {bench.link.size} ranks, {first_opened.dim:,} parameters"
        )
        _report_rounds(bench, workload, opened, times)
        _report_breakdown(bench, workload, opened)
        if {"fedavg", "fafed"} <= set(opened):
            factor = times["fafed round"] / times["fedavg round"]
            bench.results.record(f"round/{workload}/fafed to fedavg", factor, "")
            bench.results.print(f"  fafed/fedavg: {format_ratio(factor)}")
        for rounds in opened.values():
            rounds.close()


def _report_rounds(bench, workload, opened, times):
    rows = []
    for name, rounds in opened.items():
        took, floor = times[f"{name} round"], times[f"{name} floor"]
        key = f"round/{workload}/{name}"
        bench.results.record(key, took)
        bench.results.record(f"{key}/floor", floor)
        bench.results.record(f"{key}/ratio", took / floor, "")
        bench.results.record(f"{key}/memory", rounds.memory, "B")
        rows.append(
            [
                name,
                format_ms(took),
                format_ms(floor),
                format_ratio(took / floor),
                f"{rounds.num_clients * rounds.local_steps / took.median:.0f}",
                format_bytes(rounds.nbytes),
                format_bytes(rounds.memory),
                f"{rounds.memory / (rounds.dim * rounds.job.flat.x.element_size()):.1f}",
                rounds.link.summed_by,
            ]
        )
    titles = ["algorithm", "round ms", "floor ms", "round/floor", "client-steps/s", "sent", "memory", "in rows", "by"]
    bench.results.print(*format_table(titles, rows))


def _report_breakdown(bench, workload, opened):
    rows = []
    for name, rounds in opened.items():
        parts = break_down(rounds, bench.seconds / 4)
        for part, seconds in parts.items():
            bench.results.record(f"round/{workload}/{name}/{part}", seconds)
        local = parts["gradient"] + parts["update"] + parts["data"]
        share = f"{parts['update'] / local:.1%}" if local else "-"
        rows.append([name, *(f"{1e3 * seconds:.3g}" for seconds in parts.values()), share])
    bench.results.print("", *format_table(["ms of a round", *parts, "update/local step"], rows))
