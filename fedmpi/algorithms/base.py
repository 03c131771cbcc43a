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
from collections.abc import Callable
from typing import ClassVar

from fedmpi.settings import check


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One average over the clients of a round, with the work before it and the arithmetic after it.

    Args:
        rows: consecutive names of `exchanged`. The exchanges of one round run through `exchanged`
            from front to back; a client's later rows stay its own until their turn.
        work: `work(client, server, oracle)`, done by every participating client; None stands for
            the local steps.
        then: `then(server)`, done on every rank alike with the averages in the server's rows.
        workers: `workers(participants, generator) -> clients` if only some of the round's
            participants work and are averaged, drawn from a stream that all ranks share.
    """

    rows: tuple[str, ...]
    work: Callable | None = None
    then: Callable | None = None
    workers: Callable | None = None


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """Base of all algorithms: FedAvg's skeleton, without its step.

    What the methods find beside the rows, as attributes:
        client.index       this client's number, from 0.
        client.num_steps   its local steps in this round, K_i (q where all do the same).
        client.step_index  the current local step within the round, from 0.
        client.iteration   t, local steps since the start, counted by the shared clock, from 1.
        client.was_absent  whether it sat out the previous round (False in round 0).
        server.round_index the round, from 0; -1 during the start.
        server.iteration   t at the end of the round's local steps; 0 at the start.
        server.num_clients N; server.num_participants: |S| of this round.
        server.segments    slices of the model's parameter tensors in a row, for layer-wise methods.

    Raises:
        UserError: if a hyper-parameter is outside its declared range.
    """

    exchanged: ClassVar[tuple[str, ...]] = ("x",)
    exchanged_at_start: ClassVar[tuple[str, ...]] = ()
    server_rows: ClassVar[tuple[str, ...]] = ()
    client_rows: ClassVar[tuple[str, ...]] = ()
    scratch: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self):
        check(self, "algorithm.")

    def start(self, client, server, oracle):
        """Before the first round: fill the client's rows named in `exchanged_at_start`."""

    def server_start(self, server):
        """Take up the averages of the start; called also where nothing is exchanged at the start."""

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
