"""Recording a run: the run folder, one line per round, and the progress that the user sees."""

import contextlib
import fcntl
import json
import os
import pathlib
import shutil
import sys
import time

import yaml
from tqdm import tqdm

from fedmpi.errors import UserError
from fedmpi.run_files import DIVERGED, FORMER_MODEL, MODEL, RECORDS, SETTINGS
from fedmpi.runs.record import CLIENTS_KEY
from fedmpi.runs.state_file import Damaged
from fedmpi.runs.trackers.base import titled
from fedmpi.text import format_seconds

LONGEST_LINE = 1 << 20  # bytes of a record
OUTLIVES = 10.0  # seconds by which the ranks of a killed job may outlive it
LONG_WAIT = 60  # seconds; progress lines say the time left beyond it


class Recorder:
    """Writes the record of one run, on rank 0.

    Args:
        folder: path of the run folder, which exists (`make_run_folder`); new records are appended to those in it.
        num_rounds: of the run, for the progress bar.
        trackers: `Tracker` objects that get every record, too.

    Attributes:
        last: the last record, {} if there is none.

    Raises:
        UserError: if the folder cannot be written.
    """

    def __init__(self, folder, num_rounds, trackers=()):
        self.folder, self._trackers = folder, trackers
        self._begun = []  # the trackers that have begun and are to be closed
        try:
            self._lines = open(folder / RECORDS, "a+b", buffering=0)  # noqa: SIM115  closed by `close`
            _lock(self._lines)
        except BlockingIOError:
            self._lines.close()
            raise UserError(f"run folder {folder}: another job is still writing to it; wait until it ends") from None
        except OSError as error:
            raise UserError(f"run folder {folder}: cannot be written: {error.strerror}") from None
        self._num_rounds = num_rounds
        self._bar, self.last = None, {}
        self._pending = b""  # lines that the disk has no room for
        self._settings, self._writers = None, []

    def begin(self, settings, position=0):
        """Remove the records after a position, write the settings, and show that training begins.

        Args:
            settings: nested dict, written to the run folder. position: what `position` returned; 0: no records.

        Raises:
            UserError: if the folder cannot be written.
        """
        self._settings = settings
        try:
            self._write_settings()
            self._lines.truncate(position)
            for name in (MODEL, FORMER_MODEL, DIVERGED):  # of the run as it was before it went on
                (self.folder / name).unlink(missing_ok=True)
        except OSError as error:
            file = error.filename or self.folder / SETTINGS  # a full disk gives no name
            raise UserError(f"{file}: cannot be written: {error.strerror}") from None
        self.last = self._last_line(position)
        for tracker in self._trackers:
            tracker.begin(self.folder, settings, self.last.get("round", 0))
            self._begun.append(tracker)
        if sys.stderr.isatty():
            done = self.last.get("round", 0)
            self._bar = tqdm(total=self._num_rounds, initial=done, unit="round", dynamic_ncols=True)

    def write(self, action):
        """Write a file into the run folder by `action(folder)`, also if the folder is removed and created again.

        If that is impossible, one line says so, and the run continues without the file.
        """
        self._writers.append(action)
        self._try(action)

    def _try(self, action):
        try:
            action(self.folder)
        except (OSError, UserError) as error:
            print(f"fedmpi: {error}; the run continues without it", file=sys.stderr, flush=True)

    def _write_settings(self):
        part = self.folder / f"{SETTINGS}.part"
        with open(part, "w", encoding="utf-8") as file:
            yaml.safe_dump(self._settings, file, sort_keys=False)
            file.flush()
            os.fsync(file.fileno())
        part.replace(self.folder / SETTINGS)

    def position(self):
        """Where the records of the rounds so far end, in bytes."""
        return self._lines.seek(0, os.SEEK_END)

    def last_round(self):
        """The number of the last recorded round; 0 if there is none."""
        return self._last_line(self.position()).get("round", 0)

    def check(self, position, num_rounds):
        """Check that the record of a round ends at a position.

        Raises:
            Damaged: if it does not.
        """
        if self.position() < position or self._last_line(position).get("round") != num_rounds:
            raise Damaged(
                f"{self.folder / RECORDS}: the record of round {num_rounds} does not end at byte {position:,}"
            )

    def sync(self):
        """Flush the records to the disk (fsync)."""
        os.fsync(self._lines.fileno())
        for tracker in self._begun:
            tracker.sync()

    def _last_line(self, position):
        """The record that ends at a position; {} if none does."""
        begin = max(0, position - LONGEST_LINE)
        self._lines.seek(begin)
        lines = self._lines.read(position - begin).splitlines(keepends=True)
        try:
            return json.loads(lines[-1]) if lines and lines[-1].endswith(b"\n") else {}
        except ValueError:
            return {}

    def round(self, record, metrics):
        """Write one round.

        Args:
            record: the amounts and the loss of the round, see `fedmpi.runs.record`.
            metrics: name -> number, {} if the model was not evaluated; its attribute `clients`, if it has one,
                name -> a list with each client's number.
        """
        clients = getattr(metrics, "clients", {})
        self.last = {**record, **metrics, **({CLIENTS_KEY: clients} if clients else {})}
        self._append(json.dumps(self.last).encode() + b"\n")
        for tracker in self._begun:
            tracker.round(record["round"], titled(self.last))
        text = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        if self._bar is not None:
            self._bar.update()
            if text:
                self._bar.set_postfix_str(text)
        elif text:
            print(f"round {record['round']}/{self._num_rounds}: {text}{self._time_left(record)}", flush=True)

    def _time_left(self, record):
        """How long the remaining rounds take if they are like those before, as text; "" if that is not long."""
        left = record["seconds"] / record["round"] * (self._num_rounds - record["round"])
        return f"; {format_seconds(left)} left" if left > LONG_WAIT else ""

    def _append(self, line):
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
                print(
                    f"fedmpi: {why}; the run continues, and tries again after every round", file=sys.stderr, flush=True
                )

    def _read(self, begin, end):
        self._lines.seek(begin)
        return self._lines.read(end - begin)

    def _make_again(self):
        """Make the run folder again if it was removed, with all that was in it but the checkpoints so far."""
        self.folder.mkdir(parents=True, exist_ok=True)
        records = self._read(0, self.position())
        again = open(self.folder / RECORDS, "a+b", buffering=0)  # noqa: SIM115  closed by `close`
        _lock(again)
        self._lines.close()
        self._lines, self._pending = again, records + self._pending
        print(f"fedmpi: {self.folder} was removed; it is created again", file=sys.stderr, flush=True)
        self._write_settings()
        for action in self._writers:
            self._try(action)
        for tracker in self._begun:
            tracker.folder_is_made_again(self.folder, self._settings, [*map(json.loads, records.splitlines())])

    def diverged(self, why):
        """Write into the run folder that the run ended without a result, and why: one line."""
        with contextlib.suppress(OSError):  # the line is printed, too
            (self.folder / DIVERGED).write_text(why + "\n", encoding="utf-8")

    def close(self):
        """End the progress bar and close the file."""
        if self._bar is not None:
            self._bar.close()
        if self._pending and not self._lines.closed:
            self._append(b"")
        if self._pending:
            print(
                f"fedmpi: {self.folder / RECORDS}: the last records could not be written", file=sys.stderr, flush=True
            )
            self._pending = b""
        while self._begun:
            self._begun.pop().close()
        self._lines.close()


def _lock(file):
    """Reserve a file for this process until it closes it or ends; waits for a job that is ending.

    Raises:
        BlockingIOError: if another process has it for `OUTLIVES` seconds more.
    """
    until = time.monotonic() + OUTLIVES
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
        except OSError:  # a file system without locks
            return


def clear_run_folder(folder):
    """Remove the folder of a run that ended before its first checkpoint; nothing else.

    Raises:
        UserError: if it cannot be removed.
    """
    if not folder.is_dir():
        return
    begun = {f"{SETTINGS}.part", RECORDS}  # a run makes them before its settings
    inner = list(folder.iterdir())
    if (folder / SETTINGS).is_file() or {path.name for path in inner} <= begun:
        try:
            for path in sorted(inner, key=lambda path: path.name == SETTINGS):  # last: by it the folder is a run's
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            folder.rmdir()
        except OSError as error:
            raise UserError(f"run folder {error.filename}: cannot be removed: {error.strerror}") from None


def make_run_folder(out, name, prefix):
    """Make a run folder.

    Args:
        out: folder of the run folders; made if missing.
        name: of the run folder, or None for `prefix` and a number.
        prefix: beginning of that name.

    Returns:
        its `pathlib.Path`.

    Raises:
        UserError: if it exists or cannot be made.
    """
    out = pathlib.Path(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        if name is not None:
            folder = out / name
            folder.mkdir(exist_ok=False)
            return folder
        number = 1
        while True:
            folder = out / f"{prefix}-{number:03d}"
            try:
                folder.mkdir()
                return folder
            except FileExistsError:
                number += 1
    except FileExistsError as error:
        what = "is a file" if pathlib.Path(error.filename).is_file() else "exists already"
        raise UserError(
            f"run folder {error.filename}: {what}; choose another --name or --out, or continue that run with --resume"
        ) from None
    except OSError as error:
        raise UserError(
            f"run folder {error.filename}: cannot be created: {error.strerror}; choose another --out"
        ) from None
