"""Metrics of all silos' samples from what each silo sends: counts, sums, bins of scores or, if need be, all samples."""

import dataclasses
import functools
import math

import numpy as np
import torch

from fedmpi.comm.agreement import agree
from fedmpi.ground.errors import UserError
from fedmpi.ground.text import Log
from fedmpi.tasks.metrics import BANDS, PADDING, Answers, Moments, bands_of, calibration_error, crossing

log = Log(__name__)

MOST_AXES = 8  # of a batch of predictions
NUM_BINS = 1000  # of scores
ERROR = 1e-3  # of the area under the ROC curve by bins, at most: 1 / (2 `SHARES`)
SHARES = 500  # a bin of many scores has at most two of so many parts of both kinds of samples
PRECISION = 40_000  # and changes the average precision by at most 1 / this, about
MOST_STEPS = 100  # in which bins become narrower; about four are usual
# The first edges: positive numbers of this many binary digits before and after the point, as many of each length.
DIGITS, FIRST = 20, 499


@dataclasses.dataclass(frozen=True)
class Facts:
    """What all silos' answers have in common.

    Attributes:
        num_classes: number of scores per target, 0 if there is one output per target.
        num_columns: labels per sample, if each is 0 or 1; else 0. is_binary: whether targets are 0 and 1, or -1 and 1.
        has_classes: whether a class can be read from every answer. num_values: numbers in a target; 1 if they have not
            all as many, as sequences: then each number counts as a sample.
    """

    num_classes: int
    num_columns: int
    is_binary: bool
    has_classes: bool
    num_values: int = 1

    @classmethod
    def agreed(cls, link, answers):
        """Those of the `Answers` of all ranks. Collective on the link."""
        rows = []
        for own in answers:
            columns = own.targets.shape[1] if own.is_binary and own.targets.dim() == 2 else 0
            width = own.targets.shape[1] if own.targets.dim() == 2 else 1
            rows.append([own.num_classes_of(own.outputs, own.targets), columns, width, own.is_binary, own.have_classes])
        least, most = (np.min, np.max) if rows else (lambda *_, axis: [np.inf] * 5, lambda *_, axis: [-np.inf] * 5)
        everyone = link.allgather([*least(rows, axis=0), *most(rows, axis=0)], "metric sums")
        least, most = everyone[:, :5].min(0), everyone[:, 5:].max(0)
        if not np.isfinite(least).all():
            return cls(0, 0, False, False)
        width = int(most[2]) if least[2] == most[2] else 1
        return cls(int(most[0]), int(most[1]), bool(least[3]), bool(least[4]), width)


@dataclasses.dataclass(frozen=True)
class Rebuilt:
    """Samples that have the same counts as all silos' together, in no order; see `Answers`.

    Attributes:
        outputs: [n] or [n, columns] classes, or numbers of bins; targets: of the same shape. num_classes: of the data.
    """

    outputs: torch.Tensor
    targets: torch.Tensor
    num_classes: int
    have_classes = True

    def classes(self):
        return self.outputs

    scores = classes


@dataclasses.dataclass(frozen=True)
class Measuring:
    """How metrics of all silos' samples are computed.

    Attributes:
        metrics: name -> `Metric`. is_common: whether all ranks have the samples in common: then sending outputs reveals
            nothing of them. scores: how metrics of the order of scores are computed, "bins" or "samples".
        form: of the `Answers`.
    """

    metrics: dict
    is_common: bool
    scores: str
    form: dict = dataclasses.field(default_factory=dict)

    def __call__(self, link, parts):
        """name -> number, vector or matrix of each metric. Collective on the link.

        `parts`: [(outputs, targets)] of this rank, tensors on the CPU.

        Raises:
            UserError: on every rank.
        """
        own = [(outputs, targets, Answers(outputs, targets, **self.form)) for outputs, targets in parts if len(targets)]
        own = [part for part in own if len(part[2].targets)]  # some may be padding only
        facts = Facts.agreed(link, [answers for *_, answers in own])
        found, ways = {}, self.ways(facts)
        for way in dict.fromkeys(ways.values()):
            chosen = {name: self.metrics[name] for name in ways if ways[name] == way}
            found |= getattr(self, f"_by_{way}")(link, chosen, own, facts)
        return {name: found[name] for name in self.metrics}

    def ways(self, facts):
        """name of each metric -> in which way it is computed: counts, means, moments, bands, bins or samples."""
        return {name: metric.way(facts, self.scores, self.is_common) for name, metric in self.metrics.items()}

    def say(self, link, facts, given, reason, kind):
        """Say on rank 0 for which metrics outputs and targets of silos' samples cross. Collective on the link.

        Args:
            facts: `Facts`. given: the setting `scores`. reason: what asks for the metrics. kind: of samples.

        Raises:
            UserError: if the user has asked for bins, and a metric needs samples.
        """
        ways = self.ways(facts)
        names = [name for name in ways if ways[name] == "samples" and not self.is_common]
        if given == "bins" and names:
            raise UserError(
                f"scores = bins: metric {names[0]} needs the output and target of every sample: leave it out, or use "
                "--scores samples (of a function of your own, the task can say in takes that counts or pairs suffice)"
            )
        if names and link.size > 1 and link.rank == 0:
            log.warning(crossing(reason, kind, names))

    def _by_samples(self, link, metrics, own, facts):
        """Of any metrics: from the output and target of every sample. Collective on the link."""
        columns = ([part[column] for part in own] for column in (0, 1))
        everyone = [gathered(column, link, padding) for column, padding in zip(columns, (PADDING, math.nan))]
        return {name: metric(*everyone, **self.form) for name, metric in metrics.items()}

    def _by_counts(self, link, metrics, own, facts):
        """Of metrics of classes: from how often each answer was given to each target. Collective on the link."""
        first = next(iter(metrics.values()))
        rows = agree(link, lambda: [first.guarded(answers, _counts) for *_, answers in own])
        rows = (
            link.allgatherv(np.concatenate([np.empty(0), *map(np.ravel, rows)]), "metric sums")
            .reshape(-1, 4)
            .astype(np.int64)
        )
        columns = []
        for column in range(max(1, facts.num_columns)):
            of_column = rows[rows[:, 0] == column]
            columns.append(np.repeat(of_column[:, 1:3], of_column[:, 3], axis=0))
        together = torch.from_numpy(np.stack(columns, axis=-1))  # [n, 2, columns]
        together = together if facts.num_columns else together[..., 0]
        rebuilt = Rebuilt(together[:, 1], together[:, 0], facts.num_classes or 2 * facts.is_binary)
        return {name: metric.of(rebuilt) for name, metric in metrics.items()}

    def _by_means(self, link, metrics, own, facts):
        """Of metrics that are means over samples: from each silo's value and number. Collective on the link."""
        found = {}
        for name, metric in metrics.items():
            parts = [(part[:2], part[2].targets.numel()) for part in own]
            rows = agree(
                link, lambda m=metric, parts=parts: [[*np.ravel(m(*pair, **self.form)), num] for pair, num in parts]
            )
            width = int(link.allgather([max(map(len, rows), default=0)], "metric sums").max())
            rows = link.allgatherv(np.ravel(rows), "metric sums").reshape(-1, width)
            values, numbers = rows[:, :-1], rows[:, -1]
            mean = values[0] if len(rows) == 1 else numbers @ values / numbers.sum()
            found[name] = float(mean[0]) if len(mean) == 1 else mean.tolist()
        return found

    def _by_moments(self, link, metrics, own, facts):
        """Of metrics of values: from each silo's means and squares of targets and errors. Collective on the link."""
        first, width = next(iter(metrics.values())), facts.num_values
        pairs = agree(link, lambda: [first.guarded(answers, functools.partial(_errors, width)) for *_, answers in own])
        sums = [[np.full(width, pair.shape[1]), *pair.sum(1), np.abs(pair[1]).max(0)] for pair in pairs]
        number, *sums, largest = link.allgatherv(np.ravel(sums), "metric sums").reshape(-1, 4, width).swapaxes(0, 1)
        total = number.sum(0)
        means = np.sum(sums, axis=1) / total  # but for rounding, which would count where they are far from 0
        near = [pair - means[:, None] for pair in pairs]
        sums = [[*values.sum(1), *(values**2).sum(1)] for values in near]
        sums = link.allgatherv(np.ravel(sums), "metric sums").reshape(-1, 2, 2, width).sum(0)
        squares = sums[1] - sums[0] ** 2 / total
        squares[squares <= total * np.spacing(means) ** 2] = 0  # of equal numbers, but for rounding
        moments = Moments(total, means[1] + sums[0, 1] / total, *squares, largest.max())
        return {name: metric.of_moments(moments) for name, metric in metrics.items()}

    def _by_bands(self, link, metrics, own, facts):
        """Of the calibration: from numbers and sums in bands of probabilities. Collective on the link."""
        first = next(iter(metrics.values()))
        tables = agree(link, lambda: [first.guarded(answers, bands_of) for *_, answers in own])
        own_table = np.sum([np.zeros((BANDS, 3)), *tables], axis=0)
        table = link.allgather(own_table.ravel(), "metric sums").sum(0).reshape(BANDS, 3)
        return dict.fromkeys(metrics, calibration_error(table))

    def _by_bins(self, link, metrics, own, facts):
        """Of metrics of the order of scores: from how many samples of each class are in each bin. Collective."""
        found = {}
        for name, metric in metrics.items():
            columns = 1 if metric.is_micro else facts.num_columns or (facts.num_classes if facts.num_classes > 2 else 1)
            pairs = agree(link, lambda m=metric: [m.guarded(answers, _columns) for *_, answers in own])
            empty = (np.empty((0, columns)), np.empty((0, columns), bool))
            scores, positive = (
                np.concatenate([part.reshape(-1, columns) for part in parts]) for parts in zip(empty, *pairs)
            )
            both = [torch.from_numpy(part[:, 0] if columns == 1 else part) for part in binned(link, scores, positive)]
            found[name] = metric.of(Rebuilt(*both, 2 if columns == 1 else facts.num_classes))
        return found


def _counts(answers):
    """[m, 4] column, target, answer, and how many samples have them."""
    targets, classes = (np.asarray(values.long()) for values in (answers.targets, answers.classes()))
    if targets.shape != classes.shape:
        raise ValueError(f"expected an answer for each target: {list(classes.shape)} for {list(targets.shape)}")
    rows = []
    for column in range(targets.shape[1] if targets.ndim == 2 else 1):
        pair = (part[:, column] if part.ndim == 2 else part for part in (targets, classes))
        low, (targets_of, classes_of) = 0, pair
        low = min(targets_of.min(initial=0), classes_of.min(initial=0))
        width = int(classes_of.max(initial=0) - low + 1)
        keys, number = np.unique((targets_of - low) * width + classes_of - low, return_counts=True)
        rows.append(np.stack([np.full(len(keys), column), keys // width + low, keys % width + low, number], axis=1))
    return np.concatenate(rows)


def _errors(width, answers):
    """[2, n, width] targets, and errors (target - value)."""
    targets, values = (np.asarray(part.double()).reshape(-1, width) for part in (answers.targets, answers.values()))
    if targets.shape != values.shape:
        raise ValueError(f"expected an output for each target: {list(values.shape)} for {list(targets.shape)}")
    if not np.isfinite([targets, values]).all():
        raise ValueError("an output or target is not finite")
    return np.stack([targets, targets - values])


def _columns(answers):
    """([n, columns] scores, [n, columns] whether a sample is of the class that the column's scores are for)."""
    scores, targets = np.asarray(answers.scores().double()), np.asarray(answers.targets)
    if np.isnan(scores).any():
        raise ValueError("an output is not a number")
    if scores.ndim == 2 and targets.ndim == 1:
        return scores, targets[:, None] == np.arange(scores.shape[1])
    return scores.reshape(len(scores), -1), targets.reshape(len(targets), -1) > 0


def binned(link, scores, positive):
    """Samples whose scores are ordered as those of all ranks, but for ties in `NUM_BINS` bins. Collective on the link.

    The ranks add up how many positive and negative samples are in each bin, and make the bins narrower where there are
    many of both. No bin then has more than 1 / `SHARES` of all samples of both kinds (their mean share), unless these
    have one score: the area under the ROC curve is off by at most half of that.

    Args:
        scores: [n, columns] float64, without nan. positive: [n, columns] of bool; each column has its own bins.

    Returns:
        ([m, columns] float64 numbers of bins, [m, columns] int64 0 or 1), of all ranks' m samples in no order.
    """
    keys = _ordered(scores)
    edges = [_first_edges() for _ in keys.T]
    for _ in range(MOST_STEPS):
        counts = np.zeros((len(edges), 2, NUM_BINS))
        for column, (own, kind) in enumerate(zip(keys.T, positive.T)):
            bins = np.searchsorted(edges[column], own, side="right")
            counts[column] = [np.bincount(bins[kind == is_one], minlength=NUM_BINS) for is_one in (False, True)]
        counts = link.allgather(counts.ravel(), "metric sums").sum(0).reshape(counts.shape).astype(np.int64)
        finer = [_finer(own, *of_column) for own, of_column in zip(edges, counts)]
        if all(new is None for new in finer):
            break
        edges = [own if new is None else new for own, new in zip(edges, finer)]
    numbers, kinds = np.arange(2 * NUM_BINS) % NUM_BINS, np.arange(2 * NUM_BINS) // NUM_BINS
    pairs = [[np.repeat(part, of_column.ravel()) for part in (numbers, kinds)] for of_column in counts]
    bins, kinds = (np.stack(parts, axis=1) for parts in zip(*pairs))
    return bins.astype(np.float64), kinds


def _ordered(scores):
    """Whole numbers in the order of floating-point numbers, one for each of these."""
    bits = (np.asarray(scores, np.float64) + 0.0).view(np.int64)  # -0 is 0
    return np.where(bits < 0, ~bits | np.int64(-(2**63)), bits)


def _first_edges():
    edges = np.linspace(*_ordered(np.array([2.0**-DIGITS, 2.0**DIGITS])), FIRST).astype(np.int64)
    return np.concatenate([-edges[::-1], edges])


def _finer(edges, negatives, positives):
    """[at most NUM_BINS - 1] edges that are closer where they must be; None: bins are fine, or there are too many.

    Neighbours are joined if the bin that they make is fine, and bins that are not fine are cut. It is whole numbers
    only, so that all ranks find the same.
    """
    negatives, positives = negatives.tolist(), positives.tolist()  # Python's numbers, of any size
    num_negative, num_positive = sum(negatives), sum(positives)
    sides = [-(2**63), *map(int, edges), 2**63]

    def is_fine(low, high, negative, positive, false, true):
        """Whether a bin has one score, or few samples; `false`, `true`: numbers of both kinds with higher scores."""
        if high - low == 1 or not positive:
            return True
        if SHARES * (negative * num_positive + positive * num_negative) > 2 * num_negative * num_positive and negative:
            return False
        rank = false + true + negative + positive
        change = positive * (negative * rank + (positive - 1) * false)  # of the sum of precisions, times rank squared
        return change * PRECISION <= num_positive * rank**2

    joined, false, true = [], 0, 0  # [low, high, negatives, positives, those of both above it], highest scores first
    for place in reversed(range(len(sides) - 1)):
        low, high, negative, positive = *sides[place : place + 2], negatives[place], positives[place]
        last = joined[-1] if joined else [high, high, 0, 0, 0, 0]
        wider = [low, last[1], negative + last[2], positive + last[3], *last[4:]]
        joined[len(joined) - is_fine(*wider) :] = [
            wider if is_fine(*wider) else [low, high, negative, positive, false, true]
        ]
        false, true = false + negative, true + positive
    spare, coarse = NUM_BINS - len(joined), [bin_ for bin_ in joined if not is_fine(*bin_)]
    coarse = sorted(coarse, key=lambda bin_: bin_[2] * bin_[3])[-spare:] if spare else []
    if not coarse:
        return None
    parts = 1 + spare // len(coarse)
    cuts = {low + (high - low) * part // parts for low, high, *_ in coarse for part in range(1, parts)}
    return np.array(sorted((cuts | {bin_[0] for bin_ in joined}) - {-(2**63)}), np.int64)


def gathered(tensors, link, padding):
    """The tensors of all ranks, one after the other along their first axis, on the CPU. Collective on the link.

    A rank without any learns the shape and type from the others; numbers travel as float64. If further axes differ in
    length, as those of sequences do, the shorter ones are padded: integers with `PADDING`, others with `padding`.
    """
    tensors = [torch.atleast_1d(tensor.detach().cpu()) for tensor in tensors]
    sizes = [[*tensor.shape[1:]] + [0] * (MOST_AXES - tensor.dim()) for tensor in tensors if len(tensor)]
    num_axes = max((tensor.dim() for tensor in tensors), default=1)
    is_integer = any(len(tensor) and not tensor.is_floating_point() for tensor in tensors)
    is_double = any(tensor.dtype == torch.float64 for tensor in tensors)
    facts = link.allgather(
        [num_axes, is_integer, is_double, *np.max([[0] * (MOST_AXES - 1), *sizes], axis=0)], "outputs"
    )
    num_axes, is_integer, is_double, *longest = facts.max(0).astype(int).tolist()
    longest = longest[: num_axes - 1]
    padding = PADDING if is_integer else padding
    own_values = [_padded(tensor.double(), longest, padding).reshape(-1) for tensor in tensors]
    own = torch.cat([torch.empty(0, dtype=torch.float64), *own_values]).numpy()
    values = torch.from_numpy(link.allgatherv(own, "outputs"))
    dtype = torch.int64 if is_integer else torch.float64 if is_double else torch.float32
    return values.to(dtype).reshape(-1, *longest)


def _padded(tensor, longest, padding):
    """A tensor [n, ...] with `padding` behind its values, so that its further axes are as long as `longest`."""
    if list(tensor.shape[1:]) == longest or not len(tensor):
        return tensor
    missing = [(0, most - size) for most, size in zip(longest, tensor.shape[1:])]
    return torch.nn.functional.pad(tensor, sum(reversed(missing), ()), value=padding)
