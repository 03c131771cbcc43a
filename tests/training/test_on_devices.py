"""What holds on the CPU holds on a GPU: the same tests with the parameter `device`."""

import numpy as np
import pytest
import torch
from helpers import start, train

import fedmpi.algorithms
import fedmpi.oracles.compiled
from fedmpi.algorithms import Algorithm
from fedmpi.comm.solo import SoloLink
from fedmpi.federation.losses import Losses
from fedmpi.ground.errors import UserError
from fedmpi.ground.registry import known
from fedmpi.runs.model_files import read_state
from fedmpi.training.build import prepare
from fedmpi.training.config import read_command_line

COMMON = "--clients 3 --participation 0.7 --local_steps 2 --batch_size 16 --threads 1"
DRAWING = {"fedzo", "fafedzo"}  # directions, on the device that has the vectors: a GPU's generator is another
MINMAX = {"local_sgda", "momentum_local_sgda", "fmgda", "coda", "codasca"}
TASKS = [
    "--task auc --algorithm coda", "--task quadratic", "--task saddle_quadratic --algorithm fmgda",
    "--aggregation reproducible", "--clip_norm 0.1 --weight_decay 0.01",
    "--private *.bias --model mlp",
]  # fmt: skip


def needs_gpu(test):
    """A test that is skipped, visibly, where there is no GPU."""
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")(test))


def run(words, device="cpu", rounds=2):
    """The federation of some settings after some rounds, and its losses."""
    settings = [*COMMON.split(), *words.split(), "--device", device]
    federation = prepare(read_command_line(settings), SoloLink()).federation
    federation.start()
    return federation, [federation.run_round() for _ in range(rounds)]


def assert_close(one, other, tolerance):
    """Two federations have the same state."""
    expected = other.state()
    for name, value in one.state().items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(value.cpu(), expected[name].cpu(), rtol=tolerance, atol=tolerance, msg=name)
        elif "seconds" not in name:
            assert value == expected[name], name


@pytest.mark.parametrize("name", known(fedmpi.algorithms, Algorithm))
def test_every_algorithm_in_float64(device, name):
    words = f"--algorithm {name} --dtype float64 {'--task auc' if name in MINMAX else ''}"
    found, losses = run(words, device)
    expected, expected_losses = run(words, device if name in DRAWING else "cpu")
    assert found.server.x.device.type == device
    assert_close(found, expected, 1e-10)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-10)


@pytest.mark.parametrize("words", TASKS)
def test_settings_in_float32(device, words):
    assert_close(run(words, device)[0], run(words)[0], 1e-4)


@pytest.mark.parametrize(
    "words", ["--model odd_modules.Dropping", "--model odd_modules.Lazy --batch_size 4", "--oracle two_point"]
)
def test_random_numbers_of_a_device_are_the_same_in_every_run(device, words):
    """A GPU draws other dropout masks, directions and initial values of lazy layers than a CPU."""
    assert_close(run(words, device)[0], run(words, device)[0], 1e-4)


FASTER = [
    "", "--algorithm scaffold", "--task fedmpi.cli.bench.workloads.RandomImages --model fashion_cnn",
    "--model odd_modules.Dropping",
    "--model odd_modules.Lazy --batch_size 4", "--clip_norm 0.1 --weight_decay 0.01",
]  # fmt: skip


@needs_gpu
@pytest.mark.parametrize("words", FASTER)
def test_gradients_from_cuda_graphs_are_those_of_plain_passes(monkeypatch, words):
    """With dropout, batch norm, several clients on one model, and last minibatches of another size."""
    monkeypatch.setattr(fedmpi.oracles.compiled, "_modes", set())
    found, losses = run(f"{words} --compile cuda_graph --deterministic true", "cuda")
    expected, expected_losses = run(f"{words} --deterministic true", "cuda")
    assert_close(found, expected, 1e-5)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("words", ["--model mlp", "--model odd_modules.Wide", "--task quadratic"])
def test_compiled_gradients(monkeypatch, device, mode, words):
    """In all rows of a rank, wherever they begin: 64 x 4099 weights go around the flat vector's own gradients."""
    monkeypatch.setattr(fedmpi.oracles.compiled, "_modes", set())
    found, losses = run(f"{words} --compile {mode}", device)
    expected, expected_losses = run(words, device)
    assert_close(found, expected, 1e-3)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)


@needs_gpu
def test_graphs_of_ours_and_of_torch_are_not_in_one_process(monkeypatch):
    monkeypatch.setattr(fedmpi.oracles.compiled, "_modes", {"default"})
    with pytest.raises(UserError, match="cuda_graph and default do not work in one process: start another"):
        run("--compile cuda_graph", "cuda")


def test_cuda_graphs_need_a_gpu():
    with pytest.raises(UserError, match="compile = cuda_graph: this rank computes on cpu: leave it out, or use a GPU"):
        run("--compile cuda_graph")


@pytest.mark.parametrize("name", ["fafed", "scaffold"])
def test_a_state_goes_from_the_cpu_to_a_device_and_back(device, name):
    words = f"--algorithm {name} --dtype float64"
    whole, _ = run(words, rounds=3)
    for first, second in (("cpu", device), (device, "cpu")):
        before, _ = run(words, first, rounds=2)
        after = prepare(read_command_line([*COMMON.split(), *words.split(), "--device", second]), SoloLink()).federation
        after.restore(
            {name: value.cpu() if torch.is_tensor(value) else value for name, value in before.state().items()}
        )
        after.run_round()
        assert_close(after, whole, 1e-10)


@needs_gpu
def test_transports():
    done = start(2, "-m", "transports", "real", "cuda")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "done"


def test_ranks(device, tmp_path):
    """Their vectors are summed where they are, by a transport that was chosen by itself."""
    found = {}
    for kind in dict.fromkeys(["cpu", device]):
        ended = train(2, tmp_path / kind, "--clients", 4, "--rounds", 3, "--dtype", "float64", "--device", kind)
        assert ended.returncode == 0, ended.stderr
        assert "transport" not in ended.stderr  # none had to be left out
        (folder,) = (tmp_path / kind).iterdir()
        found[kind] = read_state(folder)
    for name, value in found["cpu"].items():
        torch.testing.assert_close(found[device][name], value, rtol=1e-10, atol=1e-10, msg=name)
    assert ", shared memory" in ended.stdout  # of the host, if a GPU has the vectors


@needs_gpu
@pytest.mark.parametrize("words", ["", "--algorithm scaffold", "--model odd_modules.Dropping"])
def test_local_steps_do_not_wait_for_the_gpu(monkeypatch, words):
    federation, _ = run(words, "cuda")
    collect = Losses.collect

    def collect_and_wait(losses):
        torch.cuda.set_sync_debug_mode("default")
        collect(losses)

    monkeypatch.setattr(Losses, "collect", collect_and_wait)
    torch.cuda.set_sync_debug_mode("error")
    try:
        federation.run_round()
    finally:
        torch.cuda.set_sync_debug_mode("default")
