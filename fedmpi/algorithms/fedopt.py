"""Local SGD with an adaptive server, which treats the clients' mean move as a negative gradient."""

import dataclasses
import math
from typing import ClassVar, Protocol

import torch

from fedmpi.algorithms.base import Server
from fedmpi.algorithms.fedavg import FedAvg
from fedmpi.ground.errors import UserError
from fedmpi.ground.settings import setting

CORRECTIONS = ("none", "torch", "keras", "flower")


def correction() -> str:
    """The setting of the classes that have it."""
    return setting(
        "none",
        "Adam's bias correction, t = 1, 2, ... in rounds 0, 1, ...: none; torch, m / (1-β1^t) and v / (1-β2^t); keras, "
        "η √(1-β2^t) / (1-β1^t); flower, as keras with t + 1",
        among=CORRECTIONS,
    )


class Corrected(Protocol):
    """An algorithm with these settings."""

    @property
    def correction(self) -> str: ...
    @property
    def momentum(self) -> float: ...
    @property
    def second_moment_decay(self) -> float: ...


def check_correction(algorithm: Corrected) -> None:
    """Raise UserError if the correction would divide by 0, or make the step 0."""
    if algorithm.correction != "none" and algorithm.second_moment_decay == 1:
        given = f"second_moment_decay = 1: correction {algorithm.correction}"
        raise UserError(f"algorithm.{given} needs a number < 1 (1 - β2^t would be 0)")


def corrections(algorithm: Corrected, round_index: int) -> tuple[float, float, float]:
    """(factor and divisor of the step size, divisor of √v): Adam's bias correction in a round."""
    if algorithm.correction == "none":
        return 1, 1, 1
    t = round_index + (2 if algorithm.correction == "flower" else 1)
    beta1, root = 1 - algorithm.momentum**t, math.sqrt(1 - algorithm.second_moment_decay**t)
    return (1, beta1, root) if algorithm.correction == "torch" else (root, beta1, 1)


@dataclasses.dataclass(frozen=True)
class _FedOpt(FedAvg):
    """The common part: FedAvg's local steps, then one adaptive server step.

    Subclasses define `update_v(server, square)`: it changes server.v by square = Δ² [dim], which it may overwrite,
    and returns the row whose root divides.
    A server step reuses the row of the average: server.x is Δ, then Δ², then the denominator.
    """

    server_step_size: float = setting(0.01, "η, step size of the server", above=0)
    epsilon: float = setting(1e-3, "τ, added to the root of the second moment", above=0)
    momentum: float = setting(0.9, "β1, weight of the old direction", least=0, below=1)
    v0: float | None = setting(None, "second moment before the first round; default: τ²", least=0)

    server_rows: ClassVar[tuple[str, ...]] = ("x_start", "m", "v")
    downlink = ("x",)

    def server_start(self, server: Server) -> None:
        """m = 0, v = τ²."""
        server.x_start.copy_(server.x)
        server.v.fill_(self.epsilon**2 if self.v0 is None else self.v0)

    def server_step(self, server: Server) -> None:
        """m <- β1 m + (1-β1) Δ, then v, then x <- x + η m / (√v + τ), with Adam's bias correction if it is set."""
        delta = server.x.sub_(server.x_start)  # Δ = mean(x_i) - x, downhill
        server.m.lerp_(delta, 1 - self.momentum)
        denominator = torch.sqrt(self.update_v(server, delta.square_()), out=server.x)
        factor, divisor, of_root = self.corrections(server)
        if of_root != 1:
            denominator.div_(of_root)
        if self.offset:
            denominator.add_(self.offset)
        server.x_start.addcdiv_(server.m, denominator, value=self.server_step_size * factor / divisor)
        server.x.copy_(server.x_start)

    def update_v(self, server: Server, square: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def corrections(self, server: Server) -> tuple[float, float, float]:
        """See the function `corrections`."""
        return 1, 1, 1

    @property
    def offset(self) -> float:
        """What is added to the root."""
        return self.epsilon


@dataclasses.dataclass(frozen=True)
class FedAdam(_FedOpt):
    """FedAvg's clients and Adam on the server.

    Source: Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive Federated
    Optimization", ICLR 2021, Algorithm 2.
    Paper to code: x_i -> client.x; x_t -> server.x_start; Δ_t -> delta; m_t, v_t -> server.m, server.v;
    η_l -> step_size; η -> server_step_size; β1 -> momentum; β2 -> second_moment_decay; τ -> epsilon.
    Special cases: β1 = 0, β2 = 1 and η = 2τ is FedAvg; β1 = β2 = 0 moves by η Δ / (|Δ| + τ).

    No bias correction, as in the paper, unless `correction` names one, with t = r + 1 in round r = 0, 1, ...:
        torch   x + η m̂ / (√v̂ + τ), m̂ = m / (1-β1^t), v̂ = v / (1-β2^t): torch.optim.Adam, optax, and so pfl-research,
                NVFlare, fedjax and the public code of FedCAMS, all with v0 = 0.
        keras   x + η √(1-β2^t) / (1-β1^t) m / (√v + τ): keras.optimizers.Adam, with v0 = 0; τ is not corrected.
        flower  as keras, with t = r + 2: Flower's FedAdam, with v0 = 0, which counts rounds from 1 and adds 1.
    """

    second_moment_decay: float = setting(0.99, "β2, weight of the old second moment", least=0, most=1)
    correction: str = correction()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_correction(self)

    def update_v(self, server: Server, square: torch.Tensor) -> torch.Tensor:
        """v <- β2 v + (1-β2) Δ²."""
        return server.v.lerp_(square, 1 - self.second_moment_decay)

    def corrections(self, server: Server) -> tuple[float, float, float]:
        """See the function `corrections`."""
        return corrections(self, server.round_index)


@dataclasses.dataclass(frozen=True)
class FedYogi(FedAdam):
    """FedAvg's clients and Yogi on the server: v changes by (1-β2) Δ², however far it is from Δ².

    Source: Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2.
    Paper to code: as in FedAdam.
    Special case: β1 = 0, β2 = 1 and η = 2τ is FedAvg.
    """

    server_rows = ("x_start", "m", "v", "sign")

    def update_v(self, server: Server, square: torch.Tensor) -> torch.Tensor:
        """v <- v - (1-β2) Δ² sign(v - Δ²), and never below 0."""
        torch.sub(server.v, square, out=server.sign).sign_()
        return server.v.addcmul_(square, server.sign, value=self.second_moment_decay - 1).clamp_(min=0)


@dataclasses.dataclass(frozen=True)
class FedAdagrad(_FedOpt):
    """FedAvg's clients and Adagrad on the server.

    Source: Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2.
    Paper to code: as in FedAdam. The paper's experiments have β1 = 0, the default here.
    Invariant: v = τ² + the sum of Δ² over the rounds.
    """

    momentum: float = setting(0.0, "β1, weight of the old direction", least=0, below=1)

    def update_v(self, server: Server, square: torch.Tensor) -> torch.Tensor:
        """v <- v + Δ²."""
        return server.v.add_(square)


@dataclasses.dataclass(frozen=True)
class FedAMS(FedAdam):
    """FedAvg's clients and AMSGrad on the server: the second moment in the denominator never shrinks.

    Not Fed-AMS, which is `local_amsgrad`.

    Source: Wang, Lin, Chen, "Communication-Efficient Adaptive Federated Learning", ICML 2022,
    Algorithm 1.
    Paper to code: x_i -> client.x; x_t -> server.x_start; m_t, v_t, v̂_t -> server.m, v, v_hat;
    η_l -> step_size; η -> server_step_size; β1 -> momentum; β2 -> second_moment_decay; ε -> epsilon.
    Invariant: v̂ never decreases; with option 1 it is at least ε.
    Special case: option 1 with β1 = 0, β2 = 1 and η = √ε is FedAvg.

    ε of option 1 is compared with v, a square: √ε is the floor of the denominator. The public code is
    option 1 with correction torch, epsilon = 0 and v0 = 0.001 (its max_init). Adam with amsgrad of torch.optim
    and of Keras is option 2 with the correction of that name.
    """

    step_size: float = setting(0.01, "η_l, step size of the local SGD steps", above=0)
    server_step_size: float = setting(1.0, "η, step size of the server", above=0)
    epsilon: float = setting(0.01, "ε, under the root (option 1) or beside it (option 2)", least=0)
    option: int = setting(1, "1: divide by √max(v̂, v, ε); 2: by √max(v̂, v) + ε", among=(1, 2))
    correction: str = correction()
    v0: float = setting(0.0, "v̂ before the first round", least=0)

    server_rows = ("x_start", "m", "v", "v_hat")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epsilon == 0 and self.v0 == 0:
            raise UserError("algorithm.epsilon = 0: expected a number > 0, or algorithm.v0 > 0 beside it")

    def server_start(self, server: Server) -> None:
        """m = v = 0, v̂ = v0."""
        server.x_start.copy_(server.x)
        server.v_hat.fill_(self.v0)

    def update_v(self, server: Server, square: torch.Tensor) -> torch.Tensor:
        """v as Adam's, v̂ <- max(v̂, v, ε) (option 1)."""
        torch.maximum(server.v_hat, super().update_v(server, square), out=server.v_hat)
        return server.v_hat.clamp_(min=self.epsilon) if self.option == 1 else server.v_hat

    @property
    def offset(self) -> float:
        """ε in option 2."""
        return self.epsilon if self.option == 2 else 0
