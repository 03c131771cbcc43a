"""Several clients of a rank that take each local step at once (--stack), against the same clients in turn."""

from fedmpi.bench.timing import Case
from fedmpi.text import format_table

IN_TURN = "in turn"


def measure(bench):
    """Print the table. Collective."""
    workload = bench.workload or "many_clients"
    rows = []
    for algorithm in bench.algorithms:
        opened = {IN_TURN: bench.open_rounds(workload, "--algorithm", algorithm)}
        num_clients = opened[IN_TURN].num_clients
        for size in (5, 10, 25):
            if size * bench.link.size <= num_clients:
                words = ["--algorithm", algorithm, "--stack", str(size)]
                opened[f"{size} at once"] = bench.open_rounds(workload, *words)
        times = bench.time_cases([Case(name, rounds.run) for name, rounds in opened.items()])
        shown = bench.results.against(f"stack/{workload}/{algorithm}", times, IN_TURN)
        rows += [[f"{algorithm}, {name}", *cells] for name, *cells in shown]
        for rounds in opened.values():
            rounds.close()
    bench.results.print("", f"stack: a round of {num_clients} clients on {workload}")
    bench.results.print(*format_table(["", "round ms", f"/{IN_TURN}"], rows))
