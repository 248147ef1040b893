"""The faces of vit-pytorch's `Extractor` and `Recorder`: change the import, keep the code.

Each is a module that holds the model as `vit`, as vit-pytorch's are, and looks only while it is called: no hooks, and
no names in the model's `state_dict`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from microtome.capture.attention.attention import ATTENTION, AttentionProbe
from microtome.capture.attention.cached import CachedAttention
from microtome.capture.extract import extract
from microtome.compat.subclass_checks import refuse_overrides
from microtome.engine import Session, select, tensors_in
from microtome.engine.module_calls import run_uncompiled
from microtome.engine.pytree import map_tensors
from microtome.engine.selectors import CallSelection, check_model
from microtome.errors import BadQuery, NoMatch, SessionError
from microtome.inputs import Inputs

__all__ = ["Extractor", "Recorder"]


class Ejected(SessionError, AssertionError):
    """A wrapper was called after `eject`; vit-pytorch raises an AssertionError."""


class LayerNotFound(NoMatch, AssertionError):
    """The layer is not in the model; vit-pytorch raises an AssertionError."""


class _ModelWrapper(nn.Module):
    """A model that is looked at whenever it is called, until it is ejected.

    Attributes:
        hooks: Always empty: vit-pytorch keeps the handles of its hooks here.
        hook_registered: Whether it has been called.
        data: None, as in vit-pytorch.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        refuse_overrides(cls, ("_hook", "_register_hook"), "override forward, or use mt.extract or mt.attention")

    def __init__(self, vit: nn.Module, device: torch.device | str | None) -> None:
        super().__init__()
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
        """Drop what is held of the last call."""
        raise NotImplementedError

    def _inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        """The arguments for the model. vit-pytorch's wrappers name the first `img`, whatever the model calls it."""
        if not args and kwargs.keys() == {"img"} and "img" not in inspect.signature(self.vit.forward).parameters:
            return Inputs(kwargs["img"])
        return Inputs(*args, **kwargs)

    def _begin(self, inputs: Inputs) -> torch.device | str | None:
        """Forget the call before; return where what is seen in this one is to lie: by default, where its inputs do."""
        if self.ejected:
            name = type(self).__name__
            raise Ejected(f"this {name} has been ejected and cannot be used anymore: make a new {name}(vit)")
        self.clear()
        self.hook_registered = True
        if self.device is not None:
            return self.device
        return next((tensor.device for tensor in tensors_in((inputs.args, inputs.kwargs))), None)


class Extractor(_ModelWrapper):
    """Returns `(prediction, latents)` when it is called: what the model returns, and what one of its layers does.

    It is called as the model is, with any arguments, and `return_embeddings_only=True` to have the latents alone. That
    may be given by position too, as a bool after the image; a bool is the model's if `return_embeddings_only` is named.

    Args:
        device: Where the latents are moved; None: where the first tensor of the inputs lies.
        layer: The layer, as a module of the model; None: the one that `layer_name` names.
        layer_name: Its path in the model, such as `"transformer.layers.3"`.
        layer_save_input: Take the layer's arguments in place of its output: a tuple, keyword ones last.
        return_embeddings_only: Return the latents alone.
        detach: Copy the latents and cut them from the graph.

    Latents have the structure of what the layer gave. Of a layer that runs several times they are those of the last
    call; `microtome.extract` gives all.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    >>> prediction, latents = Extractor(net, layer_name="0")(torch.ones(1, 2))
    >>> prediction.equal(latents.relu())
    True
    """

    def __init__(
        self,
        vit: nn.Module,
        device: torch.device | str | None = None,
        layer: nn.Module | None = None,
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
        self._find()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("layer", "latents"):  # nn.Module would add a module or a parameter to `state_dict`
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def clear(self) -> None:
        self.latents = None

    @run_uncompiled
    def forward(self, *args: Any, return_embeddings_only: bool | None = None, **kwargs: Any) -> Any:
        if return_embeddings_only is None and len(args) == 2 and isinstance(args[1], bool):
            image, return_embeddings_only = args
            args = (image,)
        given = self._inputs(args, kwargs)
        device = self._begin(given)
        path, layer = self._find()
        detach, own = self.detach_fn is clone_and_detach, self.detach_fn not in (clone_and_detach, identity)
        feats = extract(
            self.vit,
            given,
            layer,
            stop=False,
            inputs=self.layer_save_input,
            detach=detach,
            clone=detach or own,
            device=None if own else device,
        )
        latents = _flat(feats.inputs(path)) if self.layer_save_input else feats[path]
        if own:
            latents = map_tensors(lambda tensor: _moved(self.detach_fn(tensor), device), latents)
        self.latents = latents
        return latents if return_embeddings_only or self.return_embeddings_only else (feats.output, latents)

    def _find(self) -> tuple[str, nn.Module]:
        # An attribute may be an alias, such as a property, that is no path in the model.
        layer = getattr(self.vit, self.layer_name, None) if self.layer is None else self.layer
        try:
            found = select(self.vit, layer if isinstance(layer, nn.Module) else self.layer_name)
        except NoMatch as error:
            raise LayerNotFound(str(error)) from None
        if len(found) > 1:
            raise BadQuery(f"an Extractor takes one layer, {self.layer_name!r} names {len(found)}: use mt.extract")
        return next(iter(found.items()))


class _Known(NamedTuple):
    """The calls in which a model computes attention."""

    probe: CachedAttention
    session: Session
    modules: list[nn.Module]


class Recorder(_ModelWrapper):
    """Returns `(prediction, attentions)` when it is called: what the model returns, and its attention weights.

    They are of after the softmax and before dropout, cut from the graph, as one tensor (batch, layers, heads, i, j);
    where the layers' shapes differ, a list with one (batch, heads, i, j) for each. It is called as the model is.

    As in vit-pytorch, they are those of the model's `transformer`; of a model that has none, all.

    Args:
        device: Where the attentions are moved as they are made; None: where the first tensor of the inputs lies.

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
        self._known: _Known | None = None

    def clear(self) -> None:
        self.recordings.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": None}  # a copy is of another model

    def record(self, attn: Tensor) -> None:
        """Add attention that microtome cannot see, while the model runs; it is copied."""
        self.recordings.append(attn.detach().clone())

    @run_uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, Tensor | list[Tensor]]:
        given = self._inputs(args, kwargs)
        self._device = device = self._begin(given)
        try:
            prediction = self._run_known(given) if self._known is not None else self._run(given)
            return prediction, _stacked([attn.to(device) for attn in self.recordings])
        except BaseException:
            self.clear()
            raise

    def _run(self, given: Inputs) -> Any:
        """Look at everything that runs."""
        transformer = getattr(self.vit, "transformer", None)
        at = CallSelection(self.vit, transformer) if isinstance(transformer, nn.Module) else None
        probe = AttentionProbe(self._keep, at=at)
        with Session(self.vit, [probe], composite=ATTENTION, other_threads="unseen"):
            prediction = given.run(self.vit)
        if not self.recordings:
            raise _nothing_seen(self.vit, probe)
        known = CachedAttention.from_run(probe, self._keep)
        if known is not None:
            self._known = _Known(
                known, Session(self.vit, [known], at=known.paths, other_threads="unseen"), list(self.vit.modules())
            )
        return prediction

    def _run_known(self, given: Inputs) -> Any:
        """Look where the run before has shown attention to be; and everywhere, if the run is another."""
        assert self._known is not None
        known, self._known = self._known, None
        modules = list(self.vit.modules())
        if list(map(id, modules)) != list(map(id, known.modules)) or any(module.training for module in modules):
            return self._run(given)  # it is another model, or to run it twice would not be the same
        with known.session:
            prediction = given.run(self.vit)
        if known.probe.matches():
            self._known = known
            return prediction
        self.clear()
        return self._run(given)

    def _keep(self, _: str, weights: Tensor) -> None:
        self.recordings.append(weights if self._device is None else weights.to(self._device))


def identity(tensor: Tensor) -> Tensor:
    return tensor


def clone_and_detach(tensor: Tensor) -> Tensor:
    return tensor.clone().detach()


def _moved(latent: Any, device: torch.device | str | None) -> Any:
    return latent.to(device) if isinstance(latent, Tensor) and device is not None else latent


def _flat(inputs: Inputs) -> tuple[Any, ...]:
    return (*inputs.args, *inputs.kwargs.values())


def _stacked(attentions: list[Tensor]) -> Tensor | list[Tensor]:
    alike = len({(attn.shape, attn.dtype, attn.device) for attn in attentions}) == 1
    return torch.stack(attentions, dim=1) if alike else attentions


def _nothing_seen(vit: nn.Module, probe: AttentionProbe) -> NoMatch:
    name = type(vit).__name__
    if probe.addresses:
        where = ", ".join(map(repr, probe.addresses))
        return NoMatch(
            f"no attention was seen in the `transformer` of the {name}, but at {where}: wrap the module that holds it, "
            "or take mt.attention"
        )
    hidden = f" by {', '.join(probe.fused_ops)}" if probe.fused_ops else ""
    return NoMatch(
        f"no attention was seen in the {name}: it has none, or computes it in code{hidden} that hides the weights. "
        "mt.attention(model, inputs) says more; where the model's code has them, give them to record(attn)"
    )
