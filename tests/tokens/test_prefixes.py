"""Prefixes below folders: found, sorted, followed through links, never twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from relayrun.errors import InputError, RelayrunError
from relayrun.leftovers import TEMPORARY_PREFIX
from relayrun.publishing import published_folder
from relayrun.tokens.shards.prefixes import find_prefixes, join_prefixes
from relayrun.tokens.shards.shard import ShardWriter

SCRIPT = Path(__file__).parents[2] / "scripts" / "tools" / "create_data_config.py"
NAMES = ["a'; echo foo", "-dash", 'quote"d', "größe 数据", "new\nline", ".hidden", "x.bin", "$HOME"]


def shard(prefix: Path, tokens: int = 3) -> str:
    writer = ShardWriter(prefix, np.uint16)
    writer.add(np.arange(tokens), [tokens])
    assert writer.finish()
    return str(prefix)


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, SCRIPT, *arguments], cwd=cwd, capture_output=True, check=False, timeout=600)


def test_prefixes_of_any_name_and_depth_come_sorted(tmp_path: Path) -> None:
    expected = sorted(shard(tmp_path / "d" / name / "deep" / name) for name in NAMES)
    expected = sorted([*expected, shard(tmp_path / "d" / "top")])
    (tmp_path / "d" / "notes.txt").write_text("no shard")
    (tmp_path / "d" / "half.bin.tmp").write_text("being written")
    assert find_prefixes([tmp_path / "d"]) == expected


def test_file_names_that_are_not_utf8_are_found_and_printed(tmp_path: Path) -> None:
    name = os.fsdecode(b"latin-\xe9")
    prefix = shard(tmp_path / name)
    assert find_prefixes([tmp_path]) == [prefix]
    assert run("-p", ".", cwd=tmp_path).stdout == os.fsencode(prefix) + b"\n"
    assert json.loads(run("-p", ".", "--json", cwd=tmp_path).stdout) == [prefix]


def test_links_are_followed_loops_end_and_a_folder_counts_once(tmp_path: Path) -> None:
    far = shard(tmp_path / "far" / "s")
    near = shard(tmp_path / "d" / "n")
    (tmp_path / "d" / "linked").symlink_to(tmp_path / "far")
    (tmp_path / "d" / "linked_too").symlink_to(tmp_path / "far")
    (tmp_path / "d" / "loop").symlink_to(tmp_path / "d")
    (tmp_path / "far" / "back").symlink_to(tmp_path / "d")
    for suffix in (".bin", ".idx"):
        (tmp_path / "d" / f"file{suffix}").symlink_to(far + suffix)
    assert find_prefixes([tmp_path / "d"]) == [str(tmp_path / "d" / "file"), str(tmp_path / "d" / "linked" / "s"), near]


def test_the_same_folder_twice_or_nested_counts_once(tmp_path: Path) -> None:
    inner = shard(tmp_path / "a" / "b" / "s")
    for paths in (["a", "a"], ["a", "a/b"], ["a/b", "a"], ["a/", "a"]):
        assert find_prefixes([tmp_path / path for path in paths]) == [inner]


def test_a_list_keeps_its_order_where_it_is_asked_for(tmp_path: Path) -> None:
    b, a, inner = (shard(tmp_path / name) for name in ("b/s", "a/s", "b/a/s"))
    folders = [tmp_path / "b", tmp_path / "a", tmp_path / "b" / "a"]
    assert find_prefixes(folders, listed=True) == [inner, b, a]
    assert find_prefixes(folders) == [a, inner, b]


def test_paths_are_absolute_but_links_in_them_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard(tmp_path / "real" / "s")
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path)
    assert find_prefixes([Path("link")]) == [str(tmp_path / "link" / "s")]


@pytest.mark.parametrize("lost", [".bin", ".idx"])
def test_half_a_shard_is_an_error_that_names_the_other_half(tmp_path: Path, lost: str) -> None:
    prefix = shard(tmp_path / "s")
    os.unlink(prefix + lost)
    with pytest.raises(InputError, match=f"s{lost}: a shard needs both"):
        find_prefixes([tmp_path])


def test_a_link_that_leads_nowhere_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "s.bin").symlink_to("gone")
    with pytest.raises(InputError, match=r"s\.bin: not a file, or a link that leads nowhere"):
        find_prefixes([tmp_path])


def test_missing_empty_and_wrong_folders_are_errors(tmp_path: Path) -> None:
    shard(tmp_path / "good" / "s")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for name, message in (("gone", "no such folder"), ("empty", "no .bin and .idx files"), ("file", "not a folder")):
        with pytest.raises(InputError, match=message):
            find_prefixes([tmp_path / "good", tmp_path / name])


def test_a_folder_that_is_being_built_is_not_read(tmp_path: Path) -> None:
    prefix = shard(tmp_path / "s")
    shard(tmp_path / f"{TEMPORARY_PREFIX}0" / "s")
    assert find_prefixes([tmp_path]) == [prefix]


def test_blanks_are_refused_in_one_line() -> None:
    assert join_prefixes(["/a/b", "/c"]) == "/a/b /c"
    with pytest.raises(InputError, match=r"/c d.*blank(?s:.*)--json or --null"):
        join_prefixes(["/a/b", "/c d"])


@pytest.mark.slow
def test_the_door_prints_one_line_json_or_null(tmp_path: Path) -> None:
    a, b = shard(tmp_path / "a" / "s"), shard(tmp_path / "b" / "s")
    assert run("-p", "b,  a", cwd=tmp_path).stdout == f"{b} {a}\n".encode()  # a list keeps its order
    assert run("--paths", "b", "-p", "a,", cwd=tmp_path).stdout == f"{b} {a}\n".encode()
    spaced = shard(tmp_path / "c" / "with blank")
    refused = run("-p", "a,c", cwd=tmp_path)
    assert (refused.returncode, refused.stdout) == (1, b"")
    assert spaced.encode() in refused.stderr
    assert json.loads(run("-p", "a,c", "--json", cwd=tmp_path).stdout) == [a, spaced]
    assert run("-p", "a,c", "--null", cwd=tmp_path).stdout == f"{a}\0{spaced}\0".encode()


def test_the_door_reports_a_missing_folder_without_a_traceback(tmp_path: Path) -> None:
    result = run("-p", "gone", cwd=tmp_path)
    assert result.returncode == 1
    assert result.stdout == b""
    assert result.stderr.decode().startswith(f"error: {tmp_path}/gone: no such folder")
    assert run("-p", " , ", cwd=tmp_path).returncode == 2


def test_the_door_imports_nothing_heavy() -> None:
    code = (
        "import sys, relayrun.tokens.shards.prefixes\n"
        "print(sorted({'torch', 'datatrove', 'numpy', 'transformers'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=600).stdout == b"[]\n"


def test_a_replaced_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    final = tmp_path / "deep" / "final"
    with published_folder(final, replaces=str) as building:
        (building / "one").write_text("1")
        assert not final.exists()
    with (
        pytest.raises(RelayrunError, match="cannot be written: No such file"),
        published_folder(final, replaces=str) as building,
    ):
        (building / "gone" / "two").write_text("2")
    assert os.listdir(final) == ["one"]
    with published_folder(final, replaces=str) as building:
        (building / "three").write_text("3")
    assert os.listdir(final) == ["three"]
    assert os.listdir(final.parent) == ["final"]


def test_what_a_killed_run_left_aside_is_removed_but_not_what_a_live_one_builds(tmp_path: Path) -> None:
    program = f"""
import os, signal
from pathlib import Path
from relayrun.publishing import published_folder
with published_folder(Path({str(tmp_path)!r}, "killed")) as building:
    (building / "sub").mkdir()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=600).returncode == -signal.SIGKILL
    lock, dead = sorted(os.listdir(tmp_path))
    assert (lock, dead.startswith(TEMPORARY_PREFIX)) == (".killed.lock", True)
    far = tmp_path / f"{TEMPORARY_PREFIX}01234567-1-2-3-of-another-node"  # whose locks this node may not see
    far.mkdir()
    with published_folder(tmp_path / "live", replaces=str) as building:
        with published_folder(tmp_path / "other", replaces=str):
            pass
        assert building.exists()
    assert sorted(os.listdir(tmp_path)) == sorted([far.name, "live", "other"])
    os.utime(far, (1, 1))
    with published_folder(tmp_path / "other", replaces=str):
        pass
    assert sorted(os.listdir(tmp_path)) == ["live", "other"]


@pytest.mark.parametrize("exchange", [True, False], ids=["renameat2", "rename"])
@pytest.mark.parametrize("call", range(3))
def test_a_kill_at_any_rename_loses_neither_the_old_folder_nor_the_new_one(
    tmp_path: Path, exchange: bool, call: int
) -> None:
    """Between the two renames both stood aside, and the next command beside them deleted both."""
    program = f"""
import os, signal
from itertools import count
from pathlib import Path
from relayrun import leftovers, publishing
calls = count()
def cut(rename):
    def call(*given, **more):
        if next(calls) == {call}:
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(*given, **more)
    return call
os.rename = cut(os.rename)
leftovers._rename = cut(leftovers._rename) if {exchange} else lambda *_: False
leftovers.shutil.rmtree = cut(leftovers.shutil.rmtree)
with publishing.published_folder(Path({str(tmp_path)!r}, "mix"), replaces=str) as building:
    (building / "new").touch()
"""
    (tmp_path / "mix").mkdir()
    (tmp_path / "mix" / "old").touch()
    killed = subprocess.run([sys.executable, "-c", program], check=False).returncode
    assert killed == (0 if exchange and call == 2 else -signal.SIGKILL)
    with published_folder(tmp_path / "other", replaces=str):
        pass
    assert sorted(os.listdir(tmp_path)) == ["mix", "other"]
    assert os.listdir(tmp_path / "mix") == (["old"] if call == 0 or (call == 1 and not exchange) else ["new"])


def test_a_link_to_a_folder_keeps_pointing_to_the_replaced_one(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "link").symlink_to("store")
    with published_folder(tmp_path / "link", replaces=str) as building:
        (building / "one").write_text("1")
    assert (tmp_path / "link").is_symlink()
    assert os.listdir(tmp_path / "store") == ["one"]
