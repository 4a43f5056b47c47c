from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relayrun.errors import InputError
from relayrun.tokenization.reshard import keys, reshard

ROOT = Path(__file__).resolve().parents[2]
ROWS = 3000


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(3):
        texts = [f"{number}-{row}-" + "x" * (row % 50) for row in range(1000)]
        pq.write_table(pa.table({"text": texts, "id": list(range(1000))}), folder / f"{number}.parquet")
    return folder


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.glob("*.parquet")}


def rows(folder: Path) -> list[tuple[str, int]]:
    files = sorted(folder.glob("data_*.parquet"), key=lambda file: int(file.stem[5:]))
    return [(row["text"], row["id"]) for file in files for row in pq.read_table(file).to_pylist()]


def test_every_row_comes_once_in_another_order_and_with_its_columns(data: Path, tmp_path: Path) -> None:
    assert reshard(data, tmp_path / "out", row_group_size=100) == ROWS
    shuffled = rows(tmp_path / "out")
    original = [row for file in sorted(data.iterdir()) for row in pq.read_table(file).to_pylist()]
    in_order = [(row["text"], row["id"]) for row in original]
    assert sorted(shuffled) == sorted(in_order)
    assert sum(a == b for a, b in zip(shuffled, in_order, strict=True)) < 10
    places = np.array([int(text[0]) for text, _ in shuffled])
    assert abs(places[:1500].mean() - places[1500:].mean()) < 0.15  # files are mixed over the whole
    assert (tmp_path / "out" / "lengths.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("options", [{"threads": 3}, {"memory_limit": 250_400_000}, {"memory_limit": 250_050_000}])
def test_the_bytes_depend_on_the_seed_alone(data: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    reshard(data, tmp_path / "one", row_group_size=64, file_size=10_000, seed=1)
    reshard(data, tmp_path / "two", row_group_size=64, file_size=10_000, seed=1, **options)
    reshard(data, tmp_path / "other", row_group_size=64, file_size=10_000, seed=2)
    assert len(digests(tmp_path / "one")) > 3
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
    assert digests(tmp_path / "one") != digests(tmp_path / "other")


def test_row_groups_and_files_have_the_sizes_asked_for(data: Path, tmp_path: Path) -> None:
    reshard(data, tmp_path / "out", row_group_size=70, file_size=20_000)
    files = sorted((tmp_path / "out").glob("*.parquet"), key=lambda file: int(file.stem[5:]))
    sizes = [pq.read_metadata(file).row_group(group).num_rows for file in files
             for group in range(pq.read_metadata(file).num_row_groups)]  # fmt: skip
    assert sizes == [70] * (ROWS // 70) + [ROWS % 70]
    assert all(20_000 <= file.stat().st_size < 30_000 for file in files[:-1])


def test_the_order_is_that_of_the_keys() -> None:
    one, two = keys(0, 0, np.arange(100_000, dtype=np.uint64)), keys(0, 1, np.arange(100_000, dtype=np.uint64))
    assert len({*one.tolist(), *two.tolist()}) == 200_000
    counts = np.histogram(one >> np.uint64(60), bins=16)[0]
    assert abs(counts - 6250).max() < 400


def test_jsonl_is_read_and_what_does_not_fit_together_is_refused(data: Path, tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    lines.mkdir()
    (lines / "a.jsonl").write_text("".join(json.dumps({"text": f"{row}", "more": 1}) + "\n" for row in range(50)))
    assert reshard(lines, tmp_path / "out") == 50
    assert sorted(pq.read_table(tmp_path / "out/data_0.parquet")["text"].to_pylist(), key=int) == [
        str(row) for row in range(50)
    ]
    (data / "z.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(InputError, match=r"z\.jsonl: its columns are others"):
        reshard(data, tmp_path / "refused")
    (data / "z.jsonl").unlink()
    (data / "z.parquet").write_bytes(b"PAR1torn")
    with pytest.raises(InputError, match=r"z\.parquet: cannot be read"):
        reshard(data, tmp_path / "refused")
    with pytest.raises(InputError, match="the output exists"):
        reshard(data, tmp_path / "out")
    assert not (tmp_path / "refused").exists()


def test_the_door(data: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts/tokenization/reshard.py"), "--dataset-folder", str(data)]
    done = subprocess.run([*command, "--output-folder", str(tmp_path / "out")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3,000 rows")
    assert len(list(data.iterdir())) == 3
