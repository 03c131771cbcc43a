"""Residual networks for small images: stem 3x3 with stride 1, without max-pool after it."""

from torch import nn
from torch.nn import functional

from fedmpi.ground.errors import UserError
from fedmpi.models.cnn import require_image

GROUPS = 32  # of group norm, as in Wu and He 2018


def _norm(kind, channels):
    if kind not in ("batch", "group"):
        raise UserError(f"model.norm = {kind}: expected one of batch, group")
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(GROUPS, channels)


def _convolution(norm, before, after, stride=1):
    """conv 3x3 without bias, then norm."""
    return nn.Sequential(nn.Conv2d(before, after, 3, stride, padding=1, bias=False), _norm(norm, after))


class _BasicBlock(nn.Module):
    """Two convolutions and a skip connection: conv 1x1 if the shape changes, else the identity."""

    def __init__(self, norm, before, after, stride):
        super().__init__()
        self.first, self.second = _convolution(norm, before, after, stride), _convolution(norm, after, after)
        self.past = nn.Identity()
        if stride != 1 or before != after:
            self.past = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), _norm(norm, after))

    def forward(self, images):
        inner = self.second(functional.relu(self.first(images)))
        return functional.relu(inner + self.past(images))


class ResNet18(nn.Sequential):
    """ResNet-18 for 32x32 and 64x64 images: 11,173,962 parameters for 3 channels and 10 classes.

    Args:
        shape: [channels, height, width]. num_classes: number of outputs.
        norm: batch, as in the papers, or group, which has no running statistics, so none that differ between clients.

    Source: He et al. 2016, with the stem for small images that CIFAR-10 experiments use.
    """

    def __init__(self, shape, num_classes, norm: str = "batch"):
        require_image("resnet18", shape, 8)
        blocks, before = [], 64
        for after, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            blocks += [_BasicBlock(norm, before, after, stride), _BasicBlock(norm, after, after, 1)]
            before = after
        super().__init__(
            _convolution(norm, shape[0], 64),
            nn.ReLU(),
            *blocks,
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(512, num_classes),
        )


class _Residual(nn.Module):
    """x + inner(x)."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, images):
        return images + self.inner(images)


class ResNet9(nn.Sequential):
    """ResNet-9 for 32x32 images: 6,573,130 parameters for 3 channels and 10 classes.

    conv 64; conv 128, pool, residual of two; conv 256, pool; conv 512, pool, residual of two; max-pool,
    fc num_classes. Every convolution is 3x3 with norm and ReLU.

    Args:
        shape: [channels, height, width]. num_classes: number of outputs.
        norm: batch, as in the papers, or group.

    Source: D. Page's network for DAWNBench; the papers name ResNet-9 without sizes.
    """

    def __init__(self, shape, num_classes, norm: str = "batch"):
        require_image("resnet9", shape, 8)

        def conv(before, after):
            return nn.Sequential(*_convolution(norm, before, after), nn.ReLU())

        super().__init__(
            conv(shape[0], 64),
            conv(64, 128),
            nn.MaxPool2d(2),
            _Residual(nn.Sequential(conv(128, 128), conv(128, 128))),
            conv(128, 256),
            nn.MaxPool2d(2),
            conv(256, 512),
            nn.MaxPool2d(2),
            _Residual(nn.Sequential(conv(512, 512), conv(512, 512))),
            nn.AdaptiveMaxPool2d(1),
            nn.Flatten(),
            nn.Linear(512, num_classes),
        )
