"""What the benchmark prints, writes and compares."""

import json

from fedmpi.bench.measure import Times
from fedmpi.errors import UserError


class Results:
    """Everything measured, by part and name; printed on rank 0 as it comes.

    Args:
        machine: see `describe_machine`. show: whether this rank prints.
    """

    def __init__(self, machine, show):
        self._machine, self._show = machine, show
        self.measures = {}  # "part/name" -> {"median", "low", "high", "unit", "cycles"}

    def say(self, *lines):
        """Print lines."""
        if self._show:
            print(*lines, sep="\n", flush=True)

    def keep(self, name, value, unit="s"):
        """Keep `Times` or a number under a name that later runs will have too."""
        times = value if isinstance(value, Times) else Times([value])
        low, high = times.quartiles
        cycles = len(times.seconds)
        self.measures[name] = {"median": times.median, "low": low, "high": high, "unit": unit, "cycles": cycles}

    def write(self, path):
        """Write everything as JSON; before anything is measured, only see that it can be written."""
        try:
            with open(path, "w" if self.measures else "a", encoding="utf-8") as file:
                if self.measures:
                    json.dump({"machine": self._machine, "measures": self.measures}, file, indent=1)
        except OSError as error:
            raise UserError(f"--json {path}: cannot be written: {error.strerror}") from None

    def compare(self, old):
        """Lines of a table: ratios of the medians of now to those of `old` (see `read`)."""
        rows = []
        for name, now in self.measures.items():
            before = old["measures"].get(name)
            if before and before["median"]:
                ratio = now["median"] / before["median"]
                repeated = min(now["cycles"], before.get("cycles", 1)) > 1
                apart = repeated and (now["low"] > before["high"] or now["high"] < before["low"])
                shown = [f"{m['median']:.4g} {m['unit']}" for m in (before, now)]
                rows.append([name, *shown, f"{ratio:.3f}", "quartiles apart" if apart else ""])
        differing = [
            f"  differs: {key}: {old['machine'].get(key)} then, {value} now"
            for key, value in self._machine.items()
            if key not in ("date", "command", "load") and old["machine"].get(key) != value
        ]
        return [*table(["measure", "then", "now", "now/then", ""], rows), *differing]


def read(path):
    """What `Results.write` wrote.

    Raises:
        UserError: if it cannot be read.
    """
    try:
        with open(path, encoding="utf-8") as file:
            old = json.load(file)
        if not isinstance(old.get("measures"), dict) or not isinstance(old.get("machine"), dict):
            raise ValueError("it has no measures")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"--compare {path}: cannot be read: {error}") from None
    return old


def table(titles, rows):
    """Lines of a table: the first column left, the others right."""
    texts = [titles, *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in texts) for column in range(len(titles))]
    return [
        "  " + "  ".join(f"{c:<{w}}" if i == 0 else f"{c:>{w}}" for i, (c, w) in enumerate(zip(row, widths))).rstrip()
        for row in texts
    ]


def milliseconds(times):
    """Median and quartiles, like "12.3 (12.1-12.9)"."""
    median, low, high = (f"{1e3 * s:.3g}" if s < 1 else f"{1e3 * s:.0f}" for s in (times.median, *times.quartiles))
    return f"{median} ({low}-{high})"


def ratio(times):
    """Median and quartiles of a ratio."""
    low, high = times.quartiles
    return f"{times.median:.3f} ({low:.3f}-{high:.3f})"


def rate(nbytes, seconds):
    """GB/s, like "12.3"."""
    return f"{nbytes / seconds / 1e9:.2f}"
