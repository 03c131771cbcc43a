"""Training samples that are dealt again in every round, to the clients that take part in it."""

import math

import numpy as np

from fedmpi.data.partitions.base import most_frequent
from fedmpi.data.sampler import LastBatch, to_device
from fedmpi.ground.streams import FIRST, WHOLE, generator


class Dealer:
    """Which samples a client has in which round: a function of the seed and the round, the same on every rank.

    It needs no checkpoint: a run that is resumed deals the same samples.

    Args:
        partition: a `fedmpi.data.partitions.base.Partition`. labels: [n] values of its column (the labels, usually) for
            all samples.
        participants: `participants(round_index) -> clients`. seed: of the run.
        at_start: client -> sorted indices, of all clients: what they have before round 0.
        groups: [n] numbers from 0; samples of one group are dealt together. None: each is its own.

    Attributes:
        round_index: of the current round; -1 before round 0.
        share: samples of a client if all are dealt in a round, in equal parts; rounded up.

    Raises:
        UserError: if the samples cannot be dealt in round 0.
    """

    def __init__(self, partition, labels, participants, seed, at_start, groups=None):
        self._partition, self._participants, self._seed, self._groups = partition, participants, seed, groups
        self._labels = labels if groups is None else most_frequent(labels, groups)
        self.round_index, self._at_start = -1, at_start
        self._dealt = {}  # the round dealt last -> its parts
        self.share = math.ceil(len(labels) / len(self.parts(0)))

    def parts(self, round_index):
        """client -> sorted int64 indices of its samples in a round, of all its participants."""
        if round_index < 0:
            return self._at_start
        if round_index not in self._dealt:
            clients = self._participants(round_index)
            dealt = self._partition.deal(self._labels, clients, self._seed, round_index)
            if self._groups is not None:
                dealt = {client: np.flatnonzero(np.isin(self._groups, part)) for client, part in dealt.items()}
            self._dealt = {round_index: dealt}
        return self._dealt[round_index]


class DealtSampler:
    """Minibatches of what a client received in the current round; each pass over it is in a new random order.

    A draw is an index among all samples. A pass begins with the first draw of the round: its order is the stream
    (seed, "order", client, round, pass).

    Args:
        dealer: a `Dealer`. client: its number. The others: see `fedmpi.data.sampler.EpochSampler`.

    Attributes:
        batches_per_pass: minibatches in a pass, if all parts of a round were equal. last_batch: see `EpochSampler`.
    """

    last_batch = LastBatch()

    def __init__(self, dealer, client, batch_size, first_batch_size, seed, device="cpu"):
        self._dealer, self._client, self._seed, self._device = dealer, client, seed, device
        self._batch_size, self._first_batch_size = batch_size, first_batch_size
        self._round, self._first_draw = None, 0
        self._pass, self._order = None, None

    @property
    def batches_per_pass(self):
        return self.last_batch.cut(self._dealer.share, self._batch_size)[0]

    def __call__(self, number):
        """[b] int64 indices of draw `number`: 0, 1, 2, ..., the draws of a round in order; FIRST or WHOLE."""
        round_index = self._dealer.round_index
        part = self._dealer.parts(round_index)[self._client]
        if number == WHOLE:
            return to_device(part, self._device)
        if number == FIRST:
            order = generator(self._seed, "first batch", self._client).permutation(len(part))
            return to_device(part[order[: self._first_batch_size]], self._device)
        if round_index != self._round:
            self._round, self._first_draw, self._pass = round_index, number, None
        num_batches, _ = self.last_batch.cut(len(part), self._batch_size)
        pass_index, position = divmod(number - self._first_draw, num_batches)
        if pass_index != self._pass:
            rng = generator(self._seed, "order", self._client, round_index, pass_index)
            self._pass, self._order = pass_index, to_device(rng.permutation(part), self._device)
        return self.last_batch.piece(self._order, position, self._batch_size)
