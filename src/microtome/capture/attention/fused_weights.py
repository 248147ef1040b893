"""Recompute the weights of fused attention, which its kernel does not return, for selected heads and query rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, Literal

import torch
from torch import Tensor

from microtome.engine.composite_ops import suspend_tracing
from microtome.engine.torch_internals import safe_softmax
from microtome.errors import BadQuery, Unsupported
from microtome.flops.composite import AttentionArguments

Heads = Sequence[int] | None
Rows = Sequence[int] | Literal["cls", "last"] | None

#: Elements of scores computed at a time, so that intermediate results need little memory.
BLOCK = 1 << 24


@dataclass(frozen=True)
class WeightRange:
    """The selected heads and query rows of attention weights, as Python integers; None: all."""

    heads: Heads = None
    rows: Rows = None

    def __post_init__(self) -> None:
        heads, rows = _indices(self.heads), _indices(self.rows)
        if self.heads is not None and not heads:
            raise BadQuery(f"expected heads as a list of indices, such as [0, 3], got {self.heads!r}")
        is_name = isinstance(self.rows, str) and self.rows in ("cls", "last")
        if not (self.rows is None or is_name or rows):
            raise BadQuery(f"expected rows as a list of query indices, 'cls' (the first) or 'last', got {self.rows!r}")
        object.__setattr__(self, "heads", heads)
        object.__setattr__(self, "rows", self.rows if is_name else rows)

    def __str__(self) -> str:
        heads = "all" if self.heads is None else list(self.heads)
        rows = "all" if self.rows is None else self.rows if isinstance(self.rows, str) else list(self.rows)
        return f"heads {heads}, rows {rows}"

    def select(self, weights: Tensor) -> Tensor:
        """Return a copy of the selected part of weights (batch, heads, queries, keys)."""
        heads, rows = self.head_indices(weights.shape[1]), self.row_indices(weights.shape[2])
        selected = weights if heads is None else weights[:, heads]
        selected = selected if rows is None else selected[:, :, rows]
        return selected.clone() if selected is weights else selected

    def head_indices(self, count: int) -> list[int] | None:
        return None if self.heads is None else _normalize_indices(self.heads, count, "head")

    def row_indices(self, count: int) -> list[int] | None:
        if self.rows is None:
            return None
        if isinstance(self.rows, str):
            return [0 if self.rows == "cls" else count - 1] if count else []
        return _normalize_indices(self.rows, count, "query row")


def _indices(values: Any) -> tuple[int, ...] | None:
    """Return indices of Python, numpy or torch as integers; None if the values are not indices."""
    if values is None or isinstance(values, str) or not isinstance(values, Iterable):
        return None
    items = list(values)
    try:
        return None if any(isinstance(item, bool) for item in items) else tuple(map(index, items))
    except TypeError:
        return None


def _normalize_indices(indices: Sequence[int], count: int, kind: str) -> list[int]:
    invalid = [index for index in indices if not -count <= index < count]
    if invalid:
        raise BadQuery(f"expected the index of a {kind} from {-count} to {count - 1}, got {invalid[0]}")
    return [index % count for index in indices]


def fused_weights(arguments: AttentionArguments, output: Tensor, selected: WeightRange) -> Tensor:
    """Compute the weights (batch, heads, rows, keys) behind the output of a fused kernel, before dropout.

    Three-dimensional attention has one head, unless heads are grouped. A row whose keys are all masked is zero, as in
    torch. Weights are computed in blocks of rows, in float32 at least, and returned in the dtype of the output.
    """
    if arguments.query.is_nested:
        raise Unsupported("attention on nested tensors has no weights of one shape: pass padded inputs and a mask")
    mask: Any = arguments.attn_mask
    if hasattr(mask, "_materialize"):  # torch's causal biases are classes without values
        mask = mask._materialize(arguments.query.device)
    with suspend_tracing(output.device):
        scores = _Scores(arguments, mask, output, selected)
        weights: Tensor | None = None
        for start, block in scores.blocks():
            block = block.to(output.dtype)
            if weights is None:
                weights = block.new_empty((*block.shape[:2], len(scores.rows), *block.shape[3:]))
            weights[:, :, start : start + block.shape[2]] = block
        assert weights is not None
        return weights


class _Scores:
    """Queries, keys and mask of the selected heads, each (batch or 1, heads or 1, ·, ·)."""

    def __init__(
        self, arguments: AttentionArguments, mask: Tensor | None, output: Tensor, selected: WeightRange
    ) -> None:
        query, key = arguments.query, arguments.key
        self._lead = output.shape[:-2]
        if arguments.enable_gqa and len(self._lead) == 1:
            self._lead = torch.Size((1, *self._lead))
        *batch, count = self._lead if len(self._lead) > 1 else (*self._lead, 1)
        heads = selected.head_indices(count)
        self._heads = None if heads is None else torch.tensor(heads, device=query.device)
        self._shape = (torch.Size(batch).numel(), count if heads is None else len(heads), -1, -1)
        precise = torch.promote_types(output.dtype, torch.float32)
        self._query = self._select_heads(query.to(output.dtype)).to(precise)
        self._key = self._select_heads(key.to(output.dtype), count if arguments.enable_gqa else 0).to(precise)
        self._mask = None if mask is None else self._select_heads(torch.atleast_2d(mask))
        self._causal = arguments.is_causal
        self._scale = query.shape[-1] ** -0.5 if arguments.scale is None else arguments.scale
        rows = selected.row_indices(query.shape[-2])
        self.rows = torch.arange(query.shape[-2]) if rows is None else torch.tensor(rows, dtype=torch.long)

    def _select_heads(self, tensor: Tensor, count: int = 0) -> Tensor:
        """Select heads of a tensor; if `count` is larger than its number of heads, each serves a group of queries."""
        missing = max(len(self._lead) + 2 - tensor.dim(), 0)
        tensor = tensor.reshape(*(1,) * missing, *tensor.shape)
        if len(self._lead) < 2:
            tensor = tensor.reshape(tensor.shape[:-2].numel(), 1, *tensor.shape[-2:])
        elif len(self._lead) > 2:
            tensor = tensor.expand(*self._lead[:-1], *tensor.shape[-3:]).flatten(0, len(self._lead) - 2)
        group = count // tensor.shape[1] if count else 1
        if group > 1:
            heads = torch.arange(count, device=tensor.device) if self._heads is None else self._heads
            return tensor.index_select(1, heads.div(group, rounding_mode="floor"))
        return tensor if self._heads is None or tensor.shape[1] == 1 else tensor.index_select(1, self._heads)

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the weights of blocks of rows, with the position of the first row."""
        start = 0
        each = self._shape[0] * self._shape[1] * self._key.shape[-2]
        for rows in self.rows.split(max(1, BLOCK // max(1, each))):
            yield start, self._block(rows.to(self._query.device))
            start += len(rows)

    def _block(self, rows: Tensor) -> Tensor:
        query = self._query.index_select(-2, rows).expand(self._shape)
        scores = torch.matmul(query, self._key.transpose(-2, -1)).mul_(self._scale)
        if self._causal:  # aligned at the upper left, as in torch
            keys = torch.arange(scores.shape[-1], device=rows.device)
            scores.masked_fill_(keys > rows[:, None], -torch.inf)
        if self._mask is not None:
            mask = self._mask if self._mask.shape[-2] == 1 else self._mask.index_select(-2, rows)
            if mask.dtype == torch.bool:
                scores.masked_fill_(~mask, -torch.inf)
            else:
                scores.add_(mask)
        return safe_softmax(scores, -1)
