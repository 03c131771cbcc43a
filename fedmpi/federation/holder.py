"""Rows as attributes of a client or a server, with errors that help."""

import torch

from fedmpi.federation.round import Round


class Holder:
    """Rows as attributes; the error for a name that is no row lists the rows and says where rows are named.

    Attributes:
        rows: name -> [dim] tensor. round: the current `Round`; None before the first one.
        numbers: float64, of the current exchange, see `fedmpi.algorithms.base.Exchange`.
    """

    rows: dict[str, torch.Tensor]
    round: Round | None = None

    def __init__(self, rows: dict[str, torch.Tensor]) -> None:
        self.rows, self.numbers = dict(rows), torch.empty(0, dtype=torch.float64)
        self.__dict__.update(rows)

    def __setattr__(self, name: str, value: object) -> None:
        if name in self.__dict__.get("rows", ()) and value is not self.__dict__[name]:
            raise AttributeError(
                f"{type(self).__name__.lower()}.{name} is a row: change it in place, like {name}.copy_(...) or "
                f"{name} -= ...; a new vector in its place would be ignored"
            )
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> torch.Tensor:
        if name == "rows":  # of an instance that is being copied
            raise AttributeError(name)
        raise AttributeError(
            f"{type(self).__name__.lower()}.{name}: no such row here; it has {', '.join(self.rows) or 'none'} "
            "(rows are named in exchanged, server_rows, client_rows and scratch; "
            "while clients work, the server's exchanged rows belong to them)"
        )

    @property
    def round_index(self) -> int:
        """The round, from 0; -1 during the start."""
        return -1 if self.round is None else self.round.index
