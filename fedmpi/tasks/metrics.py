"""Metrics of users' tasks: what a function of scikit-learn or torchmetrics is given, and what it may return."""

import dataclasses
import functools
import inspect
import math
import numbers
import warnings

import numpy as np
import torch

from fedmpi.ground.errors import UserError
from fedmpi.ground.registry import import_path
from fedmpi.ground.settings import nearest
from fedmpi.ground.text import short

PADDING = -100  # target that does not count, like nan; the value that torch's losses and Hugging Face's metrics ignore
LARGEST_TABLE = 10_000  # numbers in a vector or matrix that a metric returns
# What scikit-learn's functions compare with the targets, by the module that defines them; the rest are named here.
_KINDS = {"_regression": "values", "_ranking": "scores"}
_NAMED = {name: "probabilities" for name in ("log_loss", "brier_score_loss", "d2_log_loss_score", "d2_brier_score")}
_NAMED |= {"top_k_accuracy_score": "probabilities", "hinge_loss": "margins"}


OUTPUTS = ("scores", "probabilities", "values")  # what a task may say of its model's outputs
ANSWERS = (torch.nn.Sigmoid, torch.nn.Softmax)  # layers after which outputs are probabilities
FAR_FROM_ONE = 1e-3  # of a sum of probabilities
# What a function of the user's takes of all silos' samples: how often each answer was given to each target; answers and
# targets, in no order; the mean of the silos' values suffices; or the outputs as they are.
TAKES = ("counts", "pairs", "mean", "scores")
# scikit-learn's functions that are means over samples, and those that means and squares of silos give.
MEANS = {"mean_absolute_error", "mean_absolute_percentage_error", "mean_squared_log_error", "mean_pinball_loss"}
MEANS |= {"mean_poisson_deviance", "mean_gamma_deviance", "mean_tweedie_deviance", "log_loss", "brier_score_loss"}
MEANS |= {"top_k_accuracy_score", "accuracy_score", "zero_one_loss", "hamming_loss"}
MOMENTS = {"r2_score", "explained_variance_score", "mean_squared_error", "root_mean_squared_error", "max_error"}
ORDERS = {"roc_auc_score", "average_precision_score"}  # those that bins of scores give

BANDS = 10  # of probabilities, in which they are compared with what is right
CALIBRATION = "fedmpi.tasks.metrics.calibration_error"
# Name -> scikit-learn's function, and its arguments for two classes and for more; None: only for two.
_BY_NAME = {
    "f1": ("f1_score", {}, {"average": "macro"}),
    "precision": ("precision_score", {}, {"average": "macro"}),
    "sensitivity": ("recall_score", {}, {"average": "macro"}),
    "specificity": ("recall_score", {"pos_label": 0}, None),
    "balanced_accuracy": ("balanced_accuracy_score", {}, {}),
    "auroc": ("roc_auc_score", {}, {"multi_class": "ovr"}),
    "auprc": ("average_precision_score", {}, {}),
    "brier": ("brier_score_loss", {}, {}),
    "kappa": ("cohen_kappa_score", {}, {}),
    "mcc": ("matthews_corrcoef", {}, {}),
    "confusion": ("confusion_matrix", {}, {}),
    "class_accuracies": ("recall_score", {"average": None}, {"average": None}),
    "calibration": (CALIBRATION, {}, {}),
}
NAMES = tuple(_BY_NAME)


def by_name(text, num_classes, setting):
    """Name -> `Metric` of names separated by commas, for a classifier.

    Raises:
        UserError: one line, if a name is unknown, or needs two classes, or scikit-learn is missing.
    """
    chosen = {}
    for name in filter(None, map(str.strip, text.split(","))):
        if name not in _BY_NAME:
            known = ", ".join(NAMES)
            raise UserError(f"{setting} = {text}: unknown metric {name}{nearest(name, NAMES)}; known: {known}")
        function, of_two, of_more = _BY_NAME[name]
        if num_classes < 2:
            raise UserError(f"{setting} = {text}: the data have a single class: leave it out")
        settings = of_two if num_classes == 2 else of_more
        if settings is None:
            raise UserError(f"{setting} = {text}: {name} is of two classes, and the data have {num_classes}")
        chosen[name] = Metric(name, (function if "." in function else f"sklearn.metrics.{function}", settings))
    return chosen


def or_nan(metric, *answers, **form):
    """A metric's number; nan if it is none or cannot be computed, as of samples of one class."""
    try:
        value = metric(*answers, **form)
    except UserError:
        return math.nan
    return math.nan if isinstance(value, list) else value


def crossing(reason, kind, names):
    """The line about the samples whose labels and outputs reach all ranks, for metrics that no sums of silos give.

    Args:
        reason: what asks for the metrics. kind: of the samples. names: of the metrics.
    """
    return (
        f"{reason}: every rank receives the labels and the model's outputs of all clients' {kind} samples, to compute "
        f"{', '.join(names)}; without such metrics no label leaves a client"
    )


def last_layer(module):
    """The layer that a module has as its last one; it need not be the one that it calls last."""
    return [part for part in module.modules() if not [*part.children()]][-1]


@dataclasses.dataclass(frozen=True)
class Answers:
    """What a model answers, and what is right.

    Attributes:
        outputs: [n, classes, ...], or one output per target: [n, ...] or [n, 1, ...]. targets: [n, ...].
        kind: what the outputs are, one of `OUTPUTS`: scores (logits, of which softmax or, of a single one, the sigmoid
            makes probabilities), probabilities or values.
        is_last: whether outputs are [n, ..., classes] also if the shapes allow [n, classes, ...].
        low: the smaller of two classes that are targets of one output: 0 or -1; -1 also if there is such a target.
    """

    outputs: torch.Tensor
    targets: torch.Tensor
    kind: str = "scores"
    is_last: bool = False
    low: int = 0

    def __post_init__(self):
        outputs, targets = self.outputs, self.targets
        if outputs.dim() > 2 and (self.is_last or self.are_last(outputs, targets)):
            outputs = outputs.movedim(-1, 1)
        if self.num_classes_of(outputs, targets) < 2:  # one output per target
            targets = targets.squeeze(1) if targets.dim() > 1 else targets
            outputs = outputs.squeeze(1) if outputs.dim() == targets.dim() + 1 else outputs
        elif targets.dim() > 1:  # an answer for each pixel or word
            outputs, targets = outputs.movedim(1, -1).flatten(0, -2), targets.flatten()
        counts = ~targets.isnan() if targets.is_floating_point() else targets != PADDING
        is_padded = not counts.all()
        if outputs.shape == targets.shape and (outputs.dim() > 2 or is_padded):
            outputs, targets, counts = outputs.flatten(), targets.flatten(), counts.flatten()
        if is_padded and len(outputs) == len(targets) == len(counts):
            outputs, targets = outputs[counts], targets[counts]
        object.__setattr__(self, "outputs", outputs)
        object.__setattr__(self, "targets", targets)

    @staticmethod
    def are_last(outputs, targets):
        """Whether the shapes say that outputs are [n, ..., classes] and not [n, classes, ...]."""
        return outputs.shape[:-1] == targets.shape and outputs.shape[2:] != targets.shape[1:]

    @staticmethod
    def num_classes_of(outputs, targets):
        """Number of outputs per target if these are scores of classes, else 0."""
        are_scores = outputs.dim() == targets.dim() + 1 and not targets.is_floating_point()
        return outputs.shape[1] if are_scores and outputs.shape[2:] == targets.shape[1:] else 0

    @property
    def num_classes(self):
        return self.num_classes_of(self.outputs, self.targets) or (2 if self.is_binary else 0)

    @property
    def is_binary(self):
        """Whether each target is 0 or 1, or -1 or 1, and has one output."""
        same = self.outputs.shape == self.targets.shape and self.outputs.is_floating_point()
        return same and any(bool(torch.isin(self.targets, torch.tensor(two)).all()) for two in ((0, 1), (-1, 1)))

    def values(self):
        """One answer per target: the outputs themselves, or the class with the largest one."""
        return self.outputs.argmax(1) if self.num_classes_of(self.outputs, self.targets) else self.outputs

    def classes(self):
        """The class of each answer; of two with one output: whether a score is above 0, or a probability above ½.

        Raises:
            ValueError: if no class can be read from the outputs.
        """
        if self.num_classes_of(self.outputs, self.targets) or not self.outputs.is_floating_point():
            return self.values()
        if not self.is_binary or self.kind == "values":
            said = ' (outputs = "values")' if self.kind == "values" else ""
            raise ValueError(f"no classes can be read from these outputs{said}: let predict return classes")
        self.check_kind()
        low = min(self.low, -1 if (self.targets < 0).any() else 0)
        return torch.where(self.outputs > (0.5 if self.kind == "probabilities" else 0), 1, low)

    @property
    def have_classes(self):
        """Whether `classes` can read some."""
        is_float = self.outputs.is_floating_point()
        return not is_float or self.num_classes_of(self.outputs, self.targets) > 0 or self.is_binary

    def probabilities(self):
        """[n] of the second class, [n, classes] or, if each target has one output, in that shape; float64.

        Raises:
            ValueError: if the outputs are values.
        """
        outputs = self.outputs.double()
        if self.kind == "values":
            raise ValueError('needs probabilities, and the task says outputs = "values"')
        self.check_kind()
        if not self.num_classes_of(self.outputs, self.targets):
            return outputs if self.kind == "probabilities" or not self.is_binary else outputs.sigmoid()
        shares = outputs if self.kind == "probabilities" else outputs.softmax(1)
        return shares[:, 1] if shares.shape[1] == 2 else shares

    def scores(self):
        """Larger for the second of two classes; of more classes their probabilities."""
        two = self.num_classes_of(self.outputs, self.targets) == 2
        return self.margins() if two or self.is_binary else self.probabilities()

    def check_kind(self):
        """Check that outputs which are to be probabilities may be some.

        Raises:
            ValueError: if they are below 0 or above 1, or those of a sample do not add up to 1.
        """
        if self.kind != "probabilities" or self.may_be_probabilities():
            return
        outputs = self.outputs
        found = f"from {outputs.min().item():.4g} to {outputs.max().item():.4g}"
        found += ", or do not add up to 1" if self.num_classes_of(outputs, self.targets) else ""
        raise ValueError(f'the task says outputs = "probabilities", and they are {found}: logits are "scores"')

    def may_be_probabilities(self):
        """Whether all outputs are from 0 to 1 and, of several classes, those of each sample add up to 1."""
        outputs = self.outputs.double()
        if self.num_classes_of(self.outputs, self.targets):
            outputs = torch.cat([outputs, outputs.sum(1, keepdim=True)], dim=1)
            add_up = (outputs[:, -1] >= 1 - FAR_FROM_ONE).all()
            return bool(((outputs >= 0) & (outputs <= 1 + FAR_FROM_ONE)).all() and add_up)
        return bool(((outputs >= 0) & (outputs <= 1)).all())

    def cases(self):
        """[classes] numbers of targets of each class, or None if they are no classes.

        Of several labels per sample: of the samples that have each.
        """
        targets = self.targets
        if self.is_binary and targets.dim() == 2:
            return (targets > 0).sum(0).tolist()
        if targets.dim() != 1 or not self.num_classes or (self.kind == "values" and self.is_binary):
            return None
        if self.is_binary:
            return [int((targets <= 0).sum()), int((targets > 0).sum())]
        return torch.bincount(targets, minlength=self.num_classes).tolist() if (targets >= 0).all() else None

    def margins(self):
        """The outputs; of two classes the second one's output minus the first one's."""
        two = self.num_classes_of(self.outputs, self.targets) == 2
        return (self.outputs[:, 1] - self.outputs[:, 0] if two else self.outputs).double()


@dataclasses.dataclass(frozen=True)
class Moments:
    """Sums over all silos' samples, [outputs] each, of values and errors (target - value).

    Attributes:
        number: of samples. mean_error: of the errors. targets, errors: sums of squares around the mean of each.
        largest: the largest error of all.
    """

    number: np.ndarray
    mean_error: np.ndarray
    targets: np.ndarray
    errors: np.ndarray
    largest: float


class Metric:
    """A metric of outputs and targets: a number, or a vector or matrix as nested lists.

    Args:
        name: for messages. metric: what `fedmpi.Task.metrics` has under that name. takes: one of `TAKES`, of a function
            of the user's; None: "scores".

    Raises:
        UserError: if it cannot be imported; when called: if the function fails or returns something else.
    """

    def __init__(self, name, metric, takes=None):
        metric, self._settings = metric if isinstance(metric, tuple) else (metric, {})
        self.name, function = name, metric
        if isinstance(metric, str):
            try:
                function = import_path(metric)
            except (ImportError, AttributeError, ValueError) as error:
                raise UserError(f"metric {name} = {metric}: cannot be imported: {error}") from None
        if isinstance(function, functools.partial) and not function.args:
            function, self._settings = function.func, {**function.keywords, **self._settings}
        self._function, self._kind, path = function, None, getattr(function, "__module__", None) or ""
        is_sklearn = path.startswith("sklearn.metrics.")
        self._is_own = not isinstance(metric, str) and not is_sklearn
        if is_sklearn:
            self._kind = _NAMED.get(function.__name__) or _KINDS.get(path.rpartition(".")[2], "classes")
        self._is_calibration = function is calibration_error
        if self._is_calibration:
            self._kind = "probabilities"
        if takes is not None and (is_sklearn or takes not in TAKES):
            known = "no entry, because it is scikit-learn's" if is_sklearn else f"one of {', '.join(TAKES)}"
            raise UserError(f"metric {name}: takes = {short(repr(takes), 50)}: expected {known}")
        self.takes, self._is_own = takes or "scores", self._is_own or takes is not None

    def __call__(self, outputs, targets, **form):
        """See `Answers`, `form` included; what the user's own function gets is not changed."""
        answers = Answers(outputs, targets, **form)
        return self.guarded(answers, lambda answers: _read(self._value(outputs, targets, answers)), outputs, targets)

    def of(self, rebuilt):
        """Its value of samples that counts or bins tell: `fedmpi.tasks.pooling.Rebuilt`."""
        return self.guarded(rebuilt, lambda _: _read(self._value(rebuilt.outputs, rebuilt.targets, rebuilt)))

    def guarded(self, answers, action, outputs=None, targets=None):
        """`action(answers)`; any error is a line with the metric's name and the shapes, of the answers or others."""
        outputs, targets = (answers.outputs, answers.targets) if outputs is None else (outputs, targets)
        try:
            return action(answers)
        except Exception as error:  # noqa: BLE001  a user's function can raise anything
            shapes = f"outputs {list(outputs.shape)}, targets {list(targets.shape)}"
            raise UserError(f"metric {self.name}: {type(error).__name__}: {short(error)} ({shapes})") from error

    def _value(self, outputs, targets, answers):
        if self._is_calibration:
            return calibration_error(bands_of(answers))
        if self._is_own and self.takes == "counts":
            return self._function(counts_of(answers), **self._settings)
        if self._is_own and self.takes == "pairs":
            return self._function(
                answers.classes() if answers.have_classes else outputs, answers.targets, **self._settings
            )
        if self._is_own:
            return self._function(outputs, targets, **self._settings)
        return self._of_torchmetrics(answers) if self._kind is None else self._of_sklearn(answers)

    def way(self, facts, scores, is_common):
        """In which way it is computed of all silos' samples; see `fedmpi.tasks.pooling.Measuring`.

        Args:
            facts: `Facts`. scores: "bins" or "samples". is_common: whether all ranks have the samples in common.
        """
        if self._is_own:
            by_class = "counts" if facts.has_classes and not facts.num_columns else "samples"
            ways = {"counts": "counts", "pairs": by_class, "mean": "samples" if is_common else "means"}
            return ways.get(self.takes, "samples")
        name, settings, kind = getattr(self._function, "__name__", ""), self._settings, self._kind
        if self._is_calibration or "sample_weight" in settings:
            return "bands" if self._is_calibration else "samples"
        if kind == "classes" and (not facts.num_columns or ("average" in settings and not self._is_of_samples)):
            return "counts"
        is_mean = name in MEANS and settings.get("normalize", True) is not False
        if kind in ("classes", "values", "probabilities") and is_mean and not is_common:
            return "means"
        plain = {*settings} <= {"multioutput"} and settings.get("multioutput") in (
            None,
            "uniform_average",
            "raw_values",
        )
        if name in MOMENTS and plain and not is_common:
            return "moments"
        is_one = facts.num_classes in (0, 2) or name != "roc_auc_score" or settings.get("multi_class") == "ovr"
        is_ordered = name in ORDERS and is_one and not self._is_of_samples
        return "bins" if scores == "bins" and is_ordered else "samples"

    @property
    def is_micro(self):
        """Whether each label of each sample counts the same."""
        return self._settings.get("average") == "micro"

    @property
    def _is_of_samples(self):
        return self._settings.get("average") == "samples"

    def of_moments(self, moments):
        """Its value by `Moments`, if it is one of `MOMENTS`."""
        name = self._function.__name__
        if name == "max_error":
            return float(moments.largest)
        number, squares = moments.number, moments.errors + moments.number * moments.mean_error**2
        if name.endswith("squared_error"):
            values = squares / number
            values = np.sqrt(values) if name.startswith("root") else values
        else:
            missed, of_all = moments.errors if name == "explained_variance_score" else squares, moments.targets
            rest = np.divide(missed, of_all, out=(missed != 0).astype(float), where=of_all != 0)  # as scikit-learn
            values = np.where(number < 2, math.nan, 1 - rest) if name == "r2_score" else 1 - rest
        return _read(values if self._settings.get("multioutput") == "raw_values" else values.mean())

    @property
    def reading(self):
        """What it compares with the targets: classes, probabilities, scores, margins or values; None: just outputs."""
        return "probabilities" if self._is_of_classes_in_torchmetrics else self._kind

    def depends_on_kind(self, answers):
        """Whether it is another number if outputs are probabilities than if they are scores; see `Answers`."""
        number = Answers.num_classes_of(answers.outputs, answers.targets)
        if number:
            return self.reading == "probabilities" or (self.reading == "scores" and number > 2)
        return answers.is_binary and self.reading in ("classes", "probabilities")

    @property
    def _is_of_classes_in_torchmetrics(self):
        path = getattr(self._function, "__module__", None) or ""
        return not self._is_own and path.startswith("torchmetrics.") and ".classification" in path

    def _of_torchmetrics(self, answers):
        outputs = answers.outputs
        if self._is_of_classes_in_torchmetrics and answers.is_binary and answers.kind == "scores":
            outputs = answers.probabilities()  # torchmetrics would take logits from 0 to 1 for probabilities
        if inspect.isclass(self._function):
            return self._function(**self._settings)(outputs, answers.targets)
        return self._function(outputs, answers.targets, **self._settings)

    def _of_sklearn(self, answers):
        if self._kind not in ("classes", "values") and not answers.outputs.is_floating_point():
            raise ValueError("needs scores, not classes: let predict return the model's outputs")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of classes that some samples lack
            found, targets = getattr(answers, self._kind)().numpy(), answers.targets.numpy()
            if self._kind == "values":  # scikit-learn would compute in float32
                found, targets = (
                    part.astype(np.float64) if part.dtype.kind == "f" else part for part in (found, targets)
                )
            settings = {**self._labels(answers), **self._settings}
            parameters = inspect.signature(self._function).parameters
            if "average" in parameters and not {"labels", "zero_division"} & {*self._settings}:
                average = self._settings.get("average", parameters["average"].default)
                return _of_present(self._function, targets, found, average, settings)
            return self._function(targets, found, **settings)

    def _labels(self, answers):
        """The classes as an argument, for functions that could not know those that the data lack."""
        needs = self._kind == "probabilities" or (self._kind == "scores" and answers.num_classes > 2)
        needs |= "matrix" in self._function.__name__ or self._settings.get("average", "") is None
        takes = "labels" in inspect.signature(self._function).parameters and "labels" not in self._settings
        is_plain = answers.targets.dim() == 1 and answers.num_classes and not (answers.targets < 0).any()
        return {"labels": np.arange(answers.num_classes)} if needs and takes and is_plain else {}


def counts_of(answers):
    """[classes, classes] int64 numbers of samples by target (row) and answer (column), of `Answers` or the like.

    Raises:
        ValueError: if they are no classes from 0 on.
    """
    targets, classes = answers.targets.long().flatten(), answers.classes().long().flatten()
    if len(targets) != len(classes) or (len(targets) and min(int(targets.min()), int(classes.min())) < 0):
        raise ValueError("counts are of classes from 0 on, one answer for each target")
    both = torch.cat([targets, classes])
    number = max(answers.num_classes, int(both.max()) + 1 if len(both) else 0)
    return torch.bincount(targets * number + classes, minlength=number**2).reshape(number, number)


def bands_of(answers):
    """[BANDS, 3] number of samples with a probability in each band, sums of these probabilities and of what is right.

    Of two classes, the probability of the second one, and 1 for its samples; of more, that of the answer, and 1 if it
    is right. A band contains its upper edge, as in scikit-learn's calibration_curve.
    """
    probabilities, targets = answers.probabilities(), answers.targets
    right = targets > 0
    if probabilities.dim() == 2 and not answers.is_binary:
        probabilities, classes = probabilities.max(1)
        right = classes == targets
    shares, right = probabilities.flatten().numpy(), right.flatten().numpy()
    bands = np.searchsorted(np.linspace(0, 1, BANDS + 1)[1:-1], shares)
    return np.stack([np.bincount(bands, weights, BANDS) for weights in (None, shares, right)], axis=1)


def calibration_error(bands):
    """How far probabilities are from the shares of what is right, on average over samples: 0 is best.

    `bands`: [BANDS, 3], see `bands_of`.
    """
    number, probabilities, right = np.asarray(bands, float).T
    return float(np.abs(probabilities - right).sum() / number.sum())


def _of_present(function, targets, found, average, settings):
    """A metric of scikit-learn of the classes that have cases among the targets; the others are left out of its mean.

    Args:
        function: with the argument `average`. targets: [n] classes, or [n, labels] of 0 and 1.
        found: what is compared with them. average, settings: see scikit-learn.

    Returns:
        what the function returns, with nan for a class without cases; nan if none of the measured classes has any.
    """
    are_scores, name = found.dtype.kind == "f", function.__name__
    if average not in ("binary", "macro", "weighted", None):
        return function(targets, found, **settings)
    if targets.ndim < found.ndim and (name == "average_precision_score" or settings.get("multi_class") == "ovr"):
        targets = (targets[:, None] == np.arange(found.shape[1])).astype(int)  # each class against the others
        settings = {key: value for key, value in settings.items() if key not in ("labels", "multi_class")}
    if targets.ndim < found.ndim:
        return function(targets, found, **settings)
    if targets.ndim == 1 and (average == "binary" or are_scores):  # one of two classes is measured
        are_two = are_scores or len(np.union1d(targets, found)) <= 2
        has_none = are_two and not (targets == settings.get("pos_label", 1)).any()
        return math.nan if has_none else function(targets, found, **settings)
    if targets.ndim == 1:
        every = settings.get("labels", np.union1d(targets, found))
        has_cases = np.isin(every, targets)
    else:
        every = np.arange(targets.shape[1])
        has_cases = (targets > 0).any(0)
        has_cases &= (targets <= 0).any(0) | (name != "roc_auc_score")
    values = np.full(len(every), math.nan)  # of each class
    if not has_cases.any():
        return values if average is None else math.nan
    of_present = _of_classes(function, targets, found, every[has_cases], settings)
    if average is not None:
        return of_present
    values[has_cases] = of_present
    return values


def _of_classes(function, targets, found, classes, settings):
    """The metric of some classes only, as if there were no others; see `_of_present`."""
    if found.dtype.kind != "f":
        return function(targets, found, **{**settings, "labels": classes})
    columns = classes[0] if len(classes) == 1 else classes
    return function(targets[:, columns], found[:, columns], **settings)


def _read(value):
    """A number, or nested lists of numbers, of what a metric's function returned."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = value.double() if value.is_floating_point() else value
    array = np.asarray(float(value) if isinstance(value, numbers.Real) else value)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"returned {_in_words(value)}: expected a number, or a vector or matrix of numbers")
    if array.size == 1:
        return float(array.reshape(()))
    if array.ndim not in (1, 2) or not 0 < array.size <= LARGEST_TABLE:
        raise TypeError(
            f"returned {_in_words(value)}: expected a number, or a vector or matrix of at most {LARGEST_TABLE}"
        )
    return array.astype(float).tolist()


def _in_words(value):
    """A value that is no number, for a message."""
    if isinstance(value, str | complex | type(None)):
        return short(repr(value), 50)
    dtype = f"{value.dtype} " if hasattr(value, "dtype") else ""
    shape = f" of shape {list(value.shape)}" if hasattr(value, "shape") else ""
    return f"a {dtype}{type(value).__name__}{shape}"
