"""Compute medians of repeated measurements with confidence intervals."""

from __future__ import annotations

import torch

from microtome.results.measurements import Spread

#: The number of bootstrap resamples for the interval of the median.
_RESAMPLES = 1000
#: With more samples than this, the interval is computed from ranks, which gives the same.
_MAX_BOOTSTRAP = 2000


def spreads(samples: torch.Tensor, method: str = "") -> list[Spread]:
    """Return the spread of each column of a table with a row for each pass; deterministic.

    >>> spreads(torch.tensor([[1.0], [2.0], [3.0], [4.0], [100.0]]))[0].median
    3.0
    >>> spreads(torch.tensor([[1.0], [2.0], [3.0], [4.0], [100.0]]))[0].outliers
    1
    """
    table = samples.to(torch.float64)
    quartiles = torch.quantile(table, torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64), dim=0)
    q1, _, q3 = quartiles
    reach = 1.5 * (q3 - q1)
    outliers = ((table < q1 - reach) | (table > q3 + reach)).sum(0)
    interval = _bootstrap_interval(table) if len(table) <= _MAX_BOOTSTRAP else _rank_interval(table)
    columns = zip(*quartiles.tolist(), *interval.tolist(), outliers.tolist(), strict=True)
    return [Spread(median, q1, q3, low, high, len(table), out, method) for q1, median, q3, low, high, out in columns]


def _bootstrap_interval(table: torch.Tensor) -> torch.Tensor:
    """Return the 95 % interval of each column's median, from resampled medians."""
    count = len(table)
    resamples = torch.randint(count, (_RESAMPLES, count), generator=torch.Generator().manual_seed(0))
    medians = torch.stack([torch.quantile(column[resamples], 0.5, dim=1) for column in table.T], dim=1)
    return torch.quantile(medians, torch.tensor([0.025, 0.975], dtype=torch.float64), dim=0)


def _rank_interval(table: torch.Tensor) -> torch.Tensor:
    """Return the 95 % interval of each column's median, from ranks: 0.98 sqrt(count) around the middle."""
    ordered = table.sort(0).values
    middle, reach = len(table) // 2, int(0.98 * len(table) ** 0.5) + 1
    return ordered[[middle - reach, middle + reach]]
