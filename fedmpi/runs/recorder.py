"""Recording a run: the run folder, one line per round, and the progress that the user sees."""

import contextlib
import errno
import itertools
import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tqdm import tqdm

from fedmpi.config.resume import AUTO
from fedmpi.ground.errors import UserError
from fedmpi.ground.files.own_files import check_folder, make_folder, read_mark, remove, remove_parts, set_aside
from fedmpi.ground.files.run_files import (
    DIVERGED,
    MODEL,
    RECORDS,
    RESULT,
    SETTINGS,
    had_checkpoints,
    has_checkpoint,
    is_complete,
)
from fedmpi.ground.files.settings_files import settings_text
from fedmpi.ground.text import Log, format_seconds, say, shows_progress
from fedmpi.runs.lock import RunLock
from fedmpi.runs.record import CASES_KEY, CLIENTS_KEY, FORMAT, FORMAT_KEY, TABLES_KEY, from_line, is_beside, to_line
from fedmpi.runs.settings import FolderSettings
from fedmpi.runs.trackers.base import Tracker, titled

log = Log(__name__)

PIECE = 1 << 16  # bytes that are read at first to find the last record
LONG_WAIT = 60  # seconds; progress lines say the time left beyond it


class Recorder:
    """Writes the record of one run, on rank 0.

    Args:
        lock: the `RunLock` of its folder (see `make_run_folder`), which the recorder releases; new records are
            appended to those in the folder.
        num_rounds: of the run, for the progress bar; None: unknown.
        trackers: `Tracker` objects that get every record, too.

    Attributes:
        last: the last record, {} if there is none. identity: of the run, which the mark of its folder contains.

    Raises:
        UserError: if the folder cannot be written.
    """

    def __init__(self, lock: RunLock, num_rounds: int | None, trackers: Iterable[Tracker] = ()) -> None:
        self.folder, self._lock, self._trackers = lock.folder, lock, trackers
        self._begun: list[Tracker] = []  # the trackers that have begun and are to be closed
        self.identity = read_mark(self.folder, "run")["identity"]
        try:
            self._lines = open(self.folder / RECORDS, "a+b", buffering=0)  # noqa: SIM115  closed by `close`
        except OSError as error:
            lock.release()
            raise UserError(f"run folder {self.folder}: cannot be written: {error.strerror}") from None
        self._num_rounds = num_rounds
        self._bar: Any = None
        self.last: dict[str, Any] = {}
        self._cases: dict[str, Any] = {}  # of the last evaluation, see `fedmpi.runs.record.CASES_KEY`
        self._pending = b""  # lines that the disk has no room for
        self._settings: dict[str, Any] = {}
        self._writers: list[Callable[[pathlib.Path], object]] = []

    def begin(self, settings: dict[str, Any], position: int = 0, num_rounds: int = 0) -> None:
        """Remove the records after a position, write the settings, and show that training begins.

        Args:
            settings: nested dict, written to the run folder. position: what `position` returned; 0: no records.
            num_rounds: the round whose record ends there. If it does not, the records that are missing are named.

        Raises:
            UserError: if the folder cannot be written.
        """
        self._settings = settings
        try:
            self._write_settings()
            position = self._keep_records(position, num_rounds)
            self._lines.truncate(position)
            remove(self.folder, (MODEL, DIVERGED))  # of the run as it was before it went on
            remove_parts(self.folder)
        except OSError as error:
            file = error.filename or self.folder / SETTINGS  # a full disk gives no name
            raise UserError(f"{file}: cannot be written: {error.strerror}") from None
        self.last, self._cases = self._last_line(position), self._last_cases(position)
        for tracker in self._trackers:
            tracker.begin(self.folder, settings, self.last.get("round", 0))
            self._begun.append(tracker)
        if shows_progress() and sys.stderr.isatty():
            done = self.last.get("round", 0)
            self._bar = tqdm(total=self._num_rounds, initial=done, unit="round", dynamic_ncols=True)

    def write(self, action: Callable[[pathlib.Path], object]) -> None:
        """Write a file into the run folder by `action(folder)`, also if the folder is removed and created again.

        If that is impossible, one line says so, and the run continues without the file.
        """
        self._writers.append(action)
        self._try(action)

    def _try(self, action: Callable[[pathlib.Path], object]) -> None:
        try:
            action(self.folder)
        except (OSError, UserError) as error:
            log.warning(f"{error}; the run continues without it")

    def _write_settings(self) -> None:
        part = self.folder / f"{SETTINGS}.part"
        with open(part, "w", encoding="utf-8") as file:
            file.write(settings_text(self._settings))
            file.flush()
            os.fsync(file.fileno())
        part.replace(self.folder / SETTINGS)

    def _keep_records(self, position: int, num_rounds: int) -> int:
        """Where the records up to a round end: at `position`, unless the file is missing, shorter or another one."""
        size = self.position()
        if size >= position and self._last_line(position).get("round", 0) == num_rounds:
            return position
        lines = self._read(0, size).splitlines(keepends=True)
        whole = itertools.takewhile(lambda line: 0 < _round_of(line) <= num_rounds, lines)
        kept = b"".join(whole)
        aside = ""
        if size > len(kept):
            aside = f", the file as it was is {set_aside(self.folder / RECORDS).name}"
            self._lines.close()
            self._lines = open(self.folder / RECORDS, "a+b", buffering=0)  # noqa: SIM115  closed by `close`
            self._lines.write(kept)
        log.warning(
            f"{self.folder / RECORDS}: not all records up to round {num_rounds} are there{aside}; the run continues "
            "from its checkpoint without them (--init would begin another run with that model)"
        )
        return len(kept)

    def position(self) -> int:
        """Where the records of the rounds so far end, in bytes."""
        return self._lines.seek(0, os.SEEK_END)

    def last_round(self) -> int:
        """The number of the last recorded round; 0 if there is none."""
        return int(self._last_line(self.position()).get("round", 0))

    def check_lock(self) -> None:
        """Check that no other job has taken the run folder.

        Raises:
            UserError: if one has.
        """
        self._lock.check()

    def sync(self) -> None:
        """Flush the records to the disk (fsync)."""
        os.fsync(self._lines.fileno())
        for tracker in self._begun:
            tracker.sync()

    def _last_line(self, position: int) -> dict[str, Any]:
        """The record that ends at a position; {} if none does."""
        begin, lines = position, list[bytes]()
        while begin > 0 and len(lines) < 2:  # until the last line is a whole one
            begin = max(0, position - max(PIECE, 2 * (position - begin)))
            lines = self._read(begin, position).splitlines(keepends=True)
        return from_line(lines[-1]) if lines and _round_of(lines[-1]) else {}

    def _last_cases(self, position: int) -> dict[str, Any]:
        """The last numbers of test cases in the records before a position; {} if there are none."""
        written = f'"{CASES_KEY}"'.encode()
        lines = [line for line in self._read(0, position).splitlines() if written in line]
        return from_line(lines[-1]).get(CASES_KEY, {}) if lines else {}

    def round(self, record: dict[str, Any], metrics: Mapping[str, float]) -> None:
        """Write one round.

        Args:
            record: the amounts and the loss of the round, see `fedmpi.runs.record`.
            metrics: name -> number, {} if the model was not evaluated; its attributes `clients` and `tables`, if it
                has them, are recorded under these names, and `cases` when it changes.

        Raises:
            UserError: if another job has taken the run folder.
        """
        if self._lock.is_doubtful:
            self.check_lock()
        cases = getattr(metrics, "cases", {})
        is_new, self._cases = cases and cases != self._cases, cases or self._cases
        self.last = {**_line_of(record, metrics), **({CASES_KEY: cases} if is_new else {})}
        self._append(to_line(self.last))
        for tracker in self._begun:
            tracker.round(record["round"], titled(self.last))
        text = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items() if not is_beside(name))
        if self._bar is not None:
            self._bar.update()
            if text:
                self._bar.set_postfix_str(text)
        elif text:
            of = f"/{self._num_rounds}" if self._num_rounds else ""
            say(f"round {record['round']}{of}: {text}{self._time_left(record)}")

    def result(self, metrics: Mapping[str, float], tables: dict[str, Any]) -> None:
        """Write what was measured of the resulting model, and further `tables`, as a record of the last round."""
        line = _line_of({"round": self.last["round"]}, metrics)
        line[TABLES_KEY] = {**line.get(TABLES_KEY, {}), **tables}
        line |= {CASES_KEY: cases} if (cases := getattr(metrics, "cases", {})) else {}
        self.write(lambda folder: (folder / RESULT).write_bytes(to_line(line)))

    def _time_left(self, record: dict[str, Any]) -> str:
        """How long the remaining rounds take if they are like those before, as text; "" if that is not long."""
        if not self._num_rounds:
            return ""
        left = record["seconds"] / record["round"] * (self._num_rounds - record["round"])
        return f"; {format_seconds(left)} left" if left > LONG_WAIT else ""

    def _append(self, line: bytes) -> None:
        """Append a line; what the disk has no room for stays in memory and is tried again with the next one."""
        had_room = not self._pending
        self._pending += line
        begin = None
        try:
            if not (self.folder / RECORDS).exists():
                self._make_again()
            begin = self.position()
            while self._pending:
                self._pending = self._pending[self._lines.write(self._pending) :]
        except OSError as error:
            if begin is not None:
                with contextlib.suppress(OSError):
                    written = self.position() - begin
                    self._pending = self._read(begin, begin + written) + self._pending
                    self._lines.truncate(begin)  # no half line
            if had_room:
                why = f"{self.folder / RECORDS}: cannot be written: {error.strerror}"
                log.warning(f"{why}; the run continues, and tries again after every round")

    def _read(self, begin: int, end: int) -> bytes:
        self._lines.seek(begin)
        return self._lines.read(end - begin)

    def _make_again(self) -> None:
        """Make the run folder again if it was removed, with all that was in it but the checkpoints so far."""
        records = self._read(0, self.position())
        if read_mark(self.folder, "run").get("identity") != self.identity:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            lock, _ = make_locked_folder(self.folder, self.identity)  # fails if another run has this name now
            self._lock.release()
            self._lock = lock
        again = open(self.folder / RECORDS, "a+b", buffering=0)  # noqa: SIM115  closed by `close`
        self._lines.close()
        self._lines, self._pending = again, records + self._pending
        log.warning(f"{self.folder} was removed; it is created again")
        self._write_settings()
        for action in self._writers:
            self._try(action)
        for tracker in self._begun:
            tracker.folder_is_made_again(self.folder, self._settings, [*map(from_line, records.splitlines())])

    def diverged(self, why: str) -> None:
        """Write into the run folder that the run ended without a result, and why: one line."""
        with contextlib.suppress(OSError):  # the line is printed, too
            (self.folder / DIVERGED).write_text(why + "\n", encoding="utf-8")

    def close(self) -> None:
        """End the progress bar and close the file."""
        if self._bar is not None:
            self._bar.close()
        if self._pending and not self._lines.closed:
            self._append(b"")
        if self._pending:
            log.warning(f"{self.folder / RECORDS}: the last records could not be written")
            self._pending = b""
        while self._begun:
            self._begun.pop().close()
        self._lines.close()
        self._lock.release()


def _line_of(record: dict[str, Any], metrics: Mapping[str, float]) -> dict[str, Any]:
    """A record as it is written; see `Recorder.round`."""
    further = {key: entries for key in (CLIENTS_KEY, TABLES_KEY) if (entries := getattr(metrics, key, {}))}
    return {**record, **metrics, **further, **({FORMAT_KEY: FORMAT} if metrics else {})}


def _round_of(line: bytes) -> int:
    """The round whose whole record a line is; 0 if it is none."""
    try:
        record = json.loads(line) if line.endswith(b"\n") else {}
        return int(record["round"]) if type(record["round"]) is int else 0
    except (ValueError, TypeError, KeyError, RecursionError):
        return 0


def check_run_folder(settings: FolderSettings) -> None:
    """Check, before any work, that a run may begin or go on in its folder, and that no other job writes to it.

    Raises:
        UserError: if it may not.
    """
    begins = settings.resume in (None, AUTO)
    if begins and settings.name is None:
        return
    folder = pathlib.Path(settings.out, settings.name or "") if begins else pathlib.Path(settings.resume or "")
    if begins and not check_folder(folder, "run"):
        return
    if settings.resume is None:
        raise UserError(_taken(folder))
    try:
        RunLock(folder).release()
    except OSError as error:
        raise UserError(f"run folder {folder}: cannot be written: {error.strerror}") from None


def _taken(folder: pathlib.Path) -> str:
    problem = "is a file" if folder.is_file() else "exists already"
    return f"run folder {folder}: {problem}; choose another --name or --out, or continue that run with --resume"


def make_run_folder(out: str | os.PathLike[str], name: str | None, prefix: str, begins_anew: bool = False) -> RunLock:
    """Make a run folder, and return its `RunLock`; what a run that ended before its first checkpoint left is renamed.

    Args:
        out: folder of the run folders; made if missing.
        name: of the run folder, or None for `prefix` and a number.
        begins_anew: whether the folder of a run that has no checkpoint may be renamed to NAME.old-1.

    Raises:
        UserError: if it exists or cannot be made, or another job writes to it.
    """
    out = pathlib.Path(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        if name is not None:
            if check_folder(out / name, "run"):
                if not begins_anew:
                    raise FileExistsError(errno.EEXIST, "exists already", str(out / name))
                _set_begun_aside(out / name)
            return make_locked_folder(out / name)[0]
        number = 0
        while True:
            number += 1
            with contextlib.suppress(FileExistsError):
                folder = out / f"{prefix}-{number:03d}"
                if not os.path.lexists(folder):
                    return make_locked_folder(folder)[0]
    except FileExistsError as error:
        raise UserError(_taken(pathlib.Path(error.filename))) from None
    except OSError as error:
        raise UserError(
            f"run folder {error.filename}: cannot be created: {error.strerror}; choose another --out"
        ) from None


def make_locked_folder(folder: pathlib.Path, identity: str | None = None) -> tuple[RunLock, str]:
    """(the `RunLock`, the identity) of a new run folder, which no other process ever sees without its lock.

    Raises:
        FileExistsError: if there is something of that name. OSError: if it cannot be made.
    """
    locks: list[RunLock] = []
    try:
        identity = make_folder(folder, "run", identity, lambda unnamed: locks.append(RunLock(unnamed)))
    except BaseException:
        for lock in locks:
            lock.release()
        raise
    locks[0].folder = folder
    return locks[0], identity


def _set_begun_aside(folder: pathlib.Path) -> None:
    """Rename the folder of a run that ended before its first checkpoint.

    Raises:
        UserError: if another job writes to it, or the run has a checkpoint or a result.
        OSError: if it cannot be renamed.
    """
    lock = RunLock(folder)
    try:
        if has_checkpoint(folder) or had_checkpoints(folder) or is_complete(folder):
            raise UserError(f"run folder {folder}: another job has used it meanwhile: start this one again to continue")
        lock.folder = set_aside(folder)
    finally:
        lock.release()
    log.warning(f"{folder}: a run ended there before its first checkpoint; it is {lock.folder} now")
