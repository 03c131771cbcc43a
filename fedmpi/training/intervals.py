"""How sure the means over silos are that baselines show, by their numbers of test cases. Collective."""

import numpy as np

from fedmpi.data.hidden_sum import hidden_sum
from fedmpi.ground.streams import generator
from fedmpi.tasks.base import sums_of_ranks

RESAMPLES = 500
OUTSIDE = 0.05  # share of the resamples, or of samples like this one, whose mean may lie outside of an interval


def of_mean(link, seed, supports):
    """{"low", "high"} of a metric's mean over silos, {} if its cases are not known. Collective on the link.

    Args:
        seed: of the run. supports: client -> `Support` of each client of this rank, or None.
    """
    kind = _kind(link, [supports])
    if kind == "shares":
        parts = [[1, 1 / own.number, own.right.mean()] for own in supports.values() if own.number]
        silos, inverse, shares = _sums(link, parts, 3)
        number = silos**2 / inverse  # of one silo with as certain a mean: of equal silos, of all together
        low, high = _of_share(number * shares / silos, number)
        return {"low": low, "high": high}
    means = _resampled(link, seed, [supports]) if kind == "resampled" else None
    return {} if means is None else dict(zip(("low", "high"), _middle(means)))


def of_difference(link, seed, first, second):
    """{"low", "high", "deviation", "rows"} of the mean over silos of a metric's differences on the same cases; or {}.

    Args:
        seed, first, second: see `of_mean`; the first one's metric minus the second one's.
    """
    kind = _kind(link, [first, second])
    if not kind:
        return {}
    (rows,) = _sums(link, [[own.number] for own in first.values()], 1)
    if kind == "resampled":
        means = _resampled(link, seed, [first, second])
        low, high = _middle(means)
        return {"low": low, "high": high, "deviation": float(np.std(means, ddof=1)), "rows": int(rows)}
    parts = []
    for client, own in first.items():
        if own.number:
            better, worse = (own.right & ~second[client].right).sum(), (second[client].right & ~own.right).sum()
            variance = (better + worse - (better - worse) ** 2 / own.number) / own.number**2
            parts.append([1, 1 / own.number, better / own.number, worse / own.number, variance])
    silos, inverse, better, worse, variance = _sums(link, parts, 5)
    number = silos**2 / inverse
    better, changed = number * better / silos, number * (better + worse) / silos
    low, high = (changed / number * (2 * share - 1) for share in _of_share(better, changed))
    return {"low": low, "high": high, "deviation": float(np.sqrt(variance)) / silos, "rows": int(rows)}


def _kind(link, methods):
    """How an interval is found: "shares" of right answers, "resampled", or "" if cases are not known. Collective."""
    everyone = [own for supports in methods for own in (supports or {}).values()]
    is_known = all(supports is not None for supports in methods) and all(own is not None for own in everyone)
    are_shares = is_known and all(own.right is not None for own in everyone)
    number = sum(own.number for own in (methods[0] or {}).values() if own is not None)
    known, shares = link.allgather([is_known, are_shares], "evaluation").min(0)
    (total,) = sums_of_ranks(link, [number])
    return "" if not known or not total else "shares" if shares else "resampled"


def _sums(link, rows, width):
    """[width] sums over all silos of the rows of this rank's. Collective on the link."""
    return hidden_sum(link, np.sum([[0.0] * width, *rows], axis=0)).tolist()


def _of_share(number_right, number):
    """The exact interval of a share (Clopper and Pearson): (low, high)."""
    from scipy.stats import beta  # takes a while to load

    low = beta.ppf(OUTSIDE / 2, number_right, number - number_right + 1) if number_right > 1e-9 else 0.0
    high = beta.ppf(1 - OUTSIDE / 2, number_right + 1, number - number_right) if number - number_right > 1e-9 else 1.0
    return float(low), float(high)


def _resampled(link, seed, methods):
    """[RESAMPLES] means over silos of a metric, or of a difference, with cases drawn anew within each silo.

    Collective on the link. All methods have the same cases. A draw whose metric does not exist counts as the whole.
    """
    total, silos = np.zeros(RESAMPLES), 0
    for client, own in methods[0].items():
        value = _difference([supports[client] for supports in methods], np.arange(own.number)) if own.number else np.nan
        if np.isnan(value):
            continue
        stream, silos = generator(seed, "resamples", client), silos + 1
        for place in range(RESAMPLES):
            drawn = _difference([supports[client] for supports in methods], stream.integers(0, own.number, own.number))
            total[place] += value if np.isnan(drawn) else drawn
    *total, silos = hidden_sum(link, [*total, silos])
    return np.array(total) / silos


def _difference(supports, indices):
    first, *second = (own.value(indices) for own in supports)
    return first - second[0] if second else first


def _middle(means):
    return np.quantile(means, [OUTSIDE / 2, 1 - OUTSIDE / 2]).tolist()
