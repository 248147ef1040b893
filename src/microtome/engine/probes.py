"""Probes, which observe a run without changing it."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from microtome.engine.call import Call
from microtome.engine.composite_ops import CompositeOp, Function
from microtome.engine.torch_internals import OpOverload
from microtome.results.trace import Phase

#: An operator, or a function of torch that the session reports as one operator.
AnyOp = OpOverload | Function


class Where(NamedTuple):
    """The context in which an operator runs.

    Attributes:
        call: The call whose forward or backward runs it; None outside any, such as in the backward of a loss, and in
            every backward of a session with `backward=False`.
        function: The public function of torch that the code called; None in a session without composite operators.
        autocast: Whether that function was called under autocast.
        composite: For a composite operator that has run: this run of it.
        part_of: For an operator in a backward: the run of the composite operator whose backward it is part of.
    """

    call: Call | None
    phase: Phase
    function: Function | None = None
    autocast: bool = False
    composite: CompositeOp | None = None
    part_of: CompositeOp | None = None


class Probe:
    """Observes a run and cannot change it: the return values of its methods are ignored.

    Override the methods you need; the others cost nothing. Every `enter` is followed by one `exit` or one `fail` of the
    same call, also when the forward raises; every `enter_backward` by one `exit_backward`.
    """

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called when a call begins, with its arguments after any `ReplaceInputs`."""

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Called when a call returns."""

    def fail(self, call: Call, error: BaseException) -> None:
        """Called when a call raises."""

    def op_begins(self, where: Where, func: AnyOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called before an operator runs."""

    def op(self, where: Where, func: AnyOp, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Called after an operator ran in the thread that opened the session, or in a backward that it called."""

    def read(self, where: Where, tensor: Tensor) -> None:
        """Called when Python reads values of a tensor without an operator, in a session with composite operators."""

    def backward_moves(self, call: Call | None) -> None:
        """Called when the backward moves on to another call; None: to nodes of no call, or it ended.

        Cheaper than `enter_backward` and `exit_backward`.
        """

    def enter_backward(self, call: Call) -> None:
        """Called when the backward of a call begins, or resumes after that of another."""

    def exit_backward(self, call: Call) -> None:
        """Called when the backward leaves a call."""
