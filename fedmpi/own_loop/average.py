"""`average`: periodic averages in a training loop that keeps its torch optimizer."""

import dataclasses
import functools
import os
import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from fedmpi.aggregation.base import Aggregation
from fedmpi.aggregation.sending import chosen
from fedmpi.algorithms.base import Algorithm
from fedmpi.comm.agreement import agree
from fedmpi.comm.job.code import check_same_code
from fedmpi.comm.job.opening import TIMEOUT, open_link
from fedmpi.federation.client import Client
from fedmpi.federation.frozen import freeze as freeze_parameters
from fedmpi.ground.errors import UserError
from fedmpi.ground.registry import import_path
from fedmpi.ground.settings import nearest
from fedmpi.oracles.architecture import unwrapped
from fedmpi.oracles.base import Oracle
from fedmpi.oracles.flat_module import FlatModule, alone
from fedmpi.own_loop.base import Choices, OwnLoop
from fedmpi.own_loop.checks import check_arguments, check_known, check_may_differ, check_same
from fedmpi.own_loop.recording import Recording, chosen_recording

if TYPE_CHECKING:
    from mpi4py import MPI

# State of torch's optimizers that is a mean or a sum of squares: Adam's, RMSprop's and Adadelta's, Adagrad's.
SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "sum")
ALIGNMENT = 16  # elements: every parameter begins on a cache line, as it does in memory of its own


def average(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    every: int | None = 10,
    exchange: str | Iterable[str] = (),
    outer: Literal["none", "momentum", "nesterov", "adam"] = "none",
    comm: "MPI.Intracomm | None" = None,
    *,
    weight: float = 1.0,
    timeout: float = TIMEOUT,
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
) -> "Averaged":
    """Let all ranks average `model` every few steps of their own optimizers. Collective on `comm`.

    The loop and its optimizer stay the caller's; ``fed.step()`` comes after ``optimizer.step()``:

    >>> import fedmpi, torch
    >>> model, inputs = torch.nn.Linear(2, 1), torch.eye(2)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    >>> fed = fedmpi.average(model, optimizer, every=5, exchange=("exp_avg", "exp_avg_sq"))
    >>> for _ in range(20):
    ...     optimizer.zero_grad()
    ...     model(inputs).square().mean().backward()
    ...     optimizer.step()
    ...     fed.step()
    >>> fed.finish()
    >>> fed.accounts()["round"]
    4

    Args:
        model: a `torch.nn.Module`, also compiled, or in `DataParallel`: its plain
            names are used. Its trainable parameters become views of one vector (those of 16 bits: the rounded values
            of a float32 vector), and begin with the values of rank 0; frozen parameters must be the same on all ranks.
            Float buffers that change (batch-norm statistics) are averaged too.
        optimizer: a `torch.optim.Optimizer`, or several; needed for `exchange`.
        every: q, optimizer steps between two averages of the model. None: in each step the gradients are averaged:
            ``fed.step()`` comes between ``backward()`` and ``optimizer.step()``, as in data-parallel training.
        exchange: names of the optimizer's state tensors that are averaged with the parameters.
        outer: what all ranks do with the averaged parameters: "none" takes them (local SGD), "momentum" (FedAvgM),
            "nesterov" (DiLoCo) and "adam" (FedAdam) treat the mean move as a negative gradient.
        comm: an mpi4py communicator; None: COMM_WORLD.
        weight: > 0, of this rank in every average (its number of samples, say).
        timeout: seconds after which the job ends if a rank makes the others wait.
        buffers: "equal": it is an error if buffers differ between the ranks; "rank0", "average": begin with those of
            rank 0, or with the mean of the float ones.
        private: names of parameters, buffers or modules that each rank keeps for itself, as in ``--private``.
        freeze: names of parameters that are not trained, as in ``--freeze``; the same values on all ranks.
        participation: share of the ranks that take part in a round, drawn for each by `seed` as in `fedmpi.train`; the
            others call ``fed.step()`` as often, but make no step: ``if fed.takes_part: optimizer.step()``.
        aggregation: how the ranks' rows become one: a name (``--list aggregations``), a dotted path, or an
            `Aggregation`. stages: what a rank's rows pass before it: a list of the same for `Stage`s.
        codec: how rows are written for their way: the same for a `Codec`; None: as they are.
        faulty: "leave_out": an average is made without the ranks whose rows are not finite; otherwise they end the job.
        record: path of a run folder, or a `fedmpi.Recording` that also says what else is recorded, and resumes.
        may_differ: "code": the user's classes and functions behind `model`, `aggregation` and `stages` need not be the
            same on all ranks, which is otherwise an error.
        settings: of the outer optimizer: server_step_size, momentum; epsilon, second_moment_decay, correction and v0
            (adam, see ``--algorithm fedadam --help``).

    Returns:
        an `Averaged`.

    Raises:
        UserError: on every rank: what was given, what is allowed.
    """
    link = open_link(comm, timeout)
    steps, numbers = 1 if every is None else every, {"participation": participation, "seed": seed}
    agree(link, lambda: check_arguments(model, weight=weight, every=steps, **numbers), tells=True)
    optimizers = agree(link, lambda: _listed(optimizer), tells=True)
    algorithm = agree(link, lambda: _make_algorithm(outer, exchange, optimizers, settings, participation), tells=True)
    if every is None:
        others = {"exchange": exchange, "outer": outer != "none" and outer, "private": private, "record": record}
        algorithm = agree(link, lambda: _gradients_alone(others | settings, participation), tells=True)
    module = unwrapped(model)
    agree(link, lambda: freeze_parameters(module, freeze), tells=True)
    sending = agree(link, lambda: chosen(aggregation, stages, codec, faulty), tells=True)
    recording = agree(link, lambda: chosen_recording(record), tells=True)
    arguments = {"every": every, **numbers, "outer": outer, "exchange": algorithm.names, **sending.as_texts()}
    arguments |= agree(link, lambda: check_may_differ(may_differ), tells=True)
    check_same(link, module, algorithm, arguments, buffers, private)
    check_same_code(link, {"model": module, **sending.as_objects()}, may_differ)
    flat = agree(link, lambda: _lay_out(module, algorithm.names))

    def make_oracle(client: Any) -> "OptimizerState":
        kind = OptimizerState if every else Gradients
        return kind(client, flat, optimizers, algorithm.names)

    choices = Choices(buffers, private, participation, seed, sending, recording is not None)
    averaged = Averaged(module, algorithm, make_oracle, link, flat, steps, weight, choices)
    kept = {"buffers": buffers, "private": private or None}
    objects = {f"optimizer {number}": torch_optimizer for number, torch_optimizer in enumerate(optimizers)}
    averaged._record(recording, objects, {"algorithm": "average", "local_steps": every, **arguments, **kept})
    return averaged


def _lay_out(module: torch.nn.Module, exchange: Collection[str]) -> FlatModule:
    flat = FlatModule(module, channels_last=None, direct_gradients=False, alignment=ALIGNMENT, has_masters=True)
    if flat.has_masters and exchange:
        raise UserError(f"exchange = {tuple(exchange)}: expected parameters in float32 or float64, without 16-bit ones")
    return flat


def _listed(optimizer: Any) -> list[Any]:
    """The optimizers as a list; raises UserError if they are none."""
    if optimizer is None or hasattr(optimizer, "param_groups"):
        return [] if optimizer is None else [optimizer]
    if isinstance(optimizer, Iterable):
        optimizers = list(optimizer)
        if all(hasattr(candidate, "param_groups") for candidate in optimizers):
            return optimizers
    raise UserError(f"optimizer is a {type(optimizer).__name__}: expected a torch.optim.Optimizer, or several")


def _make_algorithm(
    outer: Any, exchange: Any, optimizers: list[Any], settings: dict[str, Any], participation: float
) -> Any:
    if not isinstance(outer, str) or outer not in OUTER:
        raise UserError(f"outer = {outer!r}: expected one of {', '.join(OUTER)}{nearest(str(outer), OUTER)}")
    names = (exchange,) if isinstance(exchange, str) else tuple(exchange) if isinstance(exchange, Iterable) else None
    if names is None or not all(isinstance(name, str) for name in names):
        raise UserError(f"exchange = {exchange!r}: expected names of the optimizer's state, like ('exp_avg',)")
    if names and not optimizers:
        raise UserError(f"exchange = {names}: expected the optimizer that has this state, too")
    if names and participation < 1:
        raise UserError(f"exchange = {names}: expected participation = 1: an absent rank's optimizer has no such state")
    algorithm = _algorithm(outer)
    offered = [name for name in OUTER_SETTINGS if name in algorithm.__dataclass_fields__]
    check_known(f"outer {outer}", offered, settings, average)
    return algorithm(**settings, names=names)


def _gradients_alone(others: dict[str, Any], participation: float) -> Any:
    """The algorithm; raises UserError for an argument that is about averages of the model."""
    if participation < 1:
        raise UserError(f"participation = {participation}, every = None: expected all ranks, or local steps, every=10")
    for name, value in others.items():
        if value:
            raise UserError(f"{name} = {value!r}, every = None: expected a number of local steps with it, every=10")
    algorithm: Any = _Gradients
    return algorithm()


OUTER_SETTINGS = ("server_step_size", "momentum", "second_moment_decay", "epsilon", "correction", "v0")


@dataclasses.dataclass(frozen=True)
class _Local:
    """The local steps of an algorithm, made by the user's own optimizer; those in `OUTER` add the server's step."""

    names: tuple[str, ...] = ()  # of the optimizer's state that is exchanged

    @property
    def exchanged(self) -> tuple[str, ...]:
        return ("x", *self.names)

    @property
    def kinds(self) -> dict[str, str]:
        return {name: "square" if name in SQUARES else "gradient" for name in self.names}

    client_rows: ClassVar[tuple[str, ...]] = ()

    def local_step(self, client: Any, server: Any, oracle: Any) -> None:
        """The optimizer has made it."""

    def upload(self, client: Any, server: Any, oracle: Any) -> None:
        """Copy into the rows what the optimizer has put elsewhere."""
        oracle.collect()


@dataclasses.dataclass(frozen=True)
class _Gradients(Algorithm):
    """The average of gradients, with which all ranks' optimizers make the same step."""

    names: ClassVar[tuple[str, ...]] = ()
    exchanged = ("g",)
    kinds = {"g": "gradient"}
    server_rows = ("x",)

    def local_step(self, client: Any, server: Any, oracle: Any) -> None:
        """`backward()` has made it."""

    def upload(self, client: Any, server: Any, oracle: Any) -> None:
        oracle.collect()


OUTER = {
    "none": "fedavg.FedAvg", "momentum": "server_momentum.FedAvgServerMomentum", "nesterov": "server_momentum.DiLoCo",
    "adam": "fedopt.FedAdam",
}  # fmt: skip


@functools.cache
def _algorithm(outer: str) -> Any:
    """The class of an algorithm of `OUTER` whose local steps are the user's. Only its module is imported."""
    on_server = import_path(f"fedmpi.algorithms.{OUTER[outer]}")
    return dataclasses.make_dataclass(outer, (), bases=(_Local, on_server), frozen=True)


class OptimizerState(Oracle[Any]):
    """The state of torch optimizers as rows of a client. It stands for an oracle, but gives losses only.

    Args:
        client: a `Client` with the rows x and `names`. flat: the `FlatModule`.
        optimizers: list of `torch.optim.Optimizer`. names: of their state tensors.
    """

    def __init__(self, client: Client, flat: Any, optimizers: list[Any], names: tuple[str, ...]) -> None:
        super().__init__(client)
        self.client: Client = client  # with rows
        client.counters = flat.counters
        self._flat, self._optimizers, self._names = flat, optimizers, names
        self.losses: list[torch.Tensor] = []
        self.watch()

    def adopt(self) -> None:
        self._flat.check()
        self._flat.adopt()
        self.client.counters = self._flat.counters

    def watch(self) -> None:
        """From now on, notice which optimizers step on the parameters, so that one made anew takes a former's place."""
        own_ids = {id(parameter) for parameter in self._flat.parameters}
        stepped = self._stepped = weakref.WeakSet[Any]()

        def note(optimizer: Any, *_: Any) -> None:
            if optimizer not in stepped and any(id(p) in own_ids for g in optimizer.param_groups for p in g["params"]):
                stepped.add(optimizer)

        self._watch = register_optimizer_step_post_hook(note) if self._names else None

    def adopt_optimizers(self) -> None:
        """If none of the optimizers has made a step since the last average, but others have, use the state of these."""
        if not self._stepped:  # nothing is exchanged, or there was no step
            return
        stepped = list(self._stepped)
        if not any(optimizer in self._stepped for optimizer in self._optimizers):
            known = [optimizer for optimizer in self._optimizers if isinstance(optimizer, torch.optim.Optimizer)]
            if len(known) == len(self._optimizers):  # of others nothing is noticed
                self._optimizers = stepped
        self._stepped.clear()

    def collect(self) -> None:
        """Make the named state tensors views of the rows, with their values; those that are views already stay.

        Raises:
            UserError: if the optimizers have no such state, or one of another shape than its parameter.
        """
        self.adopt_optimizers()
        for name in self._names:
            found = 0
            for parameter, view in zip(self._flat.parameters, self._flat.views(self.client.rows[name])):
                state = self._state_of(parameter)
                value = state.get(name)
                if value is None:
                    view.zero_()  # a parameter that has had no gradient yet
                    continue
                self._check(name, value, parameter)
                found += 1
                if value.data_ptr() != view.data_ptr():
                    view.copy_(value)
                    state[name] = alone(view)
            if not found:
                known = sorted({key for optimizer in self._optimizers for s in optimizer.state.values() for key in s})
                raise UserError(
                    f"exchange: the optimizer has no state {name!r}; it has {', '.join(known) or 'none yet'}"
                )

    def release(self) -> None:
        """Give the optimizers' state memory of its own."""
        if self._watch is not None:
            self._watch.remove()
        for parameter in self._flat.parameters:
            state = self._state_of(parameter)
            for name in self._names:
                if name in state:
                    state[name] = state[name].clone()

    def take_losses(self) -> list[torch.Tensor]:
        losses, self.losses = self.losses, []
        return losses

    def draw(self, *_: Any) -> Any:
        raise NotImplementedError("the user's own loop draws samples and computes gradients")

    draw_first = whole = draw
    gradient: Any = draw
    gradient_pair: Any = draw

    def _state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        return next((o.state[parameter] for o in self._optimizers if parameter in o.state), {})

    def _check(self, name: str, value: Any, parameter: torch.Tensor) -> None:
        is_like = isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dtype == parameter.dtype
        if not is_like:
            found = f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise UserError(
                f"exchange: state {name!r} is {found} for a parameter of {parameter.dtype} {list(parameter.shape)}: "
                "expected a tensor of the parameter's shape and type"
            )


class Gradients(OptimizerState):
    """The gradients of the parameters as the row g of a client: 0 where there is none."""

    def collect(self) -> None:
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in self._flat.parameters]
        self._flat.flatten(gradients, self.client.rows["g"])

    def spread(self) -> None:
        """Give the parameters the averaged gradients."""
        for parameter, view in zip(self._flat.parameters, self._flat.views(self.client.rows["g"])):
            if parameter.requires_grad:
                parameter.grad = view.to(parameter.dtype, copy=True)


class Averaged(OwnLoop):
    """What `fedmpi.average` returns; see `OwnLoop` for `batches`, `finish`, `accounts`, `state_dict`."""

    has_optimizers = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._start()

    def step(self, loss: Any = None) -> None:
        """Say that the optimizer has made a step; after every `every` of them, the average.

        With `every` = None, say that the gradients are there, which become those of all ranks.

        Args:
            loss: of the step, if a loss that is not finite is to end the job on all ranks; also for `round_loss`. It is
                not looked at if the rank does not take part in the round.

        Raises:
            Diverged: on every rank, at an average, if a loss since the last one is not finite.
        """
        torch.clear_autocast_cache()  # a loop wholly inside autocast would go on with casts of the first weights
        if loss is not None and self.takes_part:
            self._client.oracle.losses.append(torch.as_tensor(loss).detach().reshape(()).double())
        self._advance()
        if isinstance(self._client.oracle, Gradients):
            self._client.oracle.spread()

    def finish(self) -> None:
        super().finish()
        self._client.oracle.release()
