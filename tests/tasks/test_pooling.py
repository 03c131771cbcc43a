"""Metrics from counts, sums and bins equal scikit-learn's on all silos' samples in one place."""

import math
import warnings

import numpy as np
import pytest
import torch

from fedmpi.comm.solo import SoloLink
from fedmpi.ground.errors import UserError
from fedmpi.tasks.metrics import CALIBRATION, Metric
from fedmpi.tasks.pooling import ERROR, NUM_BINS, Measuring, binned

sk = pytest.importorskip("sklearn.metrics")
AVERAGED = ("f1_score", "recall_score", "precision_score")  # functions with the argument average
SIZES = (137, 1, 60, 3)  # samples of the silos; the second one has a single class


def silos(columns, labels=None, seed=0, dtype=torch.float64):
    """[(outputs [n, columns], labels [n])] of silos that differ."""
    stream, found = np.random.default_rng(seed), []
    for silo, size in enumerate(SIZES):
        targets = stream.integers(0, labels or columns, size)
        outputs = (
            stream.standard_normal((size, columns)) * (silo + 1) + 0.7 * np.eye(max(columns, 10))[targets, :columns]
        )
        found.append((torch.tensor(outputs, dtype=dtype), torch.tensor(targets)))
    return found


def pooled(parts, metrics, scores="bins", takes=None, **form):
    metrics = {name: Metric(name, metric, (takes or {}).get(name)) for name, metric in metrics.items()}
    return Measuring(metrics, False, scores, form)(SoloLink(), parts)


def joined(parts):
    return [torch.cat(column) for column in zip(*parts)]


@pytest.mark.parametrize("num_classes", [2, 4])
def test_metrics_of_classes_are_those_of_all_samples(num_classes):
    parts = silos(num_classes)
    outputs, targets = joined(parts)
    y, found = targets.numpy(), outputs.argmax(1).numpy()
    average = {} if num_classes == 2 else {"average": "macro"}
    right = {
        "accuracy_score": sk.accuracy_score(y, found),
        "f1_score": sk.f1_score(y, found, **average),
        "recall_score": sk.recall_score(y, found, **average),
        "precision_score": sk.precision_score(y, found, **average),
        "balanced_accuracy_score": sk.balanced_accuracy_score(y, found),
        "cohen_kappa_score": sk.cohen_kappa_score(y, found),
        "matthews_corrcoef": sk.matthews_corrcoef(y, found),
        "confusion_matrix": sk.confusion_matrix(y, found).tolist(),
    }
    names = {name: (f"sklearn.metrics.{name}", average if name in AVERAGED else {}) for name in right}
    got = pooled(parts, names)
    for name, value in right.items():
        assert got[name] == pytest.approx(value, abs=1e-12) if name != "confusion_matrix" else got[name] == value, name
    of_classes = pooled(parts, {"recall": ("sklearn.metrics.recall_score", {"average": None})})["recall"]
    assert of_classes == pytest.approx(sk.recall_score(y, found, average=None), abs=1e-12)


@pytest.mark.parametrize("num_classes", [2, 3])
def test_means_over_samples_are_those_of_all_samples(num_classes):
    parts = silos(num_classes)
    outputs, targets = joined(parts)
    shares = outputs.softmax(1).numpy()
    right = sk.log_loss(targets.numpy(), shares, labels=range(num_classes))
    names = {"loss": "sklearn.metrics.log_loss", "brier": "sklearn.metrics.brier_score_loss"}
    got = pooled(parts, names, kind="scores")
    assert got["loss"] == pytest.approx(right, abs=1e-12)
    brier = sk.brier_score_loss(targets.numpy(), shares[:, 1] if num_classes == 2 else shares)
    assert got["brier"] == pytest.approx(brier, abs=1e-12)


@pytest.mark.parametrize("num_classes", [2, 4])
def test_calibration_is_scikit_learns_curve(num_classes):
    from sklearn.calibration import calibration_curve

    parts = silos(num_classes)
    outputs, targets = joined(parts)
    shares = outputs.softmax(1).numpy()
    chosen, right = shares[:, 1], targets.numpy()
    if num_classes > 2:
        chosen, right = shares.max(1), (shares.argmax(1) == targets.numpy()).astype(int)
    true, predicted = calibration_curve(right, chosen, n_bins=10)
    number = np.bincount(np.searchsorted(np.linspace(0, 1, 11)[1:-1], chosen), minlength=10)
    error = (number[number > 0] * np.abs(true - predicted)).sum() / len(right)
    found = pooled(parts, {"c": CALIBRATION})["c"]
    assert found == pytest.approx(error, abs=1e-12)
    assert found == pytest.approx(Metric("c", CALIBRATION)(outputs, targets), abs=1e-12)


@pytest.mark.parametrize("width", [None, 2])
@pytest.mark.parametrize("offset", [0, 1e6])
def test_regression_is_that_of_all_samples(width, offset):
    stream, parts = np.random.default_rng(3), []
    for silo, size in enumerate(SIZES):
        shape = size if width is None else (size, width)
        targets = stream.standard_normal(shape) * (silo + 1) + offset + 3 * silo
        parts.append((torch.tensor(targets + stream.standard_normal(shape)), torch.tensor(targets)))
    outputs, targets = (column.numpy() for column in joined(parts))
    names = ["r2_score", "explained_variance_score", "mean_squared_error", "root_mean_squared_error"]
    names += ["mean_absolute_error", "max_error"] if width is None else ["mean_absolute_error"]
    got = pooled(parts, {name: f"sklearn.metrics.{name}" for name in names}, kind="values")
    for name in names:
        assert got[name] == pytest.approx(getattr(sk, name)(targets, outputs), rel=1e-12, abs=1e-12), name


def test_regression_without_differences():
    one = [(torch.tensor([1.0, 1.0]), torch.tensor([1.0, 1.0])), (torch.tensor([1.0]), torch.tensor([1.0]))]
    names = {"r2": "sklearn.metrics.r2_score", "variance": "sklearn.metrics.explained_variance_score"}
    assert pooled(one, names, kind="values") == {"r2": 1.0, "variance": 1.0}
    constants = [torch.full((n,), 0.3, dtype=torch.float64) for n in (3, 8)]
    three = [(values + 1, values) for values in constants]
    assert pooled(three, names, kind="values") == {"r2": 0.0, "variance": 1.0}
    other = [(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 1.0]))]
    assert pooled(other, names, kind="values") == {"r2": 0.0, "variance": 0.0}
    assert math.isnan(pooled([one[1]], names, kind="values")["r2"])


def test_several_labels_are_counted_label_by_label():
    stream = np.random.default_rng(4)
    parts = [(torch.tensor(stream.standard_normal((n, 3))), torch.tensor(stream.integers(0, 2, (n, 3)))) for n in SIZES]
    outputs, targets = (column.numpy() for column in joined(parts))
    found = (outputs > 0).astype(int)
    names = {
        "macro": ("sklearn.metrics.f1_score", {"average": "macro"}),
        "micro": ("sklearn.metrics.f1_score", {"average": "micro"}),
        "samples": ("sklearn.metrics.f1_score", {"average": "samples"}),
        "exact": "sklearn.metrics.accuracy_score",
        "auc": "sklearn.metrics.roc_auc_score",
    }
    got = pooled(parts, names)
    for average in ("macro", "micro", "samples"):
        assert got[average] == pytest.approx(sk.f1_score(targets, found, average=average), abs=1e-12), average
    assert got["exact"] == pytest.approx(sk.accuracy_score(targets, found), abs=1e-12)
    assert got["auc"] == pytest.approx(sk.roc_auc_score(targets, outputs), abs=ERROR)


KINDS = {
    "random": lambda stream, y: stream.standard_normal(len(y)),
    "good": lambda stream, y: stream.standard_normal(len(y)) + 2 * y,
    "in a corner": lambda stream, y: 1e-9 * (stream.random(len(y)) + y),
    "nearly one value": lambda stream, y: 0.5 + np.spacing(0.5) * stream.integers(0, 3 + 2 * y, len(y)),
    "of all sizes": lambda stream, y: (2.0 * y - stream.random(len(y))) * 10.0 ** stream.integers(-300, 300, len(y)),
    "few values": lambda stream, y: np.round(stream.standard_normal(len(y)) + y, 1),
    "two hundred values": lambda stream, y: stream.integers(0, 200, len(y)) / 7 + y,
    "probabilities near 1": lambda stream, y: 1 / (1 + np.exp(-20 - stream.standard_normal(len(y)) - y)),
    "mostly zero": lambda stream, y: np.maximum(0, stream.standard_normal(len(y)) + y - 1),
}


@pytest.mark.rarely
@pytest.mark.parametrize("share", [0.5, 0.01])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [40, 5000, 50_000])
def test_areas_from_bins_are_off_by_at_most_a_thousandth(kind, share, number):
    stream = np.random.default_rng(5)
    y = (stream.random(number) < share).astype(int)
    y[:2] = 0, 1
    scores = KINDS[kind](stream, y)
    bins, kinds = binned(SoloLink(), scores[:, None], y[:, None] > 0)
    assert len(np.unique(bins)) <= NUM_BINS and kinds.sum() == y.sum() and len(kinds) == number
    area = sk.roc_auc_score(kinds[:, 0], bins[:, 0])
    assert area == pytest.approx(sk.roc_auc_score(y, scores), abs=ERROR)
    precision = sk.average_precision_score(kinds[:, 0], bins[:, 0])
    assert precision == pytest.approx(sk.average_precision_score(y, scores), abs=ERROR)


@pytest.mark.parametrize("is_right", [True, False])
@pytest.mark.parametrize(("clusters", "negatives"), [(200, 1), (200, 50), (400, 50)])
def test_areas_from_bins_where_the_order_is_inside_of_narrow_clusters(clusters, negatives, is_right):
    """Bins that are ten times as coarse hold whole clusters, and lose the order in them: .00126 for .001."""
    place = np.tile(np.arange(2 * negatives), clusters)
    scores = np.repeat(np.arange(clusters) / clusters + 1, 2 * negatives) + 1e-13 * place
    y = ((place >= negatives) == is_right).astype(int)
    bins, kinds = binned(SoloLink(), scores[:, None], y[:, None] > 0)
    area = sk.roc_auc_score(kinds[:, 0], bins[:, 0])
    assert area == pytest.approx(sk.roc_auc_score(y, scores), abs=ERROR / 2)  # of 1,000 bins, most suffice


def test_areas_of_several_classes_from_bins():
    parts = [pair for seed in range(20) for pair in silos(3, seed=seed)]
    outputs, targets = joined(parts)
    shares = outputs.softmax(1).numpy()
    indicator = np.eye(3)[targets]
    for name, average in (("roc_auc_score", "macro"), ("roc_auc_score", "weighted"), ("roc_auc_score", "micro"),
                          ("average_precision_score", "macro")):  # fmt: skip
        settings = {"average": average} | ({"multi_class": "ovr"} if name == "roc_auc_score" else {})
        right = getattr(sk, name)(indicator, shares, average=average)
        assert pooled(parts, {"m": (f"sklearn.metrics.{name}", settings)})["m"] == pytest.approx(right, abs=ERROR)


def test_own_metrics_say_what_they_take():
    parts = silos(3)
    outputs, targets = joined(parts)
    seen = {}

    def counts(table):
        seen["counts"] = table
        return table.diagonal().sum() / table.sum()

    def pairs(answers, right):
        seen["pairs"] = answers, right
        return (answers == right).double().mean()

    def mean(scores, right):
        return torch.nn.functional.cross_entropy(scores, right)

    metrics = {"counts": counts, "pairs": pairs, "mean": mean, "scores": lambda scores, right: len(scores)}
    got = pooled(parts, metrics, takes={"counts": "counts", "pairs": "pairs", "mean": "mean"})
    accuracy = (outputs.argmax(1) == targets).double().mean()
    assert got["counts"] == pytest.approx(accuracy) and got["pairs"] == pytest.approx(accuracy)
    assert got["mean"] == pytest.approx(mean(outputs, targets).item(), abs=1e-12) and got["scores"] == len(targets)
    assert seen["counts"].tolist() == sk.confusion_matrix(targets, outputs.argmax(1)).tolist()
    both = [sorted(zip(*map(torch.Tensor.tolist, pair))) for pair in (seen["pairs"], (outputs.argmax(1), targets))]
    assert both[0] == both[1]
    with pytest.raises(UserError, match="metric f: takes = 'labels': expected one of counts, pairs, mean, scores"):
        Metric("f", counts, "labels")
    with pytest.raises(UserError, match="expected no entry, because it is scikit-learn's"):
        Metric("f", "sklearn.metrics.f1_score", "counts")


def test_errors_name_the_metric():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(UserError, match="metric f1: ValueError: no classes can be read"):
            pooled([(torch.rand(5), torch.rand(5))], {"f1": "sklearn.metrics.f1_score"}, kind="values")
        with pytest.raises(UserError, match="metric auc: ValueError: an output is not a number"):
            pooled(
                [(torch.full((4, 2), math.nan), torch.tensor([0, 1, 0, 1]))], {"auc": "sklearn.metrics.roc_auc_score"}
            )
