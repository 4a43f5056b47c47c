"""`relayrun adopt`: every line of a launcher is in the run config, replaced for a reason, or an error."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import pytest

from relayrun.cli.__main__ import main
from relayrun.cli.run import settings as command
from relayrun.config.compose import resolve
from relayrun.config.compose.schema import MegatronConfig
from relayrun.config.compose.yaml_file import dump_yaml, read_yaml
from relayrun.control.rundir.run import Run
from relayrun.errors import ConfigError, RelayrunError
from relayrun.submit.adopt import adopt
from relayrun.submit.megatron_lm.command_line import command_line
from relayrun.submit.sbatch_header import Adopted
from tests.megatron_lm.stand_in import stand_in

LAUNCHER = """\
#!/bin/bash
#SBATCH --account=a1
#SBATCH -t 1:00:00
#SBATCH -J my-model --output=logs/%x.out
#SBATCH --nodes=2 --ntasks-per-node=4 --gres=gpu:4 -c 16
#SBATCH --mem=400G
#SBATCH --exclusive
#SBATCH --mail-type=END
#SBATCH --signal=SIGUSR2@600
module load cuda/12
export NCCL_DEBUG=WARN HF_TOKEN=hf_secret
export MASTER_ADDR=$(hostname)
PROJECT_NAME=math
EXP_NAME=tiny-$SLURM_NNODES-nodes
DIR=/nowhere/exp
GBS=${GBS:-64}
trap 'echo bye' EXIT
ARGS=(
  --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128
  --micro-batch-size 1 --global-batch-size $GBS --train-iters 100 --lr 1.0e-3 --lr 2.0e-3
  --save $DIR/checkpoints --load $DIR/checkpoints --save-interval 1_0
  --data-path 0.5 /data/a 0.5 /data/b --tensorboard-dir $DIR/tb --exit-signal-handler
)
mkdir -p $DIR
sbatch --dependency=singleton $0
srun --mpi=pmix -l bash -c "RANK=\\$SLURM_PROCID TRITON_CACHE_DIR=/tmp/\\$SLURM_JOB_ID/\\$SLURM_PROCID \\
  numactl --localalloc python3 CHECKOUT/pretrain_gpt.py ${ARGS[*]}"
"""


def adopted(folder: Path, *edits: tuple[str, str], **environment: str) -> Adopted:
    text = LAUNCHER.replace("CHECKOUT", str(folder / "checkout"))
    for before, after in edits:
        assert before in text, before
        text = text.replace(before, after)
    file = folder / "train.sbatch"
    file.write_text(text)
    return adopt(file, {"HOME": "/home/ada"} | environment, site="generic")


def test_every_line_becomes_a_setting_or_has_a_reason(tmp_path: Path) -> None:
    found = adopted(tmp_path)
    assert found.errors == []
    settings: dict[str, Any] = found.settings
    assert (settings["project"], settings["name"]) == ("math", "tiny-2-nodes")
    assert settings["job"] == {
        "account": "a1",
        "time": "1:00:00",
        "nodes": 2,
        "ntasks_per_node": 4,
        "gpus_per_node": 4,
        "cpus_per_task": 16,
        "mem": "400G",
        "exclusive": True,
        "sbatch": {"mail-type": "END"},
        "setup": ["module load cuda/12"],
    }
    assert settings["run_dir"] == "/nowhere/exp"
    assert settings["chain"] == {"auto_requeue": True}
    cluster = settings["cluster"]
    assert cluster["environment"] == {"NCCL_DEBUG": "WARN"}
    assert cluster["srun_options"] == ["--mpi=pmix"]
    assert cluster["command_prefix"] == [
        "bash",
        "-c",
        'export TRITON_CACHE_DIR="/tmp/${SLURM_JOB_ID}/${RANK}"; exec "$@"',
        "rank",
        "numactl",
        "--localalloc",
    ]
    assert "hf_secret" not in str(found)
    reasons = {row[1]: row[3] for row in found.rows}
    assert reasons["--lr 1.0e-3"] == "--lr 2.0e-3 stands behind it"
    assert reasons["trap echo bye EXIT"] == "the chain has signals and clean-up of its own"


def test_a_launcher_that_requeues_its_own_job_is_a_chain(tmp_path: Path) -> None:
    found = adopted(tmp_path, ("sbatch --dependency=singleton $0", "scontrol requeue $SLURM_JOB_ID"))
    assert found.settings["chain"] == {"auto_requeue": True}
    assert found.errors == []
    never = adopted(tmp_path, ("sbatch --dependency=singleton $0", "if false; then scontrol requeue 1; fi"))
    assert "chain" not in never.settings


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("NCCL_DEBUG=WARN", "NCCL_DEBUG=x${WANDB_API_KEY}y"),
        ("1_0", "10 --wandb-entity $WANDB_API_KEY"),
        ("tiny-$SLURM_NNODES-nodes", "n$WANDB_API_KEY"),
        ("/nowhere/exp", "/nowhere/$WANDB_API_KEY"),
        ("/data/b", "/data/$WANDB_API_KEY"),
        ("--localalloc", "--localalloc$DB_PASSWORD"),
        ("module load cuda/12", "export NOTE=${WANDB_API_KEY:4:20}"),
        ("module load cuda/12", "eval export NOTE=$WANDB_API_KEY"),
        ("module load cuda/12", 'module load "$WANDB_API_KEY"'),
        ("module load cuda/12", 'if [ -n "$WANDB_API_KEY" ]; then module load cuda; fi'),
    ],
)
def test_no_line_of_a_launcher_writes_a_secret_of_this_environment(tmp_path: Path, before: str, after: str) -> None:
    key, password = "0123456789abcdef0123456789abcdef01234567", "sesame-open"
    found, words = None, ""
    try:
        found = adopted(tmp_path, (before, after), WANDB_API_KEY=key, DB_PASSWORD=password)
        words = " ".join(error.message for error in found.errors)
    except ConfigError as error:  # of a flag
        words = str(error)
    for text in (key[4:12], password[:6]):
        assert text not in f"{found}{words}"
    harmless = "module load" in after or after in ("n$WANDB_API_KEY", "export NOTE=${WANDB_API_KEY:4:20}")
    assert ("is a secret of this environment" in words) is not harmless


def test_the_flags_of_the_run_are_those_of_the_launcher(tmp_path: Path) -> None:
    """No flag of a model is added; those of the chain are."""
    checkout = stand_in(tmp_path / "checkout")
    file, output = tmp_path / "train.sbatch", tmp_path / "run.yaml"
    adopted(tmp_path)
    assert main(["adopt", str(file), "--output", str(output), "--env", "GBS=32"]) == 0
    config = resolve.load_run_config(output)
    assert isinstance(config, MegatronConfig)
    line = command_line(config, Run(Path(config.run_dir or "")))
    flags = {flag.name: flag.values for flag in line.merged.flags}
    chain = {"log-interval", "log-progress", "log-throughput", "exit-signal-handler", "tensorboard-dir"}
    assert {name: values for name, values in flags.items() if name not in chain} == {
        "num-layers": ("2",),
        "hidden-size": ("64",),
        "num-attention-heads": ("4",),
        "seq-length": ("128",),
        "max-position-embeddings": ("128",),
        "micro-batch-size": ("1",),
        "global-batch-size": ("32",),
        "train-iters": ("100",),
        "lr": ("2.0e-3",),
        "save-interval": ("1_0",),
        "data-path": ("0.5", "/data/a", "0.5", "/data/b"),
    }
    assert (line.settings.total_steps, line.settings.dir) == (100, str(checkout))
    with pytest.raises(ConfigError, match="exists already"):
        raise_of(["adopt", str(file), "--output", str(output)])


def raise_of(words: list[str]) -> None:
    """Run a command whose error is of interest."""

    parser = argparse.ArgumentParser()
    command.add_adopt_arguments(parser)
    options = parser.parse_args(words[1:])
    options.run(options)


def test_a_checkpoint_to_begin_with_and_folders_of_shards(tmp_path: Path) -> None:
    found = adopted(
        tmp_path,
        ("--load $DIR/checkpoints", "--load /base --finetune --no-load-rng --tokenizer-model gpt2"),
        ("--data-path 0.5 /data/a 0.5 /data/b", "--data-path $(python3 create_data_config.py -p /d/a,/d/b)"),
    )
    assert found.errors == []
    assert found.settings["checkpoint"] == {"interval": 10, "load": "/base", "async_save": False, "finetune": True}
    assert found.settings["data"] == {"tokenizer": "gpt2", "datasets": ["/d/a", "/d/b"]}
    assert found.settings["megatron_lm"]["args"]["split"] == "969,30,1"  # Megatron-LM's default


def test_arguments_of_a_launcher_stand_behind_it(tmp_path: Path) -> None:
    """As NVIDIA's examples take the folders of checkpoints and data."""
    edits = [("--num-layers 2", "--num-layers ${1:-8}"), ("/data/b", "$2")]
    assert adopted(tmp_path, *edits, **{"1": "4", "2": "/data/c"}).settings["megatron_lm"]["args"]["num-layers"] == 4
    file, output = tmp_path / "train.sbatch", tmp_path / "x.yaml"
    assert main(["adopt", str(file), "6", "/data/d", "--output", str(output)]) == 0
    own = read_yaml(output).values["megatron_lm"]["args"]
    assert (own["num-layers"], own["data-path"][-1]) == (6, "/data/d")
    with pytest.raises(ConfigError, match=r"--data-path: \$2 has no value") as caught:
        adopted(tmp_path, *edits)
    assert caught.value.hint == "give it behind the launcher"


def test_a_checkout_that_is_given_needs_no_folder_of_the_launcher(tmp_path: Path) -> None:
    adopted(tmp_path)
    file = tmp_path / "train.sbatch"
    file.write_text(file.read_text().replace(f"{tmp_path}/checkout/", "$(pwd)/"))
    assert "the folder of pretrain_gpt.py" in adopt(file, {}, site="generic").errors[0].message
    found = adopt(file, {}, site="generic", checkout="/m")
    assert (found.errors, found.settings["megatron_lm"]["dir"]) == ([], "/m")


def test_variables_that_hold_the_command_are_not_given_to_the_ranks(tmp_path: Path) -> None:
    found = adopted(tmp_path, ("numactl", "torchrun --nnodes 2 --node_rank $SLURM_NODEID"), ("ARGS=(", "export ARGS=("))
    assert found.errors == []
    start = 'export CMD="python3 -m torch.distributed.run --node_rank $SLURM_PROCID"\nmkdir -p $DIR'
    found = adopted(tmp_path, ("mkdir -p $DIR", start))
    assert (found.errors, found.settings["cluster"]["environment"]) == ([], {"NCCL_DEBUG": "WARN"})


def test_nodes_that_torchrun_names_are_those_of_the_job(tmp_path: Path) -> None:
    edit = ("numactl --localalloc python3", "torchrun --nnodes=4 --nproc_per_node=8")
    (error,) = adopted(tmp_path, edit).errors
    assert "--nnodes=4 4 is not the number of nodes, 2" in error.message
    without = adopted(tmp_path, edit, ("--nodes=2 ", ""))
    assert (without.errors, without.settings["job"]["nodes"]) == ([], 4)


def test_a_whole_node_is_asked_for_where_other_jobs_of_the_user_may_share_it(tmp_path: Path) -> None:
    found = adopted(tmp_path, ("#SBATCH --exclusive", "#SBATCH --exclusive=user"))
    assert (found.errors, found.settings["job"]["exclusive"]) == ([], True)


def test_a_sourced_file_is_looked_for_where_the_job_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sizes.sh").write_text("LAYERS=5\n")
    (tmp_path / "launchers").mkdir()
    edits = [("mkdir -p $DIR", "mkdir -p $DIR"), ("PROJECT_NAME=math", "source sizes.sh\nPROJECT_NAME=math")]
    edits.append(("--num-layers 2", "--num-layers $LAYERS"))
    assert adopted(tmp_path / "launchers", *edits).settings["megatron_lm"]["args"]["num-layers"] == 5


LOST = {
    "no time limit": ([("#SBATCH -t 1:00:00\n", "")], None, "no #SBATCH line says the time limit"),
    "an array of jobs": ([("--mail-type=END", "--array=1-3")], 8, "--array=1-3 is not taken"),
    "a variable of the job": (
        [("NCCL_DEBUG=WARN", "NCCL_SOCKET_IFNAME=$(ip route)")],
        11,
        "NCCL_SOCKET_IFNAME=...: it is the output of $(ip route)",
    ),
    "a step to load": ([("--exit-signal-handler", "--ckpt-step 5")], 22, "--ckpt-step 5 would hold at every start"),
    "no optimizer": ([("--exit-signal-handler", "--no-load-optim")], 22, "--no-load-optim would hold at every start"),
    "a wrapper": ([("numactl --localalloc", "numactl -N $SLURM_LOCALID")], None, "in front of the program"),
    "a module": ([("cuda/12", "cuda/$(uname -r)")], 10, "module load cuda/...: a value is not known"),
    "a checkout": ([("CHECKOUT/pre", "$WHERE/pre")], None, ""),
}


@pytest.mark.parametrize("case", LOST)
def test_what_no_setting_takes_is_an_error_with_its_line(case: str, tmp_path: Path) -> None:
    edits, line, words = LOST[case]
    if case == "a checkout":
        edits = [(f"{tmp_path}/checkout/pre", "Megatron-LM/pre")]
        words = "the folder of pretrain_gpt.py is not known here: Megatron-LM/pretrain_gpt.py"
    (error,) = adopted(tmp_path, *edits).errors
    assert words in error.message
    assert error.where is not None
    assert line is None or error.where.endswith(f":{line}")
    assert error.hint


@pytest.mark.skipif("RELAYRUN_LAUNCHERS_DIR" not in os.environ, reason="RELAYRUN_LAUNCHERS_DIR names no launchers")
def test_published_launchers_are_adopted(tmp_path: Path) -> None:
    """Placeholders of folders are filled in, as anybody must."""
    files = sorted(Path(os.environ["RELAYRUN_LAUNCHERS_DIR"]).rglob("*.sh"))
    launchers = [file for file in files if "pretrain_gpt.py" in file.read_text()]
    assert launchers
    for file in launchers:
        copy = tmp_path / file.name
        copy.write_text(file.read_text().replace("CHANGE_THIS", "/site").replace("/PATH/TO", "/site"))
        found = adopt(copy, {"HOME": "/home/ada", "USER": "ada", "SCRATCH": "/scratch"}, site="generic")
        assert found.errors == [], f"{file.name}: {[str(each) for each in found.errors]}"
        output = tmp_path / f"{file.stem}.yaml"
        output.write_text(dump_yaml(found.settings))
        assert read_yaml(output).values == found.settings
        assert isinstance(resolve.load_run_config(output), MegatronConfig)


def test_a_variable_that_is_set_outside_already_is_not_lost(tmp_path: Path) -> None:
    assert adopted(tmp_path, NCCL_DEBUG="WARN").settings["cluster"]["environment"] == {"NCCL_DEBUG": "WARN"}


def test_an_unset_variable_of_a_test_is_said(tmp_path: Path) -> None:
    found = adopted(tmp_path, ("mkdir -p $DIR", 'if [ "$MODE" = fast ]; then ARGS+=(--bf16); fi'))
    assert "$MODE is not set, and counts as empty" in [row[1] for row in found.rows]
    assert "bf16" not in found.settings["megatron_lm"]["args"]


def test_an_error_says_all_that_is_lost(tmp_path: Path) -> None:
    adopted(tmp_path, LOST["an array of jobs"][0][0], LOST["a step to load"][0][0])
    with pytest.raises(RelayrunError) as caught:
        raise_of(["adopt", str(tmp_path / "train.sbatch"), "--output", str(tmp_path / "x.yaml")])
    assert "--array=1-3" in str(caught.value)
    assert "--ckpt-step 5" in str(caught.value)
    assert not (tmp_path / "x.yaml").exists()
