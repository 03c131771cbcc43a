"""The convolutional networks of the FAFED paper (its Tables 3 and 4)."""

import torch
from torch import nn

from fedmpi.errors import UserError


def _fafed_initialise(module):
    """Xavier-normal weights; every bias element is 1 / (number of bias elements). Public FAFED code."""
    for layer in module.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            nn.init.xavier_normal_(layer.weight)
            nn.init.constant_(layer.bias, 1 / layer.bias.numel())


def _flat_size(convolutions, shape):
    """Number of features that `convolutions` make of one image of `shape` [channels, height, width]."""
    with torch.no_grad():
        return convolutions(torch.zeros(1, *shape)).numel()


def _require_image(name, shape, smallest):
    if len(shape) != 3 or min(shape[1:]) < smallest:
        raise UserError(f"model {name} takes images of at least {smallest}x{smallest} pixels, not {list(shape)}")


class FashionCNN(nn.Sequential):
    """The FAFED paper's network for Fashion-MNIST: 26,620 parameters for 28x28 images and 10 classes.

    conv 3x3x5 tanh, pool 2, conv 3x3x10 tanh, pool 2, fc 100 tanh, fc num_classes.

    Args:
        shape: [channels, height, width]. num_classes: number of outputs.

    Source: FAFED, Table 4; initialisation as in the public code.
    """

    name = "fashion_cnn"

    def __init__(self, shape, num_classes):
        _require_image(self.name, shape, 10)
        convolutions = nn.Sequential(
            nn.Conv2d(shape[0], 5, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(5, 10, 3), nn.Tanh(), nn.MaxPool2d(2)
        )
        super().__init__(
            *convolutions,
            nn.Flatten(),
            nn.Linear(_flat_size(convolutions, shape), 100),
            nn.Tanh(),
            nn.Linear(100, num_classes),
        )
        _fafed_initialise(self)


class MnistCNN(nn.Sequential):
    """The FAFED paper's network for MNIST: 431,080 parameters for 28x28 images and 10 classes.

    conv 5x5x20 ReLU, pool 2, conv 5x5x50 ReLU, pool 2, fc 500 ReLU, fc num_classes.

    Args:
        shape: [channels, height, width]. num_classes: number of outputs.

    Source: FAFED, Table 3; initialisation as in the public code.
    """

    name = "mnist_cnn"

    def __init__(self, shape, num_classes):
        _require_image(self.name, shape, 16)
        convolutions = nn.Sequential(
            nn.Conv2d(shape[0], 20, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2)
        )
        super().__init__(
            *convolutions,
            nn.Flatten(),
            nn.Linear(_flat_size(convolutions, shape), 500),
            nn.ReLU(),
            nn.Linear(500, num_classes),
        )
        _fafed_initialise(self)
