"""What the benchmark trains: fixed workloads on random images, so that nothing is read from a disk."""

import dataclasses

import torch
from torch import nn
from torch.nn import functional

from fedmpi.data.samples import Samples
from fedmpi.settings import setting
from fedmpi.streams import generator
from fedmpi.tasks.base import LoadedTask, Task

HERE = "fedmpi.bench.workloads"


@dataclasses.dataclass(frozen=True)
class RandomImages(Task):
    """Ten classes of 28x28 grey noise: the work of real images, without the images."""

    samples: int = setting(600, "per client", least=1)

    def load(self, place, partition):
        return LoadedRandomImages(self, place)


class LoadedRandomImages(LoadedTask):
    """See `LoadedTask`; there is nothing to evaluate."""

    shape, num_classes = (1, 28, 28), 10
    random_batches = random_loss = False

    def __init__(self, settings, place):
        self.samples = {}
        for client in place.clients:
            draw = generator(place.seed, "random images", client)
            images = draw.integers(0, 256, (settings.samples, 28, 28), dtype="uint8")
            labels = draw.integers(0, 10, settings.samples)
            self.samples[client] = Samples.of(images, labels, (0.5,), (0.3,), place)

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
    """784-first-second-10 with ReLU; 11,626,506 parameters as it stands."""

    def __init__(self, shape, num_classes, first: int = 4096, second: int = 2048):
        super().__init__(
            nn.Flatten(), nn.Linear(shape[1] * shape[2], first), nn.ReLU(),
            nn.Linear(first, second), nn.ReLU(), nn.Linear(second, num_classes),
        )  # fmt: skip


class Bowl(nn.Module):
    """A vector of `dim` parameters and hardly any work: rounds of it are communication."""

    def __init__(self, dim: int = 1000):
        super().__init__()
        self.x = nn.Parameter(torch.zeros(dim))

    def forward(self, inputs):
        return self.x[:10].expand(len(inputs), 10)


# The steps are small: what matters here is that nothing diverges.
# name -> (words of a fedmpi.train command line, further words where it must be quick, what it is)
WORKLOADS = {
    "fashion": (
        "--model fashion_cnn --task.samples 30000 --algorithm.step_size 1e-3 --local_steps 10 --batch_size 50",
        "--task.samples 600",
        "the FAFED paper's CNN for Fashion-MNIST (26,620 parameters), q = 10, batch 50, a client per rank",
    ),
    "cnn": (
        f"--model {HERE}.ConvNet --algorithm.step_size 1e-3 --clients 4 --local_steps 10 --batch_size 50",
        "--local_steps 2 --batch_size 20",
        "CNN of 1.7M parameters, N = 4, q = 10, batch 50: gradients dominate",
    ),
    "mlp": (
        f"--model {HERE}.WideMLP --algorithm.step_size 1e-3 --clients 4 --local_steps 1 --batch_size 8",
        "",
        "MLP 784-4096-2048-10 (11.6M parameters), N = 4, q = 1, batch 8: memory traffic dominates",
    ),
    "many_clients": (
        "--model lamb_cnn --model.dropout 0 --algorithm.step_size 1e-3 --clients 50 --local_steps 5 --batch_size 32",
        "--clients 10 --local_steps 2",
        "small CNN (21,840 parameters), N = 50, q = 5, batch 32: what goes on around the gradients counts",
    ),
}


def words_of(workload, quick=False):
    """The command line of a workload; `quick`: of a smaller one of its kind."""
    words, fewer, _ = WORKLOADS[workload]
    return f"--task {HERE}.RandomImages {words} {fewer if quick else ''}".split()
