"""PackedTexts as Arrow's arrays, without what Arrow itself would import for them."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relayrun.tokens.readers.texts import large_strings

READ = """
import sys
from relayrun.tokens.readers.columns import read_column
for path in sys.argv[1:]:
    print(sum(map(len, read_column(path, "text", batch_bytes=10_000))))
print([name for name in ("pandas", "pyarrow") if name in sys.modules])
"""


@pytest.mark.parametrize(
    "texts",
    [
        [],
        ["a"],
        [""],
        [None],
        ["a", None, "", "é😀", None, *map(str, range(20)), None],
        [str(number) if number % 3 else None for number in range(1000)],
    ],
)
def test_large_strings_are_those_of_arrow(texts: list[str | None]) -> None:
    expected = pa.array(texts, pa.large_string())
    found = large_strings(texts)
    found.validate(full=True)
    assert found.equals(expected)
    assert found.null_count == expected.null_count
    of_bytes = large_strings([None if text is None else text.encode() for text in texts])
    assert of_bytes.equals(expected)


def test_a_lone_surrogate_is_no_text() -> None:
    with pytest.raises(UnicodeEncodeError):
        large_strings(["a", "\ud800"])


def test_files_are_read_without_pandas(tmp_path: Path) -> None:
    """Some functions of Arrow import it, which takes half a second of a start."""
    texts = ["one", "two", "three"]
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    with (tmp_path / "a.csv").open("w") as file:
        csv.writer(file).writerows([["text"], *([text] for text in texts)])
    paths = [str(tmp_path / f"a.{kind}") for kind in ("parquet", "jsonl", "csv")]
    done = subprocess.run([sys.executable, "-c", READ, *paths], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split("\n")[:4] == ["3", "3", "3", "['pyarrow']"]
