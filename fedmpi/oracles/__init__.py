"""How a client answers "the gradient of f_i at z on sample ξ".

An algorithm draws a sample, `xi = oracle.draw()`, and asks for gradients on it at any vectors. A
sample fixes the minibatch and the random stream (dropout masks, directions of finite differences),
so two gradients on the same sample differ only by the point. The vectors that an oracle returns are
the algorithm's to overwrite, until its next call.

Every oracle negates the block in which a min-max problem ascends: what it returns is
(∇_θ f_i, -∇_w f_i), so every minimisation algorithm runs on a min-max problem as it is.

How gradients are computed is a choice of its own (``--oracle autograd`` or ``--oracle two_point``),
open to every algorithm and task.
"""

from fedmpi.ground.generators import seed_noise
from fedmpi.oracles.autograd import AutogradOracle
from fedmpi.oracles.autograd_kind import Autograd
from fedmpi.oracles.base import LocalObjective, Oracle, Sample
from fedmpi.oracles.functions import FunctionOracle, LossFunctionOracle
from fedmpi.oracles.kind import OracleKind
from fedmpi.oracles.module import ModuleOracle
from fedmpi.oracles.two_point import TwoPoint, TwoPointOracle

__all__ = [
    "Autograd",
    "AutogradOracle",
    "FunctionOracle",
    "LossFunctionOracle",
    "LocalObjective",
    "ModuleOracle",
    "Oracle",
    "OracleKind",
    "Sample",
    "TwoPoint",
    "TwoPointOracle",
    "seed_noise",
]
