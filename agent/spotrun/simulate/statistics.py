"""Means with confidence intervals, by bootstrap. The seed is fixed: the same numbers give the same intervals. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

RESAMPLES = 2000
Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A number and its 95 % confidence interval."""

    value: float
    low: float
    high: float

    def text(self, digits: int = 2) -> str:
        """Such as 1.32 (1.25 to 1.40)."""
        return f"{self.value:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


def mean(values: Sequence[float]) -> Estimate:
    """The mean of values of independent windows."""
    return estimate(np.asarray(values, dtype=float)[:, None], lambda rows: rows[..., 0].mean(axis=-1))


def ratio(above: Sequence[float], below: Sequence[float]) -> Estimate:
    """The sum of the first divided by the sum of the second. Both have the same windows."""
    pairs = np.stack([np.asarray(above, dtype=float), np.asarray(below, dtype=float)], axis=1)
    return estimate(pairs, lambda rows: rows[..., 0].sum(axis=-1) / rows[..., 1].sum(axis=-1))


def geometric(values: Sequence[float]) -> Estimate:
    """The geometric mean of positive values."""
    return estimate(np.asarray(values, dtype=float)[:, None], lambda rows: np.exp(np.log(rows[..., 0]).mean(axis=-1)))


def closed(baseline: Sequence[float], ours: Sequence[float], best: Sequence[float]) -> Estimate:
    """Which part of the gap between a baseline and the best is closed by ours: (baseline - ours) / (baseline - best).

    Each is a mean over the windows.
    """
    rows = np.stack([np.asarray(each, dtype=float) for each in (baseline, ours, best)], axis=1)

    def part(rows: Values) -> Values:
        means = rows.mean(axis=-2)
        found: Values = (means[..., 0] - means[..., 1]) / (means[..., 0] - means[..., 2])
        return found

    return estimate(rows, part)


def estimate(rows: Values, statistic: Callable[[Values], Values], seed: int = 1) -> Estimate:
    """A statistic of the rows, and the middle 95 % of its values on rows drawn from them with replacement."""
    drawn = np.random.default_rng(seed).integers(0, len(rows), size=(RESAMPLES, len(rows)))
    again = statistic(rows[drawn])
    low, high = np.quantile(again, [0.025, 0.975])
    return Estimate(float(statistic(rows)), float(low), float(high))


def percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The 10th, 50th and 90th percentile. Each is one of the values, so values may be infinite."""
    found = np.quantile(np.asarray(values, dtype=float), [0.1, 0.5, 0.9], method="inverted_cdf")
    return float(found[0]), float(found[1]), float(found[2])
