"""Intervals and tests for shares and for differences between configurations that saw the same problems."""

from collections.abc import Callable
from math import comb, sqrt

import numpy as np

RESAMPLES = 1000
Z95 = 1.959964


def wilson(passed: int, num: int) -> list[float]:
    """[share, low, high] of `passed` in `num` trials, with its 95 % interval (E. B. Wilson, JASA 22, 1927)."""
    if num == 0:
        return [0.0, 0.0, 1.0]
    share, z2 = passed / num, Z95**2 / num
    centre, half = share + z2 / 2, Z95 * sqrt(share * (1 - share) / num + z2 / (4 * num))
    low, high = ((centre - half) / (1 + z2), (centre + half) / (1 + z2))
    return [share, max(0.0, low), min(1.0, high)]


def mcnemar(won: int, lost: int) -> float:
    """Two-sided exact p-value of McNemar's test: how likely problems that only one of two configurations solves are
    split at least as unevenly as won : lost, if each were as likely to solve them."""
    num = won + lost
    tail = sum(comb(num, k) for k in range(min(won, lost) + 1))
    return min(1.0, 2 * tail / 2**num)


def bootstrap(statistic: Callable[[np.ndarray], np.ndarray], num: int) -> list[float]:
    """[value, low, high] of a statistic of how often each of `num` units is counted, int64[N, num] -> float[N]: on all
    units once, with the 95 % percentile interval over `RESAMPLES` draws, the same draws for every statistic.

    Draws for which the statistic is not finite are left out.
    """
    value = statistic(np.ones((1, num), np.int64))[0]
    draws = np.random.default_rng(0).multinomial(num, np.full(num, 1 / num), RESAMPLES)
    drawn = statistic(draws)
    low, high = np.quantile(drawn[np.isfinite(drawn)], [0.025, 0.975]) if np.isfinite(drawn).any() else (value, value)
    return [float(value), float(low), float(high)]
