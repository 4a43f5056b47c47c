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
from relayrun.submit.megatron_lm.bash_values import MARK, BashValues, Source, split_fields, unescaped


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
_BITS = {ast.BitAnd, ast.BitOr, ast.BitXor}


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
        if re.search(r"#|\+\+|--|!(?!=)\s*[^\s\w(]|!\s*\(.*\(", text):
            raise UnreadableBash(at, f"the arithmetic {text.strip()!r} is not read")
        text = re.sub(r"!(?!=)\s*(\w+|\([^()]*\))", r"(not \1)", text)
        text = re.sub(r"(?<![\w.])0([0-7]+)\b", r"0o\1", text)
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
        below = {type(each) for each in ast.walk(node)}
        if (isinstance(node, ast.Compare) and below & _BITS) or (kind is ast.USub and ast.Pow in below):
            raise ValueError  # these bind otherwise in Python
        if isinstance(left, str) or isinstance(right, str):
            return left if isinstance(left, str) else right
        if kind in (ast.Pow, ast.LShift) and not 0 <= right <= 64:
            raise ValueError
        return (int(_OPERATORS[kind](left, right)) + 2**63) % 2**64 - 2**63


MAX_SCRIPT_BYTES = 1 << 20
PROGRAM = re.compile(r"(?:.*/)?pretrain_\w+\.py")
OUTPUT = "\ue004"
"""Stands in a text for the output of a program, which only a job has."""
_OF_A_MACHINE = re.compile(r"/(?:proc|sys|dev|etc)/.*")
"""Files that differ between machines."""


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


@dataclass
class Input:
    """What commands read, one behind the other."""

    text: str


class LeaveBash(Exception):
    """`break`, `continue`, `return` or `exit`."""

    def __init__(self, kind: str, at: int, status: bool | None) -> None:
        self.kind, self.at, self.status = kind, at, status


class BashBuiltins(BashArithmetic):
    """The state of a shell, and its own commands."""

    def __init__(self, variables: Mapping[str, str], defaults: Mapping[str, str], source: Source) -> None:
        super().__init__(variables, defaults, source)
        self.found = Followed()
        self.files: dict[str, str] = {}
        """Files that the script writes, with their text."""
        self.output: list[str] | None = None
        self.steps = [0]
        self.assigned: set[str] = set()
        """Names that the script gives a value."""
        self.locals: list[dict[str, object]] = []
        self.input: Input | None = None
        """What commands read; None: only a job has it."""

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
        rest = list(words)
        while rest and re.match(r"[-+]\w", rest[0]):
            word = rest.pop(0)
            name = rest.pop(0) if word.endswith("o") and rest else ""
            letters = {*word[1:], {"allexport": "a", "noglob": "f"}.get(name, "")} & {"a", "f"}
            self.options = self.options | letters if word[0] == "-" else self.options - letters
        if rest:
            self.positional = rest[rest[0] == "--" :]
        return True

    def _do_shopt(self, words: list[str], node: Node) -> bool:
        if "-s" in words and re.search("nocase|lastpipe|failglob|dotglob|globstar", " ".join(words)):
            raise UnreadableBash(node.at, f"shopt {' '.join(words)} is not read")
        if "nullglob" in words:
            (self.options.add if "-s" in words else self.options.discard)("nullglob")
        return True

    def _do_cd(self, words: list[str], node: Node) -> bool | None:
        """Change the working directory; whether a folder is there, only a job knows, unless it is here too."""
        self.found.ignored.append((self.source.where(node.at), " ".join(["cd", *words])))
        before = self.value("PWD", node.at) or ""
        target = (words or [str(self.value("HOME", node.at))])[-1]
        target = str(self.value("OLDPWD", node.at)) if target == "-" else os.path.join(before, target)
        known = target.startswith("/") and not MARK.search(target)
        new = os.path.normpath(target) if known else self.mark(node.at, f"cd {MARK.sub('...', target)} is not known")
        self.variables |= {"OLDPWD": before, "PWD": new}
        self.assigned.add("PWD")
        return True if known and os.path.isdir(target) else None

    _do_pushd = _do_cd

    def _do_popd(self, words: list[str], node: Node) -> bool | None:
        return self._do_cd([self.mark(node.at, "the folder that popd returns to is not known")], node)

    def _do_pwd(self, words: list[str], node: Node) -> bool:
        self.say(f"{self.plain('PWD', node.at)}\n")
        return True

    def _do_unset(self, words: list[str], node: Node) -> bool:
        for word in words:
            if (element := re.fullmatch(r"(\w+)\[(.*)\]", word)) is not None:
                array = self.variables.get(element[1])
                if isinstance(array, dict):
                    array.pop(element[2], None)
            elif "-f" in words or (word not in self.variables and word in self.functions):
                self.functions.pop(word, None)
            else:
                self.variables.pop(word, None)
                self.exported.discard(word)
        return True

    def _do_shift(self, words: list[str], node: Node) -> bool:
        count = int(words[0]) if words and words[0].isdigit() else 1
        if self.uncounted(self.positional[:count]):
            raise UnreadableBash(node.at, "shift passes over words whose number only a job knows")
        if count > len(self.positional):
            return False
        self.positional = self.positional[count:]
        return True

    def _do_echo(self, words: list[str], node: Node) -> bool:
        end, escapes = "\n", False
        while words and re.fullmatch(r"-[neE]+", words[0]):
            end, escapes = "" if "n" in words[0] else end, escapes or "e" in words[0]
            words = words[1:]
        text = " ".join(words)
        self.say((unescaped(text, node.at) if escapes else text) + end)
        return True

    def _do_printf(self, words: list[str], node: Node) -> bool:
        target = words[1] if words[:1] == ["-v"] else None
        words = words[2:] if target is not None else words[1:] if words[:1] == ["--"] else words
        text = formatted([unescaped(words[0], node.at), *words[1:]]) if words else None
        if text is None:
            text = self.mark(node.at, "the output of printf is not read")
        if target is not None:
            self.variables[target] = text
        else:
            self.say(text)
        return True

    def say(self, text: str) -> None:
        """Give text to what reads the output: a substitution, a pipe, or a file."""
        if self.output is not None:
            self.output.append(text)

    def _do_read(self, words: list[str], node: Node) -> bool | None:
        letters, end, rest = "", "\n", list(words)
        while rest and re.match("-.", rest[0]):
            option = rest.pop(0)
            letters += option[1:]
            if option[-1] in "dptinNu" and rest:
                value = rest.pop(0)
                end = value[:1] or "\0" if option[-1] == "d" else end
        if self.input is None or re.search("[nNu]", letters) or MARK.search(self.input.text):
            return self._unread(rest, node)
        line, found, self.input.text = self.input.text.partition(end)
        if "\\" in line and "r" not in letters:
            return self._unread(rest, node)
        ifs = str(self.variables.get("IFS", " \t\n"))
        if "a" in letters:
            self.variables[rest[0]] = {str(number): part for number, part in enumerate(split_fields(line, ifs))}
            return bool(found)
        parts = split_fields(line, ifs, len(rest)) if rest else [line]
        for number, name in enumerate(rest or ["REPLY"]):
            self.variables[name] = parts[number] if number < len(parts) else ""
        return bool(found)

    def _unread(self, names: list[str], node: Node) -> bool | None:
        for name in names or ["REPLY"]:
            self.variables[name] = self.several(node.at, f"${name} is read from what only a job has")
        return None

    def _do_mapfile(self, words: list[str], node: Node) -> bool | None:
        names = [word for word in words if re.fullmatch(r"[A-Za-z_]\w*", word)] or ["MAPFILE"]
        others = [word for word in words if word.startswith("-") and word != "-t"]
        if self.input is None or others or MARK.search(self.input.text):
            return self._unread(names[-1:], node)
        lines = re.findall(r"[^\n]*\n|[^\n]+", self.input.text)
        found = [line.removesuffix("\n") if "-t" in words else line for line in lines]
        self.variables[names[-1]] = {str(number): line for number, line in enumerate(found)}
        return True

    _do_readarray = _do_mapfile

    def _do_let(self, words: list[str], node: Node) -> bool | None:
        found = [self.arithmetic(word, node.at) for word in words]
        return None if not found or isinstance(found[-1], str) else bool(found[-1])

    def _do_eval(self, words: list[str], node: Node) -> bool | None:
        return self._inside(Source(self.source.name, " ".join(words), self.source.line(node.at)))

    def _do_source(self, words: list[str], node: Node) -> bool | None:
        name = self.without_unset(words[0]) if words else ""
        known = name and not re.search(r"/bin/activate|/etc/profile|bashrc", name)
        if known and (text := self.readable(name)) is not None:
            self.notes.append(f"{self.source.where(node.at)}: {name} is sourced: its lines are followed")
            return self._until_return(words[1:] or self.positional, Source(self.path(name), text))
        if re.search(r"activate|profile|bashrc|setvars|modules|env_setup", name):
            self.found.setup.append((self.source.where(node.at), f"source {name}"))
            return True
        shown = MARK.sub("...", words[0]) if words else ""
        raise UnreadableBash(node.at, f"source {shown}: there is no such file here, and it may set any variable")

    def path(self, name: str) -> str:
        """Where a file lies: sbatch begins where it is called; neighbours of the script come second."""
        here = self.value("PWD", 0) if "PWD" in self.assigned else ""
        first = os.path.join(here or "", name)
        beside = os.path.join(os.path.dirname(self.source.name), name)
        return beside if "PWD" not in self.assigned and not os.path.isfile(first) else first

    def readable(self, name: str, at: int | None = None) -> str | None:
        """The text of a file that the script writes, or that lies here; None if only a job has it. `at`: note it."""
        text, path = self.files.get(os.path.normpath(name)), self.path(name)
        here = not MARK.search(path) and os.path.isfile(path) and (at is None or not _OF_A_MACHINE.fullmatch(path))
        if text is None and here:
            try:
                text = read_script(Path(path))
            except (OSError, UnicodeDecodeError):
                return None
            if at is not None:
                self.notes.append(f"{self.source.where(at)}: {name} is read: its text is taken as it is here")
        return None if text is None or OUTPUT in text else text


def read_script(path: Path) -> str:
    """A script's text. Raises OSError and UnicodeDecodeError, and UnreadableBash if it is too large."""
    if path.stat().st_size > MAX_SCRIPT_BYTES:
        raise UnreadableBash(0, f"{path} is too large for a launcher")
    return path.read_bytes().decode()
