"""One silo, and the server that all ranks replicate, as an algorithm sees them."""

import contextlib

from fedmpi.federation.nested import flatten, unflatten
from fedmpi.ground.errors import UserError


class _Holder:
    """Rows as attributes; the error for a name that is no row lists the rows and says where rows are named.

    Attributes:
        rows: name -> [dim] tensor.
    """

    def __init__(self, rows):
        self.rows = dict(rows)
        self.__dict__.update(rows)

    def __setattr__(self, name, value):
        if name in self.__dict__.get("rows", ()) and value is not self.__dict__[name]:
            raise AttributeError(
                f"{type(self).__name__.lower()}.{name} is a row: change it in place, like {name}.copy_(...) or "
                f"{name} -= ...; a new vector in its place would be ignored"
            )
        super().__setattr__(name, value)

    def __getattr__(self, name):
        if name == "rows":  # of an instance that is being copied
            raise AttributeError(name)
        raise AttributeError(
            f"{type(self).__name__.lower()}.{name}: no such row here; it has {', '.join(self.rows) or 'none'} "
            "(rows are named in exchanged, server_rows, client_rows and scratch; "
            "while clients work, the server's exchanged rows belong to them)"
        )

    @property
    def round_index(self):
        """The round, from 0; -1 during the start."""
        return -1 if self.round is None else self.round.index


class Client(_Holder):
    """One silo: its rows, the current round, and the oracle that answers for its data.

    It owns all of its state that crosses a round; `state` gives it, `restore` takes it.

    Args:
        index: the client's number in the federation, from 0.
        rows: name -> [dim] tensor, those that an algorithm sees. own: names of the rows that belong to this client
            alone, and stay from round to round.
        buffers: [num_buffers] the float buffers of the model during the client's turn, or None.

    Attributes:
        oracle: see `fedmpi.oracles`; set after construction, because an oracle is made for a client.
        round: the current `Round`. num_steps: local steps in it. step_index: the current one, from 0.
        was_absent: whether the client missed the previous round.
        num_draws: samples drawn so far, the position in the client's data. num_undone: of these, those in turns that
            were undone. num_gradients: evaluated so far.
        counters: the model's integer buffers as this client left them.
        carried: what one sample leaves to the next one (a recurrent state): name -> number, tensor or nested
            tuples of tensors.
        kept: "part.name" of the rows that a `fedmpi.ground.part.Part` keeps for it -> name of the row -> vector.
    """

    def __init__(self, index, rows=(), own=(), buffers=None):
        super().__init__(rows)
        self.index, self.own, self.buffers = index, own, buffers
        self.oracle, self.round = None, None
        self.num_steps, self.step_index = 0, -1
        self.was_absent = False
        self.num_draws, self.num_undone, self.num_gradients = 0, 0, 0
        self.counters, self.carried, self.kept = [], {}, {}

    @property
    def iteration(self):
        """t, local steps since the start by the clock that all clients share, from 1; 0 during the start."""
        return 0 if self.round_index < 0 else self.round.first_iteration + self.step_index + 1

    @property
    def is_last_step(self):
        """Whether the current local step is the last of the round: an average follows."""
        return self.step_index == self.num_steps - 1

    def state(self):
        """Name -> tensor or number: what the client needs to go on after a round.

        Raises:
            UserError: if `carried` has something that a checkpoint cannot hold.
        """
        rows = {f"rows/{name}": self.rows[name] for name in self.own}
        kept = {f"kept/{stage}/{name}": row for stage, rows_of in self.kept.items() for name, row in rows_of.items()}
        counters = {f"counters/{number}": counter for number, counter in enumerate(self.counters)}
        numbers = {name: getattr(self, name) for name in ("num_draws", "num_undone", "num_gradients")}
        try:
            carried = flatten(self.carried, "carried")
        except TypeError as error:
            raise UserError(f"task: what a sample leaves to the next one, {error}") from None
        return {**rows, **kept, **counters, **numbers, **carried}

    def restore(self, state):
        """Take what `state` gave; tensors are copied."""
        for name in self.own:
            self.rows[name].copy_(state[f"rows/{name}"])
        for stage, rows in self.kept.items():
            for name, row in rows.items():
                row.copy_(state[f"kept/{stage}/{name}"])
        for number, counter in enumerate(self.counters):
            counter.copy_(state[f"counters/{number}"])
        self.num_draws, self.num_gradients = int(state["num_draws"]), int(state["num_gradients"])
        self.num_undone = int(state.get("num_undone", 0))
        self.carried.clear()
        device = next(iter(self.rows.values())).device if self.rows else "cpu"  # the state may be that of a CPU or GPU
        self.carried.update(unflatten(state, "carried", device))

    def undo(self, before):
        """Take the `state` of before a turn that does not count, but go on with later samples than it had."""
        draws, gradients = self.num_draws, self.num_gradients
        self.restore(before)
        self.num_undone += draws - self.num_draws
        self.num_draws, self.num_gradients = draws, gradients


@contextlib.contextmanager
def named_in_errors(client):
    """A context whose errors carry the number of the client at work, for the message that ends the job."""
    try:
        yield
    except BaseException as error:
        error.fedmpi_client = client.index
        raise


class Server(_Holder):
    """The state that every rank replicates: the same arithmetic everywhere, nothing is broadcast.

    Args:
        rows: name -> [dim] tensor.
        num_clients: N.
        segments: slices of the parameter tensors in a [dim] row.
        dim: length of a row. ascent: the slice of a row in which a min-max problem ascends, or None.

    Attributes:
        round: the current `Round`; num_participants, participation, num_steps and iteration are its.
    """

    def __init__(self, rows, num_clients, segments, dim, ascent=None):
        super().__init__(rows)
        self.segments = segments
        self.primal, self.dual = blocks(dim, ascent)
        self.num_clients = num_clients
        self.round = None

    @property
    def iteration(self):
        """t at the end of the round's local steps; 0 during the start."""
        return 0 if self.round is None else self.round.iteration

    @property
    def num_participants(self):
        """|S| of the round."""
        return self.num_clients if self.round is None else len(self.round.participants)

    @property
    def participation(self):
        """The participants' share in the weight of all clients, |S| / N."""
        return 1.0 if self.round is None else self.round.participation

    @property
    def num_steps(self):
        """K, mean of the participants' local steps in the round."""
        return 0 if self.round is None else self.round.num_steps


def blocks(dim, ascent):
    """(primal, dual): the slices of a [dim] row in which a problem descends, and those in which it ascends.

    `ascent` is a slice of the row, or None in a minimisation.

    Raises:
        UserError: if the slice has a step or is empty.
    """
    if ascent is None:
        return (slice(0, dim),), ()
    start, stop, step = ascent.indices(dim)
    if step != 1 or start >= stop:
        raise UserError(f"ascent = {ascent}: expected a slice without a step that contains some of the {dim} variables")
    around = (slice(0, start), slice(stop, dim))
    return tuple(block for block in around if block.start < block.stop), (slice(start, stop),)
