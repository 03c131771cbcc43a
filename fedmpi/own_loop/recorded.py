"""The record of a user's own loop: a run folder with rounds, checkpoints and the model, as `fedmpi.train` makes one."""

import math
import numbers
import pathlib
import sys
import time
import types
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fedmpi.comm.agreement import agree, check_equal, share
from fedmpi.comm.job.ranks import end_in_order
from fedmpi.comm.job.signals import StopSignals, stopping_signal
from fedmpi.federation.losses import PAUSED
from fedmpi.ground.errors import STOPPED, AgreedUserError, UserError
from fedmpi.ground.files.run_files import CLIENT_MODEL, check_files, find_checkpoints
from fedmpi.ground.text import Log, progress_shown, say, short
from fedmpi.ground.version import __version__
from fedmpi.oracles.architecture import as_json
from fedmpi.own_loop.objects import Objects
from fedmpi.own_loop.passes import Passes
from fedmpi.own_loop.recording import REQUEST_BITS, TASK, Recording
from fedmpi.runs.checkpoints.writer import Checkpoints
from fedmpi.runs.lock import RunLock
from fedmpi.runs.model_files import check_savable, complete, fingerprint, save_client_model, save_model
from fedmpi.runs.recorder import Recorder, make_run_folder
from fedmpi.runs.settings import FolderSettings
from fedmpi.runs.trackers.base import make_trackers
from fedmpi.tasks.base import Metrics

log = Log(__name__)

ENDLESS = sys.maxsize  # rounds of a loop whose end only the user knows
NEW_PASS = (
    "this loop reads a DataLoader by itself ({taken} batches of a pass at its first average): if it goes on from a "
    "checkpoint within a pass, it begins a new pass, and ends with another model; fed.batches(loader) goes on within it"
)


class Recorded:
    """One loop's run folder. Collective, like the loop.

    Args:
        loop: an `OwnLoop`, open. recording: a `Recording`. objects: name -> what else is in its checkpoints.
        settings: name -> value, of what is learned.
    """

    def __init__(self, loop: Any, recording: Recording, objects: Mapping[str, Any], settings: dict[str, Any]) -> None:
        self._loop, self._recording, self._mine = loop, recording, f"clients/{loop.rank}/own/"
        link, folder = loop._link, pathlib.Path(recording.folder)
        self._objects = agree(link, lambda: Objects({**objects, **recording.objects}))
        if recording.resume and self._objects.lacks_schedule and link.rank == 0:
            log.warning(
                "objects: the schedule of the optimizer's step size is not among them: if the loop goes on from a "
                'checkpoint, it begins anew; Recording(objects={"schedule": schedule})'
            )
        self.passes = Passes(self._objects)
        # A checkpoint is written before the next step then: until its optimizer step, schedules may follow this one.
        self._is_late = loop.has_optimizers and bool(link.allgather([self._objects.may_be_late]).any())
        self._pending: dict[str, Any] | None = None  # the state of such a checkpoint
        self._hook: Any = None
        self._after_pending: tuple[dict[str, float], bool, str] = ({}, False, "")
        self._began, self._evaluating = time.perf_counter(), 0.0
        goes_on = share(link, lambda: recording.resume and bool(find_checkpoints(folder)))
        facts = {"task": TASK, "model": None}  # a model that cannot be saved is refused now, not at the end
        agree(link, lambda: check_savable(loop._flat.module, facts, has_rows=False))
        recorder = agree(link, lambda: _make_recorder(recording, goes_on) if link.rank == 0 else None)
        self._recorder, self._signals = recorder, StopSignals()
        self._given = {} if recording.whole_model else self._fingerprints(self._untrained(settings["buffers"]))
        identity = share(link, lambda: recorder.identity)
        of_folder = FolderSettings(
            checkpoint_every=recording.checkpoint_every,
            checkpoint_minutes=recording.checkpoint_minutes,
            checkpoint_keep=recording.checkpoint_keep,
        )
        job = types.SimpleNamespace(
            link=link,
            flat=loop._flat,
            federation=self,
            num_rounds=ENDLESS,
            config=types.SimpleNamespace(folder=of_folder, resolved=settings, may_change=()),
            context=types.SimpleNamespace(clients=[link.rank], num_clients=link.size),
        )
        self._checkpoints, position = Checkpoints(job, folder, identity, lambda: recorder), 0
        if goes_on:
            clocks, manifest = self._checkpoints.restore()
            position, self._evaluating = manifest["records"], clocks["evaluation_seconds"]
            self._began -= clocks["seconds"]
        with progress_shown(recording.verbose):
            if goes_on and recorder:
                say(f"{folder}: continuing after round {self.round_index}")
            agree(link, lambda: recorder and recorder.begin(settings, position, self.round_index))
        self._signals.__enter__()

    def _untrained(self, buffers: str) -> list[str]:
        """Names of the tensors that are not saved if the loop does not change them: none, if no parameter is frozen.

        All that write files have the same. A buffer is one of them if it is what all ranks were given.
        """
        module, is_private = self._loop._flat.module, bool(self._loop.federation.private)
        parameters = dict(module.named_parameters(remove_duplicate=False))
        names = {name for name, parameter in parameters.items() if not parameter.requires_grad}
        if not names or not (self._recorder or is_private):
            return []
        if buffers == "equal" and not is_private:
            names |= module.state_dict().keys() - parameters.keys()
        return [name for name in module.state_dict() if name in names and name not in self._loop._own_names]

    def _fingerprints(self, names: Collection[str]) -> dict[str, str]:
        state = self._loop._flat.module.state_dict() if names else {}
        return {name: fingerprint(state[name]) for name in names if name in state}

    # What `Checkpoints` needs of a federation.
    round_index = property(lambda self: self._loop.federation.round_index)

    @property
    def requests(self) -> int:
        """Bits of all ranks in the last round."""
        return int(self._loop.federation.requests) & (1 << REQUEST_BITS) - 1

    def begin_round(self) -> None:
        """From the first round on, signals wait for the end of a round. Not collective."""
        self._signals.begin_rounds()

    def request(self) -> int:
        """This rank's bits as a round begins: signals that have come, what its checkpoints ask for. Not collective."""
        return int(self._signals.bits | self._checkpoints.request())

    def state(self) -> dict[str, Any]:
        """The loop's state and that of the objects; names of what only this rank has begin with "clients/RANK/".

        Collective. Raises AgreedUserError if no checkpoint can contain it.
        """
        return agree(self._loop._link, self._state) if self._pending is None else self._pending

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._loop.state_dict()
        own = {name: state.pop(name) for name in [*state] if name.startswith("loop/")}
        own = {name: value for name, value in own.items() if not isinstance(value, str)}
        return state | self._named({**own, **self._objects.state(), **self.passes.state()})

    def _named(self, own: Mapping[str, Any]) -> dict[str, Any]:
        return {f"{self._mine}{name}": value for name, value in own.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take what `state` gave."""
        prefix, number = self._mine, len(self._mine)
        own = {name[number:]: value for name, value in state.items() if name.startswith(prefix)}
        loop = {name: value for name, value in own.items() if name.startswith("loop/")}
        self._loop.load_state_dict({name: v for name, v in state.items() if not name.startswith(prefix)} | loop)
        lines = self._objects.restore(own)
        self.passes.restore(own)
        if self._loop.rank == 0 and lines:
            log.warning(f"{self._recording.folder}: {'; '.join(lines)}: assign other values after join or average")
        if self._loop.rank == 0 and self.passes.foreign:
            log.warning(NEW_PASS.format(taken=self.passes.foreign[0]))

    def after_round(self, loss: float) -> None:
        """Evaluate if that is due, write the record, make a checkpoint if it is due, and end if a signal has come."""
        loop, federation, began = self._loop, self._loop.federation, time.perf_counter()
        metrics: Mapping[str, float] = {}
        if self._recording.evaluate is not None and self.round_index % self._recording.eval_every == 0:
            metrics = self._measured(self._recording.evaluate)
        self._evaluating += time.perf_counter() - began
        accounts = {name: value for name, value in loop.accounts().items() if name != "collectives"}
        clocks = {"seconds": time.perf_counter() - self._began, "evaluation_seconds": self._evaluating}
        record = accounts | {"iteration": federation.server.iteration, "loss": loss} | clocks
        with progress_shown(self._recording.verbose):
            agree(loop._link, lambda: self._recorder and self._recorder.round(record, metrics))
        self._look_once()
        is_due = self._checkpoints.is_due()
        signal = stopping_signal(federation.requests & (1 << REQUEST_BITS) - 1) or ""
        if is_due or signal:
            self._pending, self._after_pending = self.state(), (clocks, is_due, signal)
            if self._is_late:
                self._hook = register_optimizer_step_pre_hook(self._take_late)
            else:
                self.write_pending()

    def _take_late(self, optimizer: Any = None, *_: Any) -> None:
        """Take the states of what the loop may have called since the round ended; the next step has not begun."""
        own = {id(parameter) for parameter in self._loop._flat.parameters}
        if optimizer is not None and not any(id(p) in own for g in optimizer.param_groups for p in g["params"]):
            return  # that of another model
        self._hook.remove()
        self._hook = None
        assert self._pending is not None
        late = self._named(self._objects.state(is_late=True))
        prefixes = {name.rpartition("/")[0] + "/" for name in late}
        kept = {name: value for name, value in self._pending.items() if name.rpartition("/")[0] + "/" not in prefixes}
        self._pending = kept | late

    @property
    def is_pending(self) -> bool:
        """Whether a checkpoint of the last round is to be written. Not collective."""
        return self._pending is not None

    def write_pending(self, ends: bool = False) -> None:
        """Begin to write the checkpoint of the last round, and end if a signal has come, unless the loop `ends` now."""
        clocks, is_due, signal = self._after_pending
        if self._hook is not None:
            if ends:
                self._take_late()
            else:
                self._hook.remove()
                self._hook = None
        if is_due:
            self._checkpoints.begin(lambda: clocks)
        if signal and not ends:
            if self._is_late:
                self._loop._announce(PAUSED)  # until here the ranks have not met since the round
            self._stop(signal, clocks)
        self._pending = None

    def _look_once(self) -> None:
        """After the first round, check that the states can be written now; say if the loop has no place in its data."""
        if self._has_looked:
            return
        agree(self._loop._link, self._objects.check)
        found = not self.passes.foreign and self.passes.find_foreign()
        if found and self._recording.resume and self._loop.rank == 0:
            log.warning(NEW_PASS.format(taken=self.passes.foreign[0]))
        self._has_looked = True

    _has_looked = False

    def _measured(self, evaluate: Callable[[], Mapping[str, float]]) -> Metrics:
        """The means of what all ranks have measured, and each rank's values; nan is left out of the mean."""
        values = agree(self._loop._link, lambda: _as_numbers(_called(evaluate)))
        weights = self._loop.federation.plan.weights or [1.0] * self._loop.size
        check_equal(self._loop._link, {"evaluate": ", ".join(values)}, "expected the same names on all ranks")
        columns = dict(zip(values, self._loop._ask([*values.values()]).T.tolist())) if values else {}
        means = {}
        for name, column in columns.items():
            pairs = [(weight, value) for weight, value in zip(weights, column) if not math.isnan(value)]
            total = sum(weight for weight, _ in pairs)
            means[name] = sum(weight * value for weight, value in pairs) / total if total else math.nan
        return Metrics(means, columns)

    def _stop(self, signal: str, clocks: dict[str, float]) -> None:
        """Write a checkpoint and end this rank, as all ranks do."""
        is_written = self._checkpoints.write_now(lambda: clocks)
        self.close()
        result = "start the program again to continue" if self._recording.resume else "Recording(resume=True) continues"
        result = result if is_written else "the checkpoint could not be written"
        if self._recorder:
            where = f"{self._recording.folder}: stopped after round {self.round_index} by {signal}"
            print(f"fedmpi: {where}; {result}", file=sys.stderr, flush=True)
        end_in_order(self._loop._link, "", None, STOPPED if is_written else 2)

    def finish(self) -> None:
        """Write the last checkpoint and the model, by which the run is complete."""
        loop, folder, link = self._loop, pathlib.Path(self._recording.folder), self._loop._link
        store, recorder = loop.federation.store, self._recorder
        if self._pending is not None:
            self.write_pending(ends=True)
        clocks = {"seconds": time.perf_counter() - self._began, "evaluation_seconds": self._evaluating}
        try:
            self._checkpoints.write_now(lambda: clocks)
        except AgreedUserError as error:  # the model is not lost by it
            if loop.rank == 0:
                log.warning(f"{error}: the last checkpoint is not written")
        is_private = bool(loop.federation.private)
        own = {name: value.clone() for name, value in loop._flat.module.state_dict().items() if is_private}
        values = loop._flat.named_values(loop.federation.server.x, store.buffers)  # the module has them then
        now = self._fingerprints(self._given)
        frozen = {name: text for name, text in self._given.items() if now.get(name) == text}
        own, values = ({name: value for name, value in of.items() if name not in frozen} for of in (own, values))
        if is_private:
            agree(link, lambda: save_client_model(folder / CLIENT_MODEL.format(client=link.rank), own))
        facts: dict[str, Any] = {"fedmpi": __version__, "task": TASK, "model": None, "input": {}}
        facts["architecture"] = as_json(loop._flat.architecture, loop._flat.module)
        facts |= {"frozen": frozen} if frozen else {}
        agree(link, lambda: recorder and save_model(recorder.folder, values, None, facts))
        agree(link, lambda: recorder and complete(recorder.folder))
        self.close()

    def close(self) -> None:
        """End the record, and let signals do again what they did before."""
        self._signals.__exit__()
        if self._recorder:
            self._recorder.close()


def _called(evaluate: Callable[[], Any]) -> Any:
    """What a user's function returns; its error as a `UserError`, so that the other ranks end, too."""
    try:
        return evaluate()
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"evaluate: {type(error).__name__}: {short(error)}") from error


def _as_numbers(values: Any) -> dict[str, float]:
    """What a user's `evaluate` returned, as name -> number.

    Raises:
        UserError: if it is something else: the name and what it is.
    """
    expected = "expected a number: one name for each, like recall_0, recall_1"
    if not isinstance(values, Mapping):
        raise UserError(f"evaluate returned a {type(values).__name__}: expected a dict: name -> number")
    found = {}
    for name, value in values.items():
        number = value.item() if getattr(value, "size", None) == 1 or getattr(value, "shape", None) == () else value
        number = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else number
        if not isinstance(number, numbers.Real):
            shape = f" of shape {list(value.shape)}" if hasattr(value, "shape") else ""
            raise UserError(f"evaluate: {short(name, 50)} is a {type(value).__name__}{shape}: {expected}")
        found[str(name)] = float(number)
    return found


def _make_recorder(recording: Recording, goes_on: bool) -> Recorder:
    """The recorder of a run folder that is made, or goes on. Not collective."""
    trackers, folder = make_trackers(recording.track), pathlib.Path(recording.folder)
    if goes_on:
        check_files(folder)
    goes_on_in = RunLock(folder) if goes_on else make_run_folder(folder.parent, folder.name, "", recording.resume)
    return Recorder(goes_on_in, None, trackers)
