"""Rounds over q, clients and model size; a cost model fitted to them, tested on a held-out point.

With ``--project`` the model predicts a round on other hardware.
"""

from fedmpi.cli.bench import cost_model
from fedmpi.cli.bench.results import format_ms, format_rate, format_ratio
from fedmpi.cli.bench.rounds import Rounds
from fedmpi.cli.bench.timing import Case
from fedmpi.cli.bench.workloads import RANDOM_IMAGES
from fedmpi.ground.text import format_table

POINTS = [(1, 1), (2, 1), (5, 1), (10, 1), (20, 1), (2, 2), (5, 2), (5, 4)]  # (q, clients per rank)
HELD_OUT = (10, 3)  # predicted from the points
HIDDEN = [12, 126, 1258, 12580, 125786]  # units of an MLP with 795 h + 10 parameters: 10^4 to 10^8


def measure(bench):
    """Print the tables, the fitted model and the projection. Collective."""
    workload = bench.workload or "fashion"
    found, nbytes = _measure_rounds(bench, workload)
    alpha, beta = _measure_link(bench)
    points = [point for point in found if point != HELD_OUT]
    local = [max(found[point][0] - found[point][1], 1e-9) for point in points]
    model = cost_model.CostModel(*cost_model.fit_rounds(points, local), alpha, beta)
    bench.results.print(
        "",
        f"cost model of a round of {workload}, {bench.algorithms[0]}, on this machine:",
        f"  {1e3 * model.fixed:.3g} ms + clients per rank * ({1e3 * model.client:.3g} ms + "
        f"q * {1e3 * model.step:.3g} ms) + 2 ceil(log2 N) * {1e6 * alpha:.3g} us + "
        f"2 (N-1)/N * bytes / ({1e-9 / max(beta, 1e-30):.3g} GB/s)",
    )
    for name in ("fixed", "client", "step", "alpha", "beta"):
        bench.results.record(f"scaling/{workload}/{name}", getattr(model, name))
    predicted = model.local(*HELD_OUT) + model.communication(bench.link.size, nbytes)
    measured = found[HELD_OUT][0]
    bench.results.record(f"scaling/{workload}/predicted to measured", predicted / measured, "")
    bench.results.print(
        f"  held out, q = {HELD_OUT[0]} and {HELD_OUT[1]} clients per rank: {1e3 * predicted:.3g} ms predicted, "
        f"{1e3 * measured:.3g} ms measured ({predicted / measured - 1:+.0%})"
    )
    if bench.projection:
        _project(bench, model, workload, nbytes)


def _measure_rounds(bench, workload):
    """({(q, clients per rank): (seconds of a round, of its communication)}, bytes sent in a round)."""
    points = [*(POINTS[::2] if bench.quick else POINTS), HELD_OUT]
    opened = {}
    for q, clients in points:
        arguments = ["--algorithm", bench.algorithms[0], "--local_steps", q, "--clients", clients * bench.link.size]
        opened[q, clients] = bench.open_rounds(workload, *map(str, arguments))
    cases = [Case(f"{point} round", rounds.run) for point, rounds in opened.items()]
    cases += [Case(f"{point} communication", rounds.communicate) for point, rounds in opened.items()]
    times = bench.time_cases(cases, 2 * bench.seconds)
    rows, found = [], {}
    for q, clients in points:
        took = times[f"{q, clients} round"]
        found[q, clients] = took.median, times[f"{q, clients} communication"].median
        bench.results.record(f"scaling/{workload}/q={q}, {clients} per rank", took)
        rows.append([q, clients * bench.link.size, format_ms(took), f"{1e3 * took.median / (q * clients):.3g}"])
    bench.results.print("", f"scaling: rounds of {bench.algorithms[0]} on {workload}")
    bench.results.print(*format_table(["q", "clients", "round ms", "ms per step of a rank"], rows))
    nbytes = opened[points[0]].nbytes
    for rounds in opened.values():
        rounds.close()
    return found, nbytes


def _measure_link(bench):
    """(alpha, beta) fitted to the communication of models of many sizes."""
    rows, sizes, seconds = [], [], []
    for hidden in HIDDEN[:3] if bench.quick else HIDDEN:
        arguments = f"--task {RANDOM_IMAGES} --task.samples 64 --model mlp --model.hidden {hidden}"
        arguments += f" --local_steps 1 --batch_size 8 --algorithm {bench.algorithms[0]}"
        rounds = Rounds(bench.link, arguments.split())
        cases = [Case("round", rounds.run), Case("communication", rounds.communicate)]
        times = bench.time_cases(cases, bench.seconds / 3)
        took, communication = times["round"], times["communication"]
        bench.results.record(f"scaling/parameters={rounds.dim}/round", took)
        bench.results.record(f"scaling/parameters={rounds.dim}/communication", communication)
        rate = format_rate(rounds.nbytes, communication.median)
        share = format_ratio(communication / took)
        row = [f"{rounds.dim:,}", format_ms(took), format_ms(communication), share, rate, rounds.link.summed_by]
        rows.append(row)
        sizes.append(rounds.nbytes)
        seconds.append(communication.median)
        rounds.close()
    bench.results.print("", "scaling: an MLP with one hidden layer, q = 1, batch 8")
    titles = ["parameters", "round ms", "communication ms", "communication/round", "GB/s", "by"]
    bench.results.print(*format_table(titles, rows))
    return cost_model.fit_link(bench.link.size, sizes, seconds)


def _project(bench, model, workload, nbytes):
    """Print what the model predicts for the hardware and sizes of --project."""
    spec, projection = bench.options.project, bench.projection
    rounds = bench.open_rounds(workload, "--algorithm", bench.algorithms[0])
    q, dim = projection.local_steps or rounds.local_steps, projection.num_parameters or rounds.dim
    rounds.close()
    local, communication = cost_model.project(model, projection, q, nbytes * dim / rounds.dim)
    total = local + communication
    bench.results.record(f"scaling/{workload}/projected {spec}", total)
    bench.results.print(
        f"  projected to {spec}: {1e3 * total:.3g} ms a round of q = {q}, {dim:,} parameters ({1e3 * local:.3g} local, "
        f"{1e3 * communication:.3g} communication), {projection.num_ranks * q / total:.3g} client-steps/s"
    )
