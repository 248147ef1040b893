"""The probes that capture the outputs of modules and operators in one run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from microtome.addresses import split_call_index
from microtome.capture.features import Features
from microtome.capture.retention import CopyOnWrite, Retention
from microtome.capture.targets import Targets, op_name
from microtome.engine import Call, Probe, Stop, tensors_in
from microtome.engine.backward import watch_gradient
from microtome.engine.probes import AnyOp, Where
from microtome.engine.pytree import map_tensors
from microtome.engine.selectors import named_modules
from microtome.engine.torch_internals import versions_of
from microtome.errors import Unsupported
from microtome.inputs import Inputs


class ModuleCapture(Probe):
    """Captures the outputs of modules, one run after the other.

    Args:
        watch: Observe operators, to copy captured tensors before the run mutates them. False: clone each tensor as it
            is captured, except those of the call at which the run stops.
        observes_all: Whether the session observes all modules, so that they tell why one did not run.
    """

    def __init__(
        self,
        targets: Targets,
        retention: Retention,
        *,
        inputs: bool = False,
        grad: bool = False,
        watch: bool = True,
        observes_all: bool = True,
    ) -> None:
        self._targets = targets
        self._retention = retention
        self._inputs = inputs
        self._grad = grad
        self._is_capturing = False
        self._paths = targets.modules.keys() | targets.owners.keys()
        self._copy_on_write = CopyOnWrite() if retention.detach and retention.clone == "auto" else None
        self._watches = watch
        self._observes_all = observes_all
        self.probes: list[Probe] = [self] if self._copy_on_write is None or not watch else [self._copy_on_write, self]

    def plan(self, order: tuple[str, ...] | None) -> list[Stop]:
        """Return the intervention that stops each run, if it can be stopped.

        Args:
            order: The addresses of the calls in the order they end, if known.
        """
        ends = [address for address in order or () if split_call_index(address)[0] in self._paths]
        if not set(self._targets.addresses) <= set(ends):  # run to the end, to report how often the module ran
            ends = []
        self._last = (ends[-1], len(ends)) if ends else ("", -1)
        return [Stop(split_call_index(self._last[0])[0], when=self._is_last)] if ends else []

    def begin(self) -> Features:
        """Begin a run, and return the features that it will fill."""
        self.features = Features()
        self.stopped_at: Call | None = None
        self._last_calls: dict[str, int] = {}
        self._op_names: dict[str, dict[str, None]] = {}
        self._counts: dict[tuple[Call, str], int] = {}
        self._unwatched: list[tuple[Tensor, list[Any]]] = []
        self._completed = 0
        return self.features

    def end(self) -> None:
        """Release what the run captured."""
        self.begin()
        if self._copy_on_write is not None:
            self._copy_on_write.clear()

    def _is_last(self, call: Call) -> bool:
        """Return whether this is the last selected call; never if the run left the expected order."""
        if (call.address, self._completed) == self._last:
            self.stopped_at = call
        return self.stopped_at is not None

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._inputs and call in self._targets.calls:
            retained = replace(self._retention, transform=None).apply((args, kwargs))
            self._watch(retained)
            self.features._inputs[self._targets.address(call)] = Inputs(*retained[0], **retained[1])

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._last_calls[call.path] = max(call.index, self._last_calls.get(call.path, 0))
        self._completed += call.path in self._paths
        if call in self._targets.calls:
            retention = self._retention if self._watches else self._unwatched_retention(call, output)
            self._capture(call.path, self._targets.address(call), output, retention)

    def _unwatched_retention(self, call: Call, output: Any) -> Retention:
        """Clone, unless the run stops here and the version of each tensor tells later that it was not mutated."""
        is_last = (call.address, self._completed) == self._last
        if is_last and not any(tensor.is_inference() for tensor in tensors_in(output)):
            return self._retention
        return replace(self._retention, clone=True)

    def _capture(self, name: str, address: str, output: Any, retention: Retention) -> None:
        self._is_capturing = True  # operators that run meanwhile are not the model's
        try:
            if self._grad:
                self.features._grads[address] = _collect_gradients(output, self.features)
            retained = retention.apply(output)
        except Unsupported as error:
            error.add_note(f"in the output of {address!r}")
            raise
        finally:
            self._is_capturing = False
        self._watch(retained)
        self.features._values.setdefault(name, {})[address] = retained

    def _watch(self, retained: Any) -> None:
        if self._copy_on_write is not None:
            self._copy_on_write.watch(retained)
            if not self._watches:
                tensors = (tensor for tensor in tensors_in(retained) if not tensor.is_inference())
                self._unwatched = [(tensor, versions_of([tensor])) for tensor in tensors]

    def finish(
        self, model: nn.Module, inputs: Any, output: Any, other_names: dict[str, str], module_paths: frozenset[str]
    ) -> None:
        """Copy captured tensors that share memory with the model or the user, and check that all targets ran.

        Args:
            other_names: Further paths of modules, each with the path that calls carry.
            module_paths: The paths of all modules.
        """
        feats = self.features
        if any(versions_of([tensor]) != versions for tensor, versions in self._unwatched):
            raise Unsupported(
                f"the output of {self._last[0]!r} was mutated while the run was being stopped there, as a `finally` "
                "block may do: extract with clone=True"
            )
        if self._copy_on_write is not None and not self._copy_on_write.owns_storages():
            attributes = [vars(module) for _, module in named_modules(model)]
            for tensor in tensors_in((attributes, inputs, output)):
                self._copy_on_write.copy_sharing(tensor)
        feats._other_names, feats._module_paths = other_names, module_paths
        names = {path: list(names) for path, names in self._op_names.items()}
        feats.never_ran = self._targets.check(feats._values, self._last_calls, names, is_complete=self._observes_all)


class OpCapture(ModuleCapture):
    """Captures operators too, which requires a dispatch mode and so costs time."""

    def op(self, where: Where, func: AnyOp, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        call = where.call
        if self._is_capturing or call is None or where.phase != "forward" or call.path not in self._targets.owners:
            return
        name = op_name(func)
        index = self._counts.get((call, name), 0)
        self._counts[call, name] = index + 1
        self._op_names.setdefault(call.path, {})[f"{name}#{index}"] = None
        if self._targets.includes_op(call, f"{name}#{index}"):
            self._capture(
                f"{call.path}/{name}", f"{self._targets.address(call)}/{name}#{index}", output, self._retention
            )


def _collect_gradients(output: Any, feats: Features) -> Callable[[], Any]:
    """Accumulate gradients in later backwards; return a function that gives them in the structure of the output.

    They are accumulated while the features live: a tensor of the model or of the user may live longer.
    """
    grads: dict[int, Tensor] = {}
    indices: dict[int, int] = {}

    def accumulate(index: int, grad: Tensor) -> None:
        grads[index] = grads[index] + grad if index in grads else grad

    def register(tensor: Tensor) -> Tensor:
        placeholder = torch.empty(0)
        indices[id(placeholder)] = index = len(indices)
        if tensor.requires_grad:
            watch_gradient(tensor, partial(accumulate, index), owner=feats)
        return placeholder

    structure = map_tensors(register, output)
    return lambda: map_tensors(lambda placeholder: grads.get(indices[id(placeholder)]), structure)
