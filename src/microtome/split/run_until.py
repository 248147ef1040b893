"""Running a model to a call, and no further."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from microtome.addresses import split_call_index, strip_first_index
from microtome.engine import Call, Probe, Selector
from microtome.engine.pytree import map_tensors
from microtome.engine.selectors import CallSelection
from microtome.errors import BadQuery, NoMatch
from microtome.split.boundary import Boundary
from microtome.split.splitter import Splitter


class Until(NamedTuple):
    """The result of `run_until`.

    Attributes:
        boundary: What the rest of the model needs.
        saved: What the calls gave that were asked for, by address.
    """

    boundary: Boundary
    saved: dict[str, Any]


class _Saved(Probe):
    def __init__(self, wanted: CallSelection | None) -> None:
        self._wanted = wanted
        self.by_address: dict[str, Any] = {}

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._wanted is not None and call in self._wanted:
            self.by_address[call.address] = map_tensors(lambda tensor: tensor.detach().clone(), output)


def run_until(model: nn.Module, inputs: Any, at: str, *, save: Selector | None = None) -> Until:
    """Run the model to the exit of a call and no further.

    Args:
        inputs: A tensor, a tuple, a dict, an `Inputs`, or a text such as `"1x3x224x224"`.
        at: The address of the call.
        save: The modules whose outputs are to be kept on the way, as a selector; or calls of them, by address.

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
    wanted = None if save is None else CallSelection(model, save)
    saved = _Saved(wanted)
    boundary = head.run(splitter.example.args, splitter.example.kwargs, [saved])
    known = {split_call_index(address)[0] for address in saved.by_address}
    if missing := [path for path in wanted.modules if path not in known] if wanted is not None else []:
        raise NoMatch(f"{missing[0]!r} does not run before the exit of {at!r}: leave it out of `save`")
    every = {strip_first_index(cut.at): cut.at for cut in (*splitter.cuts, *splitter.cuts.refused)}
    return Until(boundary, {every.get(address, address): value for address, value in saved.by_address.items()})
