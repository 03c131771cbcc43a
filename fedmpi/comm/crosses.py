"""What crosses: the kinds of messages, by which a link says what goes from one silo to the others."""

import dataclasses
import types
from collections.abc import Callable, Iterable, Mapping

OWN = "own"  # the kind of a message whose sender names none: code of the user


@dataclasses.dataclass(frozen=True)
class Kind:
    """What one kind of messages carries, for a reader who knows no federated learning.

    Attributes:
        carries: what goes from a silo to the others. only_if: which settings or events make it cross.
        when: at which moment, and how often. to: who gets it. kept: where rank 0 keeps it in the run folder, or "".
    """

    carries: str
    when: str
    only_if: str = "(every run)"
    to: str = "all ranks"
    kept: str = ""


_KINDS = {
    # Averages.
    "rows": Kind(
        "the model as the rank's clients have changed it, times their weights and added up: of a rank with one client,"
        " that client's model. With many methods also further vectors of the model's length (momentum), and the "
        "running means and variances that a model keeps of its inputs, and with some a few numbers (a norm, how many "
        "steps were made). In the place of layers that are --private, "
        "their initial values or zeros are sent. With --codec, fewer numbers stand for all of them",
        only_if="--aggregation mean, the default",
        when="in every round, once for each average that the algorithm makes",
        to="all ranks get the total; on the way to it, other ranks receive what one rank sends, and ranks of one "
        "machine can read it in the memory that they share",
        kept="model.safetensors, model.h5, checkpoints/ (averages)",
    ),
    "whole numbers": Kind(
        "the sum of the clients' training losses and over how many, and how many gradients they have computed, as "
        "whole numbers of 64 bits, whose sums are exact; with several clients on a rank, also the rows, added up",
        only_if="--aggregation reproducible or --codec fixed",
        when="as rows",
        to="as rows",
        kept="as rows; metrics.jsonl (the mean loss)",
    ),
    "exponents": Kind(
        "for each vector and number that a rank is about to send, the power of two, in steps of 2^8, below which all "
        "of its clients' values times their weights lie; the number of a client whose loss or model is not finite, and "
        "that loss",
        only_if="--aggregation reproducible or masked, --codec fixed; with masked, also of the metrics",
        when="before every average, and at every evaluation",
    ),
    "masked words": Kind(
        "as rows and whole numbers, plus random numbers that vanish in the sum over all ranks: what one rank sends has "
        "no meaning alone; also the sums of the clients' losses and metrics at an evaluation",
        only_if="--aggregation masked",
        when="as rows, and at every evaluation",
        to="all ranks get the sum; what one rank sends, others and whoever listens may see",
        kept="as rows; metrics.jsonl",
    ),
    "public keys": Kind(
        "of each rank, the public part of a key that lives as long as the process, random bytes, and with known_keys a "
        "signature of them",
        only_if="--aggregation masked",
        when="before training, once",
    ),
    "opened masks": Kind(
        "the key of the mask that a rank has added for itself, after all ranks have the sum with it",
        only_if="--aggregation masked with --on_loss continue",
        when="after every average and evaluation",
    ),
    "slices": Kind(
        "as rows, but of each single client, cut into as many slices as there are ranks",
        only_if="--aggregation median, trimmed_mean or centred_clipping, one of your own that calls reduce_slices, "
        "--codec half, or --aggregation reproducible or --codec fixed where no rank has several clients",
        when="as rows",
        to="each rank gets one slice of every client, and all ranks the result; ranks of one machine can read all",
        kept="as rows",
    ),
    "norms": Kind(
        "by how much each client has changed the model in the round: one number",
        only_if="--aggregation centred_clipping",
        when="as rows",
    ),
    "buffers": Kind(
        "what a model keeps of its inputs (running means, variances, counts) with more digits than the other numbers, "
        "added up over the rank's clients; for fedmpi.average, by how much each rank's differ from those of rank 0",
        only_if='the model has such buffers, or fedmpi.average(buffers="average")',
        when="as rows; for fedmpi.average once, before training",
        to="as rows",
        kept="as rows",
    ),
    # The data, before training.
    "sample counts": Kind(
        "each client's number of training samples (of a text: words), and its minibatches in one pass over them",
        when="before training, and at the end",
        kept="clients.json",
    ),
    "class counts": Kind(
        "of each rank: how many training samples of each class its clients have",
        only_if="tasks of classes: classification, auc, Datasets with labels",
        when="before training, once or twice",
    ),
    "labels": Kind(
        "which labels occur in each silo's training and test samples, not how often",
        only_if="tasks of classes, with a file or Dataset for each silo",
        when="before training, once",
    ),
    "file facts": Kind(
        "of each client's data: type and shape of a sample, number of classes, of tables also "
        "the mean and deviation of each column",
        only_if="tasks of classes: classification, auc, Datasets with labels",
        when="before training, once",
        kept="model.json",
    ),
    "scales": Kind(
        "each silo's number of samples, and mean and deviation of each channel of its images or column of its table",
        only_if="a file for each silo; segmentation",
        when="before training, once",
        kept="model.json (of all together)",
    ),
    "names": Kind(
        "the name that each silo's file gives itself",
        only_if="tasks of classes, with a file for each silo",
        when="before training, once",
        kept="clients.json",
    ),
    "blind words": Kind(
        "for every distinct word of a silo's texts, and for the names of classes and features in its file, 32 bytes "
        "that nobody can turn back into the word or compare with a dictionary (a point of a curve times secret numbers "
        "of all ranks), and how many clients of the rank have it; from these a rank learns which of its own words at "
        "least --least silos have",
        only_if="a file for each silo: --task language without --task.vocabulary, classes and features with names",
        when="before training, once",
    ),
    "words": Kind(
        "the words of the training texts that at least --least silos have (by default 2); of one text that all ranks "
        "have, and with --least 1, every word, in the order in which they first occur",
        only_if="--task language without --task.vocabulary; fedmpi data statistics (categories and classes that enough "
        "silos have)",
        when="before training, once",
        kept="model.json",
    ),
    "hidden sums": Kind(
        "numbers that have no meaning alone: those of each rank plus random ones that vanish in the sum over all "
        "ranks; the sums are numbers of rows, sums, squares and how many rows lie below some values, of all silos "
        "together; for intervals, how many cases one method has right and another one not, and metrics of cases "
        "that are drawn anew. With two ranks, each can subtract its own",
        only_if="fedmpi data statistics, --baselines",
        when="when it runs; when baselines are compared",
        kept="(printed; with --columns in that file)",
    ),
    "texts": Kind(
        "pieces of a text that all ranks have, each word as a number",
        only_if="--task language, with one file for all",
        when="before training, once",
        to="the rank whose client has that piece",
    ),
    "samples": Kind(
        "training samples, of a file that all ranks have",
        only_if="one file for all, in which the samples of a client lie scattered",
        when="before training, once",
        to="the rank whose client has the sample",
    ),
    "recognised": Kind(
        "for each image of a file that all ranks have, whether the attacked classifier recognises it",
        only_if="--task attack",
        when="before training, once",
    ),
    "file digests": Kind(
        "a salted fingerprint (SHA-256) of each data file, by which who has a copy of the file can recognise it",
        when="before a file that all ranks have is opened, and before round 1",
        kept="data.json",
    ),
    # What is measured.
    "losses": Kind(
        "of each rank: the sum of its clients' training losses and over how many, how many gradients they have "
        "computed, the number of a client whose loss or model is not finite",
        only_if="any aggregation but reproducible and masked",
        when="before every average",
        kept="metrics.jsonl (their mean)",
    ),
    "evaluation": Kind(
        "each client's loss and metrics on its training, held-out and test samples, one number each, and over how many "
        "samples; of a test set that all ranks have, sums over each rank's part of it",
        when="at every evaluation",
        kept="metrics.jsonl",
    ),
    "test counts": Kind(
        "how many test samples of each class each client has",
        only_if="clients have test samples of their own, with classes, or models of their own (--private, --baselines)",
        when="at every evaluation",
        kept="metrics.jsonl",
    ),
    "outputs": Kind(
        "the label of every single test sample (and held-out sample, of auc), and what the model answers to it; of a "
        "task of your own without test data, those of every training sample",
        only_if="--scores samples with a metric that needs scores (auc and the like), metrics of your own that take "
        "samples",
        when="at every evaluation, and of a few samples before round 1",
        kept="metrics.jsonl (the metrics), roc.csv (a curve)",
    ),
    "metric sums": Kind(
        "counts and sums from which metrics are computed: how often each answer was given to each class, how many "
        "samples' scores lie in each of 1,000 bins, a silo's number of samples, mean, squares and largest error; no "
        "sample's answer",
        only_if="--task.metrics, metrics of a task of your own, --task auc, segmentation: --scores bins, and all "
        "metrics that need no scores",
        when="at every evaluation, and of a few samples before round 1",
        kept="metrics.jsonl (the metrics)",
    ),
    "silo models": Kind(
        "the whole model of each silo",
        only_if="--cross_site",
        when="after training, once",
    ),
    # Programs of the user's own.
    "weights": Kind(
        "the weight of each rank, which may be its number of samples",
        only_if="fedmpi.join, fedmpi.average; not with the aggregation Masked(hidden_weights=True)",
        when="when the loop begins, once",
    ),
    "your numbers": Kind(
        "the numbers that your program gives to fed.any, fed.batches (a length) and, but with masked sums, to fed.mean "
        "or Recording(evaluate=...). The callback for Trainer gives metrics, and of each step the labels per sample",
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
    # The run itself.
    "run": Kind(
        "what rank 0 reads or decides for all: the run folder's name; of a run that goes on, its settings, which "
        "checkpoints it has, and the records of its rounds with the metrics of each client",
        when="before training and after it, once each",
    ),
    "model": Kind(
        "the model as rank 0 has it: its initial values, or an average that differs from that of another rank",
        only_if="a Python program gives a model as an object, a loop of your own begins, or averages differ at the end",
        when="before training, once",
    ),
    "checkpoints": Kind(
        "size and checksum of the file with each client's state (within a round: with each rank's), which stays where "
        "its rank wrote it; of a run that goes on, the state that all ranks have in common, as rank 0 reads it",
        only_if="a checkpoint is written, or the run goes on from one",
        when="with every checkpoint",
        kept="checkpoints/",
    ),
    "left out": Kind(
        "numbers of the clients whose loss or model is not finite",
        only_if="--faulty leave_out",
        when="in rounds with such clients",
        kept="metrics.jsonl",
    ),
    "average digests": Kind(
        "32 or 48 bits by which ranks compare an average that all of them have",
        when="at the end; with --check_replicas, after so many rounds; if an aggregation is no plain mean, after every "
        "average",
    ),
    "settings": Kind(
        "settings, versions of the software, and short fingerprints of the model's layers, initial values and the "
        "user's code, by which who has the same can recognise it; where ranks differ, names of functions, classes and "
        "layers in the code, and what the first difference is: a setting, a number in the code, a tensor of at most 4 "
        "numbers; of words in the code only a fingerprint; of the names of what a loop measures, a fingerprint",
        when="before training, once; of a loop of your own also at its evaluations and its end",
    ),
    "errors": Kind(
        "of an error in a silo's data: which line, row or sample it is in, not what stands there; only the silo itself "
        "prints that. Of an error in settings: the line that is printed, unless it says what code of yours has raised",
        only_if="a rank meets an error, or a loss is not finite",
        when="once, as the run ends",
        kept="diverged.txt",
    ),
    "machines": Kind(
        "of each rank: name of its machine, cores, devices, memory, versions of the software, clock, and whether it "
        "can read its data",
        only_if="fedmpi doctor",
        when="once",
        kept="(printed)",
    ),
    "machinery": Kind(
        "signs that keep the ranks in step: yes or no, how many numbers follow, how many local steps were made, "
        "numbers of ranks, clients, cores, devices and processes, names of machines; nothing of the data",
        when="at all times",
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
