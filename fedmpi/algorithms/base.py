"""What an algorithm is: the names of its rows and a few short methods over whole vectors.

An algorithm sees vectors only: no MPI, no model, no data. It names four kinds of rows, each a vector of the model's
length `dim`, and overrides some of these methods, which are called in this order:

    start         once, on every client: fill the rows that are averaged before the first round
    server_start  once, on all ranks: use these averages
    client_start  once, on every client: fill its own rows
    download      at the beginning of a round, on every participating client
    local_step    q times a round, on every participating client; the only one without a default
    upload        after the last local step, on every participating client: complete the rows to be averaged
    sent          when a participating client's rows are as they are sent, after the stages: take note of them
    server_step   after the average, on all ranks: every rank holds a copy of the server's state

A method that does not average all its exchanged rows at once, after the local steps, also overrides `exchanges`.

Rows:

    exchanged    what a client sends. They form one contiguous block, so one Allreduce averages them
                 without packing. Afterwards `server.NAME` is the average of the clients' `NAME`, and
                 every client, an absent one too, begins the next round with it as `client.NAME`.
    server_rows  further vectors of the server, equal on all ranks; clients read them.
    client_rows  a client's own vectors, kept from round to round and never averaged.
    scratch      vectors that are valid within one client's turn only.

`kinds` says what an exchanged row is, if it is no point; stages, and what reads their work, depend on it:

    point        an iterate: what a client has moved by is its difference from the start of the round.
    difference   what a client has moved by: its start is 0.
    gradient     a gradient or an average of gradients.
    square       a mean of squares: never below 0, whatever a stage does.
    number       facts, one after the other, and 0 behind them: no stage sees or changes them.

While clients work, an exchanged row belongs to the client: `server.NAME` is not readable then (with
one client per rank it is the same memory). If clients need the old model during the round, the
server copies it into a row of its own.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from fedmpi.algorithms import schedules
from fedmpi.ground.settings import check, setting

KINDS = ("point", "difference", "gradient", "square", "number")  # of exchanged rows, see above


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One average over the clients of a round, with the work before it and the arithmetic after it.

    Args:
        rows: consecutive names of `exchanged`. The exchanges of one round run through `exchanged`
            from front to back; a client's later rows stay its own until their turn.
        work: `work(client, server, oracle)`, called on every participating client; None: the local
            steps.
        then: `then(server)`, called on all ranks with the averages in the server's rows.
        alone: whether one participant works alone, drawn from a stream that all ranks share; the
            "average" is then that client's rows.
        due: `due(server) -> bool`, whether the exchange takes place in this round; None: in every round.

    CE-LSGD averages twice a round, and the second time one client works alone:

    >>> import fedmpi
    >>> [(exchange.rows, exchange.alone) for exchange in fedmpi.algorithms.CELSGD().exchanges()]
    [(('g',), False), (('x',), True)]
    >>> fedmpi.Exchange(("x",), then=lambda server: server.x.mul_(0.5)).alone
    False
    """

    rows: tuple[str, ...]
    work: Callable[[Any, Any, Any], None] | None = None
    then: Callable[[Any], None] | None = None
    alone: bool = False
    due: Callable[[Any], bool] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Algorithm:
    """Base of all algorithms: FedAvg without its local step, and the schedule of the step size.

    An algorithm is a frozen dataclass of its settings. This one is local SGD, on f_i = ½ (x - i)²:

    >>> import dataclasses, fedmpi
    >>> @dataclasses.dataclass(frozen=True)
    ... class LocalSGD(fedmpi.Algorithm):
    ...     step_size: float = fedmpi.setting(0.1, "η of the local steps", above=0)
    ...
    ...     def local_step(self, client, server, oracle):
    ...         g = oracle.gradient(client.x, oracle.draw())
    ...         client.x.add_(g, alpha=-self.eta(client))
    >>> trace = fedmpi.simulate(LocalSGD(step_size=0.5), lambda i, x, sample: x - i, x0=[9.0], rounds=20)
    >>> trace[-1]["rows"]["x"].round(6).tolist()  # of clients 0, 1 and 2
    [[1.0], [1.0], [1.0]]

    Besides the rows, the methods find these attributes:
        client.index       this client's number, from 0.
        client.num_steps   its local steps in this round, K_i (q if all clients make equally many).
        client.step_index  the current local step within the round, from 0.
        client.is_last_step  whether it is the last local step of the round: an average follows.
        client.iteration   t, local steps since the start, counted by the shared clock, from 1.
        client.num_draws   samples that this client has drawn so far; an absent client draws none.
        client.num_undone  of these, those in turns that do not count: the client was left out (`Sending.faulty`).
        client.was_absent  whether it was absent in the previous round (False in round 0).
        client.round_index, server.round_index: the round, from 0; -1 during the start.
        server.iteration   t at the end of the round's local steps; 0 at the start.
        server.num_steps   K, mean of the participants' local steps in this round.
        server.num_clients N; server.num_participants: |S| of this round.
        server.participation: the participants' share in the weight of all clients, |S| / N.
        server.segments    for each parameter tensor of the model, its slice of a row; for layer-wise methods.
        server.primal, server.dual: slices of a row in which a min-max problem descends and ascends
            (all of it and none in a minimisation). Gradients have the dual's sign negated already.

    Besides the rows, a class may declare
        clock: what t of the step-size schedule counts, "iteration" (local steps) or "round_index".
        also_called: further names, in lower case; the error message for one of them gives the class's own name.
        kinds: name of an exchanged row -> what it is, see the top of this module; "point" if it is not there.
        oracle: the kind of oracle (`fedmpi.oracles`) that is used unless the user names one.
        downlink: for the table of costs, the rows that a central server would have to send to the clients each
            round; None: the exchanged rows. Some methods need fewer, because clients can compute a row from
            others, and some need more, because clients read rows that the server changes.

    Raises:
        UserError: if a setting is outside its declared range.
    """

    schedule: str = setting(
        "constant",
        "how the step size η falls with the time t (see schedule_every): constant; cube_root, η / (w_t + σ² t)^(1/3); "
        "step, multiplied by schedule_factor after every schedule_period; cosine, along half a cosine",
        among=("constant", "cube_root", "step", "cosine"),
    )
    schedule_every: int = setting(
        1, "t grows by 1 after so many local steps, or rounds in methods that change η only between rounds", least=1
    )
    schedule_offset: float = setting(1.0, "cube_root: w", above=0)
    schedule_rate: float = setting(1.0, "cube_root: σ²", least=0)
    schedule_plateau: float = setting(0.0, "cube_root: W in w_t = max(w, W - σ² t); with 0, w_t = w", least=0)
    schedule_period: int = setting(
        100, "step: t between two drops; cosine: t at which the step size stops falling", least=1
    )
    schedule_factor: float = setting(
        0.1, "step: factor at each drop; cosine: last step size divided by the first", least=0, most=1
    )

    if TYPE_CHECKING:
        step_size: float  # every algorithm declares it, with its own default

    also_called: ClassVar[tuple[str, ...]] = ()
    oracle: ClassVar[str | None] = None
    clock: ClassVar[str] = "round_index"
    downlink: ClassVar[tuple[str, ...] | None] = None
    exchanged: ClassVar[tuple[str, ...]] = ("x",)
    kinds: ClassVar[dict[str, str]] = {}
    exchanged_at_start: ClassVar[tuple[str, ...]] = ()
    server_rows: ClassVar[tuple[str, ...]] = ()
    client_rows: ClassVar[tuple[str, ...]] = ()
    scratch: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check(self, "algorithm.")

    def eta(self, clock: Any) -> float:
        """The current step size: `step_size` times its schedule.

        Args:
            clock: the client or the server, whose attribute named by the class's `clock` is t.
        """
        return self._eta_at(getattr(clock, self.clock))

    def alpha(self, clock: Any, weight: float, scale: float | None) -> float:
        """The current weight of the fresh gradient: `weight` (α), or min(1, c η_{t-1}²) if c is given.

        Args:
            clock: see `eta`. weight: α in [0, 1]. scale: c > 0, or None.
        """
        if scale is None:
            return weight
        return min(1.0, scale * self._eta_at(getattr(clock, self.clock) - 1) ** 2)

    def _eta_at(self, t: int) -> float:
        return self.step_size * self._schedule(max(t, 0) // self.schedule_every)

    @functools.cached_property
    def _schedule(self) -> Callable[[int], float]:
        factors: dict[str, Callable[[int], float]] = {
            "constant": schedules.Constant(),
            "cube_root": schedules.CubeRoot(self.schedule_offset, self.schedule_rate, self.schedule_plateau),
            "step": schedules.StepDecay(self.schedule_period, self.schedule_factor),
            "cosine": schedules.CosineDecay(self.schedule_period, self.schedule_factor),
        }
        return factors[self.schedule]

    def start(self, client: Any, server: Any, oracle: Any) -> None:
        """Before the first round: fill the client's rows named in `exchanged_at_start`."""

    def server_start(self, server: Any) -> None:
        """Use the averages of the start; also called if nothing is exchanged at the start."""

    def client_start(self, client: Any, server: Any) -> None:
        """Last call of the start, on every client: fill its own rows (`client_rows`) from the averages."""

    def download(self, client: Any, server: Any) -> None:
        """Begin a participating client's round; its exchanged rows hold the last averages."""

    def local_step(self, client: Any, server: Any, oracle: Any) -> None:
        """One local step."""
        raise NotImplementedError(f"{type(self).__name__} does not define local_step")

    def upload(self, client: Any, server: Any, oracle: Any) -> None:
        """End a participating client's local steps: complete its exchanged rows."""

    def sent(self, client: Any, server: Any) -> None:
        """Take note of what a client sends: its exchanged rows after the stages, in every exchange and in the start.

        What must equal the sum of what was sent, like a control variate, is updated here, not in `upload`. The rows
        themselves stay as they are.
        """

    def server_step(self, server: Any) -> None:
        """Use the averages of a round."""

    def exchanges(self) -> tuple[Exchange, ...]:
        """The exchanges of a round, in order: one, after the local steps, unless overridden."""
        return (Exchange(self.exchanged, then=self.server_step),)
