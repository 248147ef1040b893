"""Running a model to a call, and no further."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn

from microtome.engine import Call, Probe, Selector, select
from microtome.engine.structure import map_tensors
from microtome.errors import BadQuery, NoMatch
from microtome.split.boundary import Boundary
from microtome.split.stages import Splitter


class Until(NamedTuple):
    """What `run_until` gives.

    Attributes:
        boundary: What the rest of the model needs.
        saved: What the calls gave that were asked for, by address.
    """

    boundary: Boundary
    saved: dict[str, Any]


class _Saved(Probe):
    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = {id(module) for module in modules}
        self.by_address: dict[str, Any] = {}

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if id(call.module) in self._modules:
            self.by_address[call.address] = map_tensors(lambda tensor: tensor.detach().clone(), output)


def run_until(model: nn.Module, inputs: Any, at: str, *, save: Selector | None = None) -> Until:
    """Run the model to the exit of a call and no further.

    Args:
        inputs: A tensor, a tuple, a dict, an `Inputs`, or a text such as `"1x3x224x224"`.
        at: The address of the call.
        save: The modules whose outputs are to be kept on the way, as a selector.

    >>> from microtome import zoo
    >>> model, x = zoo.build("tiny-resnet")
    >>> boundary, saved = run_until(model, x, "layer1", save="stem.*")
    >>> boundary
    Boundary(at='layer1', 1 tensor, 64.0 KiB)
    >>> list(saved)
    ['stem.0', 'stem.1', 'stem.2']
    """
    if not isinstance(at, str):
        raise BadQuery(f"a model runs until one call: give its address, not {at!r:.80}")
    splitter = Splitter(model, inputs)
    head = splitter.at(at, verify=False)[0]
    saved = _Saved(() if save is None else select(model, save).values())
    boundary = head.run(splitter.given.args, splitter.given.kwargs, [saved])
    missing = [] if save is None else [path for path in select(model, save) if path not in _paths(saved.by_address)]
    if missing:
        raise NoMatch(f"{missing[0]!r} does not run before the exit of {at!r}: leave it out of `save`")
    return Until(boundary, saved.by_address)


def _paths(addresses: Iterable[str]) -> set[str]:
    return {address.partition("#")[0] for address in addresses}
