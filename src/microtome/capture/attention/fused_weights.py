"""The weights of fused attention, which its kernel does not give, for the heads and query rows that are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, Literal

import torch
from torch import Tensor

from microtome.engine.composite_ops import unseen
from microtome.engine.torch_internals import safe_softmax
from microtome.errors import BadQuery, Unsupported
from microtome.flops.fused import AttentionArguments

Heads = Sequence[int] | None
Rows = Sequence[int] | Literal["cls", "last"] | None

#: Of scores computed at a time, in elements: what is kept may be large, what is needed on the way is not.
BLOCK = 1 << 24


@dataclass(frozen=True)
class WeightRange:
    """Which heads and which query rows of the weights are wanted, as plain numbers; None: all."""

    heads: Heads = None
    rows: Rows = None

    def __post_init__(self) -> None:
        heads, rows = _indices(self.heads), _indices(self.rows)
        if self.heads is not None and not heads:
            raise BadQuery(f"heads are a list of indices, such as [0, 3], got {self.heads!r}")
        if not (self.rows is None or _is_word(self.rows) or rows):
            raise BadQuery(f"rows are a list of query indices, 'cls' (the first) or 'last', got {self.rows!r}")
        object.__setattr__(self, "heads", heads)
        object.__setattr__(self, "rows", self.rows if _is_word(self.rows) else rows)

    def __str__(self) -> str:
        heads = "all" if self.heads is None else list(self.heads)
        rows = "all" if self.rows is None else self.rows if isinstance(self.rows, str) else list(self.rows)
        return f"heads {heads}, rows {rows}"

    def of(self, weights: Tensor) -> Tensor:
        """The part of weights (batch, heads, i, j), in memory of its own."""
        heads, rows = self.head_indices(weights.shape[1]), self.row_indices(weights.shape[2])
        part = weights if heads is None else weights[:, heads]
        part = part if rows is None else part[:, :, rows]
        return part.clone() if part is weights else part

    def head_indices(self, count: int) -> list[int] | None:
        return None if self.heads is None else _within(self.heads, count, "head")

    def row_indices(self, count: int) -> list[int] | None:
        if self.rows is None:
            return None
        if isinstance(self.rows, str):
            return [0 if self.rows == "cls" else count - 1] if count else []
        return _within(self.rows, count, "query row")


def _is_word(rows: Any) -> bool:
    return isinstance(rows, str) and rows in ("cls", "last")


def _indices(given: Any) -> tuple[int, ...] | None:
    """The indices as plain numbers, also those of numpy or torch; None where they are none."""
    if given is None or isinstance(given, str) or not isinstance(given, Iterable):
        return None
    listed = list(given)
    try:
        return None if any(isinstance(one, bool) for one in listed) else tuple(map(index, listed))
    except TypeError:
        return None


def _within(indices: Sequence[int], count: int, what: str) -> list[int]:
    wrong = [one for one in indices if not -count <= one < count]
    if wrong:
        raise BadQuery(f"there is no {what} {wrong[0]}: this attention has {count}, counted from 0")
    return [one % count for one in indices]


def _mask(given: AttentionArguments) -> Tensor | None:
    """The mask as a tensor of values: torch's own causal biases are classes that have none."""
    mask: Any = given.attn_mask
    return mask._materialize(given.query.device) if hasattr(mask, "_materialize") else mask


def fused_weights(given: AttentionArguments, output: Tensor, part: WeightRange) -> Tensor:
    """The weights (batch, heads, rows, keys) that the fused kernel used to make its output, before dropout.

    Attention of three dimensions has one head, but where heads are grouped. A row whose keys are all masked is zero, as
    in torch. They are computed block by block of rows in float32 at least, and are of the output's dtype.
    """
    if given.query.is_nested:
        raise Unsupported("attention on nested tensors has no weights of one shape: give padded inputs and a mask")
    mask = _mask(given)
    with unseen(output.device):
        scores = _Scores(given, mask, output, part)
        made: Tensor | None = None
        for start, block in scores.blocks():
            block = block.to(output.dtype)
            if made is None:
                made = block.new_empty((*block.shape[:2], len(scores.rows), *block.shape[3:]))
            made[:, :, start : start + block.shape[2]] = block
        assert made is not None
        return made


class _Scores:
    """Queries, keys and mask of the heads wanted, each (batch, heads, ·, ·), where 1 stands for any batch or head."""

    def __init__(self, given: AttentionArguments, mask: Tensor | None, output: Tensor, part: WeightRange) -> None:
        query, key = given.query, given.key
        self._lead = output.shape[:-2]
        if given.enable_gqa and len(self._lead) == 1:
            self._lead = torch.Size((1, *self._lead))
        *batch, count = self._lead if len(self._lead) > 1 else (*self._lead, 1)
        heads = part.head_indices(count)
        self._heads = None if heads is None else torch.tensor(heads, device=query.device)
        self._shape = (torch.Size(batch).numel(), count if heads is None else len(heads), -1, -1)
        precise = torch.promote_types(output.dtype, torch.float32)
        self._query = self._chosen(query.to(output.dtype)).to(precise)
        self._key = self._chosen(key.to(output.dtype), count if given.enable_gqa else 0).to(precise)
        self._mask = None if mask is None else self._chosen(torch.atleast_2d(mask))
        self._causal = given.is_causal
        self._scale = query.shape[-1] ** -0.5 if given.scale is None else given.scale
        rows = part.row_indices(query.shape[-2])
        self.rows = torch.arange(query.shape[-2]) if rows is None else torch.tensor(rows, dtype=torch.long)

    def _chosen(self, tensor: Tensor, count: int = 0) -> Tensor:
        """The heads wanted of a tensor, of which each serves a group where there are to be more."""
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
        """The weights of some rows after the other, with the position of the first."""
        start = 0
        each = self._shape[0] * self._shape[1] * self._key.shape[-2]
        for rows in self.rows.split(max(1, BLOCK // max(1, each))):
            yield start, self._block(rows.to(self._query.device))
            start += len(rows)

    def _block(self, rows: Tensor) -> Tensor:
        query = self._query.index_select(-2, rows).expand(self._shape)
        scores = torch.matmul(query, self._key.transpose(-2, -1)).mul_(self._scale)
        if self._causal:  # aligned at the upper left, as torch does
            keys = torch.arange(scores.shape[-1], device=rows.device)
            scores.masked_fill_(keys > rows[:, None], -torch.inf)
        if self._mask is not None:
            mask = self._mask if self._mask.shape[-2] == 1 else self._mask.index_select(-2, rows)
            if mask.dtype == torch.bool:
                scores.masked_fill_(~mask, -torch.inf)
            else:
                scores.add_(mask)
        return safe_softmax(scores, -1)
