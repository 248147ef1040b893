"""Run a model up to a call."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from microtome.addresses import split_call_index, strip_first_index
from microtome.engine import Call, Probe, Selector
from microtome.engine.pytree import map_tensors
from microtome.engine.selectors import CallSelection
from microtome.errors import BadQuery, NoMatch
from microtome.split.boundary.boundary import Boundary
from microtome.split.splitter import Splitter


class Until(NamedTuple):
    """The result of `run_until`.

    Attributes:
        boundary: The boundary at the exit of the call.
        saved: The outputs of the selected calls, by address.
    """

    boundary: Boundary
    saved: dict[str, Any]


class _OutputRecorder(Probe):
    def __init__(self, selection: CallSelection) -> None:
        self._selection = selection
        self.outputs: dict[str, Any] = {}

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if call in self._selection:
            self.outputs[call.address] = map_tensors(lambda tensor: tensor.detach().clone(), output)


def run_until(model: nn.Module, inputs: Any, at: str, *, save: Selector | None = None) -> Until:
    """Run the model to the exit of a call and no further.

    Args:
        inputs: A tensor, a tuple, a dict, an `Inputs`, or a shape such as `"1x3x224x224"`; see `Inputs`.
        at: The address of the call.
        save: A selector of modules, or addresses of calls, whose outputs are saved.

    >>> from microtome import zoo
    >>> model, x = zoo.build("tiny-resnet")
    >>> boundary, saved = run_until(model, x, "layer1", save="stem.*")
    >>> boundary
    Boundary(at='layer1', 1 tensor, 64.0 KiB)
    >>> list(saved)
    ['stem.0', 'stem.1', 'stem.2']
    """
    if not isinstance(at, str):
        raise BadQuery(f"expected the address of one call, got {at!r:.80}")
    splitter = Splitter(model, inputs)
    head = splitter.at(at, verify=False)[0]
    args, kwargs = splitter.example.args, splitter.example.kwargs
    if save is None:
        return Until(head.run(args, kwargs), {})
    selection = CallSelection(model, save)
    recorder = _OutputRecorder(selection)
    boundary = head.run(args, kwargs, [recorder])
    recorded = {split_call_index(address)[0] for address in recorder.outputs}
    if missing := [path for path in selection.modules if path not in recorded]:
        raise NoMatch(f"{missing[0]!r} does not run before the exit of {at!r}: leave it out of `save`")
    addresses = {strip_first_index(cut.at): cut.at for cut in (*splitter.cuts, *splitter.cuts.refused)}
    return Until(boundary, {addresses.get(address, address): value for address, value in recorder.outputs.items()})
