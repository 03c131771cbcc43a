"""Local SGD with an adaptive server, which treats the clients' mean move as a negative gradient."""

import dataclasses
import math

import torch

from fedmpi.algorithms.fedavg import FedAvg
from fedmpi.errors import UserError
from fedmpi.settings import setting


@dataclasses.dataclass(frozen=True)
class _FedOpt(FedAvg):
    """The common part of FedAdam, FedYogi and FedAdagrad: FedAvg's local steps, then one adaptive server step.

    Subclasses define `update_v(server, square)`: it changes server.v by square = Δ² [dim], which it may overwrite.
    A server step reuses the row of the average: server.x is Δ, then Δ², then the denominator.
    """

    server_step_size: float = setting(0.01, "η, step size of the server", above=0)
    epsilon: float = setting(1e-3, "τ, added to the root of the second moment", above=0)
    momentum: float = setting(0.9, "β1, weight of the old direction", least=0, below=1)
    v0: float | None = setting(None, "second moment before the first round; default: τ²", least=0)

    server_rows = ("x_start", "m", "v")
    downlink = ("x",)

    def server_start(self, server):
        """m = 0, v = τ²."""
        server.x_start.copy_(server.x)
        server.v.fill_(self.epsilon**2 if self.v0 is None else self.v0)

    def server_step(self, server):
        """m <- β1 m + (1-β1) Δ, then v, then x <- x + η m / (√v + τ)."""
        delta = server.x.sub_(server.x_start)  # Δ = mean(x_i) - x, downhill
        server.m.lerp_(delta, 1 - self.momentum)
        self.update_v(server, delta.square_())
        denominator = torch.sqrt(server.v, out=server.x).add_(self.epsilon)
        server.x_start.addcdiv_(server.m, denominator, value=self.rate(server))
        server.x.copy_(server.x_start)

    def rate(self, server):
        """The server's step size of this round: η."""
        return self.server_step_size


@dataclasses.dataclass(frozen=True)
class FedAdam(_FedOpt):
    """FedAvg's clients and Adam on the server.

    Source: Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive Federated
    Optimization", ICLR 2021, Algorithm 2.
    Paper to code: x_i -> client.x; x_t -> server.x_start; Δ_t -> delta; m_t, v_t -> server.m, server.v;
    η_l -> step_size; η -> server_step_size; β1 -> momentum; β2 -> second_moment_decay; τ -> epsilon.
    Special cases: β1 = 0, β2 = 1 and η = 2τ is FedAvg; β1 = β2 = 0 moves by η Δ / (|Δ| + τ).

    No bias correction, as in the paper. bias_correction is Adam's, with exponent r + 1 in round r = 0, 1, ...;
    Flower's FedAdam, which starts from v0 = 0, has exponent r + 2 instead, because it counts rounds from 1
    and adds 1.
    """

    second_moment_decay: float = setting(0.99, "β2, weight of the old second moment", least=0, most=1)
    bias_correction: bool = setting(False, "Adam's factor √(1-β2^(r+1)) / (1-β1^(r+1)) of η in round r = 0, 1, ...")

    def __post_init__(self):
        super().__post_init__()
        if self.bias_correction and self.second_moment_decay == 1:
            raise UserError("algorithm.second_moment_decay = 1: bias_correction needs a number < 1 (the factor is 0)")

    def update_v(self, server, square):
        """v <- β2 v + (1-β2) Δ²."""
        server.v.lerp_(square, 1 - self.second_moment_decay)

    def rate(self, server):
        """η, with Adam's correction if bias_correction is set."""
        if not self.bias_correction:
            return self.server_step_size
        t = server.round_index + 1
        return self.server_step_size * math.sqrt(1 - self.second_moment_decay**t) / (1 - self.momentum**t)


@dataclasses.dataclass(frozen=True)
class FedYogi(_FedOpt):
    """FedAvg's clients and Yogi on the server: v changes by (1-β2) Δ², however far it is from Δ².

    Source: Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2.
    Paper to code: as in FedAdam.
    Special case: β1 = 0, β2 = 1 and η = 2τ is FedAvg.
    """

    second_moment_decay: float = setting(0.99, "β2, weight of the old second moment", least=0, most=1)

    server_rows = ("x_start", "m", "v", "sign")

    def update_v(self, server, square):
        """v <- v - (1-β2) Δ² sign(v - Δ²), and never below 0."""
        torch.sub(server.v, square, out=server.sign).sign_()
        server.v.addcmul_(square, server.sign, value=self.second_moment_decay - 1).clamp_(min=0)


@dataclasses.dataclass(frozen=True)
class FedAdagrad(_FedOpt):
    """FedAvg's clients and Adagrad on the server.

    Source: Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2.
    Paper to code: as in FedAdam. The paper's experiments have β1 = 0, the default here.
    Invariant: v = τ² + the sum of Δ² over the rounds.
    """

    momentum: float = setting(0.0, "β1, weight of the old direction", least=0, below=1)

    def update_v(self, server, square):
        """v <- v + Δ²."""
        server.v.add_(square)


@dataclasses.dataclass(frozen=True)
class FedAMS(FedAvg):
    """FedAvg's clients and AMSGrad on the server: the second moment in the denominator never shrinks.

    Not Fed-AMS, which is `local_amsgrad`.

    Source: Wang, Lin, Chen, "Communication-Efficient Adaptive Federated Learning", ICML 2022,
    Algorithm 1.
    Paper to code: x_i -> client.x; x_t -> server.x_start; m_t, v_t, v̂_t -> server.m, v, v_hat;
    η_l -> step_size; η -> server_step_size; β1 -> momentum; β2 -> second_moment_decay; ε -> epsilon.
    Invariant: v̂ never decreases; with option 1 it is at least ε.
    Special case: option 1 with β1 = 0, β2 = 1 and η = √ε is FedAvg.

    ε of option 1 is compared with v, a square: √ε is the floor of the denominator. The public code is
    option 1 with bias_correction, epsilon = 0 and v0 = 0.001 (its max_init).
    """

    step_size: float = setting(0.01, "η_l, step size of the local SGD steps", above=0)
    server_step_size: float = setting(1.0, "η, step size of the server", above=0)
    momentum: float = setting(0.9, "β1, weight of the old direction", least=0, below=1)
    second_moment_decay: float = setting(0.99, "β2, weight of the old second moment", least=0, most=1)
    epsilon: float = setting(0.01, "ε, under the root (option 1) or beside it (option 2)", least=0)
    option: int = setting(1, "1: divide by √max(v̂, v, ε); 2: by √max(v̂, v) + ε", among=(1, 2))
    bias_correction: bool = setting(False, "Adam's corrections m / (1-β1^t) and √v̂ / √(1-β2^t), t = 1, 2, ...")
    v0: float = setting(0.0, "v̂ before the first round", least=0)

    server_rows = ("x_start", "m", "v", "v_hat")
    downlink = ("x",)

    def __post_init__(self):
        super().__post_init__()
        if self.epsilon == 0 and self.v0 == 0:
            raise UserError("algorithm.epsilon = 0: expected a number > 0, or algorithm.v0 > 0 beside it")
        if self.bias_correction and self.second_moment_decay == 1:
            raise UserError("algorithm.second_moment_decay = 1: bias_correction needs a number < 1 (it divides by 0)")

    def server_start(self, server):
        """m = v = 0, v̂ = v0."""
        server.x_start.copy_(server.x)
        server.v_hat.fill_(self.v0)

    def server_step(self, server):
        """m and v as Adam's, v̂ <- max(v̂, v, ε), x <- x + η m / √v̂ (option 1)."""
        delta = server.x.sub_(server.x_start)  # Δ = mean(x_i) - x, downhill
        server.m.lerp_(delta, 1 - self.momentum)
        server.v.lerp_(delta.square_(), 1 - self.second_moment_decay)
        torch.maximum(server.v_hat, server.v, out=server.v_hat)
        if self.option == 1:
            server.v_hat.clamp_(min=self.epsilon)
        denominator = torch.sqrt(server.v_hat, out=server.x)
        rate = self.server_step_size
        if self.bias_correction:
            t = server.round_index + 1
            rate /= 1 - self.momentum**t
            denominator.div_(math.sqrt(1 - self.second_moment_decay**t))
        if self.option == 2:
            denominator.add_(self.epsilon)
        server.x_start.addcdiv_(server.m, denominator, value=rate)
        server.x.copy_(server.x_start)
