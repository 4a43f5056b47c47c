"""How documents are tokenized: every choice with its meaning, its unit and its default, which stands nowhere else.

A config and the variables of the Bash launcher (`settings`), the options of programs (`flags`) and the keywords of the
datatrove step all end in a `TokenizeOptions`.
"""

from __future__ import annotations

import functools
import logging
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
