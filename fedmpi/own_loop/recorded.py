"""The record of a user's own loop: a run folder with rounds, checkpoints and the model, as `fedmpi.train` makes one."""

import math
import pathlib
import sys
import time
from collections.abc import Collection, Mapping
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from fedmpi.comm.agreement import agree, share
from fedmpi.comm.faults.meeting import wait_for_all
from fedmpi.comm.job.ranks import end_in_order
from fedmpi.comm.job.signals import StopSignals
from fedmpi.comm.link import Link
from fedmpi.federation.losses import PAUSED
from fedmpi.ground.errors import STOPPED
from fedmpi.ground.files.run_files import CLIENT_MODEL, check_files, has_checkpoint
from fedmpi.ground.text import Log, progress_shown, say
from fedmpi.ground.version import __version__
from fedmpi.oracles.architecture import as_json
from fedmpi.own_loop.measuring import Measuring
from fedmpi.own_loop.objects import Objects
from fedmpi.own_loop.passes import Passes
from fedmpi.own_loop.recording import TASK, Recording
from fedmpi.runs.checkpoints.within import LONG
from fedmpi.runs.checkpoints.writer import Checkpoints
from fedmpi.runs.lock import RunLock
from fedmpi.runs.loop.check import with_checks
from fedmpi.runs.loop.crossed import Crossing
from fedmpi.runs.loop.loop import Loop
from fedmpi.runs.loop.meeting import Later, Steps, at_once, meeting
from fedmpi.runs.loop.part import Now, OwnPart
from fedmpi.runs.loop.run import Run
from fedmpi.runs.loop.saving import Saving, Stopping
from fedmpi.runs.model_files import check_savable, complete, fingerprint, save_client_model, save_model
from fedmpi.runs.recorder import Recorder, make_run_folder
from fedmpi.runs.settings import FolderSettings
from fedmpi.runs.trackers.base import make_trackers

log = Log(__name__)

TRIES = 5  # meetings within a round that may find a rank past the step at which all were to meet
AHEAD = 0.5  # seconds in which all ranks have heard of it
PATIENCE = 10.0  # seconds in which all ranks end by themselves
ENDLESS = sys.maxsize  # rounds of a loop whose end only the user knows
NEW_PASS = (
    "this loop reads a DataLoader by itself ({taken} batches of a pass at its first average): if it goes on from a "
    "checkpoint within a pass, it begins a new pass, and ends with another model; fed.batches(loader) goes on within it"
)


class AgreedRecords(OwnPart):
    """Writes a record after every round; an error is one of all ranks, which the user's loop may catch.

    Args:
        verbose: whether what is measured is printed.
    """

    def __init__(self, verbose: bool) -> None:
        self._verbose = verbose

    def begin(self, run: Run) -> None:
        self._run = run

    def after_round(self, now: Now) -> None:
        recorder = self._run.recorder()
        with progress_shown(self._verbose):
            agree(self._run.link, lambda: recorder and recorder.round(now.record, now.metrics))


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
        self._is_late = loop.has_optimizers and bool(link.allgather([self._objects.may_be_late], "machinery").any())
        self._pending: dict[str, Any] | None = None  # the state of such a checkpoint
        self._hook: Any = None
        # Of a meeting within a round: what is left of it, after which local step all ranks take their states for it
        # (a loop may have messages of its own in each), this rank's state, and the number of the next one.
        self._meeting: Later | None = None
        self._meeting_step: int | None = None
        self._captured: dict[str, Any] | None = None
        self._number, self._signalled, self._tries, self._first_step = 0, 0.0, 0, 0
        self._round_began = self._saved = time.monotonic()
        goes_on = share(link, lambda: recording.resume and has_checkpoint(folder))
        facts = {"task": TASK, "model": None}  # a model that cannot be saved is refused now, not at the end
        agree(link, lambda: check_savable(loop._flat.module, facts, has_rows=False))
        recorder = agree(link, lambda: _make_recorder(recording, goes_on) if link.rank == 0 else None)
        self._recorder, self._signals = recorder, StopSignals()
        self._given = {} if recording.whole_model else self._fingerprints(self._untrained(settings["buffers"]))
        self._run = Run(
            link=link,
            federation=loop.federation,
            flat=loop._flat,
            clients=[link.rank],
            num_clients=link.size,
            num_rounds=ENDLESS,
            settings=settings,
            folder=folder,
            identity=share(link, lambda: recorder.identity),
            recorder=lambda: recorder,
            record=self._amounts,
            state=self.state,
            restore=self.restore,
        )
        of_folder = FolderSettings(
            checkpoint_every=recording.checkpoint_every,
            checkpoint_minutes=recording.checkpoint_minutes,
            checkpoint_keep=recording.checkpoint_keep,
        )
        self._checkpoints, position = Checkpoints(self._run, of_folder, self._state_of_parts), 0
        self._saving, self._stopping = Saving(self._checkpoints, may_fail=True), Stopping(self._signals, self._stop)
        parts = [
            Crossing(),
            Measuring(loop, recording),
            *with_checks(recording.parts),
            AgreedRecords(recording.verbose),
            self._saving,
            self._stopping,
        ]
        self._parts: Loop = Loop(self._run, parts)
        if goes_on:
            state, manifest = self._checkpoints.restore()
            agree(link, lambda: self._parts.restore(state))
            position = manifest["records"]
        with progress_shown(recording.verbose):
            if goes_on and recorder:
                say(f"{folder}: continuing after round {manifest['round']}")
            agree(link, lambda: recorder and recorder.begin(settings, position, loop.federation.round_index))
        self._signals.__enter__()
        self._parts.begin()
        loop.federation.reports.hold_meeting = self._meet
        self._now = Now(self._run, math.nan)  # the last round

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

    def begin_round(self, first_step: int) -> None:
        """Before the local step `first_step` of a round; from now on, signals wait for its end. Not collective."""
        self._signals.begin_rounds()
        self._round_began = self._saved = time.monotonic()
        self._tries, self._first_step, self._meeting_step = 0, first_step, None
        if not first_step:
            self._parts.before_round()

    def request(self) -> int:
        """This rank's bits: signals that have come, what its checkpoints ask for. Not collective."""
        return self._parts.request()

    def _state_of_parts(self) -> dict[str, Any]:
        return self._parts.state()

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
        self._now = self._parts.after_round(loss)
        self._look_once()
        if self._saving.is_due or self._stopping.signal:
            self._pending = self.state()
            if self._is_late:
                self._hook = register_optimizer_step_pre_hook(self._take_late)
            else:
                self.write_pending()
        else:
            self._parts.after_parts(self._now)

    def after_step(self) -> None:
        """After a local step that is not the last of its round: meet the other ranks if that is wanted."""
        self._go_on()
        if self._meeting is not None or self._tries >= TRIES:
            return
        step = self._loop._done
        if self._meeting_step is None:
            self._meeting_step = self._find_meeting_step(step)
        if self._meeting_step is None or step < self._meeting_step:
            return
        number, place = self._loop._link.called()
        if number == self._number and place > self._meeting_step:  # another one has called at the same time
            self._meeting_step = place
            return
        if step == self._meeting_step:
            self._captured = self._state()
            if self._is_late:
                self._hook = register_optimizer_step_pre_hook(self._take_late)
        self._meeting = Later(self._loop._link, self._steps())

    def _find_meeting_step(self, step: int) -> int | None:
        """The local step after which all ranks meet: another rank's, or this one's, which has made `step`; or None."""
        if time.monotonic() - self._round_began < LONG:
            return None
        link: Link = self._loop._link
        number, place = link.called()
        if number >= self._number:
            return place
        if not self._is_wanted() or (place := self._next_step(step)) >= self._loop._client.num_steps:
            return None
        link.call(self._number, place)
        return place

    def _next_step(self, step: int) -> int:
        """The first local step that no rank will have made when all have heard of it, were they at the same `step`."""
        seconds = (time.monotonic() - self._round_began) / max(1, step - self._first_step)
        return step + (2 + int(AHEAD / seconds)) * (1 << self._tries)

    def _is_wanted(self) -> bool:
        now = time.monotonic()
        if self._signals.bits:
            self._signalled = self._signalled or now
            return now - self._signalled >= LONG  # the round may end before
        minutes = self._recording.checkpoint_minutes
        return minutes > 0 and now - self._saved >= 60 * minutes

    def _steps(self) -> Steps:
        """The meeting of a rank that has asked for it; see `fedmpi.runs.loop.meeting`."""
        reports = self._loop.federation.reports
        everyone = yield reports.asking()
        reports.answered(everyone.tolist(), self._run.federation.round_index)
        yield from self._rest_of_meeting()

    def _rest_of_meeting(self) -> Steps:
        self._number, bits = self._number + 1, self._signals.bits
        known = lambda: None if self._hook is not None else self._captured  # noqa: E731
        place, later = self._meeting_step or 0, self._next_step(self._loop._done)
        steps = meeting(known, bits, self._checkpoints.within, self._stop_within, place, later)
        is_known, later = yield from steps
        self._forget_late()
        self._captured, self._meeting_step = None, None if is_known else later
        self._tries = 0 if is_known and not bits else self._tries + 1
        if later >= self._loop._client.num_steps:
            self._tries = TRIES
        if is_known:
            self._saved = time.monotonic()

    def _meet(self) -> None:
        """What this rank does if another one asks for a meeting while it waits for something else. Collective."""
        at_once(self._loop._link, self._rest_of_meeting())

    def _go_on(self, waits: bool = False) -> None:
        if self._meeting is not None and self._meeting.go_on(waits):
            self._meeting = None

    def end_meeting(self) -> None:
        """Before another message of all ranks: the meeting that has begun comes to its end. Collective."""
        self._go_on(waits=True)

    def _stop_within(self, signal: str) -> None:
        """End this rank, as all ranks do, after a local step of its own."""
        link, self._meeting = self._loop._link, None
        self.close()
        result = "start the program again to continue" if self._recording.resume else "Recording(resume=True) continues"
        if self._recorder:
            where = f"{self._recording.folder}: stopped within round {self._run.federation.round_index + 1} by {signal}"
            print(f"fedmpi: {where}; {result}", file=sys.stderr, flush=True)
        if wait_for_all(link.comm, PATIENCE) is not None:  # the user's code keeps a rank waiting for this one
            link.abort(STOPPED)
        end_in_order(link, "", None, STOPPED)

    def _amounts(self, loss: float) -> dict[str, float]:
        """See `Run.record`."""
        clock, iteration = self._run.clock, self._loop.federation.server.iteration
        accounts = {name: value for name, value in self._loop.accounts().items() if name != "collectives"}
        clocks = {"seconds": clock.seconds, "evaluation_seconds": clock.evaluating}
        return accounts | {"iteration": iteration, "loss": loss} | clocks

    def _take_late(self, optimizer: Any = None, *_: Any) -> None:
        """Take the states of what the loop may have called since the round ended; the next step has not begun."""
        own = {id(parameter) for parameter in self._loop._flat.parameters}
        if optimizer is not None and not any(id(p) in own for g in optimizer.param_groups for p in g["params"]):
            return  # that of another model
        self._forget_late()
        late = self._named(self._objects.state(is_late=True))
        prefixes = {name.rpartition("/")[0] + "/" for name in late}
        before = self._captured if self._pending is None else self._pending
        assert before is not None
        kept = {name: value for name, value in before.items() if name.rpartition("/")[0] + "/" not in prefixes} | late
        if self._pending is None:
            self._captured = kept
        else:
            self._pending = kept

    def _forget_late(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    @property
    def is_pending(self) -> bool:
        """Whether a checkpoint of the last round is to be written. Not collective."""
        return self._pending is not None

    def write_pending(self, ends: bool = False) -> None:
        """Begin to write the checkpoint of the last round, and end if a signal has come, unless the loop `ends` now."""
        if self._hook is not None:
            if ends:
                self._take_late()
            self._forget_late()
        self._now.is_last = ends
        self._parts.after_parts(self._now)
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

    def _stop(self, signal: str) -> None:
        """Write a checkpoint and end this rank, as all ranks do."""
        if self._is_late:
            self._loop._announce(PAUSED)  # until here the ranks have not met since the round
        is_written = self._checkpoints.write_now()
        self.close()
        result = "start the program again to continue" if self._recording.resume else "Recording(resume=True) continues"
        result = result if is_written else "the checkpoint could not be written"
        if self._recorder:
            where = f"{self._recording.folder}: stopped after round {self._run.federation.round_index} by {signal}"
            print(f"fedmpi: {where}; {result}", file=sys.stderr, flush=True)
        end_in_order(self._loop._link, "", None, STOPPED if is_written else 2)

    def finish(self) -> None:
        """Write the last checkpoint and the model, by which the run is complete."""
        loop, folder, link = self._loop, pathlib.Path(self._recording.folder), self._loop._link
        store, recorder = loop.federation.store, self._recorder
        if self._pending is not None:
            self.write_pending(ends=True)
        self._parts.end(self._now)
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


def _make_recorder(recording: Recording, goes_on: bool) -> Recorder:
    """The recorder of a run folder that is made, or goes on. Not collective."""
    trackers, folder = make_trackers(recording.track), pathlib.Path(recording.folder)
    if goes_on:
        check_files(folder)
    goes_on_in = RunLock(folder) if goes_on else make_run_folder(folder.parent, folder.name, "", recording.resume)
    return Recorder(goes_on_in, None, trackers)
