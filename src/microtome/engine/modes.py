"""The modes of torch that are active in this thread."""

from __future__ import annotations

from microtome.engine.torch_internals import (
    dispatch_modes,
    function_modes,
    mode_flags,
    pop_dispatch_mode,
    pop_function_mode,
    push_dispatch_mode,
    push_function_mode,
    set_mode_flags,
)


class Modes:
    """The stacks of function and dispatch modes as found when this is made, to be restored after an interrupt.

    A signal that comes while torch pushes or pops a mode, as its own Python code often does for an operator on fake
    tensors, leaves the stack as it is at that moment.
    """

    def __init__(self) -> None:
        self._functions = function_modes()
        self._dispatch = dispatch_modes()
        self._flags = mode_flags()

    def restore_after(self, _: object, error: BaseException | None, __: object) -> None:
        """As the callback of an exit stack: restore them if the block was left by an interrupt."""
        if error is not None and not isinstance(error, Exception):
            self.restore()

    def restore(self) -> None:
        if function_modes() != self._functions:
            while function_modes():
                pop_function_mode()
            for mode in self._functions:
                push_function_mode(mode)
        if dispatch_modes() != self._dispatch:
            while stack := dispatch_modes():
                pop_dispatch_mode(stack[-1])
            for mode in self._dispatch:
                push_dispatch_mode(mode)
        set_mode_flags(self._flags)
