"""The state of a federation between two rounds as one flat dict, which a checkpoint contains."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from fedmpi.federation.client import Client, Server
from fedmpi.federation.client_state import copied, restore_client, state_of_client
from fedmpi.federation.nested import flatten, unflatten
from fedmpi.federation.parts import Parts
from fedmpi.federation.variables import Iterate
from fedmpi.ground.errors import UserError

BEGINNING = ("aggregation", "numbers", "codec")  # the parts whose `begin` may change what they keep


def state_of(federation: Parts, begun: dict[str, Any] | None = None) -> dict[str, Any]:
    """The state of this rank: name -> tensor, number or list of numbers.

    Names begin with "federation/", "server/" (the same on every rank) or "clients/INDEX/". Tensors are
    views: they change when the next round runs.

    Args:
        begun: what `state_before` gave, for an exchange that is begun again.
    """
    own: dict[str, Any] = {name: getattr(federation, name) for name in ("round_index", "num_gradients")}
    own["num_left_out"] = federation.left_out.number
    own["present"] = sorted(federation.present)
    own["sent_buffers"] = sorted(federation.store.tail.sent.sent)
    own |= {f"seconds/{part}": seconds for part, seconds in federation.seconds.items()}
    own |= {f"traffic/{name}": number for name, number in dataclasses.asdict(federation.link.traffic).items()}
    if federation.selected is not None:
        own |= {f"selected/{name}": value for name, value in vars(federation.selected).items()}
    clients = {
        f"{client.index}/{name}": value
        for client in federation.clients
        for name, value in state_of_client(client).items()
    }
    now = (name for name in federation.named if begun is None or name not in BEGINNING)
    return {
        **{f"federation/{name}": value for name, value in own.items()},
        **{f"server/{name}": value for name, value in _server_rows(federation).items()},
        **{f"clients/{name}": value for name, value in clients.items()},
        **(begun or {}),
        **{name: value for part in now for name, value in _state_of_part(federation, part).items()},
    }


def state_before(federation: Parts) -> dict[str, Any]:
    """Copies of what the parts keep that the next exchange will begin with: see `state_of`."""
    found: dict[str, Any] = {}
    for name in BEGINNING:
        if name in federation.named:
            with contextlib.suppress(Exception):  # it makes what it keeps in its first exchange
                found |= _state_of_part(federation, name)
    return copied(found)


def _state_of_part(federation: Parts, name: str) -> dict[str, Any]:
    part = federation.named[name]
    found = {f"federation/{key}": value for key, value in _flat(name, part.state()).items()}
    for index in (client.index for client in federation.clients):
        of_client = _flat(name, part.client_state(index))
        found |= {f"clients/{index}/{key}": value for key, value in of_client.items()}
    return found


def restore_state(federation: Parts, state: Mapping[str, Any]) -> None:
    """Let a federation go on from a state that `state_of` returned; tensors are copied.

    A client without a state begins like one that was absent in all rounds so far.

    Raises:
        KeyError: if something is missing.
    """
    own = _under("federation/", state)
    federation.round_index, federation.num_gradients = int(own["round_index"]), int(own["num_gradients"])
    federation.left_out.number = int(own["num_left_out"])
    federation.present = {int(client) for client in own["present"]}
    for kind in federation.seconds:
        federation.seconds[kind] = float(own[f"seconds/{kind}"])
    federation.link.traffic.restore({name: int(number) for name, number in _under("traffic/", own).items()})
    if "selected/x" in own:
        device = federation.server.x.device  # that of the state may be another one
        x, buffers = (own[f"selected/{name}"].to(device, copy=True) for name in ("x", "buffers"))
        federation.selected = Iterate(int(own["selected/round"]), x, buffers, float(own["selected/value"]))
    for name, row in _server_rows(federation).items():
        row.copy_(state[f"server/{name}"])
    federation.store.tail.sent.agree_on(federation.store.buffers, map(int, own["sent_buffers"]))
    for name, part in federation.named.items():
        part.restore(_nested(name, own))
    for client in federation.clients:
        own_state = _under(f"clients/{client.index}/", state)
        for name, part in federation.named.items():
            part.restore_client(client.index, _nested(name, own_state))
        if own_state:
            restore_client(client, own_state)
        else:
            federation.show_round(federation.plan.start())
            work_alone(federation, federation.algorithm.client_start, [client])
    federation.num_reported = sum(client.num_gradients for client in federation.clients)


def kept_state(federation: Parts) -> dict[str, Any]:
    """A copy of the state to which `go_back` returns; {} if a lost rank ends the job anyway."""
    if not federation.link.survives:
        return {}
    return copied(state_of(federation))


def go_back(federation: Parts, kept: dict[str, Any]) -> None:
    """Return to a kept state, but for what has been spent since: time, messages, gradients."""
    spent = ("federation/seconds/", "federation/traffic/", "federation/num_gradients")
    restore_state(federation, kept | {name: v for name, v in state_of(federation).items() if name.startswith(spent)})
    for client in federation.clients:
        client.oracle.take_losses()
        client.oracle.expect(0)  # samples that were made ahead are those of later steps


def work_alone(
    federation: Parts, action: Callable[[Client, Server], None], clients: Iterable[Client] | None = None
) -> None:
    """Do `action(client, server)` in the turn of some clients, None: all of this rank; nothing is averaged."""
    federation.store.begin_exchange((), is_first=True)
    for client in federation.clients if clients is None else clients:
        federation.store.begin_turn(federation.clients.index(client), client.skipped)
        federation.private.give_back(client)
        action(client, federation.server_seen_by_clients)
        federation.private.take(client)


def check_parts(federation: Parts) -> None:
    """Check that what the parts keep can be in a checkpoint, as far as there is something yet.

    Raises:
        UserError: with the place of what cannot.
    """
    for name, part in federation.named.items():
        try:
            states = part.state(), *(part.client_state(client.index) for client in federation.clients)
        except Exception:  # it makes what it keeps in its first exchange
            continue
        for state in states:
            _flat(name, state)


def _flat(name: str, state: Any) -> dict[str, Any]:
    """The state of a part as name -> tensor or number; nothing if it has none."""
    try:
        return flatten(state, name) if state else {}
    except TypeError as error:
        raise UserError(f"the state of {error}") from None


def _nested(name: str, flat: dict[str, Any]) -> Any:
    return unflatten(flat, name) if f"{name}/nested" in flat else {}


def _server_rows(federation: Parts) -> dict[str, torch.Tensor]:
    """Name -> row of what is the same on all ranks, the float buffers among them."""
    store = federation.store
    return {**store.averaged_rows(), **store.server_rows(), "buffers": store.buffers}


def _under(prefix: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a state whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
