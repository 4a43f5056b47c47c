"""Whether a checkout takes its flags: its own parser says so where it can be imported, else its text warns.

The parser runs in the ranks' Python, which must import the checkout: torch, and what else its modules want. On a login
node that is often not there, or it lies in a container. Then the job says it: argparse ends every rank with its
message, which ends the chain (`trainers.megatron_lm.program`).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relayrun.errors import did_you_mean
from relayrun.submit.megatron_lm.checkout import Checkout
from relayrun.submit.megatron_lm.flags import Flag
from relayrun.submit.megatron_lm.programs import parse_flags

PARSER_SECONDS = 180.0
"""For which the checkout's parser may take: on a cold file system torch alone takes a minute."""


class _ParserUnavailable(Exception):
    """Why the checkout's parser cannot be asked."""


@dataclass(frozen=True, kw_only=True)
class FlagRefusal:
    """A flag that a checkout does not take."""

    words: str
    """What is wrong, with the checkout's version."""
    source: str
    """What asked for the flag."""
    hint: str


@dataclass(frozen=True, kw_only=True)
class ParserAnswer:
    """What is known of the flags of a run."""

    refusals: list[FlagRefusal]
    certain: bool
    """Whether the checkout's own parser says so; else its text does, which may miss a flag."""
    unavailable: str | None = None
    """Why the parser could not be asked; None where it was."""


def ask_parser(
    checkout: Checkout, flags: Sequence[Flag], *, python: str, in_container: bool, program: str
) -> ParserAnswer:
    """Ask the checkout. `python`: of the ranks. `program`: whose own arguments count too, by its text."""
    try:
        if in_container:
            raise _ParserUnavailable("the ranks' Python lies in a container")
        answer = _run_parser(checkout, flags, python)
        own = checkout.declared_in(checkout.folder / program)
        return ParserAnswer(refusals=_refused_flags(checkout, flags, answer, own), certain=True)
    except _ParserUnavailable as error:
        why = str(error)
    unknown = {"unknown": [flag.words[0] for flag in flags if flag.name not in checkout.flags], "errors": []}
    return ParserAnswer(
        refusals=_refused_flags(checkout, flags, unknown | {"flags": sorted(checkout.flags)}, frozenset()),
        certain=False,
        unavailable=why,
    )


def _run_parser(checkout: Checkout, flags: Iterable[Flag], python: str) -> dict[str, list[str]]:
    """The answer of the checkout's parser. Raises _Unavailable."""
    path = [str(checkout.folder), *filter(None, os.environ.get("PYTHONPATH", "").split(":"))]
    environment = {
        **os.environ,
        "PYTHONPATH": ":".join(path),
        "PYTHONDONTWRITEBYTECODE": "1",  # somebody else's checkout
        "CUDA_VISIBLE_DEVICES": "",
        "TORCHDYNAMO_DISABLE": "1",
    }
    environment.pop("PYTHONSAFEPATH", None)
    program = Path(parse_flags.__file__)
    words = json.dumps({"words": [word for flag in flags for word in flag.words]})
    try:
        done = subprocess.run(
            [python, str(program)],
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
        said = found.get("unavailable") or _last_line(done.stderr)
        raise _ParserUnavailable(said or f"exit code {done.returncode}")
    return found


def _refused_flags(
    checkout: Checkout, flags: Sequence[Flag], answer: dict[str, list[str]], own: frozenset[str]
) -> list[FlagRefusal]:
    source = {f"--{flag.name}": flag.source for flag in flags}
    known = [f"--{name}" for name in answer["flags"]] + [f"--{name}" for name in own]
    found = []
    for word in answer["unknown"]:
        name = word.partition("=")[0]
        if name in known:
            continue
        near = did_you_mean(name, known, most=1)
        found.append(
            FlagRefusal(
                words=f"this checkout ({checkout.version}) has no flag {name}{'; ' + near if near else ''}",
                source=source.get(name, "the command"),
                hint="correct it, or leave it out",
            )
        )
    for message in answer["errors"]:
        name = next((name for name in source if name in message.replace("/", " ").replace(":", " ").split()), "")
        found.append(
            FlagRefusal(
                words=f"this checkout ({checkout.version}) says: {message}",
                source=source.get(name, "the command"),
                hint="correct the value",
            )
        )
    return found


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
