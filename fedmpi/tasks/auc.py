"""Maximisation of the area under the ROC curve, as a min-max problem."""

import dataclasses

import numpy as np
import torch
from torch import nn

from fedmpi.data.imbalanced import ImbalancedBinary
from fedmpi.ground.errors import UserError
from fedmpi.ground.files.run_files import ROC
from fedmpi.ground.settings import setting
from fedmpi.ground.text import Log
from fedmpi.tasks.base import Metrics, Support, constructor_of, of_clients
from fedmpi.tasks.classification import Classification, LoadedClassification
from fedmpi.tasks.files import has_own_files
from fedmpi.tasks.metrics import crossing
from fedmpi.tasks.pooling import binned

log = Log(__name__)

ROC_POINTS = 300  # most points of the ROC curve in a run folder
PAPERS_SHARE = 0.8  # of the negative samples that the paper removes


@dataclasses.dataclass(frozen=True)
class DeepAUC(Classification):
    """Train a scoring network for ROC AUC on an imbalanced binary data set, as a min-max problem.

    The variables are (θ, a, b, w): the network's parameters, the mean scores of the positive and the
    negative samples, and the dual w, which ascends. Metric: auc, of the whole test set.

    Source: "On the Convergence of Federated Deep AUC Maximization", Eq. (4).
    """

    name = "auc"
    partition = "stride"
    can_redeal = False

    removed_share: float | None = setting(
        None,
        "share of every negative class that is removed; default: 0.8, as in the paper, of a data set that is given by "
        "its name, 0 of files",
        least=0,
        below=1,
    )
    p: str = setting(
        "global",
        "p in the loss, the share of positive samples: of all clients together (global), or of each client (local)",
        among=("global", "local"),
    )
    ascent_scale: float = setting(
        1.0, "step size of w divided by that of the other variables, for algorithms with a single step size", above=0
    )

    def crosses(self, is_personal, scores="auto"):
        return super().crosses(is_personal, scores) - {"test counts"} | {
            "outputs" if scores == "samples" or (scores == "auto" and not has_own_files(self)) else "metric sums"
        }

    def load(self, context, partition):
        return LoadedAUC(self, context, *self.open(context, partition))

    def version(self, source, seed):
        """The imbalanced binary version of a data set; of silo files each has its own.

        Raises:
            UserError: if a silo file does not declare its number of classes.
        """
        if has_own_files(self) and not source.classes_declared:
            raise UserError(f"{source.path}: lacks the attribute num_classes, which decides which classes are positive")
        return ImbalancedBinary(source, self.share(), seed)

    def share(self):
        """The share of every negative class that is removed."""
        if self.removed_share is not None:
            return self.removed_share
        is_file = has_own_files(self) or self.data.endswith((".h5", ".hdf5"))
        return 0.0 if is_file else PAPERS_SHARE


def auc_loss(h, positive, p, a, b, w):
    """Mean of Eq. (4) over a batch: its value at the saddle in (a, b, w) is p(1-p)(E[(1 - h⁺ + h⁻)²] - 1).

    Args:
        h: [n] scores. positive: [n] 1 for positive samples, 0 for negative ones.
        p: share of positives. a, b, w: numbers; a and b descend with the network, w ascends.
    """
    negative = 1 - positive
    squares = (1 - p) * (h - a) ** 2 * positive + p * (h - b) ** 2 * negative
    cross = 2 * (1 + w) * (p * h * negative - (1 - p) * h * positive)
    return (squares + cross).mean() - p * (1 - p) * w**2


def roc_auc(scores, positive):
    """Area under the ROC curve: the share of (positive, negative) pairs in order; a tie counts ½.

    Args:
        scores: [n] numbers. positive: [n] whether a sample is positive; both kinds must be there.
    """
    positive = np.asarray(positive, dtype=bool)
    _, which, number = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(number) - (number - 1) / 2)[which]  # from 1; equal scores share their mean rank
    num_positive, num_negative = positive.sum(), (~positive).sum()
    return float((ranks[positive].sum() - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative))


def roc_points(scores, positive):
    """[n, 2] the share of false positives and of true positives for falling thresholds, from (0, 0) to (1, 1).

    Args:
        scores, positive: see `roc_auc`. Of more than `ROC_POINTS` thresholds, some are left out.
    """
    order = np.argsort(-np.asarray(scores), kind="stable")
    is_last = np.append(np.diff(np.asarray(scores)[order]) != 0, True)  # of equal scores
    hits = np.asarray(positive, dtype=bool)[order]
    points = np.stack([np.cumsum(~hits) / (~hits).sum(), np.cumsum(hits) / hits.sum()], axis=1)[is_last]
    points = np.concatenate([np.zeros((1, 2)), points])
    return points[np.unique(np.linspace(0, len(points) - 1, min(len(points), ROC_POINTS)).round().astype(int))]


class Scorer(nn.Module):
    """A network with one output, and the three further variables; w stands last.

    Args:
        net: module whose output is one number per sample, [n, 1] or [n].
    """

    def __init__(self, net):
        super().__init__()
        self.net = net
        self.auc = nn.ParameterDict({"a": torch.tensor(1.0), "b": torch.tensor(0.0), "w": torch.tensor(0.0)})

    def forward(self, inputs):
        """[n] the network's outputs; their sigmoids are the scores h."""
        return self.net(inputs).view(len(inputs))


class LoadedAUC(LoadedClassification):
    """See `LoadedTask`. Metrics: train_loss (the mean of F_i at the current a, b and w), auc, holdout_auc."""

    goal = ("auc", 1)
    weighs_classes = ""

    def __init__(self, settings, context, sources, *data):
        super().__init__(settings, context, sources, *data)
        for name in ("metrics", "class_weights"):
            if (value := getattr(settings, name)) != getattr(Classification, name):
                raise UserError(f"task.{name} = {value}: the task auc measures and trains auc only: leave it out")
        originals = [f"{source.num_original_classes} original classes" for source in sources.values()]
        self._facts = [[*facts, original] for facts, original in zip(self._facts, originals)]
        self.ascent_scale = settings.ascent_scale
        if share := settings.share():
            self.reading = f"without {100 * share:g} % of every negative class (--task.removed_share)"
        self._roc = []  # points of the last evaluation's ROC curve; the same list in every `subset` of the task

    def synchronise(self, link):
        """Agree on p, the share of positives. Collective on the link."""
        counts = {client: np.array([labels.sum(), len(labels)]) for client, labels in self._labels.items()}
        in_all = link.allgather(sum(counts.values()), "class counts").sum(0)
        super().synchronise(link)
        self._scores = self._context.scores_of(not self.has_own_tests)
        if self.has_own_tests and self._scores == "samples" and link.size > 1 and link.rank == 0:
            kind = "test and held-out" if self._context.holdout else "test"
            log.warning(crossing("task auc", kind, self._scored()))
        self.num_classes = 1  # outputs of the network
        of_client = counts if self._settings.p == "local" else dict.fromkeys(counts, in_all)
        self._p = {client: float(positives / number) for client, (positives, number) in of_client.items()}
        one_sided = [client for client, p in self._p.items() if not 0 < p < 1]
        if one_sided:
            kind = "positive" if self._p[one_sided[0]] else "negative"
            hint = ": use --task.p global or another partition" if self._settings.p == "local" else ""
            raise UserError(f"task.p = {self._settings.p}: client {one_sided[0]} counts only {kind} samples{hint}")
        for name, parts in self._scored().items():
            counts = [sum(int(samples.labels.sum()) for samples in parts), sum(samples.num for samples in parts)]
            positives, number = link.allgather(counts, "class counts").sum(0)
            if not 0 < positives < number:
                raise UserError(
                    f"task.data = {self._settings.data}: {name} needs both kinds of samples, and "
                    f"{int(positives)} of {int(number)} are positive (classes of the second half)"
                )

    def build_model(self, model_class, model_settings):
        return Scorer(super().build_model(model_class, model_settings))

    def constructor(self, model_class, model_settings):
        net = super().constructor(model_class, model_settings)
        return net and constructor_of(Scorer, net=net)

    def describe_inputs(self):
        return {**super().describe_inputs(), "class_names": ["negative", "positive"]}

    def subset(self, num_samples, tests=True):
        return super().subset(num_samples, tests=False)  # few positives would make the area uncertain

    def ascent(self, flat):
        return flat.segments[flat.names.index("auc.w")]

    def batch(self, client, indices):
        return *super().batch(client, indices), self._p[client]

    def loss(self, module, batch):
        inputs, labels, p = batch
        return auc_loss(torch.sigmoid(module(inputs)), labels, p, module.auc.a, module.auc.b, module.auc.w)

    def evaluate(self, module, link):
        losses = [self._objective(module, client) for client in self._train]
        numbers, weighting = self._numbers["train"], self._context.weighting
        (metrics, clients), supports = of_clients(link, {"train_loss": losses}, numbers, weighting), {}
        for name, samples in self._scored().items():
            scored = []
            for client, part in zip(self._context.clients, samples):
                self.visit(client)
                scored.append(_outputs_and_labels(module, part))
            here = [np.concatenate([np.empty(0), *values]) for values in zip(*scored)] or [np.empty(0)] * 2
            if self._scores == "bins":
                columns = here[0][:, None], here[1][:, None] > 0
                outputs, positive = (part[:, 0] for part in binned(link, *columns))
            else:
                outputs, positive = (link.allgatherv(part, "outputs") for part in here)
            metrics[name] = roc_auc(outputs, positive)
            if name == "auc":
                self._roc[:] = roc_points(outputs, positive)
            if name != "auc" or self.has_own_tests or self._context.is_personal:
                clients[name] = link.allgatherv([_own_auc(*part) for part in scored], "evaluation")
                supports[name] = [Support(len(part[0]), _auc_of(*part)) for part in scored]
        return Metrics(metrics, clients, supports=supports)

    def write_result(self, module, folder):
        lines = [f"{false:.6g},{true:.6g}" for false, true in self._roc]
        (folder / ROC).write_text("\n".join(["false positives,true positives", *lines, ""]), encoding="utf-8")

    def _scored(self):
        """Metric -> the samples of this rank that it is computed on."""
        return {"auc": self._tests} | ({"holdout_auc": self._held} if self._context.holdout else {})

    def _objective(self, module, client):
        """F_i at the module's variables, over all samples of a client."""
        self.visit(client)
        samples, total = self._train[client], 0.0
        for inputs, labels in samples.all():
            total += self.loss(module, (inputs, labels, self._p[client])).item() * len(labels)
        return total / samples.num


def _own_auc(outputs, positive):
    """`roc_auc`, or nan if there are not both kinds of samples."""
    return roc_auc(outputs, positive) if 0 < positive.sum() < len(positive) else np.nan


def _auc_of(outputs, positive):
    return lambda indices: _own_auc(outputs[indices], positive[indices])


def _outputs_and_labels(module, samples):
    """([n] float64 outputs, [n] labels) of `Samples`; a larger output is a larger score."""
    outputs, labels = [np.empty(0)], [np.empty(0)]
    for inputs, positive in samples.all():
        outputs.append(module(inputs).double().cpu().numpy())
        labels.append(positive.cpu().numpy())
    return np.concatenate(outputs), np.concatenate(labels)
