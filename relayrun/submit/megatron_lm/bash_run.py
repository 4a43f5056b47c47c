"""Follows a launcher's lines without running a program: variables, branches, loops and functions, up to the training.

Only the shell's own commands have an effect here, on variables. Other programs are noted. Their output, and everything
that depends on it, is unknown (`UnknownValue`). Of a branch whose condition is unknown both sides are followed, and
variables that differ behind it are unknown. Tests of files are answered by the file system, and noted.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Callable, Iterator

from relayrun.submit.megatron_lm.bash_builtins import OUTPUT, PROGRAM, BashBuiltins, Followed, Input, LeaveBash, Started
from relayrun.submit.megatron_lm.bash_syntax import ASSIGNMENT, DECLARE, Node, UnreadableBash, Word, parse
from relayrun.submit.megatron_lm.bash_test import BashTest, matches
from relayrun.submit.megatron_lm.bash_values import DEFAULTS, MARK, Source, ask_bash
from relayrun.terminal import one_line

MOST_STEPS = 200_000
"""Commands of a script that are followed, loops included."""
_SHELL = re.compile(r"(?:.*/)?(?:ba)?sh")
_SETUP = re.compile(r"module|ml|conda|mamba|micromamba|spack|ulimit|uenv")
"""Commands that prepare the environment of programs."""
_INERT = frozenset(["trap", "wait", "umask", "hash", "type", "jobs", "kill", "disown"])
_EDITORS = re.compile(r"(?:\S*/)?(?:(?:sed|perl) (?:.* )?-\w*i|tee |mv |cp |rm |ln )")
"""Programs that write the files that they name."""
_CLEARED = re.compile(r"env (?:\S+ )*-(?:i|u|-unset|-ignore)|--export[= ](?!ALL)")
"""Words that take variables away from a program."""
_OUTPUTS = {">": False, ">|": False, "&>": False, ">&": False, ">>": True, "&>>": True}
"""Redirections of the output; whether they append."""


class Script(BashBuiltins):
    """A launcher that is followed."""

    def follow(self) -> None:
        """Follow the whole script. Raises UnreadableBash, with an index into `source`."""
        try:
            self._run(parse(self.source.text))
        except LeaveBash as left:
            if left.kind != "exit":
                raise UnreadableBash(left.at, f"{left.kind} stands outside of a loop or function") from None

    def _run(self, nodes: list[Node]) -> bool | None:
        status: bool | None = True
        for node in nodes:
            self.steps[0] += 1
            if self.steps[0] > MOST_STEPS:
                raise UnreadableBash(node.at, f"more than {MOST_STEPS} commands")
            with self._redirected(node):
                status = self._compound(node) if node.kind else self._command(node)
        return status

    @contextlib.contextmanager
    def _redirected(self, node: Node) -> Iterator[None]:
        """Apply the redirections of a command: its standard input, and the file that takes its output."""
        outer, file, appends = (self.input, self.output), "", False
        for kind, word in node.redirections:
            if kind[0] == "<":
                self.input = self._input(kind, word)
            elif kind in _OUTPUTS and not (kind == ">&" and word.text == "1"):
                file, appends, self.output = os.path.normpath(self.text(word)), _OUTPUTS[kind], []
        try:
            yield
        finally:
            if file:
                before = self.files.get(file, OUTPUT) if appends else ""
                self.files[file] = before + "".join(self.output or [])
            if [word.text for word in node.words] != ["exec"]:
                self.input, self.output = outer

    def _inside(self, source: Source, nodes: list[Node] | None = None) -> bool | None:
        """Follow another text in this shell; an error in it is one of its own lines."""
        before, self.source = self.source, source
        try:
            return self._run(parse(source.text) if nodes is None else nodes)
        except UnreadableBash as error:
            if not hasattr(error, "where"):
                error.where = source.where(error.at)  # type: ignore[attr-defined]
            raise
        finally:
            self.source = before

    # compound commands

    def _compound(self, node: Node) -> bool | None:
        if node.kind == "((":
            found = self.arithmetic(node.words[0].text, node.at)
            return None if isinstance(found, str) else bool(found)
        if node.kind == "[[":
            return BashTest(self, node.words, node.at).answer()
        first = node.parts[0]
        match node.kind:
            case "&&" | "||":
                return self._and_or(node)
            case "!":
                status = self._run(first)
                return None if status is None else not status
            case "|" | "&" | "(":
                return self._subshells(node)
            case "{":
                return self._run(first)
            case "if":
                return self._if(node.parts)
            case "for" | "for((":
                return self._for(node)
            case "while" | "until":
                return self._while(node, first, node.parts[1])
            case "case":
                return self._case(node)
        self.functions[node.words[0].text] = (self.source, first[0])
        return True

    def _and_or(self, node: Node) -> bool | None:
        left, wanted = self._run(node.parts[0]), node.kind == "&&"
        if left is None:
            self._either(node.at, lambda one: one._run(node.parts[1]), lambda other: None)
            return None
        return self._run(node.parts[1]) if left is wanted else left

    def _subshells(self, node: Node) -> bool | None:
        status: bool | None = True
        text = ""
        for number, part in enumerate(node.parts):
            shell = self.fork()
            if number:
                shell.input = Input(text) if OUTPUT not in text else None
            output = list[str]()
            if number < len(node.parts) - 1:
                shell.output = output
            try:
                status = shell._run(part)
            except LeaveBash as left:
                status = left.status
            text = "".join(output)
        return True if node.kind == "&" else status if len(node.parts) == 1 else None

    def _if(self, parts: list[list[Node]]) -> bool | None:
        if len(parts) < 2:
            return self._run(parts[0]) if parts else True
        status = self._run(parts[0])
        if status is None:
            at = parts[0][0].at
            self._either(at, lambda one: one._run(parts[1]), lambda other: other._if(parts[2:]))
            return None
        return self._run(parts[1]) if status else self._if(parts[2:])

    def _either(self, at: int, one: Callable[[Script], object], other: Callable[[Script], object]) -> None:
        """Follow both sides of a condition that is not known; variables that differ behind it are unknown."""
        sides, files = [], dict(self.files)
        for follow in (one, other):
            shell = self.fork()
            try:
                follow(shell)
                sides.append(shell)
            except LeaveBash as left:
                if left.kind != "exit":
                    raise UnreadableBash(left.at, f"{left.kind}: nobody knows if it is reached") from None
        if not sides:
            raise LeaveBash("exit", at, None)
        self.files |= {name: OUTPUT for name, text in self.files.items() if files.get(name) != text}
        words = f"it depends on the condition of line {self.source.line(at)}, which only a job knows"
        self._join(sides, at, words)

    def _join(self, sides: list[Script], at: int, words: str) -> None:
        first, last = sides[0], sides[-1]
        if first.differs(last):
            raise UnreadableBash(at, f"a function, option or parameter is not known here: {words}")
        names = [*first.variables, *(name for name in last.variables if name not in first.variables)]
        found = {name: first.variables.get(name) for name in names}
        for name, value in found.items():
            if value != last.variables.get(name) or (name in first.exported) is not (name in last.exported):
                found[name] = self.several(at, f"${name} is not known here: {words}")
        self.variables = {name: value for name, value in found.items() if value is not None}
        self.take(first)
        self.exported = first.exported | last.exported

    def _for(self, node: Node) -> bool | None:
        if node.kind == "for((":
            start, condition, step = [*node.words[0].text.split(";"), "", ""][:3]
            self.arithmetic(start or "0", node.at)
            return self._loop(node.at, node.parts[0], lambda: self.arithmetic(condition or "1", node.at), step)
        name = node.words[0].text
        values = [each for word in node.words[2:] for each in self.words(word)]
        for value in values if len(node.words) > 1 else list(self.positional):
            self.variables[name] = value
            if self.uncounted([value]):
                self._unknown_loop(node.at, node.parts[0])
                continue
            if self._body(node.parts[0]) == "break":
                break
        return True

    def _while(self, node: Node, condition: list[Node], body: list[Node]) -> bool | None:
        def wanted() -> int | str:
            status = self._run(condition)
            return "" if status is None else int(status is (node.kind == "while"))

        return self._loop(node.at, body, wanted, "")

    def _loop(self, at: int, body: list[Node], wanted: Callable[[], int | str], step: str) -> bool | None:
        while True:
            going = wanted()
            if isinstance(going, str):
                self._unknown_loop(at, body)
                return None
            if not going or self._body(body) == "break":
                return True
            self.arithmetic(step or "0", at)

    def _unknown_loop(self, at: int, body: list[Node]) -> None:
        shell = self.fork()
        with contextlib.suppress(LeaveBash):
            shell._body(body)
        self._join([self.fork(), shell], at, f"the loop of line {self.source.line(at)} sets it, which only a job runs")

    def _body(self, body: list[Node]) -> str:
        try:
            self._run(body)
        except LeaveBash as left:
            if left.kind not in ("break", "continue"):
                raise
            return left.kind
        return ""

    def _case(self, node: Node) -> bool | None:
        value = self.without_unset(self.text(node.words[0]))
        if any(end.text[-1:] == "&" for end in node.words[1:]):
            raise UnreadableBash(node.at, "a clause of case that falls through is not read")
        if MARK.search(value):
            return self._cases(node, 0)
        for patterns, part in zip(node.patterns, node.parts, strict=True):
            found = [self.pattern(each) for each in patterns]
            if None in found:
                raise UnreadableBash(node.at, "a pattern of case is not known here")
            if any(matches(value, each or "") for each in found):
                return self._run(part)
        return True

    def _cases(self, node: Node, number: int) -> bool | None:
        if number < len(node.parts):
            part = node.parts[number]
            self._either(node.at, lambda one: one._run(part), lambda other: other._cases(node, number + 1))
        return None

    # simple commands

    def _command(self, node: Node) -> bool | None:
        number = 0
        while number < len(node.words) and ASSIGNMENT.match(node.words[number].text):
            number += 1
        assigned, rest = node.words[:number], node.words[number:]
        self.substituted = True
        if not rest:
            for word in assigned:
                self.assign(word)
            if not assigned and node.redirections:  # $(< file)
                self.say(self.input.text if self.input is not None else OUTPUT)
            return self.substituted
        if rest[0].text in DECLARE:
            return self._declare(rest)
        words = [each for word in rest for each in self.words(word, split=rest[0].text != "let")]
        if not words:
            return True
        before, exported = dict(self.variables), set(self.exported)
        for word in assigned:
            self.assign(word, exported=True)
        try:
            return self._named(words, node)
        finally:
            for word in assigned:
                name = word.text[: (ASSIGNMENT.match(word.text) or [""])[0].find("=")].rstrip("+")
                self.variables.pop(name, None)
                if name in before:
                    self.variables[name] = before[name]
            if assigned:
                self.exported = exported

    def _input(self, kind: str, word: Word) -> Input | None:
        if kind == "<<":
            if re.search(r'\$\{[^}]*"', word.text):
                raise UnreadableBash(word.at, "a quote in ${...} of a here-document is not read")
            quote = "\ue002"  # a quote is a letter there
            return Input(self.text(Word(word.at, '"' + word.text.replace('"', quote) + '"')).replace(quote, '"'))
        if kind == "<" and word.text.startswith("<("):
            found = self.substitute(word.text[2:-1], word.at)
            return None if MARK.search(found) else Input(found + "\n" if found else "")
        text = {"<<'": word.text, "<<<": f"{self.text(word)}\n"}.get(kind)
        text = self.readable(self.text(word), word.at) if kind == "<" else text
        return None if text is None else Input(text)

    def assign(self, word: Word, *, exported: bool = False) -> None:
        """Carry out `NAME=value`, `NAME+=value`, `NAME[index]=value` or `NAME=( ... )`."""
        match = ASSIGNMENT.match(word.text)
        assert match is not None
        name, index, appends = match[1], match[2], match[3] == "+="
        before = self.variables.get(name)
        self.assigned.add(name)
        if word.text.startswith("(", match.end()):
            new = self.array(word, match.end(), keyed=name in self.keyed)
            if appends and before is not None:
                old = dict(before) if isinstance(before, dict) else {"0": before}
                first = 0 if name in self.keyed else 1 + max(map(int, old), default=-1)
                new = old | (new if name in self.keyed else {str(first + int(key)): each for key, each in new.items()})
            self.variables[name] = new
        else:
            value = self.text(Word(word.at, word.text[match.end() :]))
            if name in self.integers:
                value, appends = str(self.arithmetic(f"{before or 0}+({value})" if appends else value, word.at)), False
            if index is None and isinstance(before, dict):
                index = "[0]"
            if index is not None:
                key = self.key(index[1:-1], word.at, keyed=name in self.keyed)
                array = dict(before) if isinstance(before, dict) else {} if before is None else {"0": before}
                self.variables[name] = array | {key: array.get(key, "") + value if appends else value}
            else:
                self.variables[name] = (before if appends and isinstance(before, str) else "") + value
        if exported or "a" in self.options:
            self.exported.add(name)

    def _declare(self, words: list[Word]) -> bool | None:
        command, letters = words[0].text, ""
        for word in words[1:]:
            if re.match(r"-\w+$", word.text):
                letters += word.text[1:]
                continue
            text, given = word.text, "" if ASSIGNMENT.match(word.text) else self.text(word)
            if "=" in given:  # export "$NAME=word"
                text = re.sub("=(.*)", lambda each: "=" + shlex.quote(each[1]), given, count=1, flags=re.S)
            match = ASSIGNMENT.match(text)
            name = match[1] if match is not None else given
            refused = set(letters) & set("nlucpfF") - ({"n", "f"} if command == "export" else set())
            if refused or not re.fullmatch(r"[A-Za-z_]\w*", name):
                raise UnreadableBash(word.at, f"{command} of this form is not read")
            if (command == "local" or (command in ("declare", "typeset") and "g" not in letters)) and self.locals:
                self.locals[-1].setdefault(name, self.variables.get(name))
                if match is None:
                    self.variables.pop(name, None)
            if "A" in letters:
                self.keyed.add(name)
                self.variables.setdefault(name, {})
            if "i" in letters:
                self.integers.add(name)
            if match is not None:
                self.assign(Word(word.at, text))
            if command == "export" and "n" in letters:
                self.exported.discard(name)
            elif command == "export" or "x" in letters:
                self.exported.add(name)
        return True

    def _named(self, words: list[str], node: Node) -> bool | None:
        name = self.without_unset(words[0])
        if name in self.functions:
            return self._call(name, words[1:])
        if name in ("break", "continue") and words[1:] not in ([], ["1"]):
            raise UnreadableBash(node.at, f"{' '.join(words)} is not read")
        if name in ("exit", "return", "break", "continue"):
            raise LeaveBash(name, node.at, None if len(words) < 2 else words[1] == "0")
        if name in (":", "true"):
            return True
        if name == "false":
            return False
        if name in ("[", "test"):
            inner = words[1:-1] if name == "[" else words[1:]
            return BashTest(self, [Word(node.at, each) for each in inner], node.at, expanded=True).answer()
        builtin = getattr(self, f"_do_{name}", None) if name not in (".",) else self._do_source
        if builtin is not None:
            status: bool | None = builtin(words[1:], node)
            return status
        if name in _INERT or _SETUP.fullmatch(name):
            target = self.found.setup if _SETUP.fullmatch(name) else self.found.ignored
            target.append((self.source.where(node.at), " ".join(words)))
            return True if target is self.found.setup or name == "trap" else None
        if name in ("alias", "select", "complete", "enable", "getopts"):
            raise UnreadableBash(node.at, f"{name} is not read")
        return self._program(words, node)

    def _call(self, name: str, words: list[str]) -> bool | None:
        if len(self.locals) > 100:
            raise UnreadableBash(0, f"{name} calls itself")
        source, body = self.functions[name]
        self.locals.append({})
        try:
            return self._until_return(words, source, [body])
        finally:
            for variable, value in self.locals.pop().items():
                self.variables.pop(variable, None)
                if value is not None:
                    self.variables[variable] = value  # type: ignore[assignment]

    # programs

    def _do_exec(self, words: list[str], node: Node) -> bool | None:
        if words:
            self._program(words, node)
            raise LeaveBash("exit", node.at, None)
        return True

    def _do_builtin(self, words: list[str], node: Node) -> bool | None:
        words = [word for word in words if not (word.startswith("-") and word in ("-p", "-v", "-V"))]
        return self._named(words, node) if words else True

    _do_command = _do_builtin

    def _program(self, words: list[str], node: Node) -> bool | None:
        """Note a program; follow a shell that it starts."""
        text = self._utility(words, node)
        self.say(OUTPUT if text is None else text)
        known = ((name, value) for name, value in self.variables.items() if isinstance(value, str))
        environment = {name: value for name, value in known if name in self.exported}
        where = self.source.where(node.at)
        number = next(
            (each for each, word in enumerate(words) if _SHELL.fullmatch(word) or PROGRAM.fullmatch(word)), -1
        )
        if _CLEARED.search(" ".join(words[: max(number, 0)])):
            raise UnreadableBash(node.at, "a program without the variables of its shell is not read")
        if number >= 0 and _SHELL.fullmatch(words[number]):
            inner = self._shell(words[number + 1 :], node)
            if inner is not None:
                before = len(self.found.launched)
                self._child(inner[0], inner[1], node, words[:number])
                if len(self.found.launched) > before or inner[2]:
                    return None
        if _EDITORS.match(" ".join(words)):
            self.files |= dict.fromkeys(map(os.path.normpath, words), OUTPUT)
        if any(re.fullmatch(r"(?:.*/)?(?:xargs|parallel)", word) for word in words):
            words = [*words, self.mark(node.at, "xargs adds words that only a job has")]
        started = Started(where, words, environment)
        target = self.found.others if started.program < 0 else self.found.launched
        target.append(started)
        if target is self.found.others and words[0] not in ("sbatch", "cp", "cat", "chmod", "rm"):
            ends = (".sh", ".sbatch", ".slurm")
            scripts = (each for each in words if os.path.normpath(each) in self.files or each.endswith(ends))
            script = next(scripts, None)
            if script is not None and (text := self.readable(script)) is not None:
                at = words.index(script)
                self._child(Source(script, text), words[at:], node, words[:at])
        return None

    def _shell(self, words: list[str], node: Node) -> tuple[Source, list[str], bool] | None:
        """The text that `bash WORDS` runs, and its parameters."""
        line = self.source.line(node.at)
        for number, word in enumerate(words):
            if re.fullmatch(r"-\w*c\w*", word) and number + 1 < len(words):
                return Source(self.source.name, words[number + 1], line), words[number + 2 :], True
            if not word.startswith("-"):
                return None
        return (Source(self.source.name, self.input.text, line), [], True) if self.input else None

    def _child(self, source: Source, positional: list[str], node: Node, prefix: list[str]) -> None:
        """Follow a text in a shell of its own, which has the exported variables alone."""
        shell = self.fork()
        own = {*shell.exported, "PWD"}
        given = {name: value for name, value in shell.variables.items() if name in own and isinstance(value, str)}
        for words in (word.removeprefix("--export=").split(",") for word in prefix):
            given |= {word.partition("=")[0]: word.partition("=")[2] for word in words if ASSIGNMENT.match(word)}
        shell.variables = {**DEFAULTS, **given}
        if words := positional[:1]:
            shell.variables["0"] = words[0]
        shell.positional, shell.output, shell.defaults = positional[1:], None, {}
        first = len(self.found.launched)
        with contextlib.suppress(LeaveBash):
            shell._inside(source)
        for number, each in enumerate(self.found.launched[first:], start=first):
            self.found.launched[number] = Started(each.where, [*prefix, *each.words], each.environment)

    def _utility(self, words: list[str], node: Node) -> str | None:
        """The output of a program that is known well enough."""
        plain = [self.without_unset(word) for word in words[1:]]
        if words[0] == "cat":
            texts = [self.readable(name, node.at) for name in plain] if plain else [self.input and self.input.text]
            return None if None in texts else "".join(map(str, texts))
        pure = words[0] in ("basename", "dirname", "expr") or (words[0] == "seq" and max(map(len, words)) < 7)
        return ask_bash('"$@"', words[0], *plain) if pure and not MARK.search("".join(plain)) else None

    def substitute(self, text: str, at: int) -> str:
        """The output of a command substitution: known for the shell's own commands, unknown for programs."""
        shell, shown = self.fork(), one_line(MARK.sub("...", text), 60)
        output = list[str]()
        shell.output, shell.found, self.substituted = output, Followed(launched=self.found.launched), None
        try:
            self.substituted = shell._inside(Source(self.source.name, text, self.source.line(at)))
        except LeaveBash as left:
            self.substituted = left.status
        except UnreadableBash:
            return self.mark(at, f"$({shown}) is not read")
        self.found.others += [each for each in shell.found.others if each.words[0] == "sbatch"]
        found = "".join(output)
        if OUTPUT in found:
            others = shell.found.others
            command = tuple(others[-1].words) if others else ()
            return self.mark(at, f"it is the output of $({shown}), which nobody runs here", command=command)
        return found.rstrip("\n")
