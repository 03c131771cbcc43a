"""The benchmark's part about loops of the user's own."""

import json
import re

import pytest
from helpers import start


@pytest.mark.rarely("fedmpi/cli/bench", "fedmpi/own_loop")
def test_the_part_measures_both_against_a_loop_by_hand(tmp_path):
    out = tmp_path / "times.json"
    ended = start(2, "-m", "fedmpi", "bench", "own_loop", "--quick", "--seconds", 0.1, "--json", out)
    assert ended.returncode == 0, ended.stderr
    results = json.dumps(json.loads(out.read_text()))
    for workload in ("cnn", "mlp"):
        for name in ("average", "join"):
            assert f"own_loop/{workload}/{name} to by hand" in results
        of_loop = r" +[\d.]+ \([\d.]+-[\d.]+\)"  # the median and its range
        assert re.search(rf"^ *{workload}{3 * of_loop} +1\.03$", ended.stdout, re.MULTILINE), ended.stdout
