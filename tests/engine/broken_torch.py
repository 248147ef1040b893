"""What the public actions raise in a torch that breaks one symbol; run in a process of its own.

Each break is made in a fork, before microtome is imported, and written to the standard output as a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils import _python_dispatch

#: Without types, so that they can be assigned to.
TORCH: Any = torch
MODULE: Any = nn.Module
DISPATCH: Any = _python_dispatch
C: Any = TORCH._C


def ignore_compiled_call() -> None:
    MODULE.__call__ = MODULE._call_impl


def skip_hooks() -> None:
    MODULE._call_impl = lambda self, *args, **kwargs: self.forward(*args, **kwargs)


def forget_hooks_with_kwargs() -> None:
    register = MODULE.register_forward_hook
    MODULE.register_forward_hook = lambda self, hook, with_kwargs=False: register(self, hook)


def keep_elsewhere(kind: type) -> Callable[[], None]:
    def patch() -> None:
        usual = MODULE.__setattr__
        MODULE.__setattr__ = lambda self, name, value: (
            object.__setattr__(self, name, value) if isinstance(value, kind) else usual(self, name, value)
        )

    return patch


def keep_buffers_elsewhere() -> None:
    MODULE.register_buffer = lambda self, name, tensor, persistent=True: object.__setattr__(self, name, tensor)


def bind_engine_early() -> None:
    was = TORCH.autograd.backward
    TORCH.autograd.backward = FunctionType(
        was.__code__, dict(was.__globals__), was.__name__, was.__defaults__, was.__closure__
    )


def forget_aliases() -> None:
    def schema_of(func: Any) -> Any:
        schema = vars(func)["_schema"]
        arguments = [SimpleNamespace(name=one.name, kwarg_only=False, alias_info=None) for one in schema.arguments]
        return SimpleNamespace(name=schema.name, arguments=arguments, returns=schema.returns)

    TORCH._ops.OpOverload._schema = property(schema_of, lambda func, schema: vars(func).update(_schema=schema))


def see_nothing() -> None:
    DISPATCH.TorchDispatchMode.__enter__ = lambda self: self
    DISPATCH.TorchDispatchMode.__exit__ = lambda *_: None


def give_real_tensors() -> None:
    import_module("torch._subclasses.fake_tensor").FakeTensorMode.from_tensor = lambda self, tensor, **_: tensor


def replaced(place: Any, name: str, by: Any) -> Callable[[], None]:
    return lambda: setattr(place, name, by)


#: By the symbol, how torch may come to ignore it, and the action that finds out.
BREAKS: dict[str, tuple[Callable[[], None], str]] = {
    "torch.nn.Module._compiled_call_impl": (ignore_compiled_call, "every"),
    "torch.nn.Module._call_impl": (skip_hooks, "extract"),
    "torch.nn.Module._forward_hooks_with_kwargs": (forget_hooks_with_kwargs, "extract"),
    "torch.nn.Module._parameters": (keep_elsewhere(nn.Parameter), "extract"),
    "torch.nn.Module._buffers": (keep_buffers_elsewhere, "extract"),
    "torch.nn.Module._modules": (keep_elsewhere(nn.Module), "extract"),
    "torch.autograd._engine_run_backward": (bind_engine_early, "extract"),
    "torch._C._autograd._get_sequence_nr": (replaced(C._autograd, "_get_sequence_nr", lambda: 0), "extract"),
    "torch._C._functions.AccumulateGrad": (replaced(C._functions, "AccumulateGrad", object), "extract"),
    "OpOverload._schema": (forget_aliases, "extract"),
    "torch._C._dispatch_has_kernel_for_dispatch_key": (
        replaced(C, "_dispatch_has_kernel_for_dispatch_key", lambda *_: True),
        "extract",
    ),
    "torch.utils._python_dispatch.TorchDispatchMode": (see_nothing, "extract"),
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack": (
        replaced(DISPATCH, "_get_current_dispatch_mode_stack", list),
        "extract",
    ),
    "torch._C._len_torch_dispatch_stack": (replaced(C, "_len_torch_dispatch_stack", lambda: 0), "extract"),
    "torch.utils._python_dispatch._disable_current_modes": (
        replaced(DISPATCH, "_disable_current_modes", nullcontext),
        "extract",
    ),
    "torch.overrides._get_current_function_mode_stack": (
        replaced(torch.overrides, "_get_current_function_mode_stack", list),
        "extract",
    ),
    "torch._C.DisableTorchFunction": (replaced(C, "DisableTorchFunction", nullcontext), "extract"),
    "torch._VF._pack_padded_sequence": (
        replaced(TORCH._VF, "_pack_padded_sequence", lambda *given: C._VariableFunctions._pack_padded_sequence(*given)),
        "extract",
    ),
    "torch._C._is_any_autocast_enabled": (replaced(C, "_is_any_autocast_enabled", lambda: False), "extract"),
    "torch._safe_softmax": (replaced(TORCH, "_safe_softmax", torch.softmax), "extract"),
    "UntypedStorage._cdata": (replaced(torch.UntypedStorage, "_cdata", property(lambda _: 1)), "extract"),
    "torch._C._storage_Use_Count": (replaced(C, "_storage_Use_Count", lambda _: 2), "extract"),
    "Tensor._version": (replaced(torch.Tensor, "_version", property(lambda _: 0)), "extract"),
    "Tensor._is_view": (replaced(torch.Tensor, "_is_view", lambda _: False), "extract"),
    "Tensor._make_wrapper_subclass": (
        replaced(torch.Tensor, "_make_wrapper_subclass", staticmethod(lambda *_, **__: torch.ones(1))),
        "extract",
    ),
    "torch._C._current_autograd_node": (replaced(C, "_current_autograd_node", lambda: None), "backward"),
    "torch._C._current_graph_task_id": (replaced(C, "_current_graph_task_id", lambda: -1), "backward"),
    "the device 'meta'": (replaced(torch.Tensor, "clone", lambda *_, **__: None), "trace"),
    "torch._subclasses.fake_tensor.FakeTensorMode": (give_real_tensors, "trace"),
    "missing: _current_autograd_node": (lambda: delattr(C, "_current_autograd_node"), "extract"),
}


def actions(folder: str) -> dict[str, Callable[[], Any]]:
    import microtome as mt  # after the break

    model = nn.Sequential(nn.Linear(2, 2), nn.Softmax(-1))
    x = torch.ones(1, 2)

    def track_backward() -> None:
        with mt.track(model):
            model(x).sum().backward()

    def enter(what: Any) -> None:
        with what:
            model(x)

    return {
        "extract": lambda: mt.extract(model, x, "0"),
        "backward": track_backward,
        "trace": lambda: mt.trace(model, x, fake=True),
        "session": lambda: enter(mt.Session(model)),
        "track": lambda: enter(mt.track(model)),
        "record": lambda: enter(mt.record(model, "0", to=folder + "/recording")),
        "edit": lambda: enter(mt.edit(model, {"0": lambda output: output})),
        "profile": lambda: mt.profile(model, x),
        "profile time": lambda: mt.profile(model, x, measure="time"),
        "attention": lambda: mt.attention(model, x),
        "cuts": lambda: mt.cuts(model, x),
        "split": lambda: mt.split(model, x, at="0"),
    }


def outcomes(wanted: str) -> dict[str, list[str]]:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in actions(folder) if wanted == "every" else [wanted]:
            try:
                actions(folder)[name]()
                found[name] = ["nothing", ""]
            except Exception as error:  # noqa: BLE001  which is what is asked for
                found[name] = [type(error).__name__, str(error)]
    return found


def main() -> None:
    for symbol, (patch, wanted) in BREAKS.items():
        child = os.fork()
        if not child:
            patch()
            try:
                found = outcomes(wanted)
            except Exception as error:  # noqa: BLE001
                found = {wanted: [type(error).__name__, str(error)]}
            sys.stdout.write(json.dumps([symbol, found]) + "\n")
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
