"""`has_torch_function` answered as if no mode of ours were on.

Under any `TorchFunctionMode` it is True for all arguments. Code outside torch that asks it, as copies of
`F.multi_head_attention_forward` do, would take another way than without us. Torch's own functions do not: they hand
themselves to the mode, which runs them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import Tensor, nn, overrides

from microtome.engine.torch_internals import disabled_torch_function, function_modes, is_torch_function_enabled

_NAMES = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_lock = threading.Lock()
_open: set[object] = set()


@contextmanager
def hide_modes() -> Iterator[None]:
    """For the time of the block, have code outside torch be told of other modes than ours alone.

    The names are replaced in `torch.overrides` and in all modules that imported them from there, and put back when the
    last such block ends. The answers are the same in threads that have none of our modes.
    """
    block = object()
    try:
        with _lock:
            _open.add(block)
            _replace(_BY_ORIGINAL)
        yield
    finally:
        with _lock:
            _open.discard(block)
            if not _open:
                _replace({id(ours): original for original, ours in _PAIRS})


def _replace(by: dict[int, Any]) -> None:
    for name, module in list(sys.modules.items()):
        if module is None or (name.startswith("torch.") and module is not overrides):
            continue
        space = getattr(module, "__dict__", {})
        for known in _NAMES:
            if id(held := space.get(known)) in by:
                setattr(module, known, by[id(held)])


def _without_ours(original: Callable[..., bool], arguments: Callable[..., Any]) -> Callable[..., bool]:
    @wraps(original)
    def ask(*args: Any) -> bool:
        modes = function_modes()
        if not modes or not all(type(mode).__module__.startswith("microtome.") for mode in modes):
            return original(*args)
        if not is_torch_function_enabled():
            return False
        return any(map(_overrides_functions, arguments(*args)))

    return ask


def _overrides_functions(value: Any) -> bool:
    handler = getattr(type(value), "__torch_function__", None)
    plain = type(value) is Tensor or type(value) is nn.Parameter
    return not plain and handler is not None and handler is not disabled_torch_function


_ARGUMENTS: tuple[Callable[..., Any], ...] = (lambda several: several, lambda one: (one,), lambda *several: several)
_PAIRS = [
    (original, _without_ours(original, arguments))
    for original, arguments in zip((getattr(overrides, name) for name in _NAMES), _ARGUMENTS, strict=True)
]
_BY_ORIGINAL: dict[int, Any] = {id(original): ours for original, ours in _PAIRS}
