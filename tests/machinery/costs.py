"""What each algorithm costs, measured on a problem of one variable, where a vector is one number.

One round of two clients is run with oracles that count gradients and a link that counts what is
summed, so the table describes what the classes do. Only two facts are declared by the class: `downlink`
(what a server would send; fedmpi's server has a copy on every rank, so nothing is sent) and the paper,
in the docstring.
"""

import dataclasses
import fractions
import re
import types
from collections.abc import Callable
from typing import Any

import torch

from fedmpi import algorithms
from fedmpi.algorithms.base import Algorithm
from fedmpi.comm.solo import SoloLink
from fedmpi.federation.client import Client
from fedmpi.federation.participation import Plan
from fedmpi.federation.rounds import Federation
from fedmpi.federation.variables import Variables
from fedmpi.ground.registry import command_name, known
from fedmpi.ground.text import table as format_rows
from fedmpi.oracles import FunctionOracle

Number = int | fractions.Fraction
PERIOD = 12  # rounds


@dataclasses.dataclass(frozen=True)
class Cost:
    """Costs per client and round, vectors in units of the model's length d.

    Attributes:
        name: of the algorithm on the command line. paper: authors and year.
        up, down: vectors that a client sends to, and gets from, a server.
        up_alone, down_alone: further vectors of the drawn client, in methods that draw one.
        allreduces: vectors in each Allreduce of a round; at_start: in the one before the first round. Of exchanges
            that skip rounds, it is the mean over `PERIOD` rounds.
        numbers: that are averaged beside them in a round, in float64.
        gradients_per_step: in each local step. estimates: whether these are two-point estimates.
        passes: gradients of a client's whole data per round.
        gradients_alone: further gradients of the drawn client in each of its local steps but the last.
        private: names of the vectors that a client keeps from round to round and does not send.
        client_memory: vectors that a client works with: private, exchanged, scratch and gradients.
        server_memory: further vectors of the server's state, on every rank.
    """

    name: str
    paper: str
    up: Number
    down: Number
    up_alone: int
    down_alone: int
    allreduces: tuple[Number, ...]
    at_start: int
    gradients_per_step: int
    estimates: bool
    passes: int
    gradients_alone: int
    private: tuple[str, ...]
    client_memory: int
    server_memory: int
    numbers: int


def cost(algorithm: Callable[[], Algorithm] | Algorithm) -> Cost:
    """The `Cost` of an algorithm: a class, with its default settings, or an instance."""
    algorithm = algorithm if isinstance(algorithm, Algorithm) else algorithm()
    short, long = _measure(algorithm, 3), _measure(algorithm, 4)
    exchanges = algorithm.exchanges()
    first_alone = next((number for number, exchange in enumerate(exchanges) if exchange.alone), len(exchanges))
    shared = long.allreduces[:first_alone]
    rows = [name for exchange in exchanges for name in exchange.rows]
    alone = sum(long.allreduces[first_alone:])
    down = len(rows) if exchanges[-1].due is None else sum(shared)
    return Cost(
        name=command_name(type(algorithm)),
        paper=_paper(type(algorithm)),
        up=sum(long.allreduces) - alone,
        down=down if algorithm.downlink is None else len(algorithm.downlink),
        up_alone=alone,
        down_alone=sum(shared) if alone else 0,
        allreduces=tuple(number for number in long.allreduces if number),
        at_start=long.at_start,
        gradients_per_step=long.gradients[1] - short.gradients[1],
        estimates=algorithm.oracle == "two_point",
        passes=long.passes[1],
        gradients_alone=long.gradients[0] - short.gradients[0] - (long.gradients[1] - short.gradients[1]),
        private=algorithm.client_rows,
        client_memory=len(algorithm.exchanged)
        + len(algorithm.client_rows)
        + len(algorithm.scratch)
        + max(long.points_per_sample),
        server_memory=len(algorithm.server_rows),
        numbers=long.numbers,
    )


def table():
    """The costs of all algorithms as text, one line for each: what ``--list algorithms`` prints."""
    costs = [cost(cls) for cls in known(algorithms, Algorithm).values()]
    header = ("algorithm", "paper", "up", "down", "Allreduce", "start", "gradients", "client", "server", "keeps")
    return "\n".join(
        [
            format_rows([header, *(_line(c) for c in costs)], indent=""),
            "",
            "All numbers count vectors of the model's length d, per client and round. up, down: sent to and received",
            "from a server, if there were one (in fedmpi every rank has the server's state, and only the Allreduce is",
            "sent). start: averaged once before the first round. gradients: evaluated per local step; in zeroth-order",
            "methods, b1 (b2 + 1) losses estimate one gradient. client: in a client's memory, with its gradients;",
            "server: the server's state, on every rank; keeps: those that stay with a client between rounds.",
            "(+n drawn): further ones for the one client that a round draws (gradients: not in its last step).",
            "+ n numbers: averaged beside the vectors, 8 bytes each, in a message of their own.",
        ]
    )


def _line(c: Cost) -> tuple[str, ...]:
    def plus(number: Number, alone: int) -> str:
        return f"{number} (+{alone} drawn)" if alone else f"{float(number):g}"

    gradients = plus(c.gradients_per_step, c.gradients_alone)
    if c.estimates:
        gradients = f"0; {'' if gradients == '1' else gradients + ' '}b1 (b2 + 1) losses"
    passes = f" + {c.passes} full pass a round" if c.passes else ""
    beside = [f"{c.numbers} number{'s' if c.numbers > 1 else ''}"] if c.numbers else []
    return (
        c.name,
        c.paper,
        plus(c.up, c.up_alone),
        plus(c.down, c.down_alone),
        " + ".join([*map(_vectors, c.allreduces), *beside]),
        str(c.at_start),
        gradients + passes,
        str(c.client_memory),
        str(c.server_memory),
        ", ".join(c.private) or "-",
    )


def _vectors(number: Number) -> str:
    """2 as "2d", and 1/3, of one that is sent in every third round, as "d/3"."""
    above, below = number.as_integer_ratio()
    return f"{'' if above == 1 else above}d" + (f"/{below}" if below > 1 else "")


def _paper(cls: type) -> str:
    """'Authors year' from the docstring's line Source: Authors, "Title", ..., year."""
    source = re.search(r"Source:\s*(.*?)\n\s*\n|Source:\s*(.*)", cls.__doc__ or "", re.DOTALL)
    if source is None:
        return "-"
    text = " ".join(next(part for part in source.groups() if part).split())
    if text.startswith('"'):  # a title without authors
        return text.split('"')[1][:21] + "..."
    authors = re.split(r', "| et al\.', text)[0].split(", ")
    year = re.search(r"\b(19|20)\d\d\b(?!\.)", text)
    short = authors[0] if len(authors) == 1 and " et al." not in text else f"{authors[0]} et al."
    return f"{short} {year[0]}" if year else short


class _CountingOracle(FunctionOracle):
    """Gradients of ½ x², counted separately for samples and for the whole data."""

    def __init__(self, client: Client) -> None:
        super().__init__(lambda *point: None, client)
        self.gradients, self.passes, self.points = 0, 0, 1

    def draw_first(self) -> Any:
        return "first"

    def whole(self) -> Any:
        return "whole"

    def gradient(self, z: torch.Tensor, xi: Any) -> torch.Tensor:
        if xi == "whole":
            self.passes += 1
        elif xi != "first":
            self.gradients += 1
        return z.clone()

    def gradient_pair(self, z: torch.Tensor, z_prev: torch.Tensor, xi: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.points = 2
        return super().gradient_pair(z, z_prev, xi)


class _CountingLink(SoloLink):
    """Records the length of every block that is summed: rows are float32 here, and numbers float64."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[int] = []
        self.numbers = 0

    def average(self, block: torch.Tensor, divisor: float, out: torch.Tensor, kind: str = "own") -> None:
        super().average(block, divisor, out, kind)
        if block.dtype == torch.float64:
            self.numbers += block.numel()
        else:
            self.lengths.append(block.numel())


def _measure(algorithm: Algorithm, local_steps: int) -> types.SimpleNamespace:
    """What the start and one round of two clients take on one variable; lists per client, the drawn one first."""
    link = _CountingLink()
    start = Variables(torch.ones(1, dtype=torch.float32))
    plan = Plan(2, local_steps, chosen=lambda round_index: 0)
    federation = Federation(algorithm, link, dict.fromkeys(range(2), _CountingOracle), plan, start)
    oracles: list[Any] = [client.oracle for client in federation.clients]
    federation.start()
    at_start = sum(link.lengths)
    link.lengths.clear()
    link.numbers = 0
    for oracle in oracles:
        oracle.gradients = oracle.passes = 0
    rounds = PERIOD if any(exchange.due for exchange in algorithm.exchanges()) else 1
    sent: list[Number] = [0] * len(algorithm.exchanges())
    for _ in range(rounds):
        federation.run_round()
        for place in (place for place in federation.places if algorithm.exchanges()[place].rows):
            sent[place] += link.lengths.pop(0)
    if rounds > 1:
        sent = [fractions.Fraction(total, rounds) for total in sent]
        for oracle in oracles:
            oracle.gradients //= rounds
    return types.SimpleNamespace(
        allreduces=sent,
        at_start=at_start,
        numbers=link.numbers,
        gradients=[oracle.gradients for oracle in oracles],
        passes=[oracle.passes for oracle in oracles],
        points_per_sample=[oracle.points for oracle in oracles],
    )
