"""The answers of Bash's tests `[ ]` and `[[ ]]`. Files are looked at, and noted."""

from __future__ import annotations

import itertools
import re
from typing import NoReturn

from relayrun.submit.megatron_lm.bash_syntax import UnreadableBash, Word
from relayrun.submit.megatron_lm.bash_values import MARK, BashValues, ask_bash

_FILE_TESTS = frozenset(["-d", "-f", "-e", "-L", "-h", "-s", "-r", "-w", "-x"])
_COMPARISONS = frozenset(["=", "==", "!=", "<", ">", "=~", "-eq", "-ne", "-lt", "-le", "-gt", "-ge", "-nt", "-ot"])
_SIGNS = {"&&": "&&", "||": "||", "-a": "&&", "-o": "||", "!": "!", "(": "(", ")": ")"}
MOST_UNKNOWN = 6
"""Parts of a test that only a job knows."""


class BashTest:
    """The answer of `[ ]` or `[[ ]]`."""

    def __init__(self, values: BashValues, words: list[Word], at: int, *, expanded: bool = False) -> None:
        self.values, self.words, self.where, self.expanded, self.at = values, words, at, expanded, 0
        if expanded:  # an unset variable without quotes is no word
            gone = [values.without_unset(self._value(each)) == "" and values.uncounted([each.text]) for each in words]
            self.words = [each for each, unset in zip(words, gone, strict=True) if not unset]

    def answer(self) -> bool | None:
        """True or false; None: only a job knows it. Raises UnreadableBash."""
        found, unknown = "", 0
        while rest := self.words[self.at :]:
            sign = _SIGNS.get(rest[0].text, "")
            if sign and (len(rest) < 3 or rest[1].text not in _COMPARISONS):
                found += sign
                self.at += 1
            elif (single := self._single()) is None:
                found += f"{{{unknown}}}"
                unknown += 1
            else:
                found += f" {int(single)} "
        cases = itertools.product((" 0 ", " 1 "), repeat=min(unknown, MOST_UNKNOWN))
        answers = (
            {ask_bash("echo $(($1))", found.format(*case)) for case in cases} if unknown <= MOST_UNKNOWN else {None}
        )
        if None in answers:
            self._refuse()
        return answers == {"1\n"} if len(answers) == 1 else None

    def _refuse(self) -> NoReturn:
        raise UnreadableBash(self.where, f"the test {' '.join(word.text for word in self.words)} is not read")

    def _value(self, word: Word) -> str:
        text = word.text if self.expanded else self.values.text(word)
        for unknown in self.values.unknowns(text):
            note = f"{unknown.where}: ${unknown.unset} is not set, and counts as empty"
            if unknown.unset and note not in self.values.notes:
                self.values.notes.append(note)
        return text

    def _single(self) -> bool | None:
        rest = self.words[self.at :]
        if len(rest) >= 3 and rest[1].text in _COMPARISONS:
            self.at += 3
            return self._compared(rest[0], rest[1].text, rest[2])
        if len(rest) >= 2 and re.fullmatch(r"-[a-zA-Z]", rest[0].text) and rest[1].text not in ("&&", "||"):
            self.at += 2
            return self._unary(rest[0].text, self._value(rest[1]), rest[1])
        self.at += 1
        value = self.values.without_unset(self._value(rest[0]))
        return None if MARK.search(value) else bool(value)

    def _unary(self, kind: str, text: str, word: Word) -> bool | None:
        value = self.values.without_unset(text)
        unknown = MARK.search(value) is not None
        if kind in ("-z", "-n"):
            empty = MARK.sub("", value) == ""
            return (kind == "-n") is not empty if not unknown or not empty else None
        if kind == "-v":
            name, _, index = value.removesuffix("]").partition("[")
            found = self.values.value(name, word.at, index or None)
            return None if MARK.search(found or "") else found is not None
        if kind in _FILE_TESTS and not unknown and value == text:
            if value and not value.startswith("/"):
                return None  # nobody knows in which folder
            answer = ask_bash.__wrapped__(f'[ {kind} "$1" ]', value) is not None  # a file may appear between two
            line = self.values.source.where(word.at)
            self.values.notes.append(f"{line}: [ {kind} {value} ] is {'true' if answer else 'false'} here")
            return answer
        if kind in _FILE_TESTS or kind in ("-t", "-p", "-S", "-b", "-c", "-N", "-O", "-G", "-o"):
            return None
        return self._refuse()

    def _compared(self, left: Word, kind: str, right: Word) -> bool | None:
        script = self.values
        one = script.without_unset(self._value(left))
        if kind in ("-nt", "-ot") or MARK.search(one):
            return None
        if kind in ("=", "==", "!=") and not self.expanded:
            pattern = script.pattern(right)
            return None if pattern is None else matches(one, pattern) is (kind != "!=")
        if kind == "=~":
            return self._searched(one, script.pattern(right))
        other = script.without_unset(self._value(right))
        if MARK.search(other):
            return None
        if kind.startswith("-") and not self.expanded:
            numbers = [str(script.arithmetic(each or "0", left.at)) for each in (one, other)]
            if MARK.search("".join(numbers)):
                return None
            one, other = numbers
        return ask_bash(f'[ "$1" \\{kind} "$2" ]', one, other) is not None

    def _searched(self, text: str, pattern: str | None) -> bool | None:
        if pattern is None:
            return None
        script = '[[ $1 =~ $2 ]]; s=$?; ((s < 2)) && printf "%s\\0" $s "${BASH_REMATCH[@]}"'
        found = ask_bash(script, text, pattern)
        if found is None:
            self._refuse()
        status, *parts = found.split("\0")[:-1]
        self.values.variables["BASH_REMATCH"] = {str(number): part for number, part in enumerate(parts)}
        return status == "0"


def matches(text: str, pattern: str) -> bool:
    """Return True if a text is of a pattern."""
    return ask_bash("[[ $1 == $2 ]]", text, pattern) is not None
