"""Measure a trained model on silos, without training: ``mpirun -np 4 python -m fedmpi.evaluate runs/NAME``.

MODEL is a run folder, whose settings are used, or a model file (.safetensors, .h5, .pt); then --model says which model
it is. SETTINGS are those of fedmpi.train and override the run's, like other data:

    mpirun -np 4 python -m fedmpi.evaluate runs/fafed-silo-001 --data 'new_{client}.h5'
"""

import itertools
import pathlib
import sys

from fedmpi.comm.agreement import agree
from fedmpi.errors import UserError
from fedmpi.program.parser import Parser
from fedmpi.program.ranks import run_program, show
from fedmpi.run_files import SETTINGS
from fedmpi.text import short, table
from fedmpi.training.build import prepare, read_config
from fedmpi.training.evaluation import Evaluation
from fedmpi.training.result import MOST_CELLS, metric_lines


def main(arguments=None):
    """Entry point; `arguments` default to those of the process. Collective over all ranks."""
    run_program(_run, sys.argv[1:] if arguments is None else arguments)


def make_parser():
    """The parser of the program's own options."""
    parser = Parser(prog="python -m fedmpi.evaluate", description=__doc__, usage="%(prog)s MODEL [SETTINGS]")
    parser.add_argument("model", metavar="MODEL", type=pathlib.Path, help="run folder, or model file")
    return parser


def _run(arguments, link):
    """The program. Collective on the link."""
    words = agree(link, lambda: _words(arguments))
    config = words if isinstance(words, str) else read_config(words, link)
    if isinstance(config, str):
        show(link, config)
        return
    agree(link, lambda: _check(config))
    job = prepare(config, link)
    metrics = Evaluation(job)(job.flat.x, job.flat.buffers, 0, whole=True)
    show(link, _report(job, metrics) if link.rank == 0 else "")


def _words(arguments):
    """The words of a training program that begins from the model with its run's settings; or the text of --help."""
    if {"--help", "-h"} & {*arguments}:
        return make_parser().format_help()
    options, settings = make_parser().parse_known_args(arguments)
    settings_file = options.model / SETTINGS
    config = ["--config", str(settings_file)] if settings_file.is_file() else []
    return [*config, "--init", str(options.model), "--evaluate", "full", *settings]


def _check(config):
    if config.run.private is not None:
        raise UserError("each client has a model of its own (--private): the run's last record has their results")
    if not config.task.has_model:
        raise UserError("the task has no model to measure")


def _report(job, metrics):
    """All results as text: together, and client by client."""
    together = table([("together", ""), *metric_lines(job, metrics)])
    names = [*(job.task.client_names or ())]
    cases = metrics.cases or {"classes": [], "values": []}
    shown = len(cases["classes"]) <= MOST_CELLS and cases["values"]
    of_classes = [f"cases of {short(name, 30)}" for name in cases["classes"]] if shown else []
    header = ["client", *(name.replace("_", " ") for name in metrics.clients), *of_classes]
    counts = cases["values"] if shown else itertools.repeat([])
    rows = [
        [f"{client} {names[client] if names else ''}".strip(), *(f"{value:.4f}" for value in values), *of_client]
        for client, (values, of_client) in enumerate(zip(zip(*metrics.clients.values()), counts))
    ]
    return together + ("\n\n" + table([header, *rows], right_from=1) if rows else "")


if __name__ == "__main__":
    main()
