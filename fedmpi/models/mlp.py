"""Fully connected networks."""

import math

from torch import nn

from fedmpi.ground.errors import UserError


class MLP(nn.Sequential):
    """Fully connected layers with ReLU, and dropout after each hidden layer.

    With hidden = 200 it is, for MNIST, the MLP 784-200-10 of the Fed-LAMB paper (159,010 parameters;
    dropout 0.5 there). The momentum paper has a two-layer net for MNIST and a three-layer MLP for CIFAR-10
    and does not give their widths; 784-200-10, and 3072-200-200-10 with hidden_layers = 2, are our choice.

    Args:
        shape: of one input, which is flattened.
        num_classes: number of outputs.
        hidden: width of the hidden layers, >= 1. hidden_layers: their number, >= 1.
        dropout: probability of dropping a hidden unit in training, in [0, 1).
    """

    def __init__(self, shape, num_classes, hidden: int = 200, dropout: float = 0.0, hidden_layers: int = 1):
        if hidden < 1 or hidden_layers < 1:
            raise UserError(f"model mlp: hidden = {hidden}, hidden_layers = {hidden_layers}: expected numbers >= 1")
        layers, width = [], math.prod(shape)
        for _ in range(hidden_layers):
            layers += [nn.Linear(width, hidden), nn.ReLU(), *([nn.Dropout(dropout)] if dropout else [])]
            width = hidden
        super().__init__(nn.Flatten(), *layers, nn.Linear(width, num_classes))
