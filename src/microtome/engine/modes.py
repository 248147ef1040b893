"""The modes of torch that are active in this thread."""

from __future__ import annotations

from torch import overrides
from torch.utils import _python_dispatch


class Modes:
    """The stacks of function and dispatch modes as found when this is made, to be restored after an interrupt.

    A signal that comes while torch pushes or pops a mode, as its own Python code often does for an operator on fake
    tensors, leaves the stack as it is at that moment.
    """

    def __init__(self) -> None:
        self._functions = overrides._get_current_function_mode_stack()
        self._dispatch = _python_dispatch._get_current_dispatch_mode_stack()
        self._flags = {name: getattr(_python_dispatch, name) for name in _FLAGS}

    def restore_after(self, _: object, error: BaseException | None, __: object) -> None:
        """As the callback of an exit stack: restore them if the block was left by an interrupt."""
        if error is not None and not isinstance(error, Exception):
            self.restore()

    def restore(self) -> None:
        if overrides._get_current_function_mode_stack() != self._functions:
            while overrides._get_current_function_mode_stack():
                overrides._pop_mode()
            for function_mode in self._functions:
                overrides._push_mode(function_mode)
        if _python_dispatch._get_current_dispatch_mode_stack() != self._dispatch:
            while stack := _python_dispatch._get_current_dispatch_mode_stack():
                _python_dispatch._pop_mode(getattr(stack[-1], "_mode_key", None))
            for dispatch_mode in self._dispatch:
                _python_dispatch._push_mode(dispatch_mode)
        for name, value in self._flags.items():
            setattr(_python_dispatch, name, value)
        if _SET_FLAG is not None:
            _SET_FLAG(self._flags[_FLAG])


_FLAG = "_is_in_any_mode_without_ignore_compile_internals"  # which torch keeps in C too
_SET_FLAG = getattr(_python_dispatch, "set_is_in_mode_without_ignore_compile_internals", None)
_FLAGS = [name for name in vars(_python_dispatch) if name.startswith("_is_in_")]
