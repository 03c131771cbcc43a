"""The quota of cores of a container or a SLURM job: control groups of both versions, wherever they are mounted."""

import math

import pytest

from fedmpi.ground.machine.cores import core_quota

V2 = "31 23 0:28 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"


@pytest.mark.parametrize(
    ("cgroup", "mounts", "files", "expected"),
    [
        ("0::/a/b", [V2], {"a/b/cpu.max": "max 100000", "a/cpu.max": "150000 100000", "cpu.max": "max 100000"}, 1.5),
        ("0::/", [V2], {"cpu.max": "20000 100000"}, 1),
        ("0::/", [V2], {"cpu.max": "max 100000"}, math.inf),
        ("4:cpu,cpuacct:/a\n3:pids:/", ["1 2 0:3 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"],
         {"cpu,cpuacct/a/cpu.cfs_quota_us": "200000", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"}, 2),
        ("4:cpuacct,cpu:/a", ["1 2 0:3 / /sys/fs/cgroup/my\\040cores rw - cgroup any rw,cpuacct,cpu"],
         {"my cores/a/cpu.cfs_quota_us": "200000", "my cores/a/cpu.cfs_period_us": "100000"}, 2),
        # A container of version 1 has its own group at the top of the mount, with the whole path in /proc.
        ("4:cpu:/docker/12/inner", ["1 2 0:3 /docker/12 /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu"],
         {"cpu/inner/cpu.cfs_quota_us": "300000", "cpu/inner/cpu.cfs_period_us": "100000",
          "cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ("4:cpu:/docker/12", ["1 2 0:3 /docker/12 /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu"],
         {"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000"}, 2.5),
        ("0::/../other", [V2.replace(" / ", " /docker/12 ")], {"cpu.max": "250000 100000"}, 2.5),  # another namespace
        ("1:name=systemd:/\n0::/a", ["1 2 0:3 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd",
                                     V2.replace("/cgroup ", "/cgroup/unified ")],
         {"unified/a/cpu.max": "150000 100000"}, 1.5),
        ("4:cpu:/a", ["1 2 0:3 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset"],
         {"cpuset/a/cpu.cfs_quota_us": "100000", "cpuset/a/cpu.cfs_period_us": "100000"}, math.inf),
        ("", [], {}, math.inf),
    ],
)  # fmt: skip
def test_the_quota_of_a_container_counts(tmp_path, cgroup, mounts, files, expected):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"{cgroup}\n")
    (tmp_path / "proc/self/mountinfo").write_text("".join(f"{line}\n" for line in mounts))
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    assert core_quota(tmp_path) == expected
