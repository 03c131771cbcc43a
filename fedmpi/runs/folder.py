"""Reading run folders, during a run or afterwards; needs neither torch nor MPI."""

import dataclasses
import json
import math
import os
import pathlib
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from fedmpi.config.grammar import flatten, read_file, split_paper
from fedmpi.ground.errors import UserError
from fedmpi.ground.files.own_files import check_regular
from fedmpi.ground.files.run_files import (
    BASELINES,
    CLIENTS,
    DATA_FILES,
    DIVERGED,
    RECORDS,
    RESULT,
    ROC,
    SETTINGS,
    is_complete,
)
from fedmpi.ground.text import short
from fedmpi.runs import baselines
from fedmpi.runs.record import AMOUNTS, CASES_KEY, CLIENTS_KEY, TABLES_KEY, from_line

LARGEST = 10**18  # of whole numbers and amounts; larger ones are a mistake, and overflow where they are drawn
LARGEST_VALUE = 1e200  # of metrics
LONGEST_NAME, LONGEST_VALUE, LONGEST_NOTE = 100, 2000, 10_000  # characters
Clients = dict[str, list[float]]
Tables = dict[str, tuple[list[str], list[list[float]]]]
Cases = tuple[()] | tuple[list[str], list[list[int]]]
NAME = re.compile(r"[A-Za-z_][\w.+-]{0,99}", re.ASCII)  # of a field of a record


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """One run folder.

    Attributes:
        path: a `pathlib.Path`.
        settings: key -> value, flat: "rounds", "algorithm" (its name), "algorithm.step_size", ...
        records: dicts of numbers, one per round, in order; see `fedmpi.runs.record`.
        is_complete: whether the run ended and wrote its model. diverged: why it did not, or "".
        paper: what a preset says about the paper's result, or {}.
        clients: metric -> a list with each client's value at the end, {} in a run that did not record them.
        client_names: one per client, or [].
        tables: metric -> (names of classes, rows of numbers) of its last vector (one row) or matrix.
        result: [record of the resulting model], if the last of `records` is of another one; else [].
        cases: (names of classes, a row for each client: its numbers of test cases), or () if they are not recorded.
    """

    path: pathlib.Path
    settings: dict[str, Any]
    records: list[dict[str, Any]]
    is_complete: bool
    diverged: str
    paper: dict[str, Any]
    clients: Clients = dataclasses.field(default_factory=dict)
    client_names: list[str] = dataclasses.field(default_factory=list)
    tables: Tables = dataclasses.field(default_factory=dict)
    result: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    cases: Cases = ()

    @property
    def metrics(self) -> list[str]:
        """Names of what the run measured, in the order of their first record."""
        names = dict.fromkeys(name for record in self.records for name in record)
        return [name for name in names if name not in AMOUNTS]

    def final(self, name: str) -> Any:
        """A field's value for the resulting model; else its last one, or None."""
        return next((record[name] for record in [*self.result, *reversed(self.records)] if name in record), None)

    def num_rounds(self) -> int | None:
        """How many rounds were asked for; None if the settings do not say it (--epochs)."""
        return self.settings.get("rounds") if self.settings.get("epochs") is None else None


def is_run(folder: pathlib.Path) -> bool:
    """Whether a folder is a run folder."""
    return (folder / SETTINGS).is_file()


def outcome(folder: pathlib.Path) -> str:
    """ "complete", "diverged", "broken" (it began, and was ended early or still runs) or "missing"."""
    if is_complete(folder):
        return "broken" if baselines.read(folder).get("pending") else "complete"
    if (folder / DIVERGED).is_file():
        return "diverged"
    return "broken" if folder.exists() else "missing"


def read_run(folder: pathlib.Path) -> RunFolder:
    """The `RunFolder` of a `pathlib.Path`.

    Raises:
        UserError: one line: what is wrong with the folder.
    """
    if not os.path.exists(folder):
        raise UserError(f"{folder}: no such folder")
    if not is_run(folder):
        raise UserError(f"{folder}: not a run folder (it contains no {SETTINGS})")
    for name in (SETTINGS, RECORDS, DIVERGED, RESULT, CLIENTS, BASELINES, ROC, DATA_FILES):
        check_regular(folder / name)
    settings, paper = _read_settings(folder / SETTINGS)
    records, clients, tables, cases = read_records(folder / RECORDS)
    note = folder / DIVERGED
    diverged = short(note.read_text(encoding="utf-8", errors="replace")[:LONGEST_NOTE]) if note.is_file() else ""
    result, *_ = of_result = read_records(folder / RESULT)
    if result and records and result[0]["round"] == records[-1]["round"]:  # no rounds were added since
        _, clients, tables, cases = of_result
    else:
        result = []
    ended = (is_complete(folder), diverged, paper)
    return RunFolder(folder, settings, records, *ended, clients, _client_names(folder), tables, result, cases)


def find_runs(paths: Iterable[pathlib.Path]) -> tuple[list[RunFolder], list[str]]:
    """([`RunFolder` with at least one record], [a line for each that is not usable]) in some folders.

    They are paths of run folders, or of folders that contain some.
    """
    runs, complaints = [], []
    for folder in dict.fromkeys(inner for path in paths for inner in run_folders(path)):
        try:
            run = read_run(folder)
            if not run.records:
                raise UserError(f"{folder}: no round is recorded{f' ({run.diverged})' if run.diverged else ' yet'}")
            runs.append(run)
        except UserError as error:
            complaints.append(short(error))
        except Exception as error:  # noqa: BLE001  one folder that cannot be read must not hide the others
            complaints.append(short(f"{folder}: cannot be read: {type(error).__name__}: {error}"))
    return runs, complaints


def run_folders(path: pathlib.Path) -> list[pathlib.Path]:
    """The run folders among the folders in `path`; `path` itself if it is one or contains none."""
    if is_run(path) or not path.is_dir():
        return [path]
    return sorted(inner for inner in path.iterdir() if is_run(inner)) or [path]


def _read_settings(path: pathlib.Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(flat settings, what a preset says about the paper's result)."""
    content, paper = split_paper(read_file(path), path)
    settings = {short(key, LONGEST_NAME): value for key, value in flatten(content).items()}
    _check_settings(path, settings)
    return {key: _plain(value) for key, value in settings.items()}, paper


def _plain(value: Any) -> Any:
    """A setting's value as it can be shown: a number, a truth value, None, or a short text of one line."""
    if value is None or isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < LARGEST):
        return value
    if isinstance(value, list) and all(isinstance(number, bool | int | float) for number in value) and len(value) < 100:
        return value
    return short(value, LONGEST_VALUE)


def _check_settings(path: pathlib.Path, settings: dict[str, Any]) -> None:
    """Check the types of the settings by which runs are sorted, named and timed."""
    for keys, kind, words in ((("algorithm", "task"), str, "a name"), (("rounds", "seed"), int, "a whole number")):
        for key in keys:
            if key in settings and type(settings[key]) is not kind:
                raise UserError(f"{path}: {key} = {short(repr(settings[key]), LONGEST_VALUE)}: expected {words}")


def read_records(
    path: pathlib.Path, keeps_clients: bool = False
) -> tuple[list[dict[str, Any]], Clients, Tables, Cases]:
    """(a file's records; the last values of clients, tables, cases); an unfinished last line is ignored.

    `keeps_clients`: whether a record has, as "clients", metric -> each client's value, where it was written.

    Raises:
        UserError: if the file cannot be read, or a line is not the record of a round.
    """
    try:
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
    by_round: dict[int, dict[str, Any]] = {}
    clients, tables = Clients(), Tables()
    cases: Cases = ()
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), 1):
        try:
            record = from_line(line)
        except (ValueError, RecursionError):
            record = None
        if not _is_record(record):
            raise UserError(f"{path}: line {number} is not the record of a round")
        of_round = _of_clients(record.get(CLIENTS_KEY))
        clients = of_round or clients
        tables = _tables(record.get(TABLES_KEY)) or tables
        cases = _cases(record.get(CASES_KEY)) or cases
        fields = record.items()
        by_round[record["round"]] = {k: _number(v) for k, v in fields if type(v) in (int, float) and NAME.fullmatch(k)}
        if keeps_clients and of_round:
            by_round[record["round"]][CLIENTS_KEY] = of_round
    return [by_round[number] for number in sorted(by_round)], clients, tables, cases


def _number(value: Any) -> Any:
    """A value that can be added to others: beyond `LARGEST_VALUE` it becomes inf, below minus that, nan."""
    if abs(value) < LARGEST_VALUE:
        return value
    return math.inf if value > 0 else math.nan


def _of_clients(values: Any) -> Clients:
    """Those entries of what a record has of its clients that are lists of numbers; {} if it has nothing."""
    entries = values.items() if isinstance(values, dict) else ()
    rows = {short(name, LONGEST_NAME): row for name, row in entries if isinstance(row, list)}
    return {name: row for name, row in rows.items() if {*map(type, row)} <= {int, float}}


def _tables(entries: Any) -> Tables:
    """Name -> (names, rows) of those tables of a record that are what fedmpi writes."""
    tables = Tables()
    for name, table in entries.items() if isinstance(entries, dict) else ():
        try:
            rows = np.atleast_2d(np.asarray(table["values"], dtype=float))
            names = [short(class_name, LONGEST_NAME) for class_name in table["classes"]]
        except (KeyError, TypeError, ValueError):
            continue
        if NAME.fullmatch(name) and rows.ndim == 2 and len(names) == rows.shape[1] and rows.size:
            tables[name] = (names, rows.tolist())
    return tables


def _cases(entry: Any) -> Cases:
    """(names of classes, a row for each client) of the numbers of test cases in a record; () if it has none."""
    for names, rows in _tables({CASES_KEY: entry}).values():
        if all(0 <= number < LARGEST for row in rows for number in row):
            return names, [[int(number) for number in row] for row in rows]
    return ()


def _client_names(folder: pathlib.Path) -> list[str]:
    """The clients' names in a run folder; [] if there are none."""
    try:
        names = json.loads((folder / CLIENTS).read_text(encoding="utf-8"))["names"]
        return [short(name, LONGEST_NAME) for name in names] if isinstance(names, list) else []
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []


def _is_record(record: Any) -> bool:
    """Whether a line has its round, and amounts that are finite numbers >= 0."""
    if not isinstance(record, dict) or type(record.get("round")) is not int or record["round"] < 1:
        return False
    amounts = [record[name] for name in AMOUNTS if name in record]
    if not all(type(amount) in (int, float) and 0 <= amount < LARGEST for amount in amounts):
        return False
    return all(abs(value) < LARGEST for value in record.values() if type(value) is int)
