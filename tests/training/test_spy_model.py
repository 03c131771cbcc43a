"""Fast paths and trial passes may not touch the user's objects: one spy model through all doors that train."""

import pytest
from helpers import PROGRAMS, start


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_part_trains_as_the_user_set_it_and_nothing_of_his_objects_changes(ranks, tmp_path):
    ended = start(ranks, PROGRAMS / "spy.py", tmp_path, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("no findings") == ranks, ended.stdout
