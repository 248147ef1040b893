"""What an operator does, as numbers, and the register of formulas that say so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from microtome.engine.torch_internals import HigherOrderOperator, OpOverload, OpOverloadPacket, schema_of
from microtome.errors import BadFormula, NoMatch, said


class OpCost(NamedTuple):
    """What one run of an operator does.

    Attributes:
        macs: Multiply-accumulates: a product, and its addition to a sum.
        sums: How many sums these make. Each begins with its first product, so it takes one addition less.
        other: All other operations, one for each element that a function is applied to.
    """

    macs: int = 0
    sums: int = 0
    other: int = 0

    @property
    def flops(self) -> int:
        return 2 * self.macs + self.other

    @property
    def madds(self) -> int:
        return 2 * self.macs - self.sums + self.other

    def plus(self, more: OpCost) -> OpCost:
        return OpCost(self.macs + more.macs, self.sums + more.sums, self.other + more.other)


#: Takes the arguments of the operator, and what it returned as `out`. A number is that many other operations.
Formula = Callable[..., "OpCost | int"]

NOTHING = OpCost()

_registered: dict[Any, Formula] = {}  # by users
_own: dict[str, Formula] = {}
_found: dict[Any, Formula | None] = {}


def register_formula(op: OpOverload | OpOverloadPacket | str, formula: Formula) -> None:
    """Say what an operator costs that microtome does not know, or knows otherwise.

    Args:
        op: `torch.ops.mylib.scan`, one of its overloads, or its name, `"mylib::scan"`.
        formula: Takes what the operator takes, and what it returned as `out`; returns a `OpCost`, or the number of its
            operations where none is a multiply-accumulate.

    >>> from torch import ops
    >>> register_formula(ops.aten.frac, lambda x, *, out: 2 * out.numel())
    >>> work_of(ops.aten.frac.default, (torch.ones(3),), {}, torch.ones(3))
    Work(macs=0, sums=0, other=6)
    >>> del _registered[ops.aten.frac]; _found.clear()
    """
    if not callable(formula):
        raise BadFormula(f"a formula is a function of the operator's arguments, got {type(formula).__name__}")
    if not isinstance(op, OpOverload | OpOverloadPacket | HigherOrderOperator | str):
        raise BadFormula(f"a formula is for an operator, such as torch.ops.mylib.scan, got {op!r}")
    _registered[_packet(op) if isinstance(op, str) else op] = formula
    _found.clear()


def _packet(name: str) -> OpOverloadPacket:
    namespace, _, rest = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), rest, None) if rest else None
    if not isinstance(packet, OpOverloadPacket):
        raise NoMatch(f"torch has no operator {name!r}: write it as 'mylib::scan', after it is defined")
    return packet


def formula(*names: str) -> Callable[[Formula], Formula]:
    """Register one of our own formulas: aten's operators by their name alone, others as `namespace::name`."""

    def register(function: Formula) -> Formula:
        for name in names:
            assert name not in _own, name
            _own[name] = function
        return function

    return register


def work_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpCost | None:
    """What a run of an operator did; None if that is not known."""
    try:
        found = _found[func]
    except KeyError:
        found = _found[func] = _find(func)
    return None if found is None else work_by(found, func, args, kwargs, out)


def work_by(formula: Formula, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpCost | None:
    """What a formula says."""
    try:
        work = formula(*args, **{**kwargs, "out": out})
    except Exception as error:
        if func not in _registered and registered(func) is None:
            return None  # arguments that our formula did not foresee: not known, and so listed
        raise BadFormula(f"the formula of {func} failed: {said(error)}") from error
    if work.__class__ is OpCost:
        return work
    if work.__class__ is not int or work < 0:
        raise BadFormula(f"the formula of {func} gave {work!r}: a Work or a count of operations was expected")
    return OpCost(0, 0, work)


def registered(function: Any) -> Formula | None:
    """What a user registered for an operator, or for the operator of a function that is shown whole."""
    if isinstance(function, OpOverload):
        return _registered.get(function.overloadpacket)
    packet = getattr(torch.ops.aten, function.__name__, None)
    return _registered.get(function) or _registered.get(packet)


def _find(func: Any) -> Formula | None:
    """The formula of an operator. One that is told where to write its output is as the one that is not."""
    formula = _find_any(func)
    if formula is None or not isinstance(func, OpOverload):
        return formula
    outs = {a.name for a in schema_of(func).arguments if a.kwarg_only and a.alias_info and a.alias_info.is_write}
    if not outs:
        return formula

    def without_outs(*args: Any, out: Any, **kwargs: Any) -> OpCost | int:
        return formula(*args, **{name: value for name, value in kwargs.items() if name not in outs}, out=out)

    return without_outs


def _find_any(func: Any) -> Formula | None:
    if not isinstance(func, OpOverload):  # an operator on functions
        return _registered.get(func) or _of_torch(func)
    packet = func.overloadpacket
    if func in _registered or packet in _registered:
        return _registered.get(func) or _registered[packet]
    name = packet.__name__
    if func.namespace != "aten":
        return _own.get(f"{func.namespace}::{name}") or _of_torch(packet)
    name = name if name.startswith("__") else name.rstrip("_")  # `add_` is `add`
    return _own.get(name) or _of_torch(packet) or _by_tags(func, name)


def _of_torch(packet: Any) -> Formula | None:
    """The formula that torch's own counter has, which gives two FLOPs for each multiply-accumulate."""
    from torch.utils.flop_counter import flop_registry  # slow to import, seldom needed

    known = flop_registry.get(packet)
    if known is None:
        return None

    def convert(*args: Any, out: Any, **kwargs: Any) -> OpCost:
        return OpCost(known(*args, **kwargs, out_val=out) // 2, first(out).numel())

    return convert


def _by_tags(func: OpOverload, name: str) -> Formula | None:
    tags = set(func.tags)
    if name != func.overloadpacket.__name__ and hasattr(torch.ops.aten, name):  # some in-place ones carry no tags
        base = getattr(torch.ops.aten, name)
        tags.update(tag for overload in base.overloads() for tag in getattr(base, overload).tags)
    schema = schema_of(func)
    if torch.Tag.inplace_view in tags or any(r.alias_info and not r.alias_info.is_write for r in schema.returns):
        return lambda *_, out, **__: NOTHING  # a view
    if torch.Tag.pointwise in tags:
        return lambda *_, out, **__: first(out).numel()
    if torch.Tag.reduction in tags:
        return lambda x, *_, out, **__: x.numel()
    return None


def first(out: Any) -> Tensor:
    """The first tensor of what an operator returned."""
    return out if isinstance(out, Tensor) else next(item for item in out if isinstance(item, Tensor))


def op_name(func: Any) -> str:
    """The name of an operator without its overload."""
    return func.overloadpacket.__name__ if isinstance(func, OpOverload) else func.__name__
