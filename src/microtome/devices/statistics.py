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
    count = table.shape[0]
    q1, median, q3 = torch.quantile(table, torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64), dim=0)
    reach = 1.5 * (q3 - q1)
    outliers = ((table < q1 - reach) | (table > q3 + reach)).sum(0)
    if count > _MAX_BOOTSTRAP:
        return _rank_spreads(table, method, median, q1, q3, outliers)
    resamples = torch.randint(count, (_RESAMPLES, count), generator=torch.Generator().manual_seed(0))
    columns = []
    for column in range(table.shape[1]):
        medians = torch.quantile(table[:, column][resamples], 0.5, dim=1)
        low, high = torch.quantile(medians, torch.tensor([0.025, 0.975], dtype=torch.float64))
        columns.append(
            Spread(
                median=float(median[column]),
                q1=float(q1[column]),
                q3=float(q3[column]),
                low=float(low),
                high=float(high),
                count=count,
                outliers=int(outliers[column]),
                method=method,
            )
        )
    return columns


def _rank_spreads(
    table: torch.Tensor, method: str, median: torch.Tensor, q1: torch.Tensor, q3: torch.Tensor, outliers: torch.Tensor
) -> list[Spread]:
    """Return spreads with the 95 % interval of the median from ranks: 0.98 sqrt(count) around the middle."""
    count = table.shape[0]
    ordered = table.sort(0).values
    reach = int(0.98 * count**0.5) + 1
    low, high = ordered[count // 2 - reach], ordered[count // 2 + reach]
    columns = zip(*(part.tolist() for part in (median, q1, q3, low, high, outliers)), strict=True)
    return [Spread(m, a, b, c, d, count, int(out), method) for m, a, b, c, d, out in columns]
