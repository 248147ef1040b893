"""Functions that run as one kernel on one device and as many on another: counted as what they compute, on all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from microtome.flops.elementwise import rms_norm
from microtome.flops.matmul import attention, attention_backward
from microtome.flops.registry import NOTHING, OpCost


class Costs(NamedTuple):
    """What a function and its backward do, from the arguments of the function and from what it returned."""

    forward: Callable[..., OpCost]
    backward: Callable[..., OpCost]


# -- attention ---------------------------------------------------------------------------------------------------------


class AttentionArguments(NamedTuple):
    """The arguments of `scaled_dot_product_attention`, by their names."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def shapes(self, out: Tensor) -> tuple[Any, Any, Any]:
        """Of queries, keys and values; there are as many queries as outputs, where some are broadcast."""
        return (*out.shape[:-1], self.query.shape[-1]), self.key.shape, self.value.shape


def _attention(*args: Any, out: Tensor, **kwargs: Any) -> OpCost:
    given = AttentionArguments(*args, **kwargs)
    scores = 6 + (given.attn_mask is not None) + (2 if given.dropout_p else 0)
    return attention(*given.shapes(out), scores=scores)


def _attention_backward(*args: Any, out: Tensor, **kwargs: Any) -> OpCost:
    """Through the softmax (4), the scale (1) and the dropout (1)."""
    given = AttentionArguments(*args, **kwargs)
    query, key, value, mask = given[:4]
    needed = query.requires_grad, key.requires_grad, value.requires_grad
    scores = 5 + (1 if given.dropout_p else 0)
    work = attention_backward(*given.shapes(out), needed, scores=scores)
    if mask is not None and mask.requires_grad and not (needed[0] or needed[1]):
        each = out.numel() // value.shape[-1] * key.shape[-2]
        work = work.plus(OpCost(each * value.shape[-1], each, scores * each))
    return work


# -- recurrent layers --------------------------------------------------------------------------------------------------


class _Layers(NamedTuple):
    """The parts of a recurrent layer that its cost depends on.

    Attributes:
        state: The first state; one row for each sequence.
        weights: Layer after layer and in each direction after direction: a matrix for the input, one for the state, of
            an LSTM that shrinks its state one for that; and biases.
    """

    kind: str
    x: Tensor
    state: Tensor
    weights: Sequence[Tensor]
    directions: int
    dropout: float

    @property
    def tokens(self) -> int:
        """How many steps are made, over all sequences."""
        return self.x.numel() // self.x.shape[-1]

    @property
    def starts(self) -> int:
        """How many sequences there are."""
        return self.state.numel() // self.state.shape[-1] // (self.state.shape[0] if self.state.dim() == 3 else 1)

    @property
    def matrices(self) -> list[list[Tensor]]:
        """The matrices of each layer and direction. Each is applied once to each token."""
        every = [weight for weight in self.weights if weight.dim() == 2]
        rows, columns = every[1].shape
        each = 3 if self.kind == "lstm" and columns * _GATES["lstm"] != rows else 2
        return [every[at : at + each] for at in range(0, len(every), each)]


#: Operations on each element of the state at each step. LSTM: 4 gates added up (4) and bounded (4), the cell (3), its
#: bound (1), the output (1). GRU: gates added up (3) and bounded (3), the reset (1), the mixing (3). RNN: 2.
_STATE = {"lstm": 13, "gru": 10, "rnn": 2}
_GATES = {"lstm": 4, "gru": 3, "rnn": 1}


_SEQUENCE = ("input", "hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional", "batch_first")
_PACKED = ("data", "batch_sizes", *_SEQUENCE[1:-1])


def _layers(kind: str, *args: Any, **kwargs: Any) -> _Layers:
    names = _PACKED if "data" in kwargs or (len(args) > 3 and not isinstance(args[3], bool)) else _SEQUENCE
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    state = given["hx"] if isinstance(given["hx"], Tensor) else given["hx"][0]
    both, dropout = 2 if given["bidirectional"] else 1, given["dropout"] if given["train"] else 0
    return _Layers(kind, given[names[0]], state, given["params"], both, dropout)


def _cell(
    kind: str,
    input: Tensor,  # noqa: A002  as torch calls it
    hx: Any,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> _Layers:
    weights = [weight for weight in (w_ih, w_hh, b_ih, b_hh) if weight is not None]
    return _Layers(kind, input, hx if isinstance(hx, Tensor) else hx[0], weights, 1, 0)


def _recurrent(layers: _Layers) -> OpCost:
    inputs = [matrices[0] for matrices in layers.matrices]
    every = [matrix for matrices in layers.matrices for matrix in matrices]
    other = sum(weight.numel() for weight in layers.weights if weight.dim() == 1)
    other += _STATE[layers.kind] * sum(matrix.shape[0] // _GATES[layers.kind] for matrix in inputs)
    if layers.dropout:
        other += 2 * sum(matrix.shape[1] for matrix in inputs[layers.directions :: layers.directions])
    work = OpCost(sum(matrix.numel() for matrix in every), sum(matrix.shape[0] for matrix in every), other)
    return OpCost(*(layers.tokens * count for count in work))


def _recurrent_backward(layers: _Layers) -> OpCost:
    """The gradient of each matrix, and of what it was applied to, each take what the forward took.

    But not that of an input or of a first state that asks for none. What else the forward does is counted twice.
    """
    tokens = layers.tokens
    macs = sums = 0
    for at, (to_input, *to_state) in enumerate(layers.matrices):
        asked = at >= layers.directions or layers.x.requires_grad
        applied = [tokens if asked else 0, tokens if layers.state.requires_grad else tokens - layers.starts, tokens]
        for matrix, times in zip((to_input, *to_state), applied, strict=False):
            macs += matrix.numel() * (times + (tokens if matrix.requires_grad else 0))
            sums += matrix.shape[1] * times + (matrix.numel() if matrix.requires_grad else 0)
    return OpCost(macs, sums, 2 * _recurrent(layers).other)


def _recurrent_costs(kind: str, read: Callable[..., _Layers]) -> Costs:
    return Costs(
        lambda *args, out, **kwargs: _recurrent(read(kind, *args, **kwargs)),
        lambda *args, out, **kwargs: _recurrent_backward(read(kind, *args, **kwargs)),
    )


# -- norms -------------------------------------------------------------------------------------------------------------

_RMS = Costs(
    lambda *args, out, **kwargs: OpCost(other=rms_norm(*args, **kwargs, out=out)),
    lambda *args, out, **kwargs: OpCost(other=2 * rms_norm(*args, **kwargs, out=out)),
)

#: Choosing elements costs nothing, in whichever way: by comparing, by scattering.
_FREE = Costs(lambda *_, out, **__: NOTHING, lambda *_, out, **__: NOTHING)

_ATTENTION = Costs(_attention, _attention_backward)

WHOLE: dict[Callable[..., Any], Costs] = {
    F.scaled_dot_product_attention: _ATTENTION,
    torch.ops.aten.scaled_dot_product_attention: _ATTENTION,
    torch.ops.aten.scaled_dot_product_attention.default: _ATTENTION,
    torch.lstm: _recurrent_costs("lstm", _layers),
    torch.gru: _recurrent_costs("gru", _layers),
    torch.rnn_tanh: _recurrent_costs("rnn", _layers),
    torch.rnn_relu: _recurrent_costs("rnn", _layers),
    torch.lstm_cell: _recurrent_costs("lstm", _cell),
    torch.gru_cell: _recurrent_costs("gru", _cell),
    torch.rnn_tanh_cell: _recurrent_costs("rnn", _cell),
    torch.rnn_relu_cell: _recurrent_costs("rnn", _cell),
    F.rms_norm: _RMS,
    torch.rms_norm: _RMS,
    F.one_hot: _FREE,
}
