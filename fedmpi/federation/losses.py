"""The losses of a round, which of its values are not finite, and the message in which the ranks exchange both."""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fedmpi.aggregation.codecs.fixed import LOWEST, exponent_above
from fedmpi.comm.agreement import agreed_error
from fedmpi.comm.link import Link
from fedmpi.federation.buffers import BUFFERS, SentBuffers
from fedmpi.federation.client import Client
from fedmpi.ground.errors import Diverged, UserError
from fedmpi.oracles.flat_module import BufferPart

# Sent instead of the number of a client: by a rank that makes no more rounds, exchanges something else now, or has an
# error to report, or wants to `Reports.hold_meeting`.
ENDED, PAUSED, FAILED, WITHIN = -2, -3, -4, -5
AFTER = 1 << 20  # more than there are rows and buffers
_HINT = "try a smaller step_size, or a smaller clip_norm"
_INITIAL_HINT = "this is before the first step: check the values of the data and of the model's initial parameters"


class Losses:
    """The losses of a rank's clients in one exchange.

    On a GPU they stay there until `collect`: looking at a value waits for all that the GPU has still to compute.

    Attributes, from `collect` on:
        total: their sum; totals: of each client. number: of losses. With weights: a client's mean loss times its
            weight, and the sum of the weights.
        numbers: of each client, like totals. weights: [of each client], if they are one of the sums.
        exponents: after `measure`, of all clients.
        left_out: clients that `leave_out_if_faulty` has left out.
        bad_client: the first client with a value that is not finite, or -1; bad_row: the position of its row with
            that value, -1 if it is the sum of its losses; plus `AFTER` times the number of the stage that made it.

    Args:
        on_gpu: whether the rows are there. weights: number of a client -> its weight; None: all losses count the same.
    """

    def __init__(self, on_gpu: bool = False, weights: Mapping[int, float] | None = None) -> None:
        self.total, self.number, self.bad_client, self.bad_row = 0.0, 0.0, -1, -1
        self.totals: list[float] = []
        self.numbers: list[float] = []
        self.weights: list[list[float]] = []
        self._on_gpu, self._weights = on_gpu, weights
        self._places: Sequence[int] | None = None
        self._sums_weights = False
        self.exponents: list[int] = []
        self._rows_of: dict[int, Any] = {}  # number of a client -> what is known of its rows, see `check_rows`
        self._losses_of: dict[int, list[torch.Tensor]] = {}  # number of a client -> its losses, 0-d tensors
        self.left_out: list[int] = []  # numbers of clients

    def measure(
        self, places: Sequence[int], weights: Mapping[int, float], least: int, sums_weights: bool = False
    ) -> None:
        """From now on, find out how large values are.

        Args:
            places: of each row that is sent, each float buffer, and each number: the position of its exponent.
            weights: number of a client -> its weight. least: how many exponents there are at least.
            sums_weights: whether the weights of those that count are one of the sums of `terms_of`.
        """
        self._places, self._factors, self._sums_weights = places, weights, sums_weights
        self.exponents = [LOWEST] * max(least, *(place + 1 for place in places), 0)

    def check_rows(
        self,
        client: Client,
        region: torch.Tensor,
        names: Sequence[str],
        buffers: dict[int, torch.Tensor] | None = None,
    ) -> None:
        """Find values that are not finite in what a client is about to send: a last gradient has no loss after it.

        Args:
            region: what the client sends now, contiguous. names: of its rows.
            buffers: position -> values of float buffers; those that have been sent before are in the region, too.
        """
        rows = dict(enumerate(client.rows[name] for name in names))
        rows |= {len(names) + position: values for position, values in (buffers or {}).items() if values.numel()}
        self._check(client, region, rows)

    def check_numbers(self, client: Client, place: int) -> None:
        """The same for its numbers; `place`: of the first one behind rows and buffers."""
        self._check(client, client.numbers, {place + k: client.numbers[k] for k in range(len(client.numbers))})

    def check_stage(self, client: Client, region: torch.Tensor, rows: dict[str, torch.Tensor], number: int) -> None:
        """The same after stage `number`, from 1, for rows of all names: name -> values."""
        self._check(client, region, {number * AFTER + place: row for place, row in enumerate(rows.values())})

    def _check(self, client: Client, region: torch.Tensor, rows: dict[int, torch.Tensor]) -> None:
        if (self._on_gpu or self._places is not None) and rows:
            ends = [end.double() for row in rows.values() for end in row.aminmax()]  # nan if any value is
            self._rows_of.setdefault(client.index, []).append((torch.stack(ends), list(rows)))
            return
        # One pass over the memory; finite values may have an infinite sum.
        is_whole = sum(row.numel() for row in rows.values()) == region.numel()
        if not is_whole or not math.isfinite(region.sum()):
            bad = next((n for n, row in rows.items() if not row.isfinite().all()), None)
            if bad is not None:
                self._rows_of.setdefault(client.index, bad)

    def add(self, client: Client) -> None:
        """Take the losses that a client's oracle has collected."""
        self._losses_of[client.index] = client.oracle.take_losses()

    def add_if_none(self, client: Client) -> None:
        """Take losses of other passes, which count only if the local steps had none."""
        later = client.oracle.take_losses()
        self._losses_of[client.index] = self._losses_of[client.index] or later

    def leave_out_if_faulty(self, client: Client) -> bool:
        """Whether a client's losses and rows so far are not all finite; they do not count then. Waits for a GPU."""
        losses = self._losses_of.get(client.index, ())
        if all(map(math.isfinite, losses)) and client.index not in self._collect_rows():
            return False
        self._losses_of.pop(client.index, None)
        self._rows_of.pop(client.index, None)
        self.left_out.append(client.index)
        return True

    def collect(self) -> None:
        """Fill the attributes; on a GPU this is where the exchange waits for it."""
        losses = [loss for of_client in self._losses_of.values() for loss in of_client]
        values = iter(torch.stack(losses).tolist() if losses else ())
        bad_rows = self._collect_rows(is_measured=True)
        self.weights = [[self._factors[client] for client in self._losses_of]] if self._sums_weights else []
        for client, of_client in self._losses_of.items():
            total = float(sum(itertools.islice(values, len(of_client))))
            number: float = len(of_client)
            if self._weights is not None and of_client:
                total *= self._weights[client] / len(of_client)
                number = self._weights[client]
            self.total, self.number = self.total + total, self.number + number
            self.totals.append(total)
            self.numbers.append(number)
            if self.bad_client < 0 and (client in bad_rows or not math.isfinite(total)):
                self.bad_client, self.bad_row = client, bad_rows[client] if math.isfinite(total) else -1

    def _collect_rows(self, is_measured: bool = False) -> dict[int, int]:
        """Client -> the position of its first row with a value that is not finite, of those that have one."""
        if not (self._on_gpu or self._places is not None) or not self._rows_of:
            return self._rows_of
        checks = [check for of_client in self._rows_of.values() for check in of_client]
        bad: dict[int, int] = {}
        ends = iter(torch.cat([ends for ends, _ in checks]).tolist())
        for client, of_client in self._rows_of.items():
            checked = [{row: max(map(abs, [next(ends), next(ends)])) for row in rows} for _, rows in of_client]
            for row, value in ((row, value) for found in checked for row, value in found.items()):
                if not math.isfinite(value):
                    bad.setdefault(client, row)
            if is_measured and self._places is not None and client not in bad:
                self._take_exponents(checked, self._places, self._factors[client])
        return bad

    def _take_exponents(self, checked: list[dict[int, float]], places: Sequence[int], weight: float) -> None:
        """Let the exponents be those of one more client, too: [row -> its largest value] of each check, in order."""
        largest: dict[int, float] = {}
        for found in checked:  # a stage may make values smaller
            of_check: dict[int, float] = {}
            for row, value in found.items():
                stage, position = divmod(row, AFTER)
                place = position if stage else places[position]
                of_check[place] = max(of_check.get(place, 0.0), value)
            largest |= of_check
        for place, value in largest.items():
            self.exponents[place] = max(self.exponents[place], exponent_above(weight * value))


@dataclasses.dataclass(frozen=True)
class RoundReport:
    """What all ranks exchanged after their clients' work.

    Attributes:
        mean: loss over all clients; nan if no client has one, or one is not finite.
        num_gradients: that the clients of all ranks have evaluated since the last such message.
        requests: the bits of all ranks. flags: those of `SentBuffers.flags`, of all ranks.
        bad: [(rank, client, position of its row or -1, sum of its losses)] of ranks with values that are not finite.
        num_left_out: clients of all ranks that are left out.
        exponents: of all ranks, of rows, buffers, and `Reports.terms`, if losses and gradients are added with the rows.
    """

    mean: float
    num_gradients: int
    requests: int
    bad: list[tuple[int, int, int, float]]
    flags: list[int] = dataclasses.field(default_factory=list)
    num_left_out: int = 0
    exponents: list[int] = dataclasses.field(default_factory=list)

    def check_finite(
        self,
        round_index: int,
        names: Sequence[str],
        buffers: Sequence[BufferPart] = (),
        stages: Sequence[str] = (),
    ) -> None:
        """Check that all losses, and all rows that are sent, are finite.

        Args:
            round_index: of the running round; -1 during the start. names: of the rows that are sent.
            buffers: list of `BufferPart`, all float buffers. stages: names of the stages.

        Raises:
            Diverged: with the first rank and client whose loss or row is not finite, and the stage that made it so.
        """
        for rank, client, row, total in self.bad:
            when = when_in(round_index)
            problem = f"the loss of client {client} on rank {rank} is {total}"
            stage, row = divmod(row, AFTER) if row >= 0 else (0, row)
            if stage:
                name, of = stages[stage - 1], f"client {client} on rank {rank}"
                values = f"row {names[row]}" if row < len(names) else BUFFERS
                raise Diverged(f"{when}: {name} made values of {values} of {of} that are not finite")
            if row >= 0:
                sent = f"{_name(row, names, buffers)} of client {client} on rank {rank}"
                problem = f"{sent} has values that are not finite"
                if row >= len(names) + len(buffers):
                    problem = f"{sent} is not finite"
            raise Diverged(f"{when}: {problem}; {_INITIAL_HINT if round_index < 0 else _HINT}")


def _name(place: int, names: Sequence[str], buffers: Sequence[BufferPart]) -> str:
    """What a client sends at a place: rows, then buffers, then numbers."""
    behind, beside = place - len(names), place - len(names) - len(buffers)
    if beside >= 0:
        return f"number {beside}"
    return f"row {names[place]}" if behind < 0 else f"buffer '{buffers[behind].name}'"


def when_in(round_index: int) -> str:
    """In which round, for a message; -1 is the start."""
    return "in the initial gradients" if round_index < 0 else f"in round {round_index + 1}"


class Reports:
    """The messages in which the ranks exchange their losses, or say that they do something else. Collective.

    Args:
        link: a `Link`. sent: the `SentBuffers`, whose flags are exchanged, too.
        num_exponents: if not 0, losses and gradients are added with the rows, and so many exponents are exchanged.

    Attributes:
        hold_meeting: what all ranks do when one asks for it within a round. Collective.
    """

    def __init__(self, link: Link, sent: SentBuffers, num_exponents: int = 0) -> None:
        self._link, self._sent, self._num_exponents = link, sent, num_exponents
        self.hold_meeting: Callable[[], None] = lambda: None

    def exchange(self, losses: Losses, num_gradients: int, request: int, rounds_done: int) -> RoundReport:
        """The `RoundReport` of the `Losses` of all ranks, exchanged in one message.

        Args:
            num_gradients: evaluated by this rank's clients since the last message.
            request: a whole number, whose bits are this rank's requests, see `Federation.begin_round`.
            rounds_done: for the message of the error.

        Raises:
            UserError: on every rank, if another one calls `announce` instead.
        """
        link, flags, exponents = self._link, self._sent.flags(), [0] * self._num_exponents
        own_numbers = [losses.total, losses.number, losses.bad_client, num_gradients, request, losses.bad_row]
        own_numbers.append(len(losses.left_out))
        if exponents:  # of what is not finite, the message says what it is
            own_numbers[:2], own_numbers[3] = [losses.total if losses.bad_client >= 0 else 0.0, 0.0], 0
            of_terms = [exponent_above(max(map(abs, terms), default=0)) for terms in terms_of(losses, num_gradients)]
            exponents = [*losses.exponents, *exponents[len(losses.exponents) : -len(of_terms)], *of_terms]
        everywhere = self._everyone([*own_numbers, *flags, *exponents])
        _check_same_call(link, everywhere, rounds_done)
        totals, numbers, bad_clients, gradients, requests, bad_rows, left_out, *rest = zip(*everywhere)
        joined = [functools.reduce(operator.or_, map(int, column)) for column in rest[: len(flags)]]
        found = [
            (rank, int(client), int(row), total)
            for rank, client, row, total in zip(link.members, bad_clients, bad_rows, totals)
            if client >= 0
        ]
        bits = functools.reduce(operator.or_, map(int, requests))
        mean = math.nan
        if any(numbers) and not found:
            mean = sum(totals) / sum(numbers)
        largest = [int(max(column)) for column in rest[len(flags) :]]
        return RoundReport(mean, int(sum(gradients)), bits, found, joined, int(sum(left_out)), largest)

    def ask(self, rounds_done: int) -> None:
        """Say that this rank wants to meet within the round; those that wait for its end come, too. Collective.

        Raises:
            AgreedUserError: as `announce`.
        """
        _check_same_call(self._link, self._everyone(self._numbers_of(WITHIN)), rounds_done)

    def asking(self) -> list[float]:
        """The message of `ask`, for a loop that goes on until the others have come; see `answered`."""
        return self._numbers_of(WITHIN)

    def answered(self, everywhere: list[list[float]], rounds_done: int) -> None:
        """Take what all ranks have sent when one sent `asking`; raises as `announce`. All ranks meet then."""
        if FAILED in (report[2] for report in everywhere):
            _check_same_call(self._link, everywhere, rounds_done)

    def _everyone(self, numbers: list[float]) -> list[list[float]]:
        """All ranks' messages; if a rank asks for it, they meet first, and those that do not ask repeat theirs."""
        while True:
            if self._num_exponents:
                everywhere: list[list[float]] = self._link.allgather(numbers, "exponents").tolist()
            else:
                everywhere = self._link.allgather(numbers, "losses").tolist()
            calls = [report[2] for report in everywhere]
            if WITHIN not in calls or FAILED in calls:
                return everywhere
            self.hold_meeting()
            if numbers[2] == WITHIN:
                return []

    def _numbers_of(self, call: int) -> list[float]:
        return [0.0, 0, call, 0, 0, -1, 0, *self._sent.flags(), *[0] * self._num_exponents]

    def announce(self, call: int, rounds_done: int, error: BaseException | None = None) -> None:
        """Say to the other ranks that this one has ENDED, PAUSED or FAILED (by `error`); instead of `exchange`.

        Raises:
            AgreedUserError: with the text of the error on the lowest rank that has one; all ranks end then.
            UserError: on every rank, if another one does not say the same.
        """
        _check_same_call(self._link, self._everyone(self._numbers_of(call)), rounds_done, error)


NUM_TERMS = 3  # without weights


def terms_of(losses: Losses, num_gradients: int) -> list[list[float]]:
    """This rank's terms of the sums of losses, of what they are divided by, of gradients, and perhaps of weights."""
    return [losses.totals, losses.numbers, [num_gradients], *losses.weights]


def _check_same_call(
    link: Link, everywhere: list[list[float]], rounds_done: int, error: BaseException | None = None
) -> None:
    """Raise UserError if some ranks average while others do something else, or the lowest one's error."""
    calls = [min(report[2], -1) for report in everywhere]  # those that average send the number of a client, or -1
    if FAILED in calls:
        raise agreed_error(link, str(error) if calls.index(FAILED) == link.rank else None) from error
    if len(set(calls)) <= 1:
        return
    does = {-1: "average", ENDED: "have ended", PAUSED: "call fed.any, mean or batches"}
    ranks_of = {call: [rank for rank, its_call in enumerate(calls) if its_call == call] for call in does}
    found = [f"ranks {ranks_of[call]} {action}" for call, action in does.items() if ranks_of[call]]
    raise UserError(
        f"after {rounds_done} rounds {', '.join(found)}: all ranks must make the same number of local steps, and the "
        "same calls (for loaders of different lengths: for batch in fed.batches(loader))"
    )
