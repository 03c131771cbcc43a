"""The part of a task whose training samples are dealt again in every round (`Partition.redeal`)."""

import functools

import numpy as np

from fedmpi.data.dealing import Dealer, DealtSampler
from fedmpi.data.holdout import hold_out
from fedmpi.federation.participation import draw_participants


class Dealt:
    """Mixin before `LoadedClassification`: a rank has all training samples, and a client uses those of the round.

    train_loss is the mean of the clients' objectives on the split before round 0, which contains every sample. Of each
    part of that split, the held-out share is never dealt.

    Args:
        settings, context, sources, parts, data: see `LoadedClassification`.
        partition: the `Partition`.

    Raises:
        UserError: if the samples cannot be dealt to the participants of a round.
    """

    def __init__(self, settings, context, partition, sources, parts, *data):
        super().__init__(settings, context, sources, parts, *data)
        source = sources[context.clients[0]]
        groups = source.groups()
        kept = []
        for client, part in enumerate(parts):
            own = None if groups is None or not context.holdout else groups[part]
            kept.append(part[hold_out(len(part), context.holdout, context.seed, client, own)[0]])
        rows = np.unique(np.concatenate(kept))
        self._all = self._samples(source.read("train", rows), source.labels["train"][rows])
        self.dealer = Dealer(
            partition.for_data_set(source.name),
            source.column(partition.column)[rows],
            functools.partial(draw_participants, context.num_clients, context.participation, context.seed),
            context.seed,
            {client: np.searchsorted(rows, part) for client, part in enumerate(kept)},
            None if groups is None else np.unique(groups[rows], return_inverse=True)[1],
        )

    def begin_round(self, round_index):
        self.dealer.round_index = round_index

    def sampler(self, client, batch_size, first_batch_size, seed, device):
        return DealtSampler(self.dealer, client, batch_size, first_batch_size, seed, self._all.labels.device)

    def _samples_of(self, client):
        return self._all
