"""The page for those who come from the Megatron-LM launchers: all that is there is named, and what takes its place
exists. Where MEGATRON_LM_DIR (or MEGATRON_CHECKOUTS) names the fork, the list below is compared with its files."""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import re
from pathlib import Path

import pytest

from relayrun.cli import COMMANDS, adder
from relayrun.config.compose import describe
from relayrun.config.compose.schema import CONFIG_CLASSES
from relayrun.control.rundir import triggers
from relayrun.control.rundir.run import Run
from relayrun.submit import launcher_overrides
from relayrun.tokens.tokenize import job_config as tokenization

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/how-to/coming-from-megatron-lm.md").read_text(encoding="utf-8")
TABLES = (ROOT / "docs/reference/megatron-lm-launchers.md").read_text(encoding="utf-8")
ROWS = [line.strip("|").split(" | ") for line in TABLES.splitlines() if line.startswith("| `")]
NONE = "–"

VARIABLES = """
    AUTO_JOB_REQUEUE BACKUP_CODEBASE BACKUP_CODEBASE_DIR CHECKPOINT_STEPS CHECKPOINTING_ARGS CKPT_DIR CMD_PREFIX
    COMPUTE_ENVIRONMENT_DIR CUDA_DEVICE_MAX_CONNECTIONS DATA_ARGS DATASETS DATASET_CACHE_DIR DEBUG_DIR DISTRIBUTED_ARGS
    EXP_DIR EXP_NAME GBS GPU_MEM_LOGGING INITIALIZATION_ARGS LEARNING_RATE_ARGS LOCAL_RANK LOGGING_ARGS LOGGING_DIR
    LOG_NCCL MASTER_ADDR MASTER_PORT MBS MEGATRON_LM_DIR MIXED_PRECISION_ARGS MOCK_DATA NCCL_DEBUG NCCL_DEBUG_FILE
    NETWORK_SIZE_ARGS NSYS_LAUNCHER NSYS_PROFILER OMP_NUM_THREADS PROJECT_DIR PROJECT_NAME PYTHONPATH RANK
    REGULARIZATION_ARGS SEQ_LEN TENSORBOARD_DIR TOKENIZER_ARGS TORCH_NCCL_ASYNC_ERROR_HANDLING
    TORCH_NCCL_AVOID_RECORD_STREAMS TRAINING_ARGS TRAINING_CMD TRAINING_STEPS TRANSFORMER_ENGINE_ARGS TRIGGER_DIR
    WANDB_API_KEY WANDB_MODE WORLD_SIZE
    CKPT_IS_TORCH_DIST CKPT_PATH COLUMN_KEY CSV_RESULTS_FILE DATASET_NAME DATASET_OUTPUT_FOLDER_NAME
    HF_HUB_ENABLE_HF_TRANSFER HF_SAVE_DIR LOADER LOAD_DIR NUMBER_OF_DATATROVE_TASKS PATH_TO_DATATROVE_LOGGING_DIR
    PATH_TO_INPUT_FOLDER PATH_TO_OUTPUT_FOLDER PATH_TO_PREPROCESSING_METADATA PATH_TO_SLURM_LOGGING_DIR SAVER SAVE_DIR
    TOKENIZER TOKENIZER_NAME TORCH_CKPT_SAVE_PATH TORCH_DIST_SCRIPT
"""
"""All of the launchers, and of the scripts."""
HEADER = """
    --account --cpus-per-task --environment --error --gpus-per-node --job-name --mem --no-requeue --nodes
    --ntasks-per-node --output --signal --time
"""
FLAGS = """
    --adam-beta1 --adam-beta2 --async-save --attention-dropout --bf16 --ckpt-format --clip-grad --context-parallel-size
    --cross-entropy-loss-fusion --data-cache-path --data-path --dataloader-type --defer-embedding-wgrad-compute
    --disable-bias-linear --eod-mask-loss --eval-iters --exit-signal-handler --ffn-hidden-size --global-batch-size
    --group-query-attention --hidden-dropout --hidden-size --init-method-std --load --log-interval
    --log-memory-to-tensorboard --log-progress --log-throughput --lr --lr-decay-style --lr-warmup-iters
    --main-grads-dtype --make-vocab-size-divisible-by --manual-gc --manual-gc-interval --max-position-embeddings
    --micro-batch-size --min-lr --mock-data --no-check-for-nan-in-loss-and-grad --no-log-loss-scale-to-tensorboard
    --normalization --num-attention-heads --num-dataset-builder-threads --num-layers
    --num-layers-per-virtual-pipeline-stage --num-query-groups --num-workers --optimizer --overlap-grad-reduce
    --overlap-p2p-communication-warmup-flush --overlap-param-gather --pipeline-model-parallel-size
    --position-embedding-type --profile --reset-attention-mask --reset-position-ids --rope-scaling-factor --rotary-base
    --save --save-interval --seed --seq-length --sequence-parallel --split --swiglu --tensor-model-parallel-size
    --tensorboard-dir --tokenizer-model --tokenizer-type --train-iters --transformer-impl --trigger-path
    --untie-embeddings-and-output-weights --use-distributed-optimizer --use-precision-aware-optimizer
    --use-rope-scaling --wandb-exp-name --wandb-project --wandb-save-dir --weight-decay --wgrad-deferral-limit
"""
"""All of pretrain_gpt.py in the launchers."""
SCRIPTS = """
    submit-llama3-70b.sh submit-llama3-8b.sh scripts/conversion/do-convert.sh scripts/conversion/torchdist_2_torch.py
    scripts/copy_wandb_project.py scripts/merge_datasets/merge.sh scripts/merge_datasets/merge_datasets.py
    scripts/merge_datasets/submit_merge_dataset_dump.sh scripts/tokenization/compute_dump_size.py
    scripts/tokenization/prepare_dumps.py scripts/tokenization/preprocess_megatron.py
    scripts/tokenization/submit_tokenization.sh scripts/tokenization/tokenize.sh scripts/tools/create_data_config.py
    scripts/tools/create_data_mixture.py tools/checkpoint/convert.py
"""
FLAGS_OF_SCRIPTS = """
    --ckpt-convert-save --ckpt-step --column --dataset --dataset-folder --dst-entity --dst-project --eos-token
    --filter-in --filter-out --folders --hf-tokenizer --input --load-dir --loader --logging-dir --model-type
    --multimodal --n-dumps --n-tasks --n-workers --names --output --output-folder --output-prefix --paths --paths-file
    --preprocessing-metadata-folder --runs --save-dir --saver --src-entity --src-project --test-logits
    --tokenizer-name-or-path --weights -de -dp -n -p -r -se -sp
"""
FILES = """
    Megatron-LM/ checkpoints/ checkpoints/latest_checkpointed_iteration.txt checkpoints/progress.txt
    datasets/NAME/completed-dumps datasets/NAME/dumps datasets/NAME/raw-dataset-link datasets/NAME/tokenize-*.csv
    datasets/NAME/tokenized-dir-link debug/JOB/compute_environment.txt debug/JOB/memory_logging.txt
    debug/JOB/nccl-info-*.txt debug/JOB/nsys-trace-* logging/tensorboard logging/wandb logs/Meg-Runs/PROJECT/EXP
    logs/datatrove logs/slurm/merge-* logs/slurm/tokenization-* logs/slurm/training triggers/exit triggers/save
"""
FURTHER = {"--data-args-path", "--exit-interval", "SIGUSR2@600", "sbatch --dependency=singleton", "scancel --jobname"}
"""Flags that the launchers do not use, and what they do to jobs."""
OTHER_PROGRAMS = """
    --membind --dependency --jobname --exclude-from --trace --force-overwrite --capture-range --capture-range-end
    --verify --nproc-per-node
"""
"""Flags of Slurm, numactl, rsync, nsys, git and torchrun in the launchers."""
FLAG = r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]\b(?!-)"
THERE = {
    name for names in (VARIABLES, HEADER, FLAGS, SCRIPTS, FLAGS_OF_SCRIPTS, FILES) for name in names.split()
} | FURTHER


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_all_that_is_there_is_on_the_page_and_nothing_else() -> None:
    arrays = re.search(r"^The twelve arrays \((.*?)\)", TABLES, re.M | re.S)
    assert arrays
    named = [name for row in ROWS for name in quoted(row[0])] + quoted(arrays[1])
    assert set(named) == THERE
    assert all(len(row) == 3 for row in ROWS)


@functools.cache
def flags_of(program: str) -> set[str]:
    """The options of a script of this repository, or of `relayrun VERB [NAME]`."""
    if not program.startswith("relayrun "):
        text = (ROOT / program).read_text(encoding="utf-8")
        called = re.search(r"as_program\((\w+), ", text)
        if called is None:
            return set(re.findall(r'"(--?[a-z-]+)"', text))
        parser = argparse.ArgumentParser()
        imported = re.search(rf"from (relayrun\.cli\.[\w.]+) import {called[1]}\n", text)
        assert imported
        getattr(importlib.import_module(imported[1]), called[1])(parser)
        return set(parser._option_string_actions)
    verb, *names = program.split()[1:]
    parser = argparse.ArgumentParser()
    adder(verb)(parser)
    for name in names:
        (action,) = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
        parser = action.choices[name]
    return set(parser._option_string_actions)


@functools.cache
def run_paths() -> set[str]:
    """What a run directory may hold, as `Run` names it."""
    run = Run(Path("/run"))
    paths = [value for name in dir(Run) if isinstance(value := getattr(run, name), Path)]
    paths += [run.debug_of(1), run.code / "0001", run.triggers / "save", run.path / "wandb", run.tracker]
    return {str(path.relative_to(run.path)) for path in paths if path != run.path}


@functools.cache
def settings() -> set[str]:
    return {setting.name for setting in describe.describe_settings()}


@functools.cache
def sources(*places: str) -> str:
    files = [file for place in places for file in sorted((ROOT / place).rglob("*.*")) if file.suffix in (".py", ".sh")]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


VARIABLES_HERE = {
    *(name for trainer in CONFIG_CLASSES for name in launcher_overrides.setting_variables(trainer)),
    launcher_overrides.PROFILER_VARIABLE,
    *tokenization.ENVIRONMENT_SETTINGS,
    *re.findall(r'"(WANDB_\w+)"', sources("relayrun/train/reporting", "relayrun/control/trainers")),
}


def exists(name: str, program: str) -> bool:
    """Whether a name on our side is one. `program`: the script or command that was named before it in its cell."""
    if name.startswith("-"):
        return name in flags_of(program)
    if name.startswith("relayrun "):
        words = name.split()
        command = [word for word in words if word.islower() and not word.startswith("-")]
        return set(words[len(command) :]) - {"RUN"} <= flags_of(" ".join(command))
    if re.fullmatch(r"[A-Z][A-Z_]+", name):
        return name in VARIABLES_HERE
    if name.startswith(("launchers/", "scripts/", "configs/")):
        return (ROOT / name).is_file()
    if name.startswith("logs/"):
        leaf = name.removeprefix("logs/").partition("*")[0].partition("/PROJECT")[0]
        return all(part in sources("relayrun", "scripts/tokenization") for part in leaf.split("/"))
    if re.fullmatch(r"[a-z_]+(\.[a-z_0-9]+)*", name) and not name.endswith((".jsonl", ".txt")):
        return name in settings()
    if name.startswith("triggers/") and name != "triggers/":
        return name.removeprefix("triggers/") in triggers.TRIGGER_NAMES
    path = name.rstrip("/")
    if path in run_paths():
        return True
    folder, _, leaf = path.rpartition("/")
    where = "relayrun/train" if folder in run_paths() else "relayrun/tokens/tokenize"
    return (not folder or folder in run_paths()) and f'"{leaf.partition("*")[0].rstrip("-")}' in sources(where)


def unknown(row: list[str]) -> list[str]:
    """Names of a row's second column that stand for nothing, and settings of its third one."""
    found, program = [], ""
    for name in quoted(row[1]):
        if name.startswith(("scripts/", "launchers/", "relayrun ")):
            program = name
        if not exists(name, program):
            found.append(name)
    mentioned = [name for name in quoted(row[2]) if re.fullmatch(r"[a-z]+\.[a-z_]+", name)]
    return found + [name for name in mentioned if not exists(name, "")]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: quoted(row[0])[0])
def test_what_takes_its_place_exists(row: list[str]) -> None:
    assert quoted(row[1]) or row[1] == NONE
    assert unknown(row) == []


@pytest.mark.parametrize(
    "cell",
    [
        "`training.stepps`",
        "`MBSS`",
        "`scripts/tools/create_data_config.py` `--pathes`",
        "`relayrun export hf --outputs`",
        "`triggers/leave`",
        "`debug/0001/environment.txt`",
        "`launchers/submit-llama3-9b.sh`",
        "`metric.jsonl`",
        "`logs/slurm/trainings`",
        "`dumped/`",
    ],
)
def test_a_name_that_stands_for_nothing_is_found(cell: str) -> None:
    assert len(unknown(["", cell, "`training.steps`"])) == 1
    assert unknown(["", "`training.steps`", "`training.stepps`"]) == ["training.stepps"]


README_COMMANDS = {
    "sbatch submit-llama3-8B.sh",
    "scripts/tokenization/prepare_dumps.py --filter-in --filter-out --n-dumps",
    "scripts/tokenization/submit_tokenization.sh",
    "scripts/tools/create_data_config.py",
    "python3 scripts/tools/create_data_mixture.py --folders --weights --output",
    "python scripts/copy_wandb_project.py -se -de -sp -dp -r",
}
"""Programs of the fork's README with their flags."""


def test_every_command_of_their_readme_has_a_line_and_its_program_is_here() -> None:
    section = PAGE.partition("## The commands of their README\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    assert {quoted(row[0])[0] for row in rows} == README_COMMANDS
    for row in rows:
        commands = [name.removeprefix("sbatch ") for name in quoted(row[1]) if "/" in name]
        assert commands
        for program, *flags in (command.split() for command in commands):
            assert os.access(ROOT / program, os.X_OK), program
            assert not flags or set(flags) <= flags_of(program)
    names = quoted(PAGE.partition("`AUTO_JOB_REQUEUE`")[2].partition("keep their")[0])
    assert {"AUTO_JOB_REQUEUE", *names} - {"WANDB_API_KEY"} <= VARIABLES_HERE


def fork() -> Path | None:
    """The checkout of the fork, if a variable names it."""
    named = [os.environ.get("MEGATRON_LM_DIR", ""), *os.environ.get("MEGATRON_CHECKOUTS", "").split(":")]
    checkouts = map(Path, filter(None, named))
    return next((checkout for checkout in checkouts if (checkout / "submit-llama3-8b.sh").is_file()), None)


@pytest.mark.skipif(fork() is None, reason="needs MEGATRON_LM_DIR: a checkout of swiss-ai's fork")
def test_the_list_is_that_of_the_stored_launchers() -> None:
    root = fork()
    assert root is not None
    launchers = [(root / f"submit-llama3-{size}.sh").read_text(encoding="utf-8") for size in ("8b", "70b")]
    files = [path for path in sorted((root / "scripts").rglob("*.*")) if path.suffix in (".py", ".sh")]
    scripts = {str(path.relative_to(root)): path.read_text(encoding="utf-8") for path in files}
    assert {*scripts, "submit-llama3-8b.sh", "submit-llama3-70b.sh", "tools/checkpoint/convert.py"} == set(
        SCRIPTS.split()
    )
    shell = "\n".join([*launchers, *(text for name, text in scripts.items() if name.endswith(".sh"))])
    variables = set(re.findall(r"(?<![\w$/-])([A-Z][A-Z0-9_]{2,})=", shell)) | {"WANDB_API_KEY"}
    assert variables == set(VARIABLES.split())
    assert {f"--{name}" for text in launchers for name in re.findall(r"^#SBATCH --([a-z-]+)", text, re.M)} == set(
        HEADER.split()
    )
    commands = "\n".join(line for text in launchers for line in text.splitlines() if not line.startswith("#"))
    used = set(re.findall(FLAG, commands))
    assert used - set(OTHER_PROGRAMS.split()) - {"--cpus-per-task", "--output"} == set(FLAGS.split())
    conversion = (root / "scripts/conversion/README.md").read_text(encoding="utf-8")
    conversion += scripts["scripts/conversion/do-convert.sh"]
    of_scripts = {
        flag
        for text in scripts.values()
        for arguments in re.findall(r"add_argument\(([^)]*)", text)
        for flag in re.findall(r'"(--?[a-z][a-z-]*)"', arguments)
    }
    of_scripts |= set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]\b(?!-)", conversion)) - set(
        (FLAGS + OTHER_PROGRAMS).split()
    )
    assert of_scripts == set(FLAGS_OF_SCRIPTS.split())
    everything = "\n".join([shell, *scripts.values()])
    for name in FILES.split():
        leaf = re.sub(r"\*.*", "", name.rstrip("/").rpartition("/")[2])
        assert leaf in everything or leaf in ("EXP", "latest_checkpointed_iteration.txt", "progress.txt"), name


def test_the_page_shows_commands_that_there_are() -> None:
    (block,) = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.M | re.S)
    for line in block.splitlines():
        words = line.split("#")[0].split()
        launcher = next((word for word in words if word.startswith("launchers/")), None)
        of_none = words[0] == "export" or words[:2] == ["relayrun", "explain"]
        assert of_none if launcher is None else (ROOT / launcher).is_file()
    assert "explain" in COMMANDS
