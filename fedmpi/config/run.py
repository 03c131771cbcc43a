"""What can be set of a run, and the role of every setting; needs neither torch nor MPI."""

import dataclasses
import functools

from fedmpi import settings
from fedmpi.settings import check, setting

# The groups of settings beside the run's own, each a choice of one class -> the role of its settings.
GROUPS = {
    "algorithm": "learning",
    "task": "problem",
    "oracle": "learning",
    "model": "problem",
    "partition": "problem",
}


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything but the choice of algorithm, task, oracle, model and partition."""

    rounds: int = setting(100, "communication rounds", least=1)
    epochs: float | None = setting(None, "passes over the clients' data, instead of --rounds", above=0)
    local_steps: int = setting(10, "q, local steps between two averages", least=1)
    local_epochs: float | None = setting(None, "local passes over a client's data per round, instead of q", above=0)
    batch_size: int = setting(50, "b, samples in a minibatch", least=1)
    first_batch_size: int | None = setting(None, "B, samples in the initial minibatch; default: b", least=1)
    clients: int | None = setting(None, "N, number of clients; default: one per rank", least=1, most=1_000_000)
    participation: float = setting(1.0, "share of the clients that take part in a round", above=0, most=1)
    weighting: str = setting("uniform", "clients' weights in every average", among=("uniform", "samples"))
    clip_norm: float | None = setting(None, "scale every gradient down to at most this norm", above=0)
    weight_decay: float = setting(0.0, "this times the parameters is added to every gradient", least=0)
    result: str = setting(
        "last",
        "which iterate is the result: the last, the best at an evaluation (on held-out data if there are any, "
        "else on the test set), or that of a round drawn uniformly before training",
        among=("last", "best", "uniform"),
        renamed_from=("output",),
    )
    private: str | None = setting(
        None,
        "layers that stay with their client (personal layers): names of parameters, buffers or modules with * and ?, "
        "like head.*,norm?; bn: all batch-norm layers",
    )
    freeze: str | None = setting(None, "layers that are not trained: names as in --private")
    holdout: float = setting(
        0.0, "share of every client's training data that is held out: evaluated, not trained on", least=0, below=1
    )
    seed: int = setting(0, "seed of every random stream", least=0, role="seed")
    eval_every: int | None = setting(
        None,
        "rounds between evaluations; default: about 10 evaluations in a run, 20 if they are on all data",
        least=1,
        role="speed",
    )
    evaluate: str = setting(
        "subset",
        "on what a run is evaluated: a random subset, drawn once (its end on all test data, and on all training data "
        "if the gradients passed over them 5 times), or always on all data",
        among=("subset", "full"),
        role="speed",
    )
    evaluate_samples: int = setting(
        2000, "size of that subset, of the training data of all clients and of the test data", least=1, role="speed"
    )
    stop: str | None = setting(None, "end the run at an evaluation with such a metric, like accuracy>=0.9")
    patience: int | None = setting(
        None,
        "end the run after so many evaluations without a better one, on held-out data if there are any",
        least=1,
    )
    data_dir: str | None = setting(None, "folder of data files; default: the variable FEDMPI_DATA", role="place")
    out: str = setting("runs", "folder of the run folders", role="place")
    name: str | None = setting(None, "name of the run folder; default: algorithm, data and a number", role="place")
    track: str | None = setting(
        None,
        "also record in tensorboard, wandb (offline unless WANDB_MODE is set) or mlflow; several with commas",
        role="place",
    )
    resume: str | None = setting(
        None,
        "go on from the last checkpoint in this run folder, with its settings; auto: in the folder of --out and "
        "--name, which begins anew if there is none",
        role="place",
    )
    init: str | None = setting(
        None, "begin from this trained model: model.pt, model.safetensors, model.h5, a run folder or a checkpoint's"
    )
    checkpoint_every: int | None = setting(None, "rounds between checkpoints", least=1, role="place")
    checkpoint_minutes: float = setting(10.0, "minutes between checkpoints; 0: none by time", least=0, role="place")
    checkpoint_keep: int = setting(2, "how many checkpoints are kept, the newest ones", least=1, role="place")
    checkpoint_clients: str | None = setting(
        None,
        "folder of the clients' own state, which may contain {client} and {rank}; default: in the run folder",
        role="place",
    )
    dtype: str = setting("float32", "number type of every row", among=("float32", "float64"))
    device: str = setting("auto", "auto (a GPU per rank if there are any), cpu, cuda or cuda:NUMBER", role="speed")
    threads: int | None = setting(
        None, "CPU threads per rank; default: cores of the node / its ranks", least=1, most=1024, role="speed"
    )
    ranks: int | None = setting(
        None, "number of ranks that must have been started; another number is an error", least=1, role="place"
    )
    transport: str = setting(
        "auto",
        "how ranks sum: allreduce (MPI's own), shared (the node's shared memory), staged (a GPU's rows through host "
        "memory in overlapping chunks; not tested on a GPU), auto (shared where it is faster, else allreduce)",
        among=("auto", "allreduce", "shared", "staged"),
        role="speed",
    )
    reduction: str = setting(
        "plain",
        "plain, or reproducible: sums whose bits do not depend on the number of ranks, which of them has which "
        "client, the nodes, the transport and the MPI",
        among=("plain", "reproducible"),
        role="speed",
    )
    timeout: float = setting(
        1800.0,
        "seconds that ranks wait for another one before they name it and end the job",
        above=0,
        role="speed",
    )
    on_loss: str = setting(
        "end",
        "when a rank dies: end, or continue without its clients (needs Open MPI and mpirun --with-ft ulfm)",
        among=("end", "continue"),
        role="speed",
    )
    check_replicas: int | None = setting(
        None,
        "compare what must be equal on all ranks every so many rounds, and stop if it is not; default: never",
        least=1,
        role="speed",
    )
    channels_last: bool = setting(True, "store convolution weights in channels-last order", role="speed")
    direct_gradients: bool = setting(
        True, "let large linear layers compute the gradient of their weights in its row, without a copy", role="speed"
    )
    fused_update: bool = setting(
        False,
        "compile FAFED's update into one pass: for large models with short steps; needs a C++ compiler",
        role="speed",
    )
    tune_malloc: bool = setting(True, "let malloc keep freed memory, which saves page faults", role="speed")

    def __post_init__(self):
        check(self)


@functools.cache
def roles():
    """Name -> role of every setting of a run and of every group (see `fedmpi.settings.ROLES`)."""
    return {**settings.roles(Run), **GROUPS}


def role(key):
    """The role of a setting: "threads" has "speed", "task.data" has its group's; an unknown one has "learning"."""
    return roles().get(key.partition(".")[0], "learning")
