"""How documents are tokenized: every option with its meaning, its unit and its default, which stands nowhere else.

YAML and environment variables (`job_config`), the flags of commands (below) and the keywords of the datatrove step all
end in a `TokenizeOptions`.
"""

from __future__ import annotations

import argparse
import functools
import logging
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from relayrun.config.sections.base import OutputPath, Positive, Section
from relayrun.errors import InputError

log = logging.getLogger(__name__)

AppendEod = Literal["yes", "no", "auto"]
EngineName = Literal["auto", "huggingface", "gigatoken", "nanotoken", "splintr", "bytes"]
OnError = Literal["fail", "skip-file", "skip-line"]

FORMER_VALUES = {"on_error": {"stop": "fail", "skip": "skip-file"}, "engine": {"fastokens": "auto"}}
"""Values of earlier versions by setting, and what they are now."""


def _yes_or_no(value: object) -> object:
    return ("yes" if value else "no") if isinstance(value, bool) else value


@functools.cache
def _current_value(setting: str, former: str) -> str:
    """What a former value of a setting is now, with a warning."""
    log.warning("%s: %r is %r now", setting, former, FORMER_VALUES[setting][former])
    return FORMER_VALUES[setting][former]


def _current_on_error(value: object) -> object:
    return _current_value("on_error", value) if isinstance(value, str) and value in FORMER_VALUES["on_error"] else value


def _current_engine(value: object) -> object:
    return _current_value("engine", value) if isinstance(value, str) and value in FORMER_VALUES["engine"] else value


def _nonzero_workers(workers: int) -> int:
    if workers == 0:
        raise ValueError("at least 1, or -1 for as many as tasks")
    return workers


class TokenizeOptions(Section):
    """How documents become shards: which tokenizer, what stands around a document, and how the work is split.

    What stands above `workers` changes the shards; the rest changes speed, memory and what becomes of bad files.
    """

    tokenizer: str
    """A tokenizer.json, a folder that holds one, or a name on the Hugging Face hub."""
    column: str = "text"
    """The column of the text; a name with dots is a nested field."""
    tasks: Positive = 20
    """The number of shards of a dump (of a paths file), at most one per file."""
    eos_token: str | None = None
    """The token that ends every document; None: the tokenizer's own."""
    append_eod: Annotated[AppendEod, BeforeValidator(_yes_or_no)] = "yes"
    """Whether every document ends with the EOS. yes: a tokenizer without one is an error; auto: it is a warning, and no
    token ends a document; no: none does. True and False are yes and no."""
    bos: bool = False
    """Every document begins with the tokenizer's BOS."""
    special_text: bool = False
    """Text of a special token in a document becomes that token; else it stays text."""
    keep_empty: bool = False
    """Documents without text are kept, as documents without tokens; else they are dropped and counted."""
    workers: Annotated[int, Field(ge=-1), AfterValidator(_nonzero_workers)] = -1
    """Shards that are made at a time on a node; -1: as many as tasks."""
    engine: Annotated[EngineName, BeforeValidator(_current_engine)] = "auto"
    """The library that encodes; auto: the fastest that gives Hugging Face's ids."""
    batch_documents: Positive = 10_000
    """Documents that a worker tokenizes at a time, at most. A batch costs 0.15 ms: as much as 20 kB of text."""
    batch_bytes: Positive = 4_000_000
    """Bytes of UTF-8 that a worker tokenizes at a time, at most; a longer document is alone, in pieces. See `relayrun
    dumps tune`."""
    on_error: Annotated[OnError, BeforeValidator(_current_on_error)] = "fail"
    """What becomes of what cannot be read. fail: an error, once the other shards are done. skip-file: the whole file is
    left out and noted. skip-line: a line or row without a text in UTF-8 is left out and counted, and a file that cannot
    be read at all is left out."""
    cache_dir: OutputPath | None = None
    """The folder that tokenizers of the Hugging Face hub are kept in; None: the hub's own."""

    @property
    def skips_lines(self) -> bool:
        """Whether a bad line is left out."""
        return self.on_error == "skip-line"

    @property
    def skips_files(self) -> bool:
        """Whether a bad file is left out."""
        return self.on_error not in ("fail", "stop")  # a job of an earlier version has its word in a pickle

    @classmethod
    def default(cls, name: str) -> Any:
        """The default of the field `name`."""
        return cls.model_fields[name].default


def validate_options(values: Mapping[str, Any], names: Mapping[str, str]) -> TokenizeOptions:
    """The options with these values by field. Raises InputError with the name that the user knows a wrong one by."""
    try:
        return TokenizeOptions(**values)
    except ValidationError as error:
        detail = error.errors()[0]
        name = names[str(detail["loc"][0])]
        least = detail.get("ctx", {}).get("gt")
        message = f"is at least {least + 1}" if least is not None else detail["msg"].removeprefix("Value error, ")
        raise InputError(f"{name} {message}, not {detail['input']!r}", hint="--help tells what it takes") from None


OPTION_FLAGS = {name: f"--{name.replace('_', '-')}" for name in TokenizeOptions.model_fields} | {
    "tokenizer": "--tokenizer-name-or-path",
    "tasks": "--n-tasks",
    "workers": "--n-workers",
}
"""Every field with its option."""


def add_tokenize_flags(parser: argparse.ArgumentParser) -> None:
    """Give `parser` an option for every field, with the names of NeMo Curator too. Defaults are those of the fields."""
    parser.add_argument(
        OPTION_FLAGS["tokenizer"],
        "--model-identifier",
        dest="tokenizer",
        required=True,
        metavar="T",
        help="a tokenizer.json, a folder that holds one, or a hub name",
    )
    parser.add_argument(
        OPTION_FLAGS["tasks"],
        dest="tasks",
        type=int,
        metavar="N",
        help="number of shards, at most one per file (default: %(default)s, as in a config)",
    )
    parser.add_argument(
        OPTION_FLAGS["workers"],
        dest="workers",
        type=int,
        metavar="N",
        help="shards made at a time; -1: as many as tasks (default: %(default)s)",
    )
    parser.add_argument(OPTION_FLAGS["column"], "--text-field", help="column of the text (default: %(default)s)")
    parser.add_argument(
        OPTION_FLAGS["eos_token"], metavar="TOKEN", help="ends every document (default: the tokenizer's own)"
    )
    parser.add_argument(
        OPTION_FLAGS["append_eod"],
        nargs="?",
        choices=typing.get_args(AppendEod),
        const="yes",
        help="auto: warn and go on where the tokenizer has no EOS (default: %(default)s)",
    )
    parser.add_argument(
        OPTION_FLAGS["bos"], action="store_true", help="put the tokenizer's BOS in front of every document"
    )
    parser.add_argument(
        OPTION_FLAGS["special_text"],
        action="store_true",
        help="text of a special token in a document becomes that token",
    )
    parser.add_argument(
        OPTION_FLAGS["keep_empty"], action="store_true", help="keep documents without text, as Megatron-LM does"
    )
    parser.add_argument(
        OPTION_FLAGS["engine"],
        choices=(*typing.get_args(EngineName), *FORMER_VALUES["engine"]),
        metavar=f"{{{','.join(typing.get_args(EngineName))}}}",
        help="auto: the fastest that gives Hugging Face's ids (default: %(default)s)",
    )
    parser.add_argument(
        OPTION_FLAGS["batch_documents"],
        "--tokenization-batch-size",
        type=int,
        metavar="N",
        help="most documents tokenized at a time (default: %(default)s)",
    )
    parser.add_argument(
        OPTION_FLAGS["batch_bytes"],
        type=int,
        metavar="N",
        help="most bytes of them, a longer document alone (default: %(default)s)",
    )
    parser.add_argument(
        OPTION_FLAGS["on_error"],
        choices=(*typing.get_args(OnError), *FORMER_VALUES["on_error"]),
        metavar=f"{{{','.join(typing.get_args(OnError))}}}",
        help="leave out files that cannot be read, or lines without a text in UTF-8 (default: %(default)s)",
    )
    parser.add_argument(
        OPTION_FLAGS["cache_dir"], metavar="C", help="where tokenizers of the Hugging Face hub are kept"
    )
    fields = TokenizeOptions.model_fields.items()
    parser.set_defaults(**{name: field.default for name, field in fields if not field.is_required()})


def options_from_flags(given: argparse.Namespace) -> TokenizeOptions:
    """The options that a parser with `add_tokenize_flags` was given. Raises InputError naming the option that is
    wrong."""
    return validate_options({name: getattr(given, name) for name in OPTION_FLAGS}, OPTION_FLAGS)


def options_to_flags(options: TokenizeOptions) -> list[str]:
    """The arguments of a command line that `options_from_flags` reads as `options`."""
    arguments = []
    for name, flag in OPTION_FLAGS.items():
        value = getattr(options, name)
        if isinstance(value, bool):
            arguments += [flag] if value else []
        elif value is not None:
            arguments += [f"{flag}={value}"]
    return arguments
