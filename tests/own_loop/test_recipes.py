"""Each recipe of docs/recipes.md is a complete program, and does what the page says."""

import importlib.util
import re

import pytest
import torch
from helpers import ROOT, start
from safetensors.torch import load_file

PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
PROGRAMS = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))
NEEDED = {"stateful.py": "torchdata", "lit.py": "lightning"}  # what the tests' own environment may lack


@pytest.fixture
def run(monkeypatch):
    return lambda *words, **options: _run(monkeypatch, *words, **options)


def _run(monkeypatch, name, folder, code=0, changed=lambda text: text):
    """Run a program of the page in a folder; returns what it printed.

    Args:
        code: the exit code that it should end with. changed: function that adds to its text what a test has to see.
    """
    if name in NEEDED and importlib.util.find_spec(NEEDED[name]) is None:
        pytest.skip(f"needs {NEEDED[name]}")
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(changed(PROGRAMS[name]), encoding="utf-8")
    monkeypatch.chdir(folder)
    ended = start(2, folder / name)
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended.stdout


def before(text, words, line):
    """A text with a line more before these words."""
    assert words in text
    return text.replace(words, f"{line}\n{words}")


def test_the_page_has_these_recipes_and_a_command_for_each():
    assert list(PROGRAMS) == ["early.py", "fragments.py", "stateful.py", "lit.py"]
    assert re.findall(r"^mpirun -np 2 python (\S+)$", PAGE, re.MULTILINE) == list(PROGRAMS)


def test_all_ranks_stop_in_the_same_step_at_the_best_model(run, tmp_path):
    ends = '    print(f"rank {fed.rank}: {step + 1} {best:.3f} {sum(map(torch.sum, best_state.values()))}", flush=True)'
    printed = run("early.py", tmp_path, changed=lambda text: before(text, "    if fed.rank == 0:", ends))
    steps, best = re.search(r"stopped after (\d+) steps; best accuracy ([\d.]+)", printed).groups()
    assert int(steps) % 10 == 0 and 50 < int(steps) < 2000 and float(best) > 0.7
    found = re.findall(r"rank \d: (\d+ [\d.]+ \S+)", printed)
    assert len(found) == 2 and len(set(found)) == 1


def test_fragments_are_averaged_in_turns(run, tmp_path):
    same = "    print(fragments[0].any(False), [p.sum().item() for p in model.parameters()], flush=True)"
    printed = run("fragments.py", tmp_path, changed=lambda text: before(text, "    if rank == 0:\n        torch", same))
    times = re.findall(r"step (\d+): fragment (\d)", printed)
    assert times == [(str(10 * n), str(n % 2)) for n in range(1, 11)]
    ends = [line for line in printed.splitlines() if line.startswith("False")]
    assert len(ends) == 2 and ends[0] == ends[1]
    assert set(torch.load(tmp_path / "fragments.pt")) == {"0.0.weight", "0.0.bias", "1.weight", "1.bias"}


def test_a_killed_program_with_a_stateful_loader_ends_with_the_same_bits(run, tmp_path):
    run("stateful.py", tmp_path / "unbroken")
    kill = "            fed.step(loss)\n            if fed.steps == 14: __import__('signal').raise_signal(15)"
    run("stateful.py", tmp_path / "killed", 75, lambda text: text.replace("            fed.step(loss)", kill))
    assert not (tmp_path / "killed/runs/stateful/model.safetensors").exists()
    run("stateful.py", tmp_path / "killed")
    first, second = (load_file(tmp_path / name / "runs/stateful/model.safetensors") for name in ("unbroken", "killed"))
    assert all(torch.equal(first[name], second[name]) for name in first) and first.keys() == second.keys()


def test_lightning_trains_one_model_on_all_ranks(run, tmp_path):
    same = "print('sum', sum(p.sum().item() for p in module.parameters()), trainer.global_step, flush=True)\n"
    printed = run("lit.py", tmp_path, changed=lambda text: text + same)
    ends = re.findall(r"^sum (\S+) 40$", printed, re.MULTILINE)
    assert len(ends) == 2 and ends[0] == ends[1]
