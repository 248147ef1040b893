"""The function mode of a session, which intercepts functions of torch above autograd, and hiding it from users' code.

Under any `TorchFunctionMode`, `has_torch_function` is True for all arguments. Code outside torch that calls it, such as
copies of `F.multi_head_attention_forward`, would take another branch than without a session. So, while a session's mode
is active, such code gets a replacement that ignores our modes. Torch's own functions keep the original: by it, they
dispatch themselves to the mode.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FunctionType
from typing import Any

from torch import Tensor, nn, overrides
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from microtome.engine.composite_ops import Function
from microtome.engine.meta_tensors import simulated_device, tensorize_index
from microtome.engine.signals import deliver_signals, pending_signals
from microtome.engine.torch_internals import (
    disabled_torch_function,
    function_modes,
    is_autocast_enabled,
    is_torch_function_enabled,
    pack_padded_sequence,
    pad_packed_sequence,
)

#: Functions that read the values of a tensor without an operator, and the position of that argument.
READS: dict[Function, int] = {
    Tensor.tolist: 0,
    Tensor.numpy: 0,
    Tensor.__array__: 0,
    pack_padded_sequence: 1,
    pad_packed_sequence: 1,
}
_INDEXING = (Tensor.__getitem__, Tensor.__setitem__)


class FunctionMode(TorchFunctionMode):
    """Delegates composite operators, reports reads, and records which function of torch runs.

    Args:
        composite: The functions that are run by `run_composite(func, args, kwargs)`.
        notify_read: Called with a tensor before Python reads its values.

    Attributes:
        function: The function of torch that the code called and that runs now.
        autocast: Whether it was called under autocast, which is not visible in its operators.
    """

    def __init__(
        self,
        composite: Collection[Function],
        run_composite: Callable[[Function, tuple[Any, ...], dict[str, Any]], Any],
        notify_read: Callable[[Tensor], None],
    ) -> None:
        super().__init__()
        self._composite = composite
        self._run_composite = run_composite
        self._notify_read = notify_read
        self.function: Function | None = None
        self.autocast = False
        self._device = simulated_device()

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if pending_signals:
            deliver_signals()
        self.function = func
        self.autocast = is_autocast_enabled()
        try:
            if self._device is not None:
                result = self._device.query(func, args)
                if result is not NotImplemented:
                    return result
                args, kwargs = self._device.redirect_to_meta(args, kwargs or {})
            if func in self._composite:
                return self._run_composite(func, args, kwargs or {})
            if func in READS and len(args) > READS[func] and isinstance(args[READS[func]], Tensor):
                self._notify_read(args[READS[func]])
            if func is F.multi_head_attention_forward:
                with self:
                    return _undispatched_attention(*args, **(kwargs or {}))
            if func in _INDEXING and args[0].is_meta:
                args = (args[0], tensorize_index(args[1]), *args[2:])
            return func(*args, **kwargs) if kwargs else func(*args)
        finally:
            self.function = None


_NAMES = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _copy_without_dispatch(function: Any) -> Any:
    """Copy a function of `torch.nn.functional` without its first step, which dispatches it to the mode again.

    While a mode handles a function, the mode is disabled inside it: it would miss the attention that
    `F.multi_head_attention_forward` calls.
    """
    names = {**function.__globals__, **dict.fromkeys(_NAMES, lambda *_: False)}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_undispatched_attention = _copy_without_dispatch(F.multi_head_attention_forward)


# -- hiding the mode ---------------------------------------------------------------------------------------------------

_lock = threading.Lock()
_open_blocks: set[object] = set()


@contextmanager
def hide_modes() -> Iterator[None]:
    """In the block, hide modes of microtome from `has_torch_function` as code outside torch calls it.

    The functions are replaced in `torch.overrides` and in all Python modules that imported them from there, until the
    last such block ends. In threads without our modes the replacements return the same as the originals.
    """
    block = object()
    try:
        with _lock:
            _open_blocks.add(block)
            _replace(_HIDING)
        yield
    finally:
        with _lock:
            _open_blocks.discard(block)
            if not _open_blocks:
                _replace({id(hiding): original for original, hiding in _PAIRS})


#: The identity of each module of a library that has been searched, by name: its imports are complete.
_searched: dict[str, int] = {}
#: The names in these that refer to the functions.
_references: list[tuple[Any, str]] = []
_LIBRARIES = tuple({os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "purelib", "platlib")})


def _replace(replacements: dict[int, Any]) -> None:
    """Replace the functions in all modules; those of libraries, often 2,000, are searched once."""
    others: list[tuple[Any, str]] = []
    modules = list(sys.modules.items())
    for module_name, module in [(name, module) for name, module in modules if _searched.get(name) != id(module)]:
        is_complete = _is_complete(module)
        if is_complete:
            _searched[module_name] = id(module)
        if module is None or (module_name.startswith("torch.") and module is not overrides):
            continue
        namespace = getattr(module, "__dict__", {})
        found = [(module, name) for name in _NAMES if id(namespace.get(name)) in _FUNCTIONS]
        (_references if is_complete else others).extend(found)
    for module, name in (*_references, *others):
        if id(function := getattr(module, name, None)) in replacements:
            setattr(module, name, replacements[id(function)])


def _is_complete(module: Any) -> bool:
    """Whether a module is one of a library and has been imported; the user's, such as a notebook, import more later."""
    file, spec = getattr(module, "__file__", None), getattr(module, "__spec__", None)
    is_importing = getattr(spec, "_initializing", False)
    return isinstance(file, str) and file.startswith(_LIBRARIES) and spec is not None and not is_importing


def _make_hiding(original: Callable[..., bool], values_in: Callable[..., Any]) -> Callable[..., bool]:
    @wraps(original)
    def has_torch_function(*args: Any) -> bool:
        modes = function_modes()
        if not modes or not all(type(mode).__module__.startswith("microtome.") for mode in modes):
            return original(*args)
        return is_torch_function_enabled() and any(map(_overrides_functions, values_in(*args)))

    return has_torch_function


def _overrides_functions(value: Any) -> bool:
    handler = getattr(type(value), "__torch_function__", None)
    is_plain = type(value) is Tensor or type(value) is nn.Parameter
    return not is_plain and handler is not None and handler is not disabled_torch_function


_PAIRS = [
    (overrides.has_torch_function, _make_hiding(overrides.has_torch_function, lambda values: values)),
    (overrides.has_torch_function_unary, _make_hiding(overrides.has_torch_function_unary, lambda value: (value,))),
    (
        overrides.has_torch_function_variadic,
        _make_hiding(overrides.has_torch_function_variadic, lambda *values: values),
    ),
]
_HIDING: dict[int, Any] = {id(original): hiding for original, hiding in _PAIRS}
_FUNCTIONS = frozenset(id(function) for pair in _PAIRS for function in pair)
