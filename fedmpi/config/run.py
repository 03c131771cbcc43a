"""What can be set of a run, and the role of every setting; needs neither torch nor MPI."""

import dataclasses
import functools
import math
import re

from fedmpi.ground import settings
from fedmpi.ground.errors import UserError
from fedmpi.ground.settings import check, setting

MANY = 1_000_000_000  # passes over data, seconds, minutes: some of torch's and the system's functions take no more
# The groups of settings beside the run's own, each a choice of one class -> the role of its settings.
GROUPS = {
    "algorithm": "learning",
    "task": "problem",
    "oracle": "learning",
    "model": "problem",
    "partition": "problem",
    "aggregation": "learning",
    "codec": "learning",
    "stages": "learning",
}


BASELINES = ("local", "pooled", "tuned")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Everything but the choice of algorithm, task, oracle, model and partition."""

    rounds: int = setting(100, "communication rounds", least=1)
    epochs: float | None = setting(None, "passes over the clients' data, instead of --rounds", above=0, most=MANY)
    local_steps: int = setting(10, "q, local steps between two averages", least=1)
    local_epochs: float | None = setting(
        None, "local passes over a client's data per round, instead of q", above=0, most=MANY
    )
    batch_size: int = setting(50, "b, samples in a minibatch", least=1)
    last_batch: str = setting(
        "keep",
        "the samples that are left at the end of a pass are a smaller minibatch (keep; a single "
        "one joins the minibatch before it if the model has batch norm), join the one before (merge), or wait (drop)",
        among=("keep", "merge", "drop"),
    )
    first_batch_size: int | None = setting(
        None,
        "B, samples in the minibatch of a gradient before the first step, if the algorithm uses one; default: b",
        least=1,
    )
    clients: int | None = setting(None, "N, number of clients (silos); default: one per rank", least=1, most=1_000_000)
    participation: float = setting(1.0, "share of the clients that take part in a round", above=0, most=1)
    weighting: str = setting(
        "uniform",
        "weight of a client in every average: the same for all (uniform), or its number of training samples (samples)",
        among=("uniform", "samples"),
    )
    clip_norm: float | None = setting(None, "largest norm of a gradient; a larger one is scaled down to it", above=0)
    weight_decay: float = setting(0.0, "λ: add λ times the parameters to every gradient", least=0)
    result: str = setting(
        "last",
        "which averaged model is the result: that of the last round, the best of all evaluations (on held-out data if "
        "there are any, otherwise on the test set), or that of a round drawn uniformly at random before training",
        among=("last", "best", "uniform"),
    )
    private: str | None = setting(
        None,
        "layers that each client keeps for itself (personal layers): names of parameters, buffers or modules, with * "
        "and ? as wildcards, separated by commas, like head.*,norm?; bn means all batch-norm layers",
    )
    baselines: str | None = setting(
        None,
        "also train what the run is compared with, and print a table: local (each silo alone), pooled (as if all data "
        "lay in one place), tuned (the result, which each silo trains further alone); separated by commas",
        role="place",
    )
    baselines_step_sizes: tuple[float, ...] | None = setting(
        None,
        "step sizes that --baselines tries, for the run itself, too, and chooses from by the loss on held-out data "
        "(--holdout); default: the run's, times 1/3, 1 and 3; written --baselines.step_sizes [0.1,0.3]",
        role="place",
    )
    cross_site: bool = setting(
        False,
        "also test each silo's own model (--private, --baselines) on the data of every silo: all silos then see each "
        "other's models",
        role="place",
    )
    freeze: str | None = setting(None, "layers that are not trained; written as in --private")
    holdout: float = setting(
        0.0, "share of every client's training data that is held out: used for evaluation only", least=0, below=1
    )
    seed: int = setting(0, "seed of all random numbers", least=0, role="seed")
    eval_every: int | None = setting(
        None,
        "rounds between evaluations; default: about 10 evaluations per run, or 20 if they use all data",
        least=1,
        role="speed",
    )
    evaluate: str = setting(
        "subset",
        "data of the evaluations: subset, random samples that are drawn once per run (at the end of the run all test "
        "data, and all training data if the run's gradients covered them at least 5 times), or full, always all data",
        among=("subset", "full"),
        role="speed",
    )
    evaluate_samples: int = setting(
        1000,
        "size of that subset: so many training samples of all clients together, and as many test samples",
        least=1,
        role="speed",
    )
    stop: str | None = setting(
        None, "end the run at the first evaluation that meets this condition, like accuracy>=0.9"
    )
    patience: int | None = setting(
        None,
        "end the run after this many evaluations in a row without a new best (on held-out data if there are any)",
        least=1,
    )
    data_dir: str | None = setting(
        None, "folder of data files; default: the environment variable FEDMPI_DATA", role="place", per_rank=True
    )
    out: str = setting("runs", "folder in which rank 0 creates the run folder", role="place", per_rank=True)
    name: str | None = setting(None, "name of the run folder; default: algorithm, data and a number", role="place")
    track: str | None = setting(
        None,
        "also record the run in tensorboard, wandb (offline unless WANDB_MODE is set) or mlflow; separate several by "
        "commas",
        role="place",
    )
    resume: str | None = setting(
        None,
        "continue the run in this run folder from its last checkpoint, with its settings; auto: the folder that --out "
        "and --name give, or a new run if that has no checkpoint",
        role="place",
    )
    init: str | None = setting(
        None,
        "start from this trained model: model.safetensors or model.h5, a run or checkpoint, or a file of torch.save",
    )
    init_except: str | None = setting(
        None,
        "layers that --init does not read, and that start as in a new model (another head on a trained body): patterns "
        "as for --private, like head.*",
    )
    init_strict: bool = setting(
        True,
        "whether the model of --init must be of the same parts with the same settings; false: names and shapes of its "
        "tensors suffice",
    )
    checkpoint_every: int | None = setting(
        None, "rounds between checkpoints; default: only by time, see --checkpoint_minutes", least=1, role="place"
    )
    checkpoint_minutes: float = setting(
        10.0, "minutes between checkpoints; 0 switches these off", least=0, most=MANY, role="place"
    )
    checkpoint_keep: int = setting(2, "how many checkpoints are kept; older ones are removed", least=1, role="place")
    checkpoint_clients: str | None = setting(
        None,
        "folder for the state that only a client has; its path may contain {client} and {rank}; default: in the run "
        "folder",
        role="place",
    )
    dtype: str = setting(
        "float32", "number type of parameters, gradients and all other vectors", among=("float32", "float64")
    )
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
    ranks: int | None = setting(
        None, "expected number of ranks; the run does not start with another number", least=1, role="place"
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
    may_differ: str | None = setting(
        None,
        "code: the user's code (model, loss, metrics, algorithm, ...) need not be the same on all ranks, which is "
        "otherwise an error",
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

    def __post_init__(self):
        check(self)
        if self.name is not None and (self.name in ("", ".", "..") or "/" in self.name):
            raise UserError(f"name = {self.name}: expected the name of a folder, not a path; --out says where it is")
        if self.may_differ not in (None, "code"):
            raise UserError(f"may_differ = {self.may_differ}: expected code, or null")
        if self.stop is not None:
            read_condition(self.stop)
        if self.init_except is not None and self.init is None:
            raise UserError(
                f"init_except = {self.init_except}: there is no model to read the other layers from (--init)"
            )
        self._check_baselines()
        folder = self.checkpoint_clients or ""
        if {*"{}"} & {*folder.replace("{client}", "").replace("{rank}", "")}:
            raise UserError(
                f"checkpoint_clients = {folder}: expected a path with {{client}}, {{rank}} and nothing else in braces"
            )

    def _check_baselines(self):
        names = self.baselines and self.baselines.replace(" ", "").split(",")
        given = f"baselines = {self.baselines}: expected"
        if names and (not {*names} <= {*BASELINES} or len({*names}) < len(names)):
            raise UserError(f"{given} some of {', '.join(BASELINES)}, separated by commas")
        if names and "tuned" in names and self.private is not None:
            raise UserError(f"{given} no tuned with --private: each client has a model of its own already")
        if names and (self.on_loss == "continue" or self.result == "uniform"):
            raise UserError(f"{given} --on_loss end and --result last or best")
        sizes = self.baselines_step_sizes
        if sizes and (min(sizes) <= 0 or not (names and self.holdout)):
            raise UserError("baselines_step_sizes: expected numbers > 0, --baselines, and --holdout to choose by")
        if self.cross_site and not names and self.private is None:
            raise UserError("cross_site: expected --baselines or --private: all clients have the same model")


def read_condition(text):
    """(metric, comparison, bound) of a text like "accuracy>=0.9".

    Raises:
        UserError: one line, if it is not a condition.
    """
    match = re.fullmatch(r"\s*(\w+)\s*(>=|<=|>|<)\s*([-+.\w]+)\s*", text)
    try:
        if not math.isnan(bound := float(match[3])):
            return match[1], match[2], bound
    except (TypeError, ValueError):
        pass
    raise UserError(f"stop = {text}: expected a metric, >= or <=, and a number, like accuracy>=0.9")


@functools.cache
def roles():
    """Name -> role of every setting of a run and of every group (see `fedmpi.ground.settings.ROLES`)."""
    return {**settings.roles(RunSettings), **GROUPS}


def role(key):
    """The role of a setting: "threads" has "speed", "task.data" has its group's; an unknown one has "learning"."""
    return roles().get(key.partition(".")[0], "learning")
