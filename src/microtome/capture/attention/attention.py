"""The attention of any model: what each layer's queries look at."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, Literal, SupportsFloat, overload

import torch
from torch import Tensor, nn

from microtome.addresses import Addresses, no_path
from microtome.capture.attention.fused_weights import Heads, Rows, WeightRange
from microtome.capture.attention.probe import ATTENTION, AttentionProbe
from microtome.engine import Selector, Session
from microtome.engine.call_selection import CallSelection, other_names
from microtome.engine.selectors import check_model
from microtome.errors import BadQuery, NoMatch
from microtome.files.reading import File
from microtome.inputs import Inputs, device_of
from microtome.results.rendering import render
from microtome.units import shape

__all__ = ["ATTENTION", "Attention", "AttentionProbe", "attention", "rollout"]


def attention(
    model: nn.Module,
    inputs: Any,
    *,
    layers: Selector | None = None,
    heads: Heads = None,
    rows: Rows = None,
    device: str | torch.device | None = None,
) -> Attention:
    """Run the model once and keep its attention weights, after the softmax and before dropout.

    Fused attention stays fused: beside it, the weights that are asked for are computed. The model runs as it is, in its
    training mode and in the gradient mode that is set; the weights are cut from the graph.

    Args:
        inputs: A tensor, a tuple, a dict, an `Inputs`, or a text such as `"1x3x224x224"`.
        layers: The modules whose attention is wanted, with all that is inside them, as a selector. None: all.
        heads: The heads that are wanted, by index. None: all.
        rows: The queries that are wanted: their indices, "cls" for the first, "last" for the last. None: all.
        device: Where the weights are moved as they are made.

    >>> import torch
    >>> from torch import nn
    >>> net = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> found = attention(net, torch.randn(1, 5, 8))
    >>> found
    <Attention of 1 layer, 1x2x5x5, float32>
    >>> found.layers, found["self_attn"].sum(-1).allclose(torch.ones(()))
    (('self_attn',), True)
    """
    wanted = None if layers is None else CallSelection(model, layers)
    part = WeightRange(heads, rows)
    given = Inputs.of(inputs, device=device_of(check_model(model)))
    kept: dict[str, Tensor] = {}

    def keep(address: str, weights: Tensor) -> None:
        kept[address] = weights if device is None else weights.to(device)

    probe = AttentionProbe(keep, at=wanted, heads=part.heads, rows=part.rows)
    with Session(model, [probe], whole=ATTENTION, other_threads="unseen"):
        given.run(model)
    if not kept:
        raise nothing_seen(model, probe)
    spelled = tuple(Addresses(kept).spelled)
    return Attention(spelled, tuple(kept.values()), part.heads, part.rows, other_names(model))


def nothing_seen(model: nn.Module, probe: AttentionProbe) -> NoMatch:
    """The error for a run in which no attention that was wanted was seen."""
    name = type(model).__name__
    if probe.seen:
        return NoMatch(f"the selected layers of the {name} computed no attention. It was seen at: {_some(probe.seen)}")
    if probe.hidden:
        return NoMatch(f"the {name} computes attention in kernels that hide its weights: {_some(probe.hidden)}. {_USE}")
    scripted = [path for path, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    if scripted:
        return NoMatch(f"no attention was seen in the {name}: {_some(scripted)} are scripted, which hides what they do")
    return NoMatch(
        f"no attention was seen in the {name}: neither scaled_dot_product_attention nor a softmax over a product of "
        "batched matrices ran. Either it has none, or it computes it where microtome cannot look: in compiled code, or "
        f"in a fused kernel of its own such as flash_attn. {_USE}"
    )


_USE = "Where it has a choice of implementation, take 'sdpa' or 'eager'"


def _some(names: Any) -> str:
    listed = [repr(name) for name in names]
    return ", ".join(listed[:8]) + (", …" if len(listed) > 8 else "")


@dataclass(frozen=True, eq=False, repr=False)
class Attention(Sequence[Tensor]):
    """The attention weights of a run, layer by layer, each (batch, heads, queries, keys).

    Attributes:
        layers: The addresses of the calls that computed them, in the order in which they did.
        by_layer: The weights of each.
        heads: The heads that were asked for; None: all.
        rows: The query rows that were asked for; None: all.
        others: More names of shared modules, by which their layers can be asked for too.
    """

    layers: tuple[str, ...]
    by_layer: tuple[Tensor, ...]
    heads: Heads = None
    rows: Rows = None
    others: Mapping[str, str] = field(default_factory=dict)

    @property
    def weights(self) -> Tensor:
        """All weights as one tensor (batch, layers, heads, queries, keys), where the layers' shapes agree."""
        if not self.layers:
            raise BadQuery("there are no layers, so there are no weights")
        if len(set(map(_kind, self.by_layer))) > 1:
            shapes = " and ".join(sorted({shape(weights.shape) for weights in self.by_layer})[:3])
            raise BadQuery(f"the layers' weights are not of one shape ({shapes}): take the list, `by_layer`")
        return torch.stack(self.by_layer, dim=1)

    def __len__(self) -> int:
        return len(self.layers)

    @overload
    def __getitem__(self, at: int | str) -> Tensor: ...
    @overload
    def __getitem__(self, at: slice) -> Attention: ...
    def __getitem__(self, at: int | str | slice) -> Tensor | Attention:
        """The weights of a layer, by its address or position; of a slice of the layers, what there is of them."""
        if isinstance(at, slice):
            return Attention(self.layers[at], self.by_layer[at], self.heads, self.rows, self.others)
        return self.by_layer[self._position(at) if isinstance(at, str) else _index(at)]

    def _position(self, name: str) -> int:
        address = Addresses(self.layers, self.others).one(name)
        if address is None:
            raise no_path(name, self.layers)
        return self.layers.index(address)

    def rollout(
        self, *, residual: float = 0.5, heads: Literal["mean", "max", "min"] = "mean", discard: float = 0.0
    ) -> Tensor:
        """See `microtome.rollout`."""
        return rollout(self, residual=residual, heads=heads, discard=discard)

    def plot(self, image: Any = None, **options: Any) -> Any:
        """A picture that notebooks show: what `to_png` writes, with its options."""
        return render("attention.plot", self, image, **options)

    def to_png(
        self,
        file: File,
        image: Any = None,
        *,
        layer: int | str = -1,
        head: int | Literal["all"] | None = None,
        row: int = 0,
        grid: tuple[int, int] | None = None,
        sample: int = 0,
        alpha: float = 0.6,
    ) -> None:
        """Write what one query looks at as a picture, laid over the image if one is given.

        Args:
            image: (3, H, W), (H, W, 3) or (H, W), or a batch of the first; whole numbers from 0 to 255, or any others,
                which are scaled; or an image of PIL.
            layer: Whose attention, by address or position.
            head: Which of the heads that were kept; `"all"`: each, side by side; None: their mean.
            row: Which of the query rows that were kept: the first is the class token's, if the model has one.
            grid: How many patches the image is high and wide. None: the last keys that make a square.
            sample: Which of the batch.
            alpha: How opaque the map is over the image.
        """
        self.plot(image, layer=layer, head=head, row=row, grid=grid, sample=sample, alpha=alpha).save(file)

    def __repr__(self) -> str:
        kinds = dict.fromkeys(map(_kind, self.by_layer))
        text = "; ".join(f"{shape(size)}, {str(dtype).removeprefix('torch.')}" for size, dtype, _ in list(kinds)[:3])
        count = f"{len(self)} layer{'' if len(self) == 1 else 's'}"
        return f"<Attention of {count}{', ' if text else ''}{text}{'; …' if len(kinds) > 3 else ''}>"


def _index(at: Any) -> int:
    try:
        return index(at)
    except TypeError as error:
        raise BadQuery(f"a layer is named by its address or its position, got {reprlib.repr(at)}") from error


def _kind(weights: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return weights.shape, weights.dtype, weights.device


def rollout(
    attention: Attention,
    *,
    residual: float = 0.5,
    heads: Literal["mean", "max", "min"] = "mean",
    discard: float = 0.0,
) -> Tensor:
    """How much of each input token reaches each output token (batch, i, j), by attention rollout.

    The heads of each layer are made one, the skip connection is added as identity, rows are made to sum to 1, and the
    layers are multiplied in their order (Abnar and Zuidema, "Quantifying Attention Flow in Transformers", 2020).

    Args:
        residual: The part that the skip connections carry, from 0 to 1.
        heads: How the heads are made one.
        discard: The part of each layer's weights, the smallest, that is set to zero, from 0 to 1.

    >>> import torch
    >>> half = torch.tensor([[[[0.0, 1.0], [0.0, 1.0]]]])
    >>> rollout(Attention(("a", "b"), (half, half)))
    tensor([[[0.2500, 0.7500],
             [0.0000, 1.0000]]])
    """
    if not isinstance(attention, Attention):
        raise BadQuery(f"a rollout is of what mt.attention returned, got a {type(attention).__name__}")
    for name, value in (("residual", residual), ("discard", discard)):
        if not isinstance(value, SupportsFloat) or not 0 <= value <= 1:
            raise BadQuery(f"{name} is a part from 0 to 1, got {value!r}")
    if heads not in ("mean", "max", "min"):
        raise BadQuery(f"heads are made one by 'mean', 'max' or 'min', got {heads!r}")
    _check_square(attention)
    flow: Tensor | None = None
    for weights in attention:
        mixed = _one_layer(weights, residual, heads, discard)
        flow = mixed if flow is None else mixed @ flow
    assert flow is not None
    return flow


def _check_square(attention: Attention) -> None:
    if attention.rows is not None:
        raise BadQuery(f"a rollout needs all query rows, and this attention has {attention.rows!r}: leave out `rows`")
    shapes = {(weights.shape[0], *weights.shape[2:]) for weights in attention}
    if len(shapes) != 1 or any(len(size) != 3 or size[1] != size[2] for size in shapes):
        text = ", ".join(sorted({shape(weights.shape) for weights in attention})) or "none"
        raise BadQuery(
            f"a rollout needs layers in which the same tokens look at each other, and these are of {text}: choose such "
            "with `layers` (of an encoder and decoder, only the encoder's; not windows)"
        )


def _one_layer(weights: Tensor, residual: float, heads: str, discard: float) -> Tensor:
    precise = weights.to(torch.promote_types(weights.dtype, torch.float32))
    fused = precise.mean(1) if heads == "mean" else precise.amax(1) if heads == "max" else precise.amin(1)
    if discard:
        flat = fused.flatten(1)
        least = flat.topk(int(flat.shape[1] * discard), largest=False).indices
        fused = flat.scatter(1, least, 0).view_as(fused)
    identity = torch.eye(fused.shape[-1], dtype=fused.dtype, device=fused.device)
    mixed = (1 - residual) * fused + residual * identity
    return mixed / mixed.sum(-1, keepdim=True).clamp_min(torch.finfo(mixed.dtype).tiny)
