"""--cuda_graph: gradients that are replayed have the bits of those that are computed.

There is no GPU here: instead of a CUDA graph, torch's operators are recorded. A replay repeats them on the same memory,
as a graph does, and runs no Python; what a graph cannot contain is an error.
"""

import dataclasses
import typing

import h5py
import numpy as np
import odd_modules
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import fedmpi.federation.recorded as recorded_steps
from fedmpi.algorithms import FedAvg
from fedmpi.comm.link import SoloLink
from fedmpi.config.build import read_command_line
from fedmpi.errors import UserError
from fedmpi.training.build import prepare
from fedmpi.training.recording import record_gradients, record_steps

COMMON = "--clients 3 --participation 0.7 --local_steps 3 --batch_size 16 --threads 1"
LOOKS = {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero", "aten::masked_select", "aten::equal"}
CASES = [
    "--algorithm fedavg", "--algorithm fafed --algorithm.schedule cube_root",
    "--algorithm scaffold --algorithm.schedule cosine",
    "--algorithm mimeadam --algorithm.lite false", "--algorithm mb_storm", "--algorithm fed_lamb --weight_decay 0.1",
    "--algorithm fafed --model odd_modules.Dropping --clip_norm 0.1",  # dropout
    "--algorithm fafed --task.crop_padding 1 --task.flip true --dtype float64",
    "--algorithm stem --model odd_modules.Lazy --local_steps 2 --clients 2",
    "--algorithm fafed --local_epochs 0.5 --batch_size 100 --partition uneven",  # smaller minibatches
    "--algorithm coda --task auc", "--algorithm fafed --autocast bf16",
    "--algorithm fafed --model mlp --private *.bias",
]  # fmt: skip


class Tape(TorchDispatchMode):
    """Records operators with the tensors that they are called with."""

    def __init__(self):
        super().__init__()
        self.calls, self.replays = [], 0

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        if function.name().partition(".")[0] in LOOKS:
            raise RuntimeError("operation not permitted when stream is capturing")
        result = function(*args, **(kwargs or {}))
        self.calls.append((function, *tree_map(_at_its_address, (args, kwargs or {}, result))))
        return result

    @torch.no_grad()
    def replay(self):
        self.replays += 1
        for function, args, kwargs, result in self.calls:
            for old, new in zip(tree_leaves(result), tree_leaves(function(*args, **kwargs))):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def _at_its_address(value):
    """A tensor in the same memory, also if another one is later assigned to its ``.data``."""
    return value.detach() if isinstance(value, torch.Tensor) else value


class Tapes(list):
    """Stands for `cuda_graph`."""

    def __call__(self, function):
        with Tape() as tape:
            result = function()
        self.append(tape)
        return result, tape.replay


class Cut:
    """Stands for `CudaTape`: a tape of operators, and a further one after each cut."""

    def rehearse(self, function):
        function()

    def record(self, function):
        self._parts = [Tape()]
        self._parts[0].__enter__()
        try:
            function()
        finally:
            self._parts[-1].__exit__(None, None, None)

    def cut(self, between):
        self._parts[-1].__exit__(None, None, None)
        between()
        self._parts.append(Tape())
        self._parts[-1].__enter__()

    def replay(self, part):
        self._parts[part].replay()


def prepared(words):
    return prepare(read_command_line([*COMMON.split(), *words.split()]), SoloLink())


def recorded(words):
    """(a job whose gradients are replayed, its tapes, why they are not or "")."""
    job, tapes = prepared(words), Tapes()
    oracles = [client.oracle for client in job.federation.clients]
    return job, tapes, record_gradients(job.config, job.task, job.flat, oracles, tapes)


def run(job, rounds=3):
    """Losses and state after some rounds."""
    job.federation.start()
    losses = [job.federation.run_round() for _ in range(rounds)]
    state = {name: value for name, value in job.federation.state().items() if "seconds" not in name}
    return losses, state


def assert_same_bits(found, expected):
    (losses, state), (other_losses, other) = found, expected
    np.testing.assert_equal(losses, other_losses)
    assert state.keys() == other.keys()
    for name, value in state.items():
        same = torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        assert same, name


@pytest.mark.parametrize("words", CASES)
def test_replayed_steps_have_the_bits_of_eager_ones(words):
    job, tapes, why_not = recorded(words)
    assert why_not == ""
    assert_same_bits(run(job), run(prepared(words)))
    assert sum(tape.replays for tape in tapes) > 2 * len(tapes)


@pytest.mark.parametrize("module", odd_modules.TRAIN, ids=lambda cls: cls.__name__)
def test_every_legal_module_is_replayed_rightly_or_not_at_all(module):
    words = f"--algorithm fafed --model odd_modules.{module.__name__}"
    assert_same_bits(run(recorded(words)[0]), run(prepared(words)))


class Counting(nn.Linear):
    """Its output depends on the number of calls, of which a recording has one."""

    def __init__(self, shape, num_classes):
        super().__init__(shape[-1] * shape[-2], num_classes)
        self.calls = 0

    def forward(self, inputs):
        self.calls += 1
        return super().forward(inputs.flatten(1)) * (1 + self.calls % 2)


class Looking(Counting):
    def forward(self, inputs):
        return super().forward(inputs) * max(1.0, inputs.max().item())


class Shrinking(Counting):
    def forward(self, inputs):
        self.weight.data.mul_(0.9999)
        return nn.functional.linear(inputs.flatten(1), self.weight)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--oracle two_point", "only exact gradients"),
        ("--algorithm fedavg --stack 2", "several clients take each local step at once"),
        (f"--model {__name__}.Counting", "a replay computes other gradients of this model"),
        (f"--model {__name__}.Shrinking", "a pass changes the parameters"),
        (f"--model {__name__}.Looking", "the evaluation of the model cannot be recorded (RuntimeError: operation not"),
    ],
)
def test_what_cannot_be_recorded_is_computed(words, reason):
    job, _, why_not = recorded(words)
    assert why_not.startswith(reason)
    assert all(client.oracle.recordings is None for client in job.federation.clients if "two_point" not in words)


def in_whole_steps(words):
    """(a job whose local steps are replayed, the `RecordedSteps`)."""
    job, _, why_not = recorded(words)
    assert why_not == ""
    record_steps(job.federation, job.task, Cut)
    return job, job.federation.local_step


WHOLE = [
    *(words for words in CASES if not any(name in words for name in ("mimeadam", "mb_storm"))),
    "--algorithm fafed --algorithm.schedule cosine --algorithm.fresh_weight_scale 900 --dtype float64",
    "--algorithm fafed --model odd_modules.Dropping --task.crop_padding 1 --task.flip true",
    "--algorithm fedavg --algorithm.schedule cube_root --algorithm.schedule_every 1 --clip_norm 1",
    "--algorithm stem --algorithm.schedule cube_root --algorithm.fresh_weight_scale 10",
    "--algorithm local_adam --algorithm.schedule cosine",
    "--algorithm fedavg --data_on host",
]


@pytest.mark.parametrize("words", WHOLE)
def test_replayed_whole_steps_have_the_bits_of_eager_ones(words):
    job, steps = in_whole_steps(words)
    assert_same_bits(run(job, rounds=6), run(prepared(words), rounds=6))
    assert steps.why_not == "" and steps.num_replays > 0


def test_the_compiled_update_is_replayed_too(monkeypatch):
    monkeypatch.setattr("fedmpi.algorithms.fafed._compile", lambda function: function)  # a tape sees torch's operators
    words = "--algorithm fafed --algorithm.schedule cube_root --fused_update true"
    job, steps = in_whole_steps(words)
    assert_same_bits(run(job, rounds=6), run(prepared(words), rounds=6))
    assert steps.why_not == "" and steps.num_replays > 0


@dataclasses.dataclass(frozen=True)
class Baking(FedAvg):
    """Its step size is a number in Python when a step is recorded."""

    def local_step(self, client, server, oracle):
        client.x.add_(oracle.gradient(client.x, oracle.draw()), alpha=-float(self.eta(client)))


@dataclasses.dataclass(frozen=True)
class Hurrying(FedAvg):
    def local_step(self, client, server, oracle):
        client.x.sub_(oracle.gradient(client.x, oracle.draw()), alpha=self.step_size / client.iteration)


@dataclasses.dataclass(frozen=True)
class Remembering(FedAvg):
    def local_step(self, client, server, oracle):
        client.last = oracle.draw()
        client.x.sub_(oracle.gradient(client.x, client.last), alpha=self.step_size)


@dataclasses.dataclass(frozen=True)
class Alternating(FedAvg):
    """What it computes depends on something that a recording does not know."""

    calls: typing.ClassVar[list] = []

    def local_step(self, client, server, oracle):
        self.calls.append(client.step_index)
        g = oracle.gradient(client.x, oracle.draw())
        client.x.sub_(g, alpha=self.step_size * (1 + len(self.calls) % 3))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Baking", "operation not permitted when stream is capturing"),
        ("Hurrying", "its local step reads client.iteration"),
        ("Remembering", "its local step changes client.last"),
        ("Alternating", "a replay computes something else"),
    ],
)
def test_steps_that_cannot_be_replayed_are_computed(capsys, name, reason):
    words = f"--algorithm {__name__}.{name} --clients 1 --participation 1 --algorithm.schedule cosine"
    job, steps = in_whole_steps(words)
    found = run(job)
    assert steps.why_not == reason and steps.num_replays == 0
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.endswith(f"but not whole local steps, because {reason}")
    if name != "Alternating":
        assert_same_bits(found, run(prepared(words)))


@pytest.mark.parametrize("broken", ["copy_batch", "MOST_NUMBERS"])
def test_memory_that_is_not_filled_is_found(monkeypatch, broken):
    """Indices that stay those of the first step; step sizes that do."""
    if broken == "copy_batch":
        monkeypatch.setattr(recorded_steps, broken, lambda source, target: target.zero_())
    else:
        twin = recorded_steps.Recording._with_numbers_in_memory

        def stale(recording):
            made, recording._numbers = twin(recording), recording._numbers.clone()
            return made

        monkeypatch.setattr(recorded_steps.Recording, "_with_numbers_in_memory", stale)
        fill = recorded_steps.Recording.fill

        def elsewhere(recording, *holders):
            mine, recording._numbers = recording._numbers, recording._numbers.clone()
            try:
                return fill(recording, *holders)
            finally:
                recording._numbers = mine

        monkeypatch.setattr(recorded_steps.Recording, "fill", elsewhere)
    words = "--algorithm fafed --clients 1 --participation 1 --algorithm.schedule cube_root"
    job, steps = in_whole_steps(words)
    assert_same_bits(run(job), run(prepared(words)))
    assert steps.why_not == "a replay computes something else" and steps.num_replays == 0


def test_a_recurrent_state_is_not_recorded(tmp_path):
    with h5py.File(tmp_path / "text.h5", "w") as file:
        for split in ("train", "test"):
            file[f"{split}/text"] = np.frombuffer(b"the cat sat on a mat\n" * 80, np.uint8)
    _, _, why_not = recorded(f"--task language --data {tmp_path / 'text.h5'} --model lstm --batch_size 4")
    assert "the task keeps a state" in why_not


def test_trying_changes_nothing():
    words = "--algorithm fafed --model odd_modules.Lazy --batch_size 4"
    tried, fresh = recorded(words)[0], prepared(words)
    states = [job.federation.state() for job in (tried, fresh)]
    assert_same_bits(*(([], {k: v for k, v in state.items() if "seconds" not in k}) for state in states))


def test_further_shapes_are_computed(monkeypatch):
    monkeypatch.setattr("fedmpi.oracles.graphs.MOST", 1)
    job, tapes, why_not = recorded("--algorithm fafed")
    assert why_not == ""
    assert_same_bits(run(job), run(prepared("--algorithm fafed")))
    assert len(tapes) == 1


def test_it_needs_a_gpu():
    with pytest.raises(UserError, match="cuda_graph = on: this rank computes on cpu"):
        prepared("--cuda_graph on")
    for words in ("", "--cuda_graph off", "--cuda_graph auto"):
        assert prepared(words).federation.clients[0].oracle.recordings is None
