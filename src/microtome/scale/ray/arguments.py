"""Check arguments before Ray starts anything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

from microtome.errors import BadQuery, describe_value


def check_names(function: str, options: Iterable[str], known: Sequence[str]) -> None:
    """Raise if a function has no option of a name."""
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f": did you mean {near[0]!r}?" if near else f": expected one of {', '.join(known)}"
            raise BadQuery(f"{function} has no option {name!r}{hint}")


def check_counts(**numbers: Any) -> None:
    """Raise if an option is not a whole number of at least 1."""
    for name, number in numbers.items():
        if not is_count(number):
            raise BadQuery(f"expected {name} of at least 1, got {number!r:.80}")


def is_count(value: Any) -> bool:
    """Whether a value is a whole number of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def check_dataset(ray: Any, dataset: Any) -> None:
    """Raise if a value is not a data set of Ray."""
    if not isinstance(dataset, ray.data.Dataset):
        raise BadQuery(f"expected a ray.data.Dataset, such as ray.data.from_numpy(…), got {describe_value(dataset)}")
