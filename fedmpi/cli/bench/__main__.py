"""Measure how fast communication rounds are on this machine: ``mpirun -np 2 python -m fedmpi bench``."""

import argparse
import sys

from fedmpi.cli.bench.benchmark import Benchmark
from fedmpi.cli.bench.parts import PARTS
from fedmpi.cli.bench.workloads import WORKLOADS
from fedmpi.comm.agreement import agree
from fedmpi.comm.job.output import check_output
from fedmpi.comm.job.parser import Parser
from fedmpi.comm.job.ranks import run_program, show
from fedmpi.ground.errors import UserError


def main(arguments=None):
    """Entry point; `arguments` default to those of the process. Collective."""
    run_program(_run, sys.argv[1:] if arguments is None else arguments)


def read_arguments(arguments):
    """The options of the benchmark as a namespace, or the text of ``--help``.

    Raises:
        UserError: one line: what was given, what is allowed.
    """
    parser = make_parser()
    chosen = parser.parse_args(arguments)
    if chosen.help:
        return parser.format_help()
    unknown = [part for part in chosen.parts if part not in PARTS]
    if unknown:
        raise UserError(f"unknown part {unknown[0]}: expected one or more of {', '.join(PARTS)}")
    return chosen


def make_parser():
    """The parser of the program's options."""
    width = max(map(len, PARTS))
    parts = "\n".join(f"  {name:<{width}}  {part.__doc__.splitlines()[0]}" for name, part in PARTS.items())
    parser = Parser(prog="fedmpi bench", add_help=False, description=__doc__, epilog=f"parts:\n{parts}")
    add = parser.add_argument
    add("parts", nargs="*", metavar="PART", help="what to measure, see below; default: all parts but rates")
    add("--quick", action="store_true", help="smaller sizes and fewer repetitions: under a minute on 2 cores")
    add("--seconds", type=_positive, help="duration of each comparison in seconds; default: 10, or 1 with --quick")
    text = "algorithms of the part round; the part settings uses the last of them, and the part scaling the first; "
    add("--algorithms", default="fedavg,fafed", metavar="NAMES", help=f"{text}default: fedavg,fafed")
    text = "workload of the parts round, settings, scaling, directions and stages"
    add("--workload", help=f"{text}: {', '.join(WORKLOADS)}")
    text = 'arguments of fedmpi.train that override the workload\'s, like "--batch_size 10"'
    add("--set", default="", metavar="ARGUMENTS", help=text)
    text = 'predict the time of a round on other hardware, like "N=1024,bw=25GB/s,lat=2us"; may also contain q= and'
    add("--project", metavar="SPEC", help=f"{text} parameters=")
    add("--figure", metavar="FILE", help="write the figure of the part rates to FILE (svg, png or pdf)")
    add("--json", metavar="FILE", help="write all measurements to FILE")
    add("--compare", metavar="FILE", help="print the ratios of the measurements to those in an earlier --json FILE")
    add("--traceback", action="store_true", help="show the traceback of an error")
    add("--help", "-h", action="store_true", help="show this help")
    return parser


def _positive(text):
    try:
        number = float(text)
    except ValueError:
        number = 0
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{text}: expected a number > 0")
    return number


def _run(arguments, link):
    chosen = agree(link, lambda: read_arguments(arguments))
    if isinstance(chosen, str):
        show(link, chosen)
    else:
        Benchmark(chosen, link).run()
        agree(link, check_output)


if __name__ == "__main__":
    main()
