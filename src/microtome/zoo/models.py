"""The built-in models, each the smallest with the characteristic traits of its family."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """Two convolutions with a skip connection, an in-place ReLU called twice, and a functional addition."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return self.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, width: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        self.layer1 = nn.Sequential(ResidualBlock(width, width, 1), ResidualBlock(width, width, 1))
        self.layer2 = nn.Sequential(ResidualBlock(width, 2 * width, 2), ResidualBlock(2 * width, 2 * width, 1))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.stem(x)))
        return self.fc(self.pool(x).flatten(1))


class SelfAttention(nn.Module):
    """Multi-head self-attention through the fused `scaled_dot_product_attention`."""

    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.proj(y.transpose(1, 2).reshape(batch, length, width))


class MLP(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class TransformerBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = SelfAttention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(
        self, size: int = 32, patch: int = 8, width: int = 32, depth: int = 3, heads: int = 4, classes: int = 10
    ) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, width, patch, patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2 + 1, width))
        self.blocks = nn.ModuleList(TransformerBlock(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class DecoderBlock(nn.Module):
    """A transformer block whose arguments are keyword-only, as in many language models."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = SelfAttention(width, heads, causal=True)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, *, hidden_states: Tensor, scale: float = 1.0) -> tuple[Tensor, None]:
        hidden_states = hidden_states + scale * self.attn(x=self.norm1(hidden_states))
        return hidden_states + scale * self.mlp(self.norm2(hidden_states)), None


class Decoder(nn.Module):
    """A causal language model with keyword calls throughout, a dict as output, and tied input and output embeddings."""

    def __init__(
        self, vocabulary: int = 64, width: int = 32, depth: int = 2, heads: int = 4, context: int = 32
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.layers = nn.ModuleList(DecoderBlock(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.tokens.weight

    def forward(self, *, input_ids: Tensor) -> dict[str, Tensor]:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = self.tokens(input=input_ids) + self.positions(input=positions)
        for layer in self.layers:
            hidden, _ = layer(hidden_states=hidden, scale=0.5)
        return {"logits": self.lm_head(input=self.norm(hidden)), "hidden_states": hidden}


class LSTMClassifier(nn.Module):
    """Embedding, a bidirectional two-layer LSTM with a nested tuple as output, a linear head on the last states."""

    def __init__(self, vocabulary: int = 64, width: int = 16, classes: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(2 * width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        _, (hidden, _) = self.lstm(self.embedding(tokens))
        return self.fc(torch.cat([hidden[-2], hidden[-1]], dim=1))


class DoubleConv(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU())


class UNet(nn.Module):
    """An encoder and a decoder with long skip connections."""

    def __init__(self, width: int = 8, classes: int = 2) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(2)
        self.down = nn.ModuleList([DoubleConv(3, width), DoubleConv(width, 2 * width)])
        self.middle = DoubleConv(2 * width, 4 * width)
        self.up = nn.ModuleDict(
            {
                "deep": nn.ConvTranspose2d(4 * width, 2 * width, 2, 2),
                "shallow": nn.ConvTranspose2d(2 * width, width, 2, 2),
            }
        )
        self.merge = nn.ModuleDict({"deep": DoubleConv(4 * width, 2 * width), "shallow": DoubleConv(2 * width, width)})
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        shallow = self.down[0](x)
        deep = self.down[1](self.pool(shallow))
        x = self.middle(self.pool(deep))
        for name, skip in (("deep", deep), ("shallow", shallow)):
            x = self.merge[name](torch.cat([self.up[name](x), skip], dim=1))
        return self.head(x)
