"""What the benchmark trains: fixed workloads on random images, so that it needs no data files."""

import dataclasses

from torch import nn
from torch.nn import functional

from fedmpi.data.samples import Samples
from fedmpi.ground.settings import setting
from fedmpi.ground.streams import generator
from fedmpi.tasks.base import BaseTask, LoadedTask

HERE = "fedmpi.cli.bench.workloads"
RANDOM_IMAGES = f"{HERE}.RandomImages"


@dataclasses.dataclass(frozen=True)
class RandomImages(BaseTask):
    """Ten classes of random 28x28 grey images: as much work as real images."""

    samples: int = setting(600, "per client", least=1)

    def load(self, context, partition):
        return LoadedRandomImages(self, context)


class LoadedRandomImages(LoadedTask):
    """This rank's random images; there is no test set."""

    shape, num_classes = (1, 28, 28), 10
    random_batches = random_loss = False

    def __init__(self, settings, context):
        self.samples = {}
        for client in context.clients:
            draw = generator(context.seed, "random images", client)
            images = draw.integers(0, 256, (settings.samples, 28, 28), dtype="uint8")
            labels = draw.integers(0, 10, settings.samples)
            self.samples[client] = Samples.from_arrays(images, labels, (0.5,), (0.3,), context)

    def num_samples(self, client):
        return self.samples[client].num

    def batch(self, client, indices):
        return self.samples[client].at(indices)

    def loss(self, module, batch):
        inputs, labels = batch
        return functional.cross_entropy(module(inputs), labels)


class ConvNet(nn.Sequential):
    """1,663,370 parameters: conv 5x5x32, pool, conv 5x5x64, pool, fc 512, fc 10 (McMahan et al. 2017)."""

    def __init__(self, shape, num_classes):
        super().__init__(
            nn.Conv2d(shape[0], 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(64 * (shape[1] // 4) * (shape[2] // 4), 512), nn.ReLU(),
            nn.Linear(512, num_classes),
        )  # fmt: skip


class WideMLP(nn.Sequential):
    """784-first-second-10 with ReLU; 11,626,506 parameters by default."""

    def __init__(self, shape, num_classes, first: int = 4096, second: int = 2048):
        super().__init__(
            nn.Flatten(), nn.Linear(shape[1] * shape[2], first), nn.ReLU(),
            nn.Linear(first, second), nn.ReLU(), nn.Linear(second, num_classes),
        )  # fmt: skip


class AdaptedMLP(WideMLP):
    """A frozen `WideMLP` with two trained factors of rank `adapter_rank` beside each layer: 837,248 parameters."""

    def __init__(self, shape, num_classes, adapter_rank: int = 64):
        super().__init__(shape, num_classes)
        self.requires_grad_(False)
        for place, layer in enumerate(self):
            if isinstance(layer, nn.Linear):
                self[place] = Adapted(layer, adapter_rank)


class Adapted(nn.Module):
    """A layer plus the product of two factors, as LoRA has it."""

    def __init__(self, layer, adapter_rank):
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, adapter_rank, bias=False)
        self.up = nn.Linear(adapter_rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, inputs):
        return self.layer(inputs) + self.up(self.down(inputs))


@dataclasses.dataclass(frozen=True)
class Workload:
    """A training job of fixed size.

    Attributes:
        arguments: of fedmpi.train; step sizes are small so that nothing diverges.
        quick: further arguments that make it small.
        description: for the tables.
    """

    arguments: str
    quick: str
    description: str


WORKLOADS = {
    "fashion": Workload(
        "--model fashion_cnn --task.samples 30000 --algorithm.step_size 1e-3 --local_steps 10 --batch_size 50",
        "--task.samples 600",
        "the FAFED paper's CNN for Fashion-MNIST (26,620 parameters), q = 10, batch 50, a client per rank",
    ),
    "cnn": Workload(
        f"--model {HERE}.ConvNet --algorithm.step_size 1e-3 --clients 4 --local_steps 10 --batch_size 50",
        "--local_steps 2 --batch_size 20",
        "CNN of 1.7M parameters, N = 4, q = 10, batch 50: gradients dominate",
    ),
    "mlp": Workload(
        f"--model {HERE}.WideMLP --algorithm.step_size 1e-3 --clients 4 --local_steps 1 --batch_size 8",
        "",
        "MLP 784-4096-2048-10 (11.6M parameters), N = 4, q = 1, batch 8: memory traffic dominates",
    ),
    "adapter": Workload(
        f"--model {HERE}.AdaptedMLP --algorithm.step_size 1e-3 --clients 4 --local_steps 1 --batch_size 8",
        "",
        "the same MLP, frozen, with adapters of rank 64 (0.84M parameters), N = 4, q = 1, batch 8",
    ),
    "many_clients": Workload(
        "--model lamb_cnn --model.dropout 0 --algorithm.step_size 1e-3 --clients 50 --local_steps 5 --batch_size 32",
        "--clients 10 --local_steps 2",
        "small CNN (21,840 parameters), N = 50, q = 5, batch 32: the cost of changing clients shows",
    ),
}


def arguments_of(workload, quick=False):
    """The fedmpi.train arguments of a workload, as a list; `quick`: of its smaller version."""
    chosen = WORKLOADS[workload]
    return f"--task {RANDOM_IMAGES} {chosen.arguments} {chosen.quick if quick else ''}".split()
