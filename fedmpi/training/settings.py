"""Settings of a run: those of the training itself, and all sections together; needs neither torch nor MPI."""

import contextlib
import dataclasses
import math
import re

from fedmpi.comm.settings import FaultSettings, MachineSettings
from fedmpi.config.sections import Sections
from fedmpi.data.settings import DataSettings
from fedmpi.ground.errors import UserError
from fedmpi.ground.settings import MANY, Section, setting
from fedmpi.runs.settings import FolderSettings

BASELINES = ("local", "pooled", "tuned")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundSettings(Section):
    """How long the run is, and what clients do in a round."""

    rounds: int = setting(100, "communication rounds", least=1, may_change=True)
    epochs: float | None = setting(
        None, "passes over the clients' data, instead of --rounds", above=0, most=MANY, may_change=True
    )
    local_steps: int = setting(10, "q, local steps between two averages", least=1)
    local_epochs: float | None = setting(
        None, "local passes over a client's data per round, instead of q", above=0, most=MANY
    )
    participation: float = setting(1.0, "share of the clients that take part in a round", above=0, most=1)
    clip_norm: float | None = setting(None, "largest norm of a gradient; a larger one is scaled down to it", above=0)
    weight_decay: float = setting(0.0, "λ: add λ times the parameters to every gradient", least=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSettings(Section):
    """Which layers clients share, which are trained, and with which values they start."""

    private: str | None = setting(
        None,
        "layers that each client keeps for itself (personal layers): names of parameters, buffers or modules, with * "
        "and ? as wildcards, separated by commas, like head.*,norm?; bn means all batch-norm layers",
    )
    freeze: str | None = setting(None, "layers that are not trained; written as in --private")
    init: str | None = setting(
        None,
        "start from this trained model: model.safetensors or model.h5, a run or checkpoint, or a file of torch.save",
    )
    init_except: str | None = setting(
        None,
        "layers that --init does not read, and that start as in a new model (another head on a trained body): patterns "
        "as for --private, like head.*",
    )
    init_strict: bool = setting(
        True,
        "whether the model of --init must be of the same parts with the same settings; false: names and shapes of its "
        "tensors suffice",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.init_except is not None and self.init is None:
            raise UserError(
                f"init_except = {self.init_except}: there is no model to read the other layers from (--init)"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationSettings(Section):
    """When and on which data models are evaluated, and what these evaluations decide."""

    eval_every: int | None = setting(
        None,
        "rounds between evaluations; default: about 10 evaluations per run, or 20 if they use all data",
        least=1,
        role="speed",
    )
    evaluate: str = setting(
        "subset",
        "data of the evaluations: subset, random samples that are drawn once per run (at the end of the run all test "
        "data, and all training data if the run's gradients covered them at least 5 times), or full, always all data",
        among=("subset", "full"),
        role="speed",
    )
    evaluate_samples: int = setting(
        1000,
        "size of that subset: so many training samples of all clients together, and as many test samples",
        least=1,
        role="speed",
    )
    result: str = setting(
        "last",
        "which averaged model is the result: that of the last round, the best of all evaluations (on held-out data if "
        "there are any, otherwise on the test set), or that of a round drawn uniformly at random before training",
        among=("last", "best", "uniform"),
    )
    stop: str | None = setting(
        None, "end the run at the first evaluation that meets this condition, like accuracy>=0.9"
    )
    patience: int | None = setting(
        None,
        "end the run after this many evaluations in a row without a new best (on held-out data if there are any)",
        least=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stop is not None:
            read_condition(self.stop)

    @property
    def decides(self) -> bool:
        """Whether evaluations decide what the result is, or when the run ends."""
        return self.result == "best" or self.stop is not None or self.patience is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudySettings(Section):
    """What the run is compared with."""

    baselines: str | None = setting(
        None,
        "also train what the run is compared with, and print a table: local (each silo alone), pooled (as if all data "
        "lay in one place), tuned (the result, which each silo trains further alone); separated by commas",
        role="place",
    )
    baselines_step_sizes: tuple[float, ...] | None = setting(
        None,
        "step sizes that --baselines tries, for the run itself, too, and chooses from by the loss on held-out data "
        "(--holdout); default: the run's, times 1/3, 1 and 3; written --baselines.step_sizes [0.1,0.3]",
        role="place",
    )
    cross_site: bool = setting(
        False,
        "also test each silo's own model (--private, --baselines) on the data of every silo: all silos then see each "
        "other's models",
        role="place",
    )

    @property
    def methods(self) -> list[str]:
        """The names of the baselines."""
        return self.baselines.replace(" ", "").split(",") if self.baselines else []

    def __post_init__(self) -> None:
        super().__post_init__()
        names = self.methods
        if names and (not {*names} <= {*BASELINES} or len({*names}) < len(names)):
            raise UserError(
                f"baselines = {self.baselines}: expected some of {', '.join(BASELINES)}, separated by commas"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSettings(Sections):
    """All sections of a run.

    Raises:
        UserError: one line, if settings of several sections do not fit together.
    """

    rounds: RoundSettings
    data: DataSettings
    layers: LayerSettings
    evaluation: EvaluationSettings
    studies: StudySettings
    folder: FolderSettings
    machine: MachineSettings
    faults: FaultSettings

    def __post_init__(self) -> None:
        names, is_private = self.studies.methods, self.layers.private is not None
        given = f"baselines = {self.studies.baselines}: expected"
        if "tuned" in names and is_private:
            raise UserError(f"{given} no tuned with --private: each client has a model of its own already")
        if names and (self.faults.on_loss == "continue" or self.evaluation.result == "uniform"):
            raise UserError(f"{given} --on_loss end and --result last or best")
        sizes = self.studies.baselines_step_sizes
        if sizes and (min(sizes) <= 0 or not (names and self.data.holdout)):
            raise UserError("baselines_step_sizes: expected numbers > 0, --baselines, and --holdout to choose by")
        if self.studies.cross_site and not names and not is_private:
            raise UserError("cross_site: expected --baselines or --private: all clients have the same model")

    @property
    def may_change(self) -> set[str]:
        """The settings that may have other values when the run is resumed; all others influence what is learned."""
        names = {name for name, its_role in self.roles().items() if its_role in ("speed", "place")}
        if self.evaluation.decides:
            names -= {*vars(self.evaluation)}
        return names | self.marked("may_change")


def read_condition(text: str) -> tuple[str, str, float]:
    """(metric, comparison, bound) of a text like "accuracy>=0.9".

    Raises:
        UserError: one line, if it is not a condition.
    """
    match = re.fullmatch(r"\s*(\w+)\s*(>=|<=|>|<)\s*([-+.\w]+)\s*", text)
    with contextlib.suppress(ValueError):
        if match is not None and not math.isnan(bound := float(match[3])):
            return match[1], match[2], bound
    raise UserError(f"stop = {text}: expected a metric, >= or <=, and a number, like accuracy>=0.9")
