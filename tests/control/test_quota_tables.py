"""Tables of `lfs quota` and `quota`, as sites have them, and whose quotas are asked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from relayrun.control.chain.quota import parse_quota_output, read_quotas
from relayrun.control.rundir.storage_limits import QuotaLimit

HEAD = "     Filesystem  kbytes   quota   limit   grace   files   quota   limit   grace\n"
KIB = 1024


def limits(text: str) -> dict[tuple[str, str], tuple[int, int]] | None:
    found = parse_quota_output("lfs quota", text)
    return None if found is None else {(each.source, each.kind): (each.used, each.limit) for each in found}


def test_the_row_of_a_long_path_has_two_lines() -> None:
    text = f"Disk quotas for usr ada (uid 1000):\n{HEAD}/lustre/scratch/projects\n"
    text += "                1225350212       0 2000000000       -  714982       0 1000000       -\n"
    text += "uid 1000 is using default file quota setting\n"
    expected = {
        ("lfs quota", "bytes"): (1225350212 * KIB, 2000000000 * KIB),
        ("lfs quota", "files"): (714982, 1000000),
    }
    assert limits(text) == expected
    rows = text.splitlines()
    assert limits("\n".join(rows[2:4])) == expected  # as with -q
    assert limits(rows[3]) == expected


@pytest.mark.parametrize(
    ("row", "blocks", "files"),
    [
        ("/lustre 300* 200 400 6d23h59m58s 50 0 60 -", (300, 400), (50, 60)),
        ("/lustre 300* 200 0 expired 50* 40 0 none", (300, 200), (50, 40)),
        ("/lustre [300] 0 400 - 50 0 60 -", (300, 400), (50, 60)),
        ("/lustre [300]* 200 [400] - 50 0 60 -", (300, 400), (50, 60)),
        ("/dev/sda1 300 200 400 0 50 0 60 0", (300, 400), (50, 60)),  # quota --raw-grace
        ("/dev/sda1 300* 200 400 1795640168 50* 40 60 1795640168", (300, 400), (50, 60)),
        ("/dev/sda1 300 200 400 50 0 60", (300, 400), (50, 60)),  # quota without --raw-grace
        ("/dev/sda1 300 200 400 50* 40 60 6days", (300, 400), (50, 60)),
        ("/dev/sda1 300* 200 400 6days 50 0 60", (300, 400), (50, 60)),
        ("server-1:/export/home/of/all 300* 200 400 0 50 0 60 0", (300, 400), (50, 60)),
        ("/mnt/two words 300 200 400 - 50 0 60 -", (300, 400), (50, 60)),
    ],
)
def test_what_stands_beside_the_numbers(row: str, blocks: tuple[int, int], files: tuple[int, int]) -> None:
    assert limits(HEAD + row + "\n") == {
        ("lfs quota", "bytes"): (blocks[0] * KIB, blocks[1] * KIB),
        ("lfs quota", "files"): files,
    }


def test_numbers_may_have_units() -> None:
    text = "     Filesystem    used   quota   limit   grace   files   quota   limit   grace\n"
    text += "              .   1.5G      0k     2T       - 9038326       0       0       -\n"
    assert limits(text) == {("lfs quota", "bytes"): (round(1.5 * 2**30), 2**41)}


def test_quotas_of_a_group_and_a_project_are_told_apart() -> None:
    text = f"Disk quotas for usr ada (uid 1000):\n{HEAD}/lustre 1 0 10 - 1 0 0 -\n"
    text += f"Disk quotas for grp staff (gid 50):\n{HEAD}/lustre 2 0 20 - 2 0 0 -\n"
    text += f"Disk quotas for prj 42 (pid 42):\n{HEAD}/lustre/long/name/of/all\n  3 0 30 - 3 0 0 -\n"
    assert limits(text) == {
        ("lfs quota", "bytes"): (KIB, 10 * KIB),
        ("lfs quota of group staff", "bytes"): (2 * KIB, 20 * KIB),
        ("lfs quota of project 42", "bytes"): (3 * KIB, 30 * KIB),
    }
    text = f"Disk quotas for user ada (uid 1000): \n{HEAD}/home 1 0 10 0 1 0 0 0\n/data 2 0 20 0 1 0 0 0\n"
    assert limits(text) == {
        ("lfs quota on /home", "bytes"): (KIB, 10 * KIB),
        ("lfs quota on /data", "bytes"): (2 * KIB, 20 * KIB),
    }


def test_what_says_no_quota_is_none() -> None:
    assert limits("Disk quotas for user ada (uid 1000): none\n") == {}
    per_target = "lustre-MDT0000_UUID 12 - 16 - 5 - 0 -\n"  # lfs quota -v
    assert limits(f"{HEAD}/lustre 1 0 10 - 1 0 0 -\n{per_target}") == {("lfs quota", "bytes"): (KIB, 10 * KIB)}
    assert limits("who are you") is None
    assert limits("") is None


def planted(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {folder}/asked\n{script}\n')
    (folder / name).chmod(0o755)


def test_lustre_is_asked_for_user_group_and_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, programs = tmp_path / "place", tmp_path / "programs"
    place.mkdir()
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:/bin")
    script = """case "$*" in
project*) echo "  1042 P $3";;
*"-u "*) printf '/lustre/long/name/of\\n   1 0 10 - 1 0 0 -\\n';;
*"-g "*) echo '/lustre 2 0 20 - 2 0 0 -';;
*"-p 1042 "*) echo '/lustre 3 0 30 - 3 0 0 -';;
esac"""
    planted(programs, "lfs", script)
    group = place.stat().st_gid
    assert read_quotas(place) == [
        QuotaLimit(source="lfs quota", kind="bytes", used=KIB, limit=10 * KIB),
        QuotaLimit(source=f"lfs quota of group {group}", kind="bytes", used=2 * KIB, limit=20 * KIB),
        QuotaLimit(source="lfs quota of project 1042", kind="bytes", used=3 * KIB, limit=30 * KIB),
    ]
    asked = (programs / "asked").read_text().splitlines()
    assert f"lfs quota -q -u {os.getuid()} {place}" in asked
    planted(programs, "lfs", script.replace("1042 P", "0 -"))  # no project
    assert [each.source for each in read_quotas(place)] == ["lfs quota", f"lfs quota of group {group}"]


def test_quota_is_asked_for_the_mount_point_and_for_nfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows file systems by where they are mounted, and no folder in one."""
    place, programs = tmp_path / "a/b", tmp_path / "programs"
    place.mkdir(parents=True)
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:/bin")
    monkeypatch.setattr(os.path, "ismount", lambda path: str(path) in (str(tmp_path), "/"))
    script = f"""for last; do :; done
[ "$last" = {tmp_path} ] || exit 1
echo 'Disk quotas for user ada (uid 1000): '
echo 'server:/export/home 300* 200 400 1795640168 50 0 60 0'"""
    planted(programs, "quota", script)
    assert read_quotas(place) == [
        QuotaLimit(source="quota", kind="bytes", used=300 * KIB, limit=400 * KIB),
        QuotaLimit(source="quota", kind="files", used=50, limit=60),
    ]
    assert "--nfs-all" in (programs / "asked").read_text()
