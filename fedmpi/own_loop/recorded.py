"""The record of a user's own loop: a run folder with rounds, checkpoints and the model, as `fedmpi.train` makes one."""

import json
import math
import pathlib
import random
import sys
import time
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

import fedmpi
from fedmpi.checkpoints.writer import Checkpoints
from fedmpi.comm.agreement import agree, check_equal, share
from fedmpi.errors import STOPPED, UserError
from fedmpi.oracles.architecture import as_json
from fedmpi.own_loop.recording import REQUEST_BITS, TASK, Recording
from fedmpi.program.ranks import end_in_order
from fedmpi.program.signals import StopSignals, stopping_signal
from fedmpi.run_files import CLIENT_MODEL, find_checkpoints
from fedmpi.runs.lock import RunLock
from fedmpi.runs.model_files import check_savable, complete, save_client_model, save_model
from fedmpi.runs.recorder import Recorder, make_run_folder
from fedmpi.runs.trackers.base import make_trackers
from fedmpi.tasks.base import Metrics

ENDLESS = sys.maxsize  # rounds of a loop whose end only the user knows


class Recorded:
    """One loop's run folder. Collective, like the loop.

    Args:
        loop: an `OwnLoop`, open. recording: a `Recording`. objects: name -> what else is in its checkpoints.
        settings: name -> value, of what is learned.
    """

    def __init__(self, loop: Any, recording: Recording, objects: Mapping[str, Any], settings: dict[str, Any]) -> None:
        self._loop, self._recording, self._mine = loop, recording, f"clients/{loop.rank}/own/"
        self._objects = {**objects, **recording.objects, "generators of the process": _Generators()}
        self._began, self._evaluating = time.perf_counter(), 0.0
        link, folder = loop._link, pathlib.Path(recording.folder)
        goes_on = share(link, lambda: recording.resume and bool(find_checkpoints(folder)))
        facts = {"task": TASK, "model": None}  # a model that cannot be saved is refused now, not at the end
        agree(link, lambda: check_savable(loop._flat.module, facts))
        recorder = agree(link, lambda: _make_recorder(recording, goes_on) if link.rank == 0 else None)
        self._recorder, self._signals = recorder, StopSignals()
        identity = share(link, lambda: recorder.identity)
        run = types.SimpleNamespace(
            checkpoint_every=recording.checkpoint_every,
            checkpoint_minutes=recording.checkpoint_minutes,
            checkpoint_keep=recording.checkpoint_keep,
            checkpoint_clients=None,
            result="last",
            stop=None,
            patience=None,
        )
        job = types.SimpleNamespace(
            link=link,
            flat=loop._flat,
            federation=self,
            num_rounds=ENDLESS,
            config=types.SimpleNamespace(run=run, resolved=settings),
            context=types.SimpleNamespace(clients=[link.rank], num_clients=link.size),
        )
        self._checkpoints, position = Checkpoints(job, folder, identity, lambda: recorder), 0
        if goes_on:
            clocks, manifest = self._checkpoints.restore()
            position, self._evaluating = manifest["records"], clocks["evaluation_seconds"]
            self._began -= clocks["seconds"]
            if recorder:
                print(f"{folder}: continuing after round {manifest['round']}", flush=True)
        agree(link, lambda: recorder and recorder.begin(settings, position, self.round_index))
        self._signals.__enter__()

    # What `Checkpoints` needs of a federation.
    round_index = property(lambda self: self._loop.federation.round_index)

    @property
    def requests(self) -> int:
        """Bits of all ranks in the last round."""
        return int(self._loop.federation.requests) & (1 << REQUEST_BITS) - 1

    def request(self) -> int:
        """This rank's bits: signals that have come, and what its checkpoints ask for. Not collective."""
        return int(self._signals.bits | self._checkpoints.request())

    def state(self) -> dict[str, Any]:
        """The loop's state and that of the objects; names of what only this rank has begin with "clients/RANK/"."""
        state: dict[str, Any] = self._loop.state_dict()
        tensors: list[torch.Tensor] = []
        objects = {name: _encoded(_state_of(stateful), tensors, name) for name, stateful in self._objects.items()}
        own = {name: state.pop(name) for name in [*state] if name.startswith("loop/")}
        own = {name: value for name, value in own.items() if not isinstance(value, str)}
        own |= {f"objects/{number}": tensor.detach().clone() for number, tensor in enumerate(tensors)}
        own["objects"] = torch.tensor([*json.dumps(objects).encode()], dtype=torch.uint8)
        return state | {f"{self._mine}{name}": value for name, value in own.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take what `state` gave."""
        prefix, number = self._mine, len(self._mine)
        own = {name[number:]: value for name, value in state.items() if name.startswith(prefix)}
        loop = {name: value for name, value in own.items() if name.startswith("loop/")}
        self._loop.load_state_dict({name: v for name, v in state.items() if not name.startswith(prefix)} | loop)
        objects = json.loads(bytes(own["objects"].tolist()))
        for name, stateful in self._objects.items():
            found = _decoded(objects[name], own)
            if isinstance(stateful, torch.Generator):
                stateful.set_state(found)
            else:
                stateful.load_state_dict(found)

    def after_round(self, loss: float) -> None:
        """Evaluate if that is due, write the record, make a checkpoint if it is due, and end if a signal has come."""
        loop, federation, began = self._loop, self._loop.federation, time.perf_counter()
        metrics: Mapping[str, float] = {}
        if self._recording.evaluate is not None and self.round_index % self._recording.eval_every == 0:
            metrics = self._measured(self._recording.evaluate())
        self._evaluating += time.perf_counter() - began
        accounts = {name: value for name, value in loop.accounts().items() if name != "collectives"}
        clocks = {"seconds": time.perf_counter() - self._began, "evaluation_seconds": self._evaluating}
        record = accounts | {"iteration": federation.server.iteration, "loss": loss} | clocks
        agree(loop._link, lambda: self._recorder and self._recorder.round(record, metrics))
        self._checkpoints.after_round(lambda: clocks)
        if signal := stopping_signal(federation.requests & (1 << REQUEST_BITS) - 1):
            self._stop(signal, clocks)

    def _measured(self, values: Mapping[str, float]) -> Metrics:
        """The means of what all ranks have measured, and each rank's values; nan is left out of the mean."""
        values = {str(name): float(value) for name, value in values.items()}
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
        clocks = {"seconds": time.perf_counter() - self._began, "evaluation_seconds": self._evaluating}
        self._checkpoints.write_now(lambda: clocks)
        own = {name: value.clone() for name, value in loop._flat.module.state_dict().items()}
        if loop.federation.private:
            agree(link, lambda: save_client_model(folder / CLIENT_MODEL.format(client=link.rank), own))
        values = loop._flat.named_values(loop.federation.server.x, store.buffers)
        rows = {**store.averaged_rows(), **store.server_rows()}
        facts: dict[str, Any] = {"fedmpi": fedmpi.__version__, "task": TASK, "model": None, "input": {}}
        facts["architecture"] = as_json(loop._flat.architecture, loop._flat.module)
        agree(link, lambda: recorder and save_model(recorder.folder, values, rows, facts))
        agree(link, lambda: recorder and complete(recorder.folder))
        self.close()

    def close(self) -> None:
        """End the record, and let signals do again what they did before."""
        self._signals.__exit__()
        if self._recorder:
            self._recorder.close()


def _make_recorder(recording: Recording, goes_on: bool) -> Recorder:
    """The recorder of a run folder that is made, or goes on. Not collective."""
    trackers, folder = make_trackers(recording.track), pathlib.Path(recording.folder)
    goes_on_in = RunLock(folder) if goes_on else make_run_folder(folder.parent, folder.name, "", recording.resume)
    return Recorder(goes_on_in, None, trackers)


class _Generators:
    """The generators of torch, numpy and Python, whose state is the process's."""

    def state_dict(self) -> dict[str, Any]:
        device = torch.get_device_module()
        gpu = device.get_rng_state() if torch.accelerator.is_available() and device.is_initialized() else None
        of_numpy = np.random.get_state(legacy=False)
        return {"torch": torch.get_rng_state(), "gpu": gpu, "numpy": of_numpy, "python": random.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])
        if state["gpu"] is not None:
            torch.get_device_module().set_rng_state(state["gpu"])
        of_numpy, (version, numbers, gauss) = state["numpy"], state["python"]
        np.random.set_state({**of_numpy, "state": {**of_numpy["state"], "key": of_numpy["state"]["key"].numpy()}})
        random.setstate((version, tuple(numbers), gauss))


def _state_of(stateful: Any) -> Any:
    return stateful.get_state() if isinstance(stateful, torch.Generator) else stateful.state_dict()


def _encoded(value: Any, tensors: list[torch.Tensor], where: str) -> Any:
    """A nested state as JSON can hold it; its tensors are appended to a list.

    Raises:
        UserError: if something else is in it.
    """
    if isinstance(value, torch.Tensor | np.ndarray):
        tensors.append(torch.as_tensor(value))
        return {"tensor": len(tensors) - 1}
    if isinstance(value, Mapping):
        return {"items": [[_encoded(part, tensors, where) for part in pair] for pair in value.items()]}
    if isinstance(value, list | tuple):
        return [_encoded(part, tensors, where) for part in value]
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise UserError(f"objects: '{where}' has a {type(value).__name__} in its state: expected tensors, numbers, texts")


def _decoded(value: Any, own: Mapping[str, Any]) -> Any:
    """What `_encoded` was given, with lists for tuples; `own` has its tensors under "objects/NUMBER"."""
    if isinstance(value, list):
        return [_decoded(part, own) for part in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return own[f"objects/{value['tensor']}"].clone()
    return {_decoded(key, own): _decoded(part, own) for key, part in value["items"]}
