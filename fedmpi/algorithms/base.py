"""What an algorithm is: the names of its rows and a few short methods over whole vectors.

An algorithm sees vectors only: no MPI, no model, no data. It names four kinds of rows, each a
vector of the model's length `dim`, and writes what happens at four moments; everything has a
default except `local_step`:

    start        once, on every client: fill rows to be averaged before the first round
    local_step   q times a round, on every participating client
    server_step  after the average, on every rank alike: the server is a state, not a process
    exchanges    only for methods that average more than once a round

Rows:

    exchanged    what a client sends. They form one contiguous block, so one Allreduce averages them
                 without packing. Afterwards `server.NAME` is the average of the clients' `NAME`, and
                 every client, absent ones too, begins the next round with it as `client.NAME`.
    server_rows  further vectors that every rank keeps alike; clients read them.
    client_rows  a client's own vectors, kept from round to round and never averaged.
    scratch      vectors that mean something within one client's turn only.

While clients work, an exchanged row belongs to the client: `server.NAME` is not readable then (with
one client per rank it is the same memory). What clients need of the old model during the round, the
server copies into a row of its own.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar

from fedmpi.algorithms import schedules
from fedmpi.settings import check, setting


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One average over the clients of a round, with the work before it and the arithmetic after it.

    Args:
        rows: consecutive names of `exchanged`. The exchanges of one round run through `exchanged`
            from front to back; a client's later rows stay its own until their turn.
        work: `work(client, server, oracle)`, done by every participating client; None stands for
            the local steps.
        then: `then(server)`, done on every rank alike with the averages in the server's rows.
        alone: whether a single participant works, drawn from a stream that all ranks share; the
            "average" is then what it holds.
        due: `due(server) -> bool`, whether the round has this exchange at all; None: every round.
    """

    rows: tuple[str, ...]
    work: Callable | None = None
    then: Callable | None = None
    alone: bool = False
    due: Callable | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Algorithm:
    """Base of all algorithms: FedAvg's skeleton, without its step; and the schedule of the step size.

    What the methods find beside the rows, as attributes:
        client.index       this client's number, from 0.
        client.num_steps   its local steps in this round, K_i (q where all do the same).
        client.step_index  the current local step within the round, from 0.
        client.iteration   t, local steps since the start, counted by the shared clock, from 1.
        client.was_absent  whether it sat out the previous round (False in round 0).
        client.round_index, server.round_index: the round, from 0; -1 during the start.
        server.iteration   t at the end of the round's local steps; 0 at the start.
        server.num_steps   K, mean of the participants' local steps in this round.
        server.num_clients N; server.num_participants: |S| of this round.
        server.participation: the participants' share in the weight of all clients, |S| / N.
        server.segments    slices of the model's parameter tensors in a row, for layer-wise methods.
        server.primal, server.dual: slices of a row in which a min-max problem descends and ascends
            (all of it and none in a minimisation). Gradients have the dual's sign turned already.

    Besides the rows, a class may declare
        clock: what t of the step-size schedule counts, "iteration" (local steps) or "round_index".
        also_called: other names, in lower case, under which people look for it; they are answered with its own.
        oracle: the kind of oracle that it is made for (`fedmpi.oracles`), if the user names none.
        downlink: the rows that a server would have to send for a round, where that is not what was
            exchanged: clients can recover some rows, and read others that only the server changes.

    Raises:
        UserError: if a hyper-parameter is outside its declared range.
    """

    schedule: str = setting(
        "constant",
        "how the step size falls with t: cube_root (η / (w_t + σ² t)^(1/3)), step, cosine",
        among=("constant", "cube_root", "step", "cosine"),
    )
    schedule_every: int = setting(1, "t grows by 1 after so many local steps (or rounds, in round methods)", least=1)
    schedule_offset: float = setting(1.0, "w of cube_root", above=0)
    schedule_rate: float = setting(1.0, "σ² of cube_root", least=0)
    schedule_plateau: float = setting(0.0, "W of cube_root: w_t = max(w, W - t); 0: always w", least=0)
    schedule_period: int = setting(100, "step: t between two drops; cosine: t at its end", least=1)
    schedule_factor: float = setting(0.1, "step: of every drop; cosine: last step size / first", least=0, most=1)

    also_called: ClassVar[tuple[str, ...]] = ()
    oracle: ClassVar[str | None] = None
    clock: ClassVar[str] = "round_index"
    downlink: ClassVar[tuple[str, ...] | None] = None
    exchanged: ClassVar[tuple[str, ...]] = ("x",)
    exchanged_at_start: ClassVar[tuple[str, ...]] = ()
    server_rows: ClassVar[tuple[str, ...]] = ()
    client_rows: ClassVar[tuple[str, ...]] = ()
    scratch: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self):
        check(self, "algorithm.")

    def eta(self, clock):
        """The step size of the moment, `step_size` times its schedule.

        Args:
            clock: the client or the server; t is its iteration or round, as the class declares.
        """
        return self._eta_at(getattr(clock, self.clock))

    def alpha(self, clock):
        """The fresh gradient's weight: α, or α_t = min(1, c η_{t-1}²) where c is given."""
        if self.fresh_weight_scale is None:
            return self.fresh_weight
        return min(1.0, self.fresh_weight_scale * self._eta_at(getattr(clock, self.clock) - 1) ** 2)

    def _eta_at(self, t):
        return self.step_size * self._schedule(max(t, 0) // self.schedule_every)

    @functools.cached_property
    def _schedule(self):
        return {
            "constant": schedules.Constant(),
            "cube_root": schedules.CubeRoot(self.schedule_offset, self.schedule_rate, self.schedule_plateau),
            "step": schedules.StepDecay(self.schedule_period, self.schedule_factor),
            "cosine": schedules.CosineDecay(self.schedule_period, self.schedule_factor),
        }[self.schedule]

    def start(self, client, server, oracle):
        """Before the first round: fill the client's rows named in `exchanged_at_start`."""

    def server_start(self, server):
        """Take up the averages of the start; called also where nothing is exchanged at the start."""

    def client_start(self, client, server):
        """Last moment of the start, on every client: fill its kept rows (`client_rows`) from the averages."""

    def download(self, client, server):
        """Begin a participating client's round; its exchanged rows hold the last averages."""

    def local_step(self, client, server, oracle):
        """One local step."""
        raise NotImplementedError(f"{type(self).__name__} does not define local_step")

    def upload(self, client, server, oracle):
        """End a participating client's local steps: complete its exchanged rows."""

    def server_step(self, server):
        """Take up the averages of a round."""

    def exchanges(self):
        """The exchanges of a round, in order: one, after the local steps, unless overridden."""
        return (Exchange(self.exchanged, then=self.server_step),)
