"""What every algorithm and task learns is what it learned when tests/golden was written.

A change that is meant to alter it writes the file anew, with ``pytest tests/test_golden.py --write-golden``;
its diff is reviewed.
"""

import json

import pytest
from helpers import ROOT, start

GOLDEN = ROOT / "tests" / "golden" / "final_rows.json"
HOW = "python -m pytest tests/test_golden.py --write-golden"
TOLERANCE = 1e-9  # of a row's norm; the numbers have 15 digits


def learned(path):
    """Run name -> row or metric of the last round -> its three numbers, from a file that final_rows.py wrote."""
    found = {}
    for run, rows in json.loads(path.read_text(encoding="utf-8")).items():
        last = max((int(name.rpartition("/")[2]) for name in rows if name.startswith("metrics/")), default=0)
        found[run] = {}
        for name, (*numbers, _) in rows.items():
            kind, *words = name.split("/")
            if kind == "metrics" and (words[0] in ("round", "iteration", "format") or words[1] != str(last)):
                continue
            found[run][name] = [float(f"{number:.15g}") for number in numbers]
    return found


def as_text(found):
    """JSON with one row a line."""
    runs = []
    for run, rows in found.items():
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(numbers)}" for name, numbers in rows.items())
        runs.append(f" {json.dumps(run)}: {{\n{lines}\n }}")
    return "{\n" + ",\n".join(runs) + "\n}\n"


def differences(found, expected):
    """A line for every row that is new, gone or different."""
    for run in {**expected, **found}:
        ours, golden = found.get(run, {}), expected.get(run, {})
        for name in {**golden, **ours}:
            if name not in ours or name not in golden:
                yield f"{run}: {name}: {'not in the golden file' if name in ours else 'is gone'}"
                continue
            largest = max(abs(x - y) for x, y in zip(ours[name], golden[name]))
            if not largest <= TOLERANCE * golden[name][0] + 1e-14:
                yield f"{run}: {name}: {ours[name]} instead of {golden[name]}"


@pytest.mark.rarely("fedmpi", "tests/golden")
def test_what_is_learned_is_what_was_learned(tmp_path, request):
    writes = request.config.getoption("--write-golden")
    if not writes and not GOLDEN.is_file():
        pytest.fail(f"{GOLDEN}: is not there; write it: {HOW}", pytrace=False)
    done = start(2, "-m", "final_rows", tmp_path / "rows.json", "float64")
    assert done.returncode == 0, done.stderr
    found = learned(tmp_path / "rows.json")
    if writes:
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(as_text(found), encoding="utf-8")
        pytest.skip(f"{GOLDEN} is written; look at its diff")
    lines = list(differences(found, json.loads(GOLDEN.read_text(encoding="utf-8"))))
    if lines:
        shown = "\n".join(lines[:20])
        pytest.fail(f"{len(lines)} rows differ:\n{shown}\nIf that is meant: {HOW}", pytrace=False)
