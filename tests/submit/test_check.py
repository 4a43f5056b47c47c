"""`relayrun check`: what it finds, all of it at once, before anything is written or queued."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from relayrun.cli import main
from relayrun.config.compose import resolve
from relayrun.control.chain.quota import read_quotas
from relayrun.control.rundir.checkpoint_records import ResumePoint
from relayrun.control.rundir.run import Run
from relayrun.errors import RelayrunError, split_combined_error
from relayrun.files import append_line
from relayrun.submit import submission
from relayrun.submit.check import programs, settings, slurm
from relayrun.submit.check.data import build_manifest, data_usage
from relayrun.submit.check.existing_run import SubmitIntent, check_consequences
from relayrun.submit.check.findings import CheckFinding, Findings
from relayrun.submit.check.report import check_config
from relayrun.tokens.shards.merge import merge_shards
from relayrun.tokens.shards.shard import ShardRecords, ShardWriter, TokenizerRecord
from tests.shard_records import write_folder_record
from tests.workspace import VOCABULARY, Workspace


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """Jobs log below `root` here, and W&B's variables are not there."""
    monkeypatch.setattr(submission, "log_folder", lambda _: tmp_path / "root/logs/slurm/training")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    return Workspace.make(tmp_path)


def looked(path: Path, *overrides: str) -> list[CheckFinding]:
    given = resolve.read_settings(path, overrides)
    return submission.check_submission(
        resolve.validate_settings(given), given=given, intent=SubmitIntent()
    ).findings.all


def named(found: list[CheckFinding], name: str) -> CheckFinding:
    (one,) = [finding for finding in found if finding.name == name and finding.level in ("warning", "error")]
    return one


def as_json(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any]]:
    code = main(["check", str(path), "--json", *options])
    return code, json.loads(capsys.readouterr().out)


def test_a_run_that_is_fine_is_taken_and_nothing_is_made(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    path = workspace.config("run")
    assert main(["check", str(path)]) == 0
    text = capsys.readouterr().out
    assert "submit would take this" in text
    assert "123,200 with a vocabulary of 384" in text
    assert "10,240 in 20 steps" in text
    assert not (workspace.folder / "run").exists()
    assert not (workspace.folder / "root").exists()
    code, report = as_json(path, capsys)
    assert code == 0
    assert report["refused"] is False
    assert report["plan"]["tokens"] == 20 * 8 * 64
    assert report["plan"]["parameters"] == 123_200
    levels = {finding["name"]: finding["level"] for finding in report["findings"]}
    assert "error" not in levels.values()
    assert levels["settings.placeholder"] == "ok"
    assert levels["run.time_limit"] == "not checked", "no start was measured"


@pytest.mark.parametrize(
    ("changes", "nearest"),
    [
        ("data={datasets: [], mixture: {a: {path: [x], wieght: 1}}}", "did you mean 'weight'?"),
        ("optimizer.groups=[{match: x, lr_mul: 1}]", "did you mean 'lr_mult'?"),
        ("notify.targets={ada: {urll: x}}", "did you mean 'url'?"),
    ],
)
def test_a_typo_inside_an_entry_has_a_nearest_name(workspace: Workspace, changes: str, nearest: str) -> None:
    with pytest.raises(RelayrunError) as refused:
        resolve.load_run_config(workspace.config("run"), [changes])
    assert nearest in str(refused.value)


def test_an_unknown_mode_of_wandb_is_refused(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "ofline")
    found = named(looked(workspace.config("run")), "tracking.wandb")
    assert (found.level, found.words) == ("error", "WANDB_MODE=ofline is no mode of W&B")


@pytest.mark.parametrize(
    ("match", "level"),
    [
        ("*.linear_fc1.weight", "ok"),
        ("decoder.layers.1.*", "ok"),
        ("*.layer_norm_weight", "ok"),  # TransformerEngine's name, which the ranks may have
        ("*.linear_fc3.weight", "error"),
        ("decoder.layers.99.*", "error"),
        ("*.experts.*", "error"),
        ("*.linear_kv_up_proj.*", "error"),
    ],
)
def test_a_group_that_can_match_no_parameter_is_refused(workspace: Workspace, match: str, level: str) -> None:
    """The ranks said so when they had waited for their nodes."""
    changed = f"optimizer.groups=[{{match: '{match}', lr_mult: 2}}]"
    (found,) = [each for each in looked(workspace.config("run"), changed) if each.name == "settings.groups"]
    assert found.level == level, found.words
    assert match in found.words or level == "ok"


def test_ok_is_for_what_was_looked_at(workspace: Workspace) -> None:
    path = workspace.config("run")
    changes = ["cluster.gpu_memory_gb=80", "job.gpus_per_node=2", "training.precision=bf16", "job.mem=9G"]
    levels = {finding.name: finding.level for finding in looked(path, *changes)}
    assert (levels["memory.gpu"], levels["memory.host"]) == ("assumed", "assumed"), "a formula and a setting"
    levels = {finding.name: finding.level for finding in looked(path, *changes[1:])}
    assert levels["memory.gpu"] == "not checked", "nobody says what a GPU has"
    contained = looked(path, "cluster.srun_options=[--container-image=x]")
    assert {finding.name: finding.level for finding in contained}["node.python"] == "not checked"


def test_all_errors_are_found_with_file_line_value_and_remedy(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    path = workspace.config("run", data={"datasets": ["/set/data.datasets"]})
    changes = ["--set", "optimizer.lr=3", "--set", "cluster.python=/no/such/python"]
    code, report = as_json(path, capsys, *changes)
    errors = {each["name"]: each for each in report["findings"] if each["level"] == "error"}
    assert code == 1
    assert report["refused"] is True
    assert errors.keys() == {"settings.placeholder", "settings.sense", "node.python"}
    line = 1 + next(number for number, text in enumerate(path.read_text().splitlines()) if "datasets" in text)
    assert errors["settings.placeholder"]["where"] == f"{path}:{line}"
    assert errors["settings.sense"]["where"] == "--set optimizer.lr=3"
    assert errors["settings.sense"]["value"] == 3
    assert all(each["remedy"] for each in errors.values())
    with pytest.raises(RelayrunError) as refused:
        submission.submit_run(resolve.load_run_config(path, changes[1::2]))
    assert len(split_combined_error(refused.value)) == 3
    assert all(each["words"] in str(refused.value) for each in errors.values())
    assert not (workspace.folder / "run").exists()
    assert main(["submit", str(path), *changes, "--dry-run"]) == 1
    dry = capsys.readouterr()
    assert dry.out.startswith("#!/usr/bin/env bash")
    assert dry.err.count("error: ") == 3


def test_a_config_that_is_none_is_json_too(workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    path = workspace.config("run")
    code, report = as_json(path, capsys, "--set", "training.stepz=3")
    assert code == 1
    assert "did you mean 'steps'?" in report["findings"][0]["words"]
    assert report.keys() == as_json(path, capsys)[1].keys()


@pytest.mark.parametrize(
    ("override", "level", "words"),
    [
        ("optimizer.lr=300", "error", "300 cannot be meant"),
        ("optimizer.lr=0.1", "warning", "0.1 is unusual"),
        ("optimizer.weight_decay=10", "warning", "10 is unusual"),
        ("optimizer.weight_decay=1000", "error", "lr x weight_decay is 1: a step would take all of a weight"),
        ("optimizer.adam_beta1=0.2", "warning", "0.2 is unusual"),
        ("optimizer.adam_beta2=0.1", "warning", "0.1 is unusual"),
        ("optimizer.adam_eps=10.0", "error", "10 cannot be meant"),
        ("model.norm_epsilon=0.0", "error", "0 cannot be meant"),
        ("model.init_method_std=-1.0", "error", "-1 cannot be meant"),
        ("optimizer.lr_warmup_steps=15", "warning", "the warm-up of 15 steps takes 75% of the training of 20"),
    ],
)
def test_settings_out_of_all_sense(workspace: Workspace, override: str, level: str, words: str) -> None:
    found = check_config(resolve.load_run_config(workspace.config("run"), [override])).all
    assert [finding.level for finding in found if words in finding.words] == [level]
    assert [finding.setting for finding in found if words in finding.words] == [override.partition("=")[0]]


def test_usual_settings_are_no_warnings(workspace: Workspace) -> None:
    config = resolve.load_run_config(workspace.config("run"), ["optimizer.weight_decay=0.0", "optimizer.clip_grad=0.0"])
    assert check_config(config).warnings == []


@pytest.mark.parametrize(
    ("overrides", "setting"),
    [
        (["run_dir={0}/store/run"], "run_dir"),
        (["data.data_cache_dir={0}/link/cache"], "data.data_cache_dir"),
        (["cluster.environment.TMPDIR={0}/store/tmp"], "cluster.environment.TMPDIR"),
    ],
)
def test_no_job_may_write_below_a_read_only_path(workspace: Workspace, overrides: list[str], setting: str) -> None:
    (workspace.folder / "store").mkdir()
    (workspace.folder / "link").symlink_to("store")
    path = workspace.config("run", cluster={"read_only_paths": [str(workspace.folder / "store")]})
    found = named(looked(path, *(each.format(workspace.folder) for each in overrides)), "place.read_only")
    assert (found.level, found.setting) == ("error", setting)
    assert f"allows no writing below {workspace.folder}/store" in found.words
    with pytest.raises(RelayrunError, match="allows no writing below"):
        submission.submit_run(resolve.load_run_config(path, [each.format(workspace.folder) for each in overrides]))


def test_logs_and_links_inside_the_run_directory_are_looked_at(workspace: Workspace) -> None:
    store = workspace.folder / "root"
    store.mkdir()
    run = workspace.run("run")
    run.path.mkdir()
    run.checkpoints.symlink_to(store)
    path = workspace.config("run", cluster={"read_only_paths": [str(store)]})
    found = [finding.where for finding in looked(path) if finding.name == "place.read_only"]
    assert found == [str(run.checkpoints), str(store / "logs/slurm/training")]


def test_epochs_are_counted_and_too_many_refused(workspace: Workspace) -> None:
    mixture = {
        "a": {"path": f"{workspace.folder}/data/shard0", "weight": 3.0},
        "b": {"path": f"{workspace.folder}/data/shard[12]", "weight": 1.0},
    }
    data = {"tokenizer": f"{workspace.folder}/tokenizer.json", "datasets": [], "mixture": mixture}
    path = workspace.config("run", data=data, training={"steps": 100})
    config = resolve.load_run_config(path)
    manifest = build_manifest(config)
    a, b = data_usage(config, manifest, Run(workspace.folder / "run"))
    assert a.windows == (manifest.datasets["a"].tokens - 1) // 64
    assert (a.samples, b.samples) == (600, 200)
    assert a.epochs == 600 / a.windows
    # brute force: the step in which sample number windows - 1 of `a` is read
    from relayrun.tokens.order.schedule import Schedule, integer_weights

    schedule = Schedule.from_weights(integer_weights({"a": 3.0, "b": 1.0}))
    last = next(k for k in range(800) if schedule.locate(k) == ("a", a.windows - 1))
    assert a.used_up_at == last // 8 + 1
    assert b.used_up_at is None
    assert named(looked(path), "data.epochs").level == "warning"
    too_long = ["training.steps=10000"]
    refused = [finding for finding in looked(path, *too_long) if finding.level == "error"]
    assert [finding.name for finding in refused] == ["data.epochs"]
    assert "if it is meant, data.max_epochs=" in (refused[0].remedy or "")
    with pytest.raises(RelayrunError, match=f"used up at step {a.used_up_at:,}"):
        submission.submit_run(resolve.load_run_config(path, too_long))
    allowed = [finding.level for finding in looked(path, *too_long, "data.max_epochs=100000")]
    assert "error" not in allowed


def write_record(folder: Path, largest: int | None) -> None:
    """A record of tokenization beside the shards of a folder, by a tokenizer that nobody can tell from the run's."""
    write_folder_record(folder, {path.stem: {"largest_id": largest} for path in folder.glob("*.bin")})


def test_the_largest_id_on_record_is_compared_with_the_vocabulary(workspace: Workspace) -> None:
    path = workspace.config("run", data={"allow_other_tokenizer": True})
    write_record(workspace.folder / "data", VOCABULARY)
    found = [finding for finding in looked(path) if finding.level == "error"]
    assert {finding.name for finding in found} == {"data.ids"}
    assert found[0].where == str(workspace.folder / "data/shard0")
    assert f"the id {VOCABULARY}, which is beyond the vocabulary of {VOCABULARY}" in found[0].words
    write_record(workspace.folder / "data", VOCABULARY - 1)
    (ids,) = [finding for finding in looked(path) if finding.name == "data.ids"]
    assert (ids.level, ids.words) == ("ok", "the largest id on record of each of 3 shards lies below 300")
    write_record(workspace.folder / "data", None)
    (ids,) = [finding for finding in looked(path) if finding.name == "data.ids"]
    assert "the ids of 3 of 3 shards were not compared" in ids.words
    assert "relayrun mixture verify FOLDER --tokenizer" in ids.words


def test_writers_record_the_largest_id(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "shard", np.int32)
    assert writer.largest_id == -1
    writer.add([5, 70_000], [2])
    mark = writer.mark()
    writer.append([90_000])
    writer.end_document()
    assert writer.largest_id == 90_000
    writer.rollback(mark)
    reserved = writer.reserve(2)
    reserved[:] = [80_000, 1]
    writer.add(reserved, [2])
    writer.finish()
    assert writer.largest_id == 80_000
    write_folder_record(tmp_path, {"shard": {"largest_id": 7}})
    record = ShardRecords().of(str(tmp_path / "shard"))
    assert record is not None
    assert record.largest_id == 7


def test_a_merged_shard_has_the_largest_id_of_its_inputs(tmp_path: Path) -> None:
    made = TokenizerRecord(fingerprint="f" * 64, ids="1" * 64, size=100, eos=None)
    prefixes = [str(tmp_path / name) for name in "abc"]
    for prefix, ids in zip(prefixes, ([3, 9], [1], [7]), strict=True):
        writer = ShardWriter(prefix, np.uint16, own_record=made)
        writer.add(ids, [len(ids)])
        writer.finish()
    merged = merge_shards(prefixes, str(tmp_path / "all"))
    record = ShardRecords().of(merged.prefix)
    assert record is not None
    assert record.largest_id == 9


@pytest.mark.parametrize(
    ("environment", "level", "words"),
    [
        ({}, "ok", "W&B is off"),
        ({"WANDB_MODE": "offline"}, "ok", "sync_wandb.py"),
        ({"WANDB_API_KEY": "0123456789" * 4}, "ok", "W&B is on"),
        ({"WANDB_API_KEY": "hunter2hunter2"}, "warning", "has 14 characters and not the form of a key"),
        ({"WANDB_API_KEY": "hunter2hunter2\n"}, "warning", "with blanks or line breaks around it"),
    ],
)
def test_the_key_of_wandb_is_looked_at_and_never_shown(
    workspace: Workspace, environment: dict[str, str], level: str, words: str
) -> None:
    findings = Findings(resolve.load_run_config(workspace.config("run")))
    settings.check_wandb(resolve.load_run_config(workspace.config("run")), findings, environment)
    (found,) = findings.all
    assert (found.level, words in found.words) == (level, True)
    assert environment.get("WANDB_API_KEY", "hunter2") not in json.dumps(found.as_json())


@pytest.mark.parametrize("mode", [None, "offline"])
def test_a_resume_without_wandb_of_a_run_that_had_it_is_warned_of(
    workspace: Workspace, mode: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = resolve.load_run_config(workspace.config("run"))
    run, findings = Run(workspace.folder / "run"), Findings(config)
    (run.path / "wandb").mkdir(parents=True)
    if mode is not None:
        monkeypatch.setenv("WANDB_MODE", mode)
    begins = ResumePoint(iteration=0, path=str(run.checkpoints / "iter_0000000"))
    check_consequences(config, run, begins, findings)
    assert [each.level for each in findings.all] == ["warning"] * (mode is None)
    assert all("its curve ends here" in each.words for each in findings.all)


def test_a_variable_of_a_target_that_is_not_set_is_a_warning(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = {
        "ann": {"url": "mailto://${SMTP_USER}:${SMTP_PASSWORD}@mail.example.org?to=a@b.org"},
        "me": {"command": ["tell", "$X"]},
    }
    path = workspace.config("run", notify={"targets": targets})
    monkeypatch.setenv("SMTP_USER", "ann")
    monkeypatch.delenv("SMTP_PASSWORD", raising=False)
    finding = named(looked(path), "notify.variables")
    assert finding.level == "warning"
    assert finding.words == "SMTP_PASSWORD not set in this environment: nothing could be sent to 'ann'"
    assert finding.setting == "notify.targets.ann"
    monkeypatch.setenv("SMTP_PASSWORD", "a secret")
    found = [each for each in looked(path) if each.name == "notify.variables"]
    assert [each.level for each in found] == ["ok"]
    assert not [each for each in looked(workspace.config("other")) if each.name == "notify.variables"]


def test_apprise_has_to_be_where_messages_are_sent_and_to_take_the_urls(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refused(**settings: Any) -> dict[str, str]:
        path = workspace.config("run", notify={"targets": targets}, **settings)
        return {
            each.name: each.words for each in looked(path) if each.name.startswith("notify.") and each.level == "error"
        }

    targets: dict[str, Any] = {"a": {"url": "mailto://mail.example.org?to=a@b.org"}, "me": {"command": ["tell"]}}
    assert refused() == {"notify.url": "apprise does not take this mailto URL: Invalid ~From~ email specified:"}
    targets["a"]["url"] = "https://example.org/${HOOK}"
    assert refused() == {}  # the variable is not set
    monkeypatch.setenv("HOOK", "Zx81k9Qm44tTp0aa7Rw2")
    assert refused() == {"notify.url": "apprise does not take this https URL: it is the address of no service"}
    targets["a"]["url"] = "jsons://example.org/${HOOK}"
    assert refused() == {}
    bare = tmp_path / "python"
    bare.write_text('#!/bin/sh\necho \'{"version": [3, 11], "missing": ["apprise"]}\'\n')
    bare.chmod(0o755)
    found = refused(cluster={"python": str(bare)})
    assert found == {"notify.apprise": f"{bare} has no apprise"}
    monkeypatch.setitem(sys.modules, "apprise", None)
    assert (
        "jsons needs apprise, which this Python lacks; install relayrun's"
        in refused(cluster={"python": None})["notify.url"]
    )
    targets.pop("a")
    assert refused() == {}


def test_a_checkpoint_that_does_not_fit_is_refused(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    path = workspace.config("run", checkpoint={"interval": 2})
    one = 12 * 123_200

    def free(blocks: int) -> Any:
        return lambda place: SimpleNamespace(f_bavail=blocks, f_frsize=1, f_files=9, f_favail=9)

    for blocks, level in ((one - 1, "error"), (one, "warning"), (4 * one - 1, "warning"), (4 * one, "ok")):
        monkeypatch.setattr(os, "statvfs", free(blocks))
        found = {finding.name: finding.level for finding in looked(path)}
        assert found["storage.space"] == level


def test_quotas_are_asked_where_there_are_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_quotas(tmp_path) == []
    tables = {
        "lfs": "  /scratch   100*  80  150 6d4h   10  0  20  -\n",
        "quota": "Disk quotas for user a (uid 1): \n Filesystem blocks quota limit grace files quota limit grace\n"
        "/dev/sda1 4 0 0 0 7 0 0 0\n",
    }
    for name, table in tables.items():
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n[ \"$3\" = -g ] || printf %s '{table}'\n")  # the group has none
        program.chmod(0o755)
    lustre = [(limit.source, limit.kind, limit.limit - limit.used) for limit in read_quotas(tmp_path)]
    assert lustre == [("lfs quota", "bytes", 50 * 1024), ("lfs quota", "files", 10)]
    assert "quota" not in [limit.source for limit in read_quotas(tmp_path)]  # it knows no limit
    (tmp_path / "lfs").write_text("#!/bin/sh\necho Permission denied; exit 1\n")
    assert read_quotas(tmp_path) == []


def test_options_of_the_environment_are_those_that_sbatch_takes_with_a_launcher() -> None:
    given = {"SBATCH_ACCOUNT": "a1", "SBATCH_PARTITION": "", "SLURM_JOB_ID": "1", "SBATCH_QOS": "high"}
    assert slurm.sbatch_options_from_environment(given) == {"account": "a1", "qos": "high"}


def test_a_python_that_takes_too_long_is_a_warning(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    python = workspace.folder / "python"
    python.write_text("#!/bin/sh\nexec sleep 600\n")
    python.chmod(0o755)
    monkeypatch.setattr(programs, "ANSWER_SECONDS", 0.1)
    findings = check_config(resolve.load_run_config(workspace.config("run", cluster={"python": str(python)})))
    assert findings.errors == []
    assert ["gave no answer within" in warning.words for warning in findings.warnings] == [True]


def program(path: Path, answer: str) -> str:
    path.write_text(f"#!/bin/sh\necho '{answer}'\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ('{"version": [3, 9], "missing": []}', "is Python 3.9, and relayrun needs 3.11"),
        ('{"version": [3, 12], "missing": ["torch"]}', "has no torch, which the ranks import"),
        ("nonsense", "does not start: exit code 0"),
    ],
)
def test_the_python_of_the_ranks_is_asked(workspace: Workspace, answer: str, words: str) -> None:
    python = program(workspace.folder / "python", answer)
    path = workspace.config("run", cluster={"python": python})
    (error,) = check_config(resolve.load_run_config(path)).errors
    assert words in error.words
    contained = resolve.load_run_config(path, ["cluster.srun_options=[--container-image=x]"])
    assert check_config(contained).errors == []


def test_a_hook_that_is_on_no_path_is_refused(workspace: Workspace) -> None:
    path = workspace.config("run", training={"hooks": ["no_such_module:Hook"]}, cluster={"python": None})
    (error,) = check_config(resolve.load_run_config(path)).errors
    assert "has no no_such_module" in error.words


def test_the_batch_scripts_python_is_asked(workspace: Workspace) -> None:
    python = program(workspace.folder / "host", '{"version": [3, 6], "missing": []}')
    path = workspace.config("run", cluster={"scheduler": "slurm", "host_python": python})
    (error,) = check_config(resolve.load_run_config(path)).errors
    assert "is Python 3.6 here; the batch script needs 3.10" in error.words


def test_the_state_of_a_run_is_looked_at_and_its_changes_shown(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    path = workspace.config("run")
    submission.submit_run(resolve.load_run_config(path))
    before = {entry: entry.stat().st_mtime_ns for entry in (workspace.folder / "run").rglob("*")}
    capsys.readouterr()
    code, report = as_json(path, capsys, "--set", "training.steps=30")
    assert code == 1
    assert [each["name"] for each in report["findings"] if each["level"] == "error"] == ["run.jobs"]
    assert "training.steps: 20 -> 30" in report["changes"]
    assert {entry: entry.stat().st_mtime_ns for entry in (workspace.folder / "run").rglob("*")} == before


def test_speed_is_that_of_a_run_of_the_same_shape_or_of_a_setting(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from relayrun.control.rundir import find_runs

    def forecast(*overrides: str) -> Any:
        return submission.check_submission(
            resolve.load_run_config(workspace.config("run"), overrides), intent=SubmitIntent()
        ).forecast

    monkeypatch.setattr(find_runs, "runs_folder", lambda: workspace.folder / "runs")
    assert forecast().hours is None
    other = Run(workspace.folder / "runs" / "tests" / "other")
    other.config.mkdir(parents=True)
    other.config_revision(1).write_text(resolve.dump_run_config(resolve.load_run_config(workspace.config("run"))))
    for step in range(12):
        append_line(other.metrics_view, {"iteration": step + 1, "loss": 1.0, "tokens_per_second": 100.0 + step})
    found = forecast()
    assert found.speed.source == "median of tests/other"
    assert found.speed.tokens_per_second == 105.5
    assert found.hours == pytest.approx(20 * 8 * 64 / 105.5 / 3600)
    assert forecast("training.micro_batch_size=1").speed is None
    (workspace.folder / "runs/tests/loop").symlink_to("loop")  # what nobody can look into is passed over
    (workspace.folder / "runs/tests/torn/metrics.jsonl").mkdir(parents=True)
    assert forecast().speed.source == "median of tests/other"
    gpus = ["job.gpus_per_node=2", "training.precision=bf16", "cluster.tflops_per_gpu=100.0"]
    assumed = forecast(*gpus, "cluster.cost_per_node_hour=3.0", "cluster.currency=CHF")
    assert assumed.speed.source == "cluster.tflops_per_gpu 100"
    assert assumed.hours == pytest.approx(assumed.flops / (2 * 100e12) / 3600)
    assert assumed.cost == pytest.approx(3 * assumed.hours)
