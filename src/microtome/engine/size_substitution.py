"""Express the sizes and conditions of a run in the sizes of some tensors in it, such as those that cross a cut.

The symbols of a run are sizes of the model's inputs. A tensor behind a stride has a size such as `(s1 - 1)//4 + 1`,
which determines `s1` up to a remainder. So a new symbol stands for that size, and a condition on `s1` becomes one on
the new symbol: that the old one holds for every `s1` which gives the size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from microtome.engine.symbolic_shapes import NO_SIZE
from microtome.engine.torch_internals import interpret_sizes, size_functions

#: The most sizes of the model's inputs for which a condition is written out.
_MAX_CASES = 64
#: The most steps after which a size must repeat itself, but for a constant.
_MAX_PERIOD = 1024
#: Torch takes a symbol for this size or a larger one.
_SMALLEST = 2


class _Stride(NamedTuple):
    """A size as a function of a symbol `s`: `factor * ((s + shift) // stride) + offset`."""

    factor: int
    shift: int
    stride: int
    offset: int


class _Solution(NamedTuple):
    """A symbol of the run that a new one determines up to a remainder.

    Attributes:
        symbol: The symbol of the run.
        quotient: `(symbol + shift) // stride`, as an expression of the new symbol.
    """

    symbol: Any
    quotient: Any
    stride: int
    shift: int

    def cases(self) -> list[Any]:
        """The values of the symbol that give a size."""
        start = self.quotient * self.stride - self.shift
        return [start + remainder for remainder in range(self.stride)]


class SizeSubstitution:
    """Expresses sizes and conditions in symbols that are a dimension of some tensors.

    Args:
        shapes: The sizes of the tensors: ints, and expressions of the run's symbols.
        conditions: On the run's symbols.
        example: The values of the run's symbols, which meet the conditions.

    Attributes:
        shapes: The same with new symbols where a size was an expression of symbols that are no dimension.
        conditions: On the new symbols: where they are met, those of the run are, but for those of `hidden`.
        hidden: The run's symbols that conditions depend on, and the sizes of the tensors do not determine.
        exact: The run's symbols that the sizes of the tensors determine, as expressions of the new ones.
    """

    def __init__(
        self,
        shapes: Sequence[Sequence[Any]],
        conditions: Iterable[Any] = (),
        example: Mapping[Any, int] = MappingProxyType({}),
    ) -> None:
        self._example = dict(example)
        self.hidden: set[Any] = set()
        self._visible = {size for shape in shapes for size in shape if getattr(size, "is_Symbol", False)}
        self._exact: dict[Any, Any] = {symbol: symbol for symbol in self._visible}
        self._solutions: dict[Any, list[_Solution]] = {}
        self._replaced: dict[Any, Any] = {}
        self._fixed: dict[Any, Any] = {}
        found: list[Any] = []
        sizes = {size for shape in shapes for size in shape if not isinstance(size, int)}
        strided = [(size, *pair) for size in sizes if (pair := _find_stride(size)) is not None]
        for size, symbol, stride in sorted(strided, key=lambda one: (one[2].stride, str(one[0]))):
            found += self._solve(size, symbol, stride)
        for size in sorted(sizes, key=str):
            if self.express(size) is None:
                found += self._replace(size)
        found += [case for condition in conditions for case in self._translate(condition)]
        self._fixed = dict(pair for one in found if (pair := _fixed_size(one)) is not None)
        self.conditions = [one for one in dict.fromkeys(one.subs(self._fixed) for one in found) if one.free_symbols]
        self.exact = {symbol: size.subs(self._fixed) for symbol, size in self._exact.items()}
        self.shapes = [[size if isinstance(size, int) else self._known(size) for size in shape] for shape in shapes]

    def _known(self, size: Any) -> Any:
        expressed = self.express(size)
        assert expressed is not None
        return int(expressed) if expressed.is_number else expressed

    def _solve(self, size: Any, symbol: Any, found: _Stride) -> list[Any]:
        """Make a symbol for a size that another symbol determines; return the conditions that it meets."""
        from sympy import Eq

        if symbol in self._visible or self.express(size) is not None:
            return []
        new, conditions, constant = self._make_symbol(size), [], size.as_coeff_Add()[0]
        multiple = new - found.offset
        if found.factor != 1:
            functions = size_functions()
            conditions.append(Eq(functions.remainders[0](multiple, found.factor), 0))
            multiple = functions.floor_div(multiple, found.factor)
        self._solutions.setdefault(symbol, []).append(_Solution(symbol, multiple, found.stride, found.shift))
        self._replaced[size - constant] = new - constant
        if found.stride == 1:
            self._exact[symbol] = multiple - found.shift
            return conditions
        return conditions + _reachable(new, size)

    def _replace(self, size: Any) -> list[Any]:
        """Make a symbol for a size, whatever it is; return the conditions that it meets."""
        new, constant = self._make_symbol(size), size.as_coeff_Add()[0]
        self._replaced[size - constant] = new - constant
        return _reachable(new, size)

    def _make_symbol(self, size: Any) -> Any:
        from sympy import Symbol

        symbol = Symbol(f"d{len(self._visible)}", integer=True, positive=True)
        self._visible.add(symbol)
        self._example[symbol] = size.subs(self._example)
        return symbol

    def express(self, expression: Any) -> Any | None:
        """A size in the new symbols; None: they do not determine it."""
        cases = self._cases(expression)
        return cases[0].subs(self._fixed) if cases is not None and len(cases) == 1 else None

    def _translate(self, condition: Any) -> list[Any]:
        """The conditions on the new symbols for one of the run; none if they do not determine it."""
        cases = self._cases(condition)
        if cases is None or not all(map(self._may_hold, cases)):
            self.hidden |= condition.free_symbols - self._visible
            return []
        return _strongest([case for case in cases if case != True])  # noqa: E712

    def _may_hold(self, condition: Any) -> bool:
        """Whether a condition is not false of the example."""
        try:
            return bool(condition.subs(self._example) != False)  # noqa: E712  of sympy
        except NO_SIZE:
            return False

    def _cases(self, expression: Any) -> list[Any] | None:
        """The values of an expression for the symbols of the run that give the sizes; None: these decide none."""
        if expression.free_symbols <= self._visible:
            return [expression]
        expression = _simplify(expression.xreplace(self._replaced))
        for symbol in sorted(expression.free_symbols & self._solutions.keys(), key=str):
            for solution in self._solutions[symbol]:
                expression = _simplify(_substitute_quotients(expression, solution))
        hidden = sorted(expression.free_symbols - self._visible, key=str)
        if not hidden:
            return [expression]
        if not all(symbol in self._solutions for symbol in hidden):
            return None
        values = [self._solutions[symbol][0].cases() for symbol in hidden]
        if math.prod(map(len, values)) > _MAX_CASES:
            return None
        try:
            cases = [expression.subs(dict(zip(hidden, one, strict=True))) for one in itertools.product(*values)]
        except NO_SIZE:
            return None
        return list(dict.fromkeys(map(_simplify, cases)))


def _reachable(new: Any, size: Any) -> list[Any]:
    """Exclude the sizes that only symbols of 1 give: for these, torch decides nothing."""
    try:
        least = size.subs(dict.fromkeys(size.free_symbols, _SMALLEST))
        alone = size.subs(dict.fromkeys(size.free_symbols, 1)) < least
    except NO_SIZE:  # no run has such sizes
        return []
    return [new >= least] if least > 1 and alone else []


def _fixed_size(condition: Any) -> tuple[Any, Any] | None:
    """The symbol that a condition fixes, and its size."""
    if condition.func.__name__ != "Equality" or not (condition.lhs.is_Symbol and condition.rhs.is_Integer):
        return None
    return condition.lhs, condition.rhs


def _strongest(cases: list[Any]) -> list[Any]:
    """Of inequalities that differ by a constant alone, the one that implies the others; otherwise all."""
    from sympy import Ge, Gt, Le, Lt

    if len(cases) < 2 or cases[0].func not in (Ge, Gt, Le, Lt):
        return cases
    first = cases[0]
    if any(case.func is not first.func for case in cases):
        return cases
    differences = [(case.lhs - case.rhs) - (first.lhs - first.rhs) for case in cases]
    if not all(one.is_number for one in differences):
        return cases
    choose = min if first.func in (Ge, Gt) else max
    return [cases[differences.index(choose(differences))]]


def _find_stride(size: Any) -> tuple[Any, _Stride] | None:
    """Find the symbol that a size depends on, and how; None: in another way.

    A size that is made of sums, and of quotients and remainders of constants, is the same after so many steps as the
    product of these constants, but for a constant.
    """
    functions = size_functions()
    if len(size.free_symbols) != 1 or size.is_Symbol:
        return None
    (symbol,) = size.free_symbols
    size, period = _simplify(size), 1
    for part in _parts(size):
        if part.func in functions.divisions and part.args[1].is_Integer:
            period *= int(part.args[1])
        elif not (part.is_Add or part.is_Symbol or part.is_Integer or _is_multiple(part)):
            return None
    if period > _MAX_PERIOD:
        return None
    values = [int(interpret_sizes(size, {symbol: number})) for number in range(2 * period + 2)]
    steps = [number for number in range(1, len(values)) if values[number] != values[number - 1]]
    if len(steps) < 2:
        return None
    stride, shift = steps[1] - steps[0], -steps[0] % (steps[1] - steps[0])
    factor = values[steps[0]] - values[steps[0] - 1]
    offset = values[0] - factor * (shift // stride)
    if factor < 1 or any(
        value != factor * ((number + shift) // stride) + offset for number, value in enumerate(values)
    ):
        return None
    return symbol, _Stride(factor, shift, stride, offset)


def _parts(expression: Any) -> Iterable[Any]:
    from sympy import preorder_traversal

    found: Iterable[Any] = preorder_traversal(expression)
    return found


def _is_multiple(expression: Any) -> bool:
    return expression.is_Mul and len(expression.args) == 2 and expression.args[0].is_Integer


def _simplify(expression: Any) -> Any:
    """Divide numerator and divisor by common factors, and flatten nested quotients."""
    functions = size_functions()
    expression = expression.replace(functions.floor_div, _divide)
    for remainder in functions.remainders:
        expression = expression.replace(remainder, lambda base, divisor, func=remainder: _modulo(func, base, divisor))
    return expression


def _divide(base: Any, divisor: Any) -> Any:
    floor_div = size_functions().floor_div
    if not divisor.is_Integer:
        return floor_div(base, divisor)
    base, divisor = base.expand(), int(divisor)
    constant, rest = base.as_coeff_Add()
    if not constant.is_Integer or rest.is_zero:
        return floor_div(base, divisor)
    factors = [term.as_coeff_Mul()[0] for term in rest.as_ordered_terms()]
    common = math.gcd(divisor, *(int(one) if one.is_Integer else 1 for one in factors))
    constant, divisor, rest = int(constant) // common, divisor // common, (rest / common).expand()
    if rest.func is floor_div and rest.args[1].is_Integer and divisor > 1:
        inner, by = rest.args
        return _divide(inner + constant * by, by * divisor)
    return floor_div(rest + constant, divisor)


def _modulo(func: Any, base: Any, divisor: Any) -> Any:
    if not divisor.is_Integer:
        return func(base, divisor)
    constant, rest = base.expand().as_coeff_Add()
    terms = [term for term in rest.as_ordered_terms() if not (term.as_coeff_Mul()[0] / divisor).is_Integer]
    return func(sum(terms, constant % divisor if constant.is_Integer else constant), divisor)


def _substitute_quotients(expression: Any, solution: _Solution) -> Any:
    """Replace the quotients of a symbol that a solution determines."""
    symbol, quotient, stride, shift = solution

    def replace(base: Any, divisor: Any) -> Any:
        constant, rest = base.as_coeff_Add()
        if rest == symbol and divisor.is_Integer and not divisor % stride and not (constant - shift) % stride:
            return _divide(quotient + (constant - shift) // stride, divisor // stride)
        return size_functions().floor_div(base, divisor)

    expression = expression.replace(size_functions().floor_div, replace)
    return expression.subs(symbol, quotient - shift) if stride == 1 else expression
