"""Text that every machine has, for the demo and the tutorial: documentation and sources of Python and its packages.

Three folders of parquet files (snappy, columns `text` and `path`, the path relative to the library):

- `docs`: prose. README and licence files, descriptions of packages, and the topics of `pydoc`.
- `code`: modules.
- `heldout`: about 2 in 100 documents of both, chosen by a hash of their content.

A text that occurs several times (e.g. licences) is taken once, so no held-out document is trained on. Tables of numbers
and encoded data are skipped. The same installation gives the same files: the walk is sorted, and the order comes from a
keyed hash.
"""

from __future__ import annotations

import hashlib
import os
import pydoc_data.topics
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from relayrun.errors import ConfigError, InputError
from relayrun.files import write_json
from relayrun.publishing import published_folder

CORPUS_SETS = ("docs", "code", "heldout")
CORPUS_RECORD = "corpus.json"
DOCS_SHARE = 0.6
HELDOUT_SHARE = 0.02
PARTS = 4
SMALLEST, LARGEST = 200, 2_000_000
PROSE = (".md", ".rst", ".txt", ".po")
SOURCE = (".py", ".pyi")
LICENCES = ("LICENSE", "LICENCE", "COPYING", "NOTICE", "AUTHORS", "README", "CHANGELOG")
TOPICS = "python/pydoc_data/topics.py"
SKIPPED = ("__pycache__", "site-packages", "dist-packages")
OWN = (".", "relayrun")
LISTS = ("top_level.txt", "entry_points.txt", "SOURCES.txt", "requirements.txt")
UNBROKEN = re.compile(r"\S{400}")
LETTERS = re.compile(r"[^\W\d_]+")


@dataclass(kw_only=True)
class TextSet:
    """A folder of parquet files, and during reading its documents, as (path, text)."""

    folder: Path
    bytes: int = 0
    """Bytes of all texts, as UTF-8."""
    texts: list[tuple[str, str]] = field(default_factory=list, repr=False)

    @property
    def documents(self) -> int:
        return len(self.texts)


def build_corpus(output: Path, *, megabytes: float = 24, seed: int = 0) -> dict[str, TextSet]:
    """Write `docs`, `code` (together `megabytes` million bytes of text, 3 to 2 while there is prose) and `heldout`
    below `output`; return these sets by name. The folder appears atomically and replaces an earlier corpus. A small
    installation gives fewer bytes. Raises ConfigError for a size that is not positive, InputError if `output` holds
    other files or there is no text."""
    if not megabytes > 0:
        raise ConfigError(f"a corpus needs a positive size, not {megabytes:g} MB")
    _check_output(output, output)
    wanted = int(megabytes * 1e6)
    sets = {name: TextSet(folder=output / name) for name in CORPUS_SETS}
    seen: set[bytes] = set()
    for kind, path, text in _documents(_ordered(_library_files(), seed)):
        if sets["docs"].bytes + sets["code"].bytes >= wanted:
            break
        if kind == "docs" and sets["docs"].bytes >= wanted * DOCS_SHARE:
            continue
        data = text.encode()
        digest = hashlib.sha256(data).digest()
        if digest in seen or not SMALLEST <= len(data) <= LARGEST or not is_learnable(text):
            continue
        seen.add(digest)
        target = sets["heldout" if is_heldout(digest, HELDOUT_SHARE) else kind]
        target.texts.append((path, text))
        target.bytes += len(data)
    for name, made in sets.items():
        if not made.texts:
            words = f"this Python installation gave no text for the set '{name}'"
            hint = "ask for more megabytes"
            raise InputError(words, where=sysconfig.get_path("stdlib"), hint=hint)
    with published_folder(output, replaces=lambda found: _check_output(found, output)) as building:
        for name, made in sets.items():
            made.texts.sort(key=lambda document: _keyed(document[0], seed))
            _write_documents(building / name, made.texts, parts=1 if name == "heldout" else PARTS)
        counts = {name: {"documents": made.documents, "bytes": made.bytes} for name, made in sets.items()}
        write_json(building / CORPUS_RECORD, {"seed": seed, "megabytes": megabytes, "sets": counts})
    return sets


def is_heldout(digest: bytes, share: float) -> bool:
    """True for about this share of all texts, chosen by the digest of their content."""
    return int.from_bytes(digest[:4], "big") < share * 2**32


def is_learnable(text: str) -> bool:
    """True if a text is language or code rather than data, judged by its lines and characters."""
    if "\0" in text or UNBROKEN.search(text) or max(map(len, text.split("\n"))) > 2000:
        return False
    visible = len("".join(text.split()))
    digits = sum(map(text.count, "0123456789"))
    return digits < 0.25 * visible and sum(map(len, LETTERS.findall(text))) > 0.5 * visible


def _library_files() -> Iterator[tuple[str, str]]:
    """Yield (relative path, path) of the text files of the standard library and of the packages."""
    paths = sysconfig.get_paths()
    roots = {"python": paths["stdlib"], "packages": paths["purelib"], "packages-platform": paths["platlib"]}
    if os.path.realpath(paths["platlib"]) == os.path.realpath(paths["purelib"]):
        del roots["packages-platform"]
    for label, root in roots.items():
        for folder, folders, names in os.walk(root):
            folders[:] = sorted(each for each in folders if each not in SKIPPED and not each.startswith(OWN))
            for name in sorted(names):
                text = name.endswith(PROSE + SOURCE) or name == "METADATA" or name.startswith(LICENCES)
                if text and name not in LISTS and not name.startswith("__editable__"):
                    path = os.path.join(folder, name)
                    yield f"{label}/{os.path.relpath(path, root)}", path


def _ordered(files: Iterator[tuple[str, str]], seed: int) -> list[tuple[str, str]]:
    """Prose first, which is rare; within both kinds a seeded order that depends on the paths alone."""
    return sorted(files, key=lambda file: (file[0].endswith(SOURCE) and file[0] != TOPICS, _keyed(file[0], seed)))


def _keyed(path: str, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}/".encode() + os.fsencode(path)).digest()


def _documents(files: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str, str]]:
    for relative, path in files:
        text = _read_text(path)
        if text is None or not relative.isprintable():
            continue
        if relative == TOPICS:
            yield from (("docs", f"{relative}#{name}", topic) for name, topic in pydoc_data.topics.topics.items())
        elif relative.endswith(SOURCE):
            yield "code", relative, text
        elif os.path.basename(path) == "METADATA":  # headers, a blank line, the description
            yield "docs", relative, text.partition("\n\n")[2]
        else:
            yield "docs", relative, text


def _read_text(path: str) -> str | None:
    try:
        if not SMALLEST <= os.stat(path).st_size <= LARGEST:
            return None
        with open(path, encoding="utf-8", newline="") as file:
            return file.read().removeprefix("\ufeff")
    except (OSError, UnicodeDecodeError):
        return None


def write_parquet(file: Path, /, **columns: Sequence[str]) -> None:
    """Write columns of texts to a parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file.parent.mkdir(exist_ok=True)
    table = pa.table({name: pa.array(values, pa.string()) for name, values in columns.items()})
    pq.write_table(table, file, compression="snappy")


def _write_documents(folder: Path, documents: Sequence[tuple[str, str]], *, parts: int) -> None:
    """Write documents, (path, text), in order to `parts` files of about equal text size."""
    total = sum(len(text) for _, text in documents)
    groups: list[list[tuple[str, str]]] = [[] for _ in range(parts)]
    before = 0
    for path, text in documents:
        groups[before * parts // total].append((path, text))
        before += len(text)
    for number, group in enumerate(groups):
        texts, paths = [text for _, text in group], [path for path, _ in group]
        write_parquet(folder / f"part-{number:03d}.parquet", text=texts, path=paths)


def _check_output(found: Path, output: Path) -> None:
    """Raise InputError, naming `output`, if the folder `found` is not an earlier corpus."""
    if not found.exists():
        return
    if not found.is_dir():
        raise InputError("the output exists and is not a folder", where=output)
    ours = re.compile(rf"{re.escape(CORPUS_RECORD)}|({'|'.join(CORPUS_SETS)})/part-\d{{3}}\.parquet")
    for folder, _, names in os.walk(found):
        for name in names:
            relative = os.path.relpath(os.path.join(folder, name), found)
            if not ours.fullmatch(relative):
                words = f"the output holds something that is no part of a corpus: {relative}"
                hint = "move it away, or choose another output"
                raise InputError(words, where=output, hint=hint)
