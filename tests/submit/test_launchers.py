"""The sbatch scripts of launchers/: what their blocks show, what holds over what, and their headers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from relayrun.cli import main
from relayrun.cli.watch import status
from relayrun.config.compose import resolve
from relayrun.config.compose.schema import CommonConfig, RunConfig
from relayrun.errors import ConfigError
from relayrun.slurmtime import parse_time
from relayrun.submit import submission
from relayrun.submit.launcher_overrides import (
    PROFILER_VARIABLE,
    environment_overrides,
    job_overrides,
    setting_variables,
)
from tests.megatron_lm.stand_in import stand_in

ROOT = Path(__file__).resolve().parents[2]
LAUNCHERS = sorted((ROOT / "launchers").glob("submit-*.sh"))
SETTING = re.compile(r'^export (\w+)="\$\{\1:-(.*)\}" +# (\S+)(?:; |$)', re.M)
"""A line of a block: name, value (empty if nobody set it), and the value of the YAML behind it."""
NONE = "none"

every_launcher = pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda path: path.stem)


def run_config(launcher: Path) -> Path:
    """The run config that a launcher names."""
    found = re.search(r'^export CONFIG="\$\{CONFIG:-(.+?)\}"', launcher.read_text(), re.M)
    assert found
    return ROOT / found[1]


def environment(launcher: Path, tmp_path: Path, **settings: str) -> dict[str, str]:
    """What the launcher hands to `relayrun launch`, by Bash."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nenv -0\n")
    python.chmod(0o755)
    given = {"PATH": os.environ["PATH"], "PYTHON": str(python), **settings}
    done = subprocess.run(
        ["bash", launcher, "--dry-run"],
        env=given,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    return dict(line.split("=", 1) for line in done.stdout.split("\0") if line)


def launched(launcher: Path, tmp_path: Path, **settings: str) -> CommonConfig:
    """The config of the run that a launcher would begin."""
    found = environment(launcher, tmp_path, **settings)
    config = ROOT / found["CONFIG"]
    return resolve.load_run_config(config, environment_overrides(found, trainer=resolve.read_trainer(config)))


def native(config: CommonConfig) -> RunConfig:
    assert isinstance(config, RunConfig)
    return config


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of launchers/ and configs/ to edit."""
    for folder in ("launchers", "configs"):
        shutil.copytree(ROOT / folder, tmp_path / "checkout" / folder)
    return tmp_path / "checkout"


def edit(path: Path, *changes: tuple[str, str]) -> None:
    text = path.read_text()
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new, 1)
    path.write_text(text)


def batch(config: CommonConfig) -> tuple[int, int]:
    config = native(config)
    return config.training.micro_batch_size, config.training.global_batch_size


def test_an_edited_yaml_holds_where_the_block_is_untouched(checkout: Path, tmp_path: Path) -> None:
    config = checkout / "configs/runs/llama3-8b.yaml"
    edit(config, ("micro_batch_size: 1", "micro_batch_size: 2"), ("global_batch_size: 128", "global_batch_size: 256"))
    assert batch(launched(checkout / "launchers/submit-llama3-8b.sh", tmp_path, CONFIG=str(config))) == (2, 256)


def test_what_is_typed_into_the_block_holds_over_the_yaml_and_the_environment_over_both(
    checkout: Path, tmp_path: Path
) -> None:
    launcher, config = checkout / "launchers/submit-llama3-8b.sh", checkout / "configs/runs/llama3-8b.yaml"
    edit(launcher, ('"${MBS:-}"', '"${MBS:-2}"'), ('"${GBS:-}"', "512"))  # a plain value is typed as often
    found = launched(launcher, tmp_path, CONFIG=str(config))
    assert batch(found) == (2, 512)
    assert native(found).training.steps == 5000
    assert batch(launched(launcher, tmp_path, CONFIG=str(config), MBS="4")) == (4, 512)


def test_a_run_config_holds_over_the_defaults_of_its_cluster(checkout: Path, tmp_path: Path) -> None:
    launcher, config = checkout / "launchers/submit-llama3-8b.sh", checkout / "configs/runs/llama3-8b.yaml"
    assert launched(launcher, tmp_path, CONFIG=str(config)).job.exclusive  # alps.yaml
    edit(config, ("job:\n", "job:\n  exclusive: false\n"))
    assert not launched(launcher, tmp_path, CONFIG=str(config)).job.exclusive


@every_launcher
@pytest.mark.parametrize("name", ["alps", "generic", "test"])
def test_every_launcher_goes_to_every_cluster(launcher: Path, name: str, tmp_path: Path) -> None:
    assert launched(launcher, tmp_path, CLUSTER=name).cluster.name == name


def test_a_launcher_with_another_config_begins_that_run(tmp_path: Path) -> None:
    found = launched(ROOT / "launchers/submit-llama3-8b.sh", tmp_path, CONFIG="configs/runs/llama3-70b.yaml")
    assert found == resolve.load_run_config(ROOT / "configs/runs/llama3-70b.yaml")


def test_a_launchers_name_takes_the_nodes_that_sbatch_was_told(tmp_path: Path) -> None:
    launcher = ROOT / "launchers/submit-llama3-8b.sh"
    settings = {"EXP_NAME": "llama3-8b-{nodes}-nodes"}
    assert launched(launcher, tmp_path, **settings).name == "llama3-8b-16-nodes"
    found = environment(launcher, tmp_path, **settings)
    job = job_overrides({"SLURM_JOB_NUM_NODES": "8"})
    config = resolve.load_run_config(ROOT / found["CONFIG"], [*environment_overrides(found), *job])
    assert config.name == "llama3-8b-8-nodes"


@every_launcher
def test_an_untouched_block_sets_nothing(launcher: Path, tmp_path: Path) -> None:
    trainer = resolve.read_trainer(run_config(launcher))
    assert environment_overrides(environment(launcher, tmp_path), trainer=trainer) == []
    assert launched(launcher, tmp_path) == resolve.load_run_config(run_config(launcher))


def setting(config: CommonConfig, path: str) -> Any:
    """A setting by its name with dots."""
    value: Any = config
    for part in path.split("."):
        value = getattr(value, part)
    return value


def stale(launcher: Path, path: Path) -> list[str]:
    """Settings of a block that show something else than the run config at `path` says.

    A value that is shown, typed into its line, must change nothing; `none` stands for what the config leaves out.
    """
    config, wrong = resolve.load_run_config(path), []
    names = setting_variables(config.trainer)
    for name, _, shown in SETTING.findall(launcher.read_text()):
        if name == PROFILER_VARIABLE:
            true = shown == ("true" if config.debug.profile == "nsys" else "false")
        elif shown == NONE:
            true = not setting(config, names[name])
        else:
            given = environment_overrides({name: shown}, trainer=config.trainer)
            true = setting(config, names[name]) not in (None, [], {}) and resolve.load_run_config(path, given) == config
        if not true:
            wrong.append(name)
    return wrong


@every_launcher
def test_the_block_shows_what_the_yaml_says(launcher: Path) -> None:
    offered = set(re.findall(r"^export (\w+)=", launcher.read_text(), re.M))
    assert {name: value for name, value, _ in SETTING.findall(launcher.read_text())} == dict.fromkeys(
        offered - {"CONFIG"}, ""
    )
    assert stale(launcher, run_config(launcher)) == []


@pytest.mark.parametrize(
    ("line", "other", "name"),
    [
        ("global_batch_size: 128", "global_batch_size: 256", "GBS"),
        ("tensorboard: true", "tensorboard: false", "TENSORBOARD"),
        ("checkpoint:\n", "checkpoint:\n  load: logs/runs/a/b\n", "LOAD"),
        ("tracking:\n", "debug: {profile: nsys}\n\ntracking:\n", "NSYS_PROFILER"),
        ("name: llama3-8b", "name: llama3-9b", "EXP_NAME"),
    ],
)
def test_a_block_that_went_stale_is_found(checkout: Path, line: str, other: str, name: str) -> None:
    config = checkout / "configs/runs/llama3-8b.yaml"
    edit(config, (line, other))
    assert stale(checkout / "launchers/submit-llama3-8b.sh", config) == [name]


def header(script: str) -> dict[str, str]:
    """The options of sbatch in a script, in one way of writing them."""
    options = {name: value for name, _, value in re.findall(r"^#SBATCH --([\w-]+)(=(\S+))?$", script, re.M)}
    options["time"] = str(parse_time(options["time"]))
    options["signal"] = options["signal"].replace("SIGUSR2", "USR2")
    return options


ELSEWHERE = {"job-name", "output", "error", "open-mode"}
"""What the first job cannot have in its header: decision 0003. A site's partition, account and such are sbatch's."""


@every_launcher
def test_the_header_asks_for_what_the_yaml_says(launcher: Path, tmp_path: Path) -> None:
    of_site: list[str] = []
    if resolve.read_trainer(run_config(launcher)) == "megatron-lm":
        of_site = [f"megatron_lm.dir={stand_in(tmp_path / 'checkout')}", "data.mock_data=true"]
    config = resolve.load_run_config(run_config(launcher), of_site)
    asked, rendered = header(launcher.read_text()), header(submission.dry_run(config))
    assert without(asked, ELSEWHERE) == without(rendered, ELSEWHERE | config.job.placement.keys())


def without(options: dict[str, str], names: set[str]) -> dict[str, str]:
    return {name: value for name, value in options.items() if name not in names}


def test_a_log_folder_that_cannot_be_written_is_one_clear_error(checkout: Path) -> None:
    (checkout / "logs").write_text("a file where the folder should be")
    given = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "demo", "PYTHON": "/bin/false"}
    done = subprocess.run(
        ["bash", "-c", f"source '{checkout}/launchers/lib/launch.sh'"],
        env=given,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 1
    assert f"error: {checkout}/logs/slurm/training: the folder of the jobs' logs cannot be written" in done.stderr
    assert "->" in done.stderr
    assert done.stdout == ""


def test_a_note_for_a_restart_that_cannot_be_written_does_not_end_the_first_job(checkout: Path, tmp_path: Path) -> None:
    (checkout / "logs/slurm/training/.run-of-job-7").mkdir(parents=True)  # as good as a full disk
    run = tmp_path / "run"
    run.mkdir()
    (run / "job.sbatch").write_text(f"echo began >{run}/began\n")
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {run}\n")
    python.chmod(0o755)
    given = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "demo", "PYTHON": str(python)}
    command = ["bash", "-c", f"CONFIG=a.yaml; source '{checkout}/launchers/lib/launch.sh'"]
    subprocess.run(command, env=given, capture_output=True, check=True, timeout=600)
    assert (run / "began").read_text() == "began\n"


def in_job(
    checkout: Path, tmp_path: Path, answer: str, *words: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Launch in job 7 with a Python that does as `answer` says."""
    (tmp_path / "python").write_text(f"#!/bin/sh\n{answer}\n")
    (tmp_path / "python").chmod(0o755)
    job = {
        "PATH": os.environ["PATH"],
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "demo",
        "PYTHON": str(tmp_path / "python"),
    }
    command = ["bash", "-c", f"CONFIG=a.yaml; source '{checkout}/launchers/lib/launch.sh'", "launcher", *words]
    return subprocess.run(command, env=job | variables, capture_output=True, text=True, check=False, timeout=600)


REFUSAL = (
    r"""printf 'warning: W&B is off\nerror: lr_scheduler.warmup_steps: more than steps\n  -> lower it\n' >&2; exit 3"""
)


def test_a_start_that_is_refused_in_a_job_leaves_a_record_that_status_shows(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkout / ".relayrun").touch()
    monkeypatch.chdir(checkout)
    done = in_job(checkout, tmp_path, REFUSAL)
    log = checkout / "logs/slurm/training/demo-7"
    told = "lr_scheduler.warmup_steps: more than steps -> lower it"
    assert (done.returncode, done.stdout) == (3, f"logs: {log}.out and .err\nrefused: error: {told} \n")
    assert "warning: W&B is off\nerror: " in log.with_suffix(".err").read_text()
    assert main(["status"]) == 0
    line = f"refused: job 7 (demo), 0 s ago: {told}; its log: {log}.err\n"
    assert re.sub(r"\d s ago", "0 s ago", capsys.readouterr().out).endswith(line)
    assert main(["status", "my-project/my-run"]) == 1
    assert re.sub(r"\d s ago", "0 s ago", capsys.readouterr().err).startswith(f"{line}error: ")
    run = tmp_path / "run"
    run.mkdir()
    (run / "job.sbatch").write_text(f"echo began >{run}/began\n")
    done = in_job(checkout, tmp_path, f"echo a warning >&2; echo {run}", SLURM_JOB_ID="8")
    assert (run / "began").exists()
    assert "a warning\n" in (checkout / "logs/slurm/training/demo-8.err").read_text()
    assert main(["status"]) == 0
    assert "refused: job" not in capsys.readouterr().out


def test_a_full_disk_is_a_line_of_the_list_of_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ".relayrun").touch()
    monkeypatch.chdir(tmp_path)
    assert main(["status"]) == 0
    assert "disk full" not in capsys.readouterr().out
    monkeypatch.setattr(status, "free_space", lambda _: 4096)
    assert main(["status"]) == 0
    assert f"disk full: no job can record anything below {tmp_path}/logs/runs; " in capsys.readouterr().out


def test_a_record_of_a_refused_start_that_cannot_be_written_ends_no_job(checkout: Path, tmp_path: Path) -> None:
    (checkout / "logs/slurm/training/demo-7.refused").mkdir(parents=True)  # as good as a full disk
    run = tmp_path / "run"
    run.mkdir()
    (run / "job.sbatch").write_text(f"echo began >{run}/began\n")
    in_job(checkout, tmp_path, f"echo {run}")
    assert (run / "began").exists()


@pytest.mark.parametrize(
    ("words", "variables", "told"),
    [
        (["--check"], {}, "error: sbatch hands --check to the job, which takes no options: bash LAUNCHER --check"),
        ([], {"SLURM_ARRAY_JOB_ID": "6"}, "error: a launcher begins one run, not one for each task of an array"),
        (["--array=1-3"], {"SLURM_JOB_ID": ""}, "error: a launcher begins one run, not one for each task of an array"),
    ],
)
def test_what_a_launcher_cannot_do_is_one_line_before_it_runs(
    checkout: Path, tmp_path: Path, words: list[str], variables: dict[str, str], told: str
) -> None:
    done = in_job(checkout, tmp_path, "exit 9", *words, **variables)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(told)
    assert done.stderr.count("\n") == 1


def test_a_launcher_that_was_copied_or_comes_by_standard_input_says_so(tmp_path: Path) -> None:
    launcher = ROOT / "launchers/submit-demo.sh"
    copy = shutil.copy(launcher, tmp_path / "mine.sh")
    for command, name in (([copy], copy), ([], "standard input")):
        text = "" if command else launcher.read_text()
        done = subprocess.run(["bash", *command], input=text, cwd=tmp_path, capture_output=True, text=True, check=False)
        told = f"error: {name}: a launcher is given by its path, and stays beside its folder lib/\n"
        assert (done.returncode, done.stderr) == (1, told)


@pytest.mark.parametrize("refused", [False, True])
def test_a_launcher_outside_a_job_checks_and_submits_itself(tmp_path: Path, refused: bool) -> None:
    for name, text in (("python", f'echo "checked: $*"; exit {int(refused)}'), ("sbatch", 'echo "sbatch $*"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    given = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": str(tmp_path / "python")}
    launcher = ROOT / "launchers/submit-demo.sh"
    command = ["bash", launcher, "--account=proj2", "--time=8"]
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=False)
    checked, *submitted = done.stdout.splitlines()
    assert checked.endswith(f"--check={launcher}")
    assert submitted == ([] if refused else [f"sbatch --account=proj2 --time=8 {launcher}"])
    assert done.returncode == int(refused)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("MSB", "MBS"), ("GSB", "GBS"), ("TRAINING_STEP", "TRAINING_STEPS"), ("SEQLEN", "SEQ_LEN"), ("CONFG", "CONFIG")],
)
def test_a_variable_whose_name_is_nearly_a_setting_is_refused(name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is no setting; did you mean {meant}"):
        environment_overrides({name: "2"})
    assert environment_overrides({name: ""}) == []


def test_usual_variables_of_a_cluster_are_no_mistyped_settings() -> None:
    usual = "HOME PATH LOADEDMODULES LMOD_CMD PYTHONPATH PYTHON HOST_PYTHON TOKENIZERS_PARALLELISM TENSORBOARD_DIR NAME"
    usual += " SLURM_CLUSTERS CLUSTER_NAME DATA PROJECT PROJECT_HOME LANG MODULESHOME NCCL_DEBUG WANDB_NAME RANK DEBUG"
    assert environment_overrides(dict.fromkeys(usual.split(), "x")) == []
