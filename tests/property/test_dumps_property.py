from __future__ import annotations

import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relayrun.tokens.readers.inputs import DataFile, read_paths_file
from relayrun.tokens.tokenize.dumps import prepare_dumps, split_files
from tests.tokenization_corpus import taken_files

NAMES = st.text(
    st.characters(exclude_characters="/\n\0", exclude_categories=()).filter(lambda c: not "\ud800" <= c <= "\udc7f")
    | st.characters(min_codepoint=0xDC80, max_codepoint=0xDCFF, categories=["Cs"]),
    min_size=1,
    max_size=12,
).filter(lambda name: name not in (".", ".."))


def _encodable(name: str) -> bool:
    if name.startswith((".", "_")):
        return False  # a hidden file is no data, nor one that programs set aside
    try:
        return len(name.encode("utf-8", "surrogateescape")) <= 200
    except UnicodeEncodeError:
        return False


@pytest.mark.slow
@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=200), st.integers(1, 50), st.randoms())
def test_every_file_is_in_exactly_one_dump_whatever_the_order(sizes: list[int], n: int, rng: random.Random) -> None:
    files = [DataFile(path=f"{i}.parquet", size=size) for i, size in enumerate(sizes)]
    dumps = split_files(files, n, first_index=3)
    assert sorted(file.path for dump in dumps for file in dump.files) == sorted(file.path for file in files)
    assert [dump.index for dump in dumps] == list(range(3, 3 + min(n, len(files))))
    assert all(dump.files for dump in dumps)
    shuffled = rng.sample(files, len(files))
    assert split_files(shuffled, n, first_index=3) == dumps


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=200), st.integers(1, 50))
def test_dumps_differ_by_at_most_the_largest_file(sizes: list[int], n: int) -> None:
    files = [DataFile(path=f"{i}.parquet", size=size) for i, size in enumerate(sizes)]
    weights = [dump.size for dump in split_files(files, n)]
    assert max(weights) - min(weights) <= max(sizes)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sets(NAMES.filter(_encodable), min_size=1, max_size=8), st.integers(1, 4))
def test_any_file_name_survives_the_way_to_the_paths_files_and_back(names: set[str], n: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        dataset, metadata = Path(folder, "data"), Path(folder, "meta")
        for name in names:
            (dataset / name).mkdir(parents=True)
            (dataset / name / f"{name}.parquet").write_bytes(b"x" + name.encode("utf-8", "surrogateescape"))
        expected = sorted(file.path for file in taken_files(dataset))
        assert len(expected) == len(names)
        dumps = prepare_dumps(dataset, metadata, n_dumps=n)
        read = [read_paths_file(metadata / "dumps" / f"paths_file_{dump.index}.txt") for dump in dumps]
        assert sorted(name for paths in read for name in paths) == expected
