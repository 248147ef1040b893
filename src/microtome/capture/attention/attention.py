"""Capture the attention weights of a model, and compute rollouts of them."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import index
from typing import Any, Literal, SupportsFloat, overload

import torch
from torch import Tensor, nn

from microtome.addresses import Addresses, not_captured
from microtome.capture.attention.fused_weights import Heads, Rows, WeightRange
from microtome.capture.attention.probe import ATTENTION, AttentionProbe
from microtome.capture.retention import check_device
from microtome.engine import Selector, Session
from microtome.engine.pytree import tensors_in
from microtome.engine.selectors import CallSelection, check_model, module_paths, path_aliases
from microtome.errors import BadQuery, NoMatch
from microtome.files.reading import File
from microtome.inputs import Inputs
from microtome.results.base import render
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
    """Run the model once and return its attention weights, after the softmax and before dropout.

    Fused attention stays fused: the selected weights are computed in addition. The model runs in its own training mode
    and in the current gradient mode; the weights are detached.

    Args:
        inputs: A tensor, a tuple, a dict, an `Inputs`, or a shape such as `"1x3x224x224"`.
        layers: A selector of modules whose attention, or that of modules inside them, is captured. None: all.
        heads: The indices of the heads. None: all.
        rows: The queries: their indices, "cls" for the first, "last" for the last. None: all.
        device: Move the weights to this device as they are captured.

    >>> import torch
    >>> from torch import nn
    >>> net = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> found = attention(net, torch.randn(1, 5, 8))
    >>> found
    <Attention of 1 layer, 1x2x5x5, float32>
    >>> found.layers, found["self_attn"].sum(-1).allclose(torch.ones(()))
    (('self_attn',), True)
    """
    calls = None if layers is None else CallSelection(model, layers)
    selected = WeightRange(heads, rows)
    check_device(device)
    run = Inputs.of(inputs, check_model(model))
    captured: dict[str, Tensor] = {}

    def capture(address: str, weights: Tensor) -> None:
        captured[address] = weights if device is None else weights.to(device)

    probe = AttentionProbe(capture, at=calls, weights=selected)
    with Session(model, [probe], composite=ATTENTION, other_threads="ignore"):
        run.run(model)
    if not captured:
        raise no_attention_error(model, probe)
    addresses = tuple(Addresses(captured).names)
    return Attention(
        addresses,
        tuple(captured.values()),
        selected.heads,
        selected.rows,
        path_aliases(model),
        of_image=any(map(is_image, tensors_in((run.args, run.kwargs)))),
        modules=module_paths(model),
    )


def is_image(tensor: Tensor) -> bool:
    """Whether an input is a batch of images: (batch, channels, height, width)."""
    return tensor.dim() == 4 and tensor.is_floating_point()


def no_attention_error(model: nn.Module, probe: AttentionProbe) -> NoMatch:
    """Return the error for a run in which no selected layer computed attention."""
    name = type(model).__name__
    if probe.addresses:
        return NoMatch(
            f"the selected layers of the {name} computed no attention; these did: "
            f"{_join_some(Addresses(probe.addresses).names)}"
        )
    if probe.fused_ops:
        ops = _join_some(probe.fused_ops)
        return NoMatch(f"the {name} computes attention in kernels that do not expose its weights: {ops}. {_HINT}")
    scripted = [path for path, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    if scripted:
        return NoMatch(f"no attention found in the {name}: {_join_some(scripted)} are scripted, which hides operators")
    return NoMatch(
        f"no attention found in the {name}: neither scaled_dot_product_attention nor a softmax over a batched matrix "
        "product ran. Either it has none, or it computes it where microtome cannot observe it: in compiled code, or in "
        f"a custom fused kernel such as flash_attn. {_HINT}"
    )


_HINT = "If the model offers a choice of attention implementation, use 'sdpa' or 'eager'"


def _join_some(names: Any) -> str:
    texts = [repr(name) for name in names]
    return ", ".join(texts[:8]) + (", …" if len(texts) > 8 else "")


@dataclass(frozen=True, eq=False, repr=False)
class Attention(Sequence[Tensor]):
    """The attention weights of a run, layer by layer, each (batch, heads, queries, keys).

    Attributes:
        layers: The addresses of the calls that computed them, in execution order.
        by_layer: The weights of each.
        heads: The captured heads; None: all.
        rows: The captured query rows; None: all.
        others: Further names of shared modules, which can be used as addresses too.
        modules: The paths of all modules of the model.
        of_image: Whether the tokens may be the patches of an image, since the model took one.
    """

    layers: tuple[str, ...]
    by_layer: tuple[Tensor, ...]
    heads: Heads = None
    rows: Rows = None
    others: Mapping[str, str] = field(default_factory=dict)
    of_image: bool = True
    modules: frozenset[str] = frozenset()

    @property
    def weights(self) -> Tensor:
        """All weights as one tensor (batch, layers, heads, queries, keys), if the layers have one shape."""
        if not self.layers:
            raise BadQuery("expected at least one layer, got none")
        if len(set(map(_properties, self.by_layer))) > 1:
            shapes = " and ".join(sorted({shape(weights.shape) for weights in self.by_layer})[:3])
            raise BadQuery(f"expected layers with weights of one shape, got {shapes}: use the list, `by_layer`")
        return torch.stack(self.by_layer, dim=1)

    def __len__(self) -> int:
        return len(self.layers)

    @overload
    def __getitem__(self, at: int | str) -> Tensor: ...
    @overload
    def __getitem__(self, at: slice) -> Attention: ...
    def __getitem__(self, at: int | str | slice) -> Tensor | Attention:
        """Return the weights of a layer, or the attention of a slice of layers.

        Args:
            at: The address of the layer, or of a module with one layer inside, such as a block; its position; a slice.
        """
        if isinstance(at, slice):
            return replace(self, layers=self.layers[at], by_layer=self.by_layer[at])
        return self.by_layer[self._position(at) if isinstance(at, str) else _index(at)]

    def _position(self, name: str) -> int:
        address = Addresses(self.layers, self.others).resolve(name)
        if address is not None:
            return self.layers.index(address)
        path = self.others.get(name, name)
        inside = [layer for layer in self.layers if layer.startswith(f"{path}.")]
        if len(inside) > 1:
            raise NoMatch(f"{name!r} has {len(inside)} layers of attention: say which of {_join_some(inside)}")
        if not inside:
            raise not_captured(name, self.layers, self.modules, "add it to layers, if it computes attention")
        return self.layers.index(inside[0])

    def rollout(
        self, *, residual: float = 0.5, heads: Literal["mean", "max", "min"] = "mean", discard: float = 0.0
    ) -> Tensor:
        """Compute the attention rollout: see `microtome.rollout`."""
        return rollout(self, residual=residual, heads=heads, discard=discard)

    def plot(
        self,
        image: Any = None,
        *,
        layer: int | str = -1,
        head: int | Literal["all"] | None = None,
        row: int | None = None,
        grid: tuple[int, int] | None = None,
        sample: int = 0,
        alpha: float = 0.6,
    ) -> Any:
        """Draw attention for display in a notebook: a map of queries and keys, or one query over patches of an image.

        Args:
            image: (3, H, W), (H, W, 3) or (H, W), or a batch of the first; integers from 0 to 255, or other numbers,
                which are scaled; or a PIL image, or the `Inputs` or dict of inputs of the model.
            layer: The address of the layer, or of a module with one layer inside; or its position.
            head: The position among the captured heads, from 0; `"all"`: each, side by side; None: their mean.
            row: The position among the captured query rows. None: the first, which is the class token's if there is
                one, if the keys are the patches of an image; else all, a row of the map for each query.
            grid: The height and width of the image in patches, which are the last keys. None: a square, if the model
                took an image and the keys are one after at most a class token, or, over an image, a few register
                tokens; else one query is a row.
            sample: The index in the batch.
            alpha: The opacity of the map over the image.
        """
        options = {"layer": layer, "head": head, "row": row, "grid": grid, "sample": sample, "alpha": alpha}
        return render("pictures.attention.plot", self, image, **options)

    def to_png(self, file: File, image: Any = None, **options: Any) -> str:
        """Write the image that `plot` returns, with its options, and return the path of the file."""
        self.plot(image, **options).save(file)
        return str(file)

    def _repr_html_(self) -> str:
        """Render the weights of each layer as a picture for a notebook."""
        html: str = render("captures.attention", self)
        return html

    def __repr__(self) -> str:
        kinds = dict.fromkeys(map(_properties, self.by_layer))
        text = "; ".join(f"{shape(size)}, {str(dtype).removeprefix('torch.')}" for size, dtype, _ in list(kinds)[:3])
        count = f"{len(self)} layer{'' if len(self) == 1 else 's'}"
        return f"<Attention of {count}{', ' if text else ''}{text}{'; …' if len(kinds) > 3 else ''}>"


def _index(at: Any) -> int:
    try:
        return index(at)
    except TypeError as error:
        raise BadQuery(f"expected the address or position of a layer, got {reprlib.repr(at)}") from error


def _properties(weights: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return weights.shape, weights.dtype, weights.device


def rollout(
    attention: Attention,
    *,
    residual: float = 0.5,
    heads: Literal["mean", "max", "min"] = "mean",
    discard: float = 0.0,
) -> Tensor:
    """Compute the attention rollout (batch, i, j): the flow from each input token j to each output token i.

    The heads of each layer are fused, the skip connection is added as identity, rows are normalized to sum to 1, and
    the layers are multiplied in order (Abnar and Zuidema, "Quantifying Attention Flow in Transformers", 2020).

    Args:
        residual: The fraction that the skip connections carry, from 0 to 1.
        heads: How to fuse the heads.
        discard: The fraction of each layer's weights, the smallest, that is set to zero, from 0 to 1.

    >>> import torch
    >>> half = torch.tensor([[[[0.0, 1.0], [0.0, 1.0]]]])
    >>> rollout(Attention(("a", "b"), (half, half)))
    tensor([[[0.2500, 0.7500],
             [0.0000, 1.0000]]])
    """
    if not isinstance(attention, Attention):
        raise BadQuery(f"rollout expected the Attention that mt.attention returns, got a {type(attention).__name__}")
    for name, value in (("residual", residual), ("discard", discard)):
        if not isinstance(value, SupportsFloat) or not 0 <= value <= 1:
            raise BadQuery(f"expected {name} from 0 to 1, got {value!r}")
    if heads not in ("mean", "max", "min"):
        raise BadQuery(f"expected heads to be 'mean', 'max' or 'min', got {heads!r}")
    _check_square(attention)
    flow: Tensor | None = None
    for weights in attention:
        layer_flow = _layer_flow(weights, residual, heads, discard)
        flow = layer_flow if flow is None else layer_flow @ flow
    assert flow is not None
    return flow


def _check_square(attention: Attention) -> None:
    if attention.rows is not None:
        raise BadQuery(f"a rollout expected all query rows, got {attention.rows!r}: leave out `rows`")
    shapes = {(weights.shape[0], *weights.shape[2:]) for weights in attention}
    if len(shapes) != 1 or any(len(size) != 3 or size[1] != size[2] for size in shapes):
        text = ", ".join(sorted({shape(weights.shape) for weights in attention})) or "none"
        raise BadQuery(
            f"a rollout expected layers of self-attention over the same tokens, got {text}: select them with `layers` "
            "(of an encoder-decoder, those of the encoder; no windowed attention)"
        )


def _layer_flow(weights: Tensor, residual: float, heads: str, discard: float) -> Tensor:
    precise = weights.to(torch.promote_types(weights.dtype, torch.float32))
    fused = precise.mean(1) if heads == "mean" else precise.amax(1) if heads == "max" else precise.amin(1)
    if discard:
        flat = fused.flatten(1)
        smallest = flat.topk(int(flat.shape[1] * discard), largest=False).indices
        fused = flat.scatter(1, smallest, 0).view_as(fused)
    identity = torch.eye(fused.shape[-1], dtype=fused.dtype, device=fused.device)
    mixed = (1 - residual) * fused + residual * identity
    return mixed / mixed.sum(-1, keepdim=True).clamp_min(torch.finfo(mixed.dtype).tiny)
