"""What a client has to remember: a flat dict, which a checkpoint contains."""

from typing import Any

import torch

from fedmpi.federation.client import Client
from fedmpi.federation.nested import flatten, unflatten
from fedmpi.ground.errors import UserError

SKIPPED = "skipped"  # the entry of `Client.kept` with the rows that skip rounds: name -> [dim]
NUMBERS = ("num_draws", "num_undone", "num_gradients")


def state_of_client(client: Client) -> dict[str, Any]:
    """Name -> tensor or number: what a client needs to go on after a round.

    Raises:
        UserError: if `carried` has something that a checkpoint cannot hold.
    """
    rows = {f"rows/{name}": client.rows[name] for name in client.own}
    kept = {f"kept/{stage}/{name}": row for stage, rows_of in client.kept.items() for name, row in rows_of.items()}
    counters = {f"counters/{number}": counter for number, counter in enumerate(client.counters)}
    numbers = {name: getattr(client, name) for name in NUMBERS}
    numbers |= {f"skipped/{name}": int(name in client.skipped) for name in client.kept.get(SKIPPED, ())}
    try:
        carried = flatten(client.carried, "carried")
    except TypeError as error:
        raise UserError(f"task: what a sample leaves to the next one, {error}") from None
    return {**rows, **kept, **counters, **numbers, **carried}


def restore_client(client: Client, state: dict[str, Any]) -> None:
    """Take what `state_of_client` gave; tensors are copied."""
    for name in client.own:
        client.rows[name].copy_(state[f"rows/{name}"])
    for stage, rows in client.kept.items():
        for name, row in rows.items():
            row.copy_(state[f"kept/{stage}/{name}"])
    for number, counter in enumerate(client.counters):
        counter.copy_(state[f"counters/{number}"])
    client.num_draws, client.num_gradients = int(state["num_draws"]), int(state["num_gradients"])
    client.num_undone = int(state.get("num_undone", 0))
    client.skipped = {name for name in client.kept.get(SKIPPED, ()) if state[f"skipped/{name}"]}
    client.carried.clear()
    device = next(iter(client.rows.values())).device if client.rows else "cpu"  # the state may be that of a CPU or GPU
    client.carried.update(unflatten(state, "carried", device))


def undo(client: Client, before: dict[str, Any]) -> None:
    """Let a client take the state of before a turn that does not count, but go on with later samples than it had."""
    draws, gradients = client.num_draws, client.num_gradients
    restore_client(client, before)
    client.num_undone += draws - client.num_draws
    client.num_draws, client.num_gradients = draws, gradients


def copied(state: dict[str, Any]) -> dict[str, Any]:
    """A state with tensors of its own."""
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
