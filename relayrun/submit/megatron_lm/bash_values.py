"""Values of Bash words: parameters, quotes, patterns. Nothing runs here.

A part of a value that only a job knows is a mark in the text (`UnknownValue`): it goes through assignments and words
like any text, and whoever uses the value sees it.
"""

from __future__ import annotations

import copy
import glob
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Self

from relayrun.submit.megatron_lm.bash_syntax import BashText, Node, UnreadableBash, Word, line_number

MARK = re.compile("\ue000(\\d+)\ue001")
"""A value in a text that only a job knows; the number is that of its `UnknownValue`."""
PER_JOB = re.compile(
    r"SLURM\w*|HOST(?:NAME|TYPE)|S?RANDOM|SECONDS|EPOCH\w+|BASH\w*|FUNCNAME|PPID|LINENO|RANK|LOCAL_RANK|NODE_RANK|"
    r"TMPDIR|E?UID|OSTYPE|MACHTYPE|SHLVL|PIPESTATUS|(?:OLD)?PWD|PATH|[$!?_-]|0"
)
"""Variables with a value in a job alone."""
_EXPRESSION = re.compile(r"(?=.*\w)[\d\[\]()*+-]+|(?=.*M)[ME*|-]+")
"""Words that Megatron-LM computes, as `[0]*3+[1]*58` of --moe-layer-freq or `M-M*` of --hybrid-layer-pattern."""
BASH_SECONDS = 20.0
MOST_WORDS = 100_000
"""Words of one expansion; no launcher comes near."""
_PARAMETER = re.compile(r"(!?)(#?)([A-Za-z_]\w*|\d+|[@*#?$!-])")
_ALL_VALUES = re.compile(r"\$@|\$\{(\w+\[@\]|@)([:+-].*)?\}", re.S)
"""An expansion in quotes that may become no word at all."""
DEFAULTS = {"IFS": " \t\n", "OPTIND": "1"}
"""Variables of a new shell."""
_COPIED = ("exported", "keyed", "integers", "positional", "functions", "options")
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
    """The words that an expansion becomes; `pattern` is the last word with its quoted characters escaped."""

    ifs: str | None
    loose: set[int]
    done: list[tuple[str, str]] = field(default_factory=list)
    text: str | None = None
    pattern: str = ""

    def add(self, text: str, *, quoted: bool) -> None:
        self.text = (self.text or "") + text
        self.pattern += re.sub(r"[][.*^$+?(){}|\\@!]", r"\\\g<0>", text) if quoted else text

    def end(self) -> None:
        if self.text is not None:
            self.done.append((self.text, self.pattern))
        self.text, self.pattern = None, ""

    def put(self, text: str, *, quoted: bool) -> None:
        """Add the value of a parameter, which is split at IFS unless it is quoted."""
        if quoted or self.ifs is None:
            return self.add(text, quoted=quoted)
        self.loose.update(map(int, MARK.findall(text)))
        parts = [text]
        if {*text} & {*self.ifs}:
            parts = (ask_bash('IFS=$2; set -f; printf "%s\\0" $1', f"x{text}x", self.ifs) or "").split("\0")[:-1]
            parts[0], parts[-1] = parts[0][1:], parts[-1][:-1]
        for number, part in enumerate(parts):
            if number:
                self.end()
            if part or (number < len(parts) - 1 and (number or text[:1].strip())):
                self.add(part, quoted=False)
        return None


class BashValues:
    """Variables, and the values of words."""

    def __init__(self, variables: Mapping[str, str], defaults: Mapping[str, str], source: Source) -> None:
        self.before = {**DEFAULTS, **variables}
        """Variables that are set when the script begins."""
        self.variables: dict[str, Variable] = dict(self.before)
        self.exported = {*variables} - {"PWD", "OLDPWD"}
        self.defaults = defaults
        """Values of variables that the script only reads."""
        self.keyed: set[str] = set()
        """Associative arrays."""
        self.integers: set[str] = set()
        self.functions: dict[str, tuple[Source, Node]] = {}
        self.options: set[str] = set()
        self.substituted: bool | None = True
        """The status of the last substitution."""
        self.positional: list[str] = []
        self.source = source
        self.unknown: list[UnknownValue] = []
        self.loose: set[int] = set()
        """Unknown values, by their numbers, that may be several words or none."""
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
        other.take(self)
        return other

    def differs(self, other: Self) -> bool:
        """Whether functions, options or parameters are others; variables are not compared."""
        return any(getattr(self, name) != getattr(other, name) for name in _COPIED if name != "exported")

    def take(self, other: Self) -> None:
        """Have the functions, options and parameters of another shell."""
        for name in _COPIED:
            setattr(self, name, copy.copy(getattr(other, name)))

    def mark(self, at: int, words: str, *, command: tuple[str, ...] = (), unset: str = "") -> str:
        """A text that stands for an unknown value."""
        self.unknown.append(UnknownValue(self.source.where(at), words, command, unset))
        return f"\ue000{len(self.unknown) - 1}\ue001"

    def several(self, at: int, words: str) -> str:
        """A text that stands for an unknown number of words."""
        self.loose.add(len(self.unknown))
        return self.mark(at, words)

    def uncounted(self, values: Iterable[str]) -> str:
        """The first value that may be several words or none; empty if each is one word."""
        return next((value for value in values if self.loose.intersection(map(int, MARK.findall(value)))), "")

    def unknowns(self, text: str) -> list[UnknownValue]:
        """The unknown values in a text."""
        return [self.unknown[int(number)] for number in MARK.findall(text)]

    def without_unset(self, text: str) -> str:
        """A text in which variables without a value are empty, as in Bash."""
        return MARK.sub(lambda found: "" if self.unknown[int(found[1])].unset else found[0], text)

    def words(self, word: Word, *, split: bool = True) -> list[str]:
        """The words that a word becomes."""
        raws = self._braces(word) if split else [word.text]
        fields = _Fields(str(self.variables.get("IFS", " \t\n")) if split else None, self.loose)
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

    def pattern(self, word: Word) -> str | None:
        """A word as a pattern or regular expression of Bash; None if it holds an unknown value."""
        fields = _Fields(None, self.loose)
        self._expand(word.text, 0, len(word.text), fields, word.at, quoted=False)
        found = self.without_unset(fields.pattern)
        return None if MARK.search(found) else found

    def array(self, word: Word, start: int, *, keyed: bool) -> dict[str, str]:
        """The elements of `( ... )`, which begins at `start` of the word. `keyed`: of an associative array."""
        found: dict[str, str] = {}
        following = 0
        for each in _words_between(word, start + 1, len(word.text) - 1):
            index = re.match(r"\[([^]]*)\]=", each.text)
            if index is None and keyed:
                raise UnreadableBash(each.at, "an element without a key is not read")
            if index is None:
                for value in self.words(each):
                    found[str(following)] = value
                    following += 1
                continue
            key = self.key(index[1], each.at, keyed=keyed)
            found[key] = self.text(Word(each.at, each.text[index.end() :]))
            following = int(key) + 1 if not keyed and key.isdigit() else following
        return found

    def key(self, inner: str, at: int, *, keyed: bool) -> str:
        """The index of an element that is set."""
        found = self.text(Word(at, inner)) if keyed else str(self.arithmetic(inner, at))
        if MARK.search(found):
            raise UnreadableBash(at, "the index of an element is not known here")
        return found

    def _braces(self, word: Word) -> list[str]:
        """The words that braces become: Bash expands them, with numbers in place of what is quoted."""
        reader, parts, at = BashText(word.text), list[str](), 0
        while at < len(word.text):
            behind = reader.token(at)
            parts.append(word.text[at:behind])
            at = behind
        if "{" not in parts:
            return [word.text]
        plain = [part if re.fullmatch(r"[\w.,{}-]", part) else f"%{number}%" for number, part in enumerate(parts)]
        found = ask_bash(f"printf '%s\\0' {''.join(plain)}")
        if found is None:
            raise UnreadableBash(word.at, "these braces are not read")
        return [re.sub("%(\\d+)%", lambda each: parts[int(each[1])], text) for text in found.split("\0")[:-1]]

    def _files(self, text: str, pattern: str, at: int) -> list[str]:
        """A word, or the files that it is a pattern of."""
        plain = re.sub(r"(?s)\\.", "", pattern)
        if "f" in self.options or not re.search(r"[*?]|\[[^]]+\]", plain) or _EXPRESSION.fullmatch(text):
            return [text]
        if MARK.search(text) or not text.startswith("/"):
            return [self.mark(at, f"{MARK.sub('...', text)} is a pattern of files, and nobody knows in which folder")]
        files = sorted(glob.glob(re.sub(r"(?s)\\(.)", lambda char: glob.escape(char[1]), pattern)))
        self.notes.append(f"{self.source.where(at)}: {text} is a pattern of {len(files)} files")
        return files or [text]

    def _expand(
        self, raw: str, i: int, end: int, fields: _Fields, at: int, *, quoted: bool, operand: bool = False
    ) -> None:
        """Add the expansion of a text. `operand`: of the word in `${NAME:-word}`, which is split as a value."""
        reader, start = BashText(raw), i
        while i < end:
            char = raw[i]
            if char == "~" and not quoted and (i == start or (raw[i - 1] == ":" and fields.ifs is None)):
                if re.match(r"[\w+-]", raw[i + 1 : i + 2]):
                    raise UnreadableBash(at, "~ before a name is not read: write the folder")
                fields.add(self.plain("HOME", at), quoted=True)
                i += 1
            elif char == "\\":
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
                (fields.put if operand else fields.add)(char, quoted=quoted)
                i += 1

    def _dollar(self, raw: str, i: int, reader: BashText, fields: _Fields, at: int, *, quoted: bool) -> int:
        """Add the expansion that begins with a dollar or a backquote; return the index behind it."""
        behind = reader.token(i, in_quotes=quoted)
        if raw[i] == "`":
            inner = re.sub(r"\\([$`\\])", r"\1", raw[i + 1 : behind - 1])
            fields.put(self.substitute(inner, at), quoted=quoted)
        elif raw.startswith("$((", i) and raw[:behind].endswith("))"):
            fields.put(str(self.arithmetic(raw[i + 3 : behind - 2], at)), quoted=quoted)
        elif raw.startswith("$(", i):
            fields.put(self.substitute(raw[i + 2 : behind - 1], at + i), quoted=quoted)
        elif raw.startswith("$[", i):
            raise UnreadableBash(at, "arithmetic in brackets is not read: write $(( ))")
        elif raw.startswith("${", i):
            self._parameter(raw[i + 2 : behind - 1], fields, at, quoted=quoted)
        elif re.fullmatch(r"\$'(?:[^'\\]|\\.)*'", raw[i:behind], re.S) and not quoted:
            fields.add(ask_bash(f"printf %s {raw[i:behind]}") or "", quoted=True)
        elif (name := re.compile(r"[A-Za-z_]\w*|[\d@*#?$!_-]").match(raw, i + 1)) is not None:
            self._parameter(name[0], fields, at, quoted=quoted)
            return name.end()
        else:
            fields.add("$", quoted=quoted)
        return behind

    def _add_all(self, values: list[str], fields: _Fields, *, joined: bool, quoted: bool) -> None:
        """Add several values; `joined`: as `*`, one text in quotes."""
        if quoted and joined:
            return fields.add(str(self.variables.get("IFS", " "))[:1].join(values), quoted=True)
        for number, value in enumerate(values):
            if number and fields.ifs is not None:
                fields.end()
            elif number:
                fields.add(" ", quoted=quoted)
            fields.put(value, quoted=quoted)
        return None

    def value(self, name: str, at: int, index: str | None = None) -> str | None:
        """A variable's value; None if it has none."""
        if name.isdigit() and name != "0":
            known = self.positional[: int(name)]
            return self.uncounted(known) or (known[-1] if len(known) == int(name) else None)
        if name == "#":
            return self.uncounted(self.positional) or str(len(self.positional))
        found = self.variables.get(name)
        if found is None:
            return self.mark(at, f"${name} has a value in a job alone") if PER_JOB.fullmatch(name) else None
        if not isinstance(found, dict):
            return found if index in (None, "0", "@", "*") or MARK.fullmatch(found) else None
        if name in self.keyed:
            return found.get("0" if index is None else self.text(Word(at, index)))
        key = str(self.arithmetic(index or "0", at))
        if MARK.search(key):
            return key
        before = [value for each, value in found.items() if key.startswith("-") or int(each) <= int(key)]
        return self.uncounted(before) or found.get(list(found)[int(key)] if key.startswith("-") and found else key)

    def values(self, name: str) -> list[str]:
        """All values of an array, or of the positional parameters."""
        if name in ("@", "*"):
            return list(self.positional)
        found = self.variables.get(name)
        if isinstance(found, dict):
            note = f"{self.source.name}: {name} has the order of its lines here, in Bash another one"
            if name in self.keyed and len(found) > 1 and note not in self.notes:
                self.notes.append(note)
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
                values = list(found) if isinstance(found, dict) and not self.uncounted(values) else values
            if length:
                return fields.put(self.uncounted(values) or str(len(values)), quoted=quoted)
            if re.match(r":[^-=+?]", rest):
                part, found = re.fullmatch(r":\s*(\d+)(?::\s*(\d+))?", rest), self.variables.get(name)
                gaps = isinstance(found, dict) and list(found) != [str(number) for number in range(len(found))]
                if part is None or gaps or self.uncounted(values):
                    raise UnreadableBash(at, f"a part ${{{inner}}} of this form is not read")
                first = int(part[1]) - (name in ("@", "*"))
                values, rest = values[first : first + int(part[2]) if part[2] else None], ""
            if (replaced := _operator(rest)) and values and replaced not in (":+", "+"):
                values, rest = [self._changed(value, rest, at) for value in values], ""
            if not rest or (values and replaced not in (":+", "+")):
                return self._add_all(values, fields, joined="*" in (index, name), quoted=quoted)
            if (not values) == replaced.endswith("-"):
                self._expand(rest, len(replaced), len(rest), fields, at, quoted=quoted, operand=True)
            return None
        if indirect:
            name = self.without_unset(self.plain(name, at))
            if not re.fullmatch(r"[A-Za-z_]\w*", name):
                return fields.put(self.mark(at, "the name of a variable is not known here"), quoted=quoted)
        if length:
            value = self.plain(name, at, index)
            unknown = MARK.search(self.without_unset(value))
            text = value if unknown else str(len(self.without_unset(value)))
            return fields.put(text, quoted=quoted)
        return self._with_operator(name, index, rest, fields, at, quoted=quoted)

    def _with_operator(
        self, name: str, index: str | None, rest: str, fields: _Fields, at: int, *, quoted: bool
    ) -> None:
        form = re.match(r":?[-=+?]", rest)
        if form is not None and quoted and "'" in rest:  # versions of Bash differ in what that means
            raise UnreadableBash(at, "a quote inside of a quoted ${...} is not read")
        if form is None:
            value = self.plain(name, at, index)
            return fields.put(self._changed(value, rest, at) if rest else value, quoted=quoted)
        found = self.value(name, at, index)
        missing = found is None or (form[0][0] == ":" and self.without_unset(found) == "")
        if form[0][-1] == "+":
            if found is not None and MARK.fullmatch(self.without_unset(found)):
                fields.put(found, quoted=quoted)
            elif not missing:
                self._expand(rest, form.end(), len(rest), fields, at, quoted=quoted, operand=True)
        elif not missing:
            fields.put(found or "", quoted=quoted)
        elif form[0][-1] == "?":
            fields.put(self.mark(at, f"${name} has no value", unset=name), quoted=quoted)
        elif form[0][-1] == "=":
            self.variables[name] = self.text(Word(at, rest[form.end() :]))
            fields.put(str(self.variables[name]), quoted=quoted)
        else:
            self._expand(rest, form.end(), len(rest), fields, at, quoted=quoted, operand=True)
        return None

    def _changed(self, value: str, rest: str, at: int) -> str:
        """A value behind one of the operators that change a text."""
        value = self.without_unset(value)
        if MARK.search(value):
            return value
        if rest[0] == ":":
            numbers = "".join(f": {self.arithmetic(each, at)}" for each in rest[1:].split(":"))
            known = not MARK.search(numbers)
            return (ask_bash(f'printf %s "${{1{numbers}}}"', value) if known else numbers) or ""
        form = re.match(r"##?|%%?|//|/[#%]?|\^\^?|,,?", rest)
        kind, body, new = form[0] if form is not None else "", rest[form.end() if form is not None else 0 :], ""
        if kind[:1] == "/":
            slash, reader = 0, BashText(body)
            while slash < len(body) and body[slash] != "/":
                slash = reader.token(slash)
            body, new = body[:slash], self.text(Word(at, body[slash + 1 :]))
        pattern = self.pattern(Word(at, body))
        if pattern is None or MARK.search(new):
            return self.mark(at, "a pattern is not known here")
        operand = f'{kind}$2/"$3"' if kind[:1] == "/" else f"{kind}$2" if body else kind
        found = ask_bash(f'printf %s "${{1{operand}}}"', value, pattern, new) if kind and "&" not in new else None
        if found is None:  # versions of Bash differ in &
            raise UnreadableBash(at, f"${{NAME{rest}}} is not read")
        return found

    def arithmetic(self, raw: str, at: int) -> int | str:
        """The value of arithmetic; a mark if it is not known."""
        raise NotImplementedError

    def quoted(self, raw: str, at: int) -> str:
        """A text with its expansions, as between quotes."""
        fields = _Fields(None, self.loose)
        self._expand(raw, 0, len(raw), fields, at, quoted=True)
        fields.end()
        return fields.done[0][0] if fields.done else "0"


@lru_cache(maxsize=10_000)
def ask_bash(script: str, *words: str) -> str | None:
    """The output of a script that is ours, whose parameters are texts of a launcher; None if it fails.

    So patterns, formats and numbers are what Bash makes of them; no text of a launcher is a command here.
    """
    command = ["bash", "--noprofile", "--norc", "-c", f"ulimit -v 1000000; {script}", "bash", *words]
    options: Any = {"env": {"LC_ALL": "C.UTF-8"}, "stdin": subprocess.DEVNULL, "capture_output": True}
    try:
        done = subprocess.run(command, timeout=BASH_SECONDS, check=False, **options)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:  # no Bash, a text that is too long or has a NUL
        raise UnreadableBash(0, f"Bash does not answer: {error}") from None
    return None if done.returncode else done.stdout.decode(errors="replace")


def _operator(rest: str) -> str:
    found = re.match(r":?[-=+?]|##?|%%?|//?|\^\^?|,,?|:", rest)
    return found[0] if found is not None else ""


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
