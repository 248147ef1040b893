"""Check sizes of tensors against expressions in a file, such as `s0 >= 2` and `s1//2`."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence

_OPERATORS: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_FUNCTIONS: dict[str, Callable[..., int]] = {
    "Eq": operator.eq,
    "Ne": operator.ne,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "FloorDiv": operator.floordiv,
    "Max": max,
    "Min": min,
}
_MAX_POWER = 4


def evaluate(text: str, sizes: Mapping[str, int]) -> int:
    """Evaluate an expression of sizes.

    Raises:
        ValueError: It has other functions or names.

    >>> evaluate("(s0//2)**2 + Mod(s1, 8)", {"s0": 6, "s1": 12})
    13
    >>> evaluate("Eq(s0, 3)", {"s0": 4})
    False
    """
    try:
        return _evaluate(ast.parse(text, mode="eval").body, sizes)
    except (SyntaxError, ZeroDivisionError, RecursionError, TypeError, MemoryError) as error:
        raise ValueError(f"expected an expression of sizes, got {text!r:.80}") from error


def _evaluate(node: ast.AST, sizes: Mapping[str, int]) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name) if name in sizes:
            return sizes[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand, sizes)
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int(power))) if 0 <= power <= _MAX_POWER:
            return int(_evaluate(left, sizes) ** power)
        case ast.BinOp(left=left, op=op, right=right) | ast.Compare(left=left, ops=[op], comparators=[right]) if (
            type(op) in _OPERATORS
        ):
            return _OPERATORS[type(op)](_evaluate(left, sizes), _evaluate(right, sizes))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*[_evaluate(one, sizes) for one in arguments])
    raise ValueError(f"expected an expression of sizes, got {ast.unparse(node)!r:.80}")


def find_unmet(
    expected: Sequence[Sequence[str]], conditions: Sequence[str], shapes: Sequence[Sequence[int]]
) -> str | None:
    """Return the first size or condition that some shapes do not meet; None: they meet all.

    A symbol stands for 1 or more.

    Args:
        expected: The sizes: numbers, symbols, and expressions of these.
    """
    sizes: dict[str, int] = {}
    every = [pair for one, shape in zip(expected, shapes, strict=True) for pair in zip(one, shape, strict=True)]
    for text, size in every:
        if text.isidentifier() and sizes.setdefault(text, size) != size:
            return f"one size {text}, got {sizes[text]} and {size}"
    for text, size in every:
        if (needed := evaluate(text, sizes)) != size:
            return f"a size of {text if text.isdigit() else f'{text} = {needed}'}, got {size}"
        if size == 0 and text != "0":
            return f"a size {text} of 1 or more, got 0"
    for condition in conditions:
        if not evaluate(condition, sizes):
            found = ", ".join(f"{name} = {size}" for name, size in sizes.items())
            return f"sizes with {condition}, got {found}"
    return None
