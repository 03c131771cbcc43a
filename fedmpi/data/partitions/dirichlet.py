"""A random mixture of classes per client."""

import dataclasses

import numpy as np

from fedmpi.data.partitions.base import Partition
from fedmpi.settings import setting


@dataclasses.dataclass(frozen=True)
class Dirichlet(Partition):
    """Every client draws its own mixture of classes; sizes differ by at most one.

    Client i draws p_i ~ Dir(α 1), then labels from p_i without replacement; the weight of a class
    whose samples are used up becomes 0. Small α: few classes per client. Large α: like a random even split.

    Source: Hsu et al. 2019, arXiv:1909.06335 (not the variant that splits every class by p and so
    makes unequal sizes).
    """

    by_class = True

    concentration: float = setting(0.5, "α, how similar the clients' mixtures of classes are", above=0, most=1e6)

    def split(self, labels, num_clients, rng):
        stock = [rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
        taken = np.zeros(len(stock), dtype=int)
        class_sizes = np.array([len(samples) for samples in stock])
        parts = []
        for size in map(len, np.array_split(labels, num_clients)):  # they differ by at most one
            mixture = rng.dirichlet(np.full(len(stock), self.concentration))
            counts = self._draw_counts(mixture, size, class_sizes - taken, rng)
            parts.append(np.concatenate([s[t : t + c] for s, t, c in zip(stock, taken, counts)]))
            taken += counts
        return parts

    @staticmethod
    def _draw_counts(mixture, size, left, rng):
        """[num_classes] samples that a client takes of each class: `size` in total, at most `left` of each.

        Draws that exceed what is left of a class are drawn again: the same distribution as drawing
        label by label.
        """
        counts = np.zeros(len(left), dtype=int)
        while missing := size - counts.sum():
            weights = np.where(counts < left, mixture, 0)
            if weights.sum() == 0:  # all classes of the client's mixture are used up
                weights = (left - counts).astype(float)
            counts = np.minimum(counts + rng.multinomial(missing, weights / weights.sum()), left)
        return counts
