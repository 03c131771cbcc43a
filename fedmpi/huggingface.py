"""Hugging Face's Trainer in a federation: a callback that averages, and a Trainer whose steps an algorithm makes.

Import this module before ``TrainingArguments`` are made. Hugging Face's libraries would take the ranks of an mpirun for
the workers of one data-parallel job of theirs. Where there are several ranks, the import begins MPI, and removes the
variables that would say so to these libraries: each rank is a silo of its own. From then on, a rank that ends with an
error ends the job.
"""

import contextlib
import json
import math
import os
import pathlib
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import torch

from fedmpi.comm.agreement import agree, check_equal
from fedmpi.comm.job.opening import TIMEOUT, close_link, open_link
from fedmpi.comm.start.launch import hide_launcher
from fedmpi.comm.start.process import started_by
from fedmpi.federation.nested import flatten, unflatten
from fedmpi.ground.errors import UserError, attempt
from fedmpi.ground.text import Log, format_bytes
from fedmpi.own_loop.average import average
from fedmpi.own_loop.join import join
from fedmpi.runs.checkpoints.files import Damaged, read_state, write_state

hide_launcher()
if started_by()[1] > 1:
    close_link(open_link())  # ranks that have met hear of one that ends
try:
    import accelerate  # noqa: F401  without it, transformers has a placeholder of Trainer
    from transformers import Trainer, TrainerCallback
except ModuleNotFoundError as error:
    missing: BaseException = error
    while missing.__cause__ and not getattr(missing, "name", None):  # transformers says that Trainer cannot be imported
        missing = missing.__cause__
    needed = getattr(missing, "name", None)
    text = f"needs {needed}: pip install 'fedmpi[huggingface]'" if needed else f"cannot import transformers: {missing}"
    raise UserError(f"fedmpi.huggingface {text}") from None

__all__ = ["FederatedCallback", "FederatedTrainer"]
log = Log(__name__)

STATE, MARK = "fedmpi.safetensors", "fedmpi.json"  # in a checkpoint of Trainer; with the mark it is complete
NAME = "federation"  # of its state in the file
CHECKPOINT = re.compile(r"checkpoint-(\d+)")
MEASURED = re.compile(r"epoch|.*_(runtime|per_second|time)")  # metrics that each rank keeps for itself
OF_TRAINER = {"step_size": "learning_rate", "clip_norm": "max_grad_norm", "weight_decay": "weight_decay"}
EQUAL = ("load_best_model_at_end", "metric_for_best_model", "greater_is_better", "save_only_model", "eval_on_start")
OF_STEPS = ("max_grad_norm", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps")
TINY = 1e-30  # the step size that stands for 0, with which a warm-up begins


class FederatedCallback(TrainerCallback):
    """Let all ranks of a `transformers.Trainer` train one model.

        trainer = Trainer(model, args, train_dataset=data, callbacks=[FederatedCallback()])

    All ranks make the Trainer with the callback, and call `train`, with the same `max_steps`. During training, what an
    evaluation has measured becomes the mean over the ranks, so that all of them choose the same best model and stop
    together. Trainer's own checkpoints contain the state of the federation.

    Args:
        every: None: in each step the gradients are averaged before they are clipped (`max_grad_norm`): the training is
            that of one process with the batches of all ranks. Or q, optimizer steps between two averages of the model.
            Accumulated batches count as one step.
        weight: > 0, of this rank in every average; None: its number of samples (1 if a rank has a stream). With `every`
            = None and a loss that is a mean over labels, as Trainer makes it for language models, that number times the
            labels of a sample in this step: the average is the mean over the labels of all ranks, too.
        exchange, outer, settings: as `fedmpi.average` takes them.

    Attributes:
        fed: what `fedmpi.average` has returned, from the beginning of the training on; None before.
    """

    def __init__(
        self,
        every: int | None = None,
        exchange: str | Iterable[str] = (),
        outer: Literal["none", "momentum", "nesterov", "adam"] = "none",
        weight: float | None = None,
        **settings: Any,
    ) -> None:
        self._settings = {"every": every, "exchange": exchange, "outer": outer, "weight": weight, **settings}
        self._is_training = self._has_folder = False
        self._clip_norm: Any = None  # Trainer's, during a step
        self._counter: _Counter | None = None  # if steps are weighed by their labels, as far as is known
        self._hook: Any = None  # by which it sees the batches of a step
        self.fed: Any = None

    def _open(self, args: Any, model: torch.nn.Module, optimizer: Any, weight: float) -> Any:
        return average(model, optimizer, **{**self._settings, "weight": weight})

    @property
    def _steps(self) -> Any:
        """Optimizer steps between two averages of the model; None: it is the gradients that are averaged."""
        return self._settings["every"]

    def _after_step(self) -> None:
        if self._steps:
            self.fed.step()

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Give each rank an output folder of its own, and let all ranks find the same last checkpoint."""
        with self._link() as link:
            digests = link.allgather([zlib.crc32(os.path.abspath(args.output_dir).encode())], "machinery")[:, 0]
            if len({*digests}) < link.size:
                if link.rank == 0:
                    others = os.path.join(args.output_dir, "rank-1")
                    log.warning(f"rank 0 saves in {args.output_dir}, rank 1 in {others}, and so on")
                else:
                    args.output_dir = os.path.join(args.output_dir, f"rank-{link.rank}")
            agree(link, lambda: os.makedirs(args.output_dir, exist_ok=True))
            self._hide_incomplete(link, pathlib.Path(args.output_dir))
            self._has_folder = True

    def _hide_incomplete(self, link: Any, folder: pathlib.Path) -> None:
        """Rename checkpoints that are newer than the last one which is complete on all ranks: a rank was killed."""
        steps = {int(match[1]) for path in folder.iterdir() if (match := CHECKPOINT.fullmatch(path.name))}
        complete = [step for step in steps if (folder / f"checkpoint-{step}" / MARK).is_file()]
        everyone = link.allgatherv(complete, "machinery").astype(int).tolist()
        common = [step for step in {*everyone} if everyone.count(step) == link.size]
        for step in sorted(steps) if common else ():
            if step > max(common):
                path = folder / f"checkpoint-{step}"
                log.warning(f"{path} is not complete on all ranks: it is called incomplete-{step} from now on")
                with attempt("rename", path):
                    path.replace(folder / f"incomplete-{step}")

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **others: Any
    ) -> None:
        saved: dict[str, Any] = {}
        loader = others.get("train_dataloader")
        per_epoch = _steps_per_epoch(args, loader)
        with self._link() as link:
            texts = {"max_steps": str(state.max_steps), "the step to begin with": str(state.global_step)}
            check_equal(link, texts, "expected the same on all ranks: choose max_steps, and the same checkpoint")
            texts = {name: str(getattr(args, name)) for name in EQUAL}
            for name in ("eval", "save"):
                texts[f"{name}_strategy"] = _when(args, state, name, per_epoch)
            check_equal(link, texts, "expected the same on all ranks, such as a number of steps")
            if self._steps is None:
                check_equal(link, _settings_of_steps(args, optimizer), "expected the same steps on all ranks")
            agree(link, lambda: self._check(args, state, per_epoch))
            agree(link, lambda: _check_saver(args, state, link.rank))
            samples = link.allgather([_samples(loader)], "weights")[:, 0].tolist()
            if state.global_step:
                saved = agree(link, lambda: _read(pathlib.Path(args.output_dir, f"checkpoint-{state.global_step}")))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad] if saved else []
        before = [parameter.detach().clone() for parameter in trained]
        weight = self._settings.get("weight")
        if weight is None:
            weight = samples[link.rank] if all(samples) else 1.0
        self.fed = self._open(args, model, optimizer, weight)
        if link.rank == 0:
            self._say(samples)
        if saved:
            self.fed.load_state_dict(saved)
            if not all(map(torch.equal, before, trained)):
                raise UserError(
                    f"{args.output_dir}/checkpoint-{state.global_step}: its {STATE} belongs to another model than "
                    "Trainer has loaded: expected a checkpoint in output_dir"
                )
        self._is_training, self._clip_norm = True, args.max_grad_norm
        is_weighed = self._steps is None and self._settings.get("weight") is None
        self._counter = _Counter() if is_weighed else None

    def _say(self, samples: list[float]) -> None:
        """Say what has been chosen, and what it costs; `samples` of all ranks, 0: unknown."""
        steps, size = self._steps, format_bytes(self.fed.federation.store.block.nbytes)
        chosen = "the gradients are averaged in each step" if steps is None else f"an average after every {steps} steps"
        hint = " (every=10 averages the model after every 10 steps instead)" if steps is None else ""
        weights = "equal, as a rank does not know its number of samples"
        if all(samples):
            weights = f"numbers of samples ({min(samples):.0f} to {max(samples):.0f})"
        if steps is None:
            weights += ", times the labels of a sample where the loss is a mean over labels"
        if self._settings.get("weight") is not None:
            weights = "as given"
        log.warning(f"{chosen}: {size} per rank and average{hint}; weights: {weights}")

    def _check(self, args: Any, state: Any, per_epoch: int | None) -> None:
        """Raise UserError if Trainer was made without the callback, or the best model could be no average."""
        if not self._has_folder:
            raise UserError("FederatedCallback was added to a Trainer: expected Trainer(..., callbacks=[...]) with it")
        for name in ("model", "optimizer"):
            if name in self._settings:
                raise UserError(f"{name}: Trainer's own is used: leave it out of the arguments of the federation")
        every = self._steps
        if every is None and args.fp16:
            raise UserError("fp16 = True: scaled losses have scaled gradients: expected bf16, or every=10, say")
        if args.load_best_model_at_end and isinstance(every, int):
            steps = state.eval_steps if str(args.eval_strategy.value) == "steps" else per_epoch
            if steps and every and steps % every:
                raise UserError(
                    f"load_best_model_at_end: there is an evaluation every {steps} steps and an average every {every}: "
                    "expected a multiple, so that the best model is an average"
                )

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if self._steps is None and self._clip_norm:
            args.max_grad_norm = math.inf  # until the gradients are those of all ranks, Trainer computes the norm only
        if self._counter is not None:  # only within a step, so that what is saved after it has no hook
            self._counter.labels, self._counter.samples = None, 0
            self._hook = model.register_forward_pre_hook(self._counter, with_kwargs=True)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if self._steps is None:
            args.max_grad_norm = self._clip_norm
            self._weigh([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
            self.fed.step()
            if self._clip_norm:
                torch.nn.utils.clip_grad_norm_(model.parameters(), self._clip_norm)

    def _weigh(self, gradients: list[torch.Tensor]) -> None:
        """Multiply this rank's gradients by its labels per sample, divided by those of all ranks. Collective.

        Raises:
            UserError: on every rank, if only some of them take a mean over labels.
        """
        counter = self._counter
        if counter is None:
            return
        self._hook.remove()
        is_known = counter.labels is not None and counter.samples > 0
        labels = float(counter.labels) / counter.samples if is_known else 0.0
        mean, known = self.fed.mean(torch.tensor([labels, is_known], dtype=torch.float64)).tolist()
        if 1e-9 < known < 1 - 1e-9:
            raise UserError("labels: only some ranks' batches have labels: expected the same kind on all, or a weight")
        self._counter = counter if known > 0 else None
        for gradient in gradients if mean > 0 else ():
            gradient.mul_(labels / mean)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._after_step()
        if state.global_step >= state.max_steps:
            self.fed.end_round()  # what Trainer now evaluates and saves is the average

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        if self._is_training and metrics:
            names = [name for name, value in metrics.items() if _is_number(value) and not MEASURED.fullmatch(name)]
            means = self.fed.mean(torch.tensor([metrics[name] for name in names], dtype=torch.float64))
            metrics.update(zip(names, means.tolist()))
            control.should_training_stop = self.fed.any(control.should_training_stop)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._is_training and not args.save_only_model:
            _write(pathlib.Path(args.output_dir, f"checkpoint-{state.global_step}"), self.fed.state_dict())
            self.fed.any(False)  # all ranks have this checkpoint before one of them removes an older one

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._is_training = False
        if self._hook is not None:
            self._hook.remove()
        self.fed.finish()

    @contextlib.contextmanager
    def _link(self) -> Iterator[Any]:
        """A context with a link over the ranks, before the federation begins. Collective."""
        link = open_link(self._settings.get("comm"), self._settings.get("timeout", TIMEOUT))
        yield link
        close_link(link)  # after an error it stays open: then the error is one line, and ends all ranks


class _Counter:
    """A hook of a model that counts the samples of a step, and notes over how many labels Trainer takes the mean."""

    labels: Any = None  # None: Trainer does not say it
    samples = 0

    def __call__(self, model: torch.nn.Module, inputs: Any, named: Mapping[str, Any]) -> None:
        self.labels = named.get("num_items_in_batch")
        tensors = [value for value in (*inputs, *named.values()) if isinstance(value, torch.Tensor) and value.dim()]
        self.samples += len(tensors[0]) if tensors else 0


class FederatedTrainer(Trainer):
    """A `transformers.Trainer` in which an algorithm of fedmpi takes the optimizer's place.

    The step size is Trainer's learning rate with its schedule; `max_grad_norm` and `weight_decay` are those of the
    gradients. `optim` and its settings are not used. An algorithm may evaluate a batch, or the accumulated batches,
    several times.

    Args:
        federation: name -> value of the arguments of `fedmpi.join`, like
            {"algorithm": "fafed", "local_steps": 10}.
        arguments, others: as Trainer takes them.

    Raises:
        UserError: one line, if the arguments have an optimizer, or need one.
    """

    optimizer: Any

    def __init__(self, *arguments: Any, federation: Mapping[str, Any], **others: Any) -> None:
        self.joining = _Joining(federation)
        with self.joining._link() as link:
            agree(link, lambda: _check_arguments(federation, others.get("optimizers")))
        self._batches: list[Any] = []  # accumulated so far for the next step
        others["callbacks"] = [self.joining, *(others.get("callbacks") or ())]
        super().__init__(*arguments, **others)

    def create_optimizer(self, model: Any = None) -> Any:
        """An optimizer that changes nothing, as no parameter has a gradient left: it has the schedule's step size."""
        if self.optimizer is None:
            trained = [parameter for parameter in (model or self.model).parameters() if parameter.requires_grad]
            self.optimizer = torch.optim.SGD(trained, lr=self.args.learning_rate)
        return self.optimizer

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        self._batches.append((inputs, num_items_in_batch))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)  # it is in the loss of the last of these batches
        batches, self._batches = self._batches, []
        fed, one_pass = self.joining.fed, super().training_step
        step_size = max(TINY, self.optimizer.param_groups[0]["lr"])
        if fed.step_size != step_size:
            fed.step_size = step_size
        loss: torch.Tensor = fed.step(lambda: torch.stack([one_pass(model, *batch) for batch in batches]).sum())
        return loss.to(self.args.device)


class _Joining(FederatedCallback):
    """What a `FederatedTrainer` has in the place of the callback."""

    def __init__(self, federation: Mapping[str, Any]) -> None:
        super().__init__()
        self._settings = {"local_steps": 10, **federation}

    @property
    def _steps(self) -> Any:
        return self._settings["local_steps"]

    def _open(self, args: Any, model: torch.nn.Module, optimizer: Any, weight: float) -> Any:
        given = {"step_size": max(TINY, optimizer.param_groups[0]["lr"]), "clip_norm": args.max_grad_norm or None}
        return join(model, **given, weight_decay=args.weight_decay, **{**self._settings, "weight": weight})

    def _after_step(self) -> None:
        """`training_step` has made it."""

    def _check(self, args: Any, *others: Any) -> None:
        if args.fp16:
            raise UserError("fp16 = True: scaled losses have scaled gradients: expected bf16, or float32")
        super()._check(args, *others)


def _check_arguments(federation: Mapping[str, Any], optimizers: Any) -> None:
    """Raise UserError if a `FederatedTrainer` is given what is Trainer's, or an optimizer."""
    for name, of_trainer in OF_TRAINER.items():
        if name in federation:
            raise UserError(f"federation: {name} = {federation[name]}: give {of_trainer} to TrainingArguments")
    if (optimizers or (None,))[0] is not None:
        raise UserError("optimizers: an algorithm takes the optimizer's place: leave it out, or use the callback")


def _check_saver(args: Any, state: Any, rank: int) -> None:
    """Note in Trainer's state which rank it is of; raises UserError if it is another one's, from a checkpoint."""
    noted = state.stateful_callbacks.setdefault(NAME, {"args": {}, "attributes": {"rank": rank}})
    if (saver := noted["attributes"]["rank"]) != rank:
        raise UserError(
            f"rank {rank} continues from a checkpoint of rank {saver}: expected one in {args.output_dir}, where "
            "resume_from_checkpoint=True finds it"
        )


def _steps_per_epoch(args: Any, loader: Any) -> int | None:
    """Optimizer steps of a pass over this rank's data; None: unknown."""
    try:
        batches = len(loader)
    except TypeError:  # a stream
        return None
    return math.ceil(batches / int(args.gradient_accumulation_steps))


def _settings_of_steps(args: Any, optimizer: Any) -> dict[str, str]:
    """What must be the same on all ranks for them to make the same step of one gradient."""
    found = {name: str(getattr(args, name)) for name in OF_STEPS}
    found["optimizer"] = type(getattr(optimizer, "optimizer", optimizer)).__name__  # without accelerate's wrapper
    for number, group in enumerate(optimizer.param_groups):
        found |= {f"{name} of parameter group {number}": str(group[name]) for name in group if name != "params"}
    return found


def _samples(loader: Any) -> int:
    """Samples of this rank's data; 0: unknown."""
    try:
        return len(loader.dataset)
    except (TypeError, AttributeError):  # a stream
        return 0


def _when(args: Any, state: Any, name: str, per_epoch: int | None) -> str:
    """When Trainer evaluates ("eval") or saves ("save"), as text."""
    strategy = str(getattr(args, f"{name}_strategy").value)
    steps = {"steps": getattr(state, f"{name}_steps"), "epoch": per_epoch}.get(strategy)
    return f"{strategy} (every {steps})" if steps else strategy


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _write(folder: pathlib.Path, state: Mapping[str, Any]) -> None:
    """Write the state of a federation beside what Trainer has saved, and then the mark that it is complete."""
    for name in (MARK, STATE):
        (folder / name).unlink(missing_ok=True)
    size, checksum = write_state(folder / STATE, flatten({**state}, NAME))
    part = folder / f"{MARK}.part"
    part.write_text(json.dumps({"bytes": size, "crc32": checksum}), encoding="ascii")
    part.replace(folder / MARK)


def _read(folder: pathlib.Path) -> dict[str, Any]:
    """What `_write` wrote.

    Raises:
        UserError: if it is missing or damaged.
    """
    try:
        mark = json.loads((folder / MARK).read_text(encoding="ascii"))
        state: dict[str, Any] = unflatten(read_state(folder / STATE, mark["bytes"], mark["crc32"]), NAME)
        return state
    except FileNotFoundError:
        raise UserError(
            f"{folder} has no {MARK}: it is no checkpoint of a federation, or a rank was killed while it was written: "
            "expected an earlier one in output_dir, on all ranks"
        ) from None
    except (Damaged, OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder}: cannot be read: {error}") from None
