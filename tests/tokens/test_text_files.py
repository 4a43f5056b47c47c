"""Files of text, all compressions, and archives: what is a document, and nothing that is torn is taken for whole."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import random
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from relayrun.errors import InputError
from relayrun.tokens.readers.columns import read_column
from relayrun.tokens.readers.faults import LineFaults
from relayrun.tokens.shards.prefixes import find_prefixes
from relayrun.tokens.shards.shard import Shard
from relayrun.tokens.tokenize.dumps import prepare_dumps
from relayrun.tokens.tokenize.encode.tokenizer_files import write_byte_tokenizer
from relayrun.tokens.tokenize.options import TokenizeOptions
from relayrun.tokens.tokenize.pipeline import tokenize_paths_file

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".zst": lambda data: zstandard.compress(data),
    ".zstd": lambda data: zstandard.compress(data),
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}
LINES = b'{"text": "a"}\n{"text": "b"}\n'


def texts(path: Path, data: bytes, faults: LineFaults | None = None) -> list[Any]:
    path.write_bytes(data)
    arrays = read_column(str(path), "text", batch_bytes=99, faults=faults)
    return [text for array in arrays for text in array.to_pylist()]


def tar(members: dict[str, bytes]) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as file:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            file.addfile(member, io.BytesIO(data))
    return archive.getvalue()


MEMBERS = {
    "web/a.txt": b"a book\r\nof two lines\n",
    "web/._a.txt": b"\0\5\x16\7",
    "web/b.jsonl": LINES,
    "web/c.jsonl.xz": lzma.compress(LINES),
    "LICENSE.txt": b"of nobody",
    "web/d.txt": b"x" * 5000,
}
MEMBER_TEXTS = ["a book\r\nof two lines\n", "a", "b", "a", "b", "x" * 5000]


@pytest.mark.parametrize("ending", COMPRESS)
def test_a_compressed_file_is_read_whole_or_not_at_all(tmp_path: Path, ending: str) -> None:
    path, compress = tmp_path / f"a.jsonl{ending}", COMPRESS[ending]
    both = compress(LINES) + compress(LINES)
    assert texts(path, compress(LINES)) == ["a", "b"]
    assert texts(path, both) == ["a", "b"] * 2
    for data in (both[:-1], both[:-5], both[: len(both) // 2 + 9], compress(LINES)[:-5], both + b"no stream" * 9):
        with pytest.raises(InputError, match=r"a\.jsonl.*cannot be read, it may be torn"):
            texts(path, data)


def test_padding_between_streams_of_xz_is_no_end(tmp_path: Path) -> None:
    stream = lzma.compress(LINES)
    assert texts(tmp_path / "a.jsonl.xz", stream + bytes(8) + stream + bytes(1 << 20) + stream) == ["a", "b"] * 3


@pytest.mark.parametrize("ending", ["", *COMPRESS])
def test_a_text_file_is_one_document_as_it_stands(tmp_path: Path, ending: str) -> None:
    text = "{ the first line\r\n\n the last, ö" + "ü" * 2_000_000
    compress = COMPRESS.get(ending, bytes)
    assert texts(tmp_path / f"a.txt{ending}", compress(b"\xef\xbb\xbf" + text.encode())) == [text]


def test_a_text_file_that_is_not_utf8_is_named_or_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    for data in (
        "caf\xe9 au lait".encode("latin-1"),
        "ab".encode("utf-16"),
        "ab".encode("utf-16-le"),
        b"\xff\xd8\xff\xe0",
    ):
        with pytest.raises(InputError, match=r"a\.txt: its first bytes are no text in UTF-8"):
            texts(path, data)
    late = b"x" * 600 + b"\xe9"
    with pytest.raises(InputError, match=r"a\.txt: the text is not UTF-8 \(byte 0xe9 at 600"):
        texts(path, late)
    faults = LineFaults(skip=True)
    assert (texts(path, late, faults), faults.counts) == ([], {"not UTF-8": 1})
    assert texts(path, "ö".encode() * 300) == ["ö" * 300]  # the first bytes may end inside of a character


@pytest.mark.parametrize("ending", ["", *COMPRESS, ".tgz"])
def test_members_of_an_archive_are_read_as_files_of_their_names(tmp_path: Path, ending: str) -> None:
    name, compress = (f"a.tar{ending}", COMPRESS.get(ending, bytes)) if ending != ".tgz" else ("a.tgz", gzip.compress)
    assert texts(tmp_path / name, compress(tar(MEMBERS))) == MEMBER_TEXTS


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_no_damaged_archive_is_taken_for_a_whole_one(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    """Cut anywhere, a bit flipped in any header, or another archive behind it."""
    path, archive = tmp_path / ("a.tar" if compress is bytes else "a.tar.gz"), tar(MEMBERS)
    end = len(archive.rstrip(b"\0"))
    damaged = [archive[:cut] for cut in (0, 100, *range(512, end, 512), end - 9, -(-end // 512) * 512)]
    headers = [place + 3 for place in range(0, end, 512) if archive[place + 257 : place + 262] == b"ustar"]
    damaged += [archive[:place] + bytes([archive[place] ^ 1]) + archive[place + 1 :] for place in headers]
    for data in (*damaged, archive + archive):
        with pytest.raises(InputError, match=r"a\.tar.*cannot be read, it may be torn"):
            texts(path, compress(data))


def test_a_member_of_another_kind_is_named_or_counted(tmp_path: Path) -> None:
    data = tar({"0.txt": b"a", "0.jpg": b"\xff\xd8", "1.json": b'{"caption": "b"}'})
    with pytest.raises(InputError, match=r"a\.tar/0\.jpg: this member of the archive is of a kind that is not read"):
        texts(tmp_path / "a.tar", data)
    faults = LineFaults(skip=True)
    assert texts(tmp_path / "a.tar", data, faults) == ["a"]
    assert (faults.counts, faults.examples[1].split(": ")[0]) == (
        {"not read": 1, "no column": 1},
        f"{tmp_path}/a.tar/1.json:1",
    )


def test_a_data_set_of_all_of_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Tokenized twice, once with a shard that went, it gives the texts that were written, in order."""
    data, rng, expected = tmp_path / "data", random.Random(1), []
    data.mkdir()
    for number, ending in enumerate([*COMPRESS, ""] * 2):
        written = [f"text {number} {rng.random()} " for _ in range(3)]
        rows = "".join(json.dumps({"text": text}) + "\n" for text in written).encode()
        kind, content, found = [
            (".jsonl", rows, written),
            (".txt", "".join(written).encode(), ["".join(written)]),
            (".tar", tar({"x.txt": written[0].encode(), "y.jsonl": rows}), [written[0], *written]),
        ][number % 3]
        (data / f"{number:02}{kind}{ending}").write_bytes(COMPRESS.get(ending, bytes)(content))
        expected += found
    (data / "LICENSE.txt").write_text("of nobody")
    prepare_dumps(data, tmp_path / "m")
    assert "texts, each read as one document" in caplog.text
    options = TokenizeOptions(tokenizer=str(write_byte_tokenizer(tmp_path / "t")), append_eod="no", tasks=2)
    for output in (tmp_path / "out", tmp_path / "again"):
        paths = tmp_path / "m/dumps/paths_file_0.txt"
        tokenize_paths_file(options, output_folder=output, dataset=data, paths_file=paths)
        first = (output / "00000_tokens.bin").read_bytes()
        (output / "00000_tokens.bin").unlink()
        tokenize_paths_file(options, output_folder=output, dataset=data, paths_file=paths)
        assert (output / "00000_tokens.bin").read_bytes() == first
        shards = [Shard.open(prefix) for prefix in find_prefixes([output])]
        ids = [part for shard in shards for part in np.split(np.asarray(shard.ids()), shard.document_ends()[1:-1])]
        assert sorted(bytes(part.tolist()).decode() for part in ids) == sorted(expected)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt.gz", b"plain", None),
        ("a.tar", b"plain text" * 99, None),
        ("a.tar", gzip.compress(b"x"), "its content is gzip, not tar archive"),
        ("a.jsonl", tar(MEMBERS), "its content is tar archive, not text"),
        ("a.txt", b"%PDF-1.4 ...", "its content is PDF, not text"),
        ("a.txt", lzma.compress(b"x"), "its content is xz, not text"),
        ("a.tar", tar(MEMBERS)[:3000], "it may be torn"),
        ("a.tar", tar({"train/0.txt": b"a", "test/0.txt": b"b"}), "of a test set beside other text: a.tar; its member"),
        ("a.tar.gz", gzip.compress(tar({"train/0.txt": b"a", "test/0.txt": b"b"})), "its member test/0.txt says so"),
    ],
    ids=["gz-plain", "tar-plain", "tar-gzip", "jsonl-tar", "txt-pdf", "txt-xz", "tar-torn", "tar-test", "tar-gz-test"],
)
def test_a_data_set_is_looked_at_before_it_is_tokenized(
    tmp_path: Path, name: str, content: bytes, words: str | None
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).write_bytes(content)
    (tmp_path / "data" / "b.jsonl").write_bytes(LINES)
    if words is None:
        prepare_dumps(tmp_path / "data", tmp_path / "m")  # the reader says it: the first bytes are of no known content
        with pytest.raises(InputError, match="may be torn"):
            texts(tmp_path / "data" / name, content)
    else:
        with pytest.raises(InputError, match=words):
            prepare_dumps(tmp_path / "data", tmp_path / "m")
