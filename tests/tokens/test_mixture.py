"""The folder of a mixture: links, names, summary, replacement and refusals."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from relayrun.errors import ConfigError, InputError
from relayrun.tokens.mixture.create_mixture import create_mixture, distinct_names
from relayrun.tokens.mixture.shard_selection import normalise_weights, shuffled_order
from relayrun.tokens.shards.prefixes import SUMMARY_JSON, SUMMARY_TEXT, find_prefixes
from relayrun.tokens.shards.shard import Shard, ShardWriter

SCRIPT = Path(__file__).parents[2] / "scripts" / "tools" / "create_data_mixture.py"


def shard(prefix: Path, tokens: int, dtype: type[np.generic] = np.uint16) -> str:
    writer = ShardWriter(prefix, dtype)
    writer.add(np.arange(tokens) % 100, [tokens])
    assert writer.finish()
    return str(prefix)


def dataset(folder: Path, sizes: list[int], dtype: type[np.generic] = np.uint16) -> Path:
    for i, tokens in enumerate(sizes):
        shard(folder / f"dump_{i % 3}" / f"{i:05d}_tokens", tokens, dtype)
    return folder


def links(mixture: Path) -> dict[str, str]:
    """Every file of a mixture but its summaries, and where it leads."""
    return {
        os.path.relpath(os.path.join(root, name), mixture): os.readlink(os.path.join(root, name))
        for root, _, names in os.walk(mixture)
        for name in names
        if name not in (SUMMARY_TEXT, SUMMARY_JSON)
    }


def test_tokens_count_not_bytes(tmp_path: Path) -> None:
    narrow = dataset(tmp_path / "narrow", [100] * 20, np.uint16)
    wide = dataset(tmp_path / "wide", [100] * 20, np.int32)
    create_mixture([narrow, wide], [1, 1], tmp_path / "m")
    for name in ("narrow", "wide"):
        found = [Shard.open(prefix) for prefix in find_prefixes([tmp_path / "m" / name])]
        assert sum(shard.tokens for shard in found) == 2000


def test_links_are_absolute_lead_to_real_files_and_keep_their_names(tmp_path: Path) -> None:
    shard(tmp_path / "store" / "x" / "one", 10)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").symlink_to("../store/x")
    b = dataset(tmp_path / "b", [10])
    create_mixture([tmp_path / "a", b], [1, 1], tmp_path / "m")
    assert links(tmp_path / "m") == {
        f"{link}{suffix}": f"{tmp_path}/{target}{suffix}"
        for link, target in (("a/one", "store/x/one"), ("b/00000_tokens", "b/dump_0/00000_tokens"))
        for suffix in (".bin", ".idx")
    }
    os.rename(tmp_path / "m", tmp_path / "moved")
    assert [Shard.open(p).tokens for p in find_prefixes([tmp_path / "moved"])] == [10, 10]


def test_equal_folder_names_trailing_slashes_and_equal_shard_names_stay_apart(tmp_path: Path) -> None:
    for folder in ("a/data", "b/data"):
        for part in ("p", "q"):
            shard(tmp_path / folder / part / "same", 10)
        shard(tmp_path / folder / "only", 10)
    create_mixture([Path(f"{tmp_path}/a/data/"), Path(f"{tmp_path}/b/data//")], [1, 1], tmp_path / "m")
    expected = {f"{name}/{link}" for name in ("data-1", "data-2") for link in ("p-same", "q-same", "only")}
    assert {link[:-4] for link in links(tmp_path / "m")} == expected
    assert len(set(links(tmp_path / "m").values())) == 12


def test_file_names_of_any_kind_work(tmp_path: Path) -> None:
    names = ["a'; echo foo", "-dash", 'quote"d', "größe 数据", "new\nline", os.fsdecode(b"latin-\xe9"), "n" * 240]
    folder = tmp_path / "-odd 'folder'"
    for name in names:
        shard(folder / name / name, 10)
        shard(folder / f"2{name[:200]}" / name, 10)
    create_mixture([folder], [1], tmp_path / "m")
    assert len(find_prefixes([tmp_path / "m"])) == 2 * len(names)
    summary = json.loads((tmp_path / "m" / SUMMARY_JSON).read_text())
    assert {entry["prefix"] for entry in summary["shards"]} == set(find_prefixes([folder]))
    assert {f"{tmp_path}/m/{entry['link']}" for entry in summary["shards"]} == set(find_prefixes([tmp_path / "m"]))


def test_the_summary_tells_tokens_prefixes_sizes_and_weights(tmp_path: Path) -> None:
    a, b = dataset(tmp_path / "a", [100] * 10), dataset(tmp_path / "b", [50] * 100, np.int32)
    text = create_mixture([a, b], [3, 1], tmp_path / "m", seed=7)
    assert (tmp_path / "m" / SUMMARY_TEXT).read_text() == text
    summary = json.loads((tmp_path / "m" / SUMMARY_JSON).read_text())
    tokens = {entry["name"]: entry["tokens"] for entry in summary["datasets"]}
    assert tokens["a"] == 1000
    assert tokens["b"] == 350  # shards of one document
    assert summary["seed"] == 7
    assert summary["tokens"] == sum(tokens.values()) == sum(entry["tokens"] for entry in summary["shards"])
    assert [entry["weight"] for entry in summary["datasets"]] == [0.75, 0.25]
    row = text.splitlines()[1].split()
    assert row == ["a", "1,000", "1,000", "1.000", "1,333", "10", "10", "0.000", "0.7500", "0.7407", str(a)]
    assert [entry["exhausted_after_tokens"] for entry in summary["datasets"]] == [1333, 20000]
    assert "a is used up" in text


def test_a_second_run_leaves_no_stale_link_and_the_same_input_gives_the_same_mixture(tmp_path: Path) -> None:
    a, b = dataset(tmp_path / "a", [10] * 30), dataset(tmp_path / "b", [10] * 30)
    create_mixture([a, b], [0.5, 0.5], tmp_path / "m")
    first, text = links(tmp_path / "m"), (tmp_path / "m" / SUMMARY_JSON).read_bytes()
    create_mixture([a, b], [0.9, 0.1], tmp_path / "m", seed=1)
    second = links(tmp_path / "m")
    assert len(second) == 2 * 33
    assert len(first) == 2 * 60
    create_mixture([a, b], [5, 5], tmp_path / "m")
    assert links(tmp_path / "m") == first
    assert (tmp_path / "m" / SUMMARY_JSON).read_bytes() == text
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "m"]


def test_a_failed_run_leaves_the_former_mixture_as_it_was(tmp_path: Path) -> None:
    a = dataset(tmp_path / "a", [10] * 3)
    create_mixture([a], [1], tmp_path / "m")
    before = links(tmp_path / "m")
    os.truncate(a / "dump_1" / "00001_tokens.bin", 3)
    with pytest.raises(InputError, match=r"00001_tokens\.bin: token file is torn"):
        create_mixture([a], [1], tmp_path / "m")
    assert links(tmp_path / "m") == before
    assert sorted(os.listdir(tmp_path)) == ["a", "m"]


def test_a_kill_in_the_middle_leaves_the_former_mixture_and_the_next_run_tidies_up(tmp_path: Path) -> None:
    a = dataset(tmp_path / "a", [10] * 6)
    create_mixture([a], [1], tmp_path / "m")
    before = links(tmp_path / "m")
    shard(a / "dump_0" / "new", 10)
    code = """
import os, signal, sys
import relayrun.tokens.mixture.create_mixture as mixture
made, symlink = [], os.symlink
def killing(*arguments):
    symlink(*arguments)
    made.append(arguments)
    if len(made) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
os.symlink = killing
mixture.create_mixture([mixture.Path("a")], [1], mixture.Path("m"))
"""
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False, timeout=600).returncode
        == -signal.SIGKILL
    )
    assert links(tmp_path / "m") == before
    aside = [name for name in os.listdir(tmp_path) if name.startswith(".tmp-")]  # what the killed run built
    assert sorted(os.listdir(tmp_path)) == sorted(["a", "m", ".m.lock", *aside])
    assert len(aside) == 1
    create_mixture([a], [1], tmp_path / "m")
    assert len(links(tmp_path / "m")) == 2 * 7
    assert sorted(os.listdir(tmp_path)) == ["a", "m"]


@pytest.mark.parametrize("foreign", ["notes.txt", "a/notes.txt", "b/00000_tokens.bin", "a/00000_tokens.bin"])
def test_nothing_that_the_tool_did_not_make_is_deleted(tmp_path: Path, foreign: str) -> None:
    a = dataset(tmp_path / "a", [10] * 3)
    create_mixture([a], [1], tmp_path / "m")
    path = tmp_path / "m" / foreign
    path.unlink(missing_ok=True)  # a file in place of a link is a copy of data, not a link of ours
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")
    with pytest.raises(InputError, match="something that no former mixture left there"):
        create_mixture([a], [1], tmp_path / "m")
    assert path.read_text() == "mine"


def test_an_output_that_is_no_mixture_is_refused_and_an_empty_one_filled(tmp_path: Path) -> None:
    a = dataset(tmp_path / "a", [10])
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / SUMMARY_JSON).write_text("{}")
    with pytest.raises(InputError, match="no former mixture"):
        create_mixture([a], [1], tmp_path / "m")
    (tmp_path / "m" / SUMMARY_JSON).unlink()
    create_mixture([a], [1], tmp_path / "m")
    assert len(links(tmp_path / "m")) == 2
    with pytest.raises(InputError, match="exists and is not a folder"):
        create_mixture([a], [1], tmp_path / "a" / ".." / "m" / SUMMARY_TEXT)


def test_output_and_input_inside_each_other_are_refused(tmp_path: Path) -> None:
    a = dataset(tmp_path / "d" / "a", [10])
    (tmp_path / "link").symlink_to(tmp_path / "d")
    for output in (a, a / "m", tmp_path / "d", tmp_path / "link", tmp_path / "link" / "a" / "m"):
        with pytest.raises(InputError, match="inside each other"):
            create_mixture([a], [1], output)
    assert sorted(os.listdir(tmp_path / "d")) == ["a"]


def test_no_shard_enters_twice_through_overlapping_folders_or_links(tmp_path: Path) -> None:
    a = dataset(tmp_path / "a", [10] * 3)
    (tmp_path / "b").mkdir()
    for suffix in (".bin", ".idx"):
        (tmp_path / "b" / f"s{suffix}").symlink_to(a / "dump_0" / f"00000_tokens{suffix}")
    for folders in ([a, a], [a, a / "dump_1"], [a, tmp_path / "b"]):
        with pytest.raises(InputError, match="its text also stands in"):
            create_mixture(folders, [1, 1], tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_a_dataset_without_tokens_is_an_error(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "a" / "s", np.uint16)
    writer.add([], [0])
    assert writer.finish()
    with pytest.raises(InputError, match="hold no tokens"):
        create_mixture([tmp_path / "a"], [1], tmp_path / "m")


@pytest.mark.parametrize("weights", [[0.0, 1.0], [-1.0, 2.0], [math.nan, 1.0], [math.inf, 1.0], [1e-320, 1e300]])
def test_weights_that_are_not_positive_numbers_are_errors(weights: list[float]) -> None:
    with pytest.raises(ConfigError, match="weight"):
        normalise_weights(weights)


def test_weights_are_normalised() -> None:
    assert normalise_weights([4, 1]) == [0.8, 0.2]
    assert normalise_weights([1e308, 1e308]) == [0.5, 0.5]


def test_the_order_depends_on_seed_and_names_only() -> None:
    names = [f"dump/{i}" for i in range(100)]
    order = shuffled_order(names, seed=0, dataset=0)
    assert sorted(order) == list(range(100))
    assert order != list(range(100))
    assert order != shuffled_order(names, seed=1, dataset=0)
    assert order != shuffled_order(names, seed=0, dataset=1)
    reversed_order = shuffled_order(names[::-1], seed=0, dataset=0)
    assert [names[i] for i in order] == [names[::-1][i] for i in reversed_order]
    assert [names[i] for i in order[:4]] == ["dump/99", "dump/95", "dump/32", "dump/22"]  # for ever the same


def test_distinct_names() -> None:
    assert distinct_names(["a", "b", "a"], ["x-a", "x-b", "y-a"]) == ["x-a", "b", "y-a"]
    assert distinct_names(["a", "a", "x-a"], ["x-a", "y-a", "z"]) == ["x-a-1", "y-a", "x-a"]
    assert distinct_names(["a", "a"], ["f" * 300, "g" * 300]) == ["a", "a-1"]
    assert distinct_names(["a"], ["a-1"], reserved=["a"]) == ["a-1"]


@pytest.mark.slow
def test_the_door(tmp_path: Path) -> None:
    dataset(tmp_path / "a", [10] * 20)
    dataset(tmp_path / "b", [10] * 20)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, SCRIPT, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600
        )

    done = run("--folders", "a/", "b", "--weights", "0.8", "0.2", "--output", "m")
    assert done.returncode == 0, done.stderr
    assert done.stdout == (tmp_path / "m" / SUMMARY_TEXT).read_text()
    assert len(links(tmp_path / "m")) == 2 * 25
    for weights, message in (
        (["1"], "2 folders but 1 weights"),
        (["-0.5", "1.5"], "positive number, not -0.5"),
        (["nan", "1"], "positive number, not nan"),
    ):
        failed = run("--folders", "a", "b", "--weights", *weights, "--output", "other")
        assert failed.returncode == 1
        assert failed.stderr.startswith("error: --weights: ")
        assert message in failed.stderr
        assert not (tmp_path / "other").exists()


def test_each_index_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = ShardWriter(tmp_path / "a", np.uint16)
    writer.add([1, 2, 3], [1, 2])
    writer.finish()
    opened: list[str] = []
    real = open

    def counted(name: str, *options: object, **more: object) -> object:
        opened.append(name)
        return real(name, *options, **more)  # type: ignore[call-overload]

    monkeypatch.setattr("builtins.open", counted)
    assert Shard.open(tmp_path / "a").tokens == 3
    assert opened == [f"{tmp_path}/a.idx"]
