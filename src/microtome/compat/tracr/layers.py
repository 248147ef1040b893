"""The layers of a model: find them, cut the model after them, and bank their outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from microtome.addresses import strip_first_index
from microtome.compat.tracr.hooks import HookExitException
from microtome.engine import Call, Probe
from microtome.engine.pytree import map_tensors
from microtome.engine.torch_internals import own_buffers, own_children, own_parameters, version_of
from microtome.errors import NoMatch, Unsupported
from microtome.inputs import Inputs
from microtome.results.profile import Profile
from microtome.results.rows import Row
from microtome.split.splitter import Splitter
from microtome.split.stages import Stages


def find_layers(profile: Profile, row: Row, depth: int) -> Iterator[Row]:
    """Yield the calls inside a call that are layers: those at this depth, and those above without calls inside."""
    for child in profile.children(row):
        if child.height == 1 or child.path.count(".") + 1 >= depth:
            yield child
        else:
            yield from find_layers(profile, child, depth)


class LayerCuts:
    """The cuts of a model after its layers, each created on first use and valid until the model changes.

    Args:
        layers: The addresses of the layers, in execution order.
    """

    def __init__(self, layers: tuple[str, ...]) -> None:
        self._layers = layers
        self._splitter: Splitter | None = None
        self._stages: dict[int, Stages] = {}
        self._modules: tuple[nn.Module, ...] = ()
        self._state: Any = None

    def after(self, layer: int, model: nn.Module, example: Callable[[], Inputs]) -> Stages:
        """Return the stages before and after a cut; the model is analyzed again if its weights or mode changed."""
        if self._splitter is None or self._state != _state(self._modules):
            self._stages.clear()
            try:
                self._splitter = Splitter(model, example())
            except HookExitException as error:  # its result is that of the example
                raise Unsupported(
                    f"cannot stop a run after layer {layer}: a hook or a layer raises HookExitException before the "
                    "model returns. Remove it, or run the whole model"
                ) from error
            self._modules = tuple(model.modules())
            self._state = _state(self._modules)
        if layer not in self._stages:
            try:
                self._stages[layer] = self._splitter.at(self._layers[layer])
            except (NoMatch, Unsupported) as error:
                raise Unsupported(f"cannot stop a run after layer {layer}: {error}") from error
        return self._stages[layer]


def _state(modules: Iterable[nn.Module]) -> Any:
    """Return a value that changes with the modes, children, parameters and buffers of modules."""
    return [
        (
            module.training,
            [id(child) for child in own_children(module).values()],
            [
                _version(tensor)
                for tensors in (own_parameters(module), own_buffers(module))
                for tensor in tensors.values()
            ],
        )
        for module in modules
    ]


def _version(tensor: Tensor | None) -> Any:
    return None if tensor is None else (id(tensor), tensor.data_ptr(), version_of(tensor))


class OutputBank(Probe):
    """Keeps copies of the outputs of layers.

    Args:
        layers: The numbers of the layers, by address.
        last: The number of the layer after which the run stops, whose output needs no copy: nothing can mutate it.
    """

    def __init__(self, layers: dict[str, int], last: int | None = None) -> None:
        self._layers = {strip_first_index(address): layer for address, layer in layers.items()}
        self._last = last
        self.outputs: dict[int, Any] = {}

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        layer = self._layers.get(call.address)
        if layer is not None:
            is_last = layer == self._last
            self.outputs[layer] = map_tensors(lambda one: one.detach() if is_last else one.detach().clone(), output)

    def check(self) -> None:
        """Raise if a layer did not run."""
        for address, layer in self._layers.items():
            if layer not in self.outputs and layer != self._last:
                raise Unsupported(
                    f"layer {layer} of save_layers, {address!r}, was not observed: this input did not lead to it, or "
                    "torch ran it inside a fused operator"
                )
