"""The kinds of messages that have crossed, in a run's folder."""

import contextlib
import json
import pathlib
import weakref
from typing import Any

from fedmpi.comm.crosses import KINDS
from fedmpi.ground.files.own_files import replacing
from fedmpi.ground.files.run_files import CROSSED
from fedmpi.runs.loop.part import OwnPart
from fedmpi.runs.loop.run import Run


class Crossing(OwnPart):
    """Writes which kinds of messages have crossed, as soon as one does, with what it carries.

    "after_round" is after how many rounds the first of a kind was sent, also by an earlier start of the run.
    """

    def begin(self, run: Run) -> None:
        self._rounds: dict[str, int] = {}
        of_run = weakref.ref(run)  # the link may serve further runs

        def tell() -> None:
            if (found := of_run()) is not None:
                self._write(found)

        run.link.crossed.tell = tell
        tell()

    def _write(self, run: Run) -> None:
        """Write the file, on the rank that records. Not collective."""
        recorder = run.recorder()
        if recorder is None:
            return
        self._rounds = self._rounds or _read(recorder.folder)
        self._rounds = dict.fromkeys(run.link.crossed, run.federation.round_index) | self._rounds
        kinds = {
            name: {"after_round": self._rounds[name], "carries": kind.carries, "to": kind.to}
            for name, kind in KINDS.items()
            if name in self._rounds
        }
        recorder.write(lambda folder: _write(folder, kinds))


def _write(folder: pathlib.Path, kinds: dict[str, Any]) -> None:
    # Of a full disk, what the run itself writes there tells.
    with contextlib.suppress(OSError), replacing(folder / CROSSED) as part:
        part.write_text(json.dumps(kinds, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _read(folder: pathlib.Path) -> dict[str, int]:
    """Name of a kind -> after how many rounds it was sent first, of the file in a folder; {} if none can be read."""
    try:
        found = json.loads((folder / CROSSED).read_text(encoding="utf-8"))
        return {name: int(kind["after_round"]) for name, kind in found.items()}
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return {}
