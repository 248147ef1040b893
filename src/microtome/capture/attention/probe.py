"""A probe that sees attention weights after the softmax and before dropout, however they are computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from microtome.capture.attention.fused_weights import Heads, Rows, WeightRange, fused_weights
from microtome.capture.attention.scores import Origins, Role, ScoreKind, role_of
from microtome.engine import Call, Probe
from microtome.engine.call_selection import CallSelection
from microtome.engine.composite_ops import plain, unseen
from microtome.engine.probes import AnyOp, Where
from microtome.flops.fused import AttentionArguments

#: What a session with this probe is to show whole.
ATTENTION = (
    F.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
)


class WeightSource(NamedTuple):
    """Attention that comes out of a module.

    Attributes:
        address: Of the attention.
        layer: The module that computes it, which says how many heads there are.
        wanted: Whether it is to be kept.
    """

    address: str
    layer: nn.Module | None
    wanted: bool


class AttentionProbe(Probe):
    """Gives the attention weights of each layer to `keep(address, weights)`, as (batch, heads, queries, keys).

    It sees `scaled_dot_product_attention`, if the session shows `ATTENTION` whole: the output is left to the fused
    kernel, and of the weights no more is computed than is wanted. Else, and in `nn.MultiheadAttention`, it sees the
    softmax over the last dimension of what comes from a product of batched matrices.

    A layer is the innermost call around the product and the softmax. Where a call has several, those after the first
    are at `path/attention#1` and so on. All dimensions before the heads are one; what has none is of one head.

    Args:
        keep: Called while the model runs, with a tensor of its own; no session sees what it computes.
        at: The calls whose attention is wanted, with all that is inside them. None: all.
        heads: The heads that are wanted, by index.
        rows: The queries that are wanted: their indices, "cls" for the first, "last" for the last.

    Attributes:
        seen: Where attention was computed, wanted or not.
        hidden: The operators that compute attention inside themselves, of which nothing is known.
        sources: What came out of calls of `nn.Softmax`, by their addresses; None where it came out of something else.
    """

    def __init__(
        self,
        keep: Callable[[str, Tensor], object],
        *,
        at: CallSelection | None = None,
        heads: Heads = None,
        rows: Rows = None,
    ) -> None:
        self._keep = keep
        self._at = at
        self._part = WeightRange(heads, rows)
        self._origins = Origins()
        self._run: Call | None = None
        self._counts: dict[str, int] = {}
        self.seen: dict[str, None] = {}
        self.hidden: dict[str, None] = {}
        self.sources: dict[str, WeightSource | None] = {}

    def op(self, where: Where, func: AnyOp, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        call = where.call
        if call is None or where.phase != "forward":
            return
        role = role_of(func)
        if role is Role.NONE:
            return
        with plain():
            self._begin(call.stack[0])
            if func in ATTENTION:
                given = AttentionArguments(*args, **kwargs)
                self._take(call, call, lambda: fused_weights(given, output, self._part))
            elif role is Role.FUSED:
                self.hidden[str(func)] = None
            elif role is Role.SOFTMAX:
                self._softmax(call, args, output)
            else:
                self._origins.follow(role, call, args, output)

    def _begin(self, run: Call) -> None:
        if run is not self._run:
            self._run = run
            self._counts.clear()
            self._origins.begin(run.module)

    def _softmax(self, call: Call, args: tuple[Any, ...], output: Tensor) -> None:
        scores, dim = args[:2]
        origin = self._origins.of(scores)
        if origin is None or dim % max(1, scores.dim()) != scores.dim() - 1 or not origin.are_scores(scores.shape):
            return
        self._origins.mark(output, origin._replace(kind=ScoreKind.WEIGHTS))
        layer = _around(origin.call, call)
        self._take(layer, call, lambda: self._of(output, layer))

    def _of(self, output: Tensor, layer: Call) -> Tensor:
        with unseen(output.device):
            return self._part.of(by_heads(output, layer.module))

    def _take(self, layer: Call, call: Call, compute: Callable[[], Tensor]) -> None:
        """Give the weights of a layer, which were computed in a call inside it, to whoever wants them."""
        number = self._counts.get(layer.address, 0)
        self._counts[layer.address] = number + 1
        address = f"{layer.address}/attention#{number}" if number else layer.address
        self.seen[address] = None
        wanted = self._at is None or any(outer in self._at for outer in call.stack)
        source = WeightSource(address, layer.module, wanted) if type(call.module) is nn.Softmax else None
        self.sources[call.address] = None if source is None or call.address in self.sources else source
        if wanted:
            weights = compute()
            with unseen(weights.device):
                self._keep(address, weights)


def _around(product: Call | None, softmax: Call) -> Call:
    """The innermost call that contains both."""
    inside = () if product is None else product.stack
    return next((call for call in reversed(softmax.stack) if any(call is outer for outer in inside)), softmax)


def by_heads(weights: Tensor, module: nn.Module | None) -> Tensor:
    """Weights as (batch, heads, queries, keys), with the heads that the module says it has."""
    if weights.dim() > 3:
        return weights.flatten(0, -4)
    heads = _heads_of(module, weights.shape[0])
    return weights.unflatten(0, (weights.shape[0] // heads, heads))


def _heads_of(module: nn.Module | None, batch: int) -> int:
    """How many heads lie in the batch, by what attention modules call that; one where they do not say."""
    for name in ("num_heads", "heads", "num_attention_heads", "n_heads", "n_head"):
        heads = getattr(module, name, None)
        if isinstance(heads, int) and heads > 0 and batch % heads == 0:
            return heads
    return 1
