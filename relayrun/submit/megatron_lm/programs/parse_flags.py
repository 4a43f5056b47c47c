"""Give flags to the parser of a checkout of Megatron-LM, and print what it says as JSON. Started as a file.

Standard input is `{"words": [...]}`. The parser is taken at the moment at which the checkout is about to use it. If it
takes all flags, the checkout's own validation follows, as rank 0 of WORLD_SIZE: no process group, no GPU. Printed is
`{"flags": [...], "unknown": [...], "errors": [...]}`, with `"invalid"`, `"unjudged"` or `"lacking"`, behind a line
`ANSWER_MARK`, or `{"unavailable": "why"}` if the checkout cannot be imported.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import traceback
from typing import Any, NoReturn

ANSWER_MARK = "relayrun: flags"


NOT_HERE = re.compile(
    r"NVIDIA driver|No CUDA GPUs|not compiled with CUDA|invalid device|please install|not installed", re.I
)
"""Errors of a machine without a GPU, or without packages of the ranks, which say nothing of the flags."""
FUSION = re.compile(r"\w+_fusion\b")
"""A setting of a fused kernel, whose package a login node may lack: the other rules are asked without it."""


class ParserTaken(BaseException):
    """The parser, at the moment of its use. No program catches this."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


class FlagRefused(Exception):
    """A parser's error message for a flag."""


def main() -> None:
    """Read the words of a command from standard input, and say what the parser makes of them, as JSON."""
    words = json.load(sys.stdin)["words"]
    standard_output = os.dup(1)
    os.dup2(2, 1)  # what is printed at import
    try:
        found = parse_flags_one_by_one(take_parser(), words)
        if not found["unknown"] and not found["errors"]:
            found |= validate_flags(words)
    except Exception as error:
        found = {"unavailable": f"{type(error).__name__}: {error}".splitlines()[0]}
    with os.fdopen(standard_output, "w") as output:
        output.write(f"{ANSWER_MARK}\n{json.dumps(found)}\n")


def take_parser() -> argparse.ArgumentParser:
    """The parser of the checkout on the path. Raises what its import raises."""
    parse_args, parse_known_args = argparse.ArgumentParser.parse_args, argparse.ArgumentParser.parse_known_args

    def take(self: argparse.ArgumentParser, *_: Any, **__: Any) -> NoReturn:
        raise ParserTaken(self)

    from megatron.training.arguments import parse_args as parse_arguments

    sys.argv = ["pretrain.py"]
    argparse.ArgumentParser.parse_args = argparse.ArgumentParser.parse_known_args = take  # type: ignore[method-assign]
    try:
        parse_arguments()
    except ParserTaken as error:
        return error.parser
    finally:
        argparse.ArgumentParser.parse_args = parse_args  # type: ignore[method-assign]
        argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[method-assign]
    raise RuntimeError("megatron.training.arguments.parse_args uses no argparse")


def parse_flags_one_by_one(parser: argparse.ArgumentParser, words: list[str]) -> dict[str, Any]:
    """Give the parser each flag with its values alone: the first word that it refuses does not hide the others."""
    flags = sorted({name.removeprefix("--") for name in parser._option_string_actions if name.startswith("--")})

    def error(message: str) -> NoReturn:
        raise FlagRefused(message)

    parser.error = error  # type: ignore[method-assign]
    for action in parser._actions:
        action.required = False
    unknown: list[str] = []
    errors: list[str] = []
    for group in group_words(words):
        try:
            _, rest = parser.parse_known_args(group)
        except (FlagRefused, SystemExit) as refused:
            errors.append(str(refused))
        except Exception as failed:
            errors.append(f"{group[0]}: {type(failed).__name__}: {failed}")
        else:
            unknown += [rest[0]] if rest else []
    return {"flags": flags, "unknown": unknown, "errors": errors}


def validate_flags(words: list[str]) -> dict[str, list[str]]:
    """What the checkout's `validate_args` and configuration of the model say: `invalid`, or `unjudged` if this machine
    lacks what they need. If they take the flags, `lacking` has the fused kernels that this machine lacks."""
    from megatron.training import arguments

    if not hasattr(arguments, "validate_args"):
        return {"unjudged": ["it has no validate_args"]}
    sys.argv = ["pretrain.py", *words]
    lacking: list[str] = []
    while True:
        args = argparse.Namespace()
        try:
            args = arguments.parse_args()
            vars(args).update(dict.fromkeys(lacking, False))
            args = arguments.validate_args(args, {}) or args
            arguments.core_transformer_config_from_args(args)
        except (Exception, SystemExit) as error:
            line = traceback.extract_tb(error.__traceback__)[-1]
            said = " ".join(str(error).split()) or str(line.line)
            elsewhere = isinstance(error, ImportError) or NOT_HERE.search(said) is not None
            fusions = [name for name in FUSION.findall(said) if getattr(args, name, False) and name not in lacking]
            if elsewhere and fusions:
                lacking += fusions
                continue
            kind = "unjudged" if elsewhere else "invalid"
            return {kind: [f"{type(error).__name__}: {said} ({os.path.basename(line.filename)}:{line.lineno})"]}
        return {"lacking": lacking}


def group_words(words: list[str]) -> list[list[str]]:
    """Each flag with the words behind it."""
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not groups:
            groups.append([])
        groups[-1].append(word)
    return groups


if __name__ == "__main__":
    main()
