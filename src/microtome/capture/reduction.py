"""What is kept of an output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from microtome.errors import BadQuery, Unsupported

Reduction = Literal["mean", "max", "cls", "last"]
Reduce = Reduction | Callable[[Tensor], Tensor]


def reduction(reduce: Reduce) -> Callable[[Tensor], Tensor]:
    """The function of that name, or the function itself."""
    if callable(reduce):
        return reduce
    if reduce not in _REDUCTIONS:
        raise BadQuery(f"reduce is one of {', '.join(map(repr, _REDUCTIONS))}, or a function, got {reduce!r}")
    return _REDUCTIONS[reduce]


def _positions(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions of positions, of (batch, tokens, channels), (batch, channels, height, width), and so on."""
    return {3: (1,), 4: (2, 3), 5: (2, 3, 4)}.get(tensor.ndim, ())


def _mean(tensor: Tensor) -> Tensor:
    over = _positions(tensor)
    values = tensor if tensor.is_floating_point() else tensor.float()
    return values.mean(over) if over else values


def _max(tensor: Tensor) -> Tensor:
    over = _positions(tensor)
    return tensor.amax(over) if over else tensor


def _token(index: int, name: str) -> Callable[[Tensor], Tensor]:
    def take(tensor: Tensor) -> Tensor:
        if tensor.ndim != 3:
            raise Unsupported(
                f"reduce={name!r} takes a token of (batch, tokens, channels), and the output has shape "
                f"{tuple(tensor.shape)}: give a function"
            )
        return tensor[:, index]

    return take


_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": _mean,
    "max": _max,
    "cls": _token(0, "cls"),
    "last": _token(-1, "last"),
}
