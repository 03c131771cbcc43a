"""Trained tensors go into the model that they are of: of the same parts, not only with equal names and shapes."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import fedmpi
from fedmpi.oracles.architecture import as_json, describe, difference, other_code, unwrapped


class Net(nn.Module):
    def __init__(self, act=torch.relu, heads=2, drop=0.5, inner=None):
        super().__init__()
        self.act, self.heads, self.calls = act, heads, 0
        self.inner, self.drop, self.last = inner or nn.ReLU(), nn.Dropout(drop), nn.Linear(4, 2)

    def forward(self, inputs):
        self.calls += 1
        return self.last(self.drop(self.act(self.inner(inputs))))


class Sine(Net):
    def forward(self, inputs):
        return self.last(torch.sin(inputs))


def edited():
    cls = type("Net", (Net,), {"forward": Sine.forward})
    return cls()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Net(), ""), (Net(drop=0.1), ""), (Sine(), "it is a Sine, the run's is a Net"),
        (Net(act=torch.tanh), "it is a Net with act = tanh, the run's has act = relu"),
        (Net(heads=4), "it is a Net with heads = 4, the run's has heads = 2"),
        (Net(inner=nn.Tanh()), "its part 'inner' is a Tanh, the run's is a ReLU"),
        (nn.DataParallel(Net()), ""),
    ],
)  # fmt: skip
def test_what_differs_is_said(model, message):
    """Counters are no settings; what acts in training only may differ."""
    trained = Net()
    parts = describe(trained)
    trained(torch.ones(3, 4))
    recorded = as_json(parts, trained)
    assert difference(recorded, describe(unwrapped(model))) == message


def test_other_code_is_noticed_but_not_of_another_python():
    recorded = as_json(describe(Net()))
    assert (other_code(recorded, describe(Net())), other_code(recorded, describe(edited()))) == ("", "Net")
    recorded[""][2] = "cpython-39 0011"
    assert other_code(recorded, describe(edited())) == ""
    for damaged in (None, [], {"": 3}, {"": ["Net", [], 3]}):
        assert difference(damaged, {}) == other_code(damaged, {}) == ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a loop whose model was wrapped."""
    model, folder = nn.DataParallel(Net()), tmp_path_factory.mktemp("runs") / "run"
    fed = fedmpi.join(model, "fedavg", local_steps=1, step_size=0.1, record=folder)
    for _ in range(2):
        fed.step(lambda: functional.mse_loss(model(torch.ones(3, 4)), torch.zeros(3, 2)))
    fed.finish()
    return folder


def test_a_loop_saves_the_plain_names_and_loads_into_wrapped_models(folder):
    for model in (Net(), nn.DataParallel(Net()), torch.compile(Net(), backend="eager")):
        assert fedmpi.load(folder, model) is model
        assert not unwrapped(model).training
    assert set(fedmpi.load(folder, Net()).state_dict()) == {"last.weight", "last.bias"}


def test_another_model_stays_as_it_was_unless_it_is_wanted(folder):
    model = Sine()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(fedmpi.UserError, match=r"of another model: it is a Sine, the run's is a Net; .*strict=False"):
        fedmpi.load(folder, model)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not torch.equal(fedmpi.load(folder, model, strict=False).last.bias, before["last.bias"])
    wider = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2))
    with pytest.raises(fedmpi.UserError, match="does not fit Sequential"):
        fedmpi.load(folder, wider)


def test_a_folder_without_the_record_loads_as_before(folder, tmp_path):
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    fedmpi.load(tmp_path, Sine())


class FSDPModule:
    """Stands for torch's, by its name."""


def test_models_that_cannot_be_averaged_or_saved_are_refused_before_the_first_step(tmp_path):
    sharded = type("FSDPLinear", (FSDPModule, nn.Linear), {})(2, 1)
    with pytest.raises(fedmpi.UserError, match="model FSDPLinear: it is sharded by FSDP"):
        fedmpi.average(sharded)
    model = nn.Linear(2, 1)
    model.register_buffer("f", torch.ones(2, dtype=torch.complex128))
    with pytest.raises(fedmpi.UserError, match="model Linear: 'f' is of type torch.complex128, which the model files"):
        fedmpi.join(model, "fedavg", record=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    model.register_buffer("f", torch.ones(2, dtype=torch.complex128), persistent=False)
    fedmpi.join(model, "fedavg", local_steps=1, record=tmp_path / "other").finish()
