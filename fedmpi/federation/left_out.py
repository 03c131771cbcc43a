"""Clients with a loss or a row that is not finite, where `Sending.faulty` is "leave_out": the round goes on without."""

from typing import Any

from fedmpi.aggregation.base import Aggregation
from fedmpi.comm.agreement import agreed_error
from fedmpi.comm.link import Link
from fedmpi.comm.ranks import describe_clients
from fedmpi.federation.client import Client
from fedmpi.federation.client_state import copied, state_of_client, undo
from fedmpi.federation.losses import when_in
from fedmpi.federation.participation import Plan
from fedmpi.federation.round import Round
from fedmpi.ground.errors import Diverged, UserError
from fedmpi.ground.text import Log

log = Log(__name__)


class LeftOut:
    """Which clients are left out.

    Args:
        is_on: whether any would be; otherwise such a loss or row ends the run.

    Attributes:
        clients: of all ranks, those that are left out of the current round, or were of the last one.
        number: how many were so far, in all rounds.
        before_turn: the state of this rank's client whose turn it is, as its turn began.
    """

    def __init__(self, is_on: bool) -> None:
        self.is_on, self.clients, self.number = is_on, frozenset[int](), 0
        self.before_turn: dict[str, Any] = {}

    def begin_turn(self, client: Client) -> None:
        """Keep what a client is before its turn."""
        if self.is_on:
            self.before_turn = copied(state_of_client(client))

    def undo_turn(self, client: Client) -> None:
        """Its turn does not count; it goes on with later samples."""
        undo(client, self.before_turn)

    def leave_out(self, faulty: list[int], current: Round, link: Link, aggregations: list[Aggregation]) -> None:
        """Let the averages be without the clients that are `faulty`, of this rank. Collective on the link.

        Raises:
            Diverged: on every rank, if none is left. UserError: on every rank, if too few are left.
        """
        out = frozenset(map(int, link.allgatherv(faulty, "left out")))
        self.clients, self.number = self.clients | out, self.number + len(out)
        when, who = when_in(current.index), describe_clients(out)
        if not set(aggregations[0].weights) - out:
            raise Diverged(f"{when}: {who}, all that take part, have a loss or rows that are not finite")
        if link.rank == 0:
            log.warning(f"{when}: {who} left out: a loss or values of a row are not finite")
        try:
            for aggregation in aggregations:
                aggregation.leave_out(out)
        except UserError as error:  # on every rank
            raise agreed_error(link, f"{when}: {error}" if link.rank == 0 else None) from None

    def fewer(self, current: Round, plan: Plan, lost: frozenset[int]) -> Round:
        """The current round as it would have been planned without them."""
        absent = lost | self.clients
        planned = plan.start(absent) if current.index < 0 else plan.round(current.index, absent)
        is_shortened = current.nominal_steps < planned.nominal_steps
        return planned.shortened(current.nominal_steps) if is_shortened else planned
