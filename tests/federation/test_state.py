"""A federation's state is all that it needs: stopped after any round and restored, it goes on with the same bits."""

import dataclasses
import functools
import importlib
import math
import sys

import pytest
import torch
from helpers import PROGRAMS

import fedmpi.algorithms
from fedmpi.aggregation.codecs.half import Half
from fedmpi.aggregation.coded import MeanOfSlices
from fedmpi.aggregation.sending import Sending
from fedmpi.aggregation.stages import Stage
from fedmpi.algorithms import FAFED, FedAvg
from fedmpi.comm.solo import SoloLink
from fedmpi.federation import Federation, Plan, Variables
from fedmpi.federation.nested import flatten, unflatten
from fedmpi.ground.part import Part
from fedmpi.oracles import FunctionOracle, OracleKind
from fedmpi.training.build import prepare
from fedmpi.training.config import read_command_line
from fedmpi.training.loop import train

ROUNDS, DIM = 5, 5
NAMES = sorted(set(dir(fedmpi.algorithms)) - {"Algorithm", "Exchange"})


def gradient(client, x, sample):
    i = torch.arange(DIM, dtype=x.dtype)
    return (1 + client) * (x - client + 0.1 * torch.sin(3 * sample + i)) + 0.2 * torch.sin(x)


def make_federation(algorithm, num_clients=3, stages=(), device="cpu"):
    """All clients in one process; from round 1 on, one of them is absent."""
    plan = Plan(num_clients, 3, lambda r: [c for c in range(num_clients) if r == 0 or c != r % 3] or [0], seed=1)
    start = torch.linspace(-1, 1, DIM, dtype=torch.float64, device=device)
    is_min_max = type(algorithm).__module__.endswith("minmax")
    variables = Variables(start, segments=[slice(0, 2), slice(2, DIM)], ascent=slice(4, 5) if is_min_max else None)
    oracles = dict.fromkeys(range(num_clients), functools.partial(FunctionOracle, gradient))
    return Federation(algorithm, SoloLink(), oracles, plan, variables, sending=Sending(stages=stages))


def copied(state):
    """A state as a file would give it back: in memory of its own."""
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}


def check_same(state, expected):
    """Check that two states have the same names and bits; clocks may differ."""
    assert state.keys() == expected.keys()
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            assert value.numpy().tobytes() == expected[name].numpy().tobytes(), name
        elif not name.startswith("federation/seconds"):
            assert value == expected[name] or (value != value and expected[name] != expected[name]), name


def check_stops(make, rounds=ROUNDS, between=lambda federation: None):
    """Stop the federation that `make()` gives after any round, restore it into a fresh one, and compare the ends."""
    whole = make()
    whole.start()
    states = [copied(whole.state())]
    for _ in range(rounds):
        whole.run_round()
        between(whole)
        states.append(copied(whole.state()))
    for stop, state in enumerate(states[:-1]):
        other = make()
        other.restore(state)
        for now in range(stop, rounds):
            check_same(other.state(), states[now])
            other.run_round()
            between(other)
        check_same(other.state(), states[-1])


@pytest.mark.rarely
@pytest.mark.parametrize("num_clients", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_every_algorithm_goes_on_with_the_same_bits(name, num_clients):
    check_stops(lambda: make_federation(getattr(fedmpi.algorithms, name)(), num_clients))


def test_the_selected_iterate_and_the_rows_of_stages_are_state():
    class Feedback(Stage):
        kept_rows = ("error",)

        def apply(self, sent):
            for name, row in sent.rows.items():
                row.add_(sent.kept["error"][name])
                rounded = torch.round(row, decimals=2)
                sent.kept["error"][name].copy_(row - rounded)
                row.copy_(rounded)

    def select(federation):
        if federation.round_index == 2:
            federation.select(0.5)

    check_stops(lambda: make_federation(FAFED(), stages=[Feedback()]), between=select)
    federation = make_federation(FAFED(), stages=[Feedback()])
    federation.start()
    federation.run_round()
    assert federation.clients[0].kept["stages/feedback.error"]["m"].any()


class Counts(Part):
    """What every part may have: a state of its own and of each client, rows of each client, facts, secrets."""

    kept_rows = ("last",)

    def count(self, client):
        self.calls = vars(self).get("calls", 0) + 1
        self.kept_of[client]["last"]["x"].add_(self.calls)
        assert len(self.secret.bits(3)) == 3

    def state(self):
        return {"calls": vars(self).get("calls", 0)}

    def restore(self, state):
        self.calls = state["calls"]

    def client_state(self, client):
        return {"twice": 2 * self.state()["calls"]}

    def facts(self):
        return self.state()


@dataclasses.dataclass(kw_only=True)
class CountingMean(Counts, MeanOfSlices):
    def add(self, client, rows):
        self.count(client)
        super().add(client, rows, self.weights[client])


@dataclasses.dataclass(kw_only=True)
class CountingStage(Counts, Stage):
    def apply(self, sent):
        self.count(sent.client)


@dataclasses.dataclass(kw_only=True)
class CountingCodec(Counts, Half):
    def encode(self, moves):
        self.count(0)
        return super().encode(moves)


class Kind(Counts, OracleKind):
    """Of an oracle that is asked four times in two rounds."""

    def make(self, client):
        oracle = FunctionOracle(lambda index, x, sample: self.count(client.index) or x - index, client)
        oracle.kind = self
        return oracle


def test_all_parts_may_keep_rows_and_a_state_and_say_facts():
    def make():
        kind, mean = Kind(), CountingMean()
        mean.takes_codecs = True
        sending = Sending(mean, [CountingStage()], CountingCodec())
        oracles, start = dict.fromkeys(range(1), kind.make), Variables(torch.full((4,), 4.0, dtype=torch.float64))
        return Federation(FedAvg(), SoloLink(), oracles, Plan(1, 2), start, sending)

    check_stops(make)
    federation = make()
    federation.start()
    for _ in range(2):
        federation.run_round()
    facts = federation.facts()
    assert facts.pop("codec_calls") > 2
    assert facts == {"aggregation_calls": 2, "countingstage_calls": 2, "oracle_calls": 4}
    assert federation.clients[0].kept["aggregation.last"]["x"][0] == 1 + 2
    assert federation.clients[0].kept["oracle.last"]["x"][0] == 1 + 2 + 3 + 4


def test_state_is_names_and_what_a_file_can_hold():
    federation = make_federation(FedAvg())
    federation.start()
    federation.run_round()
    federation.select(math.nan)
    for name, value in federation.state().items():
        assert name.split("/")[0] in ("federation", "server", "clients")
        numbers = value if isinstance(value, list) else [value]
        assert isinstance(value, torch.Tensor) or all(isinstance(number, int | float) for number in numbers), name


def test_what_is_missing_is_named():
    federation = make_federation(FAFED())
    state = federation.state()
    del state["clients/1/rows/x_prev"]
    with pytest.raises(KeyError, match="rows/x_prev"):
        federation.restore(state)


@pytest.mark.parametrize(
    "value",
    [
        3,
        2.5,
        None,
        [],
        (1, [2.0, None]),
        {"a": {"b": (1, 2)}, "c": []},
        {"dict": 1, "h": 2},
        {"a/b": 1},
        {(1,): "x"},
        {},
    ],
)
def test_nested_values_come_back(value):
    assert unflatten(flatten(value, "carried"), "carried", "cpu") == value


def test_tensors_in_nested_values_come_back_as_copies():
    hidden = (torch.ones(2), [torch.zeros(3)])
    back = unflatten(flatten(hidden, "carried"), "carried", "cpu")
    hidden[0].zero_()
    assert torch.equal(back[0], torch.ones(2))
    assert torch.equal(back[1][0], torch.zeros(3))
    with pytest.raises(TypeError, match=r"carried\[1\] is a type"):
        flatten((1, int), "carried")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """(a folder with the data files and the classifier of `final_rows`, its settings of every task)."""
    sys.path.insert(0, str(PROGRAMS))
    try:
        final_rows = importlib.import_module("final_rows")
        folder = tmp_path_factory.mktemp("files")
        final_rows.make_files(folder)
        words = f"--algorithm fedavg --data {folder}/images.h5 --model mlp --rounds 30 --clients 2 --eval-every 30"
        train(read_command_line(f"{words} --out {folder}/runs --name classifier --threads 1".split()), SoloLink())
        yield folder, final_rows.TASKS
    finally:
        sys.path.remove(str(PROGRAMS))


TASK_NAMES = (
    "classification-dropout", "classification-batchnorm", "classification-images", "auc", "attack", "language",
    "quadratic", "counterexample", "saddle_quadratic", "two_parameter_auc", "two_point", "slow",
    "saddle",
)  # fmt: skip


@pytest.mark.rarely
@pytest.mark.parametrize("name", TASK_NAMES)
def test_every_task_goes_on_with_the_same_bits(files, name):
    folder, tasks = files
    words = f"--clients 3 --local-steps 2 --rounds 3 --threads 1 --device cpu --participation 0.67 {tasks[name]}"
    words += " --task.noise 0.1" if name in ("saddle_quadratic", "two_parameter_auc") else ""
    config = read_command_line(words.replace("FOLDER", str(folder)).split())
    check_stops(lambda: prepare(config, SoloLink()).federation, rounds=3)


def test_all_tasks_are_here(files):
    assert set(files[1]) <= {*TASK_NAMES, "classification"}


def test_a_state_of_the_cpu_is_restored_on_another_device():
    """The device "meta" stands for a GPU: its tensors have a device and no values."""
    federation = make_federation(FAFED())
    federation.start()
    federation.run_round()
    federation.select(0.5)
    federation.clients[0].carried["state"] = (torch.ones(3), [torch.zeros(2)])
    restored = make_federation(FAFED(), device="meta")
    restored.restore(federation.state())
    first, (second,) = restored.clients[0].carried.pop("state")
    assert first.device.type == second.device.type == "meta"
    found = {name: value for name, value in restored.state().items() if isinstance(value, torch.Tensor)}
    assert {"federation/selected/x", "federation/selected/buffers"} <= found.keys()
    assert {value.device.type for value in found.values()} == {"meta"}
