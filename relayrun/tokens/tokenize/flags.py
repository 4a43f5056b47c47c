"""`TokenizeOptions` as options of a program, there and back."""

from __future__ import annotations

import argparse
import typing

from relayrun.tokens.tokenize.options import (
    FORMER_VALUES,
    AppendEod,
    EngineName,
    OnError,
    TokenizeOptions,
    validate_options,
)

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
    """The options that a parser with `add_flags` was given. Raises InputError naming the option that is wrong."""
    return validate_options({name: getattr(given, name) for name in OPTION_FLAGS}, OPTION_FLAGS)


def options_to_flags(options: TokenizeOptions) -> list[str]:
    """The arguments of a command line that `from_flags` reads as `options`."""
    arguments = []
    for name, flag in OPTION_FLAGS.items():
        value = getattr(options, name)
        if isinstance(value, bool):
            arguments += [flag] if value else []
        elif value is not None:
            arguments += [f"{flag}={value}"]
    return arguments
