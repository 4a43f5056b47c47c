"""The shell's own commands in a launcher that is followed: `set`, `echo`, `read`, `source` and others."""

from __future__ import annotations

import ast
import operator
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relayrun.submit.megatron_lm.bash_syntax import Node, UnreadableBash
from relayrun.submit.megatron_lm.bash_test import formatted
from relayrun.submit.megatron_lm.bash_values import MARK, BashValues, Source


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
        if (choice := re.fullmatch(r"([^?]+)\?([^:]+):(.+)", text)) is not None:
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


MAX_SCRIPT_BYTES = 1 << 20
PROGRAM = re.compile(r"(?:.*/)?pretrain_\w+\.py")


@dataclass(frozen=True)
class Started:
    """A program that a script starts, with its environment."""

    where: str
    words: list[str]
    environment: Mapping[str, str]

    @property
    def program(self) -> int:
        """The place of the training program among the words; -1: there is none."""
        return next((number for number, word in enumerate(self.words) if PROGRAM.fullmatch(word)), -1)


@dataclass
class Followed:
    """The programs that a script starts, and the lines that prepare them."""

    launched: list[Started] = field(default_factory=list)
    others: list[Started] = field(default_factory=list)
    setup: list[tuple[str, str]] = field(default_factory=list)
    """Lines that prepare the environment, each with its place."""
    ignored: list[tuple[str, str]] = field(default_factory=list)
    """Traps and such, each with its place."""


class LeaveBash(Exception):
    """`break`, `continue`, `return` or `exit`."""

    def __init__(self, kind: str, at: int, status: bool | None) -> None:
        self.kind, self.at, self.status = kind, at, status


class BashBuiltins(BashArithmetic):
    """The state of a shell, and its own commands."""

    def __init__(self, variables: Mapping[str, str], defaults: Mapping[str, str], source: Source) -> None:
        super().__init__(variables, defaults, source)
        self.functions: dict[str, tuple[Source, Node]] = {}
        self.found = Followed()
        self.files: dict[str, str] = {}
        """Files that the script writes, with their text."""
        self.output: list[str] | None = None
        self.steps = [0]
        self.assigned: set[str] = set()
        """Names that the script gives a value."""
        self.locals: list[dict[str, object]] = []
        self.options: set[str] = set()
        self.input: str | None = None

    def _inside(self, source: Source, nodes: list[Node] | None = None) -> bool | None:
        """Follow another text in this shell."""
        raise NotImplementedError

    def _until_return(self, positional: list[str], source: Source, nodes: list[Node] | None = None) -> bool | None:
        """Follow a function or a sourced file, with positional parameters of its own, to its end or its `return`."""
        outer, self.positional = self.positional, positional
        try:
            return self._inside(source, nodes)
        except LeaveBash as left:
            if left.kind != "return":
                raise
            return left.status
        finally:
            self.positional = outer

    def _do_set(self, words: list[str], node: Node) -> bool:
        for number, word in enumerate(words):
            if word == "--" or not re.match(r"[-+]\w", word):
                self.positional = words[number + (word == "--") :]
                break
            if word == "-o" and words[number + 1 : number + 2] == ["allexport"]:
                self.options.add("a")
            elif "a" in word[1:] and word[1:] != "allexport":
                (self.options.add if word[0] == "-" else self.options.discard)("a")
            elif word in ("-o", "+o"):
                break
        return True

    def _do_unset(self, words: list[str], node: Node) -> bool:
        for word in words:
            if (element := re.fullmatch(r"(\w+)\[(.*)\]", word)) is not None:
                array = self.variables.get(element[1])
                if isinstance(array, dict):
                    array.pop(element[2], None)
            elif word != "-f":
                self.variables.pop(word, None)
                self.exported.discard(word)
        return True

    def _do_shift(self, words: list[str], node: Node) -> bool:
        self.positional = self.positional[int(words[0]) if words and words[0].isdigit() else 1 :]
        return True

    def _do_echo(self, words: list[str], node: Node) -> bool:
        end, escapes = "\n", False
        while words and re.fullmatch(r"-[neE]+", words[0]):
            end, escapes = "" if "n" in words[0] else end, escapes or "e" in words[0]
            words = words[1:]
        text = " ".join(words)
        self._say(text.replace("\\n", "\n").replace("\\t", "\t") + end if escapes else text + end, node)
        return True

    def _do_printf(self, words: list[str], node: Node) -> bool:
        target = words[1] if words[:1] == ["-v"] else None
        words = words[2:] if target is not None else words[1:] if words[:1] == ["--"] else words
        text = formatted(words)
        if text is None:
            text = self.mark(node.at, "the output of printf is not read")
        if target is not None:
            self.variables[target] = text
        else:
            self._say(text, node)
        return True

    def _say(self, text: str, node: Node) -> None:
        """Give text to what reads the output: a substitution, or a file."""
        for kind, word in node.redirections:
            if kind in (">", ">|"):
                self.files[self.text(word)] = text
                return
            if kind == ">>" or (kind == ">&" and word.text == "2"):
                return
        if self.output is not None:
            self.output.append(text)

    def _do_read(self, words: list[str], node: Node) -> bool | None:
        letters = "".join(word[1:] for word in words if word.startswith("-"))
        names = [word for word in words if not word.startswith("-")]
        known = self.input is not None and not MARK.search(self.input) and not re.search(r"[^ra]", letters)
        if not known or not names:
            return self._unread(names, node)
        ifs = self.variables.get("IFS", " \t\n")
        line = (self.input or "").split("\n")[0]
        if "a" in letters:
            parts = [part for part in re.split(f"[{re.escape(str(ifs))}]", line) if part] if ifs else [line]
            self.variables[names[0]] = {str(number): part for number, part in enumerate(parts)}
            return True
        parts = re.split(f"[{re.escape(str(ifs))}]+", line.strip(), maxsplit=len(names) - 1) if ifs else [line]
        for number, name in enumerate(names):
            self.variables[name] = parts[number] if number < len(parts) else ""
        return True

    def _unread(self, names: list[str], node: Node) -> bool | None:
        for name in names or ["REPLY"]:
            self.variables[name] = self.mark(node.at, f"${name} is read from what only a job has")
        return None

    def _do_mapfile(self, words: list[str], node: Node) -> bool | None:
        names = [word for word in words if re.fullmatch(r"[A-Za-z_]\w*", word)] or ["MAPFILE"]
        if self.input is None or MARK.search(self.input):
            return self._unread(names[-1:], node)
        lines = self.input.removesuffix("\n").split("\n")
        self.variables[names[-1]] = {str(number): line for number, line in enumerate(lines)}
        return True

    def _do_let(self, words: list[str], node: Node) -> bool | None:
        found = [self.arithmetic(word, node.at) for word in words]
        return None if not found or isinstance(found[-1], str) else bool(found[-1])

    def _do_eval(self, words: list[str], node: Node) -> bool | None:
        return self._inside(Source(self.source.name, " ".join(words), self.source.line(node.at)))

    def _do_source(self, words: list[str], node: Node) -> bool | None:
        name = self.without_unset(words[0]) if words else ""
        path = Path(name)  # sbatch begins where it is called; a sourced file's own neighbours come second
        path = path if path.is_file() else Path(os.path.dirname(self.source.name), name)
        text = self.files.get(name)
        known = name and not MARK.search(name) and not re.search(r"/bin/activate|/etc/profile|bashrc", name)
        if text is None and known and path.is_file():
            text = read_script(path)
        if text is not None:
            self.notes.append(f"{self.source.where(node.at)}: {name} is sourced: its lines are followed")
            return self._until_return(words[1:] or self.positional, Source(str(path), text))
        if re.search(r"activate|profile|bashrc|setvars|modules|env_setup", name):
            self.found.setup.append((self.source.where(node.at), f"source {name}"))
            return True
        shown = MARK.sub("...", words[0]) if words else ""
        raise UnreadableBash(node.at, f"source {shown}: there is no such file here, and it may set any variable")


def read_script(path: Path) -> str:
    """A script's text. Raises OSError and UnicodeDecodeError, and UnreadableBash if it is too large."""
    if path.stat().st_size > MAX_SCRIPT_BYTES:
        raise UnreadableBash(0, f"{path} is too large for a launcher")
    return path.read_bytes().decode()
