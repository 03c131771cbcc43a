"""What the benchmark prints, writes and compares."""

import json
import os
import pathlib

from fedmpi.cli.bench.timing import Times
from fedmpi.ground.errors import UserError, attempt
from fedmpi.ground.files.own_files import check_replaceable, is_stream, replacing
from fedmpi.ground.text import format_table

SIGNATURE = b'{\n "machine": {\n  "date": "'  # begins what `BenchResults.write` writes
VOLATILE = ("date", "command", "load")  # facts about a machine that differ between any two runs


class BenchResults:
    """All measurements by part and name.

    Args:
        machine: facts about it, a dict of texts and numbers. prints: whether this rank prints.

    Attributes:
        measures: "part/name" -> {"median", "low", "high", "unit", "cycles"}; low and high are quartiles.
    """

    def __init__(self, machine, prints):
        self.machine, self._prints = machine, prints
        self.measures = {}

    def print(self, *lines):
        """Print lines on the rank that prints."""
        if self._prints and lines:
            print(*lines, sep="\n", flush=True)

    def record(self, name, value, unit="s"):
        """Record `Times` or a number under a name that later runs use again, so that they can be compared."""
        times = value if isinstance(value, Times) else Times([value])
        low, high = times.quartiles
        cycles = len(times.seconds)
        self.measures[name] = {"median": times.median, "low": low, "high": high, "unit": unit, "cycles": cycles}

    def against(self, key, times, reference):
        """Record `Times` by name under `key`; rows for a table: name, milliseconds, ratio to the case `reference`."""
        for name, case_times in times.items():
            self.record(f"{key}/{name}", case_times)
        return [
            [name, format_ms(case_times), format_ratio(case_times / times[reference])]
            for name, case_times in times.items()
        ]

    def check_writable(self, path):
        """Check that the file of the measurements can be written, and that none but an earlier one of these is there.

        Raises:
            UserError: if not.
        """
        check_replaceable(pathlib.Path(path), SIGNATURE)
        folder = pathlib.Path(path).parent
        if not is_stream(path) and not (folder.is_dir() and os.access(folder, os.W_OK)):
            raise UserError(f"--json {path}: cannot be written: no folder {folder} that this user may write")

    def write(self, path):
        """Write everything as JSON.

        Raises:
            UserError: if it cannot.
        """
        text = json.dumps({"machine": self.machine, "measures": self.measures}, indent=1)
        with attempt("write", f"--json {path}"), replacing(path, SIGNATURE) as part:
            part.write_text(text, encoding="utf-8")

    def compare(self, earlier):
        """Lines of a table: ratios of these medians to those of `earlier` (see `read_results`)."""
        rows = []
        for name, now in self.measures.items():
            then = earlier["measures"].get(name)
            if then and then["median"]:
                repeated = min(now["cycles"], then.get("cycles", 1)) > 1
                disjoint = repeated and (now["low"] > then["high"] or now["high"] < then["low"])
                shown = [f"{measure['median']:.4g} {measure['unit']}" for measure in (then, now)]
                note = "quartiles do not overlap" if disjoint else ""
                rows.append([name, *shown, f"{now['median'] / then['median']:.3f}", note])
        differing = [
            f"  differs: {key}: {earlier['machine'].get(key)} then, {value} now"
            for key, value in self.machine.items()
            if key not in VOLATILE and earlier["machine"].get(key) != value
        ]
        return [*format_table(["measurement", "then", "now", "now/then", ""], rows), *differing]


def read_results(path):
    """What `BenchResults.write` wrote, as {"machine": ..., "measures": ...}.

    Raises:
        UserError: if it cannot be read.
    """
    kinds = (OSError, ValueError, AttributeError, RecursionError)
    with attempt("read", f"--compare {path}", *kinds):
        if not pathlib.Path(path).is_file():
            raise ValueError("it is not a file")
        with open(path, encoding="utf-8") as file:
            results = json.load(file)
        if not isinstance(results.get("measures"), dict) or not isinstance(results.get("machine"), dict):
            raise ValueError("it contains no measurements")
    return results


def format_ms(times):
    """Median and quartiles in milliseconds, like "12.3 (12.1-12.9)"."""
    median, low, high = (f"{1e3 * s:.3g}" if s < 1 else f"{1e3 * s:.0f}" for s in (times.median, *times.quartiles))
    return f"{median} ({low}-{high})"


def format_ratio(times):
    """Median and quartiles of a ratio, like "1.041 (1.037-1.052)"."""
    low, high = times.quartiles
    return f"{times.median:.3f} ({low:.3f}-{high:.3f})"


def format_rate(nbytes, seconds):
    """GB/s, like "12.34"."""
    return f"{nbytes / seconds / 1e9:.2f}"
