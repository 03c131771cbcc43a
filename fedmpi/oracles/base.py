"""What an oracle is: how a client answers for its data."""

import abc
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch
from torch import nn

if TYPE_CHECKING:
    from fedmpi.oracles.flat_module import FlatModule


class Client(Protocol):
    """What an oracle uses and keeps of its client, a `fedmpi.federation.client.Client`, which owns it."""

    buffers: torch.Tensor  # [num_buffers] the model's float buffers, as it has them during its turn
    counters: list[torch.Tensor]  # the model's integer buffers as this client left them
    carried: dict[str, Any]  # what one sample leaves to the next one (a recurrent state)
    num_draws: int  # samples drawn so far
    num_gradients: int  # evaluated so far

    @property
    def index(self) -> int: ...


class Task(Protocol):
    """What an oracle asks of a task (`fedmpi.tasks`)."""

    def batch(self, client: int, indices: Any, *carried: dict[str, Any]) -> Any: ...
    def loss(self, module: nn.Module, batch: Any) -> torch.Tensor: ...


@dataclasses.dataclass(frozen=True)
class Sample:
    """What one local step draws.

    Attributes:
        number: of the draw, 0, 1, 2, ..., FIRST or WHOLE (`fedmpi.ground.streams`). batch: as the task makes it.
        noise: seed of what the model and the oracle draw at random on this sample.
    """

    number: int
    batch: Any
    noise: int


@dataclasses.dataclass(frozen=True)
class LocalObjective:
    """What a client minimises, and how its gradients are treated before an algorithm sees them.

    Args:
        flat: the `FlatModule`, shared by the clients of a rank.
        task: gives the loss and the minibatches.
        sampler: `sampler(number) -> indices` into the client's rows, number = 0, 1, 2, ...,
            FIRST for the initial batch and WHOLE for all rows (`fedmpi.data.sampler`).
        seed: of the run; the noise of sample t is the stream (seed, "noise", client, t).
        clip_norm: largest norm of a gradient, or None. weight_decay: times z, added after clipping.
        ascent: the slice of a row in which the problem ascends, or None.
        ascent_scale: factor of the gradient in that block: the step size there over that of the rest, for
            algorithms that have only one step size.
    """

    flat: "FlatModule"
    task: Task
    sampler: Callable[[int], Any]
    seed: int = 0
    clip_norm: float | None = None
    weight_decay: float = 0.0
    ascent: slice | None = None
    ascent_scale: float = 1.0


Drawn = TypeVar("Drawn")  # what an oracle draws: a `Sample`, or what stands for one


class Oracle(abc.ABC, Generic[Drawn]):
    """How a client answers for its data: samples, and gradients on them. Not collective.

    What it must remember from one round to the next it keeps in its `client`.

    Attributes:
        kind: the `OracleKind` that made it, or None.
    """

    kind: Any = None

    def __init__(self, client: Client) -> None:
        self.client = client

    def expect(self, num_draws: int) -> None:  # noqa: B027  most oracles make nothing ahead
        """Prepare for `num_draws` draws, as far as is known. It changes no sample."""

    def adopt(self) -> None:  # noqa: B027  most oracles have no model
        """Take what the model has become into the vectors, before what its client sends is made.

        Raises:
            UserError: if it has other parameters than at the beginning.
        """

    @abc.abstractmethod
    def draw(self) -> Drawn:
        """The next sample ξ of this client's stream."""

    @abc.abstractmethod
    def draw_first(self) -> Drawn:
        """The initial batch B_0, from a stream of its own; drawing it changes no other sample."""

    @abc.abstractmethod
    def whole(self) -> Drawn:
        """All data of this client as one sample, for exact gradients of f_i."""

    @abc.abstractmethod
    def gradient(self, z: torch.Tensor, xi: Drawn) -> torch.Tensor:
        """∇f_i(z; ξ): a [dim] row that stays valid until the next call; its ascent block is negated."""

    @abc.abstractmethod
    def gradient_pair(self, z: torch.Tensor, z_prev: torch.Tensor, xi: Drawn) -> tuple[torch.Tensor, torch.Tensor]:
        """(∇f_i(z; ξ), ∇f_i(z_prev; ξ)), two [dim] rows that stay valid until the next call.

        Both see the same minibatch, dropout masks and directions; only the first updates the running
        statistics of batch-norm layers and counts as training loss.
        """

    def take_losses(self) -> list[torch.Tensor]:
        """The losses since the last call, 0-d tensors; forgets them."""
        return []
