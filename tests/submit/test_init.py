"""`relayrun init`: the next command that it prints passes as it is printed, for every site file."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from relayrun import places
from relayrun.cli import main
from relayrun.errors import ConfigError, InputError
from relayrun.submit import project

FOLDER = "my first project"


@pytest.mark.slow
@pytest.mark.parametrize("cluster", project.site_names())
def test_the_next_command_that_is_printed_passes(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No site's Slurm can be asked here, and the check says so: nothing else of it is left out."""
    for name in os.environ:
        if name.startswith(("SLURM", "SBATCH")):
            monkeypatch.delenv(name)
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("scontrol", "sbatch"):  # Slurm's own look for a controller for ten seconds
        (programs / name).write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2\nexit 1\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.chdir(tmp_path)
    assert main(["init", FOLDER, "--cluster", cluster]) == 0
    printed = [shlex.split(line) for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    enter, check, submit = printed
    assert (enter, check[:2]) == (["cd", FOLDER], ["relayrun", "check"])
    assert submit[: len(check)] == ["relayrun", "submit", *check[2:]]
    monkeypatch.chdir(enter[1])
    assert main(check[1:]) == 0, capsys.readouterr().out
    said = capsys.readouterr().out
    assert "0 errors" in said
    warned = {line.split()[1] for line in said.splitlines() if line.startswith("warning")}
    site = Path(f"configs/clusters/{cluster}.yaml").read_text(encoding="utf-8")
    slurm = "scheduler: slurm" in site
    assert ("whether Slurm takes the job is not known" in said) == slurm
    assert warned == ({"slurm.test"} if slurm else set()) | ({"job.site"} if "not_checked:" in site else set())


def made(folder: Path, *options: str, capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """Make a project; return the commands that are printed."""
    assert main(["init", str(folder), "--cluster", "local", *options]) == 0
    return [shlex.split(line) for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]


def test_a_program_of_your_own_is_checked_as_it_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    enter, check, submit = made(tmp_path / "my loop", "--template", "command", capsys=capsys)
    monkeypatch.chdir(enter[1])
    assert "project: my-loop" in Path(project.RUN_CONFIG).read_text(encoding="utf-8")
    assert main(check[1:]) == 0, capsys.readouterr().out
    assert "0 errors" in capsys.readouterr().out
    assert submit[1:] == ["submit", *check[2:]]
    assert not Path("launchers").exists()


@pytest.mark.long
def test_a_program_of_your_own_runs_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    enter, _, submit = made(tmp_path / "loop", "--template", "command", capsys=capsys)
    monkeypatch.chdir(enter[1])
    assert main(submit[1:]) == 0
    assert main(["status", "loop/my-run"]) == 0
    assert "200" in capsys.readouterr().out


@pytest.mark.long
def test_text_becomes_tokens_as_it_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    enter, *commands = made(tmp_path / "tokens", "--template", "tokenize", capsys=capsys)
    monkeypatch.chdir(enter[1])
    for words in commands:
        assert main(words[1:]) == 0, capsys.readouterr()
    assert list(Path("data/tokens").rglob("*.bin"))


def test_a_checkout_of_megatron_lm_is_all_that_its_template_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    enter, check, _ = made(tmp_path / "meg", "--template", "megatron-lm", capsys=capsys)
    monkeypatch.chdir(enter[1])
    assert main(check[1:]) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert len(errors) == 1
    assert "no checkout of Megatron-LM" in errors[0]
    if checkout := os.environ.get("MEGATRON_LM_DIR"):
        assert main([*check[1:], "--set", f"megatron_lm.dir={checkout}"]) == 0


def test_a_site_file_of_your_own_is_copied(tmp_path: Path) -> None:
    site = tmp_path / "our-site.yaml"
    site.write_text("name: our-site\nscheduler: slurm\njob: {gpus_per_node: 2, partition: gpu}\n", encoding="utf-8")
    project.make_project(tmp_path / "p", cluster=str(site))
    assert (tmp_path / "p/configs/clusters/our-site.yaml").read_bytes() == site.read_bytes()
    run = (tmp_path / "p" / project.RUN_CONFIG).read_text(encoding="utf-8")
    assert "cluster: our-site" in run
    assert "ntasks_per_node: 2" in run
    with pytest.raises(ConfigError, match="unknown cluster"):
        project.make_project(tmp_path / "q", cluster=str(tmp_path / "gone.yaml"))
    assert not (tmp_path / "q").exists()


def test_a_project_in_a_project_is_refused_unless_asked(tmp_path: Path) -> None:
    project.make_project(tmp_path / "p", cluster="local")
    project.make_project(tmp_path / "p", cluster="local")  # the same command goes on
    with pytest.raises(InputError, match=f"this lies in the project {tmp_path / 'p'}"):
        project.make_project(tmp_path / "p/deep/q", cluster="local")
    assert not (tmp_path / "p/deep").exists()
    with pytest.raises(InputError, match="this lies in the project"):
        project.make_project(places.CODE_ROOT / "q", cluster="local")
    assert project.make_project(tmp_path / "p/deep/q", cluster="local", inside=True)
