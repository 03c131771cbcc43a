"""Metrics by scikit-learn are those of its own functions on the model's scores, for all usual shapes of outputs."""

import fractions
import functools
import json
import re

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import fedmpi
from fedmpi.ground.errors import UserError
from fedmpi.tasks.metrics import Metric

sk = pytest.importorskip("sklearn.metrics")
RNG = np.random.default_rng(0)
TWO, THREE = RNG.integers(0, 2, 60), RNG.integers(0, 3, 60)
LOGITS = RNG.standard_normal(60) + TWO
SCORES = RNG.standard_normal((60, 3)) + 2 * np.eye(3)[THREE]
MANY = RNG.integers(0, 2, (60, 4))
OF_MANY = RNG.standard_normal((60, 4)) + MANY


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x):
    return np.exp(x) / np.exp(x).sum(1, keepdims=True)


def measure(name, outputs, targets, **settings):
    form = {key: settings.pop(key) for key in ("kind", "is_last", "low") if key in settings}
    return Metric(name, (f"sklearn.metrics.{name}", settings))(torch.tensor(outputs), torch.tensor(targets), **form)


@pytest.mark.parametrize("shape", ["[n]", "[n, 1]", "[n, 1] both", "float targets", "probabilities", "two columns"])
def test_two_classes(shape):
    outputs, targets, settings = LOGITS, TWO, {}
    if "1" in shape:
        outputs = outputs[:, None]
    if shape == "[n, 1] both":
        targets = targets[:, None]
    if shape == "float targets":
        targets = targets.astype(float)
    if shape == "probabilities":
        outputs, settings = sigmoid(outputs), {"kind": "probabilities"}
    if shape == "two columns":
        outputs = np.stack([0.3 - LOGITS, np.full(60, 0.3)], axis=1)
    shares, classes = sigmoid(LOGITS), LOGITS > 0
    for name, right in {
        "accuracy_score": sk.accuracy_score(TWO, classes),
        "f1_score": sk.f1_score(TWO, classes),
        "roc_auc_score": sk.roc_auc_score(TWO, LOGITS),
        "average_precision_score": sk.average_precision_score(TWO, LOGITS),
        "log_loss": sk.log_loss(TWO, shares),
        "brier_score_loss": sk.brier_score_loss(TWO, shares),
    }.items():
        assert measure(name, outputs, targets, **settings) == pytest.approx(right, abs=1e-9), name


@pytest.mark.parametrize(
    ("outputs", "kind"),
    [(SCORES, "scores"), (softmax(SCORES), "probabilities"), (np.log(softmax(SCORES)), "scores")],
)
def test_three_classes(outputs, kind):
    shares = softmax(SCORES)
    assert measure("accuracy_score", outputs, THREE, kind=kind) == sk.accuracy_score(THREE, SCORES.argmax(1))
    assert measure("log_loss", outputs, THREE, kind=kind) == pytest.approx(sk.log_loss(THREE, shares))
    right = sk.roc_auc_score(THREE, shares, multi_class="ovr")
    assert measure("roc_auc_score", outputs, THREE, kind=kind, multi_class="ovr") == pytest.approx(right)
    right = sk.top_k_accuracy_score(THREE, shares, k=2)
    assert measure("top_k_accuracy_score", outputs, THREE, kind=kind, k=2) == pytest.approx(right)
    # Samples that lack a class: the others would not say which columns are which.
    first = THREE < 2
    right = sk.log_loss(THREE[first], shares[first], labels=[0, 1, 2])
    assert measure("log_loss", outputs[first], THREE[first], kind=kind) == pytest.approx(right)
    assert np.shape(measure("confusion_matrix", outputs[first], THREE[first], kind=kind)) == (3, 3)
    assert len(measure("recall_score", outputs[first], THREE[first], kind=kind, average=None)) == 3


def test_several_labels_values_and_pixels():
    right = sk.f1_score(MANY, OF_MANY > 0, average="macro")
    assert measure("f1_score", OF_MANY, MANY, average="macro") == pytest.approx(right)
    assert measure("roc_auc_score", OF_MANY, MANY) == pytest.approx(sk.roc_auc_score(MANY, OF_MANY))
    values = LOGITS.round(2)
    assert measure("r2_score", values[:, None], LOGITS) == pytest.approx(sk.r2_score(LOGITS, values))
    assert measure("mean_absolute_error", values[:, None], THREE) == pytest.approx(np.abs(values - THREE).mean())
    pixels, targets = RNG.standard_normal((5, 3, 4, 4)), RNG.integers(0, 3, (5, 4, 4))
    targets[0, 0] = -100  # padding
    right = (pixels.argmax(1) == targets)[targets != -100].mean()
    assert measure("accuracy_score", pixels, targets) == pytest.approx(right)
    assert measure("accuracy_score", pixels[:, :1], (targets > 1).astype(int)) == pytest.approx(
        ((pixels[:, 0] > 0) == (targets > 1)).mean()
    )


def test_a_function_of_scikit_learn_may_be_given_itself():
    for function in (sk.roc_auc_score, functools.partial(sk.roc_auc_score, max_fpr=None)):
        value = Metric("auc", function)(torch.tensor(LOGITS), torch.tensor(TWO))
        assert value == pytest.approx(sk.roc_auc_score(TWO, LOGITS))


@pytest.mark.parametrize(
    ("name", "outputs", "targets", "message"),
    [
        ("roc_auc_score", SCORES.argmax(1), TWO, "needs scores"),
        ("accuracy_score", LOGITS, THREE, "let predict return classes"),
        ("classification_report", SCORES, THREE, "expected a number"),
        ("f1_score", SCORES, THREE, "multiclass"),
    ],
)
def test_what_cannot_be_known_is_one_line(name, outputs, targets, message):
    with pytest.raises(UserError, match=message):
        measure(name, outputs, targets)


def task_of(make_outputs, **members):
    inputs = torch.tensor(np.stack([LOGITS, 1 - LOGITS], axis=1), dtype=torch.float32)
    data = TensorDataset(inputs, torch.tensor(TWO))

    def loss(model, batch):
        return torch.nn.functional.binary_cross_entropy(make_outputs(model(batch[0])).sigmoid(), batch[1].float())

    members = {"train": lambda client, num: data, "test": lambda: data, "loss": loss, **members}
    return fedmpi.Task.of("Binary", **members)


@pytest.mark.parametrize("kind", ["scores", "probabilities"])
def test_what_outputs_are_is_what_the_task_says(tmp_path, kind):
    """Also of logits that stay from 0 to 1 whatever the parameters are."""
    last = torch.nn.Sigmoid()
    model = torch.nn.Sequential(torch.nn.Linear(2, 1), last)
    metrics = {"accuracy": "sklearn.metrics.accuracy_score", "score": "sklearn.metrics.brier_score_loss"}
    task = task_of(lambda out: out.squeeze(1), metrics=metrics, outputs=kind)
    run = fedmpi.train(task=task, model=model, clients=2, rounds=3, out=tmp_path, algorithm="fedavg", threads=1)
    data = task.test()
    with torch.no_grad():
        outputs = run.model(data.tensors[0]).squeeze(1)
    shares = (outputs.double().sigmoid() if kind == "scores" else outputs).numpy()
    assert run.final["accuracy"] == pytest.approx(sk.accuracy_score(TWO, shares > 0.5))
    assert run.final["score"] == pytest.approx(sk.brier_score_loss(TWO, shares), abs=1e-6)
    assert json.loads((run.folder / "model.json").read_text())["outputs_are"] == kind


ACCURACY, LOGLOSS = ({"of": f"sklearn.metrics.{name}"} for name in ("accuracy_score", "log_loss"))
TORCH = {"of": ("torchmetrics.classification.BinaryAccuracy", {})}


def head(columns, *layers, bias=0.4):
    """A model whose outputs before its last layers are `bias`."""
    linear = torch.nn.Linear(2, columns)
    torch.nn.init.zeros_(linear.weight), torch.nn.init.constant_(linear.bias, bias)
    return torch.nn.Sequential(linear, *layers)


@pytest.mark.parametrize(
    ("given", "metrics", "model", "message"),
    [
        (None, ACCURACY, head(1, bias=9), "depends on what the model's outputs are: say in the task Binary "),
        (None, TORCH, head(1), "depends on what the model's outputs are"),
        (None, LOGLOSS, head(2), "depends on what the model's outputs are"),
        (None, ACCURACY, head(1, torch.nn.Sigmoid()), "depends on what the model's outputs are"),
        ("probabilities", ACCURACY, head(1, bias=-1.0), 'says outputs = "probabilities", and they are from -1 to -1'),
        ("probabilities", LOGLOSS, head(2), "do not add up to 1"),
        ("values", ACCURACY, head(1), 'outputs = "values".: let predict return classes'),
        ("values", LOGLOSS, head(1), "needs probabilities"),
        ("logits", ACCURACY, head(1), "outputs = 'logits': expected 'scores', 'probabilities', 'values', or None"),
    ],
)  # fmt: skip
def test_what_outputs_are_is_not_guessed(tmp_path, given, metrics, model, message):
    def loss(model, batch):
        return (model(batch[0])[:, 0] - batch[1]).square().mean()

    task = task_of(None, metrics=metrics, outputs=given, loss=loss)
    with pytest.raises(UserError, match=message) as met:
        fedmpi.train(task=task, model=model, clients=2, rounds=3, out=tmp_path, algorithm="fedavg", threads=1)
    assert "\n" not in str(met.value) and not [*tmp_path.iterdir()]


def test_the_largest_of_several_outputs_is_the_class_whatever_they_are(tmp_path):
    def loss(model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    task, model = task_of(None, metrics=ACCURACY, loss=loss), head(2)
    run = fedmpi.train(task=task, model=model, clients=2, rounds=3, out=tmp_path, algorithm="fedavg", threads=1)
    with torch.no_grad():
        outputs = run.model(task.test().tensors[0])
    assert run.final["of"] == pytest.approx(sk.accuracy_score(TWO, outputs.argmax(1)), abs=1e-6)


def test_torchmetrics_get_probabilities_of_logits():
    """It would take logits for probabilities if none of them is outside 0 to 1."""
    logits, targets = torch.tensor([0.2, 0.4, 0.9, 0.3]), torch.tensor([0, 1, 1, 0])
    assert Metric("own", ("torchmetrics.classification.BinaryAccuracy", {}))(logits, targets) == 0.5
    assert Metric("own", ("torchmetrics.MeanSquaredError", {}))(logits, targets.float()) == pytest.approx(0.125)


MACRO = [
    ("f1_score", {"average": "macro"}),
    ("recall_score", {"average": "macro"}),
    ("precision_score", {"average": "macro"}),
    ("jaccard_score", {"average": "macro"}),
    ("balanced_accuracy_score", {}),
]


@pytest.mark.parametrize("number", [3, 2, 1])
def test_classes_without_cases_are_left_out_of_every_mean(number):
    """Though they are predicted; with cases of all classes it is scikit-learn's number."""
    chosen = number > THREE
    outputs, targets = SCORES[chosen], THREE[chosen]
    shares, classes, present = softmax(outputs), outputs.argmax(1), np.arange(number)
    assert {*classes} == {0, 1, 2}
    for name, settings in MACRO:
        of_present = {**settings, "labels": present} if settings else {}
        right = getattr(sk, name)(targets, classes, **of_present)
        assert measure(name, outputs, targets, **settings) == pytest.approx(right), name
    areas = [sk.roc_auc_score(targets == k, shares[:, k]) for k in present]
    found = measure("roc_auc_score", outputs, targets, multi_class="ovr")
    assert found == pytest.approx(np.mean(areas), nan_ok=True)
    areas = [sk.average_precision_score(targets == k, shares[:, k]) for k in present]
    assert measure("average_precision_score", outputs, targets) == pytest.approx(np.mean(areas))
    of_each = measure("recall_score", outputs, targets, average=None)
    right = [np.mean(classes[targets == k] == k) for k in present]
    assert of_each == pytest.approx([*right, *[np.nan] * (3 - number)], nan_ok=True)


def test_by_hand_a_class_that_is_predicted_but_has_no_cases():
    """Two cases of class 0, one of them called 2, and one of class 1: recalls of 1/2 and 1."""
    outputs = np.eye(3)[[0, 2, 1]]
    assert measure("recall_score", outputs, np.array([0, 0, 1]), average="macro") == pytest.approx(0.75)
    assert measure("f1_score", outputs, np.array([0, 0, 1]), average="macro") == pytest.approx((2 / 3 + 1) / 2)
    own_choice = measure("f1_score", outputs, np.array([0, 0, 1]), average="macro", zero_division=0)
    assert own_choice == pytest.approx((2 / 3 + 1 + 0) / 3)  # as scikit-learn does it


@pytest.mark.parametrize("name", ["f1_score", "recall_score", "precision_score", "average_precision_score"])
def test_of_two_classes_the_measured_one_needs_cases(name):
    assert np.isnan(measure(name, LOGITS, 0 * TWO)) and np.isfinite(measure(name, LOGITS, TWO))


def test_labels_without_cases_are_left_out():
    some = MANY * [1, 0, 1, 1]
    for name, settings, found in (("f1_score", {"average": "macro"}, OF_MANY > 0), ("roc_auc_score", {}, OF_MANY)):
        right = getattr(sk, name)(some[:, [0, 2, 3]], found[:, [0, 2, 3]], **settings)
        assert measure(name, OF_MANY, some, **settings) == pytest.approx(right)


NOT_NUMBERS = [None, "0.5", 1j, torch.tensor(1 + 2j), np.array([1j]), ["0.5"], [None, 1.0], {"a": 1.0}, {0.5}, object()]


@pytest.mark.parametrize("value", [*NOT_NUMBERS, np.ones((2, 2, 2)), np.ones(20_000), np.empty(0)])
def test_what_is_no_number_is_one_line_with_the_metrics_name(value):
    with pytest.raises(UserError, match="metric mine: TypeError: returned .*: expected a number") as met:
        Metric("mine", lambda outputs, targets: value)(torch.ones(3), torch.ones(3))
    assert "\n" not in str(met.value)


@pytest.mark.parametrize(
    ("value", "right"),
    [
        (np.float32(0.5), 0.5),
        (torch.tensor([0.5], requires_grad=True), 0.5),
        (torch.tensor(2, dtype=torch.uint8), 2),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        (fractions.Fraction(1, 2), 0.5),
        (True, 1),
        (torch.eye(2, requires_grad=True), [[1, 0], [0, 1]]),
        ([0.5, 0.25], [0.5, 0.25]),
    ],
)
def test_all_that_is_a_number_counts(value, right):
    assert Metric("mine", lambda outputs, targets: value)(torch.ones(3), torch.ones(3)) == right


def test_vectors_and_matrices_are_recorded_shown_and_drawn(tmp_path, capfd):
    metrics = {
        "confusion": "sklearn.metrics.confusion_matrix",
        "recall": ("sklearn.metrics.recall_score", {"average": None}),
    }
    data = TensorDataset(torch.tensor(SCORES, dtype=torch.float32), torch.tensor(THREE))
    task = fedmpi.Task.of(
        "Three",
        train=lambda client, num: data,
        test=lambda: data,
        loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
        metrics=metrics,
        class_names=("ill", "well", "unknown"),
    )
    run = fedmpi.train(
        task=task,
        model=torch.nn.Linear(3, 3),
        rounds=2,
        out=tmp_path,
        name="run",
        algorithm="fedavg",
        threads=1,
        verbose=True,
    )
    with torch.no_grad():
        right = sk.confusion_matrix(THREE, run.model(data.tensors[0]).argmax(1).numpy())
    record = json.loads((run.folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert record["tables"]["confusion"] == {"classes": ["ill", "well", "unknown"], "values": right.tolist()}
    names, rows = fedmpi.load_run(run.folder).tables["recall"]
    assert names[0] == "ill" and rows[0] == pytest.approx(right.diagonal() / right.sum(1))
    assert re.search(f"confusion ill +ill {right[0, 0]}, well {right[0, 1]}", capfd.readouterr().out)
    pytest.importorskip("matplotlib")
    from fedmpi.cli.report.__main__ import main

    assert not main([str(run.folder), "--out", str(tmp_path / "page.html")])
    assert "confusion of fedavg" in (tmp_path / "page.html").read_text()


def test_a_metric_that_fails_on_one_silo_is_not_a_number_there(tmp_path):
    def data(client):
        chosen = TWO >= 0 if client else TWO == 0
        return TensorDataset(torch.tensor(LOGITS[chosen, None], dtype=torch.float32), torch.tensor(TWO[chosen]))

    def fails(outputs, targets):
        return (
            sk.matthews_corrcoef(targets.numpy(), outputs[:, 0].numpy() > 0) if targets.unique().numel() > 1 else 1 / 0
        )

    task = task_of(
        lambda out: out.squeeze(1),
        train=lambda client, num: data(client),
        test=lambda: None,
        test_of=lambda client, num: data(client),
        metrics={"own": fails},
    )
    run = fedmpi.train(
        task=task, model=torch.nn.Linear(1, 1), clients=2, rounds=1, out=tmp_path, algorithm="fedavg", threads=1
    )
    first, second = fedmpi.load_run(run.folder).clients["own"]
    assert np.isnan(first) and np.isfinite(second) and np.isfinite(run.final["own"])


class Words(torch.utils.data.Dataset):
    """Sequences of 2 to 8 words [length, 4], each word with a class of three."""

    def __init__(self, lengths, seed):
        draw = torch.Generator().manual_seed(seed)
        self.samples = [torch.randn(length, 4, generator=draw) for length in lengths]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index], self.samples[index][:, :3].argmax(1)


class Tagger(torch.nn.Linear):
    def __init__(self, columns, is_last=True):
        super().__init__(4, columns)
        self.is_last = is_last

    def forward(self, inputs):
        outputs = super().forward(inputs)
        return outputs if self.is_last else outputs.movedim(-1, 1)


def padded(samples):
    pad = torch.nn.utils.rnn.pad_sequence
    inputs, targets = zip(*samples)
    return pad(inputs, batch_first=True), pad(targets, batch_first=True, padding_value=-100)


def of_sequences(kind):
    """A task, of whose silos the second one is tested on one sequence with as many words as there are classes."""

    def loss(model, batch):
        inputs, targets = (torch.cat([*one]) for one in batch) if kind != "first" else batch
        outputs = model(inputs)
        if kind == "values":
            return torch.nn.functional.mse_loss(outputs[:, 0], targets.float())
        outputs = outputs if kind == "first" else outputs.reshape(-1, 3)
        return torch.nn.functional.cross_entropy(outputs, targets.reshape(outputs[:, 0].shape))

    def predict(model, batch):
        if kind == "values":
            return [model(one)[:, 0] for one in batch[0]], [one.float() for one in batch[1]]
        return ([model(one) for one in batch[0]], batch[1]) if kind == "lists" else (model(batch[0]), batch[1])

    tests = [Words([4, 7, 2, 8, 3, 5, 6, 2], 8), Words([3], 9)]
    members = {"train": lambda client, num: Words([3, 5, 4, 8, 2], client), "loss": loss, "predict": predict}
    members |= {"test_of": lambda client, num: tests[client], "collate": lambda samples: [*zip(*samples)]}
    if kind in ("first", "last"):
        members["collate"] = padded
    names = (
        {"mse": "mean_squared_error"} if kind == "values" else {"accuracy": "accuracy_score", "log_loss": "log_loss"}
    )
    members["metrics"] = {name: f"sklearn.metrics.{function}" for name, function in names.items()}
    members["outputs"] = "values" if kind == "values" else "scores"
    return fedmpi.Task.of("Sequences", **members), tests


@pytest.mark.parametrize("kind", ["first", "last", "lists", "values"])
def test_metrics_of_sequences_of_different_length_count_each_word_once(tmp_path, kind):
    task, tests = of_sequences(kind)
    model = Tagger(1 if kind == "values" else 3, kind != "first")
    run = fedmpi.train(task=task, model=model, clients=2, rounds=1, out=tmp_path, algorithm="fedavg", threads=1)
    clients, linear = fedmpi.load_run(run.folder).clients, torch.nn.Linear.forward

    def right(silos):
        inputs, targets = (torch.cat([sample[k] for silo in silos for sample in silo]) for k in (0, 1))
        with torch.no_grad():
            outputs = linear(run.model, inputs).double().numpy()
        if kind == "values":
            return {"mse": sk.mean_squared_error(targets, outputs[:, 0])}
        shares = softmax(outputs)
        found = {"accuracy": sk.accuracy_score(targets, shares.argmax(1))}
        return found | {"log_loss": sk.log_loss(targets, shares, labels=[0, 1, 2])}

    for name, value in right(tests).items():
        assert run.final[name] == pytest.approx(value, abs=1e-6)
        assert clients[name] == pytest.approx([right([silo])[name] for silo in tests], abs=1e-6)


def test_samples_of_different_length_need_collate(tmp_path):
    task, _ = of_sequences("last")
    del task.collate
    with pytest.raises(UserError, match="different shapes .*: define collate.samples., which pads or lists them"):
        fedmpi.train(task=task, model=Tagger(3), clients=2, rounds=1, out=tmp_path, algorithm="fedavg")
