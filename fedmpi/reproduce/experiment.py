"""The papers' tables and figures as data: one YAML file in ``experiments/`` for each, and ``papers.yaml``.

An experiment that trains nothing (a table of proved rates, of layers) has `title`, `paper`, `place` and `not_run`, the
reason. Every other one has

    title, paper, place, question:  what it shows, and where the paper shows it.
    data:      names of the data files that it needs.
    settings:  of all runs.
    panels:    name -> settings (a preset, and what differs from it). A paper's figure has a curve per method in each.
    methods:   name -> settings; the preset adds the tuned values of the algorithm that they choose.
    first:     settings of a run before all others; "{first}" in other settings is its folder.
    scales:    small, full, and for attacks mlp (as full, but an MLP is attacked) -> says (what is reduced), settings,
               first, panels or methods where only some are (or panels: name -> settings of one of them), and tuned:
               method -> settings that were chosen for runs of this length (see tune).
    metric:    by which methods are compared.
    printed:   metric, place, and values: panel -> method -> the number in the paper.
    figure:    place, axis and metrics of the paper's figure.
    claims:    list of {claim: key in papers.yaml, panel, ahead: method, of: [methods], metric, at_share: of all
               rounds, after which `ahead` is measured}; or with reaches: number, at the end, instead of `of`. With
               level: true the paper says that neither is ahead; with than: panel, that the lead is larger on `panel`.
    tune:      panel, settings, seeds, and grids: method -> setting -> values; as many points for each method. What
               is best is in the preset, or for runs as short as those of the small scale, in its `tuned`. With a key
               full, settings or grids of longer runs, that --tune --scale full tries instead; the preset has the best.
    untuned:   a sentence: where the step sizes come from, if there is no `tune`.
    cpu_hours: of the full scale, one seed: gradients times the measured time of one.
    differs:   list of sentences: what differs from the paper, and why.
    findings:  scale -> list of sentences: what was found out about claims that failed.
"""

import dataclasses
import itertools
import math
import pathlib

from fedmpi.config.grammar import assignments_of, read_file
from fedmpi.errors import UserError
from fedmpi.settings import nearest

HERE = pathlib.Path(__file__).parent
FOLDER, PAPERS = HERE / "experiments", HERE / "papers.yaml"
SCALES = ("small", "mlp", "full")  # from the cheapest to the paper's own
FIRST = "{first}"


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One table or figure; the attributes are the keys of its file."""

    name: str
    title: str
    paper: str
    place: str
    question: str = ""
    not_run: str = ""
    data: list = dataclasses.field(default_factory=list)
    settings: dict = dataclasses.field(default_factory=dict)
    panels: dict = dataclasses.field(default_factory=dict)
    methods: dict = dataclasses.field(default_factory=dict)
    first: dict = dataclasses.field(default_factory=dict)
    scales: dict = dataclasses.field(default_factory=dict)
    metric: str = ""
    printed: dict = dataclasses.field(default_factory=dict)
    figure: dict = dataclasses.field(default_factory=dict)
    claims: list = dataclasses.field(default_factory=list)
    tune: dict = dataclasses.field(default_factory=dict)
    untuned: str = ""
    cpu_hours: float | None = None
    differs: list = dataclasses.field(default_factory=list)
    findings: dict = dataclasses.field(default_factory=dict)

    def points(self, scale):
        """The configurations of a scale, without seeds: a list of `Point`.

        Raises:
            UserError: if the experiment is not run at this scale.
        """
        if scale not in self.scales:
            raise UserError(
                f"{self.name}: cannot be run with --scale {scale}: {self.not_run or 'its file has no such scale'}"
            )
        what = self.scales[scale] or {}
        panels, methods = what.get("panels", list(self.panels)), what.get("methods", list(self.methods))
        tuned, reduction = what.get("tuned", {}), what.get("settings", {})
        common = {panel: as_texts(self.settings, self.panels[panel]) for panel in panels}
        own = {method: as_texts(self.methods[method], tuned.get(method, {}), reduction) for method in methods}
        reduced = {panel: as_texts(panels[panel] or {}) if isinstance(panels, dict) else {} for panel in panels}
        return [
            Point(panel, method, common[panel] | own[method] | reduced[panel])
            for panel, method in itertools.product(panels, methods)
        ]

    def first_run(self, scale):
        """Settings of the run that must end before all others, or {}."""
        return (self.scales[scale] or {}).get("first", self.first)

    def tuning(self, scale):
        """What `tune` contains for a scale: panel, settings, grids and what else; {} if it contains nothing for it."""
        usual = {key: value for key, value in self.tune.items() if key != "full"}
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
        names: list of str; one that ends in .yaml is the path of an experiment's file.

    Raises:
        UserError: if a name is unknown.
    """
    known = experiment_names()
    found = {}
    for name in names:
        if name.endswith(".yaml"):
            found[name] = None
            continue
        chosen = known if name == "all" else [one for one in known if name in (one, one.partition("_")[0])]
        if not chosen:
            raise UserError(f"unknown table or figure '{name}'{nearest(name, known)}; --list shows them")
        found |= dict.fromkeys(chosen)
    paths = (pathlib.Path(name) if name.endswith(".yaml") else FOLDER / f"{name}.yaml" for name in found)
    return [read_experiment(path) for path in paths]


def read_papers():
    """Key -> {title, claims: key -> sentence} of every paper."""
    return read_file(PAPERS)


def read_experiment(path):
    """The `Experiment` of a file.

    Raises:
        UserError: one line: what is wrong with the file.
    """
    content = read_file(path)
    keys = {field.name for field in dataclasses.fields(Experiment)} - {"name"}
    for key in content:
        if key not in keys:
            raise UserError(f"{path}: unknown key {key}{nearest(key, keys)}")
    for key in ("title", "paper", "place"):
        if not content.get(key):
            raise UserError(f"{path}: the key {key} is missing")
    for field in dataclasses.fields(Experiment):
        kind = {dict: "a mapping", list: "a list"}.get(field.type)
        if kind and field.name in content and not isinstance(content[field.name], field.type):
            raise UserError(f"{path}: {field.name}: expected {kind}, not {content[field.name]}")
    one = Experiment(name=path.stem, **content)
    for problem in _problems(one):
        raise UserError(f"{path}: {problem}")
    return one


def _problems(one):
    """What is wrong with an experiment, a line for each."""
    papers = read_papers()
    if one.paper not in papers:
        yield f"paper: expected one of {', '.join(papers)}, not {one.paper}"
        return
    if one.not_run and not one.scales:
        return
    known_claims = papers[one.paper]["claims"]
    for claim in one.claims:
        if not isinstance(claim, dict) or not {"claim", "ahead"} <= set(claim) or not {"of", "reaches"} & set(claim):
            yield f"claims: expected claim, ahead, and of or reaches, not {claim}"
            return
        if claim["claim"] not in known_claims:
            yield f"claims: {claim['claim']}: expected one of {', '.join(known_claims)}"
            return
    if not set(one.findings) <= set(SCALES):
        yield f"findings: expected one of {', '.join(SCALES)}, with a list of sentences each"
        return
    for sentence in [*one.differs, *itertools.chain(*one.findings.values())]:
        if not isinstance(sentence, str):  # YAML reads "one: two" without quotes as a mapping
            yield f"expected a sentence, in quotes if it contains a colon, not {sentence}"
    for key in ("panels", "methods", "scales", "metric"):
        if not getattr(one, key):
            yield f"expected {key}, or not_run with the reason"
    known = {"panels": one.panels, "methods": one.methods}
    named = [("methods", method) for claim in one.claims for method in [claim["ahead"], *claim.get("of", [])]]
    named += [("panels", claim[key]) for claim in one.claims for key in ("panel", "than") if key in claim]
    for panel, values in one.printed.get("values", {}).items():
        named += [("panels", panel), *(("methods", method) for method in values)]
    for scale, what in one.scales.items():
        if scale not in SCALES:
            yield f"scales: {scale}: expected one of {', '.join(SCALES)}"
        named += [(key, name) for key in known for name in (what or {}).get(key, [])]
        named += [("methods", name) for name in (what or {}).get("tuned", {})]
    tunings = [tuning for scale in ("small", "full") if (tuning := one.tuning(scale))]
    named += [("methods", method) for tuning in tunings for method in tuning["grids"]]
    named += [("panels", tuning["panel"]) for tuning in tunings]
    for key, name in named:
        if name not in known[key]:
            yield f"{name}: is none of the {key} ({', '.join(known[key])})"
    if one.printed and not one.printed.get("place"):
        yield "printed: expected the place of the numbers in the paper"
    for tuning in tunings:
        budgets = {math.prod(map(len, grid.values())) for grid in tuning["grids"].values()}
        if len(budgets) > 1:
            points = ", ".join(map(str, sorted(budgets)))
            yield f"tune: the methods' grids have {points} points: expected as many for each"
