"""Recording a run: the run folder, one line per round, and the progress that the user sees."""

import json
import pathlib
import sys

import yaml
from tqdm import tqdm

from fedmpi.errors import UserError
from fedmpi.run_files import DIVERGED, RECORDS, SETTINGS


class Recorder:
    """Writes the record of one run, on rank 0.

    Args:
        out: folder of the run folders; made if missing.
        name: of the run folder, or None for `prefix` and a number.
        prefix: beginning of that name.
        settings: nested dict, written to the run folder.
        num_rounds: of the run, for the progress bar.

    Raises:
        UserError: if the folder exists or cannot be written.
    """

    def __init__(self, out, name, prefix, settings, num_rounds):
        self.folder = _make_folder(pathlib.Path(out), name, prefix)
        try:
            (self.folder / SETTINGS).write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
            self._lines = open(self.folder / RECORDS, "w", encoding="utf-8")  # noqa: SIM115  closed by `close`
        except OSError as error:
            raise UserError(f"run folder {self.folder}: cannot be written: {error.strerror}") from None
        self._num_rounds = num_rounds
        self._bar = None

    def begin(self):
        """Show that training begins."""
        if sys.stderr.isatty():
            self._bar = tqdm(total=self._num_rounds, unit="round", dynamic_ncols=True)

    def round(self, record, metrics):
        """Write one round.

        Args:
            record: the amounts and the loss of the round, see `fedmpi.runs.record`.
            metrics: name -> number, {} if the model was not evaluated.
        """
        self._lines.write(json.dumps({**record, **metrics}) + "\n")
        self._lines.flush()
        text = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        if self._bar is not None:
            self._bar.update()
            if text:
                self._bar.set_postfix_str(text)
        elif text:
            print(f"round {record['round']}/{self._num_rounds}: {text}", flush=True)

    def diverged(self, why):
        """Write into the run folder that the run ended without a result, and why: one line."""
        (self.folder / DIVERGED).write_text(why + "\n", encoding="utf-8")

    def close(self):
        """End the progress bar and close the file."""
        if self._bar is not None:
            self._bar.close()
        self._lines.close()


def _make_folder(out, name, prefix):
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
        raise UserError(f"run folder {error.filename}: {what}; choose another --name or --out") from None
    except OSError as error:
        raise UserError(
            f"run folder {error.filename}: cannot be made: {error.strerror}; choose another --out"
        ) from None
