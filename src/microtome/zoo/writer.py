"""`tiny-writer`: a language model of characters, trained on this project's documentation by `tools/train_writer.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file
from torch import Tensor, nn

from microtome.errors import BadInputs, BadQuery
from microtome.zoo.models import MLP

#: The weights, as float16.
WEIGHTS = Path(__file__).with_name("tiny-writer.safetensors")
#: The vocabulary: the index of a character is its token.
CHARACTERS = "\n" + "".join(map(chr, range(ord(" "), ord("~") + 1)))


class KVCache:
    """The keys and values of each layer for the tokens so far, which every call of the model extends."""

    def __init__(self) -> None:
        self.length = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens; return those of all tokens."""
        if len(self.keys) == layer:
            self.keys.append(keys)
            self.values.append(values)
        else:
            self.keys[layer] = torch.cat([self.keys[layer], keys], dim=2)
            self.values[layer] = torch.cat([self.values[layer], values], dim=2)
        return self.keys[layer], self.values[layer]


class WriterAttention(nn.Module):
    """Causal self-attention over the tokens of a cache and the new ones, with linear biases in place of positions."""

    def __init__(self, index: int, width: int, heads: int) -> None:
        super().__init__()
        self.index = index
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, cache: KVCache | None) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        if cache is not None:
            k, v = cache.extend(self.index, k, v)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self._bias(length, k.shape[2], x.device))
        return self.proj(y.transpose(1, 2).reshape(batch, length, width))

    def _bias(self, length: int, total: int, device: torch.device) -> Tensor:
        """The bias of each head by the distance between query and key; -inf for keys after the query."""
        positions = torch.arange(total, device=device)
        distance = positions[total - length :, None] - positions
        slopes = 4.0 ** -torch.arange(1, self.heads + 1, device=device).view(1, -1, 1, 1)
        return (-slopes * distance).masked_fill(distance < 0, float("-inf"))


class WriterBlock(nn.Module):
    def __init__(self, index: int, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = WriterAttention(index, width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x: Tensor, cache: KVCache | None) -> Tensor:
        x = x + self.attn(self.norm1(x), cache)
        return x + self.mlp(self.norm2(x))


class Writer(nn.Module):
    """A causal language model of characters, with a KV cache and a loop that generates text."""

    def __init__(self, width: int = 48, depth: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(len(CHARACTERS), width)
        self.layers = nn.ModuleList(WriterBlock(index, width, heads) for index in range(depth))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, len(CHARACTERS), bias=False)
        self.lm_head.weight = self.tokens.weight

    def forward(self, input_ids: Tensor, cache: KVCache | None = None) -> dict[str, Any]:
        """Return the logits of each next token, and the cache, if there is one, with the new tokens in it."""
        x = self.tokens(input_ids)
        for layer in self.layers:
            x = layer(x, cache)
        logits = self.lm_head(self.norm(x))
        if cache is None:
            return {"logits": logits}
        cache.length += input_ids.shape[1]
        return {"logits": logits, "cache": cache}

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int = 50,
        *,
        do_sample: bool = False,
        temperature: float | None = None,
        top_k: int | None = None,
        streamer: Any = None,
    ) -> Tensor:
        """Continue a text; the arguments are those of the `generate` of transformers.

        Args:
            input_ids: The tokens of the prompt, (batch, length).
            do_sample: Draw tokens with torch's random numbers, instead of choosing the most probable ones.
            temperature: Divides the logits before a draw; None: 1.
            top_k: Draw among so many of the most probable tokens; None: among all.
            streamer: Receives the prompt and then each token by its method `put`; `end` is called after the last.

        Returns:
            The prompt and the new tokens, (batch, length).
        """
        if not do_sample and (temperature, top_k) != (None, None):
            raise BadQuery("expected do_sample=True with temperature= or top_k=: without it, no token is drawn")
        if temperature is None:
            temperature = 1.0 if do_sample else 0.0
        tokens, new, cache = input_ids, input_ids, KVCache()
        if streamer is not None:
            streamer.put(input_ids)
        for _ in range(max_new_tokens):
            output = self(input_ids=new, cache=cache)
            cache = output["cache"]
            new = _choose(output["logits"][:, -1], temperature, top_k)
            tokens = torch.cat([tokens, new], dim=1)
            if streamer is not None:
                streamer.put(new[:, 0])
        if streamer is not None:
            streamer.end()
        return tokens

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the embedding of the tokens, as models of transformers do."""
        return self.tokens

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        unknown = sorted(set(text) - set(CHARACTERS))
        if unknown:
            raise BadInputs(f"expected characters of ASCII, got {', '.join(map(repr, unknown))}")
        return [CHARACTERS.index(character) for character in text]

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens."""
        return "".join(CHARACTERS[token] for token in tokens)


def _choose(logits: Tensor, temperature: float, top_k: int | None) -> Tensor:
    """Choose a token for each row, the most probable one at a temperature of 0."""
    if not temperature:
        return logits.argmax(-1, keepdim=True)
    if top_k:
        lowest = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < lowest, float("-inf"))
    return torch.multinomial((logits / temperature).softmax(-1), 1)


def build_writer() -> Writer:
    """Build the model with its trained weights; on the meta device, without values."""
    model = Writer()
    if not model.tokens.weight.is_meta:
        model.load_state_dict({name: tensor.float() for name, tensor in load_file(WEIGHTS).items()}, strict=False)
    return model
