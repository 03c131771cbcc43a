"""The papers' networks: parameter counts, shapes, determinism of dropout, and models of the user's own."""

import pytest
import torch
from torch import nn

import fedmpi.models
from fedmpi.ground.errors import UserError
from fedmpi.ground.registry import known
from fedmpi.models.cnn import AttackedCNN, CifarCNN, FashionCNN, LambCNN, MnistCNN
from fedmpi.models.lstm import LSTM
from fedmpi.models.mlp import MLP
from fedmpi.models.resnet import ResNet9, ResNet18
from fedmpi.oracles.flat_module import FlatModule
from fedmpi.tasks.base import LoadedTask
from fedmpi.training.config import read_command_line

GREY, COLOUR, TINY = (1, 28, 28), (3, 32, 32), (3, 64, 64)

SIZES = [
    (MnistCNN, GREY, 10, {}, 431_080),
    (FashionCNN, GREY, 10, {}, 26_620),
    (FashionCNN, GREY, 1, {}, 25_711),
    (CifarCNN, COLOUR, 10, {}, 581_866),
    (CifarCNN, COLOUR, 1, {}, 581_281),
    (CifarCNN, COLOUR, 10, {"hidden": 0}, 89_834),
    (MLP, GREY, 10, {"dropout": 0.5}, 159_010),
    (MLP, COLOUR, 10, {"hidden_layers": 2}, 656_810),
    (LambCNN, GREY, 10, {}, 21_840),
    (AttackedCNN, GREY, 10, {}, 312_586),
    (AttackedCNN, COLOUR, 10, {"width": 64, "hidden": 256}, 1_148_746),
    (ResNet9, COLOUR, 10, {}, 6_573_130),
    (ResNet9, COLOUR, 10, {"norm": "group"}, 6_573_130),
    (ResNet18, COLOUR, 10, {}, 11_173_962),
    (ResNet18, COLOUR, 10, {"norm": "group"}, 11_173_962),
    (ResNet18, TINY, 200, {}, 11_271_432),
    (ResNet18, TINY, 1, {}, 11_169_345),
]


@pytest.mark.parametrize(("model", "shape", "num_classes", "settings", "number"), SIZES, ids=str)
def test_parameters_and_outputs(model, shape, num_classes, settings, number):
    module = model(shape, num_classes, **settings)
    assert sum(p.numel() for p in module.parameters()) == number
    assert module(torch.rand(2, *shape)).shape == (2, num_classes)


CNN = "Conv2d {0} MaxPool2d Conv2d {0} MaxPool2d Flatten Linear {0} Linear"
NORMALISED = "Conv2d BatchNorm2d ReLU Conv2d BatchNorm2d ReLU MaxPool2d"
LAYERS = [
    (FashionCNN, {}, CNN.format("Tanh")),
    (MnistCNN, {}, CNN.format("ReLU")),
    (CifarCNN, {}, f"{'Conv2d ReLU MaxPool2d ' * 3}Flatten Linear ReLU Linear ReLU Linear"),
    (CifarCNN, {"hidden": 0}, f"{'Conv2d ReLU MaxPool2d ' * 3}Flatten Linear ReLU Linear"),
    (MLP, {"hidden_layers": 2}, "Flatten Linear ReLU Linear ReLU Linear"),
    (MLP, {"dropout": 0.3}, "Flatten Linear ReLU Dropout(0.3) Linear"),
    (LambCNN, {"dropout": 0.3}, "Conv2d MaxPool2d ReLU Conv2d Dropout2d(0.3) MaxPool2d ReLU Flatten Linear ReLU "
     "Dropout(0.3) Linear"),
    (AttackedCNN, {}, f"{NORMALISED} {NORMALISED} Flatten Linear ReLU Dropout(0.5) Linear ReLU Linear"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "settings", "layers"), LAYERS)
def test_layers_are_those_of_the_papers_in_their_order(model, settings, layers):
    found = [
        type(part).__name__ + (f"({part.p})" if hasattr(part, "p") else "") for part in model(COLOUR, 10, **settings)
    ]
    assert found == layers.split()


@pytest.mark.parametrize("model", [FashionCNN, MnistCNN])
def test_the_initial_values_of_the_public_code(model):
    for layer in model(GREY, 10):
        if isinstance(layer, nn.Conv2d | nn.Linear):
            assert torch.allclose(layer.bias, torch.tensor(1 / layer.bias.numel()))
            fans = (layer.weight.shape[0] + layer.weight.shape[1]) * layer.weight[0, 0].numel()
            noise = 5 / (2 * layer.weight.numel()) ** 0.5  # five deviations of a deviation
            assert layer.weight.std().item() == pytest.approx((2 / fans) ** 0.5, rel=noise)


def sizes_of(module, kind, size=32):
    """[channels, side] of what each part of a kind gives for an image."""
    found = []
    hooks = [part.register_forward_hook(lambda part, given, out: found.append([out.shape[1], out.shape[2]]))
             for part in module.modules() if type(part).__name__ == kind]  # fmt: skip
    module.eval()(torch.rand(1, 3, size, size))
    assert len(hooks) == len(found)
    return found


def test_residual_networks_have_the_sizes_and_shortcuts_of_theirs():
    large, small = ResNet18(COLOUR, 10), ResNet9(COLOUR, 10)
    assert sizes_of(large, "_BasicBlock") == [
        [c, s] for c, s in ((64, 32), (128, 16), (256, 8), (512, 4)) for _ in "12"
    ]
    assert sizes_of(small, "_Residual") == [[128, 16], [512, 4]]
    for block in [part for part in large if type(part).__name__ == "_BasicBlock"]:
        nn.init.zeros_(block.second[1].weight)  # what it adds is 0
        given = torch.randn(2, block.first[0].in_channels, 8, 8)
        assert torch.equal(block(given), block.past(given).relu())
    shortcuts = [isinstance(part.past, nn.Identity) for part in large if hasattr(part, "past")]
    assert shortcuts == [True, True, *[False, True] * 3]  # elsewhere the shape changes
    for block in [part for part in small if type(part).__name__ == "_Residual"]:
        nn.init.zeros_(block.inner[1][1].weight)
        given = torch.randn(2, block.inner[0][0].in_channels, 4, 4)
        assert torch.equal(block(given), given)


def test_an_lstm_begins_and_drops_as_in_the_public_code():
    module = LSTM(50, hidden=40)
    for weight in (module.embedding.weight, module.decoder.weight):
        assert 0.099 < weight.abs().max() <= 0.1 and abs(weight.mean()) < 0.01
    assert (
        not module.decoder.bias.any() and module.lstm.dropout == 0.5 and LSTM(5, hidden=4, layers=1).lstm.dropout == 0
    )
    nn.init.ones_(module.embedding.weight), nn.init.ones_(module.decoder.weight)
    seen = []
    module.lstm.register_forward_pre_hook(lambda part, given: seen.append(given[0]))
    module.decoder.register_forward_pre_hook(lambda part, given: seen.append(given[0]))
    module(torch.zeros(9, 20, dtype=torch.int64))
    for values in seen:  # half of what the LSTM and the decoder get is dropped, the rest doubled
        assert (values == 0).double().mean().item() == pytest.approx(0.5, abs=0.05)
    assert torch.equal(seen[0].unique(), torch.tensor([0.0, 2.0]))


def test_lstm_has_the_papers_size():
    with torch.device("meta"):  # 50 million parameters need no memory to be counted
        module = LSTM(33_278)
    assert sum(p.numel() for p in module.parameters()) == 50_065_078


def test_lstm_state_carries_over():
    module = LSTM(7, hidden=5).eval()
    tokens = torch.randint(7, (6, 3))
    whole, _ = module(tokens)
    first, state = module(tokens[:4])
    second, _ = module(tokens[4:], state)
    assert torch.allclose(torch.cat([first, second]), whole)
    assert whole.shape == (6, 3, 7)


def test_every_model_is_counted_here():
    assert {case[0] for case in SIZES} | {LSTM} == set(known(fedmpi.models, nn.Module).values())


@pytest.mark.parametrize("name", ["batch", "group"])
def test_norms(name):
    module = ResNet9((3, 32, 32), 10, norm=name)
    kinds = {type(layer) for layer in module.modules()}
    assert (nn.BatchNorm2d in kinds) == (name == "batch") and (nn.GroupNorm in kinds) == (name == "group")
    # Group norm has no statistics: nothing to average besides the parameters.
    assert FlatModule(module).num_buffers == (4480 if name == "batch" else 0)


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_flat_lstm_is_the_same_lstm(channels_last):
    """Pointing the parameters elsewhere reaches the LSTM's inner weights too."""
    module = LSTM(7, hidden=5).eval()
    tokens = torch.randint(7, (6, 3))
    flat = FlatModule(module, channels_last=channels_last)
    before, _ = module(tokens)
    flat.point_at(2 * flat.x)
    assert not torch.allclose(module(tokens)[0], before)
    flat.point_at(flat.x)
    assert torch.equal(module(tokens)[0], before)


@pytest.mark.parametrize(
    ("model", "settings", "shape", "message"),
    [
        (CifarCNN, {}, (8,), r"model cifar_cnn takes images of at least 8x8 pixels, not \[8\]"),
        (ResNet18, {"norm": "layer"}, COLOUR, "model.norm = layer: expected one of batch, group"),
        (MLP, {"hidden": 0}, GREY, "hidden = 0"),
        (MLP, {"dropout": 1.5}, GREY, "model MLP: dropout probability has to be between 0 and 1, but got 1.5"),
        (nn.Linear, {"in_features": 3}, GREY, "model Linear: .*out_features"),
    ],
    ids=str,
)
def test_what_a_model_does_not_take_is_one_line(model, settings, shape, message):
    task = LoadedTask()
    task.shape, task.num_classes = shape, 10
    with pytest.raises(UserError, match=message) as error:
        task.build_model(model, settings)
    assert "\n" not in str(error.value)


def test_a_model_of_the_users_own_with_its_arguments(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Sequential):\n"
        "    def __init__(self, shape, num_classes, width: int = 3, names: list[str] = ()):\n"
        "        super().__init__(nn.Flatten(), nn.Linear(shape[-1], width), nn.Linear(width, num_classes))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = read_command_line(["--model", "mine.Net", "--model.width", "5"])
    task = LoadedTask()
    task.shape, task.num_classes = (4,), 2
    assert task.build_model(config.model_class, config.model_settings)[1].out_features == 5
    with pytest.raises(UserError, match="model.width = wide: expected a whole number"):
        read_command_line(["--model", "mine.Net", "--model.width", "wide"])
    with pytest.raises(UserError, match="unknown setting model.depth: model net has width, names"):
        read_command_line(["--model", "mine.Net", "--model.depth", "5"])
