"""The convolutional networks of the papers, for 28x28 and 32x32 images.

With num_classes=1 a network has one output, the score of two-class problems.
"""

import math

from torch import nn

from fedmpi.ground.errors import UserError


def _fafed_initialise(module):
    """Xavier-normal weights; every bias element is 1 / (number of bias elements). Public FAFED code."""
    for layer in module.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            nn.init.xavier_normal_(layer.weight)
            nn.init.constant_(layer.bias, 1 / layer.bias.numel())


def _flattened(convolutions, shape, width):
    """The layers of `convolutions`, Flatten, and Linear with `width` outputs, for images of `shape`.

    The size is counted: a pass on the device "meta" would import half of torch, which takes as long as its start.
    """
    channels, *sides = shape
    for layer in convolutions:
        if isinstance(layer, nn.Conv2d):
            channels = layer.out_channels
            sides = [(side + 2 * layer.padding[0] - layer.kernel_size[0]) // layer.stride[0] + 1 for side in sides]
        elif isinstance(layer, nn.MaxPool2d):
            sides = [side // layer.kernel_size for side in sides]
    return *convolutions, nn.Flatten(), nn.Linear(channels * math.prod(sides), width)


def require_image(name, shape, smallest):
    """Check that `shape` is [channels, height, width] with sides of at least `smallest` pixels.

    Raises:
        UserError: if it is not.
    """
    if len(shape) != 3 or min(shape[1:]) < smallest:
        raise UserError(f"model {name} takes images of at least {smallest}x{smallest} pixels, not {list(shape)}")


class FashionCNN(nn.Sequential):
    """The FAFED paper's network for Fashion-MNIST: 26,620 parameters for 28x28 images and 10 classes.

    conv 3x3x5 tanh, pool 2, conv 3x3x10 tanh, pool 2, fc 100 tanh, fc num_classes. With one output
    (deep AUC) 25,711 parameters.

    Args:
        shape: [channels, height, width]. num_classes: number of outputs.

    Source: FAFED, Table 4; initialisation as in the public code.
    """

    name = "fashion_cnn"

    def __init__(self, shape, num_classes):
        require_image(self.name, shape, 10)
        convolutions = nn.Sequential(
            nn.Conv2d(shape[0], 5, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(5, 10, 3), nn.Tanh(), nn.MaxPool2d(2)
        )
        super().__init__(*_flattened(convolutions, shape, 100), nn.Tanh(), nn.Linear(100, num_classes))
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
        require_image(self.name, shape, 16)
        convolutions = nn.Sequential(
            nn.Conv2d(shape[0], 20, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2)
        )
        super().__init__(*_flattened(convolutions, shape, 500), nn.ReLU(), nn.Linear(500, num_classes))
        _fafed_initialise(self)


class CifarCNN(nn.Sequential):
    """The FAFED paper's network for CIFAR-10: 581,866 parameters for 32x32 images and 10 classes.

    conv 3x3x16, 32, 64 (padding 1), each ReLU and pool 2; fc 512 ReLU, fc 64 ReLU, fc num_classes.
    With one output (deep AUC) 581,281 parameters. hidden = 0 leaves out the layer of 512 units, which
    gives the three convolutional and two fully connected layers of the Fed-LAMB paper.

    Args:
        shape: [channels, height, width]. num_classes: number of outputs.
        hidden: width of the first fully connected layer; 0 leaves it out.

    Source: FAFED, Table 5; the framework's own initialisation, as in the public code.
    """

    name = "cifar_cnn"

    def __init__(self, shape, num_classes, hidden: int = 512):
        require_image(self.name, shape, 8)
        widths = (shape[0], 16, 32, 64)
        convolutions = nn.Sequential()
        for before, after in zip(widths, widths[1:]):
            convolutions.extend([nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)])
        layers = _flattened(convolutions, shape, hidden or 64)
        narrow = [nn.ReLU(), nn.Linear(hidden, 64)] if hidden else []
        super().__init__(*layers, *narrow, nn.ReLU(), nn.Linear(64, num_classes))


class LambCNN(nn.Sequential):
    """The Fed-LAMB paper's network for MNIST: 21,840 parameters for 28x28 images and 10 classes.

    conv 5x5x10, pool 2, ReLU, conv 5x5x20, channel dropout, pool 2, ReLU, fc 50 ReLU, dropout, fc num_classes.

    Args:
        shape: [channels, height, width]. num_classes: number of outputs.
        dropout: probability of dropping a channel or a hidden unit in training, in [0, 1).
    """

    name = "lamb_cnn"

    def __init__(self, shape, num_classes, dropout: float = 0.5):
        require_image(self.name, shape, 16)
        first = nn.Conv2d(shape[0], 10, 5), nn.MaxPool2d(2), nn.ReLU()
        second = nn.Conv2d(10, 20, 5), nn.Dropout2d(dropout), nn.MaxPool2d(2), nn.ReLU()
        layers = _flattened(nn.Sequential(*first, *second), shape, 50)
        super().__init__(*layers, nn.ReLU(), nn.Dropout(dropout), nn.Linear(50, num_classes))


class AttackedCNN(nn.Sequential):
    """The classifier that the FAFedZO paper attacks: 312,586 parameters for 28x28 images and 10 classes.

    conv 3x3 w, w, pool 2, 2w, 2w, pool 2 (each with batch norm and ReLU, no padding), fc h ReLU
    dropout, fc h ReLU, fc num_classes. For CIFAR-10 width = 64, hidden = 256: 1,148,746 parameters.

    Args:
        shape: [channels, height, width]. num_classes: number of outputs.
        width: w, channels of the first two convolutions. hidden: h.
        dropout: probability of dropping a hidden unit in training, in [0, 1).

    Source: the FAFedZO paper's experiments; sizes as in the public FedZO code.
    """

    name = "attacked_cnn"

    def __init__(self, shape, num_classes, width: int = 32, hidden: int = 200, dropout: float = 0.5):
        require_image(self.name, shape, 16)
        first = *_normalised(shape[0], width), *_normalised(width, width), nn.MaxPool2d(2)
        second = *_normalised(width, 2 * width), *_normalised(2 * width, 2 * width), nn.MaxPool2d(2)
        convolutions = nn.Sequential(*first, *second)
        layers = _flattened(convolutions, shape, hidden)
        head = nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, num_classes)
        super().__init__(*layers, nn.ReLU(), nn.Dropout(dropout), *head)


def _normalised(before, after):
    return nn.Conv2d(before, after, 3), nn.BatchNorm2d(after), nn.ReLU()
