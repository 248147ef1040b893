"""The options of a recorder: check them, find the reduction, and describe them in a manifest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from os import PathLike
from typing import Any, Literal, SupportsFloat, SupportsIndex

import torch
from torch import Tensor, nn

from microtome.engine.fingerprint import layout_fingerprint
from microtome.engine.selectors import path_aliases
from microtome.errors import BadQuery, Unsupported

Reduction = Literal["mean", "max", "cls", "last"]
Reduce = Reduction | Callable[[Tensor], Tensor]


def check_options(
    *,
    selects_modules: bool,
    attention: bool,
    selects_attention: bool,
    to: Any,
    append: bool,
    last: Any,
    histogram: Any,
    progress: Any,
) -> None:
    """Raise if an option is invalid, or excludes another.

    Args:
        selects_modules: Whether modules are selected.
        selects_attention: Whether layers, heads or rows of attention are selected.
    """
    if selects_modules == attention:
        raise BadQuery("expected modules to record or attention=True, and not both")
    if selects_attention and not attention:
        raise BadQuery("layers, heads and rows select attention: add attention=True")
    if to is None and append:
        raise BadQuery("append=True continues a folder: name it with `to`")
    if to is not None and not isinstance(to, str | PathLike):
        raise BadQuery(f"expected the path of a folder as `to`, got {to!r}")
    if to is not None and last is not None:
        raise BadQuery("`last` bounds a recording in memory: leave out `to` or `last`")
    if last is not None and not (isinstance(last, SupportsIndex) and index(last) >= 1):
        raise BadQuery(f"expected `last` to be a number of tensors of at least 1, got {last!r}")
    if histogram is not None and not _is_histogram(histogram):
        raise BadQuery(f"expected a histogram as (bins, low, high), such as (10, -1.0, 1.0), got {histogram!r}")
    if progress is not None and not callable(progress):
        raise BadQuery(f"expected progress to be a function of the RecordTotals, got {progress!r}")


def _is_histogram(value: Any) -> bool:
    if not isinstance(value, Sequence) or len(value) != 3:
        return False
    return isinstance(value[0], SupportsIndex) and all(isinstance(edge, SupportsFloat) for edge in value[1:])


# -- reduction ---------------------------------------------------------------------------------------------------------


def find_reduction(reduce: Reduce) -> Callable[[Tensor], Tensor]:
    """Return the reduction of that name, or the function itself."""
    if callable(reduce):
        return reduce
    if reduce not in _REDUCTIONS:
        raise BadQuery(
            f"expected reduce to be one of {', '.join(map(repr, _REDUCTIONS))} or a function, got {reduce!r}"
        )
    return _REDUCTIONS[reduce]


def _positions(tensor: Tensor) -> tuple[int, ...]:
    """Return the dimensions of positions in (batch, tokens, channels), (batch, channels, height, width), and so on."""
    return {3: (1,), 4: (2, 3), 5: (2, 3, 4)}.get(tensor.ndim, ())


def _mean(tensor: Tensor) -> Tensor:
    dims = _positions(tensor)
    values = tensor if tensor.is_floating_point() else tensor.float()
    return values.mean(dims) if dims else values


def _max(tensor: Tensor) -> Tensor:
    dims = _positions(tensor)
    return tensor.amax(dims) if dims else tensor


def _token(position: int, name: str) -> Callable[[Tensor], Tensor]:
    def select_token(tensor: Tensor) -> Tensor:
        if tensor.ndim != 3:
            raise Unsupported(
                f"reduce={name!r} expected an output of shape (batch, tokens, channels), got "
                f"{tuple(tensor.shape)}: pass a function"
            )
        return tensor[:, position]

    return select_token


_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": _mean,
    "max": _max,
    "cls": _token(0, "cls"),
    "last": _token(-1, "last"),
}


# -- manifest ----------------------------------------------------------------------------------------------------------


def make_manifest(model: nn.Module, selectors: list[str], reduce: Reduce | None) -> dict[str, Any]:
    """Describe a recording; appending requires the same, except for torch's version and other names."""
    return {
        "model": type(model).__qualname__,
        "layout": layout_fingerprint(model),
        "selectors": selectors,
        "reduce": reduce if reduce is None or isinstance(reduce, str) else describe_selector(reduce),
        "other_names": path_aliases(model),
        "torch": torch.__version__,
    }


def describe_selector(selector: Any) -> str:
    """Describe a selector or a function by a string that is the same in another process."""
    if isinstance(selector, list | tuple | set | frozenset):
        return ", ".join(sorted(map(describe_selector, selector)))
    if isinstance(selector, str) or selector is None:
        return selector or "all"
    if isinstance(selector, nn.Module):
        return type(selector).__name__
    return str(getattr(selector, "pattern", None) or getattr(selector, "__qualname__", type(selector).__name__))
