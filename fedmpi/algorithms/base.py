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

Beside rows, an exchange may average a few numbers (`Exchange.numbers`): a client fills `client.numbers` in
`local_step`, `upload` or the exchange's `work`, and the averages are in `server.numbers` in what follows them.

While clients work, an exchanged row belongs to the client: `server.NAME` is not readable then (with
one client per rank it is the same memory). If clients need the old model during the round, the
server copies it into a row of its own.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Protocol

from fedmpi.algorithms.oracle import Oracle as Oracle
from fedmpi.algorithms.schedules import Scheduled
from fedmpi.ground.settings import check

if TYPE_CHECKING:
    import torch  # which takes long to load

# What an exchanged row is; stages, and what reads their work, depend on it. A point is an iterate: what a client has
# moved by is its difference from the start of the round. A difference is what a client has moved by. A gradient may be
# an average of several. A square is a mean of squares: never below 0, whatever a stage does.
KINDS = ("point", "difference", "gradient", "square")
Count = int | Callable[[int], int]  # of numbers, see `Exchange`


class Client(Protocol):
    """What an algorithm may use of a client: its rows, as attributes of their names, and these."""

    def __getattr__(self, name: str) -> "torch.Tensor": ...  # the row of this name, [dim]
    @property
    def index(self) -> int: ...  # this client's number, from 0
    @property
    def round_index(self) -> int: ...  # the round, from 0; -1 during the start
    @property
    def num_steps(self) -> int: ...  # its local steps in this round, K_i (q if all clients make equally many)
    @property
    def step_index(self) -> int: ...  # the current local step within the round, from 0
    @property
    def is_last_step(self) -> bool: ...  # whether it is the last local step of the round: an average follows
    @property
    def iteration(self) -> int: ...  # t, local steps since the start, counted by the shared clock, from 1
    @property
    def num_draws(self) -> int: ...  # samples that it has drawn so far; an absent client draws none
    @property
    def num_undone(self) -> int: ...  # of these, those in turns that do not count (`Sending.faulty`)
    @property
    def was_absent(self) -> bool: ...  # whether it was absent in the previous round (False in round 0)
    @property
    def numbers(self) -> "torch.Tensor": ...  # float64, see `Exchange`; zeros as the client's turn begins


class Server(Protocol):
    """What an algorithm may use of the server: its rows, as attributes of their names, and these."""

    def __getattr__(self, name: str) -> "torch.Tensor": ...  # the row of this name, [dim]
    @property
    def round_index(self) -> int: ...  # the round, from 0; -1 during the start
    @property
    def iteration(self) -> int: ...  # t at the end of the round's local steps; 0 at the start
    @property
    def num_steps(self) -> float: ...  # K, mean of the participants' local steps in this round
    @property
    def most_steps(self) -> int: ...  # the largest number of local steps of a client in this round
    @property
    def num_clients(self) -> int: ...  # N
    @property
    def num_participants(self) -> int: ...  # |S| of this round
    @property
    def participation(self) -> float: ...  # the participants' share in the weight of all clients, |S| / N
    @property
    def numbers(self) -> "torch.Tensor": ...  # float64, the averages; in the `then` of their exchange
    @property
    def segments(self) -> list[slice]: ...  # of each parameter tensor of the model, in a row; for layer-wise methods
    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]: ...  # of these tensors; for methods that need matrices
    @property
    def primal(self) -> tuple[slice, ...]: ...  # where a min-max problem descends; all of a row in a minimisation
    @property
    def dual(self) -> tuple[slice, ...]: ...  # where it ascends: gradients have the sign negated there; () if nowhere


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One average over the clients of a round, with the work before it and the arithmetic after it.

    Args:
        rows: consecutive names of `exchanged`. The exchanges of one round run through `exchanged`
            from front to back; a client's later rows stay its own until their turn. () if only numbers are averaged.
        work: `work(client, server, oracle)`, called on every participating client; None: the local
            steps.
        then: `then(server)`, called on all ranks with the averages in the server's rows.
        alone: whether one participant works alone, drawn from a stream that all ranks share; the
            "average" is then that client's rows.
        due: `due(server) -> bool`, whether the exchange takes place in this round; None: in every round. In other
            rounds a client keeps its rows for itself, and begins its next round with them; after the average all
            clients, absent ones too, begin with that. It takes one more row of memory per row and client.
        numbers: how many numbers are averaged too, by the same weights, in float64; or a function of q, the largest
            number of local steps of a client in a round. They pass no stage and no codec.

    >>> import fedmpi
    >>> fedmpi.Exchange(("x",), then=lambda server: server.x.mul_(0.5)).alone
    False
    """

    rows: tuple[str, ...]
    work: Callable[[Client, Server, Oracle], None] | None = None
    then: Callable[[Server], None] | None = None
    alone: bool = False
    due: Callable[[Server], bool] | None = None
    numbers: Count = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Algorithm(Scheduled):
    """Base of all algorithms: FedAvg without its local step, and the schedule of the step size (`self.eta(client)`).

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

    Attributes:
        also_called: further names, in lower case; the error message for one of them gives the class's own name.
        kinds: name of an exchanged row -> which of `KINDS` it is; "point" if it is not there.
        oracle: the kind of oracle (`fedmpi.oracles`) that is used unless the user names one.

    Raises:
        UserError: if a setting is outside its declared range.
    """

    also_called: ClassVar[tuple[str, ...]] = ()
    kinds: ClassVar[dict[str, str]] = {}
    oracle: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        check(self, "algorithm.")

    # Names of rows. A class writes exchanged = ("x", "m"), or a property, if they depend on its settings.

    @property
    def exchanged(self) -> tuple[str, ...]:
        """What a client sends: one contiguous block, so that one Allreduce averages it without packing.

        Afterwards `server.NAME` is the average of the clients' `NAME`, and every client, an absent one too, begins the
        next round with it as `client.NAME`.
        """
        return ("x",)

    @property
    def exchanged_at_start(self) -> tuple[str, ...]:
        """Those of them that are averaged before the first round."""
        return ()

    @property
    def numbers_at_start(self) -> Count:
        """How many numbers are averaged before the first round, see `Exchange`: `start` fills `client.numbers`."""
        return 0

    @property
    def server_rows(self) -> tuple[str, ...]:
        """Further vectors of the server, equal on all ranks; clients read them."""
        return ()

    @property
    def client_rows(self) -> tuple[str, ...]:
        """A client's own vectors, kept from round to round and never averaged."""
        return ()

    @property
    def scratch(self) -> tuple[str, ...]:
        """Vectors that are valid within one client's turn only."""
        return ()

    @property
    def downlink(self) -> tuple[str, ...] | None:
        """What a central server would have to send each round, for the table of costs; None: `exchanged`."""
        return None

    def start(self, client: Client, server: Server, oracle: Oracle) -> None:
        """Before the first round: fill the client's rows named in `exchanged_at_start`."""

    def server_start(self, server: Server) -> None:
        """Use the averages of the start; also called if nothing is exchanged at the start."""

    def client_start(self, client: Client, server: Server) -> None:
        """Last call of the start, on every client: fill its own rows (`client_rows`) from the averages."""

    def download(self, client: Client, server: Server) -> None:
        """Begin a participating client's round; its exchanged rows hold the last averages."""

    def local_step(self, client: Client, server: Server, oracle: Oracle) -> None:
        """One local step."""
        raise NotImplementedError(f"{type(self).__name__} does not define local_step")

    def upload(self, client: Client, server: Server, oracle: Oracle) -> None:
        """End a participating client's local steps: complete its exchanged rows."""

    def sent(self, client: Client, server: Server) -> None:
        """Take note of what a client sends: its exchanged rows after the stages, in every exchange and in the start.

        What must equal the sum of what was sent, like a control variate, is updated here, not in `upload`. The rows
        themselves stay as they are.
        """

    def server_step(self, server: Server) -> None:
        """Use the averages of a round."""

    def exchanges(self) -> tuple[Exchange, ...]:
        """The exchanges of a round, in order: one, after the local steps, unless overridden."""
        return (Exchange(self.exchanged, then=self.server_step),)
