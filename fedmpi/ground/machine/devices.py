"""The device of a rank: which GPU it is bound to, which ranks share one, and the cores near it, on which it then runs.

The code for GPUs has run with one GPU in a node only. Its decisions are plain functions, which tests call with
made-up facts. GPUs of makers other than NVIDIA and AMD ("xpu" and others, see `torch.accelerator`) are used if the
user names them.
"""

import contextlib
import functools
import hashlib
import os
import pathlib
import platform
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from fedmpi.ground.errors import UserError
from fedmpi.ground.machine.cores import run_on, usable_cores
from fedmpi.ground.text import Log

log = Log(__name__)

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
VISIBLE = {  # type of device -> the variables that limit which ones a process sees
    "cuda": ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    "xpu": ("ZE_AFFINITY_MASK",),
}


def pick_device(device: str, link: Any) -> torch.device:
    """The torch device of this rank by the setting, see `device_name`; it becomes its current one. Not collective.

    Raises:
        UserError: if there is no such device.
    """
    kind, num_gpus = accelerator()
    number = local_number(os.environ, link.local_rank, link.size)
    chosen = torch.device(device_name(device, number, num_gpus, kind))
    if chosen.type != "cpu":
        torch.get_device_module(chosen).set_device(chosen)
    return chosen


def accelerator() -> tuple[str, int]:
    """(type, number) of the GPUs that this process sees, like ("cuda", 4); ("cuda", 0) if there are none."""
    if not torch.accelerator.is_available():
        return "cuda", 0
    return torch.accelerator.current_accelerator().type, torch.accelerator.device_count()


def set_arithmetic(tf32: bool, deterministic: bool) -> None:
    """Say how GPUs compute in this process; see the settings of a run. Not collective."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    if deterministic:
        torch.use_deterministic_algorithms(True)
        os.environ.setdefault(WORKSPACE, ":4096:8")  # read when the first matrix product is computed


@contextlib.contextmanager
def arithmetic_kept() -> Iterator[None]:
    """A context at whose end matrix products and convolutions are as precise as they were."""
    backends, before = torch.backends, []
    with contextlib.suppress(RuntimeError):  # the program has used torch's newer names, which follow
        before.append((torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()))
    with contextlib.suppress(RuntimeError):
        before.append((functools.partial(setattr, backends.cudnn, "allow_tf32"), backends.cudnn.allow_tf32))
    for part in (backends.cuda.matmul, backends.mkldnn.matmul, backends.cudnn.conv, backends.cudnn.rnn):
        if hasattr(part, "fp32_precision"):  # torch < 2.9 has none
            before.append((functools.partial(setattr, part, "fp32_precision"), part.fp32_precision))
    try:
        yield
    finally:
        for put, value in before:
            put(value)


def memory_of(device: torch.device) -> tuple[int, int] | None:
    """(free bytes, all bytes) of a GPU; None if torch does not say."""
    ask = getattr(torch.get_device_module(device), "mem_get_info", None)
    return ask(device) if ask else None


def fits(nbytes: float, memory: tuple[int, int] | None, num_ranks: int) -> bool:
    """Whether a client's data may lie in a GPU that ranks may share: half of `memory_of` is for models' training."""
    if memory is None:
        return True
    left, total = memory
    return num_ranks * nbytes <= left - total / 2


def device_name(
    device: str, local_number: int, num_gpus: int, kind: str = "cuda", environment: Mapping[str, str] = os.environ
) -> str:
    """The name of a rank's device: "cpu" or "TYPE:NUMBER".

    Args:
        device: "auto" takes the GPU `local_number` mod `num_gpus` if there is one of type "cuda", else the CPU;
            "cuda" (or another type) insists on a GPU; "cpu" and "cuda:1" are taken literally.
        local_number: of the rank among those of its node. num_gpus: that this process sees. kind: their type.
        environment: variable -> text, for the message.

    Raises:
        UserError: if there is no such device.
    """
    if device == "auto":
        device = "cuda" if num_gpus and kind == "cuda" else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise UserError(f"device = {device}: expected auto, cpu, cuda or cuda:NUMBER") from None
    if chosen.type == "cpu":
        return "cpu"
    if chosen.type != kind or num_gpus == 0 or (chosen.index or 0) >= num_gpus:
        variable = _visible(environment, kind)
        limited = f" ({variable} is '{environment[variable]}')" if variable else ""
        them = f"{num_gpus} GPUs" if kind == "cuda" else f"{num_gpus} devices of type {kind}"
        raise UserError(f"device = {device}: this rank sees {them}{limited}; use --device cpu or auto")
    return f"{kind}:{local_number % num_gpus if chosen.index is None else chosen.index}"


def _visible(environment: Mapping[str, str], kind: str) -> str | None:
    """The variable that limits which devices of a type a process sees; None if none of them is set."""
    return next((name for name in VISIBLE.get(kind, ()) if name in environment), None)


def local_number(environment: Mapping[str, str], local_rank: int, num_ranks: int) -> int:
    """The number of this process among those of its node, from which its GPU follows.

    SLURM's SLURM_LOCALID counts all processes of the step, also those that are not in this link. It is used only if
    srun started the ranks themselves: if it started daemons (Open MPI's mpirun), all ranks of a node have the same.

    Args:
        environment: variable -> text. local_rank: among the link's ranks on this node. num_ranks: of the link.
    """
    try:
        local_id, num_tasks = int(environment["SLURM_LOCALID"]), int(environment["SLURM_STEP_NUM_TASKS"])
    except (KeyError, ValueError):
        return local_rank
    return local_id if num_tasks >= num_ranks and local_id >= local_rank else local_rank


def device_key(device: torch.device) -> str:
    """What identifies the physical GPU (or MIG slice) behind a torch device on its node; "" for the CPU."""
    if device.type == "cpu":
        return ""
    uuid = str(getattr(torch.get_device_module(device).get_device_properties(device), "uuid", ""))
    variable = _visible(os.environ, device.type)
    return physical_device(os.environ[variable] if variable else None, device.index, uuid)


def physical_device(visible: str | None, index: int, uuid: str = "") -> str:
    """What identifies the GPU or MIG slice that a process sees as number `index`; the same in all processes of a node.

    Args:
        visible: CUDA_VISIBLE_DEVICES or the like: numbers, UUIDs ("GPU-8932f937-...") or slices ("MIG-..."), or None.
        uuid: of the GPU, as torch reports it, or "".
    """
    names = [name.strip() for name in (visible or "").split(",") if name.strip()]
    name = names[index] if index < len(names) else str(index)
    return name if name.startswith("MIG-") or not uuid else uuid  # slices of one GPU may have its UUID


def device_number(device: torch.device) -> float:
    """A float that no other GPU (or MIG slice) of the job has; -1 for the CPU."""
    key = device_key(device)
    return number_on_node(key) if key else -1.0


def number_on_node(text: str) -> float:
    """A float, at least 0, that stands for a text on this node; other texts and nodes have other numbers."""
    digest = hashlib.blake2b(f"{platform.node()}/{text}".encode(), digest_size=6).digest()
    return float(int.from_bytes(digest, "little"))  # 48 bits, which a float64 holds exactly


def warn_if_shared(link: Any, device: torch.device) -> None:
    """Print a line for each GPU that several ranks share, on the first of them. Collective on the link."""
    sharing = ranks_that_share(link.allgather([device_number(device)], "machinery")[:, 0], link.rank)
    if len(sharing) > 1 and sharing[0] == link.rank:
        ranks = ", ".join(map(str, sharing))
        log.warning(
            f"{len(sharing)} ranks share {device} on {platform.node()} (ranks {ranks}), and take turns there: "
            "start one rank per GPU, and use --clients N for more clients"
        )


def ranks_that_share(numbers: Any, rank: int) -> list[int]:
    """The ranks with the number of `rank`'s device, in order; [] for a rank on the CPU, whose number is -1."""
    numbers = np.asarray(numbers)
    return [] if numbers[rank] < 0 else np.flatnonzero(numbers == numbers[rank]).tolist()


def bind_to_near_cores(device: torch.device, link: Any) -> None:
    """Let this process run only on the cores near its GPU, if the ranks of the node have room there. Collective.

    Called after the number of torch's threads is set, and before they start and inherit it. What a launcher has bound
    more closely stays. A mistake here could make a run slower, and does not change its results.
    """
    near = near_cores(device)
    places = link.allgather([number_on_node(f"cores {near}") if near else -1.0], "machinery")[:, 0]
    num_sharing = int((places == places[link.rank]).sum())
    cores = cores_to_use(usable_cores(), near, num_sharing * torch.get_num_threads())
    if cores:
        run_on(cores)


def cores_to_use(usable: Collection[int], near: Collection[int], num_threads: int) -> list[int]:
    """The cores to which a rank is bound, ascending; [] to leave it where it is.

    `usable`: on which it may run. `near`: those near its GPU, [] if unknown. `num_threads`: of all ranks to run there.
    """
    both = sorted({*usable} & {*near})
    return both if num_threads <= len(both) < len(usable) else []


def near_cores(device: torch.device) -> list[int]:
    """Numbers of the cores near a GPU; [] for the CPU, or if the system does not say."""
    if device.type == "cpu":
        return []
    return cores_near(pci_address(torch.get_device_module(device).get_device_properties(device)))


def pci_address(properties: Any) -> str:
    """Where a GPU is on the PCI bus, like "0000:3b:00.0"; "" if torch does not say."""
    numbers: list[Any] = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    return "" if None in numbers else "{:04x}:{:02x}:{:02x}.0".format(*numbers)


def cores_near(address: str, devices: str = "/sys/bus/pci/devices") -> list[int]:
    """Numbers of the cores near the device at a PCI address; [] if the system does not say."""
    try:
        text = (pathlib.Path(devices) / address / "local_cpulist").read_text()
        ends = [[int(end) for end in part.split("-")] for part in text.strip().split(",") if part]
    except (OSError, ValueError):
        return []
    return [core for first, *last in ends for core in range(first, (last or [first])[0] + 1)]
