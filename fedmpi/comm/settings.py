"""Settings of the ranks: their machines, and what happens when something goes wrong on them."""

import dataclasses

from fedmpi.ground.errors import UserError
from fedmpi.ground.settings import MANY, Section, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class MachineSettings(Section):
    """What computes, with which numbers, and how ranks communicate."""

    device: str = setting(
        "auto",
        "auto (one GPU per rank if there are any, otherwise the CPU), cpu, cuda or cuda:NUMBER",
        role="speed",
        per_rank=True,
    )
    threads: int | None = setting(
        None,
        "CPU threads per rank; default: OMP_NUM_THREADS, SLURM_CPUS_PER_TASK, or its share of the node's free cores",
        least=1,
        most=1024,
        role="speed",
        per_rank=True,
    )
    dtype: str = setting(
        "float32", "number type of parameters, gradients and all other vectors", among=("float32", "float64")
    )
    tf32: bool = setting(
        False, "GPUs may round float32 to 10 bits of mantissa in matrix products and convolutions, which is faster"
    )
    deterministic: bool = setting(
        False,
        "use only operations of torch that give the same bits in every run on the same GPU, and end the run at others; "
        "on a CPU all are",
        role="speed",
    )
    ranks: int | None = setting(
        None,
        "expected number of ranks; the run does not start with another number",
        least=1,
        role="place",
        each_start=True,
    )
    transport: str = setting(
        "auto",
        "how vectors are summed over the ranks: allreduce (by MPI), shared (in the node's shared memory), auto (the "
        "fastest that works); for GPUs, and not tested on one: nccl, cuda_aware (by an MPI that reads GPU memory), "
        "staged (through host memory in overlapping chunks)",
        among=("auto", "allreduce", "shared", "staged", "nccl", "cuda_aware"),
        role="speed",
    )
    timeout: float = setting(
        1800.0,
        "seconds that ranks wait for a rank that does not answer; then they print its number and end the job",
        above=0,
        most=MANY,
        role="speed",
    )
    may_differ: str | None = setting(
        None,
        "code: the user's code (model, loss, metrics, algorithm, ...) need not be the same on all ranks, which is "
        "otherwise an error",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.may_differ not in (None, "code"):
            raise UserError(f"may_differ = {self.may_differ}: expected code, or null")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FaultSettings(Section):
    """What happens when a loss is not finite, a rank dies, or a memory is damaged."""

    faulty: str = setting(
        "end",
        "what happens when a client's loss, or a row that it sends, is not finite: the run ends, or makes this round's "
        "averages without the client (leave_out)",
        among=("end", "leave_out"),
    )
    on_loss: str = setting(
        "end",
        "what happens when a rank dies: the job ends, or continues without its clients (needs Open MPI and mpirun "
        "--with-ft ulfm)",
        among=("end", "continue"),
        role="speed",
    )
    check_replicas: int | None = setting(
        None,
        "every so many rounds, and before every checkpoint, check that the state that all ranks share is equal on all "
        "of them, and stop if it is not; default: never",
        least=1,
        role="speed",
    )
