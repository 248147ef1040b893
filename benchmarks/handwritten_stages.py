"""Two stages of a llama written by hand, without microtome: the floor of what generation over two stages costs.

Each stage is a copy of the model with the same weights, in which the layers of the other one are replaced. Both run the
model's code between the layers, as stages of microtome do. Nothing is checked, recorded or described.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


class _Crossing(BaseException):
    """Ends the head, with what crosses: the hidden state and the rotary embeddings."""


class _EndOfHead(nn.Module):
    def forward(self, hidden: Tensor, *, position_embeddings: Any, **_: Any) -> None:
        raise _Crossing(hidden, position_embeddings)


class _Received(nn.Module):
    """Returns what the head computed in its place."""

    value: Any = None

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.value


class _LayerOfHead(nn.Module):
    """Gives the tail's cache the length that the layer gave it in the head; the last one returns the hidden state."""

    received: Tensor | None = None

    def __init__(self, index: int, shape: tuple[int, int]) -> None:
        super().__init__()
        self.index = index
        self.shape = shape  # of the keys, without batch and length

    def forward(self, hidden: Tensor, *, past_key_values: Any, **_: Any) -> Tensor:
        layer = past_key_values.layers[self.index]
        length = hidden.shape[1] + (layer.keys.shape[-2] if layer.is_initialized else 0)
        layer.keys = layer.values = torch.empty(1).expand(hidden.shape[0], self.shape[0], length, self.shape[1])
        layer.is_initialized = True
        return hidden if self.received is None else self.received


class HandwrittenStages:
    """Two stages, the first of which has half of the layers; called as the model."""

    def __init__(self, model: Any) -> None:
        config = model.config
        self._config, self._half = config, config.num_hidden_layers // 2
        self._head, self._tail = (_copy_without_weights(model) for _ in range(2))
        self._head.model.layers[self._half] = _EndOfHead()
        shape = config.num_key_value_heads, config.head_dim
        for index in range(self._half):
            self._tail.model.layers[index] = _LayerOfHead(index, shape)
        self._tail.model.embed_tokens = _Received()
        self._tail.model.rotary_emb = _Received()
        self._caches: list[Any] = []

    def __call__(self, input_ids: Tensor, past_key_values: Any = None) -> Any:
        if past_key_values is None:
            import transformers

            self._caches = [transformers.DynamicCache(config=self._config) for _ in range(2)]
        try:
            self._head(input_ids=input_ids, past_key_values=self._caches[0])
        except _Crossing as crossing:
            hidden, rotary = crossing.args
        tail = self._tail.model
        tail.embed_tokens.value, tail.rotary_emb.value = hidden, rotary
        tail.layers[self._half - 1].received = hidden
        return self._tail(input_ids=input_ids, past_key_values=self._caches[1])


def _copy_without_weights(model: nn.Module) -> Any:
    """A copy of a model that has the same parameters and buffers."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)
