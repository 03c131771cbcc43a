"""Fully connected networks."""

import math

from torch import nn


class MLP(nn.Sequential):
    """Two fully connected layers with ReLU and dropout between them.

    With 784 inputs and hidden = 200 it is the MLP 784-200-10 of the Fed-LAMB paper (159,010
    parameters; dropout 0.5 there).

    Args:
        shape: of one input; flattened.
        num_classes: number of outputs.
        hidden: width of the hidden layer.
        dropout: probability of dropping a hidden unit in training, in [0, 1).
    """

    def __init__(self, shape, num_classes, hidden: int = 200, dropout: float = 0.0):
        super().__init__(
            nn.Flatten(),
            nn.Linear(math.prod(shape), hidden),
            nn.ReLU(),
            *([nn.Dropout(dropout)] if dropout else []),
            nn.Linear(hidden, num_classes),
        )
