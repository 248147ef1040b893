"""A model cut after its layers, for as long as it stays what it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from microtome.compat.tracr.early_output import HookExitException
from microtome.engine.torch_internals import own_buffers, own_children, own_parameters, version_of
from microtome.errors import NoMatch, Unsupported
from microtome.inputs import Inputs
from microtome.split.stages import Splitter, Stages


class LayerCuts:
    """The cuts of a model after its layers, each made when it is first asked for.

    Args:
        layers: The addresses of the layers, in the order they run.
    """

    def __init__(self, layers: tuple[str, ...]) -> None:
        self._layers = layers
        self._splitter: Splitter | None = None
        self._stages: dict[int, Stages] = {}
        self._parts: tuple[nn.Module, ...] = ()  # of the model, as it was looked at
        self._state: Any = None

    def after(self, layer: int, model: nn.Module, example: Callable[[], Inputs]) -> Stages:
        """The model cut after a layer. It is looked at again if its weights, or its mode, are others than before."""
        if self._splitter is None or self._state != _state(self._parts):
            self._stages.clear()
            try:
                self._splitter = Splitter(model, example())
            except HookExitException as error:  # its result is the example's
                raise Unsupported(
                    f"a run cannot be stopped after layer {layer}: a hook or a layer raises HookExitException before "
                    "the model ends. Remove it, or run the whole model"
                ) from error
            self._parts = tuple(model.modules())
            self._state = _state(self._parts)
        if layer not in self._stages:
            try:
                self._stages[layer] = self._splitter.at(self._layers[layer])
            except (NoMatch, Unsupported) as error:
                raise Unsupported(f"a run cannot be stopped after layer {layer}: {error}") from error
        return self._stages[layer]


def _state(modules: Iterable[nn.Module]) -> Any:
    """Something that is equal as long as modules hold what they held, and are in the modes that they were in."""
    return [
        (
            module.training,
            [id(child) for child in own_children(module).values()],
            [_version(tensor) for held in (own_parameters(module), own_buffers(module)) for tensor in held.values()],
        )
        for module in modules
    ]


def _version(tensor: Tensor | None) -> Any:
    if tensor is None:
        return None
    return id(tensor), tensor.data_ptr(), version_of(tensor)
