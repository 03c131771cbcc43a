"""A rank looks at what its device computes once in an exchange, not in local steps: on a GPU each look waits for it.

On a CPU there is nothing to wait for; there, the looks are counted.
"""

import collections
import types

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fedmpi.algorithms
import fedmpi.federation.rounds
from fedmpi.algorithms import Algorithm
from fedmpi.comm.solo import SoloLink
from fedmpi.federation.losses import Losses
from fedmpi.federation.observer import Observer
from fedmpi.ground.errors import Diverged
from fedmpi.ground.registry import known
from fedmpi.training.build import prepare
from fedmpi.training.config import read_command_line

LOOKS = {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero", "aten::masked_select", "aten::equal"}
METHODS = ("tolist", "numpy", "cpu", "__array__")  # torch reads CPU memory in them without an operator
MINMAX = {"local_sgda", "momentum_local_sgda", "fmgda", "coda", "codasca"}


class Looks(TorchDispatchMode):
    """Counts the operations, within it, whose result Python needs."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.found = collections.Counter()
        for name in METHODS:
            monkeypatch.setattr(torch.Tensor, name, self._counted(name, getattr(torch.Tensor, name)))

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        name = function.name().partition(".")[0]
        self.found[name] += name in LOOKS
        return function(*args, **(kwargs or {}))

    def _counted(self, name, method):
        def call(tensor, *args, **options):
            self.found[name] += 1
            return method(tensor, *args, **options)

        return call


def looks_in_a_round(monkeypatch, name, clients, steps, *words):
    """name -> number of looks in the second round."""
    task = ["--task", "auc"] if name in MINMAX else []
    settings = ["--algorithm", name, "--clients", str(clients), "--local_steps", str(steps), "--batch_size", "8"]
    federation = prepare(read_command_line([*settings, *task, *words]), SoloLink()).federation
    federation.start()
    federation.run_round()
    with monkeypatch.context() as patch, Looks(patch) as looks:
        federation.run_round()
    return +looks.found


@pytest.mark.rarely
@pytest.mark.parametrize("name", known(fedmpi.algorithms, Algorithm))
def test_a_round_looks_once_in_an_exchange(monkeypatch, name):
    monkeypatch.setattr(fedmpi.federation.rounds, "Losses", lambda on_gpu, weights: Losses(True, weights))
    few = looks_in_a_round(monkeypatch, name, 2, 2)
    assert few == looks_in_a_round(monkeypatch, name, 3, 5)
    assert few.keys() == {"tolist"} and few["tolist"] <= 4  # losses and rows, in at most two exchanges


@pytest.mark.rarely
@pytest.mark.parametrize(
    "words",
    [
        "--clip_norm 0.1 --weight_decay 0.01", "--model odd_modules.Dropping", "--model odd_modules.Lazy",
        "--oracle two_point", "--autocast bf16",
        "--task.crop_padding 1 --task.flip true", "--weighting samples", "--algorithm.schedule cosine",
    ],
)  # fmt: skip
def test_settings_add_no_look(monkeypatch, words):
    monkeypatch.setattr(fedmpi.federation.rounds, "Losses", lambda on_gpu, weights: Losses(True, weights))
    assert looks_in_a_round(monkeypatch, "fafed", 2, 2, *words.split()) == {"tolist": 2}


ROWS = [torch.tensor(values) for values in ([1.0, 2.0], [3e38, 3e38], [1.0, torch.nan], [-torch.inf, torch.inf])]


@pytest.mark.parametrize("loss", [0.5, torch.nan])
@pytest.mark.parametrize("first", [*range(4), None])
@pytest.mark.parametrize("second", range(4))
@pytest.mark.parametrize("on_gpu", [False, True])
def test_what_is_found_in_rows_and_losses(on_gpu, first, second, loss):
    """Two clients with two rows each; the second one also has a loss."""
    losses = Losses(on_gpu)
    for index, which, its_loss in ((3, first, 2.0), (5, second, loss)):
        if which is None:
            continue
        block = torch.cat([ROWS[0], ROWS[which]])
        found = [torch.tensor(1.5), torch.tensor(its_loss)]
        oracle = types.SimpleNamespace(take_losses=lambda found=found: found)
        client = types.SimpleNamespace(index=index, rows=dict(zip("ab", block.view(2, 2))), oracle=oracle)
        losses.check_rows(client, block, ("a", "b"))
        losses.add(client)
        block.zero_()  # the next client works in the same rows
    losses.collect()
    bad = [(3, 1)] * (first in (2, 3)) + [(5, -1 if loss != loss else 1)] * (second in (2, 3) or loss != loss)
    assert (losses.bad_client, losses.bad_row) == (bad or [(-1, -1)])[0]
    assert losses.number == 2 * (1 + (first is not None))
    assert losses.totals[0] == 3.5 or first is None


@pytest.mark.parametrize(
    ("weights", "total", "number"), [(None, 1 + 3 + 5, 3), ({0: 2.0, 1: 4.0}, 2 * 2.0 + 4 * 5.0, 6.0)]
)
def test_losses_of_local_steps_count_and_others_only_without_any(weights, total, number):
    """With weights, a client's is that of its mean loss, however many steps it made."""
    losses = Losses(weights=weights)
    for index, of_steps, of_passes in ((0, [1.0, 3.0], [100.0]), (1, [], [5.0])):
        calls = iter([of_steps, of_passes])
        oracle = types.SimpleNamespace(take_losses=lambda calls=calls: [torch.tensor(loss) for loss in next(calls)])
        client = types.SimpleNamespace(index=index, oracle=oracle)
        losses.add(client)
        losses.add_if_none(client)
    losses.collect()
    assert (losses.total, losses.number) == (total, number)


def test_the_round_ends_with_the_client_and_its_row(monkeypatch):
    monkeypatch.setattr(fedmpi.federation.rounds, "Losses", lambda on_gpu, weights: Losses(True, weights))
    words = "--algorithm fafed --clients 3 --local_steps 2 --algorithm.step_size 1e-3 --batch_size 8"
    federation = prepare(read_command_line(words.split()), SoloLink()).federation
    federation.start()

    class Spoil(Observer):
        def after_step(self, federation, client):
            if client.index == 1 and client.step_index == 1:
                client.m[3] = torch.nan

    federation.observer = Spoil()
    with pytest.raises(Diverged, match="row m of client 1 on rank 0 has values that are not finite"):
        federation.run_round()
