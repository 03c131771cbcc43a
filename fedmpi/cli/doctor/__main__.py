"""Check machines and settings before a run: ``mpirun -np 4 python -m fedmpi doctor``; also under srun and in a job.

It takes the settings of fedmpi.train, and checks what a run with these settings needs:

    mpirun -np 4 python -m fedmpi doctor --task.data fashion_mnist --data-dir data

With --crosses it checks nothing, and prints what such a run sends from one silo to the others:

    fedmpi doctor --crosses --data 'silo_{client}.h5'
"""

import dataclasses
import json
import sys

from fedmpi.cli.doctor.checks import (
    FAILED,
    OK,
    WARNING,
    Check,
    by_node,
    check_clocks,
    check_cores,
    check_devices,
    check_hidden,
    check_ranks,
    check_settings,
    check_versions,
)
from fedmpi.cli.doctor.collect import allgather_facts, check_needs, try_sum
from fedmpi.cli.doctor.crosses import describe_crossing
from fedmpi.cli.doctor.facts import describe_rank
from fedmpi.cli.doctor.speed import measure
from fedmpi.comm.agreement import agree, difference
from fedmpi.comm.job.parser import Parser
from fedmpi.comm.job.ranks import run_program, show
from fedmpi.comm.start.launch import check_launch
from fedmpi.config.build import same_on_all_ranks
from fedmpi.ground.errors import AgreedUserError, UserError
from fedmpi.ground.text import format_ranges, table
from fedmpi.training.config import read_command_line
from fedmpi.training.crossing import kinds_of

MOST_ROWS = 32  # ranks in the table
LAUNCH_ADVICE = "use the mpirun of mpi4py's MPI, or srun with --mpi=pmi2 for MPICH, --mpi=pmix for Open MPI"


def main(arguments=None):
    """Entry point; `arguments` default to those of the process. Collective over all ranks."""
    words = sys.argv[1:] if arguments is None else arguments
    run_program(_run, words, check=lambda link: _check_launch(link, "--json" in words))


def make_parser():
    """The parser of the program's own options."""
    usage = "%(prog)s [--crosses] [--json] [SETTINGS OF fedmpi.train]"
    parser = Parser(prog="fedmpi doctor", add_help=False, description=__doc__, usage=usage)
    text = "only print what goes from a silo to the others in a run with these settings; no data are read"
    parser.add_argument("--crosses", action="store_true", help=text)
    parser.add_argument("--json", action="store_true", help="print everything as JSON instead of tables")
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")
    parser.add_argument("--help", "-h", action="store_true", help="show this help")
    return parser


def read_arguments(arguments):
    """(the doctor's options, the `Config` of the run), or the text of ``--help``.

    Raises:
        UserError: one line: what was given, what is allowed.
    """
    parser = make_parser()
    options, words = parser.parse_known_args(arguments)
    if options.help:
        return parser.format_help()
    config = read_command_line(words)
    if isinstance(config, str):
        raise UserError("--list and --print_config are options of fedmpi.train: leave them out")
    return options, config


def _run(arguments, link):
    read = agree(link, lambda: read_arguments(arguments), tells=True)
    if isinstance(read, str):
        show(link, read)
        return
    options, config = read
    if options.crosses:
        show(link, describe_crossing(kinds_of(config), options.json))
        return
    agree(link, lambda: _check_launch(link, options.json, config.machine.ranks), tells=True)
    link.barrier()
    own = describe_rank(link, config.machine.device)
    ranks = allgather_facts(link, own)
    on_gpus = all(facts.device_key for facts in ranks)
    device = own.device.partition(" ")[0] if on_gpus else "cpu"
    settings = check_settings(difference(link, same_on_all_ranks(config)))
    transport = config.machine.transport if settings.state == OK else "auto"  # the same on all ranks
    summed, used = agree(link, lambda: try_sum(link, transport, device))
    checks = [check_ranks(ranks, summed, used), check_cores(ranks), check_devices(ranks)]
    checks += [check_versions(ranks), settings, check_clocks(ranks)]
    if hides := config.sending.aggregation.hides:
        checks.append(check_hidden(ranks, hides))
    if FAILED not in (checks[2].state, settings.state):
        checks += check_needs(link, ranks, config)
    speeds = measure(link, ranks)
    for name, speed in speeds.items():
        text = f"{speed['bandwidth'] / 1e9:.3g} GB/s, {1e6 * speed['latency']:.3g} us a message"
        checks.append(Check(f"link {name}", OK, text))
    show(link, _as_json(ranks, checks, speeds) if options.json else _as_tables(ranks, checks, used))
    failed = [check.name for check in checks if check.state == FAILED]
    if failed:
        word = "check" if len(failed) == 1 else "checks"
        raise AgreedUserError(f"{len(failed)} {word} failed: {', '.join(failed)}", link.rank == 0)


def _check_launch(link, as_json, expected=None):
    """Check that as many ranks as expected (or None) found each other; if not, the JSON contains this check alone.

    Not collective.
    """
    try:
        check_launch(link, expected)
    except UserError as error:
        if as_json and link.rank == 0 and str(error):
            print(_as_json([], [Check("ranks", FAILED, str(error), LAUNCH_ADVICE)], {}), flush=True)
        raise


def _as_json(ranks, checks, speeds):
    content = {
        "ok": all(check.state != FAILED for check in checks),
        "ranks": [dataclasses.asdict(facts) for facts in ranks],
        "checks": [dataclasses.asdict(check) for check in checks],
        "link": speeds,
    }
    return json.dumps(content, indent=1)


def _as_tables(ranks, checks, used):
    local = {facts.rank: len(node) for node in by_node(ranks) for facts in node}
    rows = [("rank", "node", "cores", "threads", "device", "MPI", "connected")]
    for facts in ranks[:MOST_ROWS]:
        on_node = f"with {local[facts.rank] - 1} on its node" if local[facts.rank] > 1 else "alone on its node"
        device = facts.device or "none"
        cores = format_ranges(facts.cores)
        rows.append((facts.rank, facts.node, cores, facts.threads, device, facts.versions["MPI"], on_node))
    lines = [table(rows)]
    if len(ranks) > MOST_ROWS:
        lines.append(f"  ... and {len(ranks) - MOST_ROWS} more ranks (--json shows all)")
    rows = []
    for check in checks:
        rows.append((check.state, check.name, check.text))
        if check.state in (FAILED, WARNING) and check.advice:
            rows.append(("", "", f"-> {check.advice}"))
    return "\n".join([*lines, "", table(rows)])


if __name__ == "__main__":
    main()
