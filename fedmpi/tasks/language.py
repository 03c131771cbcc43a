"""Language modelling: the next word of a text, by truncated back-propagation through time."""

import copy
import dataclasses
import itertools
import math
import pathlib

import numpy as np
import torch
from torch.nn import functional

from fedmpi.comm.agreement import agree
from fedmpi.data.partitions.base import write_partition
from fedmpi.data.sampler import SequentialSampler
from fedmpi.data.source import find_file
from fedmpi.data.text import (
    Text,
    agree_on_dictionary,
    common_dictionary,
    deal,
    numbers_of,
    read_vocabulary,
    word_edges,
)
from fedmpi.ground.errors import UserError
from fedmpi.ground.files.hdf5 import files_of
from fedmpi.ground.files.limits import check_file
from fedmpi.ground.files.run_files import PARTITION
from fedmpi.ground.settings import setting
from fedmpi.ground.text import Log, format_count
from fedmpi.tasks.base import BaseTask, LoadedTask, Metrics, of_clients, sums_of_ranks
from fedmpi.tasks.files import common_files, has_own_files, own_file, own_files_setting

log = Log(__name__)

SPLITS = ("train", "test")
TEST_PARTS = 20  # columns of a test text; fixed, so that the result does not depend on the ranks


@dataclasses.dataclass(frozen=True)
class Language(BaseTask):
    """Learn to predict the next word of a text that is cut into one contiguous part per client.

    If there is one file per client, its training text is the client's part, and the model is tested on each
    client's own test text, too.

    A client's part is cut into --batch-size columns; a local step reads `bptt` words of each. The
    hidden state is carried from step to step without its gradient, and begins at zero with each pass.

    Source: the FAFED paper's experiment on WikiText-2 (b = 20, --clip-norm 0.25).
    """

    data: str = setting(
        "wikitext2",
        "text: the name of a file in --data-dir, a path ending in .h5, or one file per client like "
        "silo_{client}.h5; short form: --data",
    )
    bptt: int = setting(35, "steps of back-propagation through time", least=1)
    evaluation_words: int | None = setting(
        None,
        "number of words, from the beginning of each client's part and of the test text, to evaluate on; default: all",
        least=40,
    )

    vocabulary: str | None = setting(
        None,
        "file of the words that are known, the same on all ranks; default: the words of the text or, if each client "
        "has a text of its own, those that at least --least clients have",
    )

    own_files: bool = own_files_setting()

    has_partition = False
    can_hold_out = True

    def common_files(self, context):
        files = common_files(self, context)
        if self.vocabulary is not None:
            check_file(self.vocabulary, "task.vocabulary = ")
            files[f"task.vocabulary = {self.vocabulary}"] = [pathlib.Path(self.vocabulary)]
        return files

    def crosses(self, is_personal, scores="auto"):
        found = {"blind words"} if has_own_files(self) else set()
        found = found | {"words"} if self.vocabulary is None else set()
        return found | (set() if has_own_files(self) else {"texts"})

    def load(self, context, partition):
        if has_own_files(self):
            texts = [Text(own_file(self, context, client)) for client in context.clients]
            shares = ([text.words(split, 0, 1) for text in texts] for split in SPLITS)
        else:
            texts = [Text(find_file(self.data, context.data_dir))]
            shares = ([texts[0].words(split, context.rank, context.num_ranks)] for split in SPLITS)
        own_texts = texts if has_own_files(self) or context.rank == 0 else []
        return LoadedLanguage(self, context, *shares, [file for text in own_texts for file in files_of(text.path)])


@dataclasses.dataclass
class Piece:
    """A minibatch: `inputs` and `targets` [steps, columns], and the hidden state before them.

    Attributes:
        carried: the client's dict for the state after the piece.
        end: the position in each column after the piece. is_read: whether the piece was evaluated before.
    """

    carried: dict
    inputs: torch.Tensor
    targets: torch.Tensor
    state: object
    end: int
    is_read: bool = False


class LoadedLanguage(LoadedTask):
    """See `LoadedTask`. Metrics: train_loss, test_loss (both per word), perplexity; of held-out data the last two.

    With `RankContext.holdout`, the last words of each client's part are held out: holdout_loss, holdout_perplexity.

    A model is called as `module(inputs, state)` and returns (scores [steps, columns, words], state).
    """

    goal = ("perplexity", -1)
    default_model = "lstm"
    carries = True
    is_personal = True

    def __init__(self, settings, context, train, test, files):
        """`train` and `test`: lists of words, one per client of this rank, or one to be dealt.

        files: the data files that this rank accounts for.
        """
        self._files = files
        self._settings, self._context, self._words = settings, context, (train, test)
        self.has_own_tests = has_own_files(settings)
        self.shape = (settings.bptt,)
        self._num_words = None  # of the training text that is shared
        # How many words are evaluated: of each client's part, of the test text; None: all.
        self._most = (settings.evaluation_words, settings.evaluation_words)

    def synchronise(self, link):
        context = self._context
        (train, test), self._words = self._words, None
        dictionary = self._dictionary = self._agreed_dictionary(link, train)
        train, test = ([numbers_of(words, dictionary) for words in texts] for texts in (train, test))
        self.num_classes = len(dictionary)
        if self.has_own_tests:
            self._check_own(link, train, test)
            parts, self._test = (dict(zip(context.clients, map(self._to_device, texts))) for texts in (train, test))
        else:
            self._num_words = int(link.allgather([len(train[0])], "sample counts").sum())
            starts = link.allgather([context.clients.start, context.clients.stop], "machinery").astype(int)
            parts = self._deal(link, train[0], context.num_clients, [range(*edges) for edges in starts])
            edges = [TEST_PARTS * rank // link.size for rank in range(link.size + 1)]
            test_ranges = [range(*edges) for edges in (starts if context.is_personal else zip(edges, edges[1:]))]
            self._test = self._deal(link, test[0], self._num_tests, test_ranges)
        ends = {part: len(stream) - math.floor(context.holdout * len(stream)) for part, stream in parts.items()}
        self._train = {part: stream[: ends[part]] for part, stream in parts.items()}
        self._held = {part: stream[ends[part] :] for part, stream in parts.items()}
        num_held = sum(len(stream) > 1 for stream in self._held.values())
        if context.holdout and not link.allgather([num_held], "sample counts").sum():
            raise UserError(f"holdout = {context.holdout}: holds out no words: all clients have too few")

    def _agreed_dictionary(self, link, train):
        """word -> number, of the file `vocabulary`, or of the training texts. Collective on the link."""
        given, least = self._settings.vocabulary, self._context.least
        if given is not None:
            return agree(link, lambda: read_vocabulary(given))
        if not self.has_own_tests or least == 1:
            if self.has_own_tests and link.size > 1 and link.rank == 0:
                log.warning(
                    "least = 1: all ranks get the list of the words in all clients' texts, in the order in which they "
                    "first occur; model.json contains it"
                )
            return agree_on_dictionary(link, list(itertools.chain(*train)))
        number = self._context.num_clients
        if number == 1:
            return common_dictionary(link, train, 1)
        if least > number:
            raise UserError(
                f"least = {least}: no word can be in so many of {number} clients' texts: expected 1 to {number}"
            )
        dictionary = common_dictionary(link, train, least)
        if link.rank == 0:
            words = f"the {format_count(len(dictionary))} words that at least {least} clients have"
            log.warning(f"{self._settings.data}: {words} are known, others are <unk> (--least, --task.vocabulary)")
        return dictionary

    def _check_own(self, link, train, test):
        """Check the texts of clients that have texts of their own; a test text may be empty. Collective."""
        given = f"task.data = {self._settings.data}"
        lengths = link.allgatherv([len(text) for text in train], "sample counts")
        if lengths.min() < 2:
            client = int(lengths.argmin())
            raise UserError(f"{given}: client {client} has {int(lengths[client])} words: too few")
        if not link.allgather([sum(len(text) > 1 for text in test)], "sample counts").sum():
            raise UserError(f"{given}: no client has a test text of at least 2 words")

    def _to_device(self, stream):
        return torch.from_numpy(stream).to(self._context.device)

    def _deal(self, link, numbers, num_parts, ranges):
        """This rank's parts of the text, part -> [n] tensor on the device. Collective."""
        total = int(link.allgather([len(numbers)], "sample counts").sum())
        word_edges(total, num_parts, f"task.data = {self._settings.data}")  # or one line that says why not
        parts = deal(link, numbers, num_parts, ranges)
        return {part: self._to_device(stream) for part, stream in parts.items()}

    def data_files(self):
        return self._files

    def write_split(self, folder):
        if self._num_words is not None:
            edges = word_edges(self._num_words, self._context.num_clients)
            parts = list(zip(edges, edges[1:]))
            write_partition(folder / PARTITION, parts, self._settings.data, unit="words")

    def describe_inputs(self):
        return {"words": [word.decode("utf-8", "replace") for word in self._dictionary]}

    def sampler(self, client, batch_size, first_batch_size, seed, device):
        return SequentialSampler(self.num_samples(client), batch_size, first_batch_size, self._settings.bptt, device)

    def num_samples(self, client):
        return len(self._train[client])

    def batch(self, client, indices, carried=None):
        """The piece at the word positions `indices` [steps, columns] of the client's part.

        `carried`: what its last sample left: the "position" after it in the columns, and the hidden "state".
        """
        carried = {} if carried is None else carried
        indices = torch.atleast_2d(indices)
        stream, begin = self._train[client], int(indices[0, 0])
        state = carried.get("state") if carried.get("position") == begin > 0 else None
        inputs, targets = stream[indices].long(), stream[indices + 1].long()
        return Piece(carried, inputs, targets, state, begin + len(indices))

    def loss(self, module, batch):
        scores, state = module(batch.inputs, batch.state)
        # Only the first evaluation of a piece carries the state on, not a second one at another vector.
        if not batch.is_read and len(batch.inputs) <= self._settings.bptt:
            batch.carried.update(position=batch.end, state=_detached(state))
        batch.is_read = True
        return functional.cross_entropy(scores.flatten(0, 1), batch.targets.flatten())

    def evaluate(self, module, link):
        most, most_test = self._most
        most_test = most_test and max(2, most_test // self._num_tests)
        train, held = (self._sums(module, streams, most) for streams in (self._train, self._held))
        test = self._sums(module, self._test, most_test)
        parts = {"train": (train, self._train)}
        parts |= {"test": (test, self._test)} if self.has_own_tests or self._context.is_personal else {}
        parts |= {"holdout": (held, self._held)} if self._context.holdout else {}
        metrics, clients = {}, {}
        for kind, (sums, streams) in parts.items():
            # Training weighs a client by its words, tests by those that are predicted, also where few are evaluated.
            count = len if kind == "train" else self._num_predicted
            numbers = [count(stream) for stream in streams.values()]
            means, each = of_clients(link, {f"{kind}_loss": _per_word(sums)}, numbers, self._context.weighting)
            metrics, clients = metrics | means, clients | each
        if not self.has_own_tests:
            loss, number = sums_of_ranks(link, test.sum(0))
            metrics = {name: value for name, value in metrics.items() if not name.startswith("test_loss")}
            metrics["test_loss"] = loss / number
        for losses in (metrics, clients):
            found = {name.replace("test_loss", "perplexity").replace("loss", "perplexity"): name for name in losses}
            losses |= {new: _perplexity(losses[name]) for new, name in found.items() if not name.startswith("train")}
        return Metrics(metrics, clients)

    @property
    def _num_tests(self):
        """Parts of the test text on all ranks."""
        is_own = self._context.is_personal or self.has_own_tests
        return self._context.num_clients if is_own else TEST_PARTS

    def subset(self, num_samples, tests=True):
        """On the first words of every part: as many as that number of sequences of `bptt` words has."""
        words = num_samples * self._settings.bptt
        part, limits = copy.copy(self), (-(-words // self._context.num_clients), words)
        train, test = (min(limit, most or limit) for limit, most in zip(limits, self._most))
        part._most = (train, test if tests else self._most[1])
        covers = [len(stream) <= train for stream in self._train.values()]
        covers += [len(stream) <= test // self._num_tests for stream in self._test.values() if tests]
        return self if all(covers) else part

    def _sums(self, module, streams, most):
        """[n, 2] sum of losses and number of words of n streams, of each only the first `most` words unless None."""
        sums = []
        for part, stream in streams.items():
            self.visit(part)  # parts of a test text that all clients share have no models of their own
            sums.append(self._sum(module, stream[:most]))
        return np.array(sums).reshape(-1, 2)

    def _columns(self, stream):
        """Columns in which a stream is evaluated, each of which lacks its first word among the predicted ones."""
        return max(1, min(TEST_PARTS, len(stream) // (2 * self._settings.bptt)))

    def _num_predicted(self, stream):
        columns = self._columns(stream)
        return max(0, len(stream) // columns - 1) * columns

    def _sum(self, module, stream):
        """(sum of losses, number of words) of a stream, read from an empty hidden state."""
        loss, number = 0.0, 0
        if len(stream) > 1:
            columns = self._columns(stream)
            sampler = SequentialSampler(len(stream), columns, columns, self._settings.bptt, stream.device)
            state = None
            for piece in map(sampler, range(sampler.batches_per_pass)):
                scores, state = module(stream[piece].long(), state)
                targets = stream[piece + 1].long().flatten()
                loss += functional.cross_entropy(scores.flatten(0, 1), targets, reduction="sum").item()
                number += targets.numel()
        return loss, number


def _per_word(sums):
    """[n] mean losses per word of [n, 2] sums; nan where there are no words."""
    return sums[:, 0] / np.where(sums[:, 1] > 0, sums[:, 1], np.nan)


def _perplexity(losses):
    """exp of one loss or of an array; inf where that is no finite number, nan of nan."""
    with np.errstate(over="ignore"):
        return np.exp(losses)


def _detached(state):
    """A hidden state, a tensor or nested tuples of them, without its graph."""
    if isinstance(state, torch.Tensor):
        return state.detach()
    return None if state is None else type(state)(_detached(part) for part in state)
