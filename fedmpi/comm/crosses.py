"""What crosses: the kinds of messages, by which a link says what goes from one silo to the others."""

import dataclasses
import types
from collections.abc import Callable, Iterable, Mapping

OWN = "own"  # the kind of a message whose sender names none: code of the user


@dataclasses.dataclass(frozen=True)
class Kind:
    """What one kind of messages carries, for a reader who knows no federated learning.

    Attributes:
        carries: what goes from a silo to the others. only_if: which settings or events make it cross; "": every run.
        when: at which moment, and how often. to: who gets it. kept: where rank 0 keeps it in the run folder, or "".
    """

    carries: str
    when: str
    only_if: str = ""
    to: str = "all ranks"
    kept: str = ""


_KINDS = {
    # In every run.
    "machinery": Kind(
        "signs that keep the ranks in step: yes or no, how many numbers follow, numbers of ranks, clients, cores, "
        "devices and processes, names of machines; nothing of the data",
        when="at all times",
    ),
    "settings": Kind(
        "settings, versions of the software, and digests of the model's layers, initial values and the user's code; "
        "where they differ, the texts that differ, and the values of a tensor of at most 4 numbers",
        when="before training, once; of a loop of your own also at its end",
    ),
    "run": Kind(
        "what rank 0 reads or decides for all: the run folder's name, its checkpoints, the records of its rounds with "
        "the metrics of each client",
        when="before training and after it, once each",
    ),
    "file digests": Kind(
        "a salted fingerprint (SHA-256) of each data file, by which who has a copy of the file can recognise it",
        when="before a file that all ranks share is opened, and before round 1",
        kept="data.json",
    ),
    "sample counts": Kind(
        "each client's number of training samples (of texts, words), and its minibatches in one pass over them",
        when="before training, and at the end",
        kept="clients.json",
    ),
    "losses": Kind(
        "of each rank: the sum of its clients' training losses and over how many, the number of gradients, the number "
        "of a client whose loss or row is not finite; of --aggregation reproducible, the loss of each client",
        when="before every average",
        kept="metrics.jsonl (their mean)",
    ),
    "average digests": Kind(
        "32 or 48 bits by which ranks compare an average that all of them have",
        when="at the end; with --check_replicas, after so many rounds; if an aggregation is no plain mean, after every "
        "average",
    ),
    "evaluation": Kind(
        "each client's loss and metrics on its training, held-out and test samples, as one number each, and over how "
        "many samples; of a test set that all share, sums over each rank's part of it",
        when="at every evaluation",
        kept="metrics.jsonl",
    ),
    "errors": Kind(
        "the line that says what is wrong, as it is printed; it may name a file, a column, a label or a value",
        only_if="a rank meets an error, or a loss is not finite",
        when="once, as the run ends",
        kept="diverged.txt",
    ),
    "checkpoints": Kind(
        "size and checksum of the file with each client's state, which stays where its rank wrote it; of a run that "
        "goes on, the state that all ranks share, as rank 0 reads it",
        only_if="a checkpoint is written, or the run goes on from one",
        when="with every checkpoint",
        kept="checkpoints/",
    ),
    # The averages.
    "rows": Kind(
        "the sum of the rows of each rank's clients, times their weights: the model's parameters, other vectors of the "
        "algorithm (momentum), and the model's running means and variances; of a rank with one client, this is that "
        "client's model. In the place of layers that are --private, their initial values or zeros are sent. With "
        "--codec, fewer numbers stand for them",
        only_if="--aggregation mean, the default",
        when="in every round, once for each exchange of the algorithm",
        to="all ranks get the total; on the way to it, other ranks receive what one rank sends, and the ranks of a "
        "node can read it in the memory that they share",
        kept="model.safetensors, model.h5, checkpoints/ (averages)",
    ),
    "partial sums": Kind(
        "as rows, in sums of a fixed order; of some clients, the rows of one alone",
        only_if="--aggregation reproducible",
        when="as rows",
        to="each rank gets an equal slice of all of them, and all ranks the total; on a node, all can be read",
        kept="as rows",
    ),
    "slices": Kind(
        "the rows of each single client, cut into as many slices as there are ranks",
        only_if="--aggregation median, trimmed_mean or centred_clipping, one of your own that calls reduce_slices, or "
        "--codec half",
        when="as rows",
        to="each rank gets one slice of every client, and all ranks the result; on a node, all can be read",
        kept="as rows",
    ),
    "norms": Kind(
        "how far each client's rows have moved in the round: one number",
        only_if="--aggregation centred_clipping",
        when="as rows",
    ),
    "buffers": Kind(
        "running means, variances and counts of the model that need more digits than the rows, summed over each rank's "
        "clients; with buffers=\"average\", by how much each rank's differ from rank 0's",
        only_if='the model has such buffers, or fedmpi.average(buffers="average")',
        when="as rows",
        to="as rows",
        kept="as rows",
    ),
    "left out": Kind(
        "numbers of the clients whose loss or rows are not finite",
        only_if="--faulty leave_out",
        when="in rounds with such clients",
        kept="metrics.jsonl",
    ),
    "model": Kind(
        "the model as rank 0 has it: its initial values, or an average that differs from that of another rank",
        only_if="a Python program gives a model as an object, a loop of your own begins, or averages differ at the end",
        when="before training, once",
    ),
    # The data, before training.
    "file facts": Kind(
        "of each client's data: type and shape of a sample, number and names of the classes, names of the features, of "
        "tables also the mean and deviation of each column",
        only_if="tasks of classes: classification, auc, Datasets with labels",
        when="before training, once",
        kept="model.json",
    ),
    "class counts": Kind(
        "of each rank: how many training samples of each class its clients have",
        only_if="tasks of classes: classification, auc, Datasets with labels",
        when="before training, once or twice",
    ),
    "labels": Kind(
        "which labels occur in each silo's training and test samples, not how often",
        only_if="tasks of classes, and one file or Dataset per silo",
        when="before training, once",
    ),
    "scales": Kind(
        "each silo's number of samples, and mean and deviation of each channel or column",
        only_if="one file per silo; segmentation",
        when="before training, once",
        kept="model.json (of all together)",
    ),
    "names": Kind(
        "the name that each silo's file gives itself",
        only_if="one file per silo; tasks of classes",
        when="before training, once",
        kept="clients.json",
    ),
    "words": Kind(
        "every distinct word of the rank's training texts, in the order in which they first occur",
        only_if="--task language",
        when="before training, once",
        kept="model.json",
    ),
    "texts": Kind(
        "pieces of a text that all ranks share, each word as a number",
        only_if="--task language, and one file for all",
        when="before training, once",
        to="the rank whose client has that part of the text",
    ),
    "samples": Kind(
        "training samples of a file that all ranks share",
        only_if="one file for all whose clients' samples lie scattered in it",
        when="before training, once",
        to="the rank whose client has the sample",
    ),
    "recognised": Kind(
        "for each image of a file that all ranks share, whether the attacked classifier recognises it",
        only_if="--task attack",
        when="before training, once",
    ),
    # What evaluations and studies add.
    "test counts": Kind(
        "how many test samples of each class each client has",
        only_if="clients have test samples of classes of their own, or models of their own (--private, --baselines)",
        when="at every evaluation",
        kept="metrics.jsonl",
    ),
    "outputs": Kind(
        "the label of every test sample, and what the model answers to it; of a task of your own without test data, "
        "those of every training sample",
        only_if="--task.metrics, --task auc, segmentation, Datasets that are no classes, metrics of a task of your own",
        when="at every evaluation, and of a few samples before round 1",
        kept="metrics.jsonl (metrics alone), roc.csv (300 points)",
    ),
    "silo models": Kind(
        "the whole model of each silo",
        only_if="--cross_site",
        when="after training, once",
    ),
    # Loops and parts of the user's own.
    "weights": Kind(
        "the weight of each rank, which may be its number of samples",
        only_if="fedmpi.join, fedmpi.average",
        when="when the loop begins, once",
    ),
    "your numbers": Kind(
        "the numbers that your program gives to fed.mean, fed.any, fed.batches (a length) or Recording(evaluate=...)",
        only_if="fedmpi.join, fedmpi.average",
        when="at each call",
        kept="metrics.jsonl (those of evaluate)",
    ),
    OWN: Kind(
        "what an aggregation, a part or a task of your own sends through its link without naming one of these kinds",
        only_if="your code does",
        when="at each call",
        to="as your code says",
    ),
    "machines": Kind(
        "of each rank: name of its machine, cores, devices, memory, versions of the software, clock, and the error "
        "line of data that it cannot read",
        only_if="fedmpi doctor",
        when="once",
        kept="(printed)",
    ),
}
KINDS: Mapping[str, Kind] = types.MappingProxyType(_KINDS)


class Crossed(set[str]):
    """The kinds of messages that a rank has exchanged with others so far; what has no bytes is none.

    Attributes:
        tell: function without arguments, called when there is another kind.
    """

    tell: Callable[[], object] = staticmethod(lambda: None)

    def note(self, kind: str, nbytes: int) -> None:
        """Take note of a message.

        Raises:
            ValueError: if the kind is not one of `KINDS`.
        """
        if kind in self or not nbytes:
            return
        if kind not in KINDS:
            raise ValueError(f"message of kind {kind!r}: expected one of {', '.join(KINDS)}")
        self.add(kind)
        self.tell()


def as_rows(names: Iterable[str]) -> list[tuple[str, ...]]:
    """The table of some kinds, in the order of `KINDS`: its header, then a row of texts for each."""
    chosen = {*names}
    header = ("kind", "what leaves a silo", "only if", "when", "to", "kept by rank 0 in")
    found = ((name, kind) for name, kind in KINDS.items() if name in chosen)
    return [header, *((name, kind.carries, kind.only_if, kind.when, kind.to, kind.kept) for name, kind in found)]
