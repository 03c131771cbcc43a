"""Min-max problems: clients descend in θ and ascend in w.

The vector x contains both, (θ, w); `server.primal` and `server.dual` are their slices. The oracle
has negated the gradient of the ascent (`fedmpi.oracles`): a "gradient" here is (∇_θ f_i, -∇_w f_i),
and a move against it descends in θ and ascends in w. The algorithms add the step sizes and momentum
weights of each block.
"""

import dataclasses

import torch

from fedmpi.algorithms.base import Algorithm, Client, Exchange, Oracle, Server
from fedmpi.algorithms.schedules import Clock
from fedmpi.ground.errors import UserError
from fedmpi.ground.settings import setting


@dataclasses.dataclass(frozen=True)
class _MinMax(Algorithm):
    """Step sizes of the two blocks."""

    step_size: float = setting(0.05, "η_θ, step size of the descent", above=0)
    dual_step_size: float | None = setting(None, "η_w, step size of the ascent; default: step_size", above=0)

    clock = "iteration"

    def _move(self, x: torch.Tensor, direction: torch.Tensor, clock: Clock, server: Server) -> None:
        """θ <- θ - η_θ D, w <- w - η_w E, for the direction (D, E) whose dual part points downwards."""
        for block, eta in self._etas(clock, server):
            x[block].add_(direction[block], alpha=-eta)

    def _etas(self, clock: Clock, server: Server) -> list[tuple[slice, float]]:
        """(block, its current step size) for every block."""
        eta = self.eta(clock)
        dual = eta if self.dual_step_size is None else eta * (self.dual_step_size / self.step_size)
        return _by_block(server, eta, dual)


def _by_block(server: Server, primal: float, dual: float | None) -> list[tuple[slice, float]]:
    """[(block of x, its value), ...]: `primal` for blocks that descend, `dual` for the others (None: also `primal`)."""
    dual = primal if dual is None else dual
    return [(block, primal) for block in server.primal] + [(block, dual) for block in server.dual]


@dataclasses.dataclass(frozen=True)
class LocalSGDA(_MinMax):
    """Local SGDA: q steps of simultaneous descent and ascent on every client, then the average.

    Source: Sharma, Panda, Joshi, Varshney, "Federated Minimax Optimization: Improved Convergence
    Analyses and Algorithms", ICML 2022, Algorithm 1.
    Paper to code: (x_t^i, y_t^i) -> client.x; η_x, η_y -> step_size, dual_step_size; τ -> q.
    Special cases: q = 1 is centralised SGDA on the union of the batches; without a dual block it is
    FedAvg.
    """

    name = "local_sgda"
    also_called = ("coda_plain",)  # one stage without the proximal term

    def local_step(self, client: Client, server: Server, oracle: Oracle) -> None:
        """θ_i <- θ_i - η_θ ∇_θ f_i, w_i <- w_i + η_w ∇_w f_i, both gradients at the same point."""
        self._move(client.x, oracle.gradient(client.x, oracle.draw()), client, server)


@dataclasses.dataclass(frozen=True)
class MomentumLocalSGDA(_MinMax):
    """Local SGDA along momentum directions, which are averaged with the variables.

    Source: Sharma, Panda, Joshi, Varshney, ICML 2022, Algorithm 2.
    Paper to code: (x_t^i, y_t^i) -> client.x; (d_x, -d_y) -> client.D; η_x, η_y -> step_size,
    dual_step_size; β_x, β_y -> fresh_weight, dual_fresh_weight; α_t -> time_step (κ in the AUC
    paper, which has 1); τ -> q.
    Special case: β = κ = 1 is Local SGDA up to and including the first average, each step on the
    previous sample; afterwards it differs, because the stored gradients were taken before the average.

    The initial directions, on the batch B_0, are not averaged: the first local step moves along them.
    """

    name = "momentum_local_sgda"
    also_called = ("momentum_sgda",)

    fresh_weight: float = setting(0.1, "β_θ, weight of the fresh gradient in the descent direction", least=0, most=1)
    dual_fresh_weight: float | None = setting(
        None, "β_w, weight of the fresh gradient in the ascent direction; default: fresh_weight", least=0, most=1
    )
    time_step: float = setting(1.0, "κ, factor of both step sizes and both weights", above=0, most=1)

    exchanged = ("x", "D")
    kinds = {"D": "gradient"}

    def local_step(self, client: Client, server: Server, oracle: Oracle) -> None:
        """Move along D_i, then D_i <- (1 - βκ) D_i + βκ ∇f_i at the new point."""
        if client.iteration == 1:
            client.D.copy_(oracle.gradient(client.x, oracle.draw_first()))
        for block, eta in self._etas(client, server):
            client.x[block].add_(client.D[block], alpha=-self.time_step * eta)
        g = oracle.gradient(client.x, oracle.draw())
        for block, weight in _by_block(server, self.fresh_weight, self.dual_fresh_weight):
            client.D[block].lerp_(g[block], self.time_step * weight)


@dataclasses.dataclass(frozen=True)
class FMGDA(_MinMax):
    """Descent and ascent along variance-reduced directions, averaged with the variables every q steps.

    Source: "On the Convergence of Federated Deep AUC Maximization", Algorithm 1 (FMSGDA in its tables).
    Paper to code: (θ_{t,i}, w_{t,i}) -> client.x; (θ_{t-1,i}, w_{t-1,i}) -> client.x_prev;
    (u_i, -v_i) -> client.D, which is 0 before the first local step; ĉη_t, cη_t -> step_size,
    dual_step_size; α_t, β_t -> fresh_weight, dual_fresh_weight; c_1, c_2 of its Theorem 1, which has
    α_t = c_1 η_t² and β_t = c_2 η_t² -> fresh_weight_scale, dual_fresh_weight_scale.
    Invariant: with full batches the mean of D_i is the mean of ∇f_i(x_i) after every estimate.
    Special cases: α = β = 1 is Local SGDA on the samples B_0, ξ_1, ξ_2, ...; without a dual block and
    with q = 1 it is STEM.

    A local step here is an estimate, then a move. Iteration t of the paper's loop moves, averages if q
    divides t, and then estimates; our rounds are that loop, cut at its averages. So the very first
    local step estimates on the initial batch B_0 (and that estimate is not averaged), later rounds
    begin with an estimate at the average, and round r ends with move (r + 1) q and the average. The
    mean of the moved points is the paper's mean(x_j) - η mean(D_j). x_prev is the client's own
    iterate and never averaged. η_t of α_t and β_t is the step size of the descent at the move before
    the estimate, ĉη_t: ĉ² is part of c_1 and c_2. `fedmpi.theory.fmgda` has the settings of Theorem 1, with the
    constants that its proof needs.
    """

    also_called = ("fmsgda",)

    fresh_weight: float = setting(0.1, "α, weight of the fresh gradient in the descent direction", least=0, most=1)
    dual_fresh_weight: float | None = setting(
        None, "β, weight of the fresh gradient in the ascent direction; default: fresh_weight", least=0, most=1
    )
    fresh_weight_scale: float | None = setting(None, "c_1: replaces fresh_weight by α_t = min(1, c_1 η_t²)", above=0)
    dual_fresh_weight_scale: float | None = setting(
        None, "c_2: replaces dual_fresh_weight by β_t = min(1, c_2 η_t²)", above=0
    )

    exchanged = ("x", "D")
    kinds = {"D": "gradient"}
    client_rows = ("x_prev",)

    def download(self, client: Client, server: Server) -> None:
        """After an absence x_prev is stale: reset it to x, so that the correction vanishes."""
        if client.was_absent:
            client.x_prev.copy_(client.x)

    def local_step(self, client: Client, server: Server, oracle: Oracle) -> None:
        """D_i <- g + (1 - α)(D_i - g⁻), both gradients on the same sample; then the move along D_i."""
        if client.iteration == 1:
            client.D.copy_(oracle.gradient(client.x, oracle.draw_first()))
        else:
            g, g_prev = oracle.gradient_pair(client.x, client.x_prev, oracle.draw())
            for block, weight in self._weights(client, server):
                client.D[block].sub_(g_prev[block]).mul_(1 - weight).add_(g[block])
        client.x_prev.copy_(client.x)
        self._move(client.x, client.D, client, server)

    def _weights(self, client: Client, server: Server) -> list[tuple[slice, float]]:
        """(block, its current weight of the fresh gradient) for every block."""
        alpha = self.alpha(client, self.fresh_weight, self.fresh_weight_scale)
        weight, scale = self.dual_fresh_weight, self.dual_fresh_weight_scale
        has_none = weight is None and scale is None
        return _by_block(server, alpha, None if has_none else self.alpha(client, weight or 0, scale))


@dataclasses.dataclass(frozen=True)
class _Staged(_MinMax):
    """Stages of falling step size; within a stage θ is pulled to the point where the stage began."""

    prox_weight: float = setting(0.002, "1/γ, weight of ½ ‖θ - θ_ref‖² in the clients' objective", least=0)
    stage_rounds: int | None = setting(None, "T_s / I, rounds in a stage; default: a single stage", least=1)
    step_decay: float = setting(3.0, "η_s / η_{s+1}, by which the step sizes are divided from stage to stage", least=1)
    stage_growth: float = setting(
        1.0, "T_{s+1} / T_s, by which the lengths of the stages grow; 3 in the theory, 1 in the authors' code", least=1
    )
    stage_output: str = setting(
        "last",
        "θ from which the next stage starts, and to which it is pulled: the last one; the average over the stage's "
        "local steps, as in the paper; code: from the last one, and pulled to the average, as in the authors' code "
        "(average and code send one more vector per round)",
        among=("last", "average", "code"),
    )

    clock = "round_index"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stage_growth != 1 and self.stage_rounds is None:
            given = f"algorithm.stage_growth = {self.stage_growth:g}"
            raise UserError(f"{given}: expected stage_rounds too, the length of the first stage")

    @property
    def exchanged(self) -> tuple[str, ...]:
        return ("x", "x_mean") if self.stage_output != "last" else ("x",)  # x_mean: over the round's steps

    @property
    def server_rows(self) -> tuple[str, ...]:
        return ("x_ref", "x_sum") if self.stage_output != "last" else ("x_ref",)  # x_sum: over the stage

    def eta(self, clock: Clock) -> float:
        """The current step size: its schedule, and the fall from stage to stage."""
        stage = 0 if self.stage_rounds is None else self._stage(max(clock.round_index, 0))[0]
        return super().eta(clock) / self.step_decay**stage

    def _stage(self, round_index: int) -> tuple[int, int, int]:
        """(number of the stage that a round is in, from 0; its first round; its length in rounds), with stages."""
        assert self.stage_rounds is not None
        if self.stage_growth == 1:
            stage = round_index // self.stage_rounds
            return stage, stage * self.stage_rounds, self.stage_rounds
        stage, first, length = 0, 0, self.stage_rounds
        while round_index >= first + length:
            stage, first = stage + 1, first + length
            length = round(self.stage_rounds * self.stage_growth**stage)
        return stage, first, length

    def server_start(self, server: Server) -> None:
        """θ_ref of the first stage is θ_0."""
        server.x_ref.copy_(server.x)

    def download(self, client: Client, server: Server) -> None:
        """The mean over the round's steps begins at 0."""
        if self.stage_output != "last":
            client.x_mean.zero_()

    def _pull(self, client: Client, server: Server) -> None:
        """θ_i <- θ_i - η (θ_i - θ_ref) / γ."""
        for block in server.primal:
            client.x[block].lerp_(server.x_ref[block], self.eta(client) * self.prox_weight)

    def _add_to_mean(self, client: Client) -> None:
        """Add x_i to the mean over the round's steps."""
        if self.stage_output != "last":
            client.x_mean.add_(client.x, alpha=1 / client.num_steps)

    def _ends_stage(self, server: Server) -> bool:
        """Whether the round is the last of a stage."""
        if self.stage_rounds is None:
            return False
        _, first, length = self._stage(server.round_index)
        return server.round_index + 1 == first + length

    def _end_round(self, server: Server) -> None:
        """At the end of a stage: set the start of the next and its θ_ref; w stays as it is."""
        if self.stage_output != "last":
            server.x_sum.add_(server.x_mean)
        if not self._ends_stage(server):
            return
        if self.stage_output == "average":
            for block in server.primal:
                torch.div(server.x_sum[block], self._stage(server.round_index)[2], out=server.x[block])
        if self.stage_output == "code":
            torch.div(server.x_sum, self._stage(server.round_index)[2], out=server.x_ref)
        else:
            server.x_ref.copy_(server.x)
        if self.stage_output != "last":
            server.x_sum.zero_()


@dataclasses.dataclass(frozen=True)
class CODA(_Staged):
    """Local SGDA in stages, with a proximal term that keeps θ near the point where the stage began.

    Source: Guo, Liu, Yuan, Shen, Liu, Yang, "Communication-Efficient Distributed Stochastic AUC
    Maximization with Deep Neural Networks", ICML 2020, Algorithms 1 and 2.
    Paper to code: (v, α) -> client.x; v_0 of a stage -> server.x_ref; η_s -> step_size (and
    dual_step_size, if it is to differ); γ -> 1 / prox_weight; I -> q; T_s / I -> stage_rounds, stage_growth.
    Special cases: one stage without the proximal term is Local SGDA; the closed form of the step is
    the explicit one if 1/γ = 0.
    Differs from the paper: a stage ends with its last point unless stage_output is average, and w is
    kept unless dual_restart is set, as in the public code.

    dual_restart sets w = mean h⁻ - mean h⁺, where h⁻ and h⁺ are the scores of the negative and positive
    samples of one fresh batch of every client, at the θ of the next stage. Gradients are enough to
    compute it: v ends with a and b, F is quadratic in both, and its minimum over a is mean h⁺, over b mean h⁻.
    Weight decay and clipping would shift it. It takes one more, short Allreduce at the end of a stage.

    Raises:
        UserError: if dual_restart is set without stages, or on a problem without (a, b, w).
    """

    prox: str = setting(
        "explicit",
        "the proximal step: explicit, -η (θ - θ_ref)/γ, or closed, the exact minimiser (paper)",
        among=("explicit", "closed"),
    )
    dual_restart: bool = setting(
        False,
        "task auc: each further stage starts from w = mean score of negatives - that of positives, as in the paper",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dual_restart and self.stage_rounds is None:
            raise UserError("algorithm.dual_restart: expected stage_rounds too: w is reset at the end of a stage")

    def exchanges(self) -> tuple[Exchange, ...]:
        """The variables; then, for dual_restart at the end of a stage, four numbers, see `ask_for_scores`."""
        if not self.dual_restart:
            return super().exchanges()
        return (
            *super().exchanges(),
            Exchange((), work=self.ask_for_scores, then=self.restart, due=self._restarts, numbers=4),
        )

    def _restarts(self, server: Server) -> bool:
        """Whether w is set after this round; the problem must have the variables of deep AUC."""
        sizes = [[block.stop - block.start for block in blocks] for blocks in (server.primal, server.dual)]
        if not sizes[0] or sizes[0][-1] < 2 or sizes[1] != [1]:
            raise UserError("algorithm.dual_restart: expected the variables (θ, a, b) and one number w of task auc")
        return self._ends_stage(server)

    def local_step(self, client: Client, server: Server, oracle: Oracle) -> None:
        """θ_i <- θ_i - η (∇_θ f_i + (θ_i - θ_ref)/γ), w_i <- w_i + η ∇_w f_i."""
        g = oracle.gradient(client.x, oracle.draw())
        if self.prox == "explicit":
            self._pull(client, server)
            self._move(client.x, g, client, server)
        else:
            self._move(client.x, g, client, server)
            self._pull_exactly(client, server)
        self._add_to_mean(client)

    def server_step(self, server: Server) -> None:
        """x is the average; after the last round of a stage, the next one is set up."""
        self._end_round(server)

    def ask_for_scores(self, client: Client, server: Server, oracle: Oracle) -> None:
        """The numbers: curvature times minimiser of f_i in a and in b, on a fresh batch; then both curvatures."""
        # With q⁺, the share of positives in the batch, the slope in a is 2(1-p) (a q⁺ - mean(h 1[positive])) and the
        # curvature is 2(1-p) q⁺: curvature times a, less the slope, is 2(1-p) mean(h 1[positive]), whatever a is, which
        # may be a client's own. The same for b.
        ab = slice(server.primal[-1].stop - 2, server.primal[-1].stop)
        shifted = client.x.clone()
        shifted[ab].add_(1)
        g, g_shifted = oracle.gradient_pair(client.x, shifted, oracle.draw())
        slope, curvature = g[ab].double(), (g_shifted[ab] - g[ab]).double()
        client.numbers[:2] = curvature * client.x[ab] - slope
        client.numbers[2:] = curvature

    def restart(self, server: Server) -> None:
        """w <- mean h⁻ - mean h⁺; unchanged if the batches contain no negative or no positive sample."""
        curvature = server.numbers[2:]
        if (curvature > 0).all():
            positive, negative = server.numbers[:2] / curvature
            for block in server.dual:
                server.x[block] = negative - positive

    def _pull_exactly(self, client: Client, server: Server) -> None:
        """θ_i <- (θ_i + (η/γ) θ_ref) / (1 + η/γ).

        It comes after the move by -η ∇. Both together are the paper's (θ_i/η + θ_ref/γ - ∇) / (1/η + 1/γ).
        """
        weight = self.eta(client) * self.prox_weight
        for block in server.primal:
            client.x[block].add_(server.x_ref[block], alpha=weight).div_(1 + weight)


@dataclasses.dataclass(frozen=True)
class CODASCA(_Staged):
    """CODA with control variates of both variables, which cancel client drift.

    Source: Yuan, Guo, Xu, Ying, Yang, "Federated Deep AUC Maximization for Heterogeneous Data with a
    Constant Communication Complexity", ICML 2021, Algorithms 1 and 2.
    Paper to code: (v, α) -> client.x; its value at the round's start -> server.x_start; (c_v, c_α),
    (c_v^i, c_α^i) -> server.c, client.c_i, whose dual part has the sign of -∇_w like every gradient
    here; η_l -> step_size (and dual_step_size); η_g -> server_step_size; I -> q.
    Invariant: c is the mean of c_i over all clients after every round.
    Special case: identical clients on identical samples are CODA, because c_i = c.
    """

    server_step_size: float = setting(1.0, "η_g, how far the server moves to the average", above=0)

    kinds = {"delta_c": "difference"}
    client_rows = ("c_i",)

    @property
    def exchanged(self) -> tuple[str, ...]:
        return ("x", "delta_c", *super().exchanged[1:])

    @property
    def server_rows(self) -> tuple[str, ...]:
        return ("c", "x_start", *super().server_rows)

    def server_start(self, server: Server) -> None:
        """Both references are x_0; c and c_i begin at 0."""
        super().server_start(server)
        server.x_start.copy_(server.x)

    def local_step(self, client: Client, server: Server, oracle: Oracle) -> None:
        """CODA's explicit step along ∇f_i - c_i + c."""
        g = oracle.gradient(client.x, oracle.draw()).sub_(client.c_i).add_(server.c)
        self._pull(client, server)
        self._move(client.x, g, client, server)
        self._add_to_mean(client)

    def upload(self, client: Client, server: Server, oracle: Oracle) -> None:
        """c_i⁺ - c_i = -c + (x - x_i) / (I η_l), with each block's own step size."""
        torch.sub(server.x_start, client.x, out=client.delta_c)
        for block, eta in self._etas(client, server):
            client.delta_c[block].div_(client.num_steps * eta)
        client.delta_c.sub_(server.c)

    def sent(self, client: Client, server: Server) -> None:
        """c_i <- c_i + (c_i⁺ - c_i) as it was sent, so that c stays the mean of c_i."""
        client.c_i.add_(client.delta_c)

    def server_step(self, server: Server) -> None:
        """x <- x + η_g (mean(x_i) - x), c <- c + (|S|/N) mean(c_i⁺ - c_i); then as in CODA."""
        torch.lerp(server.x_start, server.x, self.server_step_size, out=server.x)
        server.c.add_(server.delta_c, alpha=server.participation)
        self._end_round(server)
        server.x_start.copy_(server.x)
