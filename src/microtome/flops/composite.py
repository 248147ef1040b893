"""Formulas of composite operators, which run as one kernel on one device and as several on another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from microtome.flops.elementwise import rms_norm
from microtome.flops.matmul import attention, attention_backward
from microtome.flops.registry import NOTHING, OpCost, evaluate, first, registered_formula


class CompositeFormulas(NamedTuple):
    """The formulas of a composite operator and of its backward, both of the operator's arguments and output."""

    forward: Callable[..., OpCost]
    backward: Callable[..., OpCost]


# -- attention ---------------------------------------------------------------------------------------------------------


class AttentionArguments(NamedTuple):
    """The arguments of `scaled_dot_product_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def shapes(self, out: Tensor) -> tuple[Any, Any, Any]:
        """Return the shapes of queries, keys and values; broadcast queries are as many as outputs."""
        return (*out.shape[:-1], self.query.shape[-1]), self.key.shape, self.value.shape


def _attention(*args: Any, out: Tensor, **kwargs: Any) -> OpCost:
    arguments = AttentionArguments(*args, **kwargs)
    scores = 6 + (arguments.attn_mask is not None) + (2 if arguments.dropout_p else 0)
    return attention(*arguments.shapes(out), scores=scores)


def _attention_backward(*args: Any, out: Tensor, **kwargs: Any) -> OpCost:
    """Count the backward through the softmax (4), the scale (1) and the dropout (1)."""
    arguments = AttentionArguments(*args, **kwargs)
    query, key, value, mask = arguments[:4]
    needs_grad = query.requires_grad, key.requires_grad, value.requires_grad
    scores = 5 + (1 if arguments.dropout_p else 0)
    cost = attention_backward(*arguments.shapes(out), needs_grad, scores=scores)
    if mask is not None and mask.requires_grad and not (needs_grad[0] or needs_grad[1]):
        elements = out.numel() // value.shape[-1] * key.shape[-2]
        cost = cost.plus(OpCost(elements * value.shape[-1], elements, scores * elements))
    return cost


# -- recurrent layers --------------------------------------------------------------------------------------------------


class _Recurrence(NamedTuple):
    """The parts of a recurrent layer that determine its cost.

    Attributes:
        state: The initial state; one row for each sequence.
        weights: For each layer and direction: a matrix for the input, one for the state, one for the projection of an
            LSTM with `proj_size`; and biases.
    """

    kind: str
    x: Tensor
    state: Tensor
    weights: Sequence[Tensor]
    directions: int
    dropout: float

    @property
    def steps(self) -> int:
        """The number of steps over all sequences."""
        return self.x.numel() // self.x.shape[-1]

    @property
    def sequences(self) -> int:
        """The number of sequences."""
        return self.state.numel() // self.state.shape[-1] // (self.state.shape[0] if self.state.dim() == 3 else 1)

    @property
    def matrices(self) -> list[list[Tensor]]:
        """The matrices of each layer and direction; each multiplies every token once."""
        every = [weight for weight in self.weights if weight.dim() == 2]
        rows, columns = every[1].shape
        each = 3 if self.kind == "lstm" and columns * _GATES["lstm"] != rows else 2
        return [every[index : index + each] for index in range(0, len(every), each)]


#: Operations on each element of the state at each step. LSTM: 4 gates added up (4) and bounded (4), the cell (3), its
#: bound (1), the output (1). GRU: gates added up (3) and bounded (3), the reset (1), the mixing (3). RNN: 2.
_STATE = {"lstm": 13, "gru": 10, "rnn": 2}
_GATES = {"lstm": 4, "gru": 3, "rnn": 1}

_SEQUENCE = ("input", "hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional", "batch_first")
_PACKED = ("data", "batch_sizes", *_SEQUENCE[1:-1])


def _parse_sequence(kind: str, *args: Any, **kwargs: Any) -> _Recurrence:
    names = _PACKED if "data" in kwargs or (len(args) > 3 and not isinstance(args[3], bool)) else _SEQUENCE
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    state = arguments["hx"] if isinstance(arguments["hx"], Tensor) else arguments["hx"][0]
    directions, dropout = 2 if arguments["bidirectional"] else 1, arguments["dropout"] if arguments["train"] else 0
    return _Recurrence(kind, arguments[names[0]], state, arguments["params"], directions, dropout)


def _parse_cell(
    kind: str,
    input: Tensor,  # noqa: A002  as torch calls it
    hx: Any,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> _Recurrence:
    weights = [weight for weight in (w_ih, w_hh, b_ih, b_hh) if weight is not None]
    return _Recurrence(kind, input, hx if isinstance(hx, Tensor) else hx[0], weights, 1, 0)


def _recurrent(layers: _Recurrence) -> OpCost:
    inputs = [matrices[0] for matrices in layers.matrices]
    every = [matrix for matrices in layers.matrices for matrix in matrices]
    other = sum(weight.numel() for weight in layers.weights if weight.dim() == 1)
    other += _STATE[layers.kind] * sum(matrix.shape[0] // _GATES[layers.kind] for matrix in inputs)
    if layers.dropout:
        other += 2 * sum(matrix.shape[1] for matrix in inputs[layers.directions :: layers.directions])
    step = OpCost(sum(matrix.numel() for matrix in every), sum(matrix.shape[0] for matrix in every), other)
    return OpCost(*(layers.steps * count for count in step))


def _recurrent_backward(layers: _Recurrence) -> OpCost:
    """Count the forward's products for the gradient of each matrix, and again for that of its operand.

    An input or initial state that requires no gradient is left out. Other operations are counted twice.
    """
    steps = layers.steps
    macs = sums = 0
    for index, matrices in enumerate(layers.matrices):
        input_steps = steps if index >= layers.directions or layers.x.requires_grad else 0
        state_steps = steps if layers.state.requires_grad else steps - layers.sequences
        for matrix, operand_steps in zip(matrices, (input_steps, state_steps, steps), strict=False):
            macs += matrix.numel() * (operand_steps + (steps if matrix.requires_grad else 0))
            sums += matrix.shape[1] * operand_steps + (matrix.numel() if matrix.requires_grad else 0)
    return OpCost(macs, sums, 2 * _recurrent(layers).other)


def _recurrent_formulas(kind: str, parse: Callable[..., _Recurrence]) -> CompositeFormulas:
    return CompositeFormulas(
        lambda *args, out, **kwargs: _recurrent(parse(kind, *args, **kwargs)),
        lambda *args, out, **kwargs: _recurrent_backward(parse(kind, *args, **kwargs)),
    )


# -- norms -------------------------------------------------------------------------------------------------------------

_RMS = CompositeFormulas(
    lambda *args, out, **kwargs: OpCost(other=rms_norm(*args, **kwargs, out=out)),
    lambda *args, out, **kwargs: OpCost(other=2 * rms_norm(*args, **kwargs, out=out)),
)

#: Selecting elements is free, whether by comparison or by scattering.
_FREE = CompositeFormulas(lambda *_, out, **__: NOTHING, lambda *_, out, **__: NOTHING)

_ATTENTION = CompositeFormulas(_attention, _attention_backward)

COMPOSITE_FORMULAS: dict[Callable[..., Any], CompositeFormulas] = {
    F.scaled_dot_product_attention: _ATTENTION,
    torch.ops.aten.scaled_dot_product_attention: _ATTENTION,
    torch.ops.aten.scaled_dot_product_attention.default: _ATTENTION,
    torch.lstm: _recurrent_formulas("lstm", _parse_sequence),
    torch.gru: _recurrent_formulas("gru", _parse_sequence),
    torch.rnn_tanh: _recurrent_formulas("rnn", _parse_sequence),
    torch.rnn_relu: _recurrent_formulas("rnn", _parse_sequence),
    torch.lstm_cell: _recurrent_formulas("lstm", _parse_cell),
    torch.gru_cell: _recurrent_formulas("gru", _parse_cell),
    torch.rnn_tanh_cell: _recurrent_formulas("rnn", _parse_cell),
    torch.rnn_relu_cell: _recurrent_formulas("rnn", _parse_cell),
    F.rms_norm: _RMS,
    torch.rms_norm: _RMS,
    F.one_hot: _FREE,
}


def composite_costs(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> tuple[OpCost | None, OpCost | None]:
    """Return the costs of a composite operator and of its backward; None where no formula is known."""
    formulas = COMPOSITE_FORMULAS[function]
    forward = evaluate(registered_formula(function) or formulas.forward, function, args, kwargs, first(out))
    return forward, evaluate(formulas.backward, function, args, kwargs, first(out))
