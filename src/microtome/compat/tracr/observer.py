"""Times and outputs of the layers of one run, taken while it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from microtome.devices.base import Backend, backend_of
from microtome.engine import Call, Probe, Stopped
from microtome.engine.pytree import tensors_in
from microtome.inputs import device_of
from microtome.results.profile import Profile
from microtome.results.rows import Row


class LayerRun(NamedTuple):
    """One run of a layer.

    Attributes:
        begin: A timestamp of the backend.
        facts: What is known of its output, under tracr's names.
        backend: That of the device whose time was taken; None if its work was done on another.
    """

    begin: Any
    end: Any
    facts: dict[str, Any]
    backend: Backend | None

    @property
    def seconds(self) -> float | None:
        return None if self.backend is None else self.backend.elapsed_s(self.begin, self.end)


class LayerObserver(Probe):
    """Notes when each call of the layers' modules began and ended in this thread, and what it returned."""

    def __init__(self, model: nn.Module) -> None:
        self._device = torch.device(device_of(model))
        self._backend = backend_of(self._device)
        self._thread = get_ident()
        self._open: dict[Call, Any] = {}
        self._runs: dict[str, list[LayerRun | None]] = {}

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if call.phase == "forward" and get_ident() == self._thread:
            self._open[call] = self._backend.timestamp(self._device)

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if call in self._open:
            end = self._backend.timestamp(self._device)
            tensors = list(tensors_in(output))
            is_timed = self._backend.has_timestamps and all(one.device == self._device for one in tensors)
            backend = self._backend if is_timed else None
            run = LayerRun(self._open.pop(call), end, _facts(output, tensors), backend)
            self._runs.setdefault(call.path, []).append(run)

    def fail(self, call: Call, error: BaseException) -> None:
        if isinstance(error, Stopped) and error.call.module is call.module:  # an edge ends here
            self.exit(call, (), {}, error.output)
        elif self._open.pop(call, None) is not None:
            self._runs.setdefault(call.path, []).append(None)

    def by_address(self, profile: Profile, resumed_after: str | None) -> dict[str, LayerRun]:
        """The runs of modules by the addresses that they have in a run of the whole model.

        Args:
            profile: Of the whole model.
            resumed_after: The address of the call after which the run was resumed: the calls before it that were seen
                were skipped, and those inside them were not seen.
        """
        self._backend.synchronize(self._device)
        addresses: dict[str, list[str]] = {}
        for row in profile:
            addresses.setdefault(row.path, []).append(row.address)
        skipped = [] if resumed_after is None else list(_skipped(profile, resumed_after))
        seen = Counter(row.path for row in skipped)
        before = Counter(inside.path for row in skipped for inside in _with_calls_inside(profile, row))
        found: dict[str, LayerRun] = {}
        for path, runs in self._runs.items():
            real = zip(addresses.get(path, ())[before[path] :], runs[seen[path] :], strict=False)
            found |= {address: run for address, run in real if run is not None}
        return found


def _facts(output: Any, tensors: list[Tensor]) -> dict[str, Any]:
    facts: dict[str, Any] = {"output_bytes": sum(tensor.nbytes for tensor in tensors)}
    if isinstance(output, Tensor):
        facts |= {"output_shape": list(output.shape), "output_dtype": str(output.dtype)}
    return facts


def _skipped(profile: Profile, address: str) -> Iterator[Row]:
    """The largest calls that end with or before a call and do not contain it: those that a resumed run skips."""
    row: Row = profile[address]
    yield row
    while row.parent is not None:
        parent: Row = profile[row.parent]
        for sibling in profile.children(parent):
            if sibling is row:
                break
            yield sibling
        row = parent


def _with_calls_inside(profile: Profile, row: Row) -> Iterator[Row]:
    yield row
    for child in profile.children(row):
        yield from _with_calls_inside(profile, child)
