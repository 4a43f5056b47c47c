"""Files of one text (`.txt`), and tar archives whose members are files of text or JSON lines.

A `.txt` file is one document, with its line ends. A member of an archive is read as a file of its name. tarfile takes
a damaged header, and what follows the first end mark, for the end of an archive: here they are errors.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import Any, BinaryIO, Self

import pyarrow as pa

from relayrun.tokens.readers.contents import TAR_ARCHIVE, is_text_file, uncompressed_name
from relayrun.tokens.readers.faults import BadLine, LineFaults
from relayrun.tokens.readers.json_csv import BOM, open_decompressed, read_jsonl
from relayrun.tokens.readers.published import ENDING_NOT_READ, JSON_ENDINGS, why_left_out
from relayrun.tokens.readers.texts import LongText, keep_utf8

_BLOCK = 1 << 20


def read_text(
    raw: BinaryIO, path: str, column: str, *, batch_bytes: int, scratch: str | None, faults: LineFaults
) -> Iterator[pa.Array]:
    """Yield the text of a file, whatever `column` says. Raises as `columns.read_column`."""
    text = LongText(scratch)
    with open_decompressed(raw, path) as content:
        text.add(content.read(_BLOCK).removeprefix(BOM))
        while block := content.read(_BLOCK):
            text.add(block)
    yield keep_utf8(text.text(), faults, lambda row: path)


def read_tar(
    raw: BinaryIO, path: str, column: str, *, batch_bytes: int, scratch: str | None, faults: LineFaults
) -> Iterator[pa.Array]:
    """Yield the texts of all members in their order. Raises as `columns.read_column`, and for a member of another
    kind, unless `faults` skips it."""
    for name, content in open_members(raw, path):
        place, why = f"{path}/{name}", why_left_out(uncompressed_name(name), (".txt", *JSON_ENDINGS))
        if why and why.startswith(ENDING_NOT_READ):
            words = "this member of the archive is of a kind that is not read"
            faults.add(BadLine("not read", words, hint="--on-error skip-line leaves it out"), place)
        elif why is None:
            read = read_text if is_text_file(name) else read_jsonl
            yield from read(content, place, column, batch_bytes=batch_bytes, scratch=scratch, faults=faults)


def open_members(raw: BinaryIO, path: str) -> Iterator[tuple[str, Any]]:
    """Yield name and content of each regular member of an archive, whose file `path` names. Raises OSError,
    tarfile.TarError or pa.ArrowException for a damaged one; so do reads of the content."""
    with tarfile.open(fileobj=open_decompressed(raw, path, TAR_ARCHIVE), mode="r|", tarinfo=_Member) as archive:
        while (member := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined]  # it would keep all of them
            if member.isfile():
                yield member.name, archive.extractfile(member)
        while block := archive.fileobj.read(_BLOCK):
            if block.strip(b"\0"):
                raise tarfile.ReadError("there are bytes behind its end mark: split it into its archives")


class _Member(tarfile.TarInfo):
    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Self:
        """Read a header. tarfile takes a damaged or missing one, except the first, for the end of the archive."""
        try:
            return super().fromtarfile(archive)
        except tarfile.HeaderError as error:
            if isinstance(error, tarfile.EOFHeaderError):  # type: ignore[attr-defined]  # blocks of zeros
                raise
            raise tarfile.ReadError(str(error)) from None
