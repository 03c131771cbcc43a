"""Every legal module trains as plain PyTorch trains it, or is refused in one line before work starts."""

import json
import re

import numpy as np
import odd_modules
import pytest
import safetensors.torch
import torch
from helpers import train
from torch.nn import functional

from fedmpi.comm.solo import SoloLink
from fedmpi.data.source import DigitsSource
from fedmpi.ground.errors import UserError
from fedmpi.ground.generators import seed_noise
from fedmpi.ground.streams import derive
from fedmpi.training.build import prepare
from fedmpi.training.config import read_command_line
from fedmpi.training.evaluation import Evaluation

STEP, ROUNDS, LOCAL_STEPS = 0.1, 2, 3
SETTINGS = f"--algorithm fedavg --algorithm.step_size {STEP} --clients 1 --batch-size 20 --threads 1".split()


def prepared(module, *settings):
    words = ["--model", f"odd_modules.{module.__name__}", "--local-steps", str(LOCAL_STEPS), *SETTINGS, *settings]
    return prepare(read_command_line(words), SoloLink())


def plainly_trained(job):
    """The state dict that plain PyTorch reaches on the same batches, from a new module with the same values."""
    module = type(job.flat.module)()
    if any(isinstance(p, torch.nn.UninitializedParameter) for p in module.parameters()):
        module(job.task.batch(0, torch.zeros(2, dtype=torch.int64))[0])
    module.float().load_state_dict(job.flat.named_values(job.flat.x, job.flat.buffers))
    module.train()
    sampler = job.task.sampler(0, 20, 20, 0, torch.device("cpu"))
    for number in range(ROUNDS * LOCAL_STEPS):
        inputs, labels = job.task.batch(0, sampler(number))
        seed_noise(derive(0, "noise", 0, number), torch.device("cpu"))
        for parameter in module.parameters():
            parameter.grad = None
        functional.cross_entropy(module(inputs), labels).backward()
        for parameter in module.parameters():
            if parameter.grad is not None and parameter.requires_grad:
                parameter.data = parameter.data - STEP * parameter.grad.to_dense()
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("module", odd_modules.TRAIN, ids=lambda cls: cls.__name__)
def test_it_trains_as_plain_pytorch_does(module):
    job = prepared(module)
    expected = plainly_trained(job)
    job.federation.start()
    for _ in range(ROUNDS):
        job.federation.run_round()
    job.flat.point_counters_at(job.federation.clients[0].counters)
    found = job.flat.named_values(job.federation.server.x, job.federation.store.buffers)
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: name + text)
    assert any(not torch.equal(value, found[name]) for name, value in job.flat.named_values(job.flat.x, None).items())
    assert np.isfinite(Evaluation(job)(job.federation.server.x, job.federation.store.buffers, ROUNDS)["train_loss"])


@pytest.mark.parametrize("module", [odd_modules.Dropping, odd_modules.Attention, odd_modules.Lazy])
def test_it_is_evaluated_in_evaluation_mode(module):
    job = prepared(module, "--evaluate", "full")
    found = Evaluation(job)(job.flat.x, job.flat.buffers, 0)["train_loss"]
    inputs, labels = job.task.batch(0, torch.arange(job.task.num_samples(0)))
    with torch.no_grad():
        expected = functional.cross_entropy(job.flat.module.eval()(inputs), labels).item()
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("module", odd_modules.REFUSED, ids=lambda cls: cls.__name__)
def test_it_is_refused_in_one_line(module):
    with pytest.raises(UserError) as error:
        prepared(module)
    text = str(error.value)
    assert odd_modules.REFUSED[module] in text
    assert f"model {module.__name__}" in text
    assert "\n" not in text and len(text) < 400


@pytest.mark.parametrize("module", odd_modules.LATER, ids=lambda cls: cls.__name__)
def test_a_model_that_changes_its_parameters_during_the_run_ends_it_at_the_next_exchange(module):
    job = prepared(module)
    with pytest.raises(UserError, match=f"^model {module.__name__}: a pass {odd_modules.LATER[module]} "):
        for _ in range(ROUNDS):
            job.federation.run_round()


def test_an_unused_parameter_is_named_once(capfd):
    prepared(odd_modules.UnusedHead)
    assert capfd.readouterr().err == (
        "fedmpi: the loss does not use empty, aux.weight, aux.bias: the gradient there is 0\n"
    )


@pytest.mark.parametrize("module", [odd_modules.MovingBuffer, odd_modules.MovingData, odd_modules.UnusedHead])
def test_zeroth_order_needs_no_graph(module):
    settings = ["--oracle", "two_point", "--oracle.directions", "2", "--algorithm.step_size", "0.001"]
    job = prepared(module, *settings)
    before = job.flat.buffers.clone()
    job.federation.start()
    assert np.isfinite(job.federation.run_round())
    if module is odd_modules.MovingBuffer:
        assert not torch.equal(job.federation.store.buffers, before)
    assert np.isfinite(prepared(odd_modules.Detached, *settings).federation.run_round())


@pytest.mark.parametrize("words", ["--batch-size 1", "--first-batch-size 1"])
def test_a_minibatch_of_one_sample_is_tried_too(words):
    """Batch norm refuses it, be it every minibatch or the first one; one left at the end of a pass joins another."""
    words = f"--clients 1 --threads 1 {words} --model batchnorm.Net --algorithm fafed"
    with pytest.raises(UserError, match="^model Net: does not train: ValueError: Expected more than 1 value"):
        prepare(read_command_line(words.split()), SoloLink())


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("value", r"parameter 'last\.bias' is \[10\] torch\.float32 with hash \w+ on rank 0, \[10\] .* on rank 1"),
        ("frozen", r"parameter 'moment' is \[\] .* on rank 0, \[\] .* on rank 1"),
        ("buffer", r"buffer 'table' is \[2\] .* on rank 0, \[3\] .* on rank 1"),
    ],
)
def test_models_that_differ_between_ranks(tmp_path, kind, message):
    ended = train(2, tmp_path, "--model", "odd_modules.OfRank", "--model.kind", kind)
    assert ended.returncode == 2, ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert re.search(message, ended.stderr), ended.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("clients", [2, 4])
def test_the_last_gradient_of_a_round_has_its_client_named(tmp_path, clients):
    """FedAvg: the third of three steps; the loss of that step is finite, what it leads to is not."""
    words = ("--clients", clients, "--algorithm", "fedavg", "--local-steps", 3, "--rounds", 5, "--name", "it")
    ended = train(2, tmp_path, "--model", "odd_modules.LastGradient", *words)
    assert ended.returncode == 1
    client = {2: 1, 4: 2}[clients]
    assert f"in round 1: row x of client {client} on rank 1 has values that are not finite" in ended.stderr
    assert (tmp_path / "it" / "diverged.txt").is_file()


def test_what_is_saved_is_what_was_evaluated(tmp_path):
    ended = train(
        2, tmp_path, "--model", "odd_modules.Moving", "--clients", 3, "--rounds", 4, "--local-steps", 3, "--name", "it"
    )
    assert ended.returncode == 0, ended.stderr
    assert "fedmpi: the loss does not use unused.weight, unused.bias: the gradient there is 0\n" in ended.stderr
    saved = safetensors.torch.load_file(tmp_path / "it" / "model.safetensors")
    assert saved["ema"].abs().min() > 0
    assert saved["steps"] == 13  # the initial gradient, and 4 rounds of 3 steps
    assert saved["last.weight"].abs().max() > 0.19
    module = odd_modules.Moving()
    module.load_state_dict(saved)
    source = DigitsSource()
    images = torch.from_numpy(source.read("test", np.arange(len(source.labels["test"])))).float()[:, None]
    scores = module.eval()((images / 255 - source.mean[0]) / source.std[0])
    accuracy = (scores.argmax(1).numpy() == source.labels["test"]).mean()
    printed = json.loads((tmp_path / "it" / "metrics.jsonl").read_text().splitlines()[-1])["accuracy"]
    assert printed == pytest.approx(accuracy, abs=1e-9)
