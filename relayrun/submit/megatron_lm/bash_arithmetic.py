"""Bash's arithmetic in whole numbers. Nothing runs here; a value that only a job knows is a mark."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from typing import Any

from relayrun.submit.megatron_lm.bash_syntax import UnreadableBash
from relayrun.submit.megatron_lm.bash_values import MARK, BashValues


def _truncated(left: int, right: int) -> int:
    quotient = abs(left) // abs(right)
    return quotient if (left < 0) == (right < 0) else -quotient


_OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _truncated,
    ast.Pow: operator.pow,
    ast.Mod: lambda left, right: left - right * _truncated(left, right),
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.USub: operator.sub,
    ast.UAdd: operator.add,
    ast.Invert: lambda _, right: ~right,
    ast.Not: lambda _, right: not right,
}


class BashArithmetic(BashValues):
    """Values of words, arithmetic included."""

    def arithmetic(self, raw: str, at: int) -> int | str:
        """The value of arithmetic; a mark if it is not known."""
        result: int | str = 0
        for part in self.quoted(raw, at).split(","):
            text = self.without_unset(part).strip()
            step = re.fullmatch(r"(\+\+|--)?([A-Za-z_]\w*)(\+\+|--)?", text)
            assigned = re.fullmatch(r"([A-Za-z_]\w*)\s*(\*\*|<<|>>|[-+*/%&|^])?=(?!=)(.*)", text, re.S)
            if (changed := step if step is not None and (step[1] or step[3]) else assigned) is not None:
                counter = changed[2] if changed is step else changed[1] if changed[2] else ""
                if counter and self.value(counter, at) is None:
                    self.variables[counter] = "0"
            if step is not None and (sign := step[1] or step[3]):
                before = self._calculate(step[2], at)
                after = before if isinstance(before, str) else before + (1 if sign == "++" else -1)
                self.variables[step[2]] = str(after)
                result = after if step[1] else before
            elif assigned is not None:
                name, sign, right = assigned.groups()
                result = self._calculate(f"{name} {sign} ({right})" if sign else right, at)
                self.variables[name] = str(result)
            else:
                result = self._calculate(text or "0", at)
        return result

    def _calculate(self, text: str, at: int) -> int | str:
        if (unknown := MARK.search(text)) is not None:
            return unknown[0]
        text = re.sub(r"(?<![\w.])0([0-7]+)\b", r"0o\1", re.sub(r"!(?!=)", " not ", text))
        text = text.replace("&&", " and ").replace("||", " or ").replace("\n", " ")
        choice = re.fullmatch(r"([^?]+)\?([^:]+):(.+)", text)
        if choice is not None:
            text = f"({choice[2]}) if ({choice[1]}) else ({choice[3]})"
        try:
            return self._number(ast.parse(text.strip(), mode="eval").body, at, 0)
        except (SyntaxError, ValueError, KeyError, ArithmeticError, RecursionError, MemoryError):
            raise UnreadableBash(at, f"the arithmetic {text.strip()!r} is not read") from None

    def _number(self, node: ast.expr, at: int, depth: int) -> int | str:
        def inner(each: ast.expr) -> int | str:
            return self._number(each, at, depth + 1)

        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.Name) and depth < 50:
            value = self.plain(node.id, at) or "0"
            if MARK.search(value):
                return value
            return int(value) if re.fullmatch(r"-?(0|[1-9]\d*)", value) else self._calculate(value, at)
        if isinstance(node, ast.IfExp):
            chosen = inner(node.test)
            return chosen if isinstance(chosen, str) else inner(node.body if chosen else node.orelse)
        if isinstance(node, ast.BoolOp):
            values = [inner(each) for each in node.values]
            marks = [each for each in values if isinstance(each, str)]
            return marks[0] if marks else int((all if isinstance(node.op, ast.And) else any)(values))
        if isinstance(node, ast.BinOp):
            left, right, kind = inner(node.left), inner(node.right), type(node.op)
        elif isinstance(node, ast.UnaryOp):
            left, right, kind = 0, inner(node.operand), type(node.op)  # type: ignore[assignment]
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, right, kind = inner(node.left), inner(node.comparators[0]), type(node.ops[0])  # type: ignore[assignment]
        else:
            raise ValueError
        if isinstance(left, str) or isinstance(right, str):
            return left if isinstance(left, str) else right
        if kind in (ast.Pow, ast.LShift) and not 0 <= right <= 64:
            raise ValueError
        return int(_OPERATORS[kind](left, right))
