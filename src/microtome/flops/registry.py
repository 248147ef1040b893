"""The cost of an operator, and the registry of formulas that compute it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from microtome.engine.torch_internals import HigherOrderOperator, OpOverload, OpOverloadPacket, schema_of
from microtome.errors import BadFormula, NoMatch, describe_error


class OpCost(NamedTuple):
    """The cost of one run of an operator.

    Attributes:
        macs: Multiply-accumulates: a product, and its addition to a sum.
        sums: The number of these sums. Each begins with its first product, so it takes one addition less.
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
_built_in: dict[str, Formula] = {}
_resolved: dict[Any, Formula | None] = {}


def register_formula(op: OpOverload | OpOverloadPacket | str, formula: Formula) -> None:
    """Register the formula of an operator without one, or replace it.

    Args:
        op: `torch.ops.mylib.scan`, one of its overloads, or its name, `"mylib::scan"`.
        formula: Takes the arguments of the operator, and its output as `out`; returns an `OpCost`, or the number of
            operations if none is a multiply-accumulate.

    >>> from torch import ops
    >>> register_formula(ops.aten.frac, lambda x, *, out: 2 * out.numel())
    >>> cost_of(ops.aten.frac.default, (torch.ones(3),), {}, torch.ones(3))
    OpCost(macs=0, sums=0, other=6)
    >>> del _registered[ops.aten.frac]; _resolved.clear()
    """
    if not callable(formula):
        raise BadFormula(f"expected a formula as a function of the operator's arguments, got {type(formula).__name__}")
    if not isinstance(op, OpOverload | OpOverloadPacket | HigherOrderOperator | str):
        raise BadFormula(f"expected an operator, such as torch.ops.mylib.scan, got {op!r}")
    _registered[_packet(op) if isinstance(op, str) else op] = formula
    _resolved.clear()


def _packet(name: str) -> OpOverloadPacket:
    namespace, _, rest = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), rest, None) if rest else None
    if not isinstance(packet, OpOverloadPacket):
        raise NoMatch(f"expected an operator as 'mylib::scan', after its definition, got {name!r}")
    return packet


def formula(*names: str) -> Callable[[Formula], Formula]:
    """Register a built-in formula: aten's operators by their name alone, others as `namespace::name`."""

    def register(function: Formula) -> Formula:
        register_formulas({" ".join(names): function})
        return function

    return register


def register_formulas(table: dict[str, Formula]) -> None:
    """Register built-in formulas, each by the names of its operators, separated by whitespace."""
    for names, function in table.items():
        for name in names.split():
            assert name not in _built_in, name
            _built_in[name] = function


def cost_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpCost | None:
    """Return the cost of a run of an operator; None if no formula is known."""
    try:
        found = _resolved[func]
    except KeyError:
        found = _resolved[func] = _resolve(func)
    return None if found is None else evaluate(found, func, args, kwargs, out)


def evaluate(formula: Formula, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpCost | None:
    """Evaluate a formula; None if a built-in one does not handle these arguments."""
    try:
        cost = formula(*args, **{**kwargs, "out": out})
    except Exception as error:
        if func not in _registered and registered_formula(func) is None:
            return None  # so that the operator is listed as unknown
        raise BadFormula(f"the formula of {func} failed: {describe_error(error)}") from error
    if cost.__class__ is OpCost:
        return cost
    if cost.__class__ is not int or cost < 0:
        raise BadFormula(f"the formula of {func}: expected an OpCost or a number of operations, got {cost!r}")
    return OpCost(0, 0, cost)


def registered_formula(function: Any) -> Formula | None:
    """Return the formula that a user registered for an operator or a composite operator."""
    if isinstance(function, OpOverload):
        return _registered.get(function.overloadpacket)
    packet = getattr(torch.ops.aten, function.__name__, None)
    return _registered.get(function) or _registered.get(packet)


def _resolve(func: Any) -> Formula | None:
    """Find the formula of an operator; an `out=` overload has that of the overload without."""
    from microtome.flops import composite  # noqa: F401  registers the built-in formulas, and imports this module

    formula = _lookup(func)
    if formula is None or not isinstance(func, OpOverload):
        return formula
    outs = {a.name for a in schema_of(func).arguments if a.kwarg_only and a.alias_info and a.alias_info.is_write}
    if not outs:
        return formula

    def without_outs(*args: Any, out: Any, **kwargs: Any) -> OpCost | int:
        return formula(*args, **{name: value for name, value in kwargs.items() if name not in outs}, out=out)

    return without_outs


def _lookup(func: Any) -> Formula | None:
    if not isinstance(func, OpOverload):  # an operator on functions
        return _registered.get(func) or _torch_formula(func)
    packet = func.overloadpacket
    if func in _registered or packet in _registered:
        return _registered.get(func) or _registered[packet]
    name = packet.__name__
    if func.namespace != "aten":
        return _built_in.get(f"{func.namespace}::{name}") or _torch_formula(packet)
    name = name if name.startswith("__") else name.rstrip("_")  # `add_` is `add`
    return _built_in.get(name) or _torch_formula(packet) or _formula_by_tags(func, name)


def _torch_formula(packet: Any) -> Formula | None:
    """Return the formula of torch's own counter, which counts two FLOPs for each multiply-accumulate."""
    from torch.utils.flop_counter import flop_registry  # slow to import, seldom needed

    known = flop_registry.get(packet)
    if known is None:
        return None

    def convert(*args: Any, out: Any, **kwargs: Any) -> OpCost:
        return OpCost(known(*args, **kwargs, out_val=out) // 2, first(out).numel())

    return convert


def _formula_by_tags(func: OpOverload, name: str) -> Formula | None:
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
    """Return the first tensor of an operator's output."""
    return out if isinstance(out, Tensor) else next(item for item in out if isinstance(item, Tensor))


def op_name(func: Any) -> str:
    """Return the name of an operator without its overload."""
    return func.overloadpacket.__name__ if isinstance(func, OpOverload) else func.__name__
