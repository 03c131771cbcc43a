"""The runs of an experiment as a sweep: planning them, making them, and recording how each was made."""

import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import platform
import re
import shlex
import subprocess
import sys

import yaml

import fedmpi
from fedmpi.cli.sweep.folder import check_run_folders, own_sweep_folder
from fedmpi.cli.sweep.local import is_running, run_all
from fedmpi.cli.sweep.plan import Plan, Planned, names_of
from fedmpi.cli.sweep.slurm import SIGNATURE, job_array
from fedmpi.config.grammar import flatten
from fedmpi.ground.errors import UserError
from fedmpi.ground.files.own_files import check_regular, check_replaceable, replacing, set_aside
from fedmpi.ground.files.run_files import RECORDS
from fedmpi.ground.machine.cores import processor_name
from fedmpi.ground.text import format_seconds
from fedmpi.ground.version import PACKAGE
from fedmpi.runs.folder import is_run, outcome, read_run
from fedmpi.training.settings import RunSettings
from reproduction.experiment import FIRST, as_texts

PROVENANCE = "provenance.json"  # in a run's folder: what made it
MAKER = "maker.json"  # beside the runs: what is known of those that end without this program
ON_GPU = "GPU: "  # begins the name of the processor of runs on a GPU
FIRST_RUN, FIRST_SETTINGS = "first", "first.json"  # the run before all others, and what it was made with
OF_MAKER = ("commit", "torch", "made_by")  # are always in it
PLAN = "# Written by reproduction --emit-slurm, which replaces this file.\n"
ASIDE = re.compile(r"\.old-\d+$")  # ends the name of a run that was set aside
EVALUATION = ("eval_every", "evaluate", "evaluate_samples")  # decide which rounds and samples the curves have
TEMPLATE = PACKAGE / "slurm" / "sweep.sbatch"


@dataclasses.dataclass(frozen=True)
class How:
    """How runs are made.

    Attributes:
        ranks: of each run. at_a_time: runs at once. threads: of each rank. launch: command that starts ranks, or None.
        compile: how the runs' gradients are compiled, or None: as in the settings.
        data_dir: folder of data files, or None. out: folder for run folders.
        command: of this program, for the record.
    """

    ranks: int
    at_a_time: int
    threads: int
    launch: str | None
    compile: str | None
    data_dir: str | None
    out: pathlib.Path
    command: str

    @property
    def launcher(self):
        """Command that starts ranks, as `run_all` expects it."""
        return ("mpirun -np {ranks}" if self.ranks > 1 else "") if self.launch is None else self.launch


@dataclasses.dataclass(frozen=True)
class Planning:
    """The runs that are planned for some points and seeds.

    Attributes:
        plan: a `Plan`. points: name of its run -> (`Point`, seed). first: a `Plan` of one run before it, or None.
    """

    plan: Plan
    points: dict
    first: Plan | None


def plan_runs(first, points, seeds, folder, how):
    """The `Planning` of some points and seeds.

    Args:
        first: settings of a run before all others, or {}. points: list of `Point`. seeds: list of int.
        folder: of the runs. how: a `How`.
    """
    folder = folder.absolute()
    pairs = [(point, seed) for seed in seeds for point in points]  # all methods can be compared after each seed
    settings = [_filled({**point.settings, "seed": str(seed)}, folder / FIRST_RUN) for point, seed in pairs]
    place = {"threads": str(how.threads), "data_dir": how.data_dir, "compile": how.compile}
    place = {key: str(value) for key, value in place.items() if value}
    first_one = {key: text for key, text in settings[0].items() if key != "seed"}
    same = {key: text for key, text in first_one.items() if all(one.get(key) == text for one in settings)}
    varied = [{key: text for key, text in one.items() if key not in same} for one in settings]
    names = names_of(varied)
    plan = Plan(folder, same | place, [Planned(name, one) for name, one in zip(names, varied)])
    before = Plan(folder, place, [Planned(FIRST_RUN, as_texts(first))]) if first else None
    return Planning(plan, dict(zip(names, pairs)), before)


def _filled(settings, first):
    """Settings with the folder of the first run in place of "{first}"."""
    return {key: text.replace(FIRST, str(first)) for key, text in settings.items()}


def make(planning, how, after_each=lambda: None):
    """Make the runs that are missing, broken, or have other settings than planned; finished ones are kept.

    Args:
        after_each: called before the first of the planned runs, and when one has ended.

    Raises:
        UserError: if a run's settings are wrong.
    """
    plans = [plan for plan in (planning.first, planning.plan) if plan]
    for plan in plans:
        _own_folder(plan.out)
        _check_files(plan)
    if planning.first:
        _set_aside_if_first_changed(planning.first)
    for plan in plans:  # before `MAKER` is written anew
        _record_missing(plan)
    for plan in plans:
        todo = to_make(plan)
        print(f"{len(plan.runs)} runs in {plan.out}, {len(todo)} of them still to do", flush=True)
        used = dataclasses.replace(how, ranks=_ranks_with_a_client(plan, how.ranks))
        if todo and used.ranks < how.ranks:
            print(f"each run uses {used.ranks} of {how.ranks} ranks: one per client", flush=True)
        known = _known(used)
        if todo and not any(is_running(plan, run) for run in todo):  # such a run has the former maker
            _write(plan.out / MAKER, known)
        then = after_each if plan is planning.plan else lambda: None
        then()
        run_all(plan, todo, used.ranks, used.at_a_time, how.launcher, _Ended(plan, len(todo), known, then))
        _record_missing(plan)


def _set_aside_if_first_changed(plan):
    """Rename every run in a folder if the one before all others was made with other settings than its plan's.

    The others used its model. Its settings are kept beside it, so that this also holds after it has been deleted.
    """
    run, path = plan.runs[0], plan.out / FIRST_SETTINGS
    _check(path, "seed", "rounds")
    wanted, made = decisive_settings(plan.arguments(run)), _read(path)
    has_changed = is_run(plan.folder(run)) and _is_other(plan, run)
    if has_changed or any(made.get(key, text) != text for key, text in wanted.items()):
        for folder in (one for one in sorted(plan.out.iterdir()) if is_run(one) and not ASIDE.search(one.name)):
            if is_running(plan, Planned(folder.name, {})):
                raise UserError(f"{folder}: is still running, with an older run '{FIRST_RUN}': stop it, or wait")
            _set_aside(folder)
    _write(path, wanted)


def _ranks_with_a_client(plan, ranks):
    """How many of `ranks` each run of a plan can use: every rank needs a client."""
    if ranks == 1:
        return 1
    from fedmpi.training.config import read_command_line  # imports torch

    clients = (read_command_line(plan.arguments(run)).data.clients for run in plan.runs)
    return min([ranks, *filter(None, clients)])


def _own_folder(folder):
    try:
        own_sweep_folder(folder)
    except OSError as error:
        raise UserError(f"--out {folder}: cannot be written: {error.strerror}") from None


def _check_files(plan):
    """Check that what the runs of a plan write is missing, or that fedmpi wrote it.

    Raises:
        UserError: if something else has one of these names.
    """
    check_run_folders(plan)
    _check(plan.out / MAKER, *OF_MAKER)
    for run in plan.runs:
        _check(plan.folder(run) / PROVENANCE, "date", "command")


def _set_aside(folder):
    try:
        print(f"{folder} is kept as {set_aside(folder).name}: its settings have changed", flush=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be renamed: {error.strerror}") from None


def to_make(plan):
    """The runs of a plan that did not end with its settings; folders of runs with other settings are renamed.

    A run that was stopped goes on from its checkpoint only if its settings, also the number of rounds, are unchanged.
    """
    todo = []
    for run in plan.runs:
        folder = plan.folder(run)
        if is_run(folder) and _is_other(plan, run):
            if is_running(plan, run):
                raise UserError(f"{folder}: is still running, with other settings: stop it, or wait")
            _set_aside(folder)
        todo += [run] if outcome(folder) in ("missing", "broken") else []
    return todo


def _is_other(plan, run):
    """Whether the run in a folder was made with other settings than the plan's: a preset may have changed."""
    made = read_run(plan.folder(run)).settings
    wanted = decisive_settings(plan.arguments(run))
    return any(json.dumps(made[key], default=str) != text for key, text in wanted.items() if key in made)


def decisive_settings(arguments):
    """The settings of a command line that decide what a run measures: name -> value as JSON text."""
    from fedmpi.training.config import read_command_line  # imports torch

    resolved = read_command_line(arguments).resolved
    its = flatten({key: one for key, one in resolved.items() if key != "paper"})
    keys = [key for key in its if key in EVALUATION or RunSettings.role(key) in ("learning", "problem", "seed")]
    return {key: json.dumps(its[key], default=str) for key in keys}


class _Ended:
    """A line for every run that ends, and its provenance in its folder."""

    def __init__(self, plan, number, known, then):
        self._plan, self._number, self._known, self._ended, self._then = plan, number, known, 0, then

    def __call__(self, run, code, seconds, last, cpu_seconds):
        self._ended += 1
        folder, how = self._plan.folder(run), outcome(self._plan.folder(run))
        if how not in ("complete", "diverged"):
            how = f"broken, exit code {code}: {last}"
        elif cpu_seconds:  # otherwise another program made it: see `_record_missing`
            is_known = not was_continued(folder, seconds)
            cost = {"cpu_seconds": round(cpu_seconds, 2) if is_known else None, "wall_seconds": round(seconds, 2)}
            _record(self._plan, run, self._known | cost, datetime.datetime.now())
        print(f"[{self._ended}/{self._number}] {run.name}: {how} ({format_seconds(seconds)})", flush=True)
        self._then()


def _record_missing(plan):
    """Write the provenance of runs that ended without this program, which was killed or had made a job array of them.

    Their CPU time is not known.
    """
    known = _read(plan.out / MAKER)
    for run in plan.runs:
        folder = plan.folder(run)
        if known and outcome(folder) in ("complete", "diverged") and not provenance(folder):
            records = read_run(folder).records
            cost = {"wall_seconds": round(records[-1]["seconds"], 2) if records else None}
            _record(plan, run, known | cost, datetime.datetime.fromtimestamp((folder / RECORDS).stat().st_mtime))


def _record(plan, run, known, ended):
    """Write the provenance of a run that ended at a time."""
    its = {"date": ended.astimezone().isoformat(timespec="seconds"), "command": command_of(plan, run)}
    _write(plan.folder(run) / PROVENANCE, known | its)


def _known(how):
    """What is known of runs before they are made."""
    return facts() | {"ranks": how.ranks, "threads": how.threads, "made_by": how.command}


def _write(path, values):
    try:
        with replacing(path) as part:  # a kill leaves no half of a file
            part.write_text(json.dumps(values, indent=1), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None


def _check(path, *keys):
    """Check that a JSON file, which may be replaced, is missing, or has some keys, as what this program writes.

    Raises:
        UserError: if it is something else.
    """
    if check_regular(path) and not set(keys) <= set(_read(path)):
        raise UserError(f"{path}: exists, and fedmpi did not write it: move it; nothing changed")


def _read(path):
    """The dict in a JSON file; {} if there is none, or only a part of it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        return content if isinstance(content, dict) else {}
    except (OSError, ValueError, RecursionError):
        return {}


def was_continued(folder, seconds):
    """Whether a run that took some seconds since its last start had begun before: what it cost is then not known."""
    records = read_run(folder).records
    return bool(records) and records[-1]["seconds"] > seconds


def command_of(plan, run):
    """The command that makes a run, without arguments that name folders of this machine."""
    settings = {key: text for key, text in {**plan.common, **run.varied}.items() if RunSettings.role(key) != "place"}
    words = [f"--{key}={text.replace(str(plan.out / FIRST_RUN), FIRST_RUN)}" for key, text in settings.items()]
    return shlex.join(["python", "-m", "fedmpi.train", *words])


def facts():
    """What the runs of this process have in common: commit, processor, cores, versions."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    processor = f"{processor_name()}, {torch.backends.cpu.get_cpu_capability()}"  # decide how sums are rounded
    return {
        "commit": code_version(),
        "processor": f"{ON_GPU}{gpu}; {processor}" if (gpu := _gpu_name()) else processor,
        "cores": cores,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _gpu_name():
    """The name of the GPU that runs use by default, or "".

    Another process asks: the runs are copies of this one, which do not survive that it has used CUDA.
    """
    import torch

    if not (torch.version.cuda or torch.version.hip):
        return ""
    asked = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    return subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True).stdout.strip()


def code_version():
    """The commit of fedmpi's files, with "+" if they were changed; the version if they are in no repository."""
    root = PACKAGE.parent
    sources = ("fedmpi", "reproduction", ":!reproduction/results")

    def git(*words):
        ended = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True)
        return ended.stdout.strip()

    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if git("ls-files", "fedmpi/train.py"):
            return git("rev-parse", "--short=10", "HEAD") + ("+" if git("status", "--porcelain", *sources) else "")
    return fedmpi.__version__


def provenance(folder):
    """What is known of how a run was made; {} of one that another program made."""
    return _read(folder / PROVENANCE)


def emit_slurm(planning, how, path):
    """Write a job array that makes the runs of a plan; the run before them, if any, must have ended.

    Raises:
        UserError: if nothing is to be made, or something cannot be written.
    """
    check_replaceable(path, SIGNATURE)
    _own_folder(planning.plan.out)
    _check_files(planning.plan)
    if planning.first and to_make(planning.first):
        raise UserError(
            f"{planning.first.out}: the other runs need the run '{FIRST_RUN}': make it first, without --emit-slurm"
        )
    plan = planning.plan
    todo, ranks = to_make(plan), _ranks_with_a_client(plan, how.ranks)
    if not todo:
        raise UserError(f"{plan.out}: every run has ended: nothing to submit")
    for run in filter(lambda one: is_running(plan, one), todo):
        raise UserError(f"{plan.folder(run)}: is still running: stop it, or wait")
    content = {"settings": plan.common, "list": [run.varied for run in plan.runs]}
    numbers = [number for number, run in enumerate(plan.runs) if run in todo]
    file = plan.out / "plan.yaml"
    words = [f"--out={plan.out}", f"--plan={file}", "--metric=train_loss"]
    try:
        with replacing(file, PLAN.encode()) as part:
            part.write_text(PLAN + yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
        _record_missing(plan)
        known = _known(dataclasses.replace(how, ranks=ranks))
        known = {key: one for key, one in known.items() if key not in ("processor", "cores")}  # those of the nodes
        _write(plan.out / MAKER, known)
        text = TEMPLATE.read_text(encoding="utf-8")
        with replacing(path, SIGNATURE) as part:
            part.write_text(job_array(text, words, numbers, ranks, how.at_a_time), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be written: {error.strerror}") from None
    print(f"submit: sbatch {path}; afterwards the same command without --emit-slurm writes the page")
