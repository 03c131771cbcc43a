"""A round that is not over: what a rank's clients have done in it, for a checkpoint, and how the round goes on.

Nothing has crossed since the exchange began, so that each rank may be at a local step of its own. A client that has
made all its local steps is kept as it was after the last one: its turn ends again when the round goes on.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fedmpi.federation.client import Client
from fedmpi.federation.client_state import copied, restore_client, state_of_client
from fedmpi.federation.observer import Observer
from fedmpi.federation.rounds import Federation
from fedmpi.federation.state import state_before
from fedmpi.ground.errors import UserError

WITHIN = "within/"  # how the names of a turn begin, among those of its client
STAGES = "federation/stages/"  # how names of what stages keep for all clients begin


class Turns(Observer):
    """Keeps what clients have done in the current round.

    Args:
        after_step: called after every local step, when the round can be left.

    Attributes:
        keeps: whether, from the next exchange on, clients whose turn is over are kept, which takes as much memory as
            their rows; otherwise `state` is None.
    """

    def __init__(self, after_step: Callable[[], None]) -> None:
        self._after_step, self.keeps = after_step, True
        # What the aggregation, its codec and the stages kept as the exchange began.
        self._begun: dict[str, Any] = {}
        self._stages: dict[str, Any] = {}
        self._ended: dict[int, dict[str, Any]] = {}  # client -> its turn
        self._is_kept = False  # whether that is so of the current exchange
        self._number = -1  # of the exchange
        self._current: Client | None = None  # whose turn it is

    def begin_exchange(self, federation: Federation, number: int) -> None:
        self._number, self._current, self._ended = number, None, {}
        self._is_kept = self.keeps and federation.current.index >= 0
        if self._is_kept:
            shared = ((name, value) for name, value in federation.state().items() if name.startswith(STAGES))
            self._begun, self._stages = state_before(federation), copied(dict(shared))

    def after_step(self, federation: Federation, client: Client) -> None:
        self._current = client
        self._after_step()

    def end_turn(self, federation: Federation, client: Client) -> None:
        if self._is_kept and federation.exchange.work is None:
            self._ended[client.index] = copied(_turn(federation, client))

    def after_round(self, federation: Federation) -> None:
        self._is_kept, self._current, self._ended = False, None, {}

    def state(self, federation: Federation) -> dict[str, Any] | None:
        """This rank's state within a round: name -> tensor (a view) or number; None if it is not known.

        Between two exchanges of local steps, it is not.
        """
        if not self._is_kept or federation.exchange.work is not None:
            return None
        turns = dict(self._ended)
        if self._current is not None and self._current.index not in turns:
            turns[self._current.index] = _turn(federation, self._current)
        store, state = federation.store, federation.state(self._begun) | self._stages
        for index, turn in turns.items():
            state = {name: value for name, value in state.items() if not name.startswith(f"clients/{index}/")}
            state |= {f"clients/{index}/{name}": value for name, value in turn.items()}
        own: dict[str, Any] = {"number": self._number, "num_reported": federation.num_reported}
        own |= {"agreed": store.tail.sent.agreed, "places": list(federation.places), "requests": federation.requests}
        if (start := federation.round_start) is not None:
            own |= {f"start/{name}": row for name, row in start.rows.items()} | {"start_buffers": start.buffers}
        own |= {f"unsent/{place}": tensor for place, tensor in enumerate(store.kept_for_later())}
        return state | {f"{WITHIN}{name}": value for name, value in own.items()}


def _turn(federation: Federation, client: Client) -> dict[str, Any]:
    """What a client is after its current local step."""
    rows = {f"rows/{name}": row for name, row in client.rows.items() if name not in client.own}
    own: dict[str, Any] = {"step": client.step_index + 1, **rows, "buffers": client.buffers}
    oracle: Any = client.oracle
    if losses := oracle.losses:
        own["losses"] = torch.stack([loss.detach() for loss in losses])
    if len(client.numbers):
        own["numbers"] = client.numbers
    own |= {f"before/{name}": value for name, value in federation.left_out.before_turn.items()}
    parts = {
        name.removeprefix(f"clients/{client.index}/"): value
        for name, value in federation.state().items()
        if name.startswith(f"clients/{client.index}/")
    }
    return state_of_client(client) | parts | {f"{WITHIN}{name}": value for name, value in own.items()}


def is_within(state: Mapping[str, Any]) -> bool:
    """Whether a state was taken within a round."""
    return f"{WITHIN}number" in state


def go_on(federation: Federation, state: Mapping[str, Any], request: Callable[[], int] = int) -> float:
    """The rest of a round, of a federation that has restored the `Turns.state` of this rank; see `run_round`.

    Raises:
        KeyError: if something is missing.
    """
    own = {name.removeprefix(WITHIN): value for name, value in state.items() if name.startswith(WITHIN)}
    number, store = int(own["number"]), federation.store
    due = federation.begin_round(request)
    if federation.places != [int(place) for place in own["places"]]:
        raise UserError("the state was taken in a round with other exchanges")
    federation.num_reported, federation.requests = int(own["num_reported"]), int(own["requests"])
    store.tail.sent.agree_on(own["agreed"])
    for place, tensor in enumerate(store.kept_for_later()):
        tensor.copy_(own[f"unsent/{place}"])
    if (start := federation.round_start) is not None:
        start.restore({name: own[f"start/{name}"] for name in start.rows}, own["start_buffers"])
    for client in federation.begin_exchange(due[number], number):
        prefix = f"clients/{client.index}/"
        of_client = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        if f"{WITHIN}step" in of_client:
            _end_turn(federation, client, of_client)
        else:
            federation.work(client)
    losses = [(due[number], federation.end_exchange())]
    losses += [(due[later], federation.run_exchange(due[later], later)) for later in range(number + 1, len(due))]
    return federation.end_round(losses)


def _end_turn(federation: Federation, client: Client, state: Mapping[str, Any]) -> None:
    """The rest of a client's turn, of which `state` is `_turn`."""
    own = {name.removeprefix(WITHIN): value for name, value in state.items() if name.startswith(WITHIN)}
    first_step, device = int(own["step"]), federation.store.block.device
    federation.begin_turn(client, first_step)
    client.step_index = first_step - 1
    restore_client(client, dict(state))
    for name, row in client.rows.items():
        if name not in client.own:
            row.copy_(own[f"rows/{name}"])
    client.buffers.copy_(own["buffers"])
    client.numbers.copy_(own.get("numbers", client.numbers))
    oracle: Any = client.oracle
    oracle.losses = list(own.get("losses", torch.empty(0)).to(device).unbind())
    before = {name.removeprefix("before/"): value for name, value in own.items() if name.startswith("before/")}
    federation.left_out.before_turn = copied(before)
    for step in range(first_step, client.num_steps):
        client.step_index = step
        federation.algorithm.local_step(client, federation.server_seen_by_clients, client.oracle)
        federation.observer.after_step(federation, client)
    federation.end_turn(client)
