"""`ARGS_FILE`: each constant and #SBATCH line of a launcher that is not what runs is an error that names both."""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relayrun import places
from relayrun.config.compose import resolve, yaml_file
from relayrun.control.rundir.run import Run
from relayrun.errors import RelayrunError
from relayrun.submit import run_plan, submission
from relayrun.submit.check.existing_run import SubmitIntent
from relayrun.submit.check.report import check_run
from tests.megatron_lm.stand_in import stand_in
from tests.workspace import Workspace

BLOCK = """\
#!/bin/bash
#SBATCH --account=a-a06
#SBATCH --time=00:19:59
#SBATCH --job-name=llama-8b
#SBATCH --output=/scratch/%u/logs/%x-%j.out
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=72
#SBATCH --mem=460000
#SBATCH --environment=/containers/ngc.toml	# don't ask
#SBATCH --signal=SIGUSR2@600	# 600 seconds before
#SBATCH --no-requeue	# so we don't loose the logs

echo "START TIME: $(date)"
DATASETS="DATA"
MBS=1 # Micro batch size
GBS=128 # Global batch size
SEQ_LEN=64
TRAINING_STEPS=500
CHECKPOINT_STEPS=250
AUTO_JOB_REQUEUE=false
LOG_NCCL=false
NSYS_PROFILER=false
MOCK_DATA=false
MEGATRON_LM_DIR=CHECKOUT
DATASET_CACHE_DIR=/scratch/$USER/cache
BACKUP_CODEBASE=false
PROJECT_NAME=tests
EXP_NAME=llama3-8b-$SLURM_NNODES-nodes
PROJECT_DIR=$MEGATRON_LM_DIR/logs/Meg-Runs/$PROJECT_NAME
EXP_DIR=$PROJECT_DIR/$EXP_NAME
CKPT_DIR=$EXP_DIR/checkpoints
TRIGGER_DIR=$EXP_DIR/triggers
DEBUG_DIR=$EXP_DIR/debug/$SLURM_JOB_ID
export TORCH_NCCL_AVOID_RECORD_STREAMS=1
export CUDA_DEVICE_MAX_CONNECTIONS=1
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
export MASTER_PORT=6000
export PYTHONPATH=$MEGATRON_LM_DIR:$PYTHONPATH
TRAINING_ARGS=(
  --micro-batch-size $MBS
  --train-iters $TRAINING_STEPS
  --save $CKPT_DIR
)
if [ "$BACKUP_CODEBASE" == true ]; then
  MEGATRON_LM_DIR=$BACKUP_CODEBASE_DIR
fi
if [ "$MOCK_DATA" = true ]; then
  DATA_ARGS="${DATA_ARGS[@]} --mock-data"
fi
CMD_PREFIX="numactl --membind=0-3"
TRAINING_CMD="python3 $MEGATRON_LM_DIR/pretrain_gpt.py ${TRAINING_ARGS[@]}"
"""
"""The launchers of the Swiss AI Initiative, shortened, with what the run below has."""

NAME = "megatron_lm.launcher"
ROOT = Path(__file__).resolve().parents[2]
Looked = Callable[..., list[tuple[str, str]]]


@pytest.fixture
def looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Looked:
    """What a check refuses for a launcher's sake, each with its line: of BLOCK with edits, and a run with changes."""
    monkeypatch.setattr(submission, "log_folder", lambda _: tmp_path / "logs")
    for name in ("GBS", "MBS", "NCCL_DEBUG", "WANDB_API_KEY", "TRAINING_STEPS"):
        monkeypatch.delenv(name, raising=False)
    Workspace.make(tmp_path)
    checkout, file = stand_in(tmp_path / "checkout"), tmp_path / "my-launcher.sh"

    def look(*edits: tuple[str, str], more: str = "", submit: bool = False, **changes: Any) -> list[tuple[str, str]]:
        text = BLOCK.replace('DATA"', f'{tmp_path}/data"').replace("CHECKOUT", str(checkout))
        for before, after in edits:
            assert before in text, before
            text = text.replace(before, after)
        file.write_text(text + more)
        values: dict[str, Any] = {
            "project": "tests",
            "name": "llama3-8b-{nodes}-nodes",
            "run_dir": str(tmp_path / "run"),
            "trainer": "megatron-lm",
            "megatron_lm": {"dir": str(checkout), "args_file": str(file)},
            "data": {
                "tokenizer": str(tmp_path / "tokenizer.json"),
                "datasets": [str(tmp_path / "data")],
                "data_cache_dir": f"/scratch/{pwd.getpwuid(os.geteuid()).pw_name}/cache",
                "max_epochs": 1e6,
            },
            "training": {"steps": 500, "micro_batch_size": 1, "global_batch_size": 128, "seq_length": 64},
            "checkpoint": {"interval": 250},
            "job": {
                "time": "19:59",
                "account": "a-a06",
                "nodes": 2,
                "ntasks_per_node": 4,
                "gpus_per_node": 4,
                "cpus_per_task": 72,
                "mem": "460000M",
            },
            "cluster": {
                "name": "own",
                "scheduler": "slurm",
                "command_prefix": ["numactl", "--membind=0-3"],
                "container": {"runtime": "edf", "image": "/containers/ngc.toml"},
                "python": sys.executable,
            },
        }
        for section, own in changes.items():
            values[section] = values.get(section, {}) | own if isinstance(own, dict) else own
        path = tmp_path / "run.yaml"
        path.write_text(yaml_file.dump_yaml(values))
        config = resolve.load_run_config(path)
        if submit:
            with pytest.raises(RelayrunError) as caught:
                submission.submit_run(config)
            return [(str(caught.value), "")]
        found = [
            each
            for each in submission.check_submission(config, intent=SubmitIntent()).findings.all
            if each.name == NAME
        ]
        assert all(
            each.where and each.where.startswith(f"{file}:") and each.remedy
            for each in found
            if each.level in ("warning", "error")
        )
        return [(each.words, each.remedy or "") for each in found if each.level == "error"]

    return look


def test_a_launcher_that_says_what_runs_is_taken(looked: Looked) -> None:
    assert looked() == []


OWN: dict[str, tuple[tuple[str, str], str, str]] = {
    "length": (
        ("SEQ_LEN=64", "SEQ_LEN=$((64 * 64))"),
        "SEQ_LEN=4096 is not what runs: the run has 64",
        "training.seq_length",
    ),
    "interval": (
        ("STEPS=250", "STEPS=100"),
        "CHECKPOINT_STEPS=100 is not what runs: the run has 250",
        "checkpoint.interval",
    ),
    "requeue": (
        ("REQUEUE=false", "REQUEUE=true"),
        "AUTO_JOB_REQUEUE=true is not what runs: the run has false",
        "chain.auto_requeue",
    ),
    "profiler": (
        ("PROFILER=false", "PROFILER=true"),
        "NSYS_PROFILER=true is not what runs: the run has false",
        "debug.profile",
    ),
    "mock": (
        ("MOCK_DATA=false", "MOCK_DATA=true"),
        "MOCK_DATA=true is not what runs: the run has false",
        "data.mock_data",
    ),
    "name": (
        ("EXP_NAME=llama3", "EXP_NAME=mine"),
        "EXP_NAME=mine-8b-2-nodes is not what runs: the run has llama3-8b-2-nodes",
        "name",
    ),
    "project": (
        ("PROJECT_NAME=tests", "PROJECT_NAME=other"),
        "PROJECT_NAME=other is not what runs: the run has tests",
        "project",
    ),
    "data": (('data"', 'data,/elsewhere"'), "/elsewhere is not what runs: the run has ", "data.datasets"),
    "data, appended": (
        ("MBS=1 #", "DATASETS+=,/more\nMBS=1 #"),
        ",/more is not what runs: the run has ",
        "data.datasets",
    ),
    "cache": (("$USER/cache", "$USER/other"), "/other is not what runs: the run has /scratch/", "data.data_cache_dir"),
    "checkout": (("MEGATRON_LM_DIR=", "MEGATRON_LM_DIR=/his"), "MEGATRON_LM_DIR=/his/", "megatron_lm.dir"),
    "prefix": (
        ("membind=0-3", "membind=1"),
        "CMD_PREFIX=numactl --membind=1 is not what runs: the run has",
        "cluster.command_prefix",
    ),
    "folder": (
        ("CKPT_DIR=$EXP_DIR/checkpoints", "CKPT_DIR=/big"),
        "CKPT_DIR=/big is not what runs: the run has ",
        "run_dir",
    ),
    "exported": (
        ("GBS=128 #", "export GBS=64 #"),
        "GBS=64 is not what runs: the run has 128",
        "training.global_batch_size",
    ),
    "readonly": (
        ("GBS=128 #", "readonly GBS=64 #"),
        "GBS=64 is not what runs: the run has 128",
        "training.global_batch_size",
    ),
    "declared": (
        ("GBS=128 #", "declare -i GBS=64 #"),
        "GBS=64 is not what runs: the run has 128",
        "training.global_batch_size",
    ),
    "on one line": (
        ("GBS=128 #", "NONE=1 ; GBS=64 #"),
        "GBS=64 is not what runs: the run has 128",
        "training.global_batch_size",
    ),
    "default": (
        ("GBS=128 #", 'GBS="${GBS:-64}" #'),
        "GBS=64 is not what runs: the run has 128",
        "training.global_batch_size",
    ),
    "assigned default": (
        ("GBS=128 #", ': "${GBS:=64}" #'),
        "GBS=64 is not what runs: the run has 128",
        "training.global_batch_size",
    ),
    "computed": (
        ("GBS=128 #", "GBS=$(python3 batch.py) #"),
        "GBS is computed, and no line of this file runs: the run has 128",
        "write its value",
    ),
    "in a branch": (
        ("GBS=128 #", "if true; then GBS=64; fi #"),
        "GBS=64 is not what runs: the run has 128",
        "global_batch_size",
    ),
    "variable": (
        ("_CONNECTIONS=1", "_CONNECTIONS=8"),
        "CUDA_DEVICE_MAX_CONNECTIONS=8 is not what runs: the run has 1",
        "cluster.env",
    ),
    "new variable": (
        ("MBS=1 #", "export NCCL_DEBUG=INFO\nMBS=1 #"),
        "NCCL_DEBUG=INFO is not what runs: the run has no",
        "cluster.env",
    ),
    "exported behind": (
        ("MBS=1 #", "NCCL_X=1; export NCCL_X\nMBS=1 #"),
        "NCCL_X=1 is not what runs: the run has no",
        "cluster.env",
    ),
    "quoted whole": (
        ("GBS=128 #", 'export "GBS=64" #'),
        "GBS=64 is not what runs: the run has 128",
        "training.global_batch_size",
    ),
    "in arithmetic": (
        ("GBS=128 #", "((GBS = 32 * 2)) #"),
        "GBS=64 is not what runs: the run has 128",
        "global_batch_size",
    ),
    "by let": (("GBS=128 #", "let GBS=64 #"), "GBS=64 is not what runs: the run has 128", "global_batch_size"),
    "read": (("GBS=128 #", "read -r GBS <<< 64 #"), "GBS=64 is not what runs: the run has 128", "global_batch_size"),
    "printed": (("GBS=128 #", "printf -v GBS 64 #"), "GBS=64 is not what runs: the run has 128", "global_batch_size"),
    "in a loop": (
        ("GBS=128 #", "for GBS in 64; do :; done #"),
        "GBS=64 is not what runs: the run has 128",
        "global_batch_size",
    ),
    "as an array": (("GBS=128 #", "GBS=(64) #"), "GBS is computed, and no line of this file", "global_batch_size"),
    "exported by declare": (
        ("MBS=1 #", "declare -x NCCL_DEBUG=INFO\nMBS=1 #"),
        "NCCL_DEBUG=INFO is not what runs: the run has no",
        "cluster.env",
    ),
    "computed variable": (
        ("MBS=1 #", "export NCCL_SOCKET_IFNAME=$(ip route)\nMBS=1 #"),
        "NCCL_SOCKET_IFNAME is computed, and no line of this file runs: the run has no",
        "cluster.env",
    ),
    "time": (("=00:19:59", "=1:00:00"), "--time=1:00:00 is not what runs: the run has 0-00:19:59", "job.time"),
    "short": (("--time=00:19:59", "-t 30 -A a-a06"), "--time=30 is not what runs: the run has 0-00:19:59", "job.time"),
    "nodes": (("--nodes=2", "-N4"), "--nodes=4 is not what runs: the run has 2", "job.nodes"),
    "account": (("=a-a06", " a-a07"), "--account=a-a07 is not what runs: the run has a-a06", "job.account"),
    "memory": (("=460000", "=450G"), "--mem=450G is not what runs: the run has 460000M", "job.mem"),
    "environment": (
        ("/ngc.toml", "/mine.toml"),
        "--environment=/containers/mine.toml is not what runs: the run has",
        "cluster.container",
    ),
    "gpus": (("--gpus-per-node=4", "--gres=gpu:8"), "--gres=gpu:8 is not what runs: the run has gpu:4", "job.sbatch"),
    "partition": (
        ("--nodes=2", "--nodes=2 -p long"),
        "--partition=long is not what runs: the run has no",
        "job.partition",
    ),
    "switch": (("--nodes=2", "--exclusive --nodes=2"), "--exclusive is not what runs: the run has no", "job.exclusive"),
    "mail": (
        ("--nodes=2", "--nodes=2\n#SBATCH --mail-type=END"),
        "--mail-type=END is not what runs: the run has no",
        "job.sbatch",
    ),
}


@pytest.mark.parametrize("case", OWN)
def test_what_differs_is_an_error_that_names_both_and_where_to_set_it(case: str, looked: Looked) -> None:
    edit, words, remedy = OWN[case]
    ((said, what_to_do),) = looked(edit)
    assert words in said
    assert remedy in what_to_do


def test_what_only_reads_a_constant_sets_none(looked: Looked) -> None:
    """Neither does a comment, nor a comparison."""
    more = (
        "# read GBS, let GBS=2\nif ((GBS == 128 && MBS <= 2)); then echo; fi\nN=$((GBS / MBS))\nlet N=2\n"
        'for f in $DATASETS; do echo "$GBS" $GBS; done\neval "echo $GBS"\nread -r LINE <<< "$MBS ${GBS}"\n'
        'printf "%s" $GBS\n'
    )
    assert looked(more=more) == []


def test_all_of_them_are_named_at_once_and_a_submit_refuses(looked: Looked, tmp_path: Path) -> None:
    edits = [OWN[case][0] for case in ("interval", "readonly", "length", "time", "account")]
    assert len(looked(*edits)) == 5
    ((text, _),) = looked(*edits, submit=True)
    for name in ("CHECKPOINT_STEPS=100", "GBS=64", "SEQ_LEN=4096", "--time=1:00:00", "--account=a-a07"):
        assert name in text
    assert not (tmp_path / "run").exists()


def test_what_runs_is_what_flags_say_and_the_environment(
    looked: Looked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = ("STEPS=500", "STEPS=77777")
    assert looked(steps, ("MBS=1 #", "MBS='2' #")) == looked(steps, megatron_lm={"args": {"train-iters": 77777}}) == []
    ((said, _),) = looked(megatron_lm={"args": {"train-iters": 7}})
    assert "TRAINING_STEPS=500 is not what runs: the run has 7" in said
    monkeypatch.setenv("TRAINING_STEPS", "600")
    ((said, _),) = looked()
    assert said == "TRAINING_STEPS=600 is given, and this file says --train-iters 500"
    monkeypatch.delenv("TRAINING_STEPS")
    monkeypatch.setenv("GBS", "128")
    assert looked(OWN["default"][0]) == looked(OWN["assigned default"][0]) == []
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert looked(OWN["new variable"][0]) == []
    assert looked(OWN["variable"][0], cluster={"environment": {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}}) == []
    assert looked(OWN["short"][0], job={"time": "30"}) == []
    assert looked(OWN["mail"][0], job={"sbatch": {"mail-type": "END"}}) == []
    assert looked(("--gpus-per-node=4", "--gres=gpu:4 --ntasks=8 --gpus=8 --gpus-per-task=1")) == []
    monkeypatch.chdir(tmp_path)
    (tmp_path / places.PROJECT_MARKER).touch()
    assert looked((f'"{tmp_path}/data"', "data")) == []


def test_no_flag_takes_a_url_for_a_folder(looked: Looked, tmp_path: Path) -> None:
    """Megatron-LM makes a local folder s3: of it."""
    ((said, _),) = looked(submit=True, megatron_lm={"args": {"tensorboard-dir": "S3://bucket/x"}})
    assert "S3://bucket/x is a URL, and only folders of this machine are written to" in said
    assert not (tmp_path / "run").exists()


def test_a_secret_of_a_launcher_is_not_shown(looked: Looked, monkeypatch: pytest.MonkeyPatch) -> None:
    key = ("MBS=1 #", "export WANDB_API_KEY=abc123\nMBS=1 #")
    ((said, _),) = looked(key)
    assert said.startswith("WANDB_API_KEY=*** is not what runs: the run has no")
    monkeypatch.setenv("WANDB_API_KEY", "def456")
    ((said, _),) = looked(key)
    assert said.startswith("WANDB_API_KEY=*** is not what runs: the run has another")


def test_nothing_of_a_launcher_runs(looked: Looked, tmp_path: Path) -> None:
    (tmp_path / "evil").write_text(f"touch {tmp_path}/ran\n")
    names = ("BASH_ENV", "ENV", "SHELLOPTS", "PS4")
    lines = "".join(f"export {name}={tmp_path}/evil\n" for name in names)
    looked(("MBS=1 #", lines + f'X="$BASH_ENV" Y=$(touch {tmp_path}/ran) Z=`touch {tmp_path}/ran`\nMBS=1 #'))
    assert not (tmp_path / "ran").exists()


def test_the_job_that_a_launcher_begins_has_options_of_its_own(looked: Looked, tmp_path: Path) -> None:
    """Those that sbatch was given, inside the job; and those of the launcher's header before."""
    assert len(looked(OWN["account"][0], OWN["time"][0])) == 2
    config, run = resolve.load_run_config(tmp_path / "run.yaml"), Run(tmp_path / "run")
    plan = run_plan.make_plan(config, run, ROOT, revision=1)
    options = {"account": "a-a07", "time": "01:00:00", "nodes": "2", "mem": "460000M"}
    found = check_run(config, plan, run, log_folder=tmp_path / "logs", adopted=options).findings
    assert [each for each in found.errors if each.name == NAME] == []
    launcher = tmp_path / "launcher.sh"
    launcher.write_text("#!/bin/bash\n#SBATCH --account=a-a07\n#SBATCH --time=60\nexit\n")
    found = submission.check_submission(config, intent=SubmitIntent(), launcher=launcher).findings
    assert [each for each in found.errors if each.name == NAME] == []
