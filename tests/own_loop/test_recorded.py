"""The run folder of a user's own loop: records, checkpoints, and the same bits after a stop."""

import collections
import datetime
import random

import numpy as np
import pytest
import safetensors.torch
import torch
from helpers import PROGRAMS, start
from torch import nn

import fedmpi
from fedmpi import UserError
from fedmpi.oracles.flat_module import FlatModule
from fedmpi.own_loop.objects import Objects
from fedmpi.runs.checkpoints.files import read_state, write_state
from fedmpi.runs.initial import read_initial


def run(way, folder, *rest):
    return start(2, PROGRAMS / "recorded_loop.py", way, folder, 20, *rest)


def totals(ended):
    """What the ranks end with; without the step from which they went on."""
    assert ended.returncode == 0, ended.stderr
    return [line.partition(",")[2] for line in ended.stdout.splitlines() if line.startswith("from")]


@pytest.mark.rarely
@pytest.mark.parametrize("way", ["average", "fafed"])
def test_a_loop_goes_on_after_a_signal_and_after_a_kill_with_the_same_bits(way, tmp_path):
    whole = totals(run(way, tmp_path / "whole"))
    assert len(whole) == 2 and (whole[0].split()[-1] == whole[1].split()[-1]) == (way == "average"), "private layers"

    stopped = run(way, tmp_path / "stopped", "SIGTERM", 8)
    assert stopped.returncode == 75 and "stopped after round 3 by SIGTERM; start the program again" in stopped.stderr
    again = run(way, tmp_path / "stopped")
    assert "from 9, " in again.stdout and totals(again) == whole

    assert run(way, tmp_path / "killed", "SIGKILL", 17).returncode not in (0, 75)
    assert totals(run(way, tmp_path / "killed")) == whole

    records = [fedmpi.load_run(tmp_path / name).records for name in ("whole", "stopped", "killed")]
    assert [record["iteration"] for record in records[0]] == [3, 6, 9, 12, 15, 18, 20]
    learned = ("round", "iteration", "loss", "bytes", "gradients", "error", "size")
    for other in records[1:]:
        assert [[one.get(name) for name in learned] for one in other] == [
            [one.get(name) for name in learned] for one in records[0]
        ]
    for clock in ("seconds", "evaluation_seconds"):  # they go on where the loop was stopped
        times = [[record[clock] for record in of_run] for of_run in records]
        assert all(one == sorted(one) and one[0] < one[-1] for one in times), clock
    last = fedmpi.load_run(tmp_path / "whole")
    assert last.is_complete and last.records[5]["error"] == (1 * 1 + 3 * 2) / 4 and last.clients["error"] == [1, 2]


@pytest.mark.rarely
def test_masked_sums_hide_what_a_rank_measures(tmp_path):
    found = {}
    for aggregation in ("reproducible", "masked"):
        program = PROGRAMS / "recorded_loop.py"
        done = start(3, program, "average", tmp_path / aggregation, 12, env={"AGGREGATION": aggregation})
        assert done.returncode == 0, done.stderr
        found[aggregation] = fedmpi.load_run(tmp_path / aggregation)
    plain, hidden = found.values()
    for name in ("error", "size", "loss"):
        of_plain, of_hidden = (
            [record[name] for record in run.records if record.get(name) is not None] for run in (plain, hidden)
        )
        assert of_hidden == pytest.approx(of_plain, rel=1e-12) and any(of_hidden)
    assert plain.clients["error"] == [1, 2, 3] and not hidden.clients.get("error")


def test_a_run_folder_is_never_taken_for_another_run(tmp_path):
    program, folder = tmp_path / "once.py", tmp_path / "run"
    program.write_text(
        f"import fedmpi, torch\nfedmpi.average(torch.nn.Linear(1, 1), record={str(folder)!r}, every=1).finish()\n"
    )
    assert start(1, program).returncode == 0
    second = start(1, program)
    assert second.returncode != 0 and f"run folder {folder}: exists already" in second.stderr


class Holder:
    """An object of a loop with some state."""

    def __init__(self, state):
        self.state, self.loaded = state, None

    def state_dict(self):
        return {"kept": self.state}

    def load_state_dict(self, state):
        self.loaded = state["kept"]


def taken_back(folder, **objects):
    """What objects load after a checkpoint's file."""
    path = folder / "client-0000.safetensors"
    size = write_state(path, Objects(objects).state())
    Objects(objects).restore(read_state(path, *size))
    path.unlink()


STATES = {
    "nested": {
        "a": [1, 2.5, None, True, "x", (0.9, [()])],
        3: {(1, "b"): -0.0},
        None: float("inf"),
        "a/b": {},
        "dict": 1,
    },
    "python": [{1, 2}, frozenset("a"), b"ab", bytearray(b""), 1 + 2j, 2**200, "\ud800", collections.deque([1], 3)],
    "dicts": [collections.OrderedDict(b=1, a=2), collections.Counter("aab"), collections.defaultdict(list, {1: [2]})],
    "torch": [torch.float32, torch.device("cpu"), torch.Size([2, 3])],
    "numpy": [
        np.float32(0.1),
        np.array(["a", "bc"]),
        np.arange(6).reshape(2, 3).T,
        np.datetime64("2020-01-01"),
        np.bool_(1),
    ],
    "random": random.Random(3).getstate(),
}


@pytest.mark.always
@pytest.mark.parametrize("kind", STATES)
def test_states_of_objects_come_back_with_their_types(kind, tmp_path):
    holder = Holder(STATES[kind])
    taken_back(tmp_path, one=holder)
    assert repr(holder.loaded) == repr(STATES[kind])


@pytest.mark.always
def test_tensors_of_all_types_come_back_as_they_lie_in_memory(tmp_path):
    names = "float64 float32 float16 bfloat16 complex64 complex128 bool int64 int8 uint8 uint16 uint64 float8_e4m3fn"
    tensors = [torch.tensor([[0.0, 1.0, 2.0]] * 2).to(getattr(torch, name)) for name in names.split()]
    tensors += [torch.arange(6.0).reshape(2, 3).t(), torch.tensor(3.0), torch.empty(0), torch.zeros(1).expand(4)]
    tensors += [torch.ones(2, dtype=torch.complex64).conj(), torch.nn.Parameter(torch.ones(2))]
    holder = Holder([*tensors, tensors[0]])
    taken_back(tmp_path, one=holder)
    for found, expected in zip(holder.loaded, holder.state):
        assert type(found) is type(expected) and found.dtype == expected.dtype and found.tolist() == expected.tolist()
        assert found.stride() == expected.stride() or expected.stride() == (0,)
    assert holder.loaded[0] is holder.loaded[-1], "the same tensor at two places"


CYCLIC = []
CYCLIC.append(CYCLIC)
Named = collections.namedtuple("Named", "a")


@pytest.mark.always
@pytest.mark.parametrize(
    "state",
    [datetime.date(2020, 1, 1), torch.eye(2).to_sparse(), torch.ones(1, device="meta"), np.array([None]), CYCLIC,
     Named(1), {torch.ones(1): 1}, np.zeros(1, [("a", int)]), len, 10**5000],
    ids=lambda state: type(state).__name__,
)  # fmt: skip
def test_a_state_that_no_checkpoint_can_contain_is_refused_with_its_place(state):
    with pytest.raises(fedmpi.UserError, match=r"objects: the state of 'one'\['kept'\]"):
        Objects({"one": Holder(state)})


@pytest.mark.always
def test_an_object_without_state_is_refused_with_a_remedy():
    loader = torch.utils.data.DataLoader([1, 2])
    with pytest.raises(fedmpi.UserError, match=r"'data' is a DataLoader: .*fed\.batches\(loader\)"):
        fedmpi.Recording("nowhere", objects={"data": loader})


@pytest.mark.always
def test_generators_of_the_process_go_on_where_they_were(tmp_path):
    def drawn():
        return torch.rand(3).tolist(), np.random.random(3).tolist(), random.random()

    path = tmp_path / "client-0000.safetensors"
    objects = Objects({})
    size = write_state(path, objects.state())
    first = drawn()
    assert drawn() != first
    objects.restore(read_state(path, *size))
    assert drawn() == first


def resumed(*words):
    return start(2, PROGRAMS / "resumed_loop.py", *words)


def test_a_late_schedule_and_a_pass_go_on_with_the_same_bits(tmp_path):
    def end(ended):
        assert ended.returncode == 0, ended.stderr
        return [line for line in ended.stdout.splitlines() if line.startswith("ended")]

    whole = end(resumed(tmp_path / "whole", "batches"))
    assert whole[0].startswith("ended: 24 24 "), whole
    for signal_name, code in {"SIGTERM": 75, "SIGKILL": None}.items():
        folder = tmp_path / signal_name
        stopped = resumed(folder, "batches", signal_name, 13)
        assert stopped.returncode == code if code else stopped.returncode, stopped.stderr
        again = resumed(folder, "batches")
        assert end(again) == whole and "continuing" in again.stdout
    # At its end: the checkpoint of the last round has the schedule's last step.
    assert end(resumed(tmp_path / "whole", "batches"))[0].split()[1:3] == ["24", "24"]


def test_what_a_resumed_loop_cannot_do_is_said(tmp_path):
    assert resumed(tmp_path, "batches", "SIGTERM", 13).returncode == 75
    other = resumed(tmp_path, "other")
    assert other.returncode == 0, other.stderr
    assert "lr is 0.2 in the program, 0.05 when the run began, and 0.03" in other.stderr, other.stderr


@pytest.mark.parametrize(("name", "match"), [(".fedmpi", "contains no .fedmpi"), ("metrics.jsonl", "is a link")])
def test_a_folder_with_a_link_or_without_its_mark_is_not_continued(tmp_path, name, match):
    def loop():
        model = nn.Linear(2, 1)
        fed = fedmpi.average(model, every=1, record=fedmpi.Recording(tmp_path / "it", resume=True, checkpoint_every=1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(torch.ones(4, 2)).square().sum().backward()
        optimizer.step()
        fed.step()
        fed.finish()

    loop()
    loop()
    (tmp_path / "it" / name).rename(tmp_path / "elsewhere")
    if name != ".fedmpi":
        (tmp_path / "it" / name).symlink_to(tmp_path / "elsewhere")
    before = (tmp_path / "elsewhere").read_bytes()
    with pytest.raises(UserError, match=match):
        loop()
    assert (tmp_path / "elsewhere").read_bytes() == before


def test_a_loader_whose_place_is_unknown_is_named(tmp_path):
    ended = resumed(tmp_path, "plain", "SIGTERM", 2)
    assert "this loop reads a DataLoader by itself (3 batches of a pass" in ended.stderr, ended.stderr


def with_adapter(seed):
    """A network of which the last layer, and the counters of the middle one, change."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300), nn.Linear(300, 2))
    model[0].requires_grad_(False)
    model.register_buffer("mask", torch.ones(300, 300, dtype=torch.bool))
    return model


@pytest.mark.parametrize("whole", [False, True])
def test_of_an_adapter_only_what_was_trained_is_saved(tmp_path, whole):
    model = with_adapter(0)
    fed = fedmpi.average(model, every=2, record=fedmpi.Recording(tmp_path / "it", whole_model=whole))
    inputs, optimizer = torch.randn(8, 300), torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(4):
        model(inputs).square().sum().backward()
        optimizer.step()
        fed.step()
    fed.finish()
    saved = set(safetensors.torch.load_file(tmp_path / "it" / "model.safetensors"))
    left = {"0.weight", "0.bias", "mask"}
    assert saved == {*model.state_dict()} - (set() if whole else left)
    assert not (tmp_path / "it" / "model.h5").exists()
    again = fedmpi.load(tmp_path / "it", with_adapter(0))
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    if not whole:
        with pytest.raises(UserError, match="has the trained tensors only, and '0.weight', which was not trained, has"):
            fedmpi.load(tmp_path / "it", with_adapter(1))
        other = fedmpi.load(tmp_path / "it", with_adapter(1), strict=False)
        assert torch.equal(other[2].weight, model[2].weight) and not torch.equal(other[0].weight, model[0].weight)


@pytest.mark.parametrize("options", [{"private": "2"}, {"buffers": "average"}], ids=str)
def test_what_ranks_may_have_of_their_own_is_saved(tmp_path, options):
    """Buffers that were averaged at the beginning, or may be other ones on each rank: no model has them again."""
    model = with_adapter(0)
    fed = fedmpi.average(model, every=1, record=tmp_path / "it", **options)
    model[2].bias.data.fill_(3.0)
    fed.step()
    fed.finish()
    client = 0 if "private" in options else None
    file = "models/client_0.safetensors" if client == 0 else "model.safetensors"
    assert set(safetensors.torch.load_file(tmp_path / "it" / file)) == {*model.state_dict()} - {"0.weight", "0.bias"}
    again = fedmpi.load(tmp_path / "it", with_adapter(0), client=client)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


def test_a_new_run_begins_from_the_trained_tensors_of_an_adapter(tmp_path):
    model = with_adapter(0)
    fed = fedmpi.average(model, every=1, record=tmp_path / "it")
    model[2].bias.data.fill_(3.0)
    fed.step()
    fed.finish()
    for seed, fits in ((0, True), (1, False)):
        flat = FlatModule(with_adapter(seed))
        if fits:
            values = read_initial(str(tmp_path / "it"), flat)
            assert values.keys() == model.state_dict().keys() and torch.equal(values["2.bias"], torch.full((2,), 3.0))
        else:
            with pytest.raises(UserError, match="'0.weight', which was not trained"):
                read_initial(str(tmp_path / "it"), flat)
