"""A calculator that a model may call: numbers, brackets and + - * /. Parses text, and executes none of it."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

_OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
LONGEST = 200
"""Characters of an expression."""


def calc(expression: str) -> int | float:
    """What an expression of numbers, brackets and + - * / comes to: "37 * 48" gives 1776.

    Raises ValueError for anything else.
    """
    if len(expression) > LONGEST:
        raise ValueError(f"an expression has at most {LONGEST} characters, not {len(expression)}")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, OverflowError, RecursionError) as error:
        raise ValueError(f"{expression!r} cannot be computed: {error}") from error
    if not math.isfinite(value):
        raise ValueError(f"{expression!r} cannot be computed: the result is too large")
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            result: int | float = _OPERATIONS[type(op)](_value(left), _value(right))
            return result
    raise ValueError(f"an expression has numbers, brackets and + - * / only, not {ast.unparse(node)!r}")
