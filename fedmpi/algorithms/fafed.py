"""FAFED: adaptive steps, scaled by one matrix that all clients share."""

import dataclasses
import functools
import types

import torch

from fedmpi.algorithms.base import Algorithm
from fedmpi.errors import UserError
from fedmpi.settings import setting


@dataclasses.dataclass(frozen=True)
class FAFED(Algorithm):
    """Variance-reduced momentum under one shared adaptive matrix; x, m and v averaged every q steps.

    Source: Wu, Huang, Hu, Huang, "Faster Adaptive Federated Learning", AAAI 2023, Algorithm 2.
    Paper to code: x_{t,i} -> client.x; x_{t-1,i} -> client.x_prev; m_{t,i}, v_{t,i} -> client.m,
    client.v; A_t (diagonal) -> server.A; η_t -> step_size; α_t -> fresh_weight;
    β -> second_moment_decay; ρ -> epsilon.
    Invariant: mean x_{t+1} = mean x_t - η mean m_t / A_t at every t, averaged or not.
    Special cases: A = 1 at all times is STEM; one client with q = 1 is adaptive STORM; β = 1 keeps A_0.

    adaptive_matrix: the paper allows any A_t that all clients share. "global" and "adagrad_norm" use
    ‖g‖² instead of g²: every coordinate of their v has the same value. "adagrad_norm" sums ‖g‖²
    instead of averaging it.

    In the paper's order the last local step of a round does not move: the server moves x for all
    clients, with the new A (lines 10-12), so after a round server.x is x_{t+1}. x_{t-1,i} is the
    client's own iterate and is never averaged.
    """

    step_size: float = setting(0.003, "η_t, step size of every move", above=0)
    fresh_weight: float = setting(0.1, "α_t, weight of the fresh gradient in m", least=0, most=1)
    fresh_weight_scale: float | None = setting(None, "c: replaces fresh_weight by α_{t+1} = min(1, c η_t²)", above=0)
    second_moment_decay: float = setting(0.9, "β, weight of the old second moment", least=0, most=1)
    epsilon: float = setting(0.01, "ρ, added to the root of the averaged second moment", above=0)
    adaptive_matrix: str = setting(
        "diagonal",
        "v is a decaying mean of g² per coordinate (diagonal), or of ‖g‖² (global), or the sum of ‖g‖² (adagrad_norm)",
        among=("diagonal", "global", "adagrad_norm"),
    )
    first_step: str = setting(
        "plain",
        "first move (line 3 of Algorithm 2): plain, as in the paper, or adaptive, divided by A_0",
        among=("plain", "adaptive"),
    )
    sync_order: str = setting(
        "paper",
        "at an average: move afterwards, with the new A (paper), or before, with the old A (the authors' code)",
        among=("paper", "code"),
    )
    prev_grad_scale: float = setting(
        1.0, "factor of the gradient at x_{t-1}; 0.95 in the authors' script for images", least=0
    )

    clock = "iteration"
    exchanged = ("x", "m", "v")
    exchanged_at_start = ("m", "v")
    server_rows = ("A",)
    client_rows = ("x_prev",)

    @property
    def stackable(self):
        return self.adaptive_matrix == "diagonal"

    def start(self, client, server, oracle):
        """Lines 1-2: m_i = ∇f_i(x_0; B_0), v_i = its square; both are averaged next."""
        g = oracle.gradient(client.x, oracle.draw_first())
        client.m.copy_(g)
        client.v.copy_(self._square(g))
        client.x_prev.copy_(client.x)

    def server_start(self, server):
        """Lines 2-3: A_0 = √v̄_0 + ρ, x_1 = x_0 - η_0 m̄_0 (without A_0, as printed)."""
        self._refresh(server)
        if self.first_step == "adaptive":
            server.x.addcdiv_(server.m, server.A, value=-self.eta(server))
        else:
            server.x.add_(server.m, alpha=-self.eta(server))

    def download(self, client, server):
        """After an absence x_prev is stale: reset it to x, so that the correction vanishes."""
        if client.was_absent:
            client.x_prev.copy_(client.x)

    def local_step(self, client, server, oracle):
        """Lines 5-7 and 14: estimate with two gradients on the same sample, then move."""
        g, g_prev = oracle.gradient_pair(client.x, client.x_prev, oracle.draw())
        moves = not client.is_last_step or self.sync_order == "code"
        self.advance(client, server, g, g_prev, self.eta(client) if moves else None)

    def advance(self, client, server, g, g_prev, eta):
        """The arithmetic of a local step; without a move if η is None. `_CompiledFAFED` does it in one pass."""
        # m_i <- g + (1 - α)(m_i - g⁻)
        client.m.sub_(g_prev, alpha=self.prev_grad_scale)
        torch.add(g, client.m, alpha=1 - self._alpha(client), out=client.m)
        if self.adaptive_matrix == "adagrad_norm":
            client.v.add_(self._square(g))
        else:
            client.v.lerp_(self._square(g), 1 - self.second_moment_decay)  # v_i <- β v_i + (1 - β) g²
        client.x_prev.copy_(client.x)
        if eta is not None:
            client.x.addcdiv_(client.m, server.A, value=-eta)

    def server_step(self, server):
        """Lines 10-12: v̄, then A, then x̄ - η m̄ / A."""
        self._refresh(server)
        if self.sync_order == "paper":
            server.x.addcdiv_(server.m, server.A, value=-self.eta(server))

    def compiled(self, like):
        """See `Algorithm.compiled`; only for adaptive_matrix = diagonal."""
        if type(self) is not FAFED:
            return super().compiled(like)  # a subclass may compute something else
        if self.adaptive_matrix != "diagonal":
            raise UserError(
                f"fused_update = true: there is no compiled update of FAFED with adaptive_matrix = "
                f"{self.adaptive_matrix}, only with diagonal; leave fused_update off"
            )
        settings = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return _CompiledFAFED(**settings).try_out(like)

    def _alpha(self, client):
        return self.alpha(client, self.fresh_weight, self.fresh_weight_scale)

    def _square(self, g):
        """g² per coordinate, overwriting g; or ‖g‖², a 0-d tensor."""
        return g.square_() if self.adaptive_matrix == "diagonal" else torch.dot(g, g)

    def _refresh(self, server):
        """A = √v̄ + ρ: the root of the average; ρ is added after the root."""
        torch.sqrt(server.v, out=server.A).add_(self.epsilon)


class _CompiledFAFED(FAFED):
    """FAFED with the diagonal matrix, its local step's arithmetic compiled into one pass over the rows."""

    stackable = False

    def advance(self, client, server, g, g_prev, eta):
        """See `FAFED.advance`."""
        numbers = [self._alpha(client), self.second_moment_decay, self.prev_grad_scale, 0.0 if eta is None else eta]
        rows = (client.x, client.x_prev, client.m, client.v, server.A, g, g_prev)
        _compile(_advance)(*rows, _on_device(numbers, g))

    def try_out(self, like):
        """Compile now, on rows of the dtype and device of `like`, rather than in the first local step; returns self.

        Raises:
            UserError: if torch cannot compile here.
        """
        rows = dict(zip(("x", "x_prev", "m", "v", "A"), like.new_ones(5, 64)))
        client = types.SimpleNamespace(iteration=1, round_index=0, **rows)
        try:
            self.advance(client, types.SimpleNamespace(A=rows["A"]), *like.new_ones(2, 64), 0.1)
        except RuntimeError as error:  # what torch raises if there is no compiler
            raise UserError(
                f"fused_update = true: torch cannot compile here ({str(error).strip().splitlines()[0]}): "
                "install a C++ compiler or leave fused_update off"
            ) from error
        return self


def _on_device(numbers, like):
    """Some numbers as a vector of the dtype and device of `like`; the CPU does not wait for the copy."""
    if any(isinstance(number, torch.Tensor) for number in numbers):  # in a recording, which copies nothing from the CPU
        return torch.stack(
            [like.new_empty(()).copy_(n) if torch.is_tensor(n) else like.new_full((), n) for n in numbers]
        )
    return torch.tensor(numbers, dtype=like.dtype, pin_memory=like.device.type != "cpu").to(
        like.device, non_blocking=True
    )


@functools.cache
def _compile(function):
    return torch.compile(function, fullgraph=True, dynamic=True)


def _advance(x, x_prev, m, v, A, g, g_prev, numbers):
    """`FAFED.advance`; numbers = [α, β, the scale of g⁻, η], η = 0 for a step without a move."""
    alpha, beta, scale, eta = numbers.unbind()
    m.copy_(g + (1 - alpha) * (m - scale * g_prev))
    v.copy_(beta * v + (1 - beta) * g * g)
    x_prev.copy_(x)
    x.copy_(x - eta * m / A)
