"""Values of Bash words: parameters, quotes, patterns. Nothing runs here.

A part of a value that only a job knows is a mark in the text (`UnknownValue`): it goes through assignments and words
like any text, and whoever uses the value sees it.
"""

from __future__ import annotations

import copy
import fnmatch
import glob
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Self

from relayrun.submit.megatron_lm.bash_syntax import BashText, UnreadableBash, Word, line_number

MARK = re.compile("\ue000(\\d+)\ue001")
"""A value in a text that only a job knows; the number is that of its `UnknownValue`."""
PER_JOB = re.compile(r"SLURM\w*|HOSTNAME|RANDOM|SECONDS|BASHPID|PPID|LINENO|RANK|LOCAL_RANK|NODE_RANK|TMPDIR|[$!?_-]|0")
"""Variables with a value in a job alone."""
_EXPRESSION = re.compile(r"(?=.*\w)[\d\[\]()*+-]+|(?=.*M)[ME*|-]+")
"""Words that Megatron-LM computes, as `[0]*3+[1]*58` of --moe-layer-freq or `M-M*` of --hybrid-layer-pattern."""
MOST_WORDS = 100_000
"""Words of one expansion; no launcher comes near."""
_PARAMETER = re.compile(r"(!?)(#?)([A-Za-z_]\w*|\d+|[@*#?$!-])")
_BRACES = re.compile(r"(?<!\$)\{([^{}'\"$`\\\s]*(?:,|\.\.)[^{}'\"$`\\\s]*)\}")
_ALL_VALUES = re.compile(r"\$@|\$\{(\w+\[@\]|@)([:+-].*)?\}", re.S)
"""An expansion in quotes that may become no word at all."""
_ESCAPES = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"', "e": "\x1b"}
Variable = str | dict[str, str]
"""A text, or an array by its indices."""


@dataclass(frozen=True)
class UnknownValue:
    """A value that no line of the script says."""

    where: str
    words: str
    command: tuple[str, ...] = ()
    """Words of the command whose output it is."""
    unset: str = ""
    """Name of the variable that has no value."""


@dataclass(frozen=True)
class Source:
    """A text of Bash with its place."""

    name: str
    text: str
    first_line: int = 1

    def line(self, at: int) -> int:
        return self.first_line - 1 + line_number(self.text, at)

    def where(self, at: int) -> str:
        """`FILE:LINE` of an index."""
        return f"{self.name}:{self.line(at)}"


@dataclass
class _Fields:
    """The words that an expansion becomes; `pattern` is the last word with its quoted parts escaped."""

    ifs: str | None
    done: list[tuple[str, str]] = field(default_factory=list)
    text: str | None = None
    pattern: str = ""

    def add(self, text: str, *, quoted: bool) -> None:
        self.text = (self.text or "") + text
        self.pattern += glob.escape(text) if quoted else text

    def end(self) -> None:
        if self.text is not None:
            self.done.append((self.text, self.pattern))
        self.text, self.pattern = None, ""

    def split(self, text: str) -> None:
        """Add the value of an unquoted parameter."""
        if self.ifs is None:
            return self.add(text, quoted=False)
        blanks = "".join(char for char in self.ifs if char in " \t\n")
        parts = re.split(f"[{re.escape(self.ifs)}]+" if blanks else f"[{re.escape(self.ifs)}]", text)
        for number, part in enumerate(parts):
            if number:
                self.end()
            if part or (not blanks and 0 < number < len(parts) - 1):
                self.add(part, quoted=False)
        return None


class BashValues:
    """Variables, and the values of words."""

    def __init__(self, variables: Mapping[str, str], defaults: Mapping[str, str], source: Source) -> None:
        self.before = dict(variables)
        """Variables that are set when the script begins."""
        self.variables: dict[str, Variable] = dict(variables)
        self.exported = set(variables)
        self.defaults = defaults
        """Values of variables that the script only reads."""
        self.keyed: set[str] = set()
        """Associative arrays."""
        self.positional: list[str] = []
        self.source = source
        self.unknown: list[UnknownValue] = []
        self.notes: list[str] = []
        """Sentences on evaluated tests, each with its line."""

    def substitute(self, text: str, at: int) -> str:
        """The output of a command substitution."""
        raise NotImplementedError

    def fork(self) -> Self:
        """A subshell: changes of variables stay in it."""
        other = copy.copy(self)
        other.variables = {
            name: dict(value) if isinstance(value, dict) else value for name, value in self.variables.items()
        }
        other.exported, other.keyed, other.positional = set(self.exported), set(self.keyed), list(self.positional)
        return other

    def mark(self, at: int, words: str, *, command: tuple[str, ...] = (), unset: str = "") -> str:
        """A text that stands for an unknown value."""
        self.unknown.append(UnknownValue(self.source.where(at), words, command, unset))
        return f"\ue000{len(self.unknown) - 1}\ue001"

    def unknowns(self, text: str) -> list[UnknownValue]:
        """The unknown values in a text."""
        return [self.unknown[int(number)] for number in MARK.findall(text)]

    def without_unset(self, text: str) -> str:
        """A text in which variables without a value are empty, as in Bash."""
        return MARK.sub(lambda found: "" if self.unknown[int(found[1])].unset else found[0], text)

    def words(self, word: Word, *, split: bool = True) -> list[str]:
        """The words that a word becomes."""
        raws = self._braces(word.text) if split else [word.text]
        ifs = self.variables.get("IFS", " \t\n")
        fields = _Fields((ifs if isinstance(ifs, str) else " \t\n") if split else None)
        for raw in raws:
            self._expand(raw, 0, len(raw), fields, word.at, quoted=False)
            fields.end()
        if not split:
            return ["".join(text for text, _ in fields.done)]
        if len(fields.done) > MOST_WORDS:
            raise UnreadableBash(word.at, f"this becomes more than {MOST_WORDS} words")
        return [found for text, pattern in fields.done for found in self._files(text, pattern, word.at)]

    def text(self, word: Word) -> str:
        """The value of a word that is not split, as on the right of `=`."""
        return self.words(word, split=False)[0]

    def pattern(self, word: Word) -> re.Pattern[str] | None:
        """A word as a pattern of `case` or `[[ == ]]`; None if it holds an unknown value."""
        fields = _Fields(None)
        self._expand(word.text, 0, len(word.text), fields, word.at, quoted=False)
        found = self.without_unset(fields.pattern)
        if re.search(r"[?*+@!]\(", word.text):
            raise UnreadableBash(word.at, "an extended pattern is not read")
        return None if MARK.search(found) else re.compile(fnmatch.translate(found.replace("[^", "[!")))

    def array(self, word: Word, start: int, *, keyed: bool) -> dict[str, str]:
        """The elements of `( ... )`, which begins at `start` of the word. `keyed`: of an associative array."""
        found: dict[str, str] = {}
        following = 0
        for each in _words_between(word, start + 1, len(word.text) - 1):
            index = re.match(r"\[([^]]*)\]=", each.text)
            if index is None:
                for value in self.words(each):
                    found[str(following)] = value
                    following += 1
                continue
            key = self.text(Word(each.at, index[1])) if keyed else str(self.arithmetic(index[1], each.at))
            found[key] = self.text(Word(each.at, each.text[index.end() :]))
            following = int(key) + 1 if not keyed and key.isdigit() else following
        return found

    def _braces(self, raw: str) -> list[str]:
        found = _BRACES.search(raw) if not re.search(r"['\"\\]", raw) else None
        if found is None:
            return [raw]
        inner: list[str] = found[1].split(",")
        if len(inner) == 1:
            numbers = re.fullmatch(r"(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?", inner[0])
            if numbers is None or abs(int(numbers[1]) - int(numbers[2])) > MOST_WORDS:
                return [raw]
            first, last, step = int(numbers[1]), int(numbers[2]), int(numbers[3] or 1) or 1
            width = max(map(len, numbers.group(1, 2))) if re.match(r"-?0\d", numbers[1]) else 0
            sign = 1 if last >= first else -1
            inner = [f"{number:0{width}d}" for number in range(first, last + sign, step * sign)]
        return [each for part in inner for each in self._braces(raw[: found.start()] + part + raw[found.end() :])]

    def _files(self, text: str, pattern: str, at: int) -> list[str]:
        """A word, or the files that it is a pattern of."""
        if not re.search(r"[*?]|\[[^]]+\]", re.sub(r"\[([*?[])\]", "", pattern)) or _EXPRESSION.fullmatch(text):
            return [text]
        if MARK.search(text) or not text.startswith("/"):
            return [self.mark(at, f"{MARK.sub('...', text)} is a pattern of files, and nobody knows in which folder")]
        files = sorted(glob.glob(pattern))
        self.notes.append(f"{self.source.where(at)}: {text} is a pattern of {len(files)} files")
        return files or [text]

    def _expand(self, raw: str, i: int, end: int, fields: _Fields, at: int, *, quoted: bool) -> None:
        reader = BashText(raw)
        if raw.startswith("~", i) and not quoted and i == 0 and raw[1:2] in ("", "/"):
            fields.add(str(self.variables.get("HOME", "~")), quoted=True)
            i += 1
        while i < end:
            char = raw[i]
            if char == "\\":
                following = raw[i + 1 : i + 2]
                kept = "" if not quoted or following in '$`"\\\n' else "\\"
                fields.add("" if following == "\n" else kept + following, quoted=True)
                i += 2
            elif char == "'" and not quoted:
                behind = reader.token(i)
                fields.add(raw[i + 1 : behind - 1], quoted=True)
                i = behind
            elif char == '"' or (raw.startswith('$"', i) and not quoted):
                i += char == "$"
                behind = reader.token(i)
                if _ALL_VALUES.fullmatch(raw, i + 1, behind - 1) is None:
                    fields.add("", quoted=True)
                self._expand(raw, i + 1, behind - 1, fields, at, quoted=True)
                i = behind
            elif char in "$`":
                i = self._dollar(raw, i, reader, fields, at, quoted=quoted)
            elif raw.startswith(("<(", ">("), i) and not quoted:
                fields.add(self.mark(at, "a process substitution names a file of a job"), quoted=True)
                i = reader.parentheses(i + 1)
            else:
                fields.add(char, quoted=quoted)
                i += 1

    def _dollar(self, raw: str, i: int, reader: BashText, fields: _Fields, at: int, *, quoted: bool) -> int:
        """Add the expansion that begins with a dollar or a backquote; return the index behind it."""
        behind = reader.token(i, in_quotes=quoted)
        if raw[i] == "`":
            self._add(re.sub(r"\\([$`\\])", r"\1", self.substitute(raw[i + 1 : behind - 1], at)), fields, quoted=quoted)
        elif raw.startswith("$((", i) and raw[:behind].endswith("))"):
            self._add(str(self.arithmetic(raw[i + 3 : behind - 2], at)), fields, quoted=quoted)
        elif raw.startswith("$(", i):
            self._add(self.substitute(raw[i + 2 : behind - 1], at + i), fields, quoted=quoted)
        elif raw.startswith("$[", i):
            raise UnreadableBash(at, "arithmetic in brackets is not read: write $(( ))")
        elif raw.startswith("${", i):
            self._parameter(raw[i + 2 : behind - 1], fields, at, quoted=quoted)
        elif raw.startswith("$'", i) and not quoted:
            text = re.sub(r"\\(.)", lambda found: _ESCAPES.get(found[1], found[0]), raw[i + 2 : behind - 1])
            fields.add(text, quoted=True)
        elif (name := re.compile(r"[A-Za-z_]\w*|[\d@*#?$!_-]").match(raw, i + 1)) is not None:
            self._parameter(name[0], fields, at, quoted=quoted)
            return name.end()
        else:
            fields.add("$", quoted=quoted)
        return behind

    def _add(self, text: str, fields: _Fields, *, quoted: bool) -> None:
        if quoted:
            fields.add(text, quoted=True)
        else:
            fields.split(text)

    def _add_all(self, values: list[str], fields: _Fields, *, joined: bool, quoted: bool) -> None:
        """Add several values; `joined`: as `*`, one text in quotes."""
        if quoted and joined:
            ifs = self.variables.get("IFS", " ")
            return fields.add((ifs[:1] if isinstance(ifs, str) else " ").join(values), quoted=True)
        for number, value in enumerate(values):
            if number and fields.ifs is not None:
                fields.end()
            elif number:
                fields.add(" ", quoted=quoted)
            self._add(value, fields, quoted=quoted)
        return None

    def value(self, name: str, at: int, index: str | None = None) -> str | None:
        """A variable's value; None if it has none."""
        if name.isdigit() and name != "0":
            return self.positional[int(name) - 1] if int(name) <= len(self.positional) else None
        if name == "#":
            return str(len(self.positional))
        found = self.variables.get(name)
        if found is None:
            return self.mark(at, f"${name} has a value in a job alone") if PER_JOB.fullmatch(name) else None
        if not isinstance(found, dict):
            return found if index in (None, "0", "@", "*") else None
        if name in self.keyed:
            return found.get("" if index is None else self.text(Word(at, index)))
        key = str(self.arithmetic(index or "0", at))
        return found.get(list(found)[int(key)] if key.startswith("-") and found else key)

    def values(self, name: str) -> list[str]:
        """All values of an array, or of the positional parameters."""
        if name in ("@", "*"):
            return list(self.positional)
        found = self.variables.get(name)
        if isinstance(found, dict):
            return [found[key] for key in sorted(found, key=lambda key: 0 if name in self.keyed else int(key))]
        return [] if found is None else [found]

    def plain(self, name: str, at: int, index: str | None = None) -> str:
        """A variable's value where the script gives no default."""
        found = self.value(name, at, index)
        if found is None and index is None:
            found = self.defaults.get(name)
        if found is None and re.search(rf"(?<![\w$]){re.escape(name)}(\[[^]]*\])?\+?=", self.source.text):
            return ""  # a variable of the script's own that it has not set, as in A="$A more"
        return self.mark(at, f"${name} has no value", unset=name) if found is None else found

    def _parameter(self, inner: str, fields: _Fields, at: int, *, quoted: bool) -> None:
        match = _PARAMETER.match(inner) if inner != "#" else None
        if match is None or (match[2] and match.end() < len(inner) and inner[match.end()] != "["):
            match = re.compile("()()#").match(inner)  # ${#} and ${#-default}
            if match is None:
                raise UnreadableBash(at, f"${{{inner}}} is not read")
        indirect, length, name = match[1], match[2], match[match.lastindex or 0] or "#"
        rest, index = inner[match.end() :], None
        if rest.startswith("["):
            close = _behind_bracket(rest)
            index, rest = rest[1 : close - 1], rest[close:]
        several = index in ("@", "*") or name in ("@", "*")
        if several:
            values = self.values(name)
            if indirect:
                found = self.variables.get(name)
                values = list(found) if isinstance(found, dict) else []
            if length:
                return self._add(str(len(values)), fields, quoted=quoted)
            if (part := re.match(r":\s*(\d+)(?::\s*(\d+))?$", rest)) is not None:
                first = int(part[1]) - (name in ("@", "*"))
                values, rest = values[first : first + int(part[2]) if part[2] else None], ""
            if (replaced := _operator(rest)) and values and replaced not in (":+", "+"):
                values, rest = [self._changed(value, rest, at) for value in values], ""
            if not rest or (values and replaced not in (":+", "+")):
                return self._add_all(values, fields, joined="*" in (index, name), quoted=quoted)
            if (not values) == replaced.endswith("-"):
                self._expand(rest, len(replaced), len(rest), fields, at, quoted=quoted)
            return None
        if indirect:
            name = self.without_unset(self.plain(name, at))
            if not re.fullmatch(r"[A-Za-z_]\w*", name):
                return self._add(self.mark(at, "the name of a variable is not known here"), fields, quoted=quoted)
        if length:
            value = self.plain(name, at, index)
            unknown = MARK.search(self.without_unset(value))
            text = value if unknown else str(len(self.without_unset(value)))
            return self._add(text, fields, quoted=quoted)
        return self._with_operator(name, index, rest, fields, at, quoted=quoted)

    def _with_operator(
        self, name: str, index: str | None, rest: str, fields: _Fields, at: int, *, quoted: bool
    ) -> None:
        form = re.match(r":?[-=+?]", rest)
        if form is not None and quoted and "'" in rest:  # versions of Bash differ in what that means
            raise UnreadableBash(at, "a quote inside of a quoted ${...} is not read")
        if form is None:
            value = self.plain(name, at, index)
            return self._add(self._changed(value, rest, at) if rest else value, fields, quoted=quoted)
        found = self.value(name, at, index)
        missing = found is None or (form[0][0] == ":" and self.without_unset(found) == "")
        if form[0][-1] == "+":
            if not missing:
                self._expand(rest, form.end(), len(rest), fields, at, quoted=quoted)
        elif not missing:
            self._add(found or "", fields, quoted=quoted)
        elif form[0][-1] == "?":
            self._add(self.mark(at, f"${name} has no value", unset=name), fields, quoted=quoted)
        elif form[0][-1] == "=":
            self.variables[name] = self.text(Word(at, rest[form.end() :]))
            self._add(str(self.variables[name]), fields, quoted=quoted)
        else:
            self._expand(rest, form.end(), len(rest), fields, at, quoted=quoted)
        return None

    def _changed(self, value: str, rest: str, at: int) -> str:
        """A value behind one of the operators that change a text."""
        value = self.without_unset(value)
        if MARK.search(value):
            return value
        if rest[0] == ":":
            first, _, count = rest[1:].partition(":")
            numbers = [self.arithmetic(each, at) for each in ([first, count] if count else [first])]
            if not all(isinstance(number, int) for number in numbers):
                return str(numbers[0])
            start = int(numbers[0]) if int(numbers[0]) >= 0 else max(len(value) + int(numbers[0]), 0)
            if len(numbers) == 1:
                return value[start:]
            return value[start : int(numbers[1]) + (start if int(numbers[1]) >= 0 else len(value))]
        form = re.match(r"##?|%%?|//|/[#%]?|\^\^?|,,?", rest)
        if form is None:
            raise UnreadableBash(at, f"${{NAME{rest}}} is not read")
        kind, body = form[0], rest[form.end() :]
        if kind[0] in "^,":
            change: Callable[[str], str] = str.upper if kind[0] == "^" else str.lower
            return change(value) if len(kind) == 2 else change(value[:1]) + value[1:]
        word, _, new = body.partition("/") if kind[0] == "/" else (body, "", "")
        pattern = self.pattern(Word(at, word))
        if pattern is None:
            return self.mark(at, "a pattern is not known here")
        return _replaced(value, kind, pattern.pattern, self.text(Word(at, new)))

    def arithmetic(self, raw: str, at: int) -> int | str:
        """The value of arithmetic; a mark if it is not known."""
        raise NotImplementedError

    def quoted(self, raw: str, at: int) -> str:
        """A text with its expansions, as between quotes."""
        fields = _Fields(None)
        self._expand(raw, 0, len(raw), fields, at, quoted=True)
        fields.end()
        return fields.done[0][0] if fields.done else "0"


def _operator(rest: str) -> str:
    found = re.match(r":?[-=+?]|##?|%%?|//?|\^\^?|,,?|:", rest)
    return found[0] if found is not None else ""


def _replaced(value: str, kind: str, pattern: str, new: str) -> str:
    body = pattern.removesuffix(r"\Z").removesuffix(r"\z")
    if kind in ("#", "##"):
        spans = [end for end in range(len(value) + 1) if re.fullmatch(body, value[:end])]
        return value[(spans[-1] if len(kind) == 2 else spans[0]) :] if spans else value
    if kind in ("%", "%%"):
        spans = [start for start in range(len(value) + 1) if re.fullmatch(body, value[start:])]
        return value[: spans[0] if len(kind) == 2 else spans[-1]] if spans else value
    anchored = {"/#": rf"\A{body}", "/%": rf"{body}\Z"}.get(kind, body)
    return re.sub(anchored, lambda _: new, value, count=0 if kind == "//" else 1)


def _behind_bracket(text: str) -> int:
    at, reader = 1, BashText(text)
    while at < len(text) and text[at] != "]":
        at = reader.token(at)
    return at + 1


def _words_between(word: Word, at: int, end: int) -> list[Word]:
    """The words of an array's text, over several lines, without comments."""
    found, text, reader = [], word.text, BashText(word.text)
    while at < end:
        if text[at] in " \t\n" or text.startswith("\\\n", at):
            at += 2 if text[at] == "\\" else 1
        elif text[at] == "#":
            at = min(text.find("\n", at) if "\n" in text[at:] else end, end)
        else:
            behind = reader.word(at)
            if behind == at:
                raise UnreadableBash(word.at + at, f"an unquoted {text[at]!r} in an array")
            found.append(Word(word.at + at, text[at:behind]))
            at = behind
    return found
