"""What a mixture's folder says of itself: which files are its own, and which links repeat a shard on purpose.

Several passes over a dataset lie in folders of their own, because each file needs its own name.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

from relayrun.files import read_json
from relayrun.tokens.shards.prefixes import SHARD_SUFFIXES

MIXTURE_FORMAT = "relayrun dataset mixture, version 1"
SUMMARY_TEXT = "dataset_mixture_summary.txt"
SUMMARY_JSON = "dataset_mixture_summary.json"


def mixture_files(mixture: Path) -> dict[str, bool]:
    """What belongs to the mixture in this folder, by its summary: path below it → whether it is a link.

    Nothing, if it is no mixture.
    """
    try:
        former = read_json(mixture / SUMMARY_JSON)
        if former["format"] != MIXTURE_FORMAT:
            return {}
        files = dict.fromkeys((SUMMARY_TEXT, SUMMARY_JSON, *(dataset["name"] for dataset in former["datasets"])), False)
        for shard in former["shards"]:
            link = shard["link"]
            files[os.path.dirname(link)] = False
            files |= {
                link + suffix: suffix == ".bin" or "cut_after_documents" not in shard for suffix in SHARD_SUFFIXES
            }
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):  # ValueError: also no UTF-8
        return {}
    return files


@functools.lru_cache(maxsize=16)
def _mixture_links(mixture: str) -> frozenset[str]:
    return frozenset(name[:-4] for name in mixture_files(Path(mixture)) if name.endswith(SHARD_SUFFIXES))


def is_repeated_pass(prefix: str, other: str) -> bool:
    """Whether two prefixes are one shard in two passes of a mixture that repeats its dataset."""
    folder = os.path.commonpath([prefix, other])
    mixture = os.path.dirname(folder)
    names = [os.path.relpath(path, mixture) for path in (prefix, other)]
    passes = {re.fullmatch(r"epoch-\d+", os.path.basename(os.path.dirname(name))) is not None for name in names}
    return True in passes and _mixture_links(mixture).issuperset(names)
