"""The shell's own commands in a launcher that is followed: `set`, `echo`, `read`, `source` and others."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from relayrun.submit.megatron_lm.bash_syntax import Node, UnreadableBash
from relayrun.submit.megatron_lm.bash_values import MARK, BashValues, Source, ask_bash

MAX_SCRIPT_BYTES = 1 << 20
PROGRAM = re.compile(r"(?:.*/)?pretrain_\w+\.py")
_NUMERIC = re.compile(r"[\w\s()+*/%<>=!&|^~?:,#-]*")
_ARITHMETIC = 'declare __= "${@:2}"; echo $(($1)); for __ in "${@:2}"; do __=${__%%=*}; echo "${!__}"; done'
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
    """Standard input that several commands of a launcher share: each reads on where the one before stopped."""

    text: str


class LeaveBash(Exception):
    """`break`, `continue`, `return` or `exit`."""

    def __init__(self, kind: str, at: int, status: bool | None) -> None:
        self.kind, self.at, self.status = kind, at, status


class BashBuiltins(BashValues):
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
        """Standard input of the next command; None: only a job has it."""

    def arithmetic(self, raw: str, at: int) -> int | str:
        """The value of arithmetic; a mark if it is not known. Bash computes it, once all that it names is a number."""
        self.steps[0] += 20
        text = self.without_unset(self.quoted(raw, at)).strip() or "0"
        text = re.sub(
            r"([A-Za-z_]\w*)\[([^][]*)\](?!\s*[-+*/%&|^<>]*=[^=])", lambda each: self.plain(each[1], at, each[2]), text
        )
        values = dict[str, str]()
        for name in re.findall(r"(?<![\w#])[A-Za-z_]\w*", text):
            sets = re.search(rf"(?:\+\+|--)\s*{name}\b|\b{name}\s*(?:\+\+|--|(?:[-+*/%&|^]|<<|>>)?=[^=])", text)
            value = (self.plain(name, at) if not sets or self.value(name, at) is not None else "") or "0"
            if not _NUMERIC.fullmatch(value) and not MARK.search(value):
                raise UnreadableBash(at, f"the arithmetic {value!r} is not read")
            values[name] = value if re.search(r"\A-?\d+\Z|\ue000", value) else str(self.arithmetic(value, at))
        if unknown := MARK.search(" ".join([text, *values.values()])):
            return self.mark(at, self.unknown[int(unknown[1])].words)  # which is no longer an unset one
        numbers = [f"{name}={value}" for name, value in values.items()]
        found = ask_bash(_ARITHMETIC, text, *numbers) if _NUMERIC.fullmatch(text) else None
        if found is None:
            raise UnreadableBash(at, f"the arithmetic {text!r} is not read")
        result, *after = found.split()
        changed = zip(values, after, strict=True)
        self.variables |= {name: new for name, new in changed if new != values[name] or name not in self.variables}
        return int(result)

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
        if "-s" in words and re.search("nocase|lastpipe|glob$", " ".join(words)):
            raise UnreadableBash(node.at, f"shopt {' '.join(words)} is not read")
        return True

    def _do_cd(self, words: list[str], node: Node) -> bool | None:
        """Behind a relative folder, only a job knows where this is."""
        self.found.ignored.append((self.source.where(node.at), " ".join(["cd", *words])))
        known = len(words) == 1 and words[0].startswith("/") and not MARK.search(words[0])
        here = words[0] if known else self.mark(node.at, f"the folder behind cd {' '.join(words)} is not known here")
        self.variables["PWD"] = os.path.normpath(here)
        self.variables.pop("OLDPWD", None)
        self.assigned.add("PWD")
        return True if known and os.path.isdir(here) else None

    _do_pushd = _do_popd = _do_cd

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
        plain = not words or words[0][:1] != "-"
        self.say((None if plain else ask_bash('echo "$@"', *words)) or " ".join(words) + "\n")
        return True

    def _do_printf(self, words: list[str], node: Node) -> bool:
        target = words[1] if words[:1] == ["-v"] else None
        words = words[2:] if target is not None else words[1:] if words[:1] == ["--"] else words
        forms = r"%-?\d{0,4}s" if MARK.search(" ".join(words)) else r"%(?![^a-zA-Z%]*\d{5})[^a-zA-Z%(*]{0,6}[^n(*]"
        known = words and not MARK.search(words[0]) and re.fullmatch(f"(?:[^%]|%%|{forms})*", words[0], re.S)
        text = ask_bash('printf "$@"', "--", *words) if known else None
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
        array, names = "a" in letters, " ".join(rest)
        shown = '"${A[@]}"' if array else " ".join(f'"${name}"' for name in rest or ["REPLY"])
        script = f'IFS=$2 read -rd "" {"-a A" if array else names} < <(printf %s "$1"); printf "%s\\0" {shown}'
        if not all(re.fullmatch(r"[A-Za-z_]\w*", name) for name in rest):
            raise UnreadableBash(node.at, f"read {names} is not read")
        parts = (ask_bash(script, line, str(self.variables.get("IFS", " \t\n"))) or "").split("\0")[:-1]
        if array:
            self.variables[rest[0]] = {str(number): part for number, part in enumerate(parts)}
        else:
            self.variables |= dict(zip(rest or ["REPLY"], parts, strict=True))
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
        """Return the path of a file that a launcher names: in its working folder, else beside the script."""
        moved = "PWD" in self.assigned
        first = os.path.join((self.value("PWD", 0) if moved else None) or "", name)
        return first if moved or os.path.isfile(first) else os.path.join(os.path.dirname(self.source.name), name)

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
