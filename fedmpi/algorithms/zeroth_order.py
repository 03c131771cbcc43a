"""Methods that use values of the loss only: first-order methods on the two-point oracle."""

import dataclasses

from fedmpi.algorithms.fafed import FAFED
from fedmpi.algorithms.fedavg import FedAvg
from fedmpi.ground.settings import setting


@dataclasses.dataclass(frozen=True)
class FedZO(FedAvg):
    """FedAvg on two-point estimates: q zeroth-order steps on every client, then the average.

    Source: Fang, Yu, Jiang, Shi, Jones, Zhou, "Communication-Efficient Stochastic Zeroth-Order
    Optimization for Federated Learning", IEEE TSP 2022, Algorithm 1.
    Paper to code: x_i -> client.x; η -> step_size; H -> q, the local steps of a round; μ, b2 ->
    smoothing and directions of the oracle; b1 -> batch_size.
    Special case: with d orthonormal directions and linear losses it is FedAvg.
    """

    oracle = "two_point"


@dataclasses.dataclass(frozen=True)
class FAFedZO(FAFED):
    """FAFED on two-point estimates; the two estimates of a step share minibatch and directions.

    Source: Lu, Gao, Zhang, Xu, "FAFedZO: Faster Zero-Order Adaptive Federated Learning Algorithm",
    2025, Algorithm 1.
    Paper to code: Ξ -> client.x; n, ι -> client.m, client.v; K_t -> server.A; χ_t -> fresh_weight;
    ϱ -> second_moment_decay; ρ -> epsilon; p (or E) -> q, the local steps of a round; μ, b2 ->
    smoothing and directions of the oracle; b1 -> batch_size.
    Special case: with d orthonormal directions and linear losses it is FAFED.
    Differs from the paper: its line 8 is left out, because its result is overwritten before it is used;
    lines 17-19 restate line 14, so the average is applied once. Algorithm 1 does not define partial
    participation: absent clients neither compute nor count in the average, and begin their next round
    from the averaged Ξ, n and ι, with Ξ_{t-1} = Ξ_t. Its rate is claimed: two steps of its
    proof fail (`fedmpi.theory`).
    """

    step_size: float = setting(0.1, "η_t, step size of every move", above=0)  # the paper's, for both methods
    # Not in the paper: on MNIST (50 clients, E = 5) the objective rose again with FAFED's 0.1, but not with 0.5.
    fresh_weight: float = setting(0.5, "χ_t, weight of the fresh estimate in m", least=0, most=1)

    oracle = "two_point"
