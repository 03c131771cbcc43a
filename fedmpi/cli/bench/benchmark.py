"""What the parts of the benchmark share: the options, the link, the results."""

import datetime
import os
import platform
import sys

import torch

from fedmpi.cli.bench import cost_model
from fedmpi.cli.bench.parts import ONLY_BY_NAME, PARTS
from fedmpi.cli.bench.results import BenchResults, read_results
from fedmpi.cli.bench.rounds import Rounds
from fedmpi.cli.bench.timing import time_cases
from fedmpi.cli.bench.workloads import WORKLOADS, arguments_of
from fedmpi.comm.agreement import agree
from fedmpi.comm.start.mpi_library import MPI
from fedmpi.ground.errors import UserError
from fedmpi.ground.machine.cores import choose_threads, processor_name, usable_cores
from fedmpi.ground.machine.versions import versions
from fedmpi.ground.settings import nearest
from fedmpi.ground.text import format_table
from fedmpi.training.config import read_command_line


class Benchmark:
    """One run of the benchmark. Collective on the link.

    Args:
        options: of the command line, see `fedmpi.cli.bench.__main__.read_arguments`.
        link: an `MPILink` over all ranks.

    Attributes:
        quick: whether sizes are small and repetitions few.
        seconds: duration of one comparison.
        algorithms: list of names.
        workload: the name that the user chose, or None.
        overrides: list of fedmpi.train arguments that override the workload's.
        projection: a `cost_model.Projection`, or None.
        results: a `BenchResults`.

    Raises:
        AgreedUserError: on every rank, before anything is measured, if an option is not allowed.
    """

    def __init__(self, options, link):
        torch.set_num_threads(choose_threads(link)[0])
        self.options, self.link = options, link
        self.quick, self.workload = options.quick, options.workload
        self.seconds = options.seconds or (1.0 if options.quick else 10.0)
        self.algorithms = [name.strip() for name in options.algorithms.split(",") if name.strip()]
        self.overrides = options.set.split()
        self.projection, self._earlier = None, None
        self.results = BenchResults(_describe_machine(link), prints=link.rank == 0)
        agree(link, self._check)

    def _check(self):
        options = self.options
        if not self.algorithms:
            raise UserError("--algorithms: expected names like fedavg,fafed")
        if self.workload is not None and self.workload not in WORKLOADS:
            hint = nearest(self.workload, WORKLOADS)
            raise UserError(f"--workload {self.workload}: expected one of {', '.join(WORKLOADS)}{hint}")
        for algorithm in self.algorithms:
            read_command_line([*arguments_of(self.workload or "fashion"), *self.overrides, "--algorithm", algorithm])
        if options.project:
            self.projection = cost_model.read_projection(options.project)
            if self.link.size == 1 and None in (self.projection.bandwidth, self.projection.latency):
                raise UserError(
                    f"--project {options.project}: one rank has no link to measure: add bw=... and lat=..., "
                    "or start more ranks"
                )
        if options.compare and self.link.rank == 0:
            self._earlier = read_results(options.compare)
        if options.json and self.link.rank == 0:
            self.results.check_writable(options.json)

    def run(self):
        """Measure the chosen parts; print, write and compare the results."""
        self.results.print("machine", *format_table(["", ""], list(self.results.machine.items()))[1:])
        chosen = self.options.parts or [part for part in PARTS if part not in ONLY_BY_NAME]
        if self.projection and "scaling" not in chosen:
            chosen = [*chosen, "scaling"]
        for part in chosen:
            PARTS[part].measure(self)
            agree(self.link, self._write)  # now, so that a failure in a later part loses nothing
        if self._earlier is not None:
            self.results.print("", f"compared with {self.options.compare}", *self.results.compare(self._earlier))

    def _write(self):
        if self.link.rank == 0 and self.options.json:
            self.results.write(self.options.json)

    def time_cases(self, cases, seconds=None):
        """Time `Case`s against each other: dict of name -> `Times`. Collective."""
        return time_cases(self.link, cases, seconds or self.seconds, min_cycles=3 if self.quick else 7)

    def open_rounds(self, workload, *arguments, stages=()):
        """The `Rounds` of a workload, with further fedmpi.train arguments; close them after use. Collective."""
        return Rounds(self.link, [*arguments_of(workload, self.quick), *self.overrides, *arguments], stages)


def _describe_machine(link):
    """Hardware, software, command and date of the measurements, as a dict of texts and numbers."""
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "processor": processor_name(),
        "cores": len(usable_cores()),
        "ranks": link.size,
        "nodes": link.num_nodes,
        "threads per rank": torch.get_num_threads(),
        "oversubscribed": link.oversubscribed,
        "system": f"{platform.system()} {platform.release()}",
        **{name: version for name, version in versions().items() if name in ("python", "torch")},
        "mpi": MPI.Get_library_version().split("\n")[0].split("\0")[0].strip(),
        "command": f"python -m fedmpi bench {' '.join(sys.argv[1:])}".strip(),
        "load": round(os.getloadavg()[0], 1),
    }
