"""Measure a trained model on silos, without training: ``mpirun -np 4 python -m fedmpi evaluate runs/NAME``.

MODEL is a run folder, whose settings of the task, the data, the batches and the machine are used, or a model file
(.safetensors, .h5, .pt); then --model says which model it is. No code is run that only the folder names: --import
mymodule trusts a module of it. SETTINGS are those of fedmpi.train and override the run's, like other data:

    mpirun -np 4 python -m fedmpi evaluate runs/fafed-silo-001 --data 'new_{client}.h5'
"""

import dataclasses
import importlib
import itertools
import pathlib
import sys

from fedmpi.comm.agreement import agree
from fedmpi.comm.job.parser import Parser
from fedmpi.comm.job.ranks import run_program, show
from fedmpi.comm.settings import MachineSettings
from fedmpi.config.grammar import assignments_of, last_text, parse_command_line, read_file, split_paper
from fedmpi.data.settings import DataSettings
from fedmpi.ground.errors import UserError
from fedmpi.ground.files.own_files import check_regular
from fedmpi.ground.files.run_files import SETTINGS
from fedmpi.ground.text import short, table
from fedmpi.training.build import prepare, read_config
from fedmpi.training.evaluation import Evaluation
from fedmpi.training.result import MOST_CELLS, metric_lines
from fedmpi.training.settings import RunSettings

SECTIONS = (
    DataSettings,
    MachineSettings,
)  # of a run, which say on what a model is measured
GROUPS = ("task", "partition", "model")
NAMES_CODE = (*GROUPS, "task.metrics", "task.transform")  # settings whose value may be the dotted path of some code
OURS = ("fedmpi.",)


def main(arguments=None):
    """Entry point; `arguments` default to those of the process. Collective over all ranks."""
    run_program(_run, sys.argv[1:] if arguments is None else arguments)


def make_parser():
    """The parser of the program's own options."""
    parser = Parser(prog="fedmpi evaluate", description=__doc__, usage="%(prog)s MODEL [SETTINGS]")
    parser.add_argument("model", metavar="MODEL", type=pathlib.Path, help="run folder, or model file")
    text = "module of the run's own code, which is trusted, like mymodel; may be repeated"
    parser.add_argument("--import", dest="modules", action="append", default=[], metavar="MODULE", help=text)
    return parser


def _run(arguments, link):
    """The program. Collective on the link."""
    found = agree(link, lambda: _read(arguments), tells=True)
    config = found if isinstance(found, str) else read_config(*found[:1], link, below=found[1])
    if isinstance(config, str):
        show(link, config)
        return
    agree(link, lambda: _check(config), tells=True)
    job = prepare(config, link, learns=False)
    metrics = Evaluation(job)(job.flat.x, job.flat.buffers, 0, whole=True)
    show(link, _report(job, metrics) if link.rank == 0 else "")


def _read(arguments):
    """(what `parse_command_line` makes of the given settings, the run's assignments); or the text of --help."""
    if {"--help", "-h"} & {*arguments}:
        return make_parser().format_help()
    options, words = make_parser().parse_known_args(arguments)
    for name in options.modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001  a user's module can raise anything
            raise UserError(f"--import {name}: {type(error).__name__}: {short(error)}") from error
    assignments, flags = parse_command_line(words)
    own = [("init", str(options.model)), ("evaluate", "full"), *assignments]
    return (own, flags), _of_run(options.model, own, options.modules)


def _of_run(folder, own, trusted):
    """The assignments of a run's settings that evaluating takes, below the user's `own`; none of a model file.

    Raises:
        UserError: if one of them names code that is neither fedmpi's nor of a module in `trusted`.
    """
    if not folder.is_dir() or not check_regular(folder / SETTINGS):
        return []
    settings, _ = split_paper(read_file(folder / SETTINGS, marks_quoted=True), folder / SETTINGS)
    private = last_text(own, "private") or settings.get("private")
    if private not in (None, "null"):
        raise UserError("each client has a model of its own (--private): the run's last record has their results")
    names = {field.name for section in SECTIONS for field in dataclasses.fields(section)}
    names -= RunSettings.marked("each_start")
    taken = []
    for key, text in assignments_of(settings, f"{folder / SETTINGS}"):
        if key not in names and key.partition(".")[0] not in GROUPS:
            continue
        name = key.lower()  # as `fedmpi.config.grammar.find_key` finds a setting: task.TRANSFORM is task.transform
        if name in NAMES_CODE and last_text(own, name) is None and (paths := _foreign(text, trusted)):
            raise UserError(
                f"{folder}: its settings name code of its own, {key} = {short(paths)}, which is not run: if you trust "
                f"it, add --import {paths.rpartition('.')[0]}, or give it yourself: --{key} {short(paths)}"
            )
        taken.append((key, text))
    return taken


def _foreign(text, trusted):
    """The first dotted path in a setting's text whose code is neither fedmpi's nor of a trusted module, or ""."""
    paths = (word.strip() for word in str(text).strip("[]").split(","))
    paths = (path.strip("'\"") for path in paths)
    return next((p for p in paths if "." in p and not p.startswith(OURS) and p.rpartition(".")[0] not in trusted), "")


def _check(config):
    if config.layers.private is not None:
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
