"""Bash as text: bounds of words, quotes, comments and compound commands. Nothing runs here.

Only as much of the language is read as is needed to say which `NAME_ARGS=( ... )` are assignments of a script's own,
and which stand in a comment, a text, a here-document or a branch. What cannot be read is an error, never a guess.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

BLANK = " \t"
METACHARACTERS = frozenset(" \t\n;&|<>()")
"""Characters that end a word unless they are quoted."""

ARRAY_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*_ARGS)(\+?=)")
_OPENING = {"if": "fi", "for": "done", "while": "done", "until": "done", "select": "done", "case": "esac", "{": "}"}
_STAY = frozenset({"then", "do", "else", "elif", "!", "time", "coproc"})
"""Words behind which a command begins."""
_DECLARE = frozenset({"export", "readonly", "declare", "typeset"})
_SCALAR = re.compile(r"([A-Za-z_]\w*)(\+?=)")
_DEFAULT = re.compile(r"\$\{([A-Za-z_]\w*):?=")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*(\[[^]]*\])?\+?=")


class UnreadableBash(Exception):
    """Text that is no Bash that this module knows, or that must not be there."""

    def __init__(self, at: int, words: str) -> None:
        self.at = at
        """Index into the text."""
        self.words = words
        super().__init__(words)


@dataclass(frozen=True)
class BashArray:
    """`NAME=( body )` or `NAME+=( body )` of a script, outside of every compound command."""

    name: str
    operator: str
    body: str
    """Text between the parentheses, comments included."""
    at: int
    """Index of the first character of the body."""


@dataclass(frozen=True)
class BashAssignment:
    """`NAME=word` of a script, which may stand behind `export` and such, or be a default in `${NAME:=word}`."""

    name: str
    word: str
    """Text behind the sign, as it is written."""
    at: int
    """Index of the first character of the name."""
    inside: bool
    """The assignment stands in a branch, a loop or a function: only a run of the script shows if it counts."""
    appends: bool


def find_assignments(text: str) -> tuple[list[BashAssignment], set[str]]:
    """The assignments of a script, but of arrays, in its order; and the names that it exports. Raises Unreadable."""
    script = _Script(text)
    script.read()
    return script.assigned, script.exported


def find_arrays(text: str) -> list[BashArray]:
    """The arrays NAME_ARGS of a script, in its order. Raises Unreadable if one of them cannot be taken.

    One cannot that stands in a branch, a loop or a function, or behind `declare` and such: whether it counts would be
    known by running the script.
    """
    return _Script(text).read()


def line_number(text: str, at: int) -> int:
    """The number of the line of an index."""
    return text.count("\n", 0, at) + 1


class BashText:
    """Text of Bash. Each method returns the index behind the word, quote or expansion that begins at an index."""

    def __init__(self, text: str) -> None:
        self.text = text

    def word(self, at: int) -> int:
        """Behind a word, with all that is quoted in it."""
        while at < len(self.text) and self.text[at] not in METACHARACTERS:
            at = self.token(at)
        return at

    def token(self, at: int, *, in_quotes: bool = False) -> int:
        """Behind one character, or behind the quote, expansion or substitution that begins with it."""
        char, following = self.text[at], self.text[at + 1 : at + 2]
        if char == "\\":
            return at + 2
        if char == "'" and not in_quotes:
            return self._behind("'", at + 1, at)
        if char == '"' and not in_quotes:
            return self._quoted(at)
        if char == "`":
            return self._behind("`", at + 1, at, escaped=True)
        if char == "$" and following == "(":
            return self.parentheses(at + 1)
        if char == "$" and following == "{":
            return self._braces(at + 1, in_quotes=in_quotes)
        if char == "$" and following == "'" and not in_quotes:
            return self._behind("'", at + 2, at, escaped=True)
        if char == "$" and following == '"' and not in_quotes:
            return self._quoted(at + 1)
        return at + 1

    def parentheses(self, at: int) -> int:
        """Behind the parenthesis that closes this one. Comments, quotes and nested parentheses are passed over."""
        start, depth, word = at, 0, False
        while at < len(self.text):
            char = self.text[at]
            if char in "()":
                depth, at, word = depth + (1 if char == "(" else -1), at + 1, False
                if depth == 0:
                    return at
            elif char == "#" and not word:
                at = end_of_line(self.text, at)
            else:
                word = char not in METACHARACTERS
                at = self.token(at)
        raise UnreadableBash(start, "a ( is not closed")

    def _quoted(self, at: int) -> int:
        start, at = at, at + 1
        while at < len(self.text):
            if self.text[at] == '"':
                return at + 1
            at = self.token(at, in_quotes=True)
        raise UnreadableBash(start, 'a " is not closed')

    def _braces(self, at: int, *, in_quotes: bool) -> int:
        start, at = at, at + 1
        while at < len(self.text):
            if self.text[at] == "}":
                return at + 1
            at = self._quoted(at) if self.text[at] == '"' else self.token(at, in_quotes=in_quotes)
        raise UnreadableBash(start, "a ${ is not closed")

    def _behind(self, quote: str, at: int, start: int, *, escaped: bool = False) -> int:
        """Behind the next quote of this kind."""
        while at < len(self.text):
            if self.text[at] == quote:
                return at + 1
            at += 2 if escaped and self.text[at] == "\\" else 1
        raise UnreadableBash(start, f"a {quote} is not closed")


class _Script(BashText):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.at = 0
        self.open: list[str] = []
        """The words or parentheses that close what is open, the innermost last."""
        self.found: list[BashArray] = []
        self.assigned: list[BashAssignment] = []
        self.exported: set[str] = set()
        self.declares = ""
        """`export` or such, if that is the command that the next word belongs to."""
        self.command = True
        """The next word is a command's first."""
        self.pattern = False
        """The next word is a pattern of `case`."""
        self.case = False
        """A following `in` belongs to a `case`."""
        self.heredocs: list[tuple[str, bool]] = []
        """Delimiters of here-documents that begin on the next line, and whether tabs before them are taken away."""

    def read(self) -> list[BashArray]:
        while self.at < len(self.text):
            self._step()
        if self.open:
            raise UnreadableBash(len(self.text), f"{self.open[-1]!r} is missing")
        return self.found

    def _step(self) -> None:
        text, at = self.text, self.at
        char = text[at]
        if char in BLANK:
            self.at += 1
        elif text.startswith("\\\n", at):
            self.at += 2
        elif char == "#":
            self.at = end_of_line(text, at)
        elif char == "\n":
            self.at += 1
            self._bodies()
            self.command = True
        elif self.pattern and not text.startswith("esac", at):
            self._pattern()
        elif text.startswith("((", at):
            self._outside(self.parentheses(at))
            self.command = False
        elif text.startswith(("<<<", "<(", ">("), at):
            if char == text[at + 1]:
                self.at += 3
            else:
                self._outside(self.parentheses(at + 1))
        elif text.startswith("<<", at):
            self._heredoc()
        elif char in ";&|":
            ends = char == ";" and text[at : at + 2] in (";;", ";&")
            self.at += 1
            while self.at < len(text) and text[self.at] in ";&|":
                self.at += 1
            self.command = True
            self.pattern = ends and bool(self.open) and self.open[-1] == "esac"
        elif char == "(":
            self.at += 1
            self.open.append(")")
            self.command = True
        elif char == ")":
            self._close(")")
            self.at += 1
            self.command = True  # behind the name of a function its body begins
        elif char in "<>":
            self.at += 1
        else:
            self._word()

    def _word(self) -> None:
        start = self.at
        self.at = self.word(start)
        word = self.text[start : self.at]
        self._refuse_inside(start, self.at)
        if self.command:
            self.declares = word if word in _DECLARE else ""
        self._assignment(word, start)
        match = ARRAY_ASSIGNMENT.match(word)
        if self.text.startswith("(", self.at) and _ASSIGNMENT.fullmatch(word):
            self._array(word, start)
        elif match is not None and match.end() <= len(word) and self.command and match[1] != "DATA_ARGS":
            raise UnreadableBash(start, f"{match[1]} is a text here; only arrays are taken: write {match[1]}+=( ... )")
        elif self.command and word in _OPENING:
            self.open.append(_OPENING[word])
            self.command = word not in ("for", "select", "case")
            self.case = word == "case"
        elif self.command and word == "function":
            self.at = self.word(skip_blanks(self.text, self.at))
        elif self.command and word in ("fi", "done", "esac", "}"):
            self._close(word)
            self.command = self.pattern = False
        elif word == "in" and self.case:
            self.case, self.pattern = False, True
        elif not (self.command and (word in _STAY or _ASSIGNMENT.match(word))):
            self.command = False

    def _assignment(self, word: str, start: int) -> None:
        """Note what a word assigns, and what it exports."""
        inside = bool(self.open)
        if self.declares:
            word = re.sub(r"""^(["'])([A-Za-z_]\w*\+?=)""", r"\2\1", word)  # export "NAME=word"
            self.declares = "export" if re.match(r"-\w*x", word) else self.declares
        if self.declares == "export" and (name := re.match(r"[A-Za-z_]\w*", word)) is not None:
            self.exported.add(name[0])
        found = _SCALAR.match(word)
        if found is not None and (self.command or self.declares) and not self.text.startswith("(", self.at):
            self.assigned.append(BashAssignment(found[1], word[found.end() :], start, inside, found[2] == "+="))
        for default in _DEFAULT.finditer(word):
            text = word[default.start() : BashText(word).token(default.start())].replace("=", "-", 1)
            self.assigned.append(BashAssignment(default[1], text, start + default.start(), inside, appends=False))

    def _array(self, word: str, start: int) -> None:
        match = ARRAY_ASSIGNMENT.fullmatch(word)
        body = self.at + 1
        end = self.parentheses(self.at)
        if match is not None:
            if self.open or not self.command:
                where = f"inside of what {self.open[-1]!r} ends" if self.open else "behind another word"
                raise UnreadableBash(
                    start, f"{match[1]} stands {where}: whether it counts is known by running the script"
                )
            if end < len(self.text) and self.text[end] not in " \t\n;&|":
                raise UnreadableBash(end, f"{match[1]} goes on behind its last parenthesis")
            self.found.append(BashArray(match[1], match[2], self.text[body : end - 1], body))
        self.at = end

    def _outside(self, end: int) -> None:
        """Pass over what is no script's own level, and holds no array."""
        self._refuse_inside(self.at, end, quoted=False)
        self.at = end

    def _refuse_inside(self, start: int, end: int, *, quoted: bool = True) -> None:
        """Raise Unreadable for an array inside of a substitution or arithmetic."""
        text = self.text[start:end]
        if quoted and "$(" not in text and "`" not in text:
            return
        if (match := re.search(ARRAY_ASSIGNMENT.pattern + r"\(", text)) is not None:
            raise UnreadableBash(start + match.start(), f"{match[1]} stands inside of a command substitution")

    def _close(self, word: str) -> None:
        if not self.open or self.open[-1] != word:
            raise UnreadableBash(self.at, f"{word!r} closes nothing")
        self.open.pop()

    def _pattern(self) -> None:
        """Pass over a pattern of `case` and the parenthesis behind it."""
        if self.text[self.at] == "(":
            self.at += 1
        while self.at < len(self.text) and self.text[self.at] != ")":
            char = self.text[self.at]
            self.at = self.at + 1 if char in METACHARACTERS else self.word(self.at)
        self.at += 1
        self.pattern, self.command = False, True

    def _heredoc(self) -> None:
        strip = self.text.startswith("<<-", self.at)
        start = skip_blanks(self.text, self.at + (3 if strip else 2))
        self.at = self.word(start)
        if self.at == start:
            raise UnreadableBash(start, "a here-document without a word that ends it")
        self.heredocs.append((re.sub(r"[\\'\"]", "", self.text[start : self.at]), strip))

    def _bodies(self) -> None:
        """Pass over the here-documents that begin here."""
        for word, strip in self.heredocs:
            while True:
                if self.at >= len(self.text):
                    raise UnreadableBash(self.at, f"the here-document that {word!r} ends does not end")
                end = end_of_line(self.text, self.at)
                line = self.text[self.at : end]
                self.at = end + 1
                if (line.lstrip("\t") if strip else line) == word:
                    break
        self.heredocs = []


def end_of_line(text: str, at: int) -> int:
    """Return the index of the end of the line around `at`."""
    end = text.find("\n", at)
    return len(text) if end < 0 else end


def skip_blanks(text: str, at: int) -> int:
    """Behind the blanks that begin here, and the line ends that a backslash takes away."""
    while at < len(text) and (text[at] in BLANK or text.startswith("\\\n", at)):
        at += 1 if text[at] in BLANK else 2
    return at
