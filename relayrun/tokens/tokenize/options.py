"""Options of tokenization, each declared once with its meaning, unit and default.

YAML and environment variables (`job_config`), the flags of commands (below) and the keywords of the datatrove step all
become a `TokenizeOptions`.
"""

from __future__ import annotations

import argparse
import typing
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from relayrun.config.sections.base import Section
from relayrun.config.sections.dataclass_section import OutputPath, Positive
from relayrun.errors import InputError

AppendEod = Literal["yes", "no", "auto"]
EngineName = Literal["auto", "huggingface", "gigatoken", "bytes"]
OnError = Literal["fail", "skip-file", "skip-line"]
OnStepError = Literal["fail", "drop"]
ExclusionFormat = Literal["jsonl.gz", "parquet"]


def _yes_or_no(value: object) -> object:
    return ("yes" if value else "no") if isinstance(value, bool) else value


def _nonzero_workers(workers: int) -> int:
    if workers == 0:
        raise ValueError("at least 1, or -1 for as many as tasks")
    return workers


class TokenizeOptions(Section):
    """Options of tokenization: the tokenizer, the framing of documents, and the division of the work. Options above
    `workers` change the shards; the others change speed, memory and the treatment of bad files."""

    tokenizer: str
    """A tokenizer.json, a folder that holds one, or a name on the Hugging Face hub."""
    column: str = "text"
    """The text column; a name with dots is a nested field."""
    tasks: Positive = 20
    """Shards of a dump (of a paths file): at most one per file, or per range of a large file."""
    eos_token: str | None = None
    """Token that ends every document; None: the tokenizer's own."""
    append_eod: Annotated[AppendEod, BeforeValidator(_yes_or_no)] = "yes"
    """End every document with the EOS. yes: a tokenizer without an EOS is an error; auto: a warning, and no token ends
    a document; no: no token ends a document. True and False are yes and no."""
    bos: bool = False
    """Begin every document with the tokenizer's BOS."""
    special_text: bool = False
    """Encode the text of a special token in a document as that token; else it stays text."""
    keep_empty: bool = False
    """Keep documents without text as documents without tokens; else they are dropped and counted."""
    reader: Any = None
    """Reader of datatrove in place of ours, see `steps`; None: the ending of a file says how it is read."""
    pipeline: Annotated[tuple[Any, ...], Field(strict=False)] = ()
    """Steps of datatrove that each document passes before it is encoded, see `steps`."""
    on_step_error: OnStepError = "fail"
    """Treatment of a document on which a step raises an error. drop: it is dropped and counted as the filters' are."""
    exclusions: ExclusionFormat = "jsonl.gz"
    """Format of the files of the documents that steps drop."""
    workers: Annotated[int, Field(ge=-1), AfterValidator(_nonzero_workers)] = -1
    """Shards made at a time on a node; -1: as many as tasks."""
    engine: EngineName = "auto"
    """Library that encodes; auto: the fastest with Hugging Face's ids."""
    batch_documents: Positive = 10_000
    """Documents that a worker tokenizes at a time, at most. A batch costs 0.15 ms: as much as 20 kB of text."""
    batch_bytes: Positive = 4_000_000
    """Maximum bytes of UTF-8 tokenized at a time; a longer document is alone, in pieces. See `relayrun dumps tune`."""
    on_error: OnError = "fail"
    """Treatment of unreadable input. fail: an error, once the other shards are done. skip-file: skip the whole file and
    record it. skip-line: skip and count a line or row without a text in UTF-8, and skip an unreadable file."""
    cache_dir: OutputPath | None = None
    """Folder of tokenizers of the Hugging Face hub; None: the hub's own."""
    scratch_folder: OutputPath | None = None
    """Folder of a node in which a worker makes a shard that goes to a URL; None: TMPDIR."""

    @property
    def skips_lines(self) -> bool:
        return self.on_error == "skip-line"

    @property
    def skips_files(self) -> bool:
        return self.on_error != "fail"

    @property
    def has_steps(self) -> bool:
        """Whether documents pass datatrove's classes between the file and the shard."""
        return bool(self.pipeline) or self.reader is not None

    @classmethod
    def default(cls, name: str) -> Any:
        """Return the default of the field `name`."""
        return cls.model_fields[name].default


def validate_options(values: Mapping[str, Any], names: Mapping[str, str]) -> TokenizeOptions:
    """Return the options with these values by field. Raises InputError with the user's name of a wrong field."""
    try:
        return TokenizeOptions(**values)
    except ValidationError as error:
        detail = error.errors()[0]
        name = names[str(detail["loc"][0])]
        least = detail.get("ctx", {}).get("gt")
        message = f"is at least {least + 1}" if least is not None else detail["msg"].removeprefix("Value error, ")
        raise InputError(f"{name} {message}, not {detail['input']!r}", hint="--help tells what it takes") from None


STEP_FIELDS = ("reader", "pipeline", "on_step_error", "exclusions", "scratch_folder")
OPTION_FLAGS = {f: f"--{f.replace('_', '-')}" for f in TokenizeOptions.model_fields if f not in STEP_FIELDS} | {
    "tokenizer": "--tokenizer-name-or-path",
    "tasks": "--n-tasks",
    "workers": "--n-workers",
}
"""Flag of every field but those that a YAML file alone gives."""


def add_tokenize_flags(parser: argparse.ArgumentParser, names: Collection[str] = OPTION_FLAGS) -> None:
    """Add a flag for each of these fields to `parser`, with the names of NeMo Curator too, and the fields' defaults."""

    def add(name: str, explanation: str, *other_names: str, **how: Any) -> None:
        if name in names:
            parser.add_argument(OPTION_FLAGS[name], *other_names, dest=name, help=explanation, **how)

    number, default = {"type": int, "metavar": "N"}, "(default: %(default)s)"
    hub = "a tokenizer.json, a folder that holds one, or a hub name"
    add("tokenizer", hub, "--model-identifier", required=True, metavar="T")
    add("tasks", "number of shards, at most one per file or range (default: %(default)s, as in a config)", **number)
    add("workers", f"shards made at a time; -1: as many as tasks {default}", **number)
    add("column", f"column of the text {default}", "--text-field")
    add("eos_token", "ends every document (default: the tokenizer's own)", metavar="TOKEN")
    end = f"auto: warn and go on where the tokenizer has no EOS {default}"
    add("append_eod", end, nargs="?", choices=typing.get_args(AppendEod), const="yes")
    add("bos", "put the tokenizer's BOS in front of every document", action="store_true")
    add("special_text", "text of a special token in a document becomes that token", action="store_true")
    add("keep_empty", "keep documents without text, as Megatron-LM does", action="store_true")
    fastest = f"auto: the fastest that gives Hugging Face's ids {default}"
    add("engine", fastest, choices=typing.get_args(EngineName))
    add("batch_documents", f"most documents tokenized at a time {default}", "--tokenization-batch-size", **number)
    add("batch_bytes", f"most bytes of them, a longer document alone {default}", **number)
    bad = f"leave out files that cannot be read, or lines without a text in UTF-8 {default}"
    add("on_error", bad, choices=typing.get_args(OnError))
    add("cache_dir", "where tokenizers of the Hugging Face hub are kept", metavar="C")
    fields = TokenizeOptions.model_fields
    parser.set_defaults(**{name: fields[name].default for name in names if not fields[name].is_required()})


def options_from_flags(given: argparse.Namespace) -> TokenizeOptions:
    """Return the options of a parser with `add_tokenize_flags`. Raises InputError that names the wrong flag."""
    return validate_options({name: getattr(given, name) for name in OPTION_FLAGS}, OPTION_FLAGS)


def options_to_flags(options: TokenizeOptions) -> list[str]:
    """Return the arguments that `options_from_flags` reads as `options`."""
    arguments = []
    for name, flag in OPTION_FLAGS.items():
        value = getattr(options, name)
        if isinstance(value, bool):
            arguments += [flag] if value else []
        elif value is not None:
            arguments += [f"{flag}={value}"]
    return arguments
