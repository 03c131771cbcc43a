"""What can be set of a run beside its choices."""

import dataclasses

from fedmpi.settings import check, setting


@dataclasses.dataclass(frozen=True)
class Run:
    """What is not a matter of algorithm, task, oracle, model or partition."""

    rounds: int = setting(100, "communication rounds", least=1)
    epochs: float | None = setting(None, "passes over the clients' data, instead of --rounds", above=0)
    local_steps: int = setting(10, "q, local steps between two averages", least=1)
    local_epochs: float | None = setting(None, "local passes over a client's data per round, instead of q", above=0)
    batch_size: int = setting(50, "b, samples in a minibatch", least=1)
    first_batch_size: int | None = setting(None, "B, samples in the initial batch; default: b", least=1)
    clients: int | None = setting(None, "N, number of clients; default: one per rank", least=1)
    participation: float = setting(1.0, "share of the clients that take part in a round", above=0, most=1)
    weighting: str = setting("uniform", "clients' weights in every average", among=("uniform", "samples"))
    clip_norm: float | None = setting(None, "cut every gradient to at most this norm", above=0)
    weight_decay: float = setting(0.0, "this times the parameters is added to every gradient", least=0)
    output: str = setting(
        "last",
        "which iterate is the result: the last, the best by test metric at an evaluation, "
        "or that of a round drawn uniformly beforehand",
        among=("last", "best", "uniform"),
    )
    holdout: float = setting(
        0.0, "share of every client's training data that is evaluated and not trained on", least=0, below=1
    )
    seed: int = setting(0, "of every random stream", least=0)
    eval_every: int | None = setting(None, "rounds between evaluations; default: about 20 in a run", least=1)
    data_dir: str | None = setting(None, "folder of data files; default: the variable FEDMPI_DATA")
    out: str = setting("runs", "folder of the run folders")
    name: str | None = setting(None, "name of the run folder; default: algorithm, data and a number")
    dtype: str = setting("float32", "of every row", among=("float32", "float64"))
    device: str = setting("auto", "auto (a GPU per rank if there are any), cpu, cuda or cuda:NUMBER")
    threads: int | None = setting(
        None, "CPU threads per rank; default: cores of the node / its ranks", least=1, most=1024
    )
    ranks: int | None = setting(None, "how many ranks were started; a different number is an error", least=1)
    transport: str = setting(
        "auto",
        "how ranks sum: allreduce (MPI's own), shared (the node's shared memory), auto (shared where it gains)",
        among=("auto", "allreduce", "shared"),
    )
    channels_last: bool = setting(True, "keep convolution weights in channels-last order")
    direct_gradients: bool = setting(
        True, "let large linear layers compute the gradient of their weights in its row, without a copy"
    )
    fused_update: bool = setting(
        False, "compile FAFED's update into one pass: for large models with short steps; needs a C++ compiler"
    )
    tune_malloc: bool = setting(True, "let malloc keep freed memory, which saves page faults")

    def __post_init__(self):
        check(self)
