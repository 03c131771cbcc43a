"""Which device a rank gets, and which transports suit its memory, from stated facts: no GPU is needed."""

import os
import pathlib
import re

import pytest
import torch

import fedmpi
import fedmpi.comm.sums.transports
from fedmpi.comm.sums.transports.base import Facts, Transport, choose
from fedmpi.comm.sums.transports.staged import HostCopies, sum_in_chunks
from fedmpi.ground.errors import UserError
from fedmpi.ground.machine.devices import (
    device_key,
    device_name,
    local_number,
    physical_device,
    ranks_that_share,
    set_arithmetic,
)
from fedmpi.ground.registry import known

CLASSES = list(known(fedmpi.comm.sums.transports, Transport).values())


@pytest.mark.parametrize(
    ("device", "local", "gpus", "name"),
    [
        ("auto", 0, 0, "cpu"), ("cpu", 3, 4, "cpu"),
        ("auto", 0, 4, "cuda:0"), ("auto", 3, 4, "cuda:3"), ("cuda", 2, 4, "cuda:2"),
        ("auto", 5, 4, "cuda:1"), ("auto", 7, 1, "cuda:0"),  # more ranks than GPUs, or one GPU given to each rank
        ("cuda:1", 0, 4, "cuda:1"),
    ],
)  # fmt: skip
def test_a_rank_gets_the_gpu_of_its_number_on_the_node(device, local, gpus, name):
    assert device_name(device, local, gpus) == name


@pytest.mark.parametrize(("device", "gpus"), [("cuda", 0), ("cuda:4", 4), ("cuda:0", 0), ("tpu", 2), ("meta", 2)])
def test_devices_that_are_not_there(device, gpus):
    with pytest.raises(UserError, match=f"device = {device}: "):
        device_name(device, 0, gpus)


def test_the_message_says_what_hides_the_gpus():
    with pytest.raises(UserError, match=r"0 GPUs \(CUDA_VISIBLE_DEVICES is ''\); use --device cpu"):
        device_name("cuda", 0, 0, environment={"CUDA_VISIBLE_DEVICES": "", "ZE_AFFINITY_MASK": "0"})
    with pytest.raises(UserError, match=r"1 GPUs \(HIP_VISIBLE_DEVICES is '3'\); use"):
        device_name("cuda:1", 0, 1, environment={"HIP_VISIBLE_DEVICES": "3"})
    with pytest.raises(UserError, match="sees 1 GPUs; use"):
        device_name("cuda:1", 0, 1, environment={})


def test_gpus_of_other_makers_are_used_if_the_user_names_them():
    assert device_name("auto", 1, 4, "xpu") == "cpu"
    assert device_name("xpu", 5, 4, "xpu") == "xpu:1"
    assert device_name("xpu:2", 0, 4, "xpu") == "xpu:2"
    with pytest.raises(UserError, match=r"sees 4 devices of type xpu \(ZE_AFFINITY_MASK is '0'\); use"):
        device_name("cuda", 0, 4, "xpu", {"ZE_AFFINITY_MASK": "0", "CUDA_VISIBLE_DEVICES": ""})
    with pytest.raises(UserError, match="device = xpu: this rank sees 2 GPUs; use"):
        device_name("xpu", 0, 2, environment={})


def test_torch_cuda_is_asked_only_for_what_other_gpus_do_not_have():
    package = pathlib.Path(fedmpi.__file__).parent
    files = {path for path in package.rglob("*.py") if re.search(r"torch\.cuda\.", path.read_text())}
    names = {str(path.relative_to(package)) for path in files if "bench" not in path.parts}
    assert names == {"comm/sums/transports/staged.py", "oracles/captured.py"}  # pinning of memory in use; CUDA graphs


@pytest.mark.parametrize(
    ("environment", "local_rank", "num_ranks", "number"),
    [
        ({}, 2, 4, 2),
        ({"SLURM_LOCALID": "3", "SLURM_STEP_NUM_TASKS": "8"}, 3, 8, 3),  # srun started the ranks
        ({"SLURM_LOCALID": "3", "SLURM_STEP_NUM_TASKS": "8"}, 1, 4, 3),  # of which half are in this link
        ({"SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2"}, 1, 8, 1),  # srun started Open MPI's daemons
        ({"SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2"}, 1, 2, 1),
        ({"SLURM_LOCALID": "0"}, 1, 2, 1),  # mpirun in a job script: no step
        ({"SLURM_LOCALID": "x", "SLURM_STEP_NUM_TASKS": "2"}, 1, 2, 1),
    ],
)
def test_the_number_on_the_node(environment, local_rank, num_ranks, number):
    assert local_number(environment, local_rank, num_ranks) == number


def test_ranks_that_share_a_gpu():
    assert ranks_that_share([5.0, 7.0, 5.0, -1.0, 5.0], 2) == [0, 2, 4]
    assert ranks_that_share([5.0, 7.0], 1) == [1]
    assert ranks_that_share([-1.0, -1.0], 0) == []
    assert device_key(torch.device("cpu")) == ""


@pytest.mark.parametrize(
    ("visible", "index", "uuid", "key"),
    [
        (None, 2, "", "2"), ("", 0, "", "0"), ("3,1", 1, "", "1"), ("3, 1", 0, "", "3"),
        ("GPU-8932f937-d72c", 0, "", "GPU-8932f937-d72c"),
        ("3,1", 1, "8932f937-d72c", "8932f937-d72c"),
        ("GPU-8932f937-d72c", 0, "8932f937-d72c", "8932f937-d72c"),  # another rank may know it by its number
        ("MIG-1a,MIG-2b", 1, "8932f937-d72c", "MIG-2b"),  # slices of one GPU are not shared
        ("MIG-GPU-8932f937/1/0", 0, "", "MIG-GPU-8932f937/1/0"),
    ],
)  # fmt: skip
def test_what_identifies_a_gpu(visible, index, uuid, key):
    assert physical_device(visible, index, uuid) == key


def test_tf32_and_determinism_are_off_unless_a_setting_asks():
    switches = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [switch.allow_tf32 for switch in switches]
    try:
        for wanted in (True, False):
            set_arithmetic(tf32=wanted, deterministic=False)
            assert [switch.allow_tf32 for switch in switches] == [wanted, wanted]
            assert not torch.are_deterministic_algorithms_enabled()
        set_arithmetic(tf32=False, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled() and "CUBLAS_WORKSPACE_CONFIG" in os.environ
    finally:
        torch.use_deterministic_algorithms(False)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
        for switch, value in zip(switches, before):
            switch.allow_tf32 = value


@pytest.mark.parametrize(
    ("facts", "named", "names"),
    [
        (Facts(1 << 20, "cpu", 4, 1), "auto", ["shared", "allreduce"]),
        (Facts(1 << 10, "cpu", 4, 1), "auto", ["allreduce"]),  # small
        (Facts(1 << 20, "cpu", 1, 2), "auto", ["allreduce"]),  # a rank alone on its node
        (Facts(1 << 20, "cuda", 4, 1), "auto", ["nccl", "staged", "allreduce"]),
        (Facts(1 << 20, "cuda", 4, 1, gpus_are_shared=True), "auto", ["staged", "allreduce"]),
        (Facts(1 << 20, "cuda", 1, 4), "auto", ["nccl", "cuda_aware", "staged", "allreduce"]),
        (Facts(1 << 20, "cuda", 4, 2, gpus_are_shared=True), "auto", ["cuda_aware", "staged", "allreduce"]),
        (Facts(1 << 10, "cuda", 4, 1), "auto", ["allreduce"]),
        (Facts(1 << 20, "xpu", 4, 1), "auto", ["staged", "allreduce"]),
        (Facts(1 << 20, "", 4, 2), "auto", ["allreduce"]),  # some ranks have no GPU
        *((Facts(1 << 20, "cuda", 4, 1), name, [name]) for name in ("staged", "nccl", "cuda_aware")),
        (Facts(1 << 10, "cpu", 1, 2), "shared", ["shared"]),
        (Facts(1, "cpu", 1, 1), "pigeon", []),
    ],
)  # fmt: skip
def test_transports_are_chosen_from_facts(facts, named, names):
    assert [cls.name for cls in choose(facts, CLASSES, named)] == names


class Recorded(HostCopies):
    """A device boundary whose copies happen only when they are awaited, as late as they may."""

    def __init__(self):
        self.events, self._pending = [], []

    def copy(self, target, source):
        self._pending.append((target, source))
        return len(self._pending) - 1

    def wait(self, copy):
        target, source = self._pending[copy]
        if target is not None:
            target.copy_(source)
            self._pending[copy] = (None, None)


class Doubling:
    """Stands for two ranks that hold the same: a sum that is made only when it is awaited."""

    def start_allreduce(self, block):
        return block

    def wait(self, block):
        block.mul_(2)


@pytest.mark.parametrize("num_buffers", [3, 4])
@pytest.mark.parametrize("numel", [0, 1, 7, 8, 9, 64, 67])
def test_no_step_relies_on_one_that_was_not_awaited(numel, num_buffers):
    block = torch.arange(numel, dtype=torch.float64)
    buffers = [torch.full((8,), torch.nan, dtype=torch.float64) for _ in range(num_buffers)]
    chunks = block.split(8) if numel else ()
    sum_in_chunks(Doubling(), chunks, buffers, Recorded())
    assert torch.equal(block, 2 * torch.arange(numel, dtype=torch.float64))
