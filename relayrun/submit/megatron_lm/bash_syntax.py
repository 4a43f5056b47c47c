"""Bash as text and as commands: `parse` turns a script into commands. Nothing runs here.

A word stays as it is written; `bash_values` expands it. Text that is not of the known subset is an error, never a
guess.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

BLANK = " \t"
METACHARACTERS = frozenset(" \t\n;&|<>()")
"""Characters that end a word unless they are quoted."""
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^]]*\])?(\+?=)")
DECLARE = frozenset({"export", "readonly", "declare", "typeset", "local"})
_REDIRECTION = re.compile(r"(?:\d+|\{\w+\})?(<<<|<<-?|<>|<&|>&|>\||>>|&>>|&>|<(?!\()|>(?!\())")
_FUNCTION = re.compile(r"([\w:.-]+)[ \t]*\([ \t]*\)")
_RESERVED = re.compile(r"(?:[a-z]+|[{}!]|\[\[)(?=[\s;&|()<>]|$)")


class UnreadableBash(Exception):
    """Text that is not of the known subset of Bash."""

    def __init__(self, at: int, words: str) -> None:
        self.at = at
        """Index into the text."""
        self.words = words
        super().__init__(words)


@dataclass(frozen=True)
class Word:
    """A word as it is written."""

    at: int
    text: str


@dataclass(frozen=True)
class Command:
    """A simple command, or `(( ))` and `[[ ]]`, whose kind is their first word."""

    at: int
    words: list[Word]
    redirections: list[tuple[str, Word]] = field(default_factory=list)
    """Operators with their files; for a here-document the word is its text."""


@dataclass(frozen=True)
class Compound:
    """A command that holds others."""

    at: int
    kind: str
    """`&&`, `||`, `|`, `&`, `!`, `(`, `{`, `if`, `for`, `while`, `until`, `case` or `function`."""
    parts: list[list[Node]]
    words: list[Word] = field(default_factory=list)
    patterns: list[list[Word]] = field(default_factory=list)
    """Patterns of `case`, one list for each part."""
    redirections: list[tuple[str, Word]] = field(default_factory=list)


Node = Command | Compound


def line_number(text: str, at: int) -> int:
    """The number of the line of an index."""
    return text.count("\n", 0, at) + 1


def end_of_line(text: str, at: int) -> int:
    """Return the index of the end of the line around `at`."""
    end = text.find("\n", at)
    return len(text) if end < 0 else end


class BashText:
    """Text of Bash. Each method returns the index behind the word, quote or expansion that begins at an index."""

    def __init__(self, text: str) -> None:
        self.text = text

    def word(self, at: int) -> int:
        """Behind a word, with everything that is quoted in it."""
        while at < len(self.text):
            if self.text.startswith(("<(", ">("), at):
                at = self.parentheses(at + 1)
            elif self.text[at] in METACHARACTERS:
                break
            else:
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


def parse(text: str) -> list[Node]:
    """The commands of a script. Raises UnreadableBash."""
    parser = _Parser(text)
    found = parser.commands()
    if parser.at < len(text):
        parser.refuse(f"{text[parser.at]!r} closes nothing")
    return found


class _Parser(BashText):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.at = 0
        self.heredocs: list[tuple[str, bool, bool, list[tuple[str, Word]]]] = []
        """Here-documents that begin on the next line: delimiter, tabs are removed, quoted, and their command's list."""

    def refuse(self, words: str) -> NoReturn:
        raise UnreadableBash(min(self.at, len(self.text)), words)

    def _blanks(self) -> None:
        """Pass over blanks, continued lines, and a comment."""
        while True:
            if self.text[self.at : self.at + 1] in (" ", "\t"):
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self.at += 2
            elif self.text.startswith("#", self.at):
                self.at = end_of_line(self.text, self.at)
            else:
                return

    def _lines(self, separators: str = "\n") -> None:
        """Pass over ends of lines, and the here-documents behind them."""
        self._blanks()
        while self.at < len(self.text) and self.text[self.at] in separators:
            if self.text[self.at] == ";" and self.text.startswith((";;", ";&"), self.at):
                return
            newline = self.text[self.at] == "\n"
            self.at += 1
            if newline:
                self._bodies()
            self._blanks()

    def _bodies(self) -> None:
        for delimiter, strip, quoted, redirections in self.heredocs:
            lines, start = [], self.at
            while True:
                if self.at >= len(self.text):
                    self.refuse(f"the here-document that {delimiter!r} ends does not end")
                end = end_of_line(self.text, self.at)
                line = self.text[self.at : end].lstrip("\t") if strip else self.text[self.at : end]
                self.at = end + 1
                if line == delimiter:
                    break
                lines.append(line + "\n")
            redirections.append(("<<'" if quoted else "<<", Word(start, "".join(lines))))
        self.heredocs = []

    def commands(self, *ends: str) -> list[Node]:
        """The commands up to a reserved word of `ends`, a closing parenthesis, or the end of a clause."""
        found: list[Node] = []
        while True:
            self._lines("\n;")
            if self.at >= len(self.text) or self.text[self.at] in ");" or self._reserved() in ends:
                return found
            start, node = self.at, self._and_or()
            self._blanks()
            if self.text.startswith("&", self.at):
                self.at += 1
                node = Compound(start, "&", [[node]])
            elif self.at < len(self.text) and self.text[self.at] not in "\n;)":
                self.refuse(f"an unexpected {self.text[self.at]!r}")
            found.append(node)

    def _reserved(self) -> str:
        """The reserved word here; empty if there is none."""
        match = _RESERVED.match(self.text, self.at)
        return match[0] if match is not None else ""

    def _take(self, word: str) -> None:
        self._lines("\n;")
        if self._reserved() != word:
            self.refuse(f"{word!r} is missing")
        self.at += len(word)

    def _and_or(self) -> Node:
        start, node = self.at, self._pipeline()
        while True:
            self._blanks()
            operator = self.text[self.at : self.at + 2]
            if operator not in ("&&", "||"):
                return node
            self.at += 2
            self._lines()
            node = Compound(start, operator, [[node], [self._pipeline()]])

    def _pipeline(self) -> Node:
        start, negated = self.at, False
        while self._reserved() in ("!", "time"):
            negated ^= self._reserved() == "!"
            self.at += len(self._reserved())
            self._blanks()
        parts = [[self._command()]]
        while True:
            self._blanks()
            if not self.text.startswith("|", self.at) or self.text.startswith("||", self.at):
                break
            self.at += 2 if self.text.startswith("|&", self.at) else 1
            self._lines()
            parts.append([self._command()])
        node: Node = parts[0][0] if len(parts) == 1 else Compound(start, "|", parts)
        return Compound(start, "!", [[node]]) if negated else node

    def _command(self) -> Node:
        start, word = self.at, self._reserved()
        if word in ("select", "coproc"):
            self.refuse(f"{word!r} is not read")
        readers: dict[str, Callable[[], Compound]] = {
            "if": self._if,
            "for": self._for,
            "while": self._while,
            "until": self._while,
            "case": self._case,
            "function": self._function,
            "{": self._group,
        }
        reader = readers.get(word)
        if word == "[[":
            test = self._test()
            return Command(start, test.words, self._redirections())
        if self.text.startswith("((", start):
            self.at = self.parentheses(start)
            if not self.text[: self.at].endswith("))"):
                self.at = start
                self.refuse("a subshell within a subshell: write a blank between the parentheses")
            words = [Word(start, "(("), Word(start + 2, self.text[start + 2 : self.at - 2])]
            return Command(start, words, self._redirections())
        if self.text.startswith("(", start):
            reader = self._group
        if reader is None and (found := _FUNCTION.match(self.text, start)) is not None:
            self.at = found.end()
            return self._body(start, found[1])
        if reader is None:
            return self._simple()
        node = reader()
        node.redirections.extend(self._redirections())
        return node

    def _simple(self) -> Command:
        node = Command(self.at, [])
        while True:
            self._blanks()
            if self.at >= len(self.text) or self._redirect(node.redirections):
                if self.at >= len(self.text):
                    break
                continue
            start = self.at
            self.at = self.word(start)
            text = self.text[start : self.at]
            assigned = ASSIGNMENT.fullmatch(text)
            if self.text.startswith("(", self.at) and assigned is not None and not assigned[2]:
                self.at = self.parentheses(self.at)
                text = self.text[start : self.at]
                if self.at < len(self.text) and self.text[self.at] not in METACHARACTERS:
                    self.refuse(f"{assigned[1]} goes on behind its last parenthesis")
            if self.at == start:
                break
            node.words.append(Word(start, text))
        if not node.words and not node.redirections:
            self.refuse(f"an unexpected {self.text[self.at : self.at + 1]!r}")
        return node

    def _redirections(self) -> list[tuple[str, Word]]:
        found: list[tuple[str, Word]] = []
        self._blanks()
        while self._redirect(found):
            self._blanks()
        return found

    def _redirect(self, found: list[tuple[str, Word]]) -> bool:
        match = _REDIRECTION.match(self.text, self.at)
        if match is None:
            return False
        self.at = match.end()
        self._blanks()
        start = self.at
        self.at = self.word(start)
        word = self.text[start : self.at]
        if not word:
            self.refuse("a redirection without a file")
        if match[1] in ("<<", "<<-"):
            plain = re.sub(r"[\\'\"]", "", word)
            self.heredocs.append((plain, match[1] == "<<-", plain != word, found))
        else:
            found.append((match[1], Word(start, word)))
        return True

    def _group(self) -> Compound:
        start, opened = self.at, self.text[self.at]
        self.at += 1
        body = self.commands("}") if opened == "{" else self.commands()
        if not self.text.startswith("}" if opened == "{" else ")", self.at):
            self.refuse(f"a {opened} is not closed")
        self.at += 1
        return Compound(start, opened, [body])

    def _if(self) -> Compound:
        start, parts = self.at, list[list[Node]]()
        self.at += 2
        while True:
            parts.append(self.commands("then"))
            self._take("then")
            parts.append(self.commands("elif", "else", "fi"))
            if self._reserved() != "elif":
                break
            self.at += 4
        if self._reserved() == "else":
            self.at += 4
            parts.append(self.commands("fi"))
        self._take("fi")
        return Compound(start, "if", parts)

    def _while(self) -> Compound:
        start, kind = self.at, self._reserved()
        self.at += 5
        condition = self.commands("do")
        return Compound(start, kind, [condition, self._do()])

    def _do(self) -> list[Node]:
        self._take("do")
        body = self.commands("done")
        self._take("done")
        return body

    def _for(self) -> Compound:
        start = self.at
        self.at += 3
        self._blanks()
        if self.text.startswith("((", self.at):
            begin, self.at = self.at, self.parentheses(self.at)
            words = [Word(begin, "(("), Word(begin + 2, self.text[begin + 2 : self.at - 2])]
        else:
            words = self._words()
            if len(words) > 1 and words[1].text != "in":
                self.refuse("'in' is missing")
        return Compound(start, "for", [self._do()], words)

    def _words(self) -> list[Word]:
        found: list[Word] = []
        while True:
            self._blanks()
            start = self.at
            self.at = self.word(start)
            if self.at == start:
                return found
            found.append(Word(start, self.text[start : self.at]))

    def _function(self) -> Compound:
        start = self.at
        self.at += len("function")
        self._blanks()
        begin = self.at
        self.at = self.word(begin)
        name = self.text[begin : self.at]
        if (parentheses := re.compile(r"[ \t]*\([ \t]*\)").match(self.text, self.at)) is not None:
            self.at = parentheses.end()
        return self._body(start, name)

    def _body(self, start: int, name: str) -> Compound:
        self._lines()
        return Compound(start, "function", [[self._command()]], [Word(start, name)])

    def _case(self) -> Compound:
        start = self.at
        self.at += 4
        self._blanks()
        begin = self.at
        self.at = self.word(begin)
        node = Compound(start, "case", [], [Word(begin, self.text[begin : self.at])])
        self._take("in")
        while True:
            self._lines()
            if self._reserved() == "esac":
                self.at += 4
                return node
            node.patterns.append(self._patterns())
            node.parts.append(self.commands("esac"))
            if self.text.startswith((";&", ";;&"), self.at):
                self.refuse("a clause of case that falls through is not read")
            if self.text.startswith(";;", self.at):
                self.at += 2
            elif self._reserved() != "esac":
                self.refuse("'esac' is missing")

    def _patterns(self) -> list[Word]:
        found: list[Word] = []
        if self.text.startswith("(", self.at):
            self.at += 1
        while True:
            found += self._words()
            self._blanks()
            char = self.text[self.at : self.at + 1]
            if char not in ("|", ")"):
                self.refuse("a pattern of case is not read")
            self.at += 1
            if char == ")":
                return found

    def _test(self) -> Command:
        node = Command(self.at, [])
        while True:
            while self.text[self.at : self.at + 1].isspace() or self.text.startswith("\\\n", self.at):
                self.at += 2 if self.text.startswith("\\\n", self.at) else 1
            start = self.at
            if start >= len(self.text):
                self.refuse("a [[ is not closed")
            if self.text.startswith(("&&", "||"), start) or re.compile(r"\]\](?=[\s;&|)<>]|$)").match(self.text, start):
                self.at += 2
            elif self.text[start] in "()<>" and (not node.words or node.words[-1].text != "=~"):
                self.at += 1
            else:
                regex = bool(node.words) and node.words[-1].text == "=~"
                while self.at < len(self.text) and not self.text[self.at].isspace():
                    if self.text[self.at] in "()&|<>" and not regex:
                        break
                    self.at = self.token(self.at)
            if self.at == start:
                self.refuse(f"an unexpected {self.text[start]!r}")
            node.words.append(Word(start, self.text[start : self.at]))
            if node.words[-1].text == "]]":
                return node
