"""One silo, and the server that all silos hold alike, as an algorithm sees them."""

from fedmpi.errors import UserError


class _Holder:
    """Rows as attributes, with an error for a missing name that says where rows come from."""

    def __init__(self, rows):
        self.row_names = tuple(rows)
        self.__dict__.update(rows)

    def __setattr__(self, name, value):
        if name in self.__dict__.get("row_names", ()) and value is not self.__dict__[name]:
            raise AttributeError(
                f"{type(self).__name__.lower()}.{name} is a row: change it in place, like {name}.copy_(...) or "
                f"{name} -= ...; a new vector in its place would not be seen by anybody"
            )
        super().__setattr__(name, value)

    def __getattr__(self, name):
        raise AttributeError(
            f"{type(self).__name__.lower()}.{name}: no such row here; it has {', '.join(self.row_names) or 'none'} "
            "(rows are named in exchanged, server_rows, client_rows and scratch; "
            "while clients work, the server's exchanged rows belong to them)"
        )


class Client(_Holder):
    """One silo: its rows, its place in time, and the oracle that answers for its data.

    Args:
        index: the client's number in the federation, from 0.
        rows: name -> [dim] tensor.
        oracle: see `fedmpi.oracles`.
    """

    def __init__(self, index, rows, oracle):
        super().__init__(rows)
        self.index = index
        self.oracle = oracle
        self.num_steps = 0
        self.step_index = 0
        self.iteration = 0
        self.round_index = -1
        self.was_absent = False

    @property
    def is_last_step(self):
        """Whether the current local step is the last of the round: an average follows."""
        return self.step_index == self.num_steps - 1


class Server(_Holder):
    """The state that every rank holds alike, and the clock all clients share.

    Args:
        rows: name -> [dim] tensor.
        num_clients: N.
        segments: slices of the parameter tensors in a [dim] row.
        dim: length of a row. ascent: the slice of a row in which a min-max problem ascends, or None.
    """

    def __init__(self, rows, num_clients, segments, dim, ascent=None):
        super().__init__(rows)
        self.segments = segments
        self.primal, self.dual = blocks(dim, ascent)
        self.num_clients = num_clients
        self.num_participants = num_clients
        self.participation = 1.0
        self.num_steps = 0
        self.round_index = -1
        self.iteration = 0


def blocks(dim, ascent):
    """(primal, dual): the slices of a [dim] row in which a problem descends, and those in which it ascends.

    Args:
        ascent: a slice of the row, or None in a minimisation.

    Raises:
        UserError: if the slice has a step or holds nothing.
    """
    if ascent is None:
        return (slice(0, dim),), ()
    start, stop, step = ascent.indices(dim)
    if step != 1 or start >= stop:
        raise UserError(f"ascent = {ascent}: expected a slice without a step that holds some of the {dim} variables")
    around = (slice(0, start), slice(stop, dim))
    return tuple(block for block in around if block.start < block.stop), (slice(start, stop),)
