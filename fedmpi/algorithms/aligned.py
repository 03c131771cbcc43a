"""Adaptive steps of the clients, aligned with the direction in which the server moved in the round before."""

import dataclasses
import math

import torch

from fedmpi.algorithms.base import Algorithm, Client, Oracle, Server
from fedmpi.ground.settings import setting


@dataclasses.dataclass(frozen=True)
class _Aligned(Algorithm):
    """The common part: Δ, the mean local step of the last round divided by -η, which is 0 in the first round."""

    step_size: float = setting(1e-3, "η, step size of the local steps", above=0)

    server_rows = ("x_start", "direction")

    def server_start(self, server: Server) -> None:
        """Keep x of the round's start."""
        server.x_start.copy_(server.x)

    def server_step(self, server: Server) -> None:
        """Δ = (x - mean(x_i)) / (K η), then x = mean(x_i)."""
        torch.sub(server.x_start, server.x, out=server.direction).div_(server.num_steps * self.eta(server))
        server.x_start.copy_(server.x)


@dataclasses.dataclass(frozen=True)
class _AlignedAdam(_Aligned):
    """The common part of those that take Adam's steps with an averaged second moment."""

    momentum: float = setting(0.9, "β1, weight of the old direction", least=0, below=1)
    second_moment_decay: float = setting(0.999, "β2, weight of the old second moment", least=0, below=1)
    epsilon: float = setting(1e-8, "ε, added to the root of the second moment", above=0)

    exchanged = ("x", "v")
    kinds = {"v": "square"}
    scratch = ("m",)
    downlink = ("x", "v", "direction")

    def download(self, client: Client, server: Server) -> None:
        """m = 0; v is the average."""
        client.m.zero_()


@dataclasses.dataclass(frozen=True)
class FedAdamW(_AlignedAdam):
    """AdamW's steps on every client, with the averaged second moment and a pull along the server's last move.

    Source: Liu, Shang, Zhu, Liu, Liu, Liu, "FedAdamW: A Communication-Efficient Optimizer with Convergence and
    Generalization Guarantees for Federated Large Models", AAAI 2026, arXiv:2510.27486, Algorithm 2.
    Paper to code: x_i, v_i -> client.x, client.v; m_i -> client.m; Δ_G -> server.direction; v̄ -> server.v;
    η -> step_size; β1 -> momentum; β2 -> second_moment_decay; ε -> epsilon; α -> alignment; λ -> decay.
    Special case: α = λ = 0 and β2 = 0 with one local step moves by η g / (|g| + ε).

    Differs from the paper: where it prints -λ x in the bracket, weights would grow; here they decay. Its blocks, of
    which only the mean of v is averaged, follow the layers of transformers; here they are the parameter tensors, and
    their means are sent as a row, where the paper's cost is that of FedAvg.
    The authors' code differs from the paper, and form "code" does as it does: m̂ is corrected by 1-β1^t, t counted
    over all rounds as for v̂, although m begins with 0 in every round; and v is averaged value by value. It also clips
    gradients to a norm of 10 (the run's setting clip_norm), and its optimizer begins with v = 0 and t = 0, whatever was
    averaged, in the first round of each of its workers, which is not done here.
    """

    alignment: float = setting(0.5, "α, weight of the server's last direction in a local step", least=0)
    decay: float = setting(0.01, "λ, weight decay beside the adaptive step", least=0)
    form: str = setting(
        "paper",
        "paper: v is averaged as means of parameter tensors, and m is corrected by 1-β1^k, k the step of the round; "
        "code: v value by value, and m by 1-β1^t, t the step of the run",
        among=("paper", "code"),
    )

    def local_step(self, client: Client, server: Server, oracle: Oracle) -> None:
        """x <- x - η (m̂ / (√v̂ + ε) + α Δ + λ x)."""
        g, eta, t = oracle.gradient(client.x, oracle.draw()), self.eta(client), client.iteration
        client.m.lerp_(g, 1 - self.momentum)
        client.v.lerp_(g.square_(), 1 - self.second_moment_decay)
        root = torch.sqrt(client.v, out=g).div_(math.sqrt(1 - self.second_moment_decay**t)).add_(self.epsilon)
        of_m = 1 - self.momentum ** (t if self.form == "code" else client.step_index + 1)
        client.x.mul_(1 - eta * self.decay).add_(server.direction, alpha=-eta * self.alignment)
        client.x.addcdiv_(client.m, root, value=-eta / of_m)

    def upload(self, client: Client, server: Server, oracle: Oracle) -> None:
        """Form "paper": v becomes the mean over its parameter tensor."""
        for block in server.segments if self.form == "paper" else ():
            client.v[block] = client.v[block].mean()


@dataclasses.dataclass(frozen=True)
class FedLADA(_AlignedAdam):
    """Adam's steps on every client with the averaged second moment, amended by the server's last move.

    Source: Sun, Shen, Sun, Ding, Tao, "Efficient Federated Learning via Local Adaptive Amended Optimizer with Linear
    Speedup", 2023, arXiv:2308.00522, as the authors of FedAdamW compute it for comparison.
    Paper to code: x_i, v_i -> client.x, client.v; m_i -> client.m; Δ -> server.direction; η -> step_size;
    β1 -> momentum; β2 -> second_moment_decay; ε -> epsilon; γ -> alignment.
    Special case: γ = 0 with β1 = 0, β2 = 0 and one local step moves by η g / (|g| + ε).

    No bias correction; m begins with 0 in every round, v with the average. That code also adds a weight decay of 0.001
    to the gradient (the run's setting weight_decay) and clips it to a norm of 10 (clip_norm).
    """

    alignment: float = setting(
        0.9, "γ, weight of the server's last direction; the client's own has 1-γ", least=0, most=1
    )

    def local_step(self, client: Client, server: Server, oracle: Oracle) -> None:
        """x <- x - η ((1-γ) m / (√v + ε) + γ Δ)."""
        g, eta = oracle.gradient(client.x, oracle.draw()), self.eta(client)
        client.m.lerp_(g, 1 - self.momentum)
        client.v.lerp_(g.square_(), 1 - self.second_moment_decay)
        root = torch.sqrt(client.v, out=g).add_(self.epsilon)
        client.x.add_(server.direction, alpha=-eta * self.alignment)
        client.x.addcdiv_(client.m, root, value=-eta * (1 - self.alignment))


@dataclasses.dataclass(frozen=True)
class FedMuon(_Aligned):
    """Muon's steps on every client, its momentum averaged with the model, and a pull along the server's last move.

    Source: Liu, Shang, Zhou, Liu, Liu, Liu, "FedMuon: Accelerating Federated Learning with Matrix Orthogonalization",
    2025, arXiv:2510.27403, Algorithm 2; five Newton-Schulz steps with the numbers of torch.optim.Muon.
    Paper to code: x_i, M_i -> client.x, client.m; Δ_G -> server.direction; M̄ -> server.m; η -> step_size;
    β -> momentum; α -> alignment.

    A parameter of two or more dimensions is a matrix of as many rows as its first dimension has entries. As in the
    authors' code, its orthogonal direction is multiplied by √max(1, rows / columns) and by matrix_factor, and
    parameters of one dimension take Adam's steps, whose moments begin with 0 in every round.
    Differs from the code: no Nesterov step, no weight decay, and the row's own type instead of bfloat16. That code also
    clips gradients to a norm of 10 (the run's setting clip_norm).
    """

    momentum: float = setting(0.95, "β, weight of the old M", least=0, below=1)
    alignment: float = setting(
        0.5, "α, weight of the server's last direction; the client's own has 1-α", least=0, most=1
    )
    matrix_factor: float = setting(10.0, "step size of matrices divided by η, which is that of the others", above=0)
    first_moment_decay: float = setting(0.9, "β1 of Adam's steps of one-dimensional parameters", least=0, below=1)
    second_moment_decay: float = setting(0.95, "β2 of these steps", least=0, below=1)
    epsilon: float = setting(1e-8, "ε of these steps, added to the root of the second moment", above=0)

    exchanged = ("x", "m")
    kinds = {"m": "gradient"}
    scratch = ("v",)
    downlink = ("x", "m", "direction")

    def download(self, client: Client, server: Server) -> None:
        """M is the average; Adam's moments are 0."""
        client.v.zero_()
        for part, shape in zip(server.segments, server.shapes, strict=True):
            if len(shape) < 2:
                client.m[part].zero_()

    def local_step(self, client: Client, server: Server, oracle: Oracle) -> None:
        """x <- x - η ((1-α) O + α Δ): O is M <- β M + g made orthogonal, or Adam's direction."""
        g, eta = oracle.gradient(client.x, oracle.draw()), self.eta(client)
        client.x.add_(server.direction, alpha=-eta * self.alignment)
        for part, shape in zip(server.segments, server.shapes, strict=True):
            make = self._orthogonal if len(shape) > 1 else self._adam
            direction = make(client, part, g[part], shape)
            client.x[part].add_(direction, alpha=-eta * (1 - self.alignment))

    def _orthogonal(self, client: Client, part: slice, g: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        matrix = client.m[part].mul_(self.momentum).add_(g).view(shape[0], -1)
        rows, columns = matrix.shape
        return orthogonal(matrix).mul_(self.matrix_factor * math.sqrt(max(1, rows / columns))).view(-1)

    def _adam(self, client: Client, part: slice, g: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        m, v, k = client.m[part], client.v[part], client.step_index + 1
        m.lerp_(g, 1 - self.first_moment_decay)
        v.lerp_(g.square_(), 1 - self.second_moment_decay)
        root = torch.sqrt(v, out=g).div_(math.sqrt(1 - self.second_moment_decay**k)).add_(self.epsilon)
        return torch.div(m, root, out=g).div_(1 - self.first_moment_decay**k)


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """[rows, columns], new: the matrix with singular values near 1, by five Newton-Schulz steps.

    Source: Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024.
    """
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if is_tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        square = torch.addmm(square, square, square, beta=-4.7750, alpha=2.0315)
        x = torch.addmm(x, square, x, beta=3.4445)
    return (x.mT if is_tall else x).contiguous()
