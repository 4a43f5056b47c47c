"""A checkout of Megatron-LM: its dialect, its version, its flags, and whether it takes the flags of a run.

Flags stand in `add_argument` of megatron/training/arguments.py and of the programs, and since 2025 also in the fields
of dataclasses that `ArgumentGroupFactory` turns into flags. `Checkout` reads both as text and runs nothing.

`ask_parser` runs the checkout's own parser in the Python of the ranks, which must import the checkout. If that is not
possible here (a login node, a container), the text of the checkout is compared instead, and gives warnings alone; the
job then ends with argparse's message, which ends the chain.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from relayrun.control.trainers.megatron_lm_log import MegatronDialect, megatron_dialect_of
from relayrun.errors import ConfigError, did_you_mean
from relayrun.files import readable_text
from relayrun.submit.megatron_lm.flags import Flag
from relayrun.submit.megatron_lm.programs import parse_flags

ARGUMENTS_FILE = Path("megatron", "training", "arguments.py")

_DECLARED = ("megatron/post_training/arguments.py", "megatron/inference/arguments.py")
"""Other files with arguments of training programs, if a checkout has them."""


@dataclass(frozen=True)
class Checkout:
    """A folder with Megatron-LM's training programs."""

    folder: Path

    @classmethod
    def open(cls, folder: str | Path) -> Checkout:
        """Raises ConfigError if there is none."""
        path = Path(folder)
        if not (path / ARGUMENTS_FILE).is_file():
            words = f"{path} is no checkout of Megatron-LM: it has no {ARGUMENTS_FILE}"
            hint = "set it, or MEGATRON_LM_DIR in the launcher, to a checkout of Megatron-LM"
            raise ConfigError(words, where="megatron_lm.dir", hint=hint)
        return cls(path)

    @cached_property
    def dialect(self) -> MegatronDialect:
        return megatron_dialect_of(self.folder)

    @cached_property
    def version(self) -> str:
        """The version for people: `swiss-ai, core 0.11.0rc0, commit 81d44dbe`."""
        return ", ".join(filter(None, (self.dialect.value, self._core, self._commit)))

    @cached_property
    def flags(self) -> frozenset[str]:
        """The flags that the text of the checkout names, without dashes."""
        files = [self.folder / ARGUMENTS_FILE, *(self.folder / name for name in _DECLARED)]
        files += self.folder.glob("pretrain_*.py")
        return frozenset(name for file in files for name in self.declared(file))

    def says(self, text: str) -> bool:
        """Return True if a text stands in the checkout's arguments or in the configs that they are made from."""
        files = [self.folder / ARGUMENTS_FILE, *(self.folder / "megatron" / "training").glob("*_config.py")]
        return any(text in readable_text(path) for path in files)

    @property
    def _core(self) -> str | None:
        text = readable_text(self.folder / "megatron" / "core" / "package_info.py")
        parts = dict(re.findall(r"^(MAJOR|MINOR|PATCH|PRE_RELEASE) *= *['\"]?([\w.]*)['\"]?$", text, re.M))
        if not {"MAJOR", "MINOR", "PATCH"} <= parts.keys():
            return None
        return f"core {parts['MAJOR']}.{parts['MINOR']}.{parts['PATCH']}{parts.get('PRE_RELEASE', '')}"

    @property
    def _commit(self) -> str | None:
        if not (self.folder / ".git").exists():
            return None
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            command = ["git", "-C", str(self.folder), "rev-parse", "--short=8", "HEAD"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
            return f"commit {done.stdout.strip()}"
        return None

    def declared(self, file: Path) -> Iterator[str]:
        """The flags that a file's calls of `add_argument` and `ArgumentGroupFactory` name."""
        for node in ast.walk(_parse_file(file)):
            if not isinstance(node, ast.Call):
                continue
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called == "add_argument":
                boolean = any("BooleanOptionalAction" in ast.unparse(each.value) for each in node.keywords)
                for text in _flags_among(node.args):
                    yield from (text, f"no-{text}") if boolean else (text,)
            elif called == "ArgumentGroupFactory" and node.args and isinstance(node.args[0], ast.Name):
                yield from self._fields(node.args[0].id, set())

    def _fields(self, name: str, seen: set[str]) -> Iterator[str]:
        """The flags that the fields of a dataclass of this name become, its base classes' too."""
        if name in seen:
            return
        seen.add(name)
        for node in self._classes.get(name, ()):
            for base in node.bases:
                if isinstance(base, ast.Name):
                    yield from self._fields(base.id, seen)
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    yield from _flags_of_field(field.target.id, field.value)

    @cached_property
    def _classes(self) -> dict[str, list[ast.ClassDef]]:
        """The dataclasses of the checkout's configs by name."""
        found: dict[str, list[ast.ClassDef]] = {}
        for path in sorted((self.folder / "megatron").rglob("*config.py")):
            for node in _parse_file(path).body:
                if isinstance(node, ast.ClassDef):
                    found.setdefault(node.name, []).append(node)
        return found


def _flags_of_field(name: str, value: ast.expr | None) -> Iterator[str]:
    """The flags of one field: those that its metadata name, or its own name with dashes."""
    plain = name.replace("_", "-")
    named = [
        text
        for node in ([] if value is None else ast.walk(value))
        if isinstance(node, ast.Dict)
        for key, item in zip(node.keys, node.values, strict=True)
        if isinstance(key, ast.Constant) and key.value == "arg_names" and isinstance(item, ast.List)
        for text in _flags_among(item.elts)
    ]
    if named:
        yield from named
    elif isinstance(value, ast.Constant) and value.value is True:
        yield from (f"no-{plain}", f"disable-{plain}")
    else:
        yield plain


def _flags_among(nodes: list[ast.expr]) -> list[str]:
    """The flags among constants, without dashes."""
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [text.removeprefix("--") for text in texts if text.startswith("--")]


def _parse_file(path: Path) -> ast.Module:
    """A file's syntax; empty if it cannot be read, or is not Python of this version."""
    with contextlib.suppress(SyntaxError, ValueError):
        return ast.parse(readable_text(path))
    return ast.Module(body=[], type_ignores=[])


PARSER_SECONDS = 180.0
"""For which the checkout's parser may take: on a cold file system torch alone takes a minute."""


class _ParserUnavailable(Exception):
    """The checkout's parser cannot be asked; the text says why."""


@dataclass(frozen=True, kw_only=True)
class FlagRefusal:
    """A flag that a checkout does not take."""

    words: str
    """The fault, with the checkout's version."""
    source: str
    """Origin of the flag, as in `Flag`."""
    hint: str


@dataclass(frozen=True, kw_only=True)
class ParserAnswer:
    """The refused flags of a run, and who refuses them."""

    refusals: list[FlagRefusal]
    certain: bool
    """True: the checkout's own parser refuses them. False: its text lacks them, which may miss a flag."""
    unavailable: str | None = None
    """The reason if the parser could not be asked."""
    unjudged: str | None = None
    """The reason if the validation of the flags together could not be asked."""
    lacking: Sequence[str] = ()
    """Settings of fused kernels that this machine lacks, without which it was asked."""


def ask_parser(
    checkout: Checkout,
    flags: Sequence[Flag],
    *,
    python: str,
    in_container: bool,
    program: str,
    environment: Mapping[str, str],
) -> ParserAnswer:
    """Ask the checkout. `python`: of the ranks. `program`: whose own arguments count too, by its text. `environment`:
    variables of a rank, its WORLD_SIZE included."""
    try:
        if in_container:
            raise _ParserUnavailable("the ranks' Python lies in a container")
        answer = _run_parser(checkout, flags, python, environment)
        own = frozenset(checkout.declared(checkout.folder / program))
        refusals, unjudged = _refused_flags(checkout, flags, answer, own), answer.get("unjudged", [None])[0]
        return ParserAnswer(refusals=refusals, certain=True, unjudged=unjudged, lacking=answer.get("lacking", ()))
    except _ParserUnavailable as error:
        unknown = {"unknown": [flag.words[0] for flag in flags if flag.name not in checkout.flags], "errors": []}
        return ParserAnswer(
            refusals=_refused_flags(checkout, flags, unknown | {"flags": sorted(checkout.flags)}, frozenset()),
            certain=False,
            unavailable=str(error),
        )


def _run_parser(
    checkout: Checkout, flags: Iterable[Flag], python: str, variables: Mapping[str, str]
) -> dict[str, list[str]]:
    """The answer of the checkout's parser. Raises _Unavailable."""
    path = [str(checkout.folder), *filter(None, os.environ.get("PYTHONPATH", "").split(":"))]
    environment = {
        **os.environ,
        **variables,
        "PYTHONPATH": ":".join(path),
        "PYTHONDONTWRITEBYTECODE": "1",  # somebody else's checkout
        "CUDA_VISIBLE_DEVICES": "",
        "TORCHDYNAMO_DISABLE": "1",
    }
    environment.pop("PYTHONSAFEPATH", None)
    words = json.dumps({"words": [word for flag in flags for word in flag.words]})
    try:
        done = subprocess.run(
            [python, parse_flags.__file__],
            input=words,
            env=environment,
            cwd=checkout.folder,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PARSER_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _ParserUnavailable(f"it took more than {PARSER_SECONDS:.0f} s") from None
    except OSError as error:
        raise _ParserUnavailable(f"{python}: {error.strerror}") from None
    _, mark, answer = done.stdout.rpartition(parse_flags.ANSWER_MARK + "\n")
    found: dict[str, Any] = {}
    with contextlib.suppress(ValueError):
        found = json.loads(answer) if mark else {}
    if not found or "unavailable" in found:
        said = found.get("unavailable") or (done.stderr.strip().splitlines() or [""])[-1].strip()
        raise _ParserUnavailable(said or f"exit code {done.returncode}")
    return found


def _refused_flags(
    checkout: Checkout, flags: Sequence[Flag], answer: dict[str, list[str]], own: frozenset[str]
) -> list[FlagRefusal]:
    source = {f"--{flag.name}": flag.source for flag in flags}
    known = [f"--{name}" for name in answer["flags"]] + [f"--{name}" for name in own]
    found = []

    def refuse(words: str, name: str, hint: str) -> None:
        words, origin = f"this checkout ({checkout.version}) {words}", source.get(name, "the command")
        found.append(FlagRefusal(words=words, source=origin, hint=hint))

    for name in (word.partition("=")[0] for word in answer["unknown"]):
        if name not in known:
            near = did_you_mean(name, known, most=1)
            refuse(f"has no flag {name}{'; ' + near if near else ''}", name, "correct it, or leave it out")
    for message in answer["errors"]:
        name = next((name for name in source if name in message.replace("/", " ").replace(":", " ").split()), "")
        refuse(f"says: {message}", name, "correct the value")
    for message in answer.get("invalid", []):
        names = re.findall(r"--[\w-]+|\b[a-z]\w*_\w+", message)
        named = ["--" + word.removeprefix("--").removeprefix("args.").replace("_", "-") for word in names]
        name = next((name for name in named if name in source), "")
        refuse(f"refuses these flags together: {message}", name, "change one of them; the ranks would end with this")
    return found
