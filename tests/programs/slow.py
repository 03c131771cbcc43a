"""A model whose training steps take long while a file is there, so that a test can reach a run in its middle."""

import os
import time

from fedmpi.models.mlp import MLP

STEP_SECONDS = 0.05


class Slow(MLP):
    """An MLP; each training step sleeps while the file exists that SLOW_WHILE names. Its numbers are the same."""

    def __init__(self, shape, num_classes):
        super().__init__(shape, num_classes, hidden=10)
        self._while = os.environ.get("SLOW_WHILE", "")

    def forward(self, inputs):
        if self.training and self._while and os.path.exists(self._while):
            time.sleep(STEP_SECONDS)
        return super().forward(inputs)
