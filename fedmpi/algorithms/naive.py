"""The adaptive method that does not converge, which FAFED repairs."""

import dataclasses

import torch

from fedmpi.algorithms.base import Algorithm, Client, Oracle, Server
from fedmpi.ground.settings import setting


@dataclasses.dataclass(frozen=True)
class NaiveAdaptiveFedAvg(Algorithm):
    """Local adaptive steps with each client's own second moment; only x is averaged.

    Source: Wu et al., "Faster Adaptive Federated Learning", AAAI 2023, Algorithm 1; the paper's
    counter-example (task `counterexample`) shows that it can move away from the minimum forever.
    Paper to code: x_{t,i} -> client.x; v_{t,i} -> client.v; η -> step_size;
    β -> second_moment_decay; v_0 -> v0; ε -> epsilon.
    Differs from the paper: 0/0 is 0, for ε = 0 and a coordinate whose gradient was always zero.
    """

    name = "naive_adaptive_fedavg"

    step_size: float = setting(0.01, "η, step size of the local steps", above=0)
    second_moment_decay: float = setting(0.9, "β, weight of the old second moment", least=0, most=1)
    epsilon: float = setting(1e-8, "ε, added to the root of the second moment; the paper has 0", least=0)
    v0: float = setting(0.0, "v_0, v_i before the first step", least=0)

    clock = "iteration"
    client_rows = ("v",)
    scratch = ("denominator",)

    def client_start(self, client: Client, server: Server) -> None:
        """v_i = v_0."""
        client.v.fill_(self.v0)

    def local_step(self, client: Client, server: Server, oracle: Oracle) -> None:
        """Lines 4-6: v_i <- β v_i + (1-β) g², x_i <- x_i - η g / (√v_i + ε)."""
        g = oracle.gradient(client.x, oracle.draw())
        client.v.mul_(self.second_moment_decay).addcmul_(g, g, value=1 - self.second_moment_decay)
        torch.sqrt(client.v, out=client.denominator).add_(self.epsilon)
        if self.epsilon == 0:
            torch.threshold_(client.denominator, 0, 1)  # 0 becomes 1; g is 0 there too: 0/0 := 0
        client.x.addcdiv_(g, client.denominator, value=-self.eta(client))
