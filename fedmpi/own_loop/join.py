"""`join`: an algorithm of the papers in the user's own training loop."""

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from fedmpi import algorithms
from fedmpi.aggregation.base import Aggregation
from fedmpi.aggregation.sending import chosen
from fedmpi.algorithms.base import Algorithm
from fedmpi.comm.agreement import agree
from fedmpi.comm.job.code import check_same_code
from fedmpi.comm.job.opening import TIMEOUT, open_link
from fedmpi.federation import own_steps
from fedmpi.federation.frozen import freeze as freeze_parameters
from fedmpi.ground.errors import UserError
from fedmpi.ground.registry import command_name, find
from fedmpi.oracles.architecture import unwrapped
from fedmpi.oracles.closure import ClosureOracle
from fedmpi.oracles.flat_module import FlatModule
from fedmpi.own_loop.base import Choices, OwnLoop
from fedmpi.own_loop.checks import check_arguments, check_known, check_may_differ, check_same
from fedmpi.own_loop.recording import Recording, chosen_recording

if TYPE_CHECKING:
    from mpi4py import MPI

Closure = Callable[[], torch.Tensor]


def join(
    model: torch.nn.Module,
    algorithm: str | Algorithm | type[Algorithm] = "fafed",
    local_steps: int = 10,
    comm: "MPI.Intracomm | None" = None,
    *,
    weight: float = 1.0,
    timeout: float = TIMEOUT,
    clip_norm: float | None = None,
    weight_decay: float = 0.0,
    buffers: Literal["equal", "rank0", "average"] = "equal",
    private: str | None = None,
    freeze: str | None = None,
    participation: float = 1.0,
    seed: int = 0,
    aggregation: str | Aggregation | type[Aggregation] = "mean",
    stages: str | Sequence[Any] = (),
    codec: Any = None,
    faulty: Literal["end", "leave_out"] = "end",
    record: str | os.PathLike[str] | Recording | None = None,
    may_differ: Literal["code"] | None = None,
    **settings: Any,
) -> "Joined":
    """Let this rank be a client of a federation that trains `model` by an algorithm. Collective on `comm`.

    The loop stays the caller's; the algorithm takes the place of the optimizer:

    >>> import fedmpi, torch
    >>> model, inputs, targets = torch.nn.Linear(2, 1), torch.eye(2), torch.ones(2, 1)
    >>> fed = fedmpi.join(model, algorithm="fedavg", local_steps=5, step_size=0.5)
    >>> for _ in range(100):
    ...     loss = fed.step(lambda: torch.nn.functional.mse_loss(model(inputs), targets))
    >>> fed.finish()
    >>> round(loss.item(), 4), fed.accounts()["round"]
    (0.0, 20)

    Args:
        model: a `torch.nn.Module`, also compiled, or in `DataParallel`: its plain
            names are used. Its trainable parameters become views of one vector (those of 16 bits: the rounded values
            of a float32 vector), and begin with the values of rank 0; frozen parameters stay as they are and must be
            the same on all ranks.
        algorithm: a name (``--list algorithms``), a dotted path, or an `Algorithm`.
        local_steps: q, steps between two averages.
        comm: an mpi4py communicator; None: COMM_WORLD.
        weight: > 0, of this rank in every average (its number of samples, say).
        timeout: seconds after which the job ends if a rank makes the others wait.
        clip_norm: largest norm of a gradient. weight_decay: times the parameters, added to every gradient.
        buffers, private, freeze, participation, seed: see `average`.
        aggregation, stages, codec, faulty, record, may_differ: the same.
        settings: of the algorithm, by name, like step_size=0.01.

    Returns:
        a `Joined`.

    Raises:
        UserError: on every rank: what was given, what is allowed.
    """
    link = open_link(comm, timeout)
    given = {"local_steps": local_steps, "clip_norm": clip_norm, "weight_decay": weight_decay}
    given |= {"participation": participation, "seed": seed}
    agree(link, lambda: check_arguments(model, weight=weight, **given), tells=True)
    made = agree(link, lambda: _make_algorithm(algorithm, settings), tells=True)
    module = unwrapped(model)
    agree(link, lambda: freeze_parameters(module, freeze), tells=True)
    sending = agree(link, lambda: chosen(aggregation, stages, codec, faulty), tells=True)
    recording = agree(link, lambda: chosen_recording(record), tells=True)
    texts = {**given, "algorithm": command_name(type(made)), **sending.as_texts()}
    texts |= agree(link, lambda: check_may_differ(may_differ), tells=True)
    check_same(link, module, made, texts, buffers, private)
    check_same_code(link, {"model": module, "algorithm": made, **sending.as_objects()}, may_differ)
    flat = agree(link, lambda: FlatModule(module, channels_last=None, direct_gradients=False, has_masters=True))
    rows = flat.x.new_zeros(2, flat.dim)

    def make_oracle(client: Any) -> ClosureOracle:
        return ClosureOracle(client, flat, rows, clip_norm, weight_decay)

    choices = Choices(buffers, private, participation, seed, sending, recording is not None)
    joined = Joined(model, made, make_oracle, link, flat, local_steps, weight, choices)
    joined._record(recording, {}, {**texts, "buffers": buffers, "private": private or None})
    return joined


def _make_algorithm(algorithm: Any, settings: dict[str, Any]) -> Algorithm:
    """An `Algorithm` from a name, class or instance and its settings."""
    if isinstance(algorithm, str):
        algorithm = find("algorithm", algorithm, algorithms, Algorithm)
    cls: Any = algorithm if isinstance(algorithm, type) else type(algorithm)
    if not issubclass(cls, Algorithm):
        raise UserError(f"algorithm is a {type(algorithm).__name__}: expected a name like 'fafed', or an Algorithm")
    names = [field.name for field in dataclasses.fields(cls)]
    check_known(f"algorithm {command_name(cls)}", names, settings, join)
    if cls is not algorithm and not settings:
        made: Algorithm = algorithm
    else:
        made = cls(**settings) if cls is algorithm else dataclasses.replace(algorithm, **settings)
    return made


class Joined(OwnLoop):
    """What `fedmpi.join` returns; see `OwnLoop` for `batches`, `finish`, `accounts`, `state_dict`."""

    def start(self, closure: Closure) -> None:
        """Begin with the gradient of an initial batch of its own, if the algorithm takes one (FAFED, STEM, ...).

        Without this call the first step's batch is also the initial one. For the closure see `step`.
        """
        self._check_open()
        self._client.oracle.closure = closure
        self._start()
        self._has_started = True
        self._flat.point_at(self._current())

    def step(self, closure: Closure) -> torch.Tensor:
        """One local step; after every `local_steps` of them, the average.

        Args:
            closure: computes the loss of the current batch with the model, and returns it; a number of backward
                passes of its own (accumulated micro-batches) leave their gradient in `parameter.grad`. It is called
                as often as the algorithm needs: twice a step by those that compare two models on one batch.

        Returns:
            the loss of this rank's model before the step, a tensor without a graph; nan, and the closure is not called,
            if the rank does not take part in the round.

        Raises:
            Diverged: on every rank, at an average, if a loss since the last one is not finite.
        """
        self._adopt()
        if not self._has_started:
            self.start(closure)
        oracle = self._client.oracle
        oracle.closure = closure
        self._advance()
        oracle.closure = None
        self._flat.point_at(self._current())
        return oracle.loss if self._works else torch.tensor(math.nan)

    _has_started = False

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"loop/started": int(self._has_started)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._has_started = bool(state["loop/started"])

    @property
    def whole(self) -> Closure | None:
        """A closure that returns the mean loss over all of this client's data, or None.

        Assign it before the first step of an algorithm that takes its gradient in every round (MimeAdam).
        """
        return self._client.oracle.whole_closure  # type: ignore[no-any-return]

    @whole.setter
    def whole(self, closure: Closure | None) -> None:
        self._client.oracle.whole_closure = closure

    @property
    def step_size(self) -> float:
        """Step size of the local steps, which must be the same on all ranks; a schedule may set it."""
        return self.federation.algorithm.step_size  # type: ignore[no-any-return]

    @step_size.setter
    def step_size(self, value: float) -> None:
        due = own_steps.change_algorithm(
            self.federation, dataclasses.replace(self.federation.algorithm, step_size=value)
        )
        self._later = [(number, due[number]) for number, _ in self._later]
