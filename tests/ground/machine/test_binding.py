"""On which cores a rank with a GPU runs, from stated facts: no GPU is needed."""

import os
import types

import pytest
import torch

import fedmpi
import fedmpi.ground.machine.devices
from fedmpi.ground.machine.cores import usable_cores
from fedmpi.ground.machine.devices import cores_near, cores_to_use, near_cores, pci_address


@pytest.mark.parametrize(
    ("usable", "near", "num_threads", "cores"),
    [
        (range(8), range(4), 4, [0, 1, 2, 3]),
        (range(8), [2, 1], 2, [1, 2]),
        (range(8), range(4), 5, []),  # threads of all ranks near them would not have a core each
        (range(8), [], 1, []),  # the system does not say, or the CPU computes
        (range(4), range(8), 1, []),  # the launcher has bound the rank more closely
        (range(4), range(4, 8), 1, []),  # and elsewhere; the doctor warns
        (range(2, 6), range(4), 2, [2, 3]),
    ],
)
def test_cores_to_use(usable, near, num_threads, cores):
    assert cores_to_use(usable, near, num_threads) == cores


@pytest.mark.skipif(len(usable_cores()) < 2, reason="this process may use one core only")
def test_a_run_is_bound_to_the_cores_near_its_gpu_and_its_program_is_not(tmp_path, monkeypatch):
    before, seen = usable_cores(), []
    monkeypatch.setattr(fedmpi.ground.machine.devices, "near_cores", lambda device: before[:1])

    def see(result):
        seen.append((usable_cores(), torch.get_num_threads()))

    for threads in (1, 2):  # two threads need both cores
        fedmpi.train(task="quadratic", rounds=1, threads=threads, on_round=see, out=str(tmp_path))
    assert seen == [(before[:1], 1), (before, 2)]
    assert usable_cores() == before == sorted(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("text", "cores"), [("0-2,8\n", [0, 1, 2, 8]), ("5\n", [5]), ("\n", []), (None, []), ("a-b\n", [])]
)
def test_cores_near_a_device(tmp_path, text, cores):
    if text is not None:
        (tmp_path / "0000:3b:00.0").mkdir()
        (tmp_path / "0000:3b:00.0" / "local_cpulist").write_text(text)
    assert cores_near("0000:3b:00.0", tmp_path) == cores


def test_where_a_device_is_on_the_bus():
    known = types.SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    assert pci_address(known) == "0000:3b:00.0"
    assert pci_address(types.SimpleNamespace(name="of another maker")) == "" and cores_near("") == []


def test_the_cpu_is_near_to_all_cores():
    assert near_cores(torch.device("cpu")) == []
