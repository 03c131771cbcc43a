"""What users read of a run, compared with an independent computation from the saved model and the data."""

import dataclasses
import json
import math
import re
import time

import h5py
import numpy as np
import pytest
import torch
from helpers import train
from safetensors.torch import load_file
from slow import STEP_SECONDS
from torch.nn import functional

from fedmpi.comm.solo import SoloLink
from fedmpi.data.holdout import hold_out
from fedmpi.data.source import DigitsSource
from fedmpi.ground.streams import FIRST, generator
from fedmpi.models.lstm import LSTM
from fedmpi.models.mlp import MLP
from fedmpi.training.build import prepare
from fedmpi.training.config import read_command_line
from fedmpi.training.evaluation import Evaluation
from fedmpi.training.loop import train as train_here
from fedmpi.training.result import ResultRule

ROUNDS, STEPS, STEP_SIZE, BATCH = 6, 3, 0.1, 20
PAUSE = 4 * STEP_SECONDS


def plainly_averaged(job, rounds, by_samples):
    """(x, the mean loss of each round's steps) of FedAvg by plain PyTorch, given who took part.

    It trains on the batches that the samplers name.
    """
    names = job.flat.names
    x = {name: value.clone() for name, value in zip(names, job.flat.views(job.flat.x))}
    module, draws, means = MLP((1, 8, 8), 10), dict.fromkeys(range(4), 0), []
    for participants in rounds:
        losses, weights = [], []
        total, sums = 0.0, {name: torch.zeros_like(value) for name, value in x.items()}
        for client in participants:
            module.load_state_dict(x)
            sampler = job.task.sampler(client, BATCH, BATCH, 0, torch.device("cpu"))
            for _ in range(STEPS):
                inputs, labels = job.task.batch(client, sampler(draws[client]))
                draws[client] += 1
                loss = functional.cross_entropy(module(inputs), labels)
                losses.append(loss.item())
                for parameter, slope in zip(module.parameters(), torch.autograd.grad(loss, list(module.parameters()))):
                    parameter.data -= STEP_SIZE * slope
            weight = job.task.num_samples(client) if by_samples else 1
            total += weight
            weights += [weight] * STEPS
            for name, value in module.state_dict().items():
                sums[name] += weight * value
        x = {name: value / total for name, value in sums.items()}
        means.append(np.average(losses, weights=weights))
    return x, means


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_participants_and_weights_are_those_asked_for(weighting):
    words = f"--algorithm fedavg --algorithm.step_size {STEP_SIZE} --clients 4 --batch-size {BATCH} --threads 1 "
    words += f"--local-steps {STEPS} --participation 0.5 --weighting {weighting} --partition uneven"
    job = prepare(read_command_line(words.split()), SoloLink())
    sizes = [job.task.num_samples(client) for client in range(4)]
    assert max(sizes) > 1.5 * min(sizes), "parts of different sizes, so that weights show"
    job.federation.start()
    rounds, losses = [], []
    for _ in range(ROUNDS):
        losses.append(job.federation.run_round())
        rounds.append(sorted(job.federation.server.round.participants))
    assert all(len(set(participants)) == 2 for participants in rounds)
    assert len({tuple(participants) for participants in rounds}) > 1 and set(np.concatenate(rounds)) == set(range(4))
    found = dict(zip(job.flat.names, job.flat.views(job.federation.server.x)))
    x, expected_losses = plainly_averaged(job, rounds, weighting == "samples")
    assert losses == pytest.approx(expected_losses, rel=1e-4)
    for name, value in x.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


def test_the_seed_decides_all_that_is_drawn():
    def drawn(seed):
        words = f"--seed {seed} --clients 6 --participation 0.5 --partition dirichlet --threads 1"
        job = prepare(read_command_line(words.split()), SoloLink())
        plan, oracle = job.federation.plan, job.federation.clients[0].oracle
        rounds = [plan.round(number) for number in range(8)]
        of_all = [dataclasses.replace(one, participants=tuple(range(6))) for one in rounds]
        return {
            "model": job.flat.x.clone(),
            "data of a client": job.task.batch(0, torch.arange(20))[0],
            "minibatch": oracle._objective.sampler(0),
            "first minibatch": oracle._objective.sampler(FIRST),
            "dropout": torch.tensor(oracle.draw().noise),
            "participants": torch.tensor([one.participants for one in rounds]),
            "the one that works alone": torch.tensor([plan.draw_one(one) for one in of_all]),
            "the round of a uniform result": torch.tensor(ResultRule("uniform", 1000, seed, job.task.goal)._drawn),
        }

    first, second, again = drawn(0), drawn(1), drawn(0)
    assert [name for name in first if torch.equal(first[name], second[name])] == []
    assert [name for name in first if not torch.equal(first[name], again[name])] == []


def test_rounds_and_steps_are_passes_over_the_data():
    words = "--clients 3 --partition uneven --batch-size 30 --epochs 8 --local-epochs 1.7 --threads 1"
    job = prepare(read_command_line(words.split()), SoloLink())
    batches = [math.ceil(job.task.num_samples(client) / 30) for client in range(3)]
    steps = [1.7 * number for number in batches]
    assert max(of_client % 1 for of_client in steps) > 0.5, "rounding shows"
    assert [job.federation.plan.steps_of(client) for client in range(3)] == list(map(round, steps))
    rounds = 8 * max(batches) / round(max(steps))
    assert rounds < job.num_rounds < rounds + 1


def test_a_pass_over_dealt_data_is_one_of_all_participants():
    words = "--clients 4 --participation 0.5 --partition iid --partition.redeal true --batch-size 50 --threads 1"
    assert prepare(read_command_line(words.split()), SoloLink()).num_batches == 2 * math.ceil(1438 / 2 / 50)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(the records of a run, what it printed, its folder): 3 clients on 2 ranks, two of them in a round."""
    out = tmp_path_factory.mktemp("accounts")
    ended = train(
        2, out, "--algorithm", "fedavg", "--clients", 3, "--participation", 0.7, "--rounds", 5, "--local-steps", 4,
        "--eval-every", 2, "--evaluate", "full", "--partition", "dirichlet", "--holdout", 0.2, "--name", "it",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    lines = (out / "it" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], ended.stdout, out / "it"


def test_metrics_are_those_of_the_saved_model(run):
    records, output, folder = run
    module, source = MLP((1, 8, 8), 10), DigitsSource()
    module.load_state_dict(load_file(folder / "model.safetensors"))

    def scores(split, rows):
        images = torch.from_numpy(source.read(split, rows)).float()[:, None] / 255
        labels = torch.from_numpy(source.labels[split][rows])
        with torch.no_grad():
            return module((images - source.mean[0]) / source.std[0]), labels

    with h5py.File(folder / "partition.h5") as file:
        parts = [file[f"client_{client}"][:] for client in range(3)]
    assert sorted(np.concatenate(parts)) == list(range(len(source.labels["train"])))
    outputs, labels = scores("test", np.arange(len(source.labels["test"])))
    divided = [hold_out(len(part), 0.2, 0, client) for client, part in enumerate(parts)]
    assert [len(held) for _, held in divided] == [len(part) // 5 for part in parts]
    losses = [functional.cross_entropy(*scores("train", part[used])).item() for part, (used, _) in zip(parts, divided)]
    held = [scores("train", part[held]) for part, (_, held) in zip(parts, divided)]
    of_clients = [(outputs.argmax(1) == labels).double().mean().item() for outputs, labels in held]
    expected = {
        "train_loss": np.mean(losses),
        "test_loss": functional.cross_entropy(outputs, labels).item(),
        "accuracy": (outputs.argmax(1) == labels).float().mean().item(),
        "holdout_loss": np.mean([functional.cross_entropy(*of_client).item() for of_client in held]),
        "holdout_accuracy": np.mean(of_clients),
    }
    assert records[-1]["clients"]["train_loss"] == pytest.approx(losses, rel=1e-5)
    assert records[-1]["clients"]["holdout_accuracy"] == pytest.approx(of_clients, rel=1e-5)
    for name, value in expected.items():
        assert records[-1][name] == pytest.approx(value, rel=1e-5), name
        printed = re.search(rf"^  {name.replace('_', ' ')} +([0-9.]+)", output, re.MULTILINE)[1]
        assert float(printed) == pytest.approx(value, abs=6e-5), name
        assert f"{name} {records[1][name]:.4f}" in output
    assert ["accuracy" in record for record in records] == [False, True, False, True, True]


def test_the_model_of_a_round_drawn_beforehand_is_the_one_that_is_saved(tmp_path):
    words = "--algorithm fedavg --clients 2 --local-steps 2 --rounds 6 --eval-every 1 --result uniform --seed 5"
    config = read_command_line([*words.split(), "--threads", "1", "--out", str(tmp_path)])
    ended = train_here(config, SoloLink())
    number = int(generator(5, "output").integers(1, 7))
    assert number < 6
    module, source = MLP((1, 8, 8), 10), DigitsSource()
    module.load_state_dict(load_file(ended.folder / "model.safetensors"))
    images = torch.from_numpy(source.read("test", np.arange(len(source.labels["test"])))).float()[:, None] / 255
    with torch.no_grad():
        outputs = module((images - source.mean[0]) / source.std[0])
    loss = functional.cross_entropy(outputs, torch.from_numpy(source.labels["test"])).item()
    assert ended.records[number - 1]["test_loss"] == pytest.approx(loss, rel=1e-5)
    assert ended.metrics["test_loss"] == pytest.approx(loss, rel=1e-5) != ended.records[-1]["test_loss"]


def test_amounts_are_what_the_settings_say(run):
    records, output, _ = run
    dim, start = 64 * 200 + 200 + 200 * 10 + 10, records[0]
    for number, record in enumerate(records, 1):
        assert (record["round"], record["iteration"]) == (number, 4 * number)
        assert record["bytes"] == 4 * dim * number  # x, in float32
        assert record["gradients"] == 2 * 4 * number  # two participants, one gradient a step
        parts = [record[f"{part}_seconds"] for part in ("local", "communication", "evaluation")]
        assert min(parts) >= 0 and parts[0] > 0 and sum(parts) <= record["seconds"] * 1.001
    for before, after in zip(records, records[1:]):
        assert after["seconds"] > before["seconds"] and after["local_seconds"] > before["local_seconds"]
        has_evaluated = "accuracy" in after
        assert (after["evaluation_seconds"] > before["evaluation_seconds"]) == has_evaluated
    assert start["evaluation_seconds"] == 0
    assert re.search(r"^  sent per client +293\.2 KiB in 5 Allreduces$", output, re.MULTILINE), output
    assert re.search(r"^  rounds +5 \(20 local steps, 40 gradients in total\)$", output, re.MULTILINE), output


@pytest.mark.parametrize("task", ["classification", "auc"])
def test_an_evaluation_in_small_batches_gives_the_same(monkeypatch, task):
    job = prepare(read_command_line(f"--task {task} --clients 3 --holdout 0.2 --threads 1".split()), SoloLink())
    found = []
    for size in (1000, 50):
        monkeypatch.setattr("fedmpi.data.samples.EVALUATION_BATCH", size)
        found.append(Evaluation(job)(job.flat.x, job.flat.buffers, 0))
    assert len(job.task._test_parts[0][-1]) % 50, "a smaller batch at the end"
    assert dict(found[1]) == pytest.approx(dict(found[0]), rel=1e-5)
    assert found[1].clients["train_loss"] == pytest.approx(found[0].clients["train_loss"], rel=1e-5)


def test_perplexity_is_that_of_the_saved_model(tmp_path):
    """Two ranks; every text is read in one go by an LSTM, from an empty state."""
    draw, texts = np.random.default_rng(0), {}
    with h5py.File(tmp_path / "text.h5", "w") as file:
        for split, number in (("train", 330), ("test", 500)):
            texts[split] = [f"w{word}" for word in draw.integers(0, 20 if split == "train" else 22, number)]
            file[f"{split}/text"] = np.frombuffer(" ".join(texts[split]).encode(), np.uint8)
    words = (
        "--task",
        "language",
        "--data",
        tmp_path / "text.h5",
        "--model",
        "lstm",
        "--model.hidden",
        8,
        "--clients",
        3,
    )
    options = ("--rounds", 3, "--local-steps", 3, "--batch-size", 4, "--holdout", 0.2, "--name", "it")
    ended = train(2, tmp_path, *words, *options)
    assert ended.returncode == 0, ended.stderr
    dictionary = {word: number for number, word in enumerate(dict.fromkeys([*texts["train"], "<unk>"]))}
    module = LSTM(len(dictionary), hidden=8)
    module.load_state_dict(load_file(tmp_path / "it" / "model.safetensors"))
    module.eval()

    def losses(text):
        """Of each word but the first."""
        numbers = torch.tensor([dictionary.get(word, dictionary["<unk>"]) for word in text])
        with torch.no_grad():
            outputs, _ = module(numbers[:-1, None], None)
        return functional.cross_entropy(outputs[:, 0], numbers[1:], reduction="none")

    clients = [texts["train"][at : at + 110] for at in (0, 110, 220)]
    held, test = torch.cat([losses(part[88:]) for part in clients]), texts["test"]
    tests = torch.cat([losses(test[at : at + 25]) for at in range(0, 500, 25)])  # in 20 parts, whatever the ranks
    expected = {
        "train_loss": np.mean([losses(part[:88]).mean().item() for part in clients]),
        "test_loss": tests.mean().item(), "perplexity": tests.mean().exp().item(),
        "holdout_loss": held.mean().item(), "holdout_perplexity": held.mean().exp().item(),
    }  # fmt: skip
    record = json.loads((tmp_path / "it" / "metrics.jsonl").read_text().splitlines()[-1])
    for name, value in expected.items():
        assert record[name] == pytest.approx(value, rel=1e-5), name


class SlowLink(SoloLink):
    """Sums take long, too."""

    def average(self, *arguments):
        time.sleep(PAUSE)
        super().average(*arguments)


def test_times_contain_what_each_part_took(tmp_path, monkeypatch, capsys):
    """Steps, sums and evaluations of known length: no part is shorter, and together they fit into the whole."""

    def slowly(evaluation, *arguments, usual=Evaluation.__call__, **options):
        time.sleep(PAUSE)
        return usual(evaluation, *arguments, **options)

    monkeypatch.setenv("SLOW_WHILE", str(tmp_path))
    monkeypatch.setattr(Evaluation, "__call__", slowly)
    words = f"--algorithm fedavg --model slow.Slow --clients 2 --local-steps 2 --rounds 3 --threads 1 --out {tmp_path}"
    began = time.perf_counter()
    config = read_command_line([*words.split(), "--eval-every", "1"])
    records = train_here(config, SlowLink(), began=began).records
    took = time.perf_counter() - began
    parts = ("local_seconds", "communication_seconds", "evaluation_seconds")
    for number, record in enumerate(records, 1):
        assert record["local_seconds"] >= number * 2 * 2 * STEP_SECONDS
        assert min(record["communication_seconds"], record["evaluation_seconds"]) >= number * PAUSE
        assert sum(record[part] for part in parts) <= record["seconds"] <= took
    output = capsys.readouterr().out
    start_up = float(re.search(r"^  start-up +([0-9.]+) s before the first round$", output, re.MULTILINE)[1])
    assert 0 < start_up <= took - records[-1]["seconds"] + 0.01
    for name, part in zip(("local steps", "communication", "evaluation"), parts):
        seconds = records[-1][part]
        words = f"{seconds:.2f} s ({100 * seconds / records[-1]['seconds']:.0f} %)"
        assert re.search(rf"^  {name} +{re.escape(words)}", output, re.MULTILINE), output
    assert re.search(rf"^  total +{records[-1]['seconds']:.2f} s$", output, re.MULTILINE), output
