"""Running jobs on a terminal: a line per run, rewritten until all have ended."""

import contextlib
import math
import sys
import time

from rich.live import Live
from rich.text import Text

from fedmpi.ground.errors import UserError
from fedmpi.ground.files.run_files import RECORDS, find_checkpoints
from fedmpi.ground.text import Table, format_seconds, short
from fedmpi.runs.folder import find_runs

BARS = "▁▂▃▄▅▆▇█"
RESTART = 3600  # seconds to wait for a stopped run with a checkpoint: its job may be in a queue to resume it
SILENCE = 60  # seconds; a job without a new round for so long, or for ten of its rounds if longer, has stopped


def watch(paths, seconds, write_page):
    """Show the runs in some folders until all have ended, also across restarts, or until Ctrl-C.

    Args:
        paths: run folders, or folders that contain some or will.
        seconds: between two readings of the folders.
        write_page: called as `write_page(refresh)` when something has changed, with the seconds after
            which a browser reloads the page; at the end with None.
    """
    shown = None
    with contextlib.suppress(KeyboardInterrupt), _view() as show:
        while True:
            runs, complaints = find_runs(paths)
            text = _text(runs, complaints)
            if text != shown:
                show(text)
                shown = text
                write_page(seconds)
            if runs and not any(is_running(run) or may_go_on(run) for run in runs):
                break
            time.sleep(seconds)
    write_page(None)


def is_running(run, now=None):
    """Whether a run has not ended and still records rounds."""
    if run.is_complete or run.diverged:
        return False
    return _silence(run, now) < max(SILENCE, 10 * _longest_round(run))


def may_go_on(run, now=None):
    """Whether a run that has stopped may be resumed soon: it has a checkpoint, and stopped less than `RESTART` ago."""
    has_ended = run.is_complete or run.diverged
    with contextlib.suppress(UserError):  # a folder that cannot be read: nobody knows
        return not has_ended and find_checkpoints(run.path) and _silence(run, now) < RESTART
    return False


def _silence(run, now):
    """Seconds since the run recorded a round."""
    try:
        changed = (run.path / RECORDS).stat().st_mtime
    except OSError:  # removed since it was read
        return math.inf
    return (time.time() if now is None else now) - changed


def _longest_round(run):
    """Seconds of the longest round so far."""
    times = [record["seconds"] for record in run.records if "seconds" in record]
    return max((later - earlier for earlier, later in zip([0, *times], times)), default=0)


def _text(runs, complaints):
    """The view as text; it contains everything that can change, so that equal texts mean that nothing did."""
    metrics = dict.fromkeys(name for run in runs for name in run.metrics if name != "loss")
    header = ["run", "round", "left", "loss", "", *metrics]
    rows = [
        [short(run.path.name), _rounds(run), _left(run), *_loss(run), *(_last(run, name) for name in metrics)]
        for run in runs
    ]
    return "\n".join(([Table(header, rows).text()] if rows else []) + [f"  {line}" for line in complaints])


def _rounds(run):
    total = run.num_rounds()
    return f"{run.records[-1]['round']:g}" + (f"/{total}" if total else "")


def _left(run):
    """How a run ended, or how long its remaining rounds will take if they are as fast as those before."""
    if run.is_complete:
        return "complete"
    if run.diverged:
        return "diverged"
    if not is_running(run):
        return "stopped"
    total, last = run.num_rounds(), run.records[-1]
    if not total or not last.get("seconds"):
        return "running"
    return format_seconds(last["seconds"] / last["round"] * (total - last["round"]))


def _loss(run):
    """(last loss of the local steps, all losses so far as a row of bars)."""
    losses = [record["loss"] for record in run.records if "loss" in record]
    if not losses:
        return "–", ""
    thinned = [loss for loss in losses[:: -(-len(losses) // 20)] if math.isfinite(loss)]
    low, high = min(thinned, default=0), max(thinned, default=0)
    bars = "".join(BARS[round((value - low) / ((high - low) or 1) * (len(BARS) - 1))] for value in thinned)
    return f"{losses[-1]:.4f}", bars


def _last(run, metric):
    value = run.final(metric)
    return "–" if value is None else f"{value:.4f}"


@contextlib.contextmanager
def _view():
    """The function that shows a text, on a terminal in place of the one before and cut to the terminal's size."""
    if sys.stdout.isatty():
        with Live(auto_refresh=False, vertical_overflow="ellipsis", redirect_stdout=False) as live:
            yield lambda text: live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)
    else:
        yield lambda text: print(text, end="\n\n", flush=True)
