"""The flags in the Bash arrays of a launcher: taken out as text, looked at, and expanded by Bash. Nothing else runs.

    NETWORK_SIZE_ARGS=(
      --num-layers 32                      # comments and quotes are as in Bash
      --max-position-embeddings $SEQ_LEN   # a variable of the settings block
    )

An array may hold words, quotes and variables that are known (`variables`), with `${NAME:-default}`, and arithmetic of
numbers. Whatever could run something or change something is refused with its line before Bash sees any of it. Bash then
gets the arrays alone, in an empty environment with those variables, restricted, and without any program to call.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from relayrun.errors import ConfigError, did_you_mean
from relayrun.submit.megatron_lm import flags
from relayrun.submit.megatron_lm.bash_parser import (
    METACHARACTERS,
    BashArray,
    BashAssignment,
    BashText,
    UnreadableBash,
    end_of_line,
    find_arrays,
    find_assignments,
    line_number,
)
from relayrun.submit.megatron_lm.flags import Flag

MAX_SCRIPT_BYTES = 1 << 20
"""Bytes of a script; no launcher comes near."""

BASH_SECONDS = 20.0
"""For which Bash may expand; `{1..1000000000}` would take all memory."""

PER_JOB_VARIABLES = frozenset(
    {"SLURM_JOB_ID", "SLURM_JOBID", "DEBUG_DIR", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_NODELIST"}
)
"""Variables of launchers that have a value in a job alone."""

_BUILTINS = "kill eval source . command builtin exec trap read mapfile readarray cd pushd popd enable"
"""Builtins that the arrays could not call anyway."""

_BASH_VARIABLES = re.compile(r"BASH.*|LD_.*|ENV|SHELLOPTS|PS4|IFS|PATH")
"""Variables that Bash, or the loader, obeys: no value of theirs goes into its environment."""

_NAME = re.compile(r"\$([A-Za-z_]\w*)")
_BRACED = re.compile(r"\$\{([A-Za-z_]\w*)(?:\[[@*]\])?(\}|:?[-+])")
_NUMBERS = re.compile(r"[\w\s()+*/%-]*")


def flags_in_arrays(path: Path, variables: Mapping[str, str], hints: Mapping[str, str]) -> list[Flag]:
    """The flags of all arrays NAME_ARGS of the script at `path`, in its order.

    `variables`: the only ones that the arrays may name. `hints`: what gives a variable its value, by its name.
    Raises ConfigError, which names the line.
    """
    text = _read(path)
    try:
        found = find_arrays(text)
        for array in found:
            _ArrayBody(text, array, variables, hints, {each.name for each in found}).check()
    except UnreadableBash as error:
        where = f"{path}:{line_number(text, error.at)}"
        raise ConfigError(error.words, where=where, hint="`megatron_lm.args` takes any flag verbatim") from None
    _refuse_no_bash(path, text)  # behind what is said better here
    if not found:
        raise ConfigError(
            "this file has no array of flags", where=path, hint="write NAME_ARGS=( --flag value ... ), as launchers do"
        )
    names = list(dict.fromkeys(array.name for array in found))
    words = _expanded(path, found, names, variables)
    lines = {name: f"{path}:{line_number(text, array.at)}" for array in reversed(found) for name in [array.name]}
    return [
        each
        for name in names
        for each in flags.flags_from_words(
            [(word, f"{name} in {lines[name]}") for word in words[name]], where=lines[name]
        )
    ]


def assigned_values(
    path: Path, variables: Mapping[str, str]
) -> tuple[list[tuple[BashAssignment, str | None]], set[str]]:
    """The assignments of the script at `path` with their values, in its order, and the names that it exports.

    `variables`: those that are set when the script begins. None: the value is computed, by something that would have to
    run, or from such a value. Raises ConfigError or Unreadable as `flags_in_arrays` does.
    """
    text = _read(path)
    found, exported = find_assignments(text)
    known = {name: value for name, value in variables.items() if not _BASH_VARIABLES.fullmatch(name)}
    values: list[tuple[BashAssignment, str | None]] = []
    for each in found:
        before = f'"${{{each.name}:-}}"' if each.appends else ""
        array = BashArray("VALUE", "=", before + each.word, 0)
        value: str | None = None
        with contextlib.suppress(UnreadableBash, ConfigError, ValueError, IndexError):
            _ArrayBody(array.body, array, known, {}, set()).check()
            value = " ".join(_expanded(path, [array], ["VALUE"], known)["VALUE"])
        if not each.inside:
            known.pop(each.name, None)
            known |= {} if value is None or _BASH_VARIABLES.fullmatch(each.name) else {each.name: value}
        values.append((each, value))
    return values, exported


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_SCRIPT_BYTES:
            raise ConfigError("too large for a launcher", where=path, hint="name the Bash file that holds the arrays")
        raw = path.read_bytes()
        text = raw.decode()
    except OSError as error:
        raise ConfigError(
            f"cannot be read: {error.strerror}", where=f"megatron_lm.args_file {path}", hint="name a file that exists"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError("is no text in UTF-8", where=path, hint="name the Bash file that holds the arrays") from None
    for control, what in (("\0", "a NUL byte"), ("\r", "a carriage return, as Windows ends lines")):
        if control in text:
            line = line_number(text, text.index(control))
            raise ConfigError(f"holds {what}", where=f"{path}:{line}", hint="dos2unix takes carriage returns away")
    return text


def _refuse_no_bash(path: Path, text: str) -> None:
    """Raise ConfigError if Bash itself finds an error in the script; it reads it, and runs nothing (-n)."""
    command = [_bash(path), "--noprofile", "--norc", "-n"]
    done = subprocess.run(command, input=text.encode(), env={}, capture_output=True, timeout=BASH_SECONDS, check=False)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()[0]
        found = re.fullmatch(r".*?: line (\d+): (.*)", said)
        where, message = (f"{path}:{found[1]}", found[2]) if found is not None else (str(path), said)
        raise ConfigError(f"this is no Bash: {message}", where=where, hint="mend it, or use megatron_lm.args")


def _bash(path: Path) -> str:
    bash = shutil.which("bash")
    if bash is None:
        raise ConfigError("there is no bash to expand the arrays", where=path, hint="use megatron_lm.args")
    return bash


class _ArrayBody(BashText):
    """The text between the parentheses of an array."""

    def __init__(
        self, text: str, array: BashArray, variables: Mapping[str, str], hints: Mapping[str, str], names: set[str]
    ) -> None:
        super().__init__(text)
        self._array = array
        self._variables = variables
        self._hints = hints
        self._names = names

    def check(self) -> None:
        """Raise UnreadableBash for all but words, quotes and known variables."""
        at, end = self._array.at, self._array.at + len(self._array.body)
        in_word = False
        while at < end:
            char = self.text[at]
            if char in " \t\n":
                at, in_word = at + 1, False
            elif char == "#" and not in_word:
                at = end_of_line(self.text, at)
            elif char in METACHARACTERS and not self.text.startswith(("<(", ">("), at):
                self._refuse(at, f"an unquoted {char!r}")
            elif char == "[" and not in_word:
                self._refuse(at, "an unquoted '[', which may begin an index that Bash evaluates,")
            else:
                at, in_word = self.token(at), True
        if at != end:
            raise UnreadableBash(at, "a quote or an expansion goes on behind the end of the array")

    def token(self, at: int, *, in_quotes: bool = False) -> int:
        """As in `BashText`. Raises UnreadableBash for everything that could run or change something."""
        if self.text[at] == "`":
            self._refuse(at, "a command substitution")
        if not in_quotes and self.text.startswith(("<(", ">("), at):
            self._refuse(at, "a process substitution")
        return self._dollar(at, quoted=in_quotes) if self.text[at] == "$" else super().token(at, in_quotes=in_quotes)

    def _dollar(self, at: int, *, quoted: bool) -> int:
        text = self.text
        if text.startswith("$((", at):
            return self._arithmetic(at)
        if text.startswith("$(", at):
            self._refuse(at, "a command substitution")
        if text.startswith("$[", at):
            self._refuse(at, "arithmetic in brackets")
        if (braced := _BRACED.match(text, at)) is not None:
            return self._braced(at, braced, quoted=quoted)
        if text.startswith("${", at):
            self._refuse(at, "an expansion that is none of ${NAME}, ${NAME[@]}, ${NAME:-default} and ${NAME:+other}")
        if (plain := _NAME.match(text, at)) is not None:
            self._require_known(at, plain[1])
            return plain.end()
        if text.startswith('$"', at) and not quoted:
            self._refuse(at, "a text to be translated")
        if re.match(r"\$[\d@*#?$!_-]", text[at : at + 2]):
            self._refuse(at, f"{text[at : at + 2]}, which only a running script has,")
        return super().token(at, in_quotes=quoted)

    def _braced(self, at: int, match: re.Match[str], *, quoted: bool) -> int:
        if match[2] == "}":
            self._require_known(at, match[1])
            return match.end()
        at = match.end()  # the words behind :- are looked at whether they are needed or not
        while self.text[at] != "}":
            if quoted and self.text[at] in "'\"":  # versions of Bash differ in what that means
                self._refuse(at, "a quote inside of a quoted ${...}")
            at = self.token(at, in_quotes=quoted)
        return at + 1

    def _arithmetic(self, at: int) -> int:
        """Numbers and variables that are numbers: a name's value would be evaluated, whatever it holds."""
        end = BashText(self.text).parentheses(at + 1)
        inner = self.text[at + 3 : end - 2]
        if not self.text[:end].endswith("))") or not _NUMBERS.fullmatch(inner) or re.search(r"\+\+|--", inner):
            self._refuse(at, "arithmetic other than + - * / % of numbers and variables")
        for name in re.findall(r"[A-Za-z_]\w*", inner):
            self._require_known(at, name)
            if name in self._names or not re.fullmatch(r"\d+", self._variables.get(name, "")):
                self._refuse(at, f"arithmetic with {name}, which is no number,")
        return end

    def _require_known(self, at: int, name: str) -> None:
        if name in self._variables or name in self._names:
            return
        if name in PER_JOB_VARIABLES:
            raise UnreadableBash(at, f"${name} has a value in a job alone; the chain gives what depends on it itself")
        if name in self._hints:
            raise UnreadableBash(at, f"${name} has no value: set {self._hints[name]}, or write the value itself")
        near = did_you_mean(name, self._variables) if self._variables else ""
        raise UnreadableBash(
            at,
            f"${name} is no variable of the settings block{'; ' + near if near else ''}; no other line of this file "
            "runs, so write the value itself",
        )

    def _refuse(self, at: int, what: str) -> NoReturn:
        line = self.text[self.text.rfind("\n", 0, at) + 1 : end_of_line(self.text, at)].strip()
        raise UnreadableBash(at, f"{what} must not stand in an array of flags: {line}")


def _expanded(
    path: Path, found: list[BashArray], names: list[str], variables: Mapping[str, str]
) -> dict[str, list[str]]:
    """The words of each array, by Bash. Raises ConfigError if that fails."""
    lines = ["set -f -u", f"enable -n {_BUILTINS}"]  # -f: no patterns, since nobody knows in which folder
    lines += [f"{array.name}{array.operator}({array.body}\n)" for array in found]
    lines += [f'printf \'%s\\0\' "${{#{name}[@]}}" "${{{name}[@]}}"' for name in names]
    # restricted: no output to files, no program by its path, and none is on this PATH
    command = [_bash(path), "--noprofile", "--norc", "-r"]
    environment = {**variables, "PATH": "/nonexistent", "LC_ALL": "C.UTF-8"}
    try:
        done = subprocess.run(
            command,
            input="\n".join(lines).encode() + b"\n",
            env=environment,
            capture_output=True,
            timeout=BASH_SECONDS,
            check=False,
            cwd="/",
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"the arrays were not expanded within {BASH_SECONDS:.0f} s", where=path, hint="write their words out"
        ) from None
    if done.returncode or done.stderr:
        said = re.sub(r"^bash: (line \d+: )?", "", done.stderr.decode(errors="replace").strip()).splitlines()
        words = f"bash cannot expand the arrays: {said[0] if said else f'exit code {done.returncode}'}"
        raise ConfigError(words, where=path, hint="`bash -n FILE` says where a script is no Bash")
    rest = iter(done.stdout.decode(errors="replace").split("\0"))
    return {name: [next(rest) for _ in range(int(next(rest)))] for name in names}
