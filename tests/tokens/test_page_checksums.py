"""The checksums (CRC) of the pages of parquet are read: by dumps, streams, tables and shuffles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relayrun.config.sections.data import StreamSection
from relayrun.errors import InputError
from relayrun.tokens import streams
from relayrun.tokens.readers.columns import RowFile, inspect_files, read_column, read_rows
from relayrun.tokens.shards.manifest import TextFileEntry
from relayrun.tokens.streams.fragments import Fragment, FragmentReader

SKIP = StreamSection(on_error="skip-file")
ROWS = [f"document {row} omega" for row in range(60)]


def damaged(folder: Path, **options: bool) -> str:
    """A file of three row groups, a byte of a text in the second one changed."""
    path = folder / "a.parquet"
    table, plain = pa.table({"text": ROWS}), {"compression": "none", "use_dictionary": False}
    pq.write_table(table, path, row_group_size=20, **plain, **options)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"document 31 omega", b"document 31 mmega"))
    return str(path)


def _texts(path: str) -> list[str]:
    return [text for array in read_column(path, "text", batch_bytes=100) for text in array.to_pylist()]


def _rows(path: str) -> list[str]:
    (file,) = inspect_files([(path, 1)], "text")
    assert isinstance(file, RowFile)
    return [text for table in read_rows(file, "text") for text in table["text"].to_pylist()]


def _stream(path: str) -> list[str]:
    reader = FragmentReader([TextFileEntry(path=path, size=Path(path).stat().st_size, fingerprint="")], StreamSection())
    return [text for batch in reader.read(Fragment(0, None), 0) for text in batch.column(0).to_pylist()]


def _tables(path: str, *, split: bool = False) -> list[str]:
    tables = streams.open(path, nb_epochs=1, fragment_shuffle_window=0, split_to_row_groups=split)
    return [text for table in tables for text in table["text"].to_pylist()]


def _table_of_group(path: str) -> list[str]:
    return _tables(path, split=True)


@pytest.mark.parametrize("read", [_texts, _rows, _stream, _tables, _table_of_group])
def test_a_changed_byte_of_a_page_is_found(tmp_path: Path, read: Callable[[str], list[str]]) -> None:
    path = damaged(tmp_path, write_page_checksum=True)
    with pytest.raises(InputError, match="row group 1: a page is not what its checksum says") as caught:
        read(path)
    assert caught.value.where == path
    assert caught.value.hint == "fetch or write the file again"
    reader = FragmentReader([TextFileEntry(path=path, size=Path(path).stat().st_size, fingerprint="")], SKIP)
    assert "row group 1" in (reader.why_left_out(0) or "")


@pytest.mark.parametrize("read", [_texts, _rows, _stream, _tables])
def test_a_file_without_checksums_is_read(tmp_path: Path, read: Callable[[str], list[str]]) -> None:
    assert len(read(damaged(tmp_path))) == len(ROWS)
