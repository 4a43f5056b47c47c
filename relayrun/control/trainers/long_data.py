"""Lists of shards that are too long for a command line: Megatron-LM reads them from a file.

--data-path P ...                                 ->  --data-args-path FILE            words, separated by blanks
--train-data-path P ... --valid-data-path Q ...   ->  --per-split-data-args-path FILE  JSON
"""

from __future__ import annotations

import json
from collections.abc import Sequence

COMMAND_LINE_BYTES = 100_000
"""Bytes of words above which a file is used; Linux takes 128 KiB for one word, and 2 MB for all of them."""

_SPLITS = {"--train-data-path": "train", "--valid-data-path": "valid", "--test-data-path": "test"}


def is_too_long_for_command(values: Sequence[str]) -> bool:
    """Whether words go to a file."""
    return sum(len(value.encode(errors="surrogateescape")) + 1 for value in values) > COMMAND_LINE_BYTES


def shorten_data_paths(words: Sequence[str], file: str) -> tuple[list[str], str | None]:
    """A command line with its shards in `file` where they are too long for it, and the text of that file or None."""
    flags = _grouped_flags(words)
    whole = next((values for name, values in flags if name == "--data-path" and is_too_long_for_command(values)), None)
    if whole is not None:
        return _replaced_flags(flags, {"--data-path"}, ["--data-args-path", file]), " ".join(whole) + "\n"
    parts = {name: values for name, values in flags if name in _SPLITS}
    if is_too_long_for_command([value for values in parts.values() for value in values]):
        lists = {split: parts.get(name, []) or None for name, split in _SPLITS.items()}
        return _replaced_flags(flags, set(parts), ["--per-split-data-args-path", file]), json.dumps(lists) + "\n"
    return list(words), None


def _grouped_flags(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Words that belong together; what stands before the first flag belongs to an empty name."""
    found: list[tuple[str, list[str]]] = [("", [])]
    for word in words:
        if word.startswith("--"):
            found.append((word, []))
        else:
            found[-1][1].append(word)
    return found


def _replaced_flags(flags: list[tuple[str, list[str]]], names: set[str], words: list[str]) -> list[str]:
    kept = [word for name, values in flags if name not in names for word in filter(None, (name, *values))]
    return [*kept, *words]
