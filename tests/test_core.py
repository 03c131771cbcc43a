"""The page for newcomers is true: its files and examples are short, and so is the way from a round to a gradient."""

import json
import re

from helpers import ROOT, start

PAGE = (ROOT / "docs" / "core.md").read_text(encoding="utf-8")
MOST_LINES = 1650  # what can be read in an hour
LONGEST_EXAMPLE = 40


def test_the_files_of_the_hour_are_few_lines():
    files = re.findall(r"^\| \d+ \| `(fedmpi/[\w/]+\.py)` \|", PAGE, re.MULTILINE)
    lines = {file: (ROOT / file).read_text(encoding="utf-8").count("\n") for file in files}
    print(sum(lines.values()), lines)
    assert len(files) == 12 and sum(lines.values()) <= MOST_LINES


def test_every_file_that_the_page_names_is_there():
    named = set(re.findall(r"`(fedmpi/[\w/]+\.py|tests/[\w/]+\.py|fedmpi/[\w/]+/)`", PAGE))
    assert named and not [name for name in named if not (ROOT / name).exists()]


def test_examples_are_short():
    examples = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert examples and max(example.count("\n") for example in examples) <= LONGEST_EXAMPLE


def test_the_way_from_a_round_to_its_work_is_short(tmp_path):
    """Calls of ours around each, from `run_round` on; a fast path once had a dozen."""
    ended = start(2, "-m", "frames", "--rounds", 1, "--transport", "allreduce", "--out", tmp_path)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(next(line for line in ended.stdout.splitlines() if line.startswith("{")))
    print(found)
    assert len(found["local_step"]) == 2
    assert len(found["gradient"]) == 5
    assert len(found["Allreduce"]) == 7
