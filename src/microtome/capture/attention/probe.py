"""Observe attention weights after the softmax and before dropout, however they are computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from microtome.capture.attention.fused_weights import WeightRange, fused_weights
from microtome.capture.attention.scores import Origins, Role, ScoreKind, role_of
from microtome.engine import Call, Probe
from microtome.engine.composite_ops import suspend_tracing
from microtome.engine.probes import AnyOp, Where
from microtome.engine.selectors import CallSelection
from microtome.engine.torch_internals import DisableTorchFunction
from microtome.flops.composite import AttentionArguments

#: The composite operators that a session with this probe must report as one operator.
ATTENTION = (
    F.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
)


class WeightSource(NamedTuple):
    """The attention that an `nn.Softmax` module computes.

    Attributes:
        address: The address of the attention.
        layer: The module that computes it, which knows the number of heads.
        is_selected: Whether the attention is captured.
    """

    address: str
    layer: nn.Module | None
    is_selected: bool


class AttentionProbe(Probe):
    """Passes the attention weights of each layer to `capture(address, weights)`, as (batch, heads, queries, keys).

    It observes `scaled_dot_product_attention`, if the session reports `ATTENTION` as composite operators: the fused
    kernel computes the output, and only the selected weights are recomputed. Otherwise, and in
    `nn.MultiheadAttention`, it observes the softmax over the last dimension of a batched matrix product.

    A layer is the innermost call around the product and the softmax. If a call computes several, those after the first
    are at `path/attention#1` and so on. Dimensions before the heads are flattened; without heads there is one.

    Args:
        capture: Called while the model runs, with a copy; its own operators are not observed.
        at: The calls whose attention, or that of calls inside them, is captured. None: all.
        weights: The heads and rows to capture.

    Attributes:
        addresses: The addresses of all attention, captured or not.
        fused_ops: Operators that compute attention without exposing its weights.
        sources: The attention computed by calls of `nn.Softmax`, by their address; None at other calls.
    """

    def __init__(
        self,
        capture: Callable[[str, Tensor], object],
        *,
        at: CallSelection | None = None,
        weights: WeightRange | None = None,
    ) -> None:
        self._capture = capture
        self._at = at
        self._selected = weights or WeightRange()
        self._origins = Origins()
        self._run: Call | None = None
        self._counts: dict[str, int] = {}
        self.addresses: dict[str, None] = {}
        self.fused_ops: dict[str, None] = {}
        self.sources: dict[str, WeightSource | None] = {}

    def op(self, where: Where, func: AnyOp, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        call = where.call
        if call is None or where.phase != "forward":
            return
        role = role_of(func)
        if role is Role.NONE:
            return
        with DisableTorchFunction():
            self._begin_run(call.stack[0])
            if func in ATTENTION:
                arguments = AttentionArguments(*args, **kwargs)
                self._add(call, call, lambda: fused_weights(arguments, output, self._selected))
            elif role is Role.FUSED:
                self.fused_ops[str(func)] = None
            elif role is Role.SOFTMAX:
                self._softmax(call, args, output)
            else:
                self._origins.propagate(role, call, args, output)

    def _begin_run(self, run: Call) -> None:
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
        layer = _innermost_common_call(origin.call, call)
        self._add(layer, call, lambda: self._select(output, layer))

    def _select(self, output: Tensor, layer: Call) -> Tensor:
        with suspend_tracing(output.device):
            return self._selected.select(split_heads(output, layer.module))

    def _add(self, layer: Call, call: Call, compute: Callable[[], Tensor]) -> None:
        """Register the attention of a layer, and capture its weights if they are selected.

        Args:
            call: The call inside the layer that computes the weights.
        """
        number = self._counts.get(layer.address, 0)
        self._counts[layer.address] = number + 1
        address = f"{layer.address}/attention#{number}" if number else layer.address
        self.addresses[address] = None
        is_selected = self._at is None or any(outer in self._at for outer in call.stack)
        source = WeightSource(address, layer.module, is_selected) if type(call.module) is nn.Softmax else None
        self.sources[call.address] = None if source is None or call.address in self.sources else source
        if is_selected:
            weights = compute()
            with suspend_tracing(weights.device):
                self._capture(address, weights)


def _innermost_common_call(product: Call | None, softmax: Call) -> Call:
    outer_calls = () if product is None else product.stack
    return next((call for call in reversed(softmax.stack) if any(call is outer for outer in outer_calls)), softmax)


def split_heads(weights: Tensor, module: nn.Module | None) -> Tensor:
    """Reshape weights to (batch, heads, queries, keys), with the module's number of heads."""
    if weights.dim() > 3:
        return weights.flatten(0, -4)
    heads = _head_count(module, weights.shape[0])
    return weights.unflatten(0, (weights.shape[0] // heads, heads))


def _head_count(module: nn.Module | None, batch: int) -> int:
    """Return the number of heads in the batch dimension, from the attribute names that attention modules use, or 1."""
    for name in ("num_heads", "heads", "num_attention_heads", "n_heads", "n_head"):
        heads = getattr(module, name, None)
        if isinstance(heads, int) and heads > 0 and batch % heads == 0:
            return heads
    return 1
