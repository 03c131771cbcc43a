"""How much memory a rank may take: the smallest of what the machine has left and of its job's limits."""

import resource

import pytest
import torch

from fedmpi.ground.machine.memory import available_memory
from fedmpi.runs.checkpoints import writer

MIB = 1 << 20
PAGE = resource.getpagesize()
V1 = {"limit": "memory.limit_in_bytes", "used": "memory.usage_in_bytes", "cache": "total_inactive_file"}
V2 = {"limit": "memory.max", "used": "memory.current", "cache": "inactive_file"}


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A machine with 1000 MiB left; this process has 10 MiB of 20 MiB in memory, and no limit of its own."""
    for name in ("SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 9999999 kB\nMemAvailable: {1000 << 10} kB\n")
    (tmp_path / "proc/self/statm").write_text(f"{20 * MIB // PAGE} {10 * MIB // PAGE} 1 1 0 1 0\n")
    return tmp_path


def write_group(folder, names, limit, used, cache):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names["limit"]).write_text(f"{limit}\n")
    (folder / names["used"]).write_text(f"{used * MIB}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{names['cache']} {cache * MIB}\n")


def test_without_limits_the_ranks_share_what_is_available(root):
    assert available_memory(1, root) == 1000 * MIB and available_memory(4, root) == 250 * MIB


def test_a_system_that_says_nothing(tmp_path, root):
    assert available_memory(1, tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("names", "line", "mount", "top"),
    [
        (V1, "5:memory:/slurm/job_1/step_0", "/memory rw - cgroup cgroup rw,memory", "memory/slurm/job_1"),
        (V2, "0::/slurm/job_1/step_0", " rw - cgroup2 cgroup2 rw", "slurm/job_1"),
    ],
    ids=["version 1", "version 2"],
)
def test_the_limit_of_a_group_counts_also_of_one_around_it(root, names, line, mount, top):
    (root / "proc/self/mountinfo").write_text(f"1 2 0:3 / /sys/fs/cgroup{mount}\n")
    (root / "proc/self/cgroup").write_text(f"7:cpu:/elsewhere\n{line}\n")
    group = root / "sys/fs/cgroup" / top
    write_group(group / "step_0", names, "max" if names is V2 else 2**63 - 4096, 1, 0)
    write_group(group, names, 600 * MIB, 250, 50)  # of which 50 MiB are a cache that is given up
    assert available_memory(1, root) == 400 * MIB and available_memory(2, root) == 200 * MIB
    write_group(group, names, 600 * MIB, 700, 0)
    assert available_memory(1, root) == 0


def test_what_slurm_gave_the_job(root, monkeypatch):
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "0")  # all of the machine's
    assert available_memory(2, root) == 500 * MIB
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "300")
    assert available_memory(2, root) == (150 - 10) * MIB
    monkeypatch.delenv("SLURM_MEM_PER_NODE")
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "50")
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "4")
    assert available_memory(2, root) == (100 - 10) * MIB


def test_the_limit_of_a_process_is_its_own(root, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (120 * MIB, resource.RLIM_INFINITY))
    assert available_memory(2, root) == available_memory(4, root) == 100 * MIB


def test_a_checkpoint_is_copied_only_within_the_limit(monkeypatch):
    """The machine has far more memory."""
    files = {"a": {"x": torch.zeros(8 * MIB), "rounds": 3}}
    used = int(open("/proc/self/statm").read().split()[0]) * PAGE  # noqa: SIM115
    limit = [used + 48 * MIB, resource.RLIM_INFINITY]
    monkeypatch.setattr(resource, "getrlimit", lambda which: tuple(limit))
    assert writer._copied(files, 1) is None
    limit[0] = resource.RLIM_INFINITY
    copies = writer._copied(files, 1)
    assert copies["a"]["rounds"] == 3 and torch.equal(copies["a"]["x"], files["a"]["x"])
    assert copies["a"]["x"].data_ptr() != files["a"]["x"].data_ptr()
