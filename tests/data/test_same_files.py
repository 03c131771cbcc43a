"""What stands behind a path: rows pass only between ranks that have the same file, and no others leave their rank."""

import re

import pytest
from helpers import PROGRAMS, start

import fedmpi.data.partitions
from fedmpi.data.partitions.base import Partition
from fedmpi.ground.errors import UserError
from fedmpi.ground.files import checksum
from fedmpi.ground.files.checksum import file_digest
from fedmpi.ground.registry import known

OTHER_FILE = r"nothing: task.data = \S+: is another file, with other content, on different ranks \(rank 0; rank 1.*\)"
OTHER_TESTS = r"nothing: the test data are others on different ranks \(rank 0; rank 1.*\): expected the same on all"
KEEPS = "nothing: trained"
CASES = {f"table, {name}": OTHER_FILE for name in [*known(fedmpi.data.partitions, Partition), "dealt"]}
CASES |= {name: OTHER_FILE for name in ("images", "auc", "segmentation", "text", "private", "a folder of each rank")}
CASES |= {"view": OTHER_FILE, "lacking": "nothing: on rank 1: task.data = lacking.h5: no file lacking.h5"}
CASES |= {"init": "nothing: init = base/model.safetensors: is another file"}
CASES |= {"attack": "nothing: task.classifier = base: is another file"}
CASES |= {name: OTHER_TESTS for name in ("Datasets, tensors", "Datasets, items", "targets", "task")}
CASES |= {"same table": "rows: trained", "noisy tests": KEEPS, "task, own tests": KEEPS}
KINDS = ("files", "private", "pooled", "auc", "images", "segmentation")
CASES |= {f"own {kind}, by pattern": KEEPS for kind in KINDS}
CASES |= {"own text, by pattern": KEEPS}  # no word is in two silos


@pytest.mark.rarely
@pytest.mark.parametrize(("ranks", "clients_per_rank"), [(2, 1), (3, 2)])
def test_files_that_differ_never_leave_their_rank(tmp_path, ranks, clients_per_rank):
    ended = start(ranks, PROGRAMS / "watches_data.py", tmp_path, clients_per_rank)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = dict(
        line.split(": ", 1) for line in ended.stdout.splitlines() if re.match(r"[\w, ]+: (nothing|rows|words)", line)
    )
    if clients_per_rank == 1:
        expected = CASES | {f"own {kind}": KEEPS for kind in KINDS} | {"own text": KEEPS}
        expected |= {f"own, {part}": KEEPS for part in ("at once", "first half", "second half")}
        assert "accuracy" in ended.stdout.split("\ndone\n")[1]  # of python -m fedmpi evaluate
    else:
        refused = r"nothing: task.own_files = true, task.data = \S+: each rank's file is that of its client, and 6 cl"
        expected = CASES | {f"own {kind}": refused for kind in [*KINDS, "text"]}
        expected["own text, by pattern"] = "words: trained"  # two clients of a rank have the same text
    assert lines.keys() == expected.keys()
    wrong = {name: line for name, line in lines.items() if not re.match(expected[name], line)}
    assert not wrong and "done" in ended.stdout


def test_a_digest_is_computed_again_after_every_change(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(checksum, "SETTLED_SECONDS", 0)
    path, computed = tmp_path / "data.h5", []
    plain = checksum.checksum
    monkeypatch.setattr(checksum, "checksum", lambda *given: computed.append(1) or plain(*given))
    path.write_bytes(b"one")
    first, status = file_digest(path), path.stat()
    assert file_digest(path) == first and len(computed) == 1
    checksum._known.clear()
    assert file_digest(path) == first and len(computed) == 1
    assert (tmp_path / "cache" / "fedmpi" / "checksums.json").stat().st_mode & 0o777 == 0o600
    with open(path, "r+b") as file:
        file.write(b"two")
    checksum.os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # as if it had not changed
    assert path.stat().st_mtime_ns == status.st_mtime_ns and file_digest(path) != first


def test_what_never_ends_is_not_read(tmp_path):
    checksum.os.mkfifo(tmp_path / "pipe.h5")
    for path in (tmp_path / "pipe.h5", "/dev/zero", tmp_path):
        with pytest.raises(UserError, match="is a folder, a FIFO or a device: expected a file"):
            file_digest(path)
    with pytest.raises(UserError, match="cannot be read: No such file"):
        file_digest(tmp_path / "missing.h5")
