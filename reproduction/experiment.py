"""The papers' tables and figures as data: one YAML file in ``experiments/`` for each, and ``papers.yaml``.

An experiment that trains nothing (a table of proved rates, of layers) has `title`, `paper`, `place` and `not_run`, the
reason. One with `orders`, a list of methods, is a table of proved rates, which is measured (see
`reproduction.orders`), with `unmeasured`, which of the table's rows are not, `beside`, the methods that the paper's
claim is not about, and `controls`: method -> an exponent that it does not have. Every other one has

    title, paper, place, question:  what it shows, and where the paper shows it.
    data:      names of the data files that it needs.
    settings:  of all runs.
    panels:    name -> settings (a preset, and what differs from it). A paper's figure has a curve per method in each.
    methods:   name -> settings; the preset adds the tuned values of the algorithm that they choose.
    first:     settings of a run before all others; "{first}" in other settings is its folder.
    scales:    small, full, and for attacks mlp (as full, but an MLP is attacked) -> says (what is reduced), settings,
               first, panels or methods where only some are (or panels: name -> settings of one of them), and tuned:
               method -> settings that were chosen for runs of this length (see tune).
    shows:     how many of the paper's panels (see papers.yaml) it repeats; 0 of one that repeats another.
    seeds:     that were planned; an outcome that further ones have changed says so.
    metric:    by which methods are compared.
    printed:   metric, place, and values: panel -> method -> the number in the paper; all three are needed. With
               fit_length: true the page at full says after how many rounds our values are nearest to these: for a
               paper that does not give the length of its runs. variant: what differs, of a second experiment for a
               place.
    figure:    place, axis and metrics of the paper's figure.
    guessing:  metric -> its value without learning, of metrics for which `reproduction.strength` has none.
    claims:    list of {claim: key in papers.yaml, panel, ahead: method, of: [methods], metric, at_share: of all
               rounds, after which `ahead` is measured}; or with reaches: number, at the end, instead of `of`. With
               level: margin the paper says that neither is ahead, which holds if they differ by less than the margin;
               with than: panel, that the lead is larger on `panel` (then `of` has one method); with worse_than: panel
               instead of `of`, that `ahead` ends worse than there. experiment: the other experiment that has the panel
               of `than` or `worse_than`. all_at_share: of all rounds, after which all methods are measured. saves:
               share of the rounds that `ahead` at least saves until the best value of the slower method (0: it needs
               fewer). calmer: true if its curve takes smaller steps in the wrong direction, in the first third of the
               rounds. A claim has at most one of reaches, than, worse_than, all_at_share, saves, calmer, and level or
               at_share. best_so_far: true if the paper's figure shows the best value so far; it is compared instead of
               the last tenth's mean (alone, with than or level).
    tune:      panel, settings, seeds, and grids: method -> setting -> values; as many points for each method, or a
               sentence in `unequal` that says why not. What is best is in the preset, or for runs as short as those of
               the small scale, in its `tuned`. With a key full or mlp, settings or grids of longer runs, that --tune
               tries instead at that scale; the preset has the best, or where it belongs to other runs, too, `tuned` of
               the scale. metric: by which is chosen, the mean over the last tenth of the rounds; default: one on
               held-out data. Tasks without these have train_loss (of an attack, its objective).
    untuned:   a sentence: where the step sizes come from, if there is no `tune`.
    cpu_hours: of the full scale, one seed: gradients times the measured time of one.
    differs:   list of sentences: what differs from the paper, and why.
    findings:  scale -> list of sentences: what was found out about claims that failed.
    widens:    name of the experiment whose comparison this one repeats with step sizes beyond the paper's grid;
               the front page shows its values, and the first finding at full scale of the first such experiment.
    grid_of:   name of the experiment whose chosen step sizes this one has.
    fixed:     claims, lengths, grids, and rule (of orders): when they were last changed, at any scale: the day, or the
               time in UTC, in quotes. It is the time of the commit; claims with the metric that decides them, lengths
               with all that a scale reduces, and grids with the last run of --tune that the chosen values rest on.

`SHAPE` has the type of each.
"""

import dataclasses
import functools
import itertools
import math
import pathlib
import re

from fedmpi.cli.sweep.choice import ALLOWED, may_choose
from fedmpi.config.grammar import assignments_of, read_file
from fedmpi.ground.errors import UserError
from fedmpi.ground.settings import nearest
from fedmpi.ground.text import short
from fedmpi.runs.record import AXES

HERE = pathlib.Path(__file__).parent
FOLDER, PAPERS = HERE / "experiments", HERE / "papers.yaml"
SCALES = ("small", "mlp", "full")  # from the cheapest to the paper's own
FIRST = "{first}"
ENDINGS = (".yaml", ".yml")  # of an experiment's own file

LARGEST = 1e200  # of numbers


def _is_number(value):
    return type(value) in (int, float) and -LARGEST < value < LARGEST


def _is_text(value):
    return isinstance(value, str) and value.strip() != ""


# The shape of an experiment's file. A dict is a mapping of these keys, or with the key ANY of all keys; [shape] is a
# list, [shape, ...] one with at least one entry; a pair is a test, and what it expects in words.
ANY = "*"
ANYTHING = (lambda value: True, "")
TEXT = (_is_text, "text, in quotes if it is a number")
SENTENCE = (_is_text, "a sentence, in quotes if it contains a colon")  # YAML reads "one: two" as a mapping
NUMBER = (_is_number, "a number, like 0.5 or 1.0e-5")
SEED = (lambda value: type(value) is int and 0 <= value < LARGEST, "a whole number, 0 or larger")
WHEN = (
    lambda value: isinstance(value, str) and re.fullmatch(r"\d{4}-\d\d-\d\d( \d\d:\d\d(:\d\d)?)?", value),
    'a day or a time in UTC, in quotes, like "2026-11-28" or "2026-11-28 08:15"',
)
TRUTH = (lambda value: isinstance(value, bool), "true or false")
SETTINGS = {ANY: ANYTHING}
GRIDS = {ANY: {ANY: [ANYTHING, ...]}}
TUNE = {
    "panel": TEXT,
    "settings": SETTINGS,
    "seeds": [SEED, ...],
    "metric": TEXT,
    "grids": GRIDS,
    "unequal": SENTENCE,
}
SCALE = {
    "says": TEXT,
    "settings": SETTINGS,
    "first": SETTINGS,
    "panels": lambda value: {ANY: SETTINGS} if isinstance(value, dict) else [TEXT, ...],
    "methods": [TEXT, ...],
    "tuned": {ANY: SETTINGS},
}
CLAIM = {
    "claim": TEXT,
    "panel": TEXT,
    "ahead": TEXT,
    "of": [TEXT, ...],
    "metric": TEXT,
    "at_share": (lambda value: _is_number(value) and 0 < value <= 1, "a number above 0 and at most 1"),
    "reaches": NUMBER,
    "level": (lambda value: _is_number(value) and value > 0, "a margin above 0, in units of the metric"),
    "than": TEXT,
    "worse_than": TEXT,
    "experiment": TEXT,
    "saves": (lambda value: _is_number(value) and 0 <= value < 1, "a share of the rounds, at least 0 and below 1"),
    "calmer": TRUTH,
    "best_so_far": TRUTH,
    "all_at_share": (lambda value: _is_number(value) and 0 < value <= 1, "a number above 0 and at most 1"),
}
SHAPE = {
    "title": TEXT,
    "paper": TEXT,
    "place": TEXT,
    "question": TEXT,
    "not_run": TEXT,
    "orders": [TEXT, ...],
    "unmeasured": TEXT,
    "beside": [TEXT],
    "controls": {ANY: NUMBER},
    "data": [TEXT],
    "settings": SETTINGS,
    "panels": {ANY: SETTINGS},
    "methods": {ANY: SETTINGS},
    "first": SETTINGS,
    "scales": dict.fromkeys(SCALES, SCALE),
    "metric": TEXT,
    "printed": {"metric": TEXT, "place": TEXT, "values": {ANY: {ANY: NUMBER}}, "fit_length": TRUTH, "variant": TEXT},
    "figure": {
        "place": TEXT,
        "axis": (lambda value: value in AXES, f"one of {', '.join(AXES)}"),
        "metrics": [TEXT, ...],
    },
    "guessing": {ANY: NUMBER},
    "shows": (lambda value: type(value) is int and value > 0, "a whole number above 0"),
    "seeds": [SEED, ...],
    "claims": [CLAIM],
    "tune": TUNE | {scale: TUNE for scale in SCALES if scale != "small"},
    "untuned": TEXT,
    "cpu_hours": (lambda value: _is_number(value) and value >= 0, "a number of hours, 0 or more"),
    "differs": [SENTENCE],
    "findings": dict.fromkeys(SCALES, [SENTENCE]),
    "widens": TEXT,
    "grid_of": TEXT,
    "fixed": dict.fromkeys(("claims", "lengths", "grids", "rule"), WHEN),
}


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One table or figure; the attributes are the keys of its file."""

    name: str
    ending: str  # of the file
    title: str
    paper: str
    place: str
    question: str = ""
    not_run: str = ""
    orders: list = dataclasses.field(default_factory=list)
    unmeasured: str = ""
    beside: list = dataclasses.field(default_factory=list)
    controls: dict = dataclasses.field(default_factory=dict)
    data: list = dataclasses.field(default_factory=list)
    settings: dict = dataclasses.field(default_factory=dict)
    panels: dict = dataclasses.field(default_factory=dict)
    methods: dict = dataclasses.field(default_factory=dict)
    first: dict = dataclasses.field(default_factory=dict)
    scales: dict = dataclasses.field(default_factory=dict)
    shows: int = 0
    seeds: list = dataclasses.field(default_factory=list)
    metric: str = ""
    printed: dict = dataclasses.field(default_factory=dict)
    figure: dict = dataclasses.field(default_factory=dict)
    guessing: dict = dataclasses.field(default_factory=dict)
    claims: list = dataclasses.field(default_factory=list)
    tune: dict = dataclasses.field(default_factory=dict)
    untuned: str = ""
    cpu_hours: float | None = None
    differs: list = dataclasses.field(default_factory=list)
    findings: dict = dataclasses.field(default_factory=dict)
    widens: str = ""
    grid_of: str = ""
    fixed: dict = dataclasses.field(default_factory=dict)

    def points(self, scale):
        """The configurations of a scale, without seeds: a list of `Point`.

        Raises:
            UserError: if the experiment is not run at this scale.
        """
        if scale not in self.scales:
            raise UserError(
                f"{self.name}: cannot be run with --scale {scale}: {self.not_run or 'its file has no such scale'}"
            )
        what = self.scales[scale]
        panels, methods = what.get("panels", list(self.panels)), what.get("methods", list(self.methods))
        tuned, reduction = what.get("tuned", {}), what.get("settings", {})
        common = {panel: as_texts(self.settings, self.panels[panel]) for panel in panels}
        own = {method: as_texts(self.methods[method], tuned.get(method, {}), reduction) for method in methods}
        reduced = {panel: as_texts(panels[panel]) if isinstance(panels, dict) else {} for panel in panels}
        return [
            Point(panel, method, common[panel] | own[method] | reduced[panel])
            for panel, method in itertools.product(panels, methods)
        ]

    @property
    def metrics(self):
        """Names of the metrics of its tables: its own and those of the paper's figure, each once."""
        return list(dict.fromkeys([self.metric, *self.figure.get("metrics", [])]))

    @property
    def argument(self):
        """The word of a command line that names it."""
        return self.name if (FOLDER / f"{self.name}.yaml").is_file() else self.name + self.ending

    def first_run(self, scale):
        """Settings of the run that must end before all others, or {}."""
        return self.scales[scale].get("first", self.first)

    def tuning(self, scale):
        """What `tune` contains for a scale: panel, settings, grids and what else; {} if it contains nothing for it."""
        usual = {key: value for key, value in self.tune.items() if key not in SCALES}
        if scale == "small":
            return usual
        return usual | self.tune[scale] if scale in self.tune else {}

    def tuning_points(self, scale="small"):
        """The grid of every method for a scale: a list of `Point`; see `points`.

        Raises:
            UserError: if there is none.
        """
        tuning = self.tuning(scale)
        if not tuning:
            raise UserError(f"{self.name}: its file has no grids for --tune --scale {scale}")
        panel = tuning["panel"]
        common = as_texts(self.settings, self.panels[panel])
        points = []
        for method, grid in tuning["grids"].items():
            for values in itertools.product(*grid.values()):
                chosen = as_texts(self.methods[method], dict(zip(grid, values)), tuning.get("settings", {}))
                points.append(Point(panel, method, common | chosen))
        return points

    def printed_value(self, panel, method):
        """The number in the paper, or None."""
        return self.printed.get("values", {}).get(panel, {}).get(method)


@dataclasses.dataclass(frozen=True)
class Point:
    """One configuration: a panel's name, a method's, and setting -> text."""

    panel: str
    method: str
    settings: dict


def as_texts(*layers):
    """Setting -> text of several dicts of settings; later ones override earlier ones."""
    return {key: text for layer in layers for key, text in assignments_of(layer)}


def experiment_names():
    """Names of all experiments, papers in the order of `papers.yaml`, each in the order of its tables and figures."""
    return sorted((path.stem for path in FOLDER.glob("*.yaml")), key=_position)


def _position(name):
    paper = name.partition("_")[0]
    order = list(read_papers())
    return (order.index(paper) if paper in order else len(order), name)


def find_experiments(names):
    """The `Experiment`s of some names; "all", or a paper's key, are those of all papers, or of one.

    Args:
        names: list of str; one that ends in .yaml or .yml is the path of an experiment's file.

    Raises:
        UserError: if a name is unknown, or a file is wrong.
    """
    known = experiment_names()
    if not known:
        raise UserError(f"{FOLDER}: contains no experiment: restore the folder (git checkout)")
    found = {}
    for name in names:
        if name.endswith(ENDINGS):
            found[name] = None
            continue
        chosen = known if name == "all" else [one for one in known if name in (one, one.partition("_")[0])]
        if not chosen:
            raise UserError(f"unknown table or figure '{name}'{nearest(name, known)}; --list shows them")
        found |= dict.fromkeys(chosen)
    paths = (pathlib.Path(name) if name.endswith(ENDINGS) else FOLDER / f"{name}.yaml" for name in found)
    experiments = {}
    for path in paths:
        one = read_experiment(path)
        if one.name in known and path.resolve().parent != FOLDER.resolve():
            raise UserError(f"{path}: {one.name} is one of the papers' tables or figures (--list): rename the file")
        if one.name.endswith(("-runs", "-first", "-full")):
            raise UserError(f"{path}: its files could have the names of another experiment's: rename the file")
        if experiments.setdefault(one.name, one) != one:
            raise UserError(f"{path}: another experiment is called {one.name}, too: rename the file")
    return list(experiments.values())


def state_of(path):
    """What changes whenever a file does; None if there is none."""
    try:
        its = path.stat()
    except OSError:
        return None
    return its.st_mtime_ns, its.st_size, its.st_ino


def read_papers():
    """Key -> {name, title, claims, ...} of every paper, see `PAPERS`."""
    return _read_papers(PAPERS, state_of(PAPERS))


@functools.lru_cache(maxsize=1)
def _read_papers(path, state):
    return read_file(path)


def read_experiment(path):
    """The `Experiment` of a file, which is read again only if it has changed.

    Raises:
        UserError: one line: what is wrong with the file.
    """
    return _read_experiment(path, state_of(path))


@functools.cache
def _read_experiment(path, state):
    content = read_file(path)
    for problem in _misshapen(content, SHAPE):
        raise UserError(f"{path}: {problem}")
    for key in ("title", "paper", "place"):
        if key not in content:
            raise UserError(f"{path}: the key {key} is missing")
    one = Experiment(name=path.stem, ending=path.suffix, **content)
    for problem in _problems(one):
        raise UserError(f"{path}: {problem}")
    return one


def _misshapen(value, shape, name=""):
    """Where a value does not have a shape, a line for each; see `SHAPE`.

    Args:
        name: of the value in the file, like "scales.small.tuned"; "" of the whole file.
    """
    shape = shape(value) if callable(shape) else shape
    given = "nothing" if value is None else short(repr(value), 100)
    if isinstance(shape, tuple):
        is_right, expected = shape
        if not is_right(value):
            yield f"{name}: expected {expected}, not {given}"
    elif not isinstance(value, type(shape)):
        yield f"{name}: expected {'a mapping' if isinstance(shape, dict) else 'a list'}, not {given}"
    elif isinstance(value, list):
        if not value and len(shape) > 1:
            yield f"{name}: expected at least one entry in the list"
        for number, one in enumerate(value):
            yield from _misshapen(one, shape[0], f"{name} (entry {number + 1})")
            if one in value[:number]:
                yield f"{name}: {short(one, 100)} is in the list twice"
    else:
        for key, one in value.items():
            inner = f"{name}.{key}" if name else key
            if ANY not in shape and key not in shape:
                yield f"{inner}: unknown key{nearest(key, shape)} (known: {', '.join(shape)})"
            else:
                yield from _misshapen(one, shape.get(ANY) or shape[key], inner)


def _problems(one):
    """What is wrong with an experiment whose file has the right shape, a line for each."""
    papers = read_papers()
    if one.paper not in papers:
        yield f"paper: expected one of {', '.join(papers)}, not {one.paper}"
        return
    for name in one.controls:
        if name not in one.orders:
            yield f"controls: {name} is none of the orders ({', '.join(one.orders)})"
    if (one.not_run or one.orders) and not one.scales:
        return
    for key in ("widens", "grid_of"):
        if (name := getattr(one, key)) and name not in experiment_names():
            yield f"{key}: expected one of {', '.join(experiment_names())}, not {name}"
    for key in ("panels", "methods", "scales", "metric"):
        if not getattr(one, key):
            yield f"expected {key}, or not_run with the reason"
    tunings = [tuning for scale in SCALES if (tuning := one.tuning(scale))]
    claims = [(f"claims (entry {number})", claim) for number, claim in enumerate(one.claims, 1)]
    needed = [("printed", one.printed, ("metric", "place", "values"))] if one.printed else []
    needed += [(name, claim, ("claim", "ahead")) for name, claim in claims]
    needed += [("tune", tuning, ("panel", "grids")) for tuning in tunings]
    for name, its, keys in needed:
        for key in keys:
            if not its.get(key):
                yield f"{name}: the key {key} is missing"
    for name, claim in claims:
        yield from (f"{name}: {problem}" for problem in _problems_of_claim(claim, papers[one.paper]["claims"]))
    known = {"panels": one.panels, "methods": one.methods}
    for name, key, its in _names_in(one, tunings):
        if its not in known[key]:
            yield f"{name}: {its} is none of the {key} ({'; '.join(known[key])})"
    for tuning in tunings:
        yield from _problems_of_tuning(tuning)
    files = {}  # name of a figure's file -> panel and metric
    for panel, metric in itertools.product(one.panels, one.figure.get("metrics", [one.metric])):
        other = files.setdefault(figure_file(one, panel, metric), (panel, metric))
        if other != (panel, metric):
            yield f"panels: {other[0]} and {panel}: their figures would have the same file name: rename one of them"


def _problems_of_claim(claim, known):
    """What is wrong with a claim; `known` are the keys of its paper's claims."""
    if claim["claim"] not in known:
        yield f"claim: {claim['claim']}: expected one of {', '.join(known)}"
    if sum(key in claim for key in ("of", "reaches", "worse_than")) != 1:
        yield "expected either of or reaches, or worse_than"
    kinds = ("reaches", "than", "worse_than", "all_at_share", "saves", "calmer", "level", "at_share")
    kinds = [key for key in kinds if claim.get(key, False) is not False]
    if len(kinds) > 1 and kinds != ["level", "at_share"]:
        yield f"{' and '.join(kinds)}: expected only one of them"
    if claim.get("best_so_far") and (other := [key for key in kinds if key not in ("than", "level")]):
        yield f"best_so_far and {other[0]}: expected only one of them"
    if "than" in claim and len(claim.get("of", [])) > 1:
        yield f"than: expected a single method in of, not {', '.join(claim['of'])}"
    other = [key for key in ("than", "worse_than") if key in claim]
    if "experiment" in claim:
        path = FOLDER / f"{claim['experiment']}.yaml"
        if not other:
            yield "experiment: expected the key than or worse_than, with a panel of it"
        elif not path.is_file():
            yield f"experiment: {claim['experiment']}: expected one of {', '.join(experiment_names())}"
        elif claim[other[0]] not in (its := read_file(path).get("panels", {})):
            yield f"{other[0]}: {claim[other[0]]} is none of the panels of {claim['experiment']} ({'; '.join(its)})"
    elif other and claim.get("panel", claim[other[0]]) == claim[other[0]]:
        yield f"{other[0]}: expected the key panel, with another panel"
    if claim["ahead"] in claim.get("of", []):
        yield f"of: contains {claim['ahead']}, the method that is ahead"


def _problems_of_tuning(tuning):
    """What is wrong with the grids of a scale."""
    metric = tuning.get("metric")
    if metric and not may_choose(metric):
        yield (
            f"tune.metric: {metric}: settings are chosen by a metric on training data, never by the test set: "
            f"expected holdout_accuracy, holdout_loss, ... or {', '.join(ALLOWED)}"
        )
    budgets = {math.prod(map(len, grid.values())) for grid in tuning["grids"].values()}
    if len(budgets) > 1 and not tuning.get("unequal"):
        points = ", ".join(map(str, sorted(budgets)))
        yield f"tune: the methods' grids have {points} points: expected as many for each, or the reason in tune.unequal"


def _names_in(one, tunings):
    """(where it is, "panels" or "methods", name) of every panel and method that an experiment names."""
    for number, claim in enumerate(one.claims, 1):
        for method in [claim["ahead"], *claim.get("of", [])]:
            yield f"claims (entry {number})", "methods", method
        for key in ("panel", "than", "worse_than"):
            if key in claim and (key == "panel" or "experiment" not in claim):
                yield f"claims (entry {number}).{key}", "panels", claim[key]
    for panel, values in one.printed.get("values", {}).items():
        yield "printed.values", "panels", panel
        for method in values:
            yield f"printed.values.{panel}", "methods", method
    for scale, what in one.scales.items():
        for part, key in (("panels", "panels"), ("methods", "methods"), ("tuned", "methods")):
            for name in what.get(part, []):
                yield f"scales.{scale}.{part}", key, name
    for tuning in tunings:
        yield "tune.panel", "panels", tuning["panel"]
        for method in tuning["grids"]:
            yield "tune.grids", "methods", method


def figure_file(experiment, panel, metric):
    """The name of the file of a panel's figure."""
    words = (re.sub(r"[^\w.+-]+", "-", word).strip("-") for word in (panel, metric))
    return f"{'-'.join([experiment.name, *words])}.svg"
