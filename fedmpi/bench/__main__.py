"""``mpirun -np 2 python -m fedmpi.bench``: how fast communication rounds are on this machine."""

import sys

from fedmpi.errors import UserError
from fedmpi.program.parser import Parser
from fedmpi.program.ranks import run_program, show

PARTS = ("link", "round", "workloads", "settings", "scaling", "directions")


def read_arguments(arguments):
    """The settings of the benchmark as a namespace.

    Raises:
        UserError: one line: what came, what is allowed.
    """
    parser = Parser(prog="python -m fedmpi.bench", add_help=False, description=__doc__)
    add = parser.add_argument
    add("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    add("--quick", action="store_true", help="small sizes and few repeats: under a minute on 2 cores")
    add("--seconds", type=float, default=None, help="of measuring per comparison; default 10, with --quick 1")
    add("--algorithms", default="fedavg,fafed", help="of the parts round and settings; default fedavg,fafed")
    add("--workload", default=None, help="of the parts round, settings and scaling; default: fashion, cnn, mlp")
    add("--set", default="", metavar="WORDS", help='settings of fedmpi.train on top of it, like "--batch_size 10"')
    add("--project", default=None, metavar="SPEC", help='seconds per round elsewhere: "N=1024,bw=25GB/s,lat=2us"')
    add("--json", default=None, metavar="FILE", help="write all measures")
    add("--compare", default=None, metavar="FILE", help="print ratios to the measures of an earlier --json")
    add("--traceback", action="store_true", help="show where an error arose")
    add("--help", "-h", action="store_true", help="this text")
    chosen = parser.parse_args(arguments)
    if chosen.help:
        return parser.format_help()
    unknown = [part for part in chosen.parts if part not in PARTS]
    if unknown:
        raise UserError(f"part {unknown[0]}: expected some of {', '.join(PARTS)}")
    if chosen.seconds is not None and not chosen.seconds > 0:
        raise UserError(f"--seconds {chosen.seconds}: expected a number > 0")
    return chosen


def _run(arguments, link):
    from fedmpi.bench.program import Benchmark
    from fedmpi.comm.agreement import agree

    chosen = agree(link, lambda: read_arguments(arguments))
    if isinstance(chosen, str):
        if link.rank == 0:
            show(chosen)
        return
    Benchmark(chosen, link).run()


if __name__ == "__main__":
    run_program(_run, sys.argv[1:])
