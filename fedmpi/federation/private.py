"""Personal layers: parts of the model that stay with their client (FedBN, FedPer)."""

import dataclasses
import fnmatch
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedmpi.federation.buffers import BUFFERS
from fedmpi.federation.client import Client, Server
from fedmpi.federation.rows import RowStore
from fedmpi.federation.variables import Variables
from fedmpi.ground.errors import UserError
from fedmpi.ground.settings import nearest
from fedmpi.oracles.flat_module import FlatModule

Rows = dict[str, torch.Tensor]

PRIVATE = "private"  # the entry of `Client.kept` with a client's private values: name of a row, or BUFFERS -> tensor
NUMBERS = "numbers"  # beside them: the last numbers that the client has sent, of which it is the only one, too
BATCH_NORM = "bn"  # in a list of patterns: all batch-norm layers


class PrivateParts:
    """The private coordinates of a rank's clients: each client is, for them, a federation of its own.

    A client gets its private values back at the beginning of its turn, in every exchanged row, in the server's rows
    that it reads, and in the float buffers. At the end of the turn they are taken away and never sent: at the
    private coordinates, the row x then has its initial values, and every other row has zeros, as has x if it is sent
    as a difference. What the server computes from an average, it computes for the private coordinates from the
    client's own values alone.

    Source: Li et al., "FedBN", ICLR 2021 (batch-norm layers); Arivazhagan et al., "Federated Learning with
    Personalization Layers", 2019, arXiv:1912.00818 (the last layers).

    Args:
        store: the `RowStore`. variables: the `Variables`, whose `private` and `private_buffers` are the coordinates.
        clients: list of `Client`, those of this rank.

    Attributes:
        is_everything: whether no parameter is shared.
    """

    def __init__(self, store: RowStore, variables: Variables, clients: list[Client]) -> None:
        self._store, device = store, variables.x.device
        private = sorted(variables.private, key=lambda piece: piece.start)
        self._at, self._buffers_at = (_positions(parts, device) for parts in (private, variables.private_buffers))
        self.is_everything = len(self._at) == variables.x.numel()
        self._is_used = len(self._at) + len(self._buffers_at) > 0
        self._segments, self._ascent = _compact(private), _ascent_among(private, variables)
        self._start = variables.x[self._at].clone()  # of x
        self._buffers_start = store.buffers[self._buffers_at].clone()
        for client in clients if self else ():
            rows = {**store.averaged_rows(), **store.server_rows()}
            values = {name: row.new_zeros(len(self._at)) for name, row in rows.items()}
            values["x"].copy_(self._start)
            client.kept[PRIVATE] = {**values, BUFFERS: self._buffers_start.clone()}
            if most := store.beside.most_numbers:
                client.kept[PRIVATE][NUMBERS] = torch.zeros(most, dtype=torch.float64, device=device)

    def __bool__(self) -> bool:
        return self._is_used

    def give(self, client: Client, x: torch.Tensor, buffers: torch.Tensor) -> None:
        """Let a client's private values be those of this model from now on."""
        if self:
            client.kept[PRIVATE]["x"].copy_(x[self._at])
            client.kept[PRIVATE][BUFFERS].copy_(buffers[self._buffers_at])
            self.give_back(client)

    def give_back(self, client: Client) -> None:
        """Put a client's private values where it works with them; its turn begins."""
        if self:
            values = client.kept[PRIVATE]
            for name, row in self._rows(client).items():
                row[self._at] = values[name]
            client.buffers[self._buffers_at] = values[BUFFERS]

    def keep(self, client: Client) -> None:
        """Keep a client's private values as they are now, without taking them away."""
        if self:
            values = client.kept[PRIVATE]
            values[BUFFERS].copy_(client.buffers[self._buffers_at])
            for name, row in self._rows(client).items():
                values[name].copy_(row[self._at])

    def take(self, client: Client) -> None:
        """Take a client's private values away from what is sent; its turn ends.

        During the start the float buffers stay as they were, like those that are averaged.
        """
        if not self:
            return
        values, averaged = client.kept[PRIVATE], self._store.averaged_rows()
        if client.round_index >= 0:
            values[BUFFERS].copy_(client.buffers[self._buffers_at])
        for name in averaged:
            values[name].copy_(client.rows[name][self._at])
        if count := len(client.numbers):
            values[NUMBERS][:count] = client.numbers
        self.clear(self._rows(client), client.buffers)
        if self._store.layout.kinds.get("x") == "difference" and client.round_index >= 0:
            client.rows["x"][self._at] = 0.0

    def compute(self, then: Callable[[Server], None] | None, clients: list[Client]) -> None:
        """Do for clients' private coordinates what the server does (`then(server)` or nothing); then `clean`."""
        for client in clients if self and len(self._at) else ():
            if then is None or client.round is None:
                continue
            kept = client.kept[PRIVATE]
            values = {name: row for name, row in kept.items() if name not in (BUFFERS, NUMBERS)}
            server = Server(values, 1, self._segments, len(self._at), self._ascent)
            server.numbers = kept[NUMBERS][: len(client.numbers)] if NUMBERS in kept else client.numbers
            server.round = dataclasses.replace(
                client.round,
                participants=(client.index,),
                weights=(1.0,),
                participation=1.0,
                num_steps=float(client.num_steps),
            )
            then(server)
        self.clean()

    def clean(self) -> None:
        """Give the private coordinates of the server's rows values that are the same on all ranks."""
        if self:
            self.clear({**self._store.averaged_rows(), **self._store.server_rows()}, self._store.buffers)

    def clear(self, rows: Rows, buffers: torch.Tensor) -> None:
        """Give the private coordinates of some rows, name -> row, and buffers values that are the same on all ranks."""
        if self:
            for name, row in rows.items():
                row[self._at] = self._start if name == "x" else 0.0
            buffers[self._buffers_at] = self._buffers_start

    def model(self, client: Client, x: torch.Tensor, buffers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(x, buffers) of a client's own model: copies of the shared ones with its private values."""
        x, buffers, values = x.clone(), buffers.clone(), client.kept[PRIVATE]
        x[self._at], buffers[self._buffers_at] = values["x"], values[BUFFERS]
        return x, buffers

    def _rows(self, client: Client) -> Rows:
        """Name -> row of what a client works with: the exchanged rows, and the server's that it reads."""
        return {**{name: client.rows[name] for name in self._store.averaged_rows()}, **self._store.server_rows()}


def _positions(slices: Sequence[slice], device: torch.device) -> torch.Tensor:
    """[p] the positions in some slices."""
    pieces = [torch.arange(piece.start, piece.stop, device=device) for piece in slices]
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64, device=device)


def _ascent_among(private: Sequence[slice], variables: Variables) -> slice | None:
    """Which of the private values, in ascending order, are in the part of x that ascends; None: none of them."""
    part = range(variables.x.numel())[variables.ascent or slice(0)]
    begin, end = (
        sum(len(range(piece.start, min(piece.stop, edge))) for piece in private) for edge in (part.start, part.stop)
    )
    return slice(begin, end) if begin < end else None


def _compact(slices: Sequence[slice]) -> list[slice]:
    """Slices of the same lengths, one directly after the other, from 0."""
    ends = [0]
    for piece in slices:
        ends.append(ends[-1] + piece.stop - piece.start)
    return [slice(*edges) for edges in zip(ends, ends[1:])]


def matching(module: nn.Module, text: str, setting: str) -> set[str]:
    """The names of a module's parameters and buffers that match some patterns.

    Args:
        module: a `torch.nn.Module`. text: patterns separated by commas, each of names of parameters, buffers or
            modules; or "bn". setting: how the user gave it, for the message.

    Raises:
        UserError: if a pattern matches nothing.
    """
    names = list(dict.fromkeys([*module.state_dict(), *(name for name, _ in module.named_buffers())]))
    found: set[str] = set()
    norms = [prefix for prefix, part in module.named_modules() if isinstance(part, _BatchNorm)]
    for pattern in filter(None, map(str.strip, text.split(","))):
        patterns = [pattern, f"{pattern}.*"]
        if pattern == BATCH_NORM and norms:
            patterns = [f"{prefix}.*" for prefix in norms]
        meant = {name for name in names if any(fnmatch.fnmatchcase(name, glob) for glob in patterns)}
        if not meant:
            known = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
            raise UserError(
                f"{setting} = {text}: no layer is called {pattern}; the model has {known}{nearest(pattern, names)}"
            )
        found |= meant
    return found


def private_places(flat: FlatModule, text: str) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """(slices of x, slices of the float buffers) that patterns of names select in a `FlatModule`.

    Raises:
        UserError: if a pattern matches nothing, or only what is not averaged.
    """
    names = matching(flat.module, text, "private")
    private = tuple(part for name, part in zip(flat.names, flat.segments) if name in names)
    buffers = tuple(part for name, part in flat.buffer_slices.items() if name in names)
    if not private and not buffers:
        raise UserError(f"private = {text}: selects only frozen layers or counters, which are not averaged anyway")
    return private, buffers
