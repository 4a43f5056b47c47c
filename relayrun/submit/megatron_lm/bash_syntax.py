"""Bash as text and as commands: `parse` turns a script into commands. Nothing runs here.

A word stays as it is written; `bash_values` expands it. Text that is not of the known subset is an error, never a
guess.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

METACHARACTERS = frozenset(" \t\n;&|<>()")
"""Characters that end a word unless they are quoted."""
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^]]*\])?(\+?=)")
DECLARE = frozenset({"export", "readonly", "declare", "typeset", "local"})
_REDIRECTION = re.compile(r"(?:\d+|\{\w+\})?(<<<|<<-?|<>|<&|>&|>\||>>|&>>|&>|<(?!\()|>(?!\())")
_PARENTHESES = re.compile(r"[ \t]*\([ \t]*\)")
_FUNCTION = re.compile(rf"[\w:.-]+{_PARENTHESES.pattern}")
_BLANKS = re.compile(r"(?:[ \t]|\\\n|#.*)+")
_SPACES = re.compile(r"(?:\s|\\\n)+")
_QUOTE = re.compile(r"\$?['\"]")
_TEST_OPERATOR = re.compile(r"&&|\|\||\]\](?=[\s;&|)<>]|$)|[()<>]")
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
class Node:
    """A command."""

    at: int
    kind: str
    """Empty for a simple command; `[[`, `((`, `for((`, `&&`, `||`, `|`, `&`, `!`, `(`, `{`, or a reserved word."""
    parts: list[list[Node]] = field(default_factory=list)
    """Commands that it holds."""
    words: list[Word] = field(default_factory=list)
    patterns: list[list[Word]] = field(default_factory=list)
    """Patterns of `case`, one list for each part; the part's end (`;;`, `;&`, `;;&`) is one of `words`."""
    redirections: list[tuple[str, Word]] = field(default_factory=list)
    """Operators with their files; for a here-document the word is its text."""


def line_number(text: str, at: int) -> int:
    """The number of the line of an index."""
    return text.count("\n", 0, at) + 1


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
        if self.text[at] == "\\":
            return at + 2
        if self.text[at] == "`":
            return self._closed("`", at, escaped=True)
        if self.text.startswith(("$(", "?(", "*(", "+(", "@(", "!("), at):
            return self.parentheses(at + 1)
        if self.text.startswith("${", at):
            return self._closed("}", at + 1, in_quotes=in_quotes)
        quote = _QUOTE.match(self.text, at)
        if quote is None or in_quotes:
            return at + 1
        if quote[0][-1] == '"':
            return self._closed('"', quote.end() - 1, in_quotes=True)
        return self._closed("'", quote.end() - 1, escaped=len(quote[0]) == 2)

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
                end_of_line = self.text.find("\n", at)
                at = len(self.text) if end_of_line < 0 else end_of_line
            else:
                word = char not in METACHARACTERS
                at = self.token(at)
        raise UnreadableBash(start, "a ( is not closed")

    def _closed(self, close: str, start: int, *, in_quotes: bool = False, escaped: bool = False) -> int:
        """Behind the quote or brace that closes this one. `escaped`: single quotes and backquotes may have escapes."""
        at = start + 1
        while at < len(self.text):
            if self.text[at] == close:
                return at + 1
            if close in "'`":
                at += 2 if escaped and self.text[at] == "\\" else 1
            else:
                at = self.token(at, in_quotes=in_quotes and self.text[at] != '"')
        raise UnreadableBash(start, f"a {'${' if close == '}' else close} is not closed")


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
        while (match := _BLANKS.match(self.text, self.at)) is not None:
            self.at = match.end()

    def _word(self) -> Word:
        """The word that begins here; its text is empty if there is none."""
        start, self.at = self.at, self.word(self.at)
        return Word(start, self.text[start : self.at])

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
            tabs, start = "\t*" if strip else "", self.at
            end = re.compile(rf"^{tabs}{re.escape(delimiter)}$", re.M).search(self.text, start)
            if end is None:
                self.at = len(self.text)
                self.refuse(f"the here-document that {delimiter!r} ends does not end")
            body = re.sub(f"^{tabs}", "", self.text[start : end.start()], flags=re.M)
            redirections.append(("<<'" if quoted else "<<", Word(start, body)))
            self.at = end.end() + 1
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
                node = Node(start, "&", [[node]])
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
            node = Node(start, operator, [[node], [self._pipeline()]])

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
        node = parts[0][0] if len(parts) == 1 else Node(start, "|", parts)
        return Node(start, "!", [[node]]) if negated else node

    def _command(self) -> Node:
        word = self._reserved()
        if word in ("select", "coproc"):
            self.refuse(f"{word!r} is not read")
        readers: dict[str, Callable[[], Node]] = {
            "if": self._if,
            "for": self._for,
            "while": self._while,
            "until": self._while,
            "case": self._case,
            "function": self._function,
            "{": self._group,
            "[[": self._test,
        }
        if self.text.startswith("((", self.at):
            node = Node(self.at, "((", words=[self._arithmetic()])
        elif self.text.startswith("(", self.at):
            node = self._group()
        elif word not in readers and _FUNCTION.match(self.text, self.at) is not None:
            node = self._function()
        else:
            node = readers.get(word, self._simple)()
        self._redirections(node)
        return node

    def _arithmetic(self) -> Word:
        """The text between double parentheses."""
        start, self.at = self.at, self.parentheses(self.at)
        if not self.text[: self.at].endswith("))"):
            self.at = start
            self.refuse("a subshell within a subshell: write a blank between the parentheses")
        return Word(start + 2, self.text[start + 2 : self.at - 2])

    def _simple(self) -> Node:
        node = Node(self.at, "")
        while True:
            self._redirections(node)
            word = self._word()
            assigned = ASSIGNMENT.fullmatch(word.text)
            if self.text.startswith("(", self.at) and assigned is not None and not assigned[2]:
                self.at = self.parentheses(self.at)
                word = Word(word.at, self.text[word.at : self.at])
                if self.at < len(self.text) and self.text[self.at] not in METACHARACTERS:
                    self.refuse(f"{assigned[1]} goes on behind its last parenthesis")
            if not word.text:
                break
            node.words.append(word)
        if not node.words and not node.redirections:
            self.refuse(f"an unexpected {self.text[self.at : self.at + 1]!r}")
        return node

    def _redirections(self, node: Node) -> None:
        self._blanks()
        while (match := _REDIRECTION.match(self.text, self.at)) is not None:
            self.at = match.end()
            self._blanks()
            word = self._word()
            if not word.text:
                self.refuse("a redirection without a file")
            if match[1] in ("<<", "<<-"):
                plain = re.sub(r"[\\'\"]", "", word.text)
                self.heredocs.append((plain, match[1] == "<<-", plain != word.text, node.redirections))
            else:
                node.redirections.append((match[0].removeprefix("1"), word))
            self._blanks()

    def _group(self) -> Node:
        start, opened = self.at, self.text[self.at]
        self.at += 1
        body = self.commands("}") if opened == "{" else self.commands()
        if not self.text.startswith("}" if opened == "{" else ")", self.at):
            self.refuse(f"a {opened} is not closed")
        self.at += 1
        return Node(start, opened, [body])

    def _if(self) -> Node:
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
        return Node(start, "if", parts)

    def _while(self) -> Node:
        start, kind = self.at, self._reserved()
        self.at += 5
        condition = self.commands("do")
        return Node(start, kind, [condition, self._do()])

    def _do(self) -> list[Node]:
        self._take("do")
        body = self.commands("done")
        self._take("done")
        return body

    def _for(self) -> Node:
        start = self.at
        self.at += 3
        self._blanks()
        if self.text.startswith("((", self.at):
            words = [self._arithmetic()]
            return Node(start, "for((", [self._do()], words)
        words = self._words()
        if len(words) > 1 and words[1].text != "in":
            self.refuse("'in' is missing")
        return Node(start, "for", [self._do()], words)

    def _words(self) -> list[Word]:
        found: list[Word] = []
        while True:
            self._blanks()
            word = self._word()
            if not word.text:
                return found
            found.append(word)

    def _function(self) -> Node:
        start = self.at
        if self._reserved() == "function":
            self.at += len("function")
            self._blanks()
        name = self._word()
        if (parentheses := _PARENTHESES.match(self.text, self.at)) is not None:
            self.at = parentheses.end()
        self._lines()
        return Node(start, "function", [[self._command()]], [name])

    def _case(self) -> Node:
        start = self.at
        self.at += 4
        self._blanks()
        node = Node(start, "case", words=[self._word()])
        self._take("in")
        while True:
            self._lines()
            if self._reserved() == "esac":
                self.at += 4
                return node
            node.patterns.append(self._patterns())
            node.parts.append(self.commands("esac"))
            end = re.compile(";;&|;&|;;|").match(self.text, self.at)
            node.words.append(Word(self.at, end[0] if end is not None else ""))
            self.at += len(node.words[-1].text)
            if not node.words[-1].text and self._reserved() != "esac":
                self.refuse("'esac' is missing")

    def _patterns(self) -> list[Word]:
        found: list[Word] = []
        self.at += self.text.startswith("(", self.at)
        while True:
            found += self._words()
            char = self.text[self.at : self.at + 1]
            if char not in ("|", ")"):
                self.refuse("a pattern of case is not read")
            self.at += 1
            if char == ")":
                return found

    def _test(self) -> Node:
        start, words = self.at, list[Word]()
        while not words or words[-1].text != "]]":
            if (spaces := _SPACES.match(self.text, self.at)) is not None:
                self.at = spaces.end()
            begin, regex = self.at, bool(words) and words[-1].text == "=~"
            if begin >= len(self.text):
                self.refuse("a [[ is not closed")
            operator, stops = _TEST_OPERATOR.match(self.text, begin), "" if regex else "()&|<>"
            if operator is not None and (not regex or len(operator[0]) == 2):
                self.at = operator.end()
            else:
                while self.text[self.at : self.at + 1] not in ("", " ", "\t", "\n", *stops):
                    self.at = self.token(self.at)
            if self.at == begin:
                self.refuse(f"an unexpected {self.text[begin]!r}")
            words.append(Word(begin, self.text[begin : self.at]))
        return Node(start, "[[", words=words[1:-1])
