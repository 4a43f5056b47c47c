"""`relayrun check`, `submit --dry-run` and launchers for runs of foreign trainers: what is seen, and what is not."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from relayrun.cli import main
from relayrun.config.compose import resolve
from relayrun.control.rundir.records import CheckpointCommit
from relayrun.control.rundir.run import Run
from relayrun.errors import ConfigError, InputError
from relayrun.submit import run_plan, submission
from relayrun.submit.check.existing_run import SubmitIntent
from relayrun.submit.check.findings import CheckFinding
from tests.config.test_trainer_configs import COMMAND, COMMON, MEGATRON, written
from tests.history import began
from tests.megatron_lm.stand_in import stand_in
from tests.trainers.test_megatron_checkpoints import save

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "log_folder", lambda _: tmp_path / "root/logs/slurm/training")


def command(folder: Path, *, cluster: dict[str, Any] | None = None, **changes: Any) -> Path:
    """A run whose program is there, with these changes of its section."""
    (folder / "train.py").write_text("")
    own = {"run": ["{python}", str(folder / "train.py"), "{checkpoints}"], "resume": ["--from={checkpoint}"]}
    site = COMMON["cluster"] | {"python": sys.executable} | (cluster or {})
    return written(folder, COMMAND | {"command": own | changes}, cluster=site)


def checkout(folder: Path) -> dict[str, Any]:
    """The section of a folder that looks like a checkout of Megatron-LM."""
    return MEGATRON["megatron_lm"] | {"dir": str(stand_in(folder / "checkout"))}


def looked(path: Path, *overrides: str, intent: SubmitIntent | None = None) -> list[CheckFinding]:
    given = resolve.read_settings(path, overrides)
    return submission.check_submission(
        resolve.validate_settings(given), given=given, intent=intent or SubmitIntent()
    ).findings.all


def bad(path: Path, *overrides: str) -> list[tuple[str, str, str]]:
    """Level, name and words of what is not fine."""
    return [
        (each.level, each.name, each.words) for each in looked(path, *overrides) if each.level in ("warning", "error")
    ]


def test_a_command_that_is_fine_is_taken_and_what_cannot_be_known_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = command(tmp_path)
    assert main(["check", str(path)]) == 0
    text = capsys.readouterr().out
    assert "submit would take this" in text
    assert f"a rank executes  {sys.executable} {tmp_path}/train.py {tmp_path}/run/checkpoints\n" in text
    assert "whether it does is not known before it runs" in text
    assert "the run is done when it ends by itself with exit code 0" in text
    assert not (tmp_path / "run").exists()
    assert main(["check", str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["refused"], report["plan"], report["data"]) == (False, None, [])
    assert main(["submit", "--dry-run", str(path)]) == 0
    said = capsys.readouterr()
    assert "#SBATCH --job-name=tests-foreign-" in said.out
    assert said.err == ""


@pytest.mark.parametrize(
    ("changes", "level", "words"),
    [
        ({"run": ["/no/such/program"]}, "error", "/no/such/program: there is no such program here"),
        ({"run": ["no-such-program", "x"]}, "error", "no-such-program: there is no such program here"),
        ({"run": ["./a b"]}, "error", "./a b: there is no such program here, and no shell reads the command"),
        ({"run": ["{python}", "gone.py"]}, "error", "there is no file gone.py"),
        ({"run": ["true", "{checkpoints}", "{checkpoint}"]}, "error", "{checkpoint} is empty where the run begins"),
        ({"run": ["true", "{checkpoint_dir}{checkpoints}"]}, "error", "{checkpoint_dir} is none of {run_dir}"),
        ({"run": ["true", "{checkpoints}", "best-{epoch}"]}, "warning", "{epoch} is none of {run_dir}"),
        ({"checkpoint": {"pattern": "{iteration}"}, "run": ["true"]}, "warning", "nothing tells the program where"),
        ({"run": ["true"], "resume": []}, "warning", "nothing in the command tells the program which checkpoint"),
    ],
)
def test_what_can_be_seen_of_a_command_is_looked_at(
    changes: dict[str, Any], level: str, words: str, tmp_path: Path
) -> None:
    found = [(each, said) for each, _, said in bad(command(tmp_path, **changes))]
    assert [each for each, said in found if said.startswith(words)] == [level], found


def test_a_name_may_come_with_modules_and_a_container_hides_what_it_holds(tmp_path: Path) -> None:
    path = command(tmp_path, run=["no-such-program", "{checkpoints}"])
    ((level, name, _),) = bad(path, "job.setup=[source venv/bin/activate]")
    assert (level, name) == ("warning", "command.program")
    contained = {"scheduler": "slurm", "srun_options": ["--container-image=x"], "python": "/opt/python"}
    (found,) = (
        each
        for each in looked(command(tmp_path, cluster=contained, run=["/opt/python", "{checkpoints}"]))
        if each.name == "command.program"
    )
    assert found.words == "/opt/python runs in a container: what it holds is not known from here"


def test_what_the_script_imports_is_asked_of_its_python(tmp_path: Path) -> None:
    path = command(tmp_path)
    (tmp_path / "beside.py").write_text("")
    script = "import json, no_such.part\nfrom beside import x\ntry:\n    import maybe\nexcept ImportError:\n    pass\n"
    (tmp_path / "train.py").write_text(script)
    words = f"{sys.executable} has no no_such, which {tmp_path}/train.py imports"
    assert bad(path) == [("error", "command.packages", words)]
    assert bad(path, "job.setup=[source venv/bin/activate]") == [("warning", "command.packages", words)]
    (tmp_path / "train.py").write_text("import beside\nimport json\n")
    assert bad(path) == []
    (tmp_path / "python3").write_text("#!/bin/sh\necho it is broken >&2\nexit 3\n")
    (tmp_path / "python3").chmod(0o755)
    broken = f"{tmp_path}/python3 does not start: it is broken"
    assert bad(path, f"cluster.python={tmp_path}/python3") == [("error", "command.python", broken)]


def test_a_line_of_setup_and_a_placeholder_are_refused_for_a_command_too(tmp_path: Path) -> None:
    found = bad(command(tmp_path, resume=["--data=/set/this"]), "job.setup=['if true']")
    assert {name for level, name, _ in found if level == "error"} == {"job.options"}
    found = bad(command(tmp_path, resume=["/set/this"]))
    assert ("error", "settings.placeholder") in [(level, name) for level, name, _ in found]


def test_the_plan_of_a_command_has_its_section_and_its_last_iteration(tmp_path: Path) -> None:
    rule = {"pattern": "step-{iteration}", "whole_when": "done", "tracker": "latest"}
    config = resolve.load_run_config(command(tmp_path, steps=40, checkpoint=rule, progress=r"(?P<iteration>\d+)"))
    plan = run_plan.make_plan(config, Run(tmp_path / "run"), ROOT, revision=1)
    assert (plan.trainer, plan.total_steps, plan.program) == ("command", 40, [])
    assert plan.trainer_settings == {
        "run": [sys.executable, str(tmp_path / "train.py"), "{checkpoints}"],
        "resume": ["--from={checkpoint}"],
        "progress": r"(?P<iteration>\d+)",
        "progress_file": None,
        "save_signal": None,
        "save_file": None,
        "leave_signal": "SIGUSR2",
        "leave_file": None,
        "done": "evidence",
        "checkpoint": {"keep_last": None, "unfinished_when": None, "folder": None, **rule},
        "steps": 40,
    }


def test_a_checkout_is_looked_at(tmp_path: Path) -> None:
    own = checkout(tmp_path)
    path = written(tmp_path, MEGATRON, megatron_lm=own)
    assert [each for each in bad(path) if each[1].startswith("megatron")] == []
    plan = run_plan.make_plan(resolve.load_run_config(path), Run(tmp_path / "run"), ROOT, revision=1)
    assert (plan.trainer, plan.total_steps, plan.trainer_settings["dialect"]) == ("megatron-lm", 8, "swiss-ai")
    found = bad(written(tmp_path, MEGATRON, megatron_lm=own | {"program": "pretrain_x.py"}))
    assert ("error", "megatron_lm.program", f"{tmp_path}/checkout has no pretrain_x.py") in found
    with pytest.raises(ConfigError, match=r"megatron_lm\.args_file /gone.sh: cannot be read: No such file"):
        looked(written(tmp_path, MEGATRON, megatron_lm=own | {"args_file": "/gone.sh"}))
    with pytest.raises(ConfigError, match="/gone is no checkout of Megatron-LM"):
        looked(written(tmp_path, MEGATRON, megatron_lm=own | {"dir": "/gone"}))


def test_a_run_of_megatron_lm_begins_with_a_checkpoint_of_megatron_lm(tmp_path: Path) -> None:
    for iteration in (5, 10):
        saved = save(tmp_path / "theirs", iteration)
        torch.save({"iteration": iteration}, saved / "common.pt")
        (saved / ".metadata").write_bytes(pickle.dumps(Metadata({}, storage_data={})))
    path = written(tmp_path, MEGATRON, megatron_lm=checkout(tmp_path), checkpoint={"interval": 5})

    def begins(load: str) -> tuple[int, str | None]:
        config = resolve.load_run_config(path, [f"checkpoint.load={load}"])
        found = submission.initial_checkpoint.find_initial_checkpoint(config, Run(tmp_path / "run"), None)
        return found.iteration, found.path

    folder = tmp_path / "theirs"
    assert begins(str(folder)) == (10, str(folder / "iter_0000010"))
    finetuned = resolve.load_run_config(path, [f"checkpoint.load={folder}", "checkpoint.finetune=true"])
    found = submission.initial_checkpoint.find_initial_checkpoint(finetuned, Run(tmp_path / "run"), None)
    assert (found.iteration, found.path) == (0, str(folder / "iter_0000010"))  # the run counts from 0
    assert begins(f"{folder}:5") == begins(str(folder / "iter_0000005")) == (5, str(folder / "iter_0000005"))
    with pytest.raises(InputError, match="iteration 7 here") as error:
        begins(f"{folder}:7")
    assert "whole ones: 5, 10" in str(error.value)
    (folder / "iter_0000010/common.pt").unlink()
    with pytest.raises(InputError, match="no whole checkpoint of iteration 10"):
        begins(str(folder))


def test_a_run_with_checkpoints_keeps_its_trainer(tmp_path: Path) -> None:
    path, run = command(tmp_path), Run(tmp_path / "run")
    run.config.mkdir(parents=True)
    run.config_revision(1).write_text(resolve.dump_run_config(resolve.load_run_config(path)))
    own = checkout(tmp_path)
    other = written(tmp_path, MEGATRON, megatron_lm=own)
    assert [each for each in bad(other) if each[1] == "run.trainer"] == []  # nothing is lost yet
    began(run, 1, base=0)
    run.checkpoint(10).mkdir(parents=True)
    commit = CheckpointCommit(iteration=10, path=str(run.checkpoint(10)), consumed_samples=-1, time=0.0, seconds=1.0)
    run.attempt(1).append_commit(commit)
    ((level, _, words),) = [each for each in bad(other) if each[1] == "run.trainer"]
    assert (level, words[:46]) == ("error", "this run has checkpoints of trainer command, a")


@pytest.mark.slow
def test_a_launcher_takes_a_run_of_any_trainer(tmp_path: Path) -> None:
    path = command(tmp_path)
    given = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, "HOME": str(tmp_path), "CONFIG": str(path)}

    def launch(*options: str, **settings: str) -> subprocess.CompletedProcess[str]:
        launcher = ["bash", str(ROOT / "launchers/submit-demo.sh"), *options]
        return subprocess.run(launcher, env=given | settings, capture_output=True, text=True, check=False, timeout=600)

    done = launch("--check", TRAINING_STEPS="40", EXP_NAME="mine")
    assert (done.returncode, done.stderr) == (0, "")
    assert "plan of tests/mine" in done.stdout
    assert "the run is done when it has saved iteration 40" in done.stdout
    done = launch("--dry-run", MBS="2")
    assert done.returncode == 1
    assert "MBS=2: only a run of trainer native or megatron-lm has training.micro_batch_size" in done.stderr
