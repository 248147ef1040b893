"""Drop-ins for vit-pytorch's `Extractor` and `Recorder`: change the import, keep the code.

Each is a module that has the model as `vit`, as in vit-pytorch. They observe the model only while they are called: they
register no hooks and add nothing to the model's `state_dict`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from microtome.capture.attention.attention import no_attention_error
from microtome.capture.attention.cached import CachedAttention
from microtome.capture.feature_extractor import FeatureExtractor
from microtome.capture.retention import check_device
from microtome.compat.subclass_checks import refuse_overrides
from microtome.engine import select, tensors_in
from microtome.engine.module_calls import run_uncompiled
from microtome.engine.pytree import map_tensors
from microtome.engine.selectors import check_model
from microtome.errors import BadQuery, BadSelector, NoMatch, SessionError
from microtome.inputs import Inputs

__all__ = ["Extractor", "Recorder"]


class Ejected(SessionError, AssertionError):
    """A wrapper was called after `eject`; vit-pytorch raises an AssertionError."""


class LayerNotFound(NoMatch, AssertionError):
    """The layer is not in the model; vit-pytorch raises an AssertionError."""


class _ModelWrapper(nn.Module):
    """A model that is observed whenever it is called, until it is ejected.

    Attributes:
        hooks: Always empty: vit-pytorch has the handles of its hooks here.
        hook_registered: Whether it has been called.
        data: None, as in vit-pytorch.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        refuse_overrides(cls, ("_hook", "_register_hook"), "override forward, or use mt.extract or mt.attention")

    def __init__(self, vit: nn.Module, device: torch.device | str | None) -> None:
        super().__init__()
        check_device(device)
        self.vit = check_model(vit)
        self.data: Any = None
        self.hooks: list[Any] = []
        self.hook_registered = False
        self.ejected = False
        self.device = device

    def eject(self) -> nn.Module:
        """Retire the wrapper and return the model."""
        self.ejected = True
        return self.vit

    def clear(self) -> None:
        """Drop the results of the last call."""
        raise NotImplementedError

    def _inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        """Return the model's arguments; `img` may name the first, as in vit-pytorch, whatever the model calls it."""
        if not args and kwargs.keys() == {"img"} and "img" not in inspect.signature(self.vit.forward).parameters:
            return Inputs(kwargs["img"])
        return Inputs(*args, **kwargs)

    def _begin(self, inputs: Inputs) -> torch.device | str | None:
        """Drop the results of the last call, and return the device for those of this one: by default the inputs'."""
        if self.ejected:
            name = type(self).__name__
            raise Ejected(f"this {name} has been ejected and cannot be used anymore: create another {name}(vit)")
        self.clear()
        if not self.hook_registered:  # setting an attribute of a module takes microseconds
            self.hook_registered = True
        if self.device is not None:
            return self.device
        return next((tensor.device for tensor in tensors_in((inputs.args, inputs.kwargs))), None)


class Extractor(_ModelWrapper):
    """Returns `(prediction, latents)` when it is called: the outputs of the model and of one of its layers.

    It accepts the arguments of the model, and `return_embeddings_only=True` to return only the latents. That may be
    positional too, as a bool after the image, unless `return_embeddings_only` is also passed by name.

    Args:
        device: The device of the latents; None: that of the first tensor in the inputs.
        layer: The layer, as a module of the model or its path; None: the one at `layer_name`.
        layer_name: Its path in the model, such as `"transformer.layers.3"`.
        layer_save_input: Return the layer's arguments instead of its output: a tuple, keyword arguments last.
        return_embeddings_only: Return only the latents.
        detach: Copy the latents and detach them from the graph.

    Latents have the structure of the layer's output. If a layer runs several times, they are those of the last call;
    `microtome.extract` returns all.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    >>> prediction, latents = Extractor(net, layer_name="0")(torch.ones(1, 2))
    >>> prediction.equal(latents.relu())
    True
    """

    def __init__(
        self,
        vit: nn.Module,
        device: torch.device | str | None = None,
        layer: nn.Module | str | None = None,
        layer_name: str = "transformer",
        layer_save_input: bool = False,
        return_embeddings_only: bool = False,
        detach: bool = True,
    ) -> None:
        super().__init__(vit, device)
        self.layer = layer
        self.layer_name = layer_name
        self.layer_save_input = layer_save_input
        self.return_embeddings_only = return_embeddings_only
        self.detach_fn: Callable[[Tensor], Any] = clone_and_detach if detach else identity
        self.latents: Any = None
        self._extractor: tuple[Any, FeatureExtractor] | None = None
        self._find()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("layer", "layer_name", "latents"):  # nn.Module would add a module or a parameter to `state_dict`
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_extractor": None}  # a copy has another model

    def clear(self) -> None:
        self.latents = None

    @run_uncompiled
    def forward(self, *args: Any, return_embeddings_only: bool | None = None, **kwargs: Any) -> Any:
        if return_embeddings_only is None and len(args) == 2 and isinstance(args[1], bool):
            image, return_embeddings_only = args
            args = (image,)
        inputs = self._inputs(args, kwargs)
        device = self._begin(inputs)
        is_custom = self.detach_fn not in (clone_and_detach, identity)
        feats = self._find_extractor(None if is_custom else device)(inputs)
        path = next(iter(feats))
        latents = feats[path]
        if self.layer_save_input:
            arguments = feats.inputs(path)
            latents = (*arguments.args, *arguments.kwargs.values())
        if is_custom:
            latents = map_tensors(lambda tensor: _move(self.detach_fn(tensor), device), latents)
        self.latents = latents
        return latents if return_embeddings_only or self.return_embeddings_only else (feats.output, latents)

    def _find_extractor(self, device: torch.device | str | None) -> FeatureExtractor:
        """Return the extractor of the last call if it serves this one too, or a new one."""
        detach, is_custom = self.detach_fn is clone_and_detach, self.detach_fn not in (clone_and_detach, identity)
        options: dict[str, Any] = {
            "inputs": bool(self.layer_save_input),
            "detach": detach,
            "clone": detach or is_custom,
        }
        named = self.layer_name if self.layer is None else self.layer
        layer = _attribute_at(self.vit, named) if isinstance(named, str) else named
        key = self.vit, layer, device, options
        if self._extractor is None or layer is None or self._extractor[0] != key:
            self._extractor = key, FeatureExtractor(self.vit, self._find()[1], stop=False, device=device, **options)
        return self._extractor[1]

    def _find(self) -> tuple[str, nn.Module]:
        named = self.layer_name if self.layer is None else self.layer
        if not isinstance(named, str | nn.Module):
            raise BadSelector(f"an Extractor expected a module of the model or its path as layer, got {named!r}")
        # An attribute may be an alias, such as a property, that is no path in the model.
        layer = getattr(self.vit, named, None) if isinstance(named, str) else named
        try:
            found = select(self.vit, layer if isinstance(layer, nn.Module) else named)
        except NoMatch as error:
            raise LayerNotFound(str(error)) from None
        if len(found) > 1:
            raise BadQuery(f"an Extractor expected one layer, got {len(found)} at {named!r}: use mt.extract")
        return next(iter(found.items()))


class Recorder(_ModelWrapper):
    """Returns `(prediction, attentions)` when it is called: the model's output and its attention weights.

    The weights are those after the softmax and before dropout, detached, as one tensor (batch, layers, heads, i, j); if
    the shapes of the layers differ, a list with one (batch, heads, i, j) for each. It accepts the model's arguments.

    As in vit-pytorch, they are those of the model's `transformer`; if it has none, all.

    Args:
        device: The device of the attentions; None: that of the first tensor in the inputs.

    Attributes:
        recordings: The attentions of the last call, one for each layer.

    >>> net = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> prediction, attentions = Recorder(net)(torch.ones(1, 5, 8))
    >>> attentions.shape
    torch.Size([1, 1, 2, 5, 5])
    """

    def __init__(self, vit: nn.Module, device: torch.device | str | None = None) -> None:
        super().__init__(vit, device)
        self.recordings: list[Tensor] = []
        self._device: torch.device | str | None = None
        self._attention: CachedAttention | None = None

    def clear(self) -> None:
        self.recordings.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_attention": None}  # a copy has another model

    def record(self, attn: Tensor) -> None:
        """Add a copy of attention weights that microtome cannot observe, while the model runs."""
        self.recordings.append(attn.detach().clone())

    @run_uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, Tensor | list[Tensor]]:
        inputs = self._inputs(args, kwargs)
        self._device = device = self._begin(inputs)
        attention = self._attention = self._attention or CachedAttention(self._add, self.clear)
        transformer = getattr(self.vit, "transformer", None)
        try:
            at = transformer if isinstance(transformer, nn.Module) else None
            prediction, probe = attention.run(self.vit, inputs, at)
            if not self.recordings:
                assert probe is not None, "a run with cached sources captures weights"
                error = no_attention_error(self.vit, probe)
                error.add_note("if the model's own code has the weights, pass them to record(attn)")
                raise error
            return prediction, _stack([attn.to(device) for attn in self.recordings])
        except BaseException:
            self.clear()
            raise

    def _add(self, _: str, weights: Tensor) -> None:
        self.recordings.append(weights if self._device is None else weights.to(self._device))


def _attribute_at(model: nn.Module, name: str) -> nn.Module | None:
    """Return the module that a dotted name leads to, through attributes of any kind; None if there is none."""
    try:
        found = attrgetter(name)(model)
    except AttributeError:
        return None
    return found if isinstance(found, nn.Module) else None


def identity(tensor: Tensor) -> Tensor:
    return tensor


def clone_and_detach(tensor: Tensor) -> Tensor:
    return tensor.clone().detach()


def _move(latent: Any, device: torch.device | str | None) -> Any:
    return latent.to(device) if isinstance(latent, Tensor) and device is not None else latent


def _stack(attentions: list[Tensor]) -> Tensor | list[Tensor]:
    is_uniform = len({(attn.shape, attn.dtype, attn.device) for attn in attentions}) == 1
    return torch.stack(attentions, dim=1) if is_uniform else attentions
