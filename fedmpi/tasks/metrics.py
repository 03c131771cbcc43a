"""Metrics of users' tasks: what a function of scikit-learn or torchmetrics is given, and what it may return."""

import dataclasses
import functools
import inspect
import math
import warnings

import numpy as np
import torch

from fedmpi.errors import UserError
from fedmpi.registry import import_path
from fedmpi.settings import nearest
from fedmpi.text import short

PADDING = -100  # target that does not count, like nan; the value that torch's losses and Hugging Face's metrics ignore
LARGEST_TABLE = 10_000  # numbers in a vector or matrix that a metric returns
# What scikit-learn's functions compare with the targets, by the module that defines them; the rest are named here.
_KINDS = {"_regression": "values", "_ranking": "scores"}
_NAMED = {name: "probabilities" for name in ("log_loss", "brier_score_loss", "d2_log_loss_score", "d2_brier_score")}
_NAMED |= {"top_k_accuracy_score": "probabilities", "hinge_loss": "margins"}


# Name -> scikit-learn's function, and its arguments for two classes and for more; None: only for two.
_BY_NAME = {
    "f1": ("f1_score", {}, {"average": "macro"}),
    "precision": ("precision_score", {"zero_division": 0}, {"average": "macro", "zero_division": 0}),
    "sensitivity": ("recall_score", {}, {"average": "macro"}),
    "specificity": ("recall_score", {"pos_label": 0}, None),
    "balanced_accuracy": ("balanced_accuracy_score", {}, {}),
    "auroc": ("roc_auc_score", {}, {"multi_class": "ovr"}),
    "auprc": ("average_precision_score", {}, {}),
    "brier": ("brier_score_loss", {}, {}),
    "kappa": ("cohen_kappa_score", {}, {}),
    "mcc": ("matthews_corrcoef", {}, {}),
    "confusion": ("confusion_matrix", {}, {}),
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
        settings = of_two if num_classes == 2 else of_more
        if settings is None:
            raise UserError(f"{setting} = {text}: {name} is of two classes, and the data have {num_classes}")
        chosen[name] = Metric(name, (f"sklearn.metrics.{function}", settings))
    return chosen


def or_nan(metric, *answers, **form):
    """A metric's number; nan if it is none or cannot be computed, as of samples of one class."""
    try:
        value = metric(*answers, **form)
    except UserError:
        return math.nan
    return math.nan if isinstance(value, list) else value


@dataclasses.dataclass(frozen=True)
class Answers:
    """What a model answers, and what is right.

    Attributes:
        outputs: [n, classes, ...], or one output per target: [n, ...] or [n, 1, ...]. targets: [n, ...].
        is_share: whether a single output is a probability, from 0 to 1, and not a logit, which may have any sign.
        is_last: whether outputs are [n, ..., classes] also if the shapes allow [n, classes, ...].
    """

    outputs: torch.Tensor
    targets: torch.Tensor
    is_share: bool = False
    is_last: bool = False

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
        """The class of each answer: a logit's sign decides between two, or whether a probability is above a half."""
        if not self.is_binary:
            return self.values()
        low = -1 if (self.targets < 0).any() else 0
        return torch.where(self.outputs > (0.5 if self.is_share else 0), 1, low)

    def probabilities(self):
        """[n] of the second class, [n, classes] or, if each target has one output, in that shape; float64."""
        outputs = self.outputs.double()
        if not self.num_classes_of(self.outputs, self.targets):
            return outputs if self.is_share or not self.is_binary else outputs.sigmoid()
        sums = outputs.sum(1)
        are_shares = bool((outputs >= 0).all()) and torch.allclose(sums, torch.ones_like(sums), atol=1e-4)
        shares = outputs / sums[:, None] if are_shares else outputs.softmax(1)
        return shares[:, 1] if shares.shape[1] == 2 else shares

    def scores(self):
        """Larger for the second of two classes; of more classes their probabilities."""
        two = self.num_classes_of(self.outputs, self.targets) == 2
        return self.margins() if two or self.is_binary else self.probabilities()

    def margins(self):
        """The outputs; of two classes the second one's output minus the first one's."""
        two = self.num_classes_of(self.outputs, self.targets) == 2
        return (self.outputs[:, 1] - self.outputs[:, 0] if two else self.outputs).double()


class Metric:
    """A metric of outputs and targets: a number, or a vector or matrix as nested lists.

    Args:
        name: for messages. metric: what `fedmpi.Task.metrics` has under that name.

    Raises:
        UserError: if it cannot be imported; when called: if the function fails or returns something else.
    """

    def __init__(self, name, metric):
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

    def __call__(self, outputs, targets, **form):
        """See `Answers`, `form` included; what the user's own function gets is not changed."""
        answers = Answers(outputs, targets, **form)
        try:
            if self._is_own:
                value = self._function(outputs, targets, **self._settings)
            elif self._kind is None:  # of torchmetrics
                value = self._of_torchmetrics(answers)
            else:
                value = self._of_sklearn(answers)
            return _read(value)
        except Exception as error:  # noqa: BLE001  a user's function can raise anything
            shapes = f"outputs {list(outputs.shape)}, targets {list(targets.shape)}"
            raise UserError(f"metric {self.name}: {type(error).__name__}: {short(error)} ({shapes})") from error

    def _of_torchmetrics(self, answers):
        if inspect.isclass(self._function):
            return self._function(**self._settings)(answers.outputs, answers.targets)
        return self._function(answers.outputs, answers.targets, **self._settings)

    def _of_sklearn(self, answers):
        is_plain = answers.values() is answers.outputs  # there are no scores of classes
        if self._kind == "classes" and is_plain and answers.outputs.is_floating_point() and not answers.is_binary:
            raise ValueError("no classes can be read from these outputs: let predict return classes")
        if self._kind not in ("classes", "values") and not answers.outputs.is_floating_point():
            raise ValueError("needs scores, not classes: let predict return the model's outputs")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of classes that some samples lack
            found = getattr(answers, self._kind)().numpy()
            return self._function(answers.targets.numpy(), found, **self._labels(answers), **self._settings)

    def _labels(self, answers):
        """The classes as an argument, for functions that could not know those that the data lack."""
        needs = self._kind == "probabilities" or (self._kind == "scores" and answers.num_classes > 2)
        needs |= "matrix" in self._function.__name__ or self._settings.get("average", "") is None
        takes = "labels" in inspect.signature(self._function).parameters and "labels" not in self._settings
        is_plain = answers.targets.dim() == 1 and answers.num_classes and not (answers.targets < 0).any()
        return {"labels": np.arange(answers.num_classes)} if needs and takes and is_plain else {}


def _read(value):
    """A number, or nested lists of numbers, of what a metric's function returned."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
    array = np.empty(0) if isinstance(value, str | dict) else np.asarray(value, dtype=float)
    if array.size == 1:
        return float(array.reshape(()))
    if array.ndim not in (1, 2) or not 0 < array.size <= LARGEST_TABLE:
        found = f"a {type(value).__name__} of shape {list(getattr(value, 'shape', ()))}"
        raise TypeError(f"returned {found}: expected a number, or a vector or matrix of at most {LARGEST_TABLE}")
    return array.tolist()
