"""The AUC task: the metric, the loss and its identity, the imbalanced data, the saddle toys."""

import json

import h5py
import numpy as np
import pytest
import torch
from helpers import PROGRAMS, start, train
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from sklearn.metrics import roc_auc_score, roc_curve

from fedmpi.algorithms import FAFED, FMGDA
from fedmpi.comm.solo import SoloLink
from fedmpi.data.imbalanced import ImbalancedBinary
from fedmpi.data.partitions import IID, Even, Stride
from fedmpi.data.source import DigitsSource
from fedmpi.federation.client import Client
from fedmpi.ground.errors import UserError
from fedmpi.ground.files.run_files import ROC
from fedmpi.models.mlp import MLP
from fedmpi.oracles import Autograd, TwoPoint
from fedmpi.oracles.base import LocalObjective
from fedmpi.oracles.flat_module import FlatModule
from fedmpi.tasks.auc import DeepAUC, auc_loss, roc_auc, roc_points
from fedmpi.tasks.base import RankContext
from fedmpi.tasks.saddle_toys import TwoParameterAUC
from fedmpi.training.build import prepare
from fedmpi.training.config import read_command_line
from fedmpi.training.loop import train as train_here


def place(num_clients=4, clients=None, dtype=torch.float64):
    clients = range(num_clients) if clients is None else clients
    return RankContext(num_clients, clients, 0, 1, 3, None, torch.device("cpu"), dtype)


def loaded(num_clients=4, partition=None, dtype=torch.float64, **fields):
    task = DeepAUC(**fields).load(place(num_clients, dtype=dtype), partition or Stride())
    task.synchronise(SoloLink())
    return task


def test_the_roc_curve_is_written_if_the_model_was_evaluated_on_a_part_of_the_data(tmp_path):
    task = loaded()
    module, part = task.build_model(MLP, {"hidden": 2}).double(), task.subset(40)
    assert part is not task
    with torch.no_grad():
        part.evaluate(module, SoloLink())
    task.write_result(module, tmp_path)
    assert len((tmp_path / ROC).read_text(encoding="utf-8").splitlines()) > 10


def test_a_part_of_the_data_has_all_test_samples():
    """The area of a few positive samples would say little."""
    task = loaded()
    module = task.build_model(MLP, {"hidden": 2}).double()
    with torch.no_grad():
        some, whole = (one.evaluate(module, SoloLink()) for one in (task.subset(40), task))
    assert some["auc"] == whole["auc"] and some["train_loss"] != whole["train_loss"]
    largest = max(map(task.num_samples, range(4)))
    assert task.subset(4 * largest) is task is not task.subset(4 * largest - 4)


# The metric.


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(-4, 4), st.booleans()), min_size=2, max_size=40))
def test_roc_auc_is_scikit_learns_with_ties(samples):
    scores, positive = (np.array(column) for column in zip(*samples))
    if positive.any() and not positive.all():
        assert roc_auc(scores, positive) == pytest.approx(roc_auc_score(positive, scores), abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(-4, 4), st.booleans()), min_size=2, max_size=40))
def test_the_points_of_the_curve_are_scikit_learns_with_ties(samples):
    scores, positive = (np.array(column) for column in zip(*samples))
    if positive.any() and not positive.all():
        expected = np.stack(roc_curve(positive, scores, drop_intermediate=False)[:2], axis=1)
        assert np.array_equal(roc_points(scores, positive), expected)


def test_roc_auc_of_ties_and_extremes():
    assert roc_auc([1, 1, 1, 1], [1, 0, 1, 0]) == 0.5
    assert roc_auc([0.1, 0.2, 0.8, 0.9], [0, 0, 1, 1]) == 1
    assert roc_auc([0.1, 0.2, 0.8, 0.9], [1, 1, 0, 0]) == 0


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_auc_over_all_ranks_scores_is_scikit_learns(ranks):
    """Each rank holds an uneven part of a test set with many ties; one rank of four holds nothing."""
    done = start(ranks, PROGRAMS / "auc_of_ranks.py")
    assert done.returncode == 0, done.stderr
    found = [float(word) for word in done.stdout.split()]
    draw = np.random.default_rng(0)
    scores, positive = draw.integers(0, 9, 200), draw.random(200) < 0.3
    assert found == [pytest.approx(roc_auc_score(positive, scores), abs=1e-12)] * ranks


# The loss.

DRAW = np.random.default_rng(1)
POSITIVE = np.r_[np.ones(17), np.zeros(8)]
H = DRAW.random(25)


def value(z, h=H, positive=POSITIVE, p=17 / 25):
    h, positive = (torch.as_tensor(t) for t in (h, positive))
    return auc_loss(h, positive, p, *z)


def test_28_at_the_inner_optimum_the_loss_is_the_pairwise_squared_loss():
    p, plus, minus = POSITIVE.mean(), H[POSITIVE == 1], H[POSITIVE == 0]
    pairwise = np.mean([(1 - x + y) ** 2 for x in plus for y in minus])
    best = torch.tensor([plus.mean(), minus.mean(), minus.mean() - plus.mean()], requires_grad=True)
    found = value(best)
    assert found.item() == pytest.approx(p * (1 - p) * (pairwise - 1), abs=1e-14)
    (slope,) = torch.autograd.grad(found, best)
    torch.testing.assert_close(slope, torch.zeros(3, dtype=slope.dtype), atol=1e-14, rtol=0)
    for step in np.eye(3) * 0.1:
        sign = -1 if step[2] else 1  # a minimum in a and b, a maximum in w
        for away in (step, -step):
            assert sign * (value(best.detach() + torch.as_tensor(away)) - found).item() > 1e-4


def test_28_the_margin_form_of_the_public_codes_is_the_same_function():
    p = POSITIVE.mean()
    a, b, w = 0.3, 0.1, 0.4
    alpha, negative = 1 + w, 1 - POSITIVE
    margin = (
        (1 - p) * (H - a) ** 2 * POSITIVE
        + p * (H - b) ** 2 * negative
        + 2 * alpha * (p * (1 - p) + p * H * negative - (1 - p) * H * POSITIVE)
    ).mean() - p * (1 - p) * alpha**2
    assert margin - value((a, b, w)).item() == pytest.approx(p * (1 - p))


def test_28_with_equal_client_sizes_the_mean_over_clients_is_the_pooled_objective():
    h, positive = H[:24], DRAW.permutation(POSITIVE[:24])
    p, z = positive.mean(), (0.3, 0.1, 0.4)
    of_clients = [value(z, h[i::4], positive[i::4], p).item() for i in range(4)]
    assert np.mean(of_clients) == pytest.approx(value(z, h, positive, p).item(), abs=1e-14)


@pytest.mark.parametrize("m", [(0.5, 0.5), (2.0, -1.0), (0.0, 0.0), (-1.0, 3.0)])
def test_28_the_two_parameter_network_has_the_known_values(m):
    task = TwoParameterAUC().load(place(), None)
    h = m[0] / (1 + np.exp(-m[1] * np.array([1, -1])))
    best = [*m, *h, h[1] - h[0]]
    phi = 0.25 * ((1 - m[0] * np.tanh(m[1] / 2)) ** 2 - 1)
    module = task.build_model(None, {}).double()
    module.x.data = torch.tensor(best, dtype=torch.float64)
    slope = torch.autograd.grad(task.loss(module, 0), module.x)[0]
    torch.testing.assert_close(slope[2:], torch.zeros(3, dtype=torch.float64), atol=1e-12, rtol=0)
    if m == (0, 0):
        torch.testing.assert_close(slope, torch.zeros(5, dtype=torch.float64))
    with torch.no_grad():
        metrics = task.evaluate(module, SoloLink())
    assert metrics["train_loss"] == pytest.approx(phi, abs=1e-12)
    assert metrics["gap"] == pytest.approx(phi + 0.25, abs=1e-12)
    assert metrics["distance"] == pytest.approx(0, abs=1e-12)


# The data.


@pytest.mark.parametrize("removed", [0.8, 0.5, 0.0])
def test_the_imbalanced_version_keeps_a_share_of_each_negative_class(removed):
    source = DigitsSource()
    classes = source.labels["train"]
    version = ImbalancedBinary(source, removed, seed=0)
    kept = version.column("labels")
    for digit in range(10):
        number = (classes == digit).sum()
        assert (kept == digit).sum() == (number if digit >= 5 else int((1 - removed) * number + 1e-9))
    np.testing.assert_array_equal(version.labels["train"], kept >= 5)
    np.testing.assert_array_equal(version.labels["test"], source.labels["test"] >= 5)
    some = np.array([0, 3, 70, len(kept) - 1])
    images = version.read("train", some)
    for image, label in zip(images, kept[some]):
        assert any((image == other).all() for other in source.read("train", np.flatnonzero(classes == label)))
    other = ImbalancedBinary(source, removed, seed=1).column("labels")
    assert removed == 0 or not np.array_equal(other, kept)


def test_stride_deals_the_original_classes(data_dir):
    """The paper's recipe at its size: 36000 samples, p = 5/6, every client the same numbers of every class."""
    from fedmpi.data.source import open_source

    version = ImbalancedBinary(open_source("fashion_mnist", data_dir), 0.8, seed=0)
    assert len(version.labels["train"]) == 36000 and version.labels["train"].mean() == pytest.approx(5 / 6)
    parts = Stride()(version.column("labels"), 16, 0)
    for part in parts:
        counts = np.bincount(version.column("labels")[part], minlength=10)
        assert set(counts[:5]) <= {75} and set(counts[5:]) <= {375}


def test_the_split_that_is_saved_names_rows_of_the_file(tmp_path):
    task = loaded()
    task.write_split(tmp_path)
    source = DigitsSource()
    with h5py.File(tmp_path / "partition.h5") as file:
        assert dict(file.attrs) == {"data": "digits", "unit": "rows"}
        parts = [file[f"client_{client}"][:] for client in range(4)]
    for client, part in enumerate(parts):
        inputs, labels, _ = task.batch(client, torch.arange(len(part)))
        pixels = inputs[:, 0].numpy() * source.std[0] + source.mean[0]
        np.testing.assert_allclose(pixels * 255, source.read("train", part), atol=1e-9)
        assert labels.tolist() == (source.labels["train"][part] >= 5).tolist()


def silo(path, attributes=(), labels=10):
    draw = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        for split in ("train", "test"):
            file[f"{split}/images"] = draw.integers(0, 256, (100, 4, 4), dtype=np.uint8)
            file[f"{split}/labels"] = np.arange(100) % labels
        file.attrs.update(attributes)


def load_silos(tmp_path, partition=None, **fields):
    return loaded(2, partition, data=str(tmp_path / "silo_{client}.h5"), **fields)


def test_every_silo_has_its_own_imbalanced_version(tmp_path):
    for client in range(2):
        silo(tmp_path / f"silo_{client}.h5", {"num_classes": 10}, labels=10 - 2 * client)
    task = load_silos(tmp_path, removed_share=0.8)
    labels = [task.batch(client, torch.arange(task.num_samples(client)))[1] for client in range(2)]
    assert [torch.bincount(own).tolist() for own in labels] == [[10, 50], [10, 36]]  # 2 of each class below 5
    task.write_split(tmp_path)
    assert not (tmp_path / "partition.h5").exists()
    done = train(2, tmp_path, "--task", "auc", "--data", tmp_path / "silo_{client}.h5", "--rounds", 2)
    assert done.returncode == 0 and "auc" in done.stdout, done.stderr


def test_the_middle_one_of_an_odd_number_of_classes_is_positive(tmp_path):
    for client in range(2):
        silo(tmp_path / f"silo_{client}.h5", {"num_classes": 5}, labels=5)
    task = load_silos(tmp_path, removed_share=0.5)
    assert torch.bincount(task.batch(0, torch.arange(task.num_samples(0)))[1]).tolist() == [20, 60]  # of 40 and 60


def test_silos_that_do_not_fit_are_one_line(tmp_path):
    silo(tmp_path / "silo_0.h5", {"num_classes": 10})
    silo(tmp_path / "silo_1.h5")
    with pytest.raises(UserError, match="silo_1.h5: lacks the attribute num_classes, which decides which"):
        load_silos(tmp_path)
    silo(tmp_path / "silo_1.h5", {"num_classes": 12})
    with pytest.raises(UserError, match="client 1 has 12 original classes; client 0 has 10 original classes"):
        load_silos(tmp_path)
    silo(tmp_path / "silo_1.h5", {"num_classes": 40})
    with pytest.raises(
        UserError, match="silo_1: no training sample remains after removing a share of 0.99 of every class"
    ):
        load_silos(tmp_path, removed_share=0.99)
    with pytest.raises(UserError, match="partition iid: silo files .* are split already"):
        load_silos(tmp_path, IID())


# The task.


def test_p_is_of_all_clients_or_of_each():
    task = loaded(partition=Even())
    labels = [task.batch(c, torch.arange(task.num_samples(c)))[1].double() for c in range(4)]
    assert {task.batch(c, torch.tensor([0]))[2] for c in range(4)} == {torch.cat(labels).mean().item()}
    local = loaded(partition=Even(), p="local")
    for c in range(4):
        assert local.batch(c, torch.tensor([0]))[2] == labels[c].mean().item()
    with pytest.raises(UserError, match="only positive samples"):
        loaded(num_clients=1, removed_share=0.999)


def test_the_papers_imbalance_is_made_of_named_data_only(tmp_path):
    labels = np.arange(600) % 4
    with h5py.File(tmp_path / "own.h5", "w") as file:
        for split in ("train", "test"):
            file[f"{split}/images"] = np.random.default_rng(0).normal(size=(len(labels), 5))
            file[f"{split}/labels"] = labels
    own = str(tmp_path / "own.h5")
    counts = {}
    for name, fields in (("own", {"data": own}), ("own, 0.8", {"data": own, "removed_share": 0.8}), ("digits", {})):
        task = loaded(num_clients=1, partition=Stride(), **fields)
        counts[name] = task.num_samples(0)
        assert ("80 % of every negative class" in task.reading) == (name != "own")
    assert counts["own"] == 600 and counts["own, 0.8"] == 300 + 2 * 30
    assert counts["digits"] == loaded(num_clients=1, partition=Stride(), removed_share=0.8).num_samples(0)


@pytest.mark.parametrize("kind", [Autograd(), TwoPoint(directions=2000, smoothing=1e-4)])
def test_the_oracle_turns_w_round_and_only_w(kind):
    """The gradient row against PyTorch's own, its last number negative and scaled."""
    task = loaded(ascent_scale=0.5)
    torch.manual_seed(0)
    flat = FlatModule(task.build_model(MLP, {"hidden": 2}).double())
    assert flat.names[-3:] == ["auc.a", "auc.b", "auc.w"] and flat.x[-3:].tolist() == [1, 0, 0]
    assert task.ascent(flat) == slice(flat.dim - 1, flat.dim)
    objective = LocalObjective(
        flat, task, lambda number: torch.arange(50), ascent=task.ascent(flat), ascent_scale=task.ascent_scale
    )
    oracle = kind.make(Client(0, buffers=flat.buffers), objective, kind.workspace(flat))
    found = oracle.gradient(flat.x.clone(), oracle.draw())
    flat.point_at(flat.x)
    plain = torch.autograd.grad(task.loss(flat.module, task.batch(0, torch.arange(50))), flat.parameters)
    expected = flat.flatten(plain)
    expected[-1] *= -0.5
    if isinstance(kind, Autograd):
        torch.testing.assert_close(found, expected)
    else:
        assert torch.nn.functional.cosine_similarity(found, expected, dim=0) > 0.9
        assert found[-1].sign() == expected[-1].sign()


def test_the_ascent_scale_multiplies_the_gradient_of_w():
    found = []
    for scale in (1, 3):
        words = f"--task auc --task.ascent_scale {scale} --clients 2 --threads 1 --algorithm local_sgda"
        job = prepare(read_command_line(words.split()), SoloLink())
        oracle = job.federation.clients[1].oracle
        found.append(oracle.gradient(job.flat.x, oracle.draw()).clone())
    w = job.task.ascent(job.flat)
    assert found[0][w].abs() > 0
    found[0][w] *= 3
    torch.testing.assert_close(found[1], found[0])


def test_the_network_must_have_one_output():
    task = loaded()
    module = task.build_model(
        lambda shape, num_classes: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3)), {}
    )
    with pytest.raises(UserError, match="does not work"):
        task.try_out(module.double(), 0)


@pytest.mark.rarely
def test_training_reports_the_auc_of_the_whole_test_set(tmp_path):
    """FMGDA and, without new code, FAFED on the AUC task; the metric against scikit-learn on the saved model."""
    for algorithm in ("fmgda", "fafed"):
        settings_ = ["--task", "auc", "--algorithm", algorithm, "--clients", 4, "--model", "mlp", "--model.hidden", 8]
        options = ["--rounds", 30, "--local-steps", 5, "--eval-every", 30, "--name", algorithm]
        done = train(2, tmp_path, *settings_, *options)
        assert done.returncode == 0, done.stderr
        folder = tmp_path / algorithm
        last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
        reported = last["auc"]
        state = load_file(folder / "model.safetensors")
        source = DigitsSource()
        images = source.read("test", np.arange(len(source.labels["test"]))).reshape(-1, 64) / 255
        x = torch.tensor((images - source.mean[0]) / source.std[0], dtype=torch.float32)
        net = torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        net.load_state_dict({k.replace("net.1", "0").replace("net.3", "2"): v for k, v in state.items() if "net" in k})
        with torch.no_grad():
            scores = net(x).squeeze(1).numpy()
        assert reported == pytest.approx(roc_auc_score(source.labels["test"] >= 5, scores), abs=1e-4)
        assert reported > 0.85
        with h5py.File(folder / "partition.h5") as file:
            rows = [file[f"client_{client}"][:] for client in range(4)]
        p = np.mean(source.labels["train"][np.concatenate(rows)] >= 5)
        a, b, w = (state[f"auc.{name}"].item() for name in "abw")
        losses = []
        for of_client in rows:
            images = torch.from_numpy(source.read("train", of_client).reshape(-1, 64) / 255)
            with torch.no_grad():
                h = torch.sigmoid(net(((images - source.mean[0]) / source.std[0]).float())).squeeze(1).numpy()
            is_positive = source.labels["train"][of_client] >= 5
            plus, minus = np.where(is_positive, h, 0), np.where(is_positive, 0, h)
            squares = (1 - p) * (h - a) ** 2 * is_positive + p * (h - b) ** 2 * ~is_positive
            losses.append(np.mean(squares + 2 * (1 + w) * (p * minus - (1 - p) * plus)) - p * (1 - p) * w**2)
        assert last["train_loss"] == pytest.approx(np.mean(losses), rel=1e-4)


def test_a_short_run_that_is_evaluated_on_samples_has_its_curve_too(tmp_path):
    words = "--task auc --clients 2 --rounds 2 --threads 1 --evaluate-samples 50 --name it"
    folder = train_here(read_command_line([*words.split(), "--out", str(tmp_path)]), SoloLink()).folder
    lines = (folder / "roc.csv").read_text().splitlines()
    assert lines[:2] == ["false positives,true positives", "0,0"] and lines[-1] == "1,1" and len(lines) > 5


def test_the_algorithms_take_their_settings():
    for wrong in ({"dual_step_size": 0}, {"dual_fresh_weight": 2.0}, {"step_size": -1.0}):
        with pytest.raises(UserError, match="algorithm"):
            FMGDA(**wrong)
    with pytest.raises(UserError, match="removed_share"):
        DeepAUC(removed_share=1.0)
    assert FAFED().exchanged == ("x", "m", "v")


def test_a_test_set_of_one_kind_is_refused_before_training(tmp_path):
    with h5py.File(tmp_path / "one.h5", "w") as file:
        for split, labels in (("train", np.arange(60) % 4), ("test", np.full(20, 3))):
            file[f"{split}/images"] = np.random.default_rng(0).normal(size=(len(labels), 5))
            file[f"{split}/labels"] = labels
    with pytest.raises(UserError, match="auc needs both kinds of samples, and 20 of 20 are positive"):
        loaded(data=str(tmp_path / "one.h5"), removed_share=0.0)
