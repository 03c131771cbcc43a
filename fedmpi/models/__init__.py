"""Networks: a model is a `torch.nn.Module` whose constructor takes shape, num_classes and its settings."""

import sys

from torch import nn

from fedmpi.ground.registry import find


def find_model(name):
    """The model class with this name or dotted path; see `fedmpi.ground.registry.find`."""
    return find("model", name, sys.modules[__name__], nn.Module)
