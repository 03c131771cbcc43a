"""Importing fedmpi changes nothing in the process, and calling it leaves everything as it was."""

import os
import random
import signal
import sys

import numpy as np
import pytest
import torch
from helpers import ROOT, execute

import fedmpi
from fedmpi.training.cross_site import SENT

IMPORTS = """
import atexit, importlib, os, pkgutil, signal, sys, threading
import numpy, torch, matplotlib.pyplot, tqdm, mpi4py

def facts():
    backends = torch.backends
    return {
        "variables": dict(os.environ), "folder": os.getcwd(),
        "signals": [signal.getsignal(number) for number in sorted(signal.valid_signals())],
        "hooks": (sys.excepthook, threading.excepthook, sys.exit, os._exit, sys.stdout, sys.stderr),
        "torch": (torch.are_deterministic_algorithms_enabled(), torch.get_num_threads(), torch.get_default_dtype(),
                  torch.is_grad_enabled(), backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32,
                  torch.get_float32_matmul_precision(), torch.get_rng_state().tolist()),
        "numpy": (numpy.geterr(), str(numpy.random.get_state())),
    }

registered, register = [], atexit.register
atexit.register = lambda function, *a, **k: registered.append(function) or register(function, *a, **k)
removed = []
sys.addaudithook(lambda event, arguments: event == "os.remove" and removed.append(arguments[0]))
left = "/dev/shm/mpich_shm_of_a_killed_job"  # another job may remove it at any time
open(left, "w").close()
os.utime(left, (0, 0))
before = facts()
import fedmpi
for module in pkgutil.walk_packages(fedmpi.__path__, "fedmpi."):
    if module.name != "fedmpi.huggingface":  # it needs transformers
        importlib.import_module(module.name)
assert not removed, removed
assert facts() == before, [name for name, value in facts().items() if value != before[name]]
if os.path.exists(left):
    os.unlink(left)
assert not [f for f in registered if str(getattr(f, "__module__", "")).startswith("fedmpi")], registered
from mpi4py import rc
assert rc.initialize is None or rc.initialize
assert "mpi4py.MPI" not in sys.modules
print(len([name for name in sys.modules if name.startswith("fedmpi.")]))
"""


@pytest.mark.rarely("fedmpi")
def test_importing_every_module_changes_nothing():
    variables = {"PYTHONPATH": str(ROOT), "MPI4PY_RC_INITIALIZE": "", "MPLBACKEND": "agg"}
    ended = execute([sys.executable, "-c", IMPORTS], env=variables)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 200 and not ended.stderr


def switches():
    """What a call may change in this process."""
    backends = torch.backends
    precise = (backends.cuda.matmul, backends.mkldnn.matmul, backends.cudnn.conv, backends.cudnn.rnn)
    return {
        "torch's generator": torch.get_rng_state().tolist(),
        "numpy's generator": str(np.random.get_state()[1].tolist() + list(np.random.get_state()[2:])),
        "Python's generator": random.getstate(),
        "variables": {name: value for name, value in os.environ.items() if not name.startswith("TORCHINDUCTOR")},
        "signals": [signal.getsignal(number) for number in sorted(signal.valid_signals())],
        "hooks": (sys.excepthook, sys.exit, os._exit),
        "precision": [getattr(part, "fp32_precision", None) for part in precise],
        "cudnn": (backends.cudnn.benchmark, backends.cudnn.deterministic, backends.cudnn.enabled),
        "modes": (torch.is_grad_enabled(), torch.is_anomaly_enabled(), torch.is_inference_mode_enabled()),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads(), os.sched_getaffinity(0)),
        "defaults": (torch.get_default_dtype(), torch.get_default_device()),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "denormal": torch.tensor([1e-40]).mul(1).item(),
        "numpy's errors": np.geterr(),
        "folder": os.getcwd(),
    }  # fmt: skip


class Drawing(torch.nn.Module):
    """Draws from every generator when it is made and when it is called."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(64, 10)
        random.random(), np.random.rand()

    def forward(self, inputs):
        return self.linear(inputs.flatten(1)) + random.random() + np.random.rand() + torch.rand(1)


USUAL = {"algorithm": "fedavg", "clients": 2, "threads": 1, "local_steps": 2, "rounds": 2}


def fails():
    with pytest.raises(fedmpi.UserError):
        fedmpi.train(**USUAL, batch_size=0)


def ends_by_a_callback():
    with pytest.raises(ZeroDivisionError):
        fedmpi.train(**USUAL, on_round=lambda record: 1 / 0)


def join():
    model = torch.nn.Linear(2, 1)
    fed = fedmpi.join(model, "fafed", local_steps=2)
    for _ in range(5):
        fed.step(lambda: model(torch.ones(3, 2)).square().mean())
    fed.finish()


def average():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fed = fedmpi.average(model, optimizer, every=2)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.ones(3, 2)).square().mean().backward()
        optimizer.step()
        fed.step()
    fed.finish()


CALLS = {
    "train": lambda: fedmpi.train(**USUAL),
    "train, other arithmetic": lambda: fedmpi.train(**USUAL, deterministic=True, tf32=True),
    "train, a model that draws": lambda: fedmpi.train(**USUAL, model=Drawing),
    "train, directions": lambda: fedmpi.train(**USUAL | {"algorithm": "fafedzo"}, checkpoint_every=1),
    "train, wrong": fails,
    "train, an error": ends_by_a_callback,
    "simulate": lambda: fedmpi.simulate(fedmpi.algorithms.FedAvg(), lambda i, x, sample: x - i, x0=[4.0]),
    "load": lambda: fedmpi.load("runs/it"),
    "load_run": lambda: fedmpi.load_run("runs/it").records,
}


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """The current folder, with a run."""
    here = os.getcwd()
    os.chdir(tmp_path_factory.mktemp("quiet"))
    fedmpi.train(**USUAL, name="it")
    yield
    os.chdir(here)


@pytest.mark.rarely("fedmpi")
@pytest.mark.parametrize("precision", ["highest", "medium", "by fp32_precision"])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_leaves_everything_as_it_was(name, precision):
    with torch.random.fork_rng():
        if precision == "by fp32_precision":
            if not hasattr(torch.backends.cudnn, "conv"):
                pytest.skip("torch has no such names yet")
            torch.backends.cuda.matmul.fp32_precision = torch.backends.cudnn.conv.fp32_precision = "ieee"
        else:
            torch.set_float32_matmul_precision(precision)
        try:
            before = switches()
            CALLS[name]()
            after = switches()
        finally:
            torch.set_float32_matmul_precision("highest")
            torch.backends.cudnn.allow_tf32 = True
    assert not [what for what, value in before.items() if value != after[what]]


@pytest.mark.parametrize("loop", [join, average])
def test_an_own_loop_leaves_everything_as_it_was_when_it_ends(loop):
    with torch.random.fork_rng():
        torch.nn.Linear(2, 1)  # as the loop does
        drawn = torch.get_rng_state().tolist()
    with torch.random.fork_rng():
        before = switches() | {"torch's generator": drawn}
        loop()
        after = switches()
    assert not [what for what, value in before.items() if value != after[what]]


LOGGED = """
import logging, fedmpi
settings = dict(algorithm="fedavg", clients=2, threads=1, rounds=1, local_steps=1, result="best")
fedmpi.train(**settings)
fedmpi.train(**settings, verbose=True)
logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
fedmpi.train(**settings)
logging.getLogger("fedmpi.training").setLevel("ERROR")
fedmpi.train(**settings)
logging.getLogger("fedmpi.training").setLevel("WARNING")
fedmpi.train.main(["--result", "best", "--rounds", "1", "--clients", "2", "--local-steps", "1"])
"""


@pytest.mark.rarely("fedmpi")
def test_warnings_are_logged(tmp_path):
    """Where nothing is set up they are lines on standard error, as a program prints them."""
    ended = execute([sys.executable, "-c", LOGGED], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    plain, again, configured, printed = ended.stderr.splitlines()
    assert plain.startswith("fedmpi: the best model is chosen by accuracy on the test set, so")
    assert configured == plain.replace("fedmpi:", "WARNING fedmpi.training.loop:") and printed == again == plain
    assert ended.stdout.count("round 1/1: train_loss") == 2  # of the command, and with `verbose`


def test_a_call_prints_nothing_but_what_is_asked_for(capfd):
    settings = {**USUAL, "eval_every": 1, "holdout": 0.1, "baselines": "local", "cross_site": True}
    fedmpi.train(**settings, on_round=lambda record: print("mine", record["round"]))
    printed = capfd.readouterr()
    assert printed.out == "mine 1\nmine 2\n"
    assert SENT in printed.err
    run = fedmpi.train(**settings, verbose=True)
    printed = capfd.readouterr().out
    assert "round 2/2: train_loss" in printed and "  accuracy " in printed and str(run.baselines) in printed


@pytest.mark.parametrize("true", [True, np.True_, np.array(True), torch.tensor(True)])
def test_a_callback_ends_a_run_by_any_kind_of_true(true):
    assert len(fedmpi.train(**USUAL, on_round=lambda record: true).metrics) == 1


@pytest.mark.parametrize("other", [None, 1, 0.5, torch.tensor(0.5), np.False_, "yes"])
def test_a_callback_does_not_end_a_run_by_other_values(other):
    assert len(fedmpi.train(**USUAL, on_round=lambda record: other).metrics) == 2


def test_torchs_compiler_is_not_loaded_unless_it_is_asked_for():
    """It takes as long to import as the rest of torch."""
    code = (
        "import sys, fedmpi, torch, tempfile\n"
        "from fedmpi.models import cnn, mlp, resnet\n"
        "networks = cnn.FashionCNN, cnn.MnistCNN, cnn.CifarCNN, cnn.LambCNN, cnn.AttackedCNN, resnet.ResNet9, mlp.MLP\n"
        "for network in networks:\n"
        "    network((1, 32, 32), 10)\n"
        "fedmpi.train(algorithm='fafed', rounds=1, clients=2, threads=1, out=tempfile.mkdtemp())\n"
        "model = torch.nn.Linear(3, 2)\n"
        "fed = fedmpi.join(model, 'fafed', local_steps=1)\n"
        "fed.step(lambda: model(torch.ones(3)).sum())\n"
        "fed.finish()\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    ended = execute([sys.executable, "-c", code])
    assert ended.returncode == 0, ended.stderr
