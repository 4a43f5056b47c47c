"""Settings, `args` and `args_file` become one command: what holds over what, what is refused, what is the chain's."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relayrun.config.compose import megatron_flags, resolve, yaml_file
from relayrun.config.compose.schema import MegatronConfig
from relayrun.config.sections.checkpoint import CheckpointSection
from relayrun.config.sections.data import DataSection
from relayrun.config.sections.job import TrackingSection
from relayrun.config.sections.model import ModelSection
from relayrun.config.sections.optimizer import OptimizerSection
from relayrun.config.sections.parallel import ParallelSection
from relayrun.config.sections.training import TrainingSection
from relayrun.control.rundir.checkpoint_records import ResumePoint
from relayrun.control.rundir.records import AttemptStart
from relayrun.control.rundir.run import Run
from relayrun.control.trainers import megatron_lm
from relayrun.control.trainers.megatron_lm import COMMAND_LINE_BYTES, MegatronTrainer, shorten_data_paths
from relayrun.control.trainers.megatron_lm_log import MegatronDialect, MegatronProgram
from relayrun.errors import ConfigError, InputError, RelayrunError
from relayrun.submit import submission
from relayrun.submit.megatron_lm import flags
from relayrun.submit.megatron_lm.command_line import CommandLine, command_line
from relayrun.submit.megatron_lm.flags import Flag
from relayrun.tokens.shards.shard import ShardWriter
from tests.megatron_lm.stand_in import stand_in

SECTIONS = {
    "model": ModelSection,
    "training": TrainingSection,
    "optimizer": OptimizerSection,
    "checkpoint": CheckpointSection,
    "parallel": ParallelSection,
    "data": DataSection,
    "tracking": TrackingSection,
}
SETTINGS_IN_OTHER_FLAGS = {
    "training.samples": "becomes `--train-iters`",
    "training.tokens": "becomes `--train-iters`",
    "optimizer.lr_warmup_tokens": "becomes `--lr-warmup-iters`",
    "optimizer.lr_decay_tokens": "becomes `--lr-decay-iters`",
    "checkpoint.keep_last": "the chain deletes older checkpoints",
    "checkpoint.keep_every": "the chain deletes older checkpoints",
    "checkpoint.mirror": "the chain copies checkpoints",
    "checkpoint.load": "the first attempt begins with it: `--load` and `--ckpt-step`",
    "checkpoint.finetune": "`--finetune` for the attempts that begin with checkpoint.load",
    "checkpoint.no_load_optim": "`--no-load-optim` for the attempts that begin with checkpoint.load",
    "tracking.tensorboard": "becomes `--tensorboard-dir DIR`, in the run directory",
    "data.datasets": "becomes `--data-path PREFIX ...`, with `--data-args-path` above 100 kB",
    "data.mixture": "becomes `--data-path WEIGHT PREFIX ...`, with `--data-args-path` above 100 kB",
    "data.validation": "becomes `--train-data-path` and `--valid-data-path`",
    "data.allow_other_tokenizer": "the check of the shards' tokenizer",
    "data.max_epochs": "the check of how often the data are read",
}
"""Settings without a row in `FLAG_TABLE` that hold all the same."""
TRAINING = {"steps": 100, "micro_batch_size": 1, "global_batch_size": 4, "seq_length": 64}
OPTIMIZER = {"lr": 1e-3, "lr_warmup_steps": 5}
MODEL = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
}


def test_every_setting_has_a_flag_or_a_reason() -> None:
    known = (
        {row.setting for row in megatron_flags.FLAG_TABLE}
        | set(SETTINGS_IN_OTHER_FLAGS)
        | set(megatron_flags.SETTINGS_WITHOUT_FLAG)
    )
    fields = {f"{section}.{name}" for section, kind in SECTIONS.items() for name in kind.model_fields}
    assert fields <= known
    assert known <= fields | set(SECTIONS)
    assert not set(SETTINGS_IN_OTHER_FLAGS) & set(megatron_flags.SETTINGS_WITHOUT_FLAG)


def loaded(
    folder: Path, *, args: dict[str, Any] | None = None, args_file: Path | None = None, **sections: Any
) -> MegatronConfig:
    checkout = folder / "checkout"
    if not checkout.exists():
        stand_in(checkout)
    own: dict[str, Any] = {"dir": str(checkout), "args": {"train-iters": 8} if args is None else args}
    if args_file is not None:
        own["args_file"] = str(args_file)
    values = {
        "project": "tests",
        "name": "flags",
        "run_dir": str(folder / "run"),
        "trainer": "megatron-lm",
        "megatron_lm": own,
        "job": {"time": "5", "nodes": 2, "ntasks_per_node": 4, "gpus_per_node": 4},
        "cluster": {"name": "test", "scheduler": "slurm", "python": "/py"},
    }
    path = folder / "run.yaml"
    path.write_text(yaml_file.dump_yaml(values | sections))
    config = resolve.load_run_config(path)
    assert isinstance(config, MegatronConfig)
    return config


def line(folder: Path, **given: Any) -> CommandLine:
    config = loaded(folder, **given)
    return command_line(config, Run(Path(config.run_dir or "")))


def values(found: CommandLine, *names: str) -> list[tuple[str, ...] | None]:
    return [None if (each := found.merged.find(name)) is None else each.values for name in names]


def test_a_left_out_section_says_nothing(tmp_path: Path) -> None:
    found = line(tmp_path)
    assert found.settings.run == [
        "/py",
        str(tmp_path / "checkout/pretrain_gpt.py"),
        *["--log-interval", "1", "--log-progress", "--log-throughput", "--exit-signal-handler"],
        *["--train-iters", "8"],
    ]
    assert found.settings.total_steps == 8
    assert found.notes == []


def test_args_hold_over_settings_and_say_so(tmp_path: Path) -> None:
    args = {
        "lr": 2e-3,
        "no-rope-fusion": True,
        "gloo-process-groups": False,
        "swiglu": False,
        "rope-fusion": False,
        "profile-ranks": [0, 4],
        "wgrad-deferral-limit": -1,
        "spec": "-x",
        "seed": 28,
    }
    found = line(tmp_path, args=args, model=MODEL, training=TRAINING, optimizer=OPTIMIZER)
    words = found.settings.run
    assert words[words.index("--lr") + 1] == "0.002"
    assert words.count("--lr") == words.count("--no-rope-fusion") == words.count("--disable-gloo-process-groups") == 1
    assert "--swiglu" not in words
    assert "--rope-fusion" not in words
    assert words[words.index("--profile-ranks") :][:3] == ["--profile-ranks", "0", "4"]
    assert words[words.index("--wgrad-deferral-limit") :][:2] == ["--wgrad-deferral-limit", "-1"]
    assert "--spec=-x" in words
    assert found.notes == [
        "--lr 0.002 of megatron_lm.args holds over --lr 0.001 of optimizer.lr",
        "megatron_lm.args leaves out --swiglu of model",
    ]


def test_what_megatron_takes_for_the_same_takes_the_place(tmp_path: Path) -> None:
    found = line(tmp_path, args={"fp16": True}, training=TRAINING | {"precision": "bf16"})
    assert values(found, "bf16", "fp16") == [None, ()]
    assert found.notes == ["--fp16 of megatron_lm.args takes the place of --bf16 of training.precision"]


ARRAYS = """
TRAINING_STEPS=77
TRAINING_ARGS=(
  --micro-batch-size $MBS --global-batch-size $GBS --train-iters $TRAINING_STEPS
  --trigger-path $TRIGGER_DIR --tensorboard-dir $TENSORBOARD_DIR
)
MORE_ARGS=( --lr 3e-3 --save $CKPT_DIR --load $CKPT_DIR --tensor-model-parallel-size $SLURM_GPUS_PER_NODE )
"""


def test_arrays_hold_over_settings_and_args_over_arrays(tmp_path: Path) -> None:
    file = tmp_path / "launcher.sh"
    file.write_text(ARRAYS)
    found = line(tmp_path, args={"micro-batch-size": 2}, args_file=file, training=TRAINING, optimizer=OPTIMIZER)
    assert values(found, "micro-batch-size", "train-iters", "lr", "tensor-model-parallel-size") == [
        ("2",),
        ("77",),  # of the file's own line
        ("3e-3",),
        ("4",),
    ]
    assert values(found, "save", "load", "trigger-path") == [None, None, None]
    assert [note.partition(" is left out")[0] for note in found.notes if "left out" in note] == [
        f"--trigger-path {tmp_path}/run/triggers of {file}:5",
        f"--save {tmp_path}/run/checkpoints of {file}:7",
        f"--load {tmp_path}/run/checkpoints of {file}:7",
    ]
    assert f"--lr 3e-3 of {file}:7 holds over --lr 0.001 of optimizer.lr" in found.notes


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no last iteration": ({"args": {"bf16": True}}, "the chain must know the last iteration"),
    "samples alone": ({"args": {"train-samples": 100}}, "--train-samples become iterations by --global-batch-size"),
    "save": ({"args": {"train-iters": 8, "save": "/x"}}, "--save is the chain's: every run has a folder of its own"),
    "signal": ({"args": {"train-iters": 8, "exit-signal": "SIGINT"}}, "--exit-signal is the chain's"),
    "no handler": ({"args": {"train-iters": 8, "exit-signal-handler": False}}, "no attempt saves before its job ends"),
    "spike": ({"training": TRAINING | {"on_spike": "skip"}}, "'skip' has no meaning for trainer megatron-lm"),
    "hooks": ({"training": TRAINING | {"hooks": ["a:B"]}}, "its loop calls no hooks"),
    "mean": ({"training": TRAINING | {"loss_mean": "sample"}}, "never over samples"),
    "ramp": (
        {"training": TRAINING | {"rampup_batch_size": [[2, 100]]}},
        "of the form [start, increment, samples] only",
    ),
    "tokens": ({"optimizer": OPTIMIZER | {"lr_decay_tokens": 5}}, "tokens become iterations by the batch size"),
    "order": ({"data": {"tokenizer": "t", "datasets": ["/d"], "order": "a:b"}}, "'a:b' has no meaning for trainer"),
    "split and paths": (
        {"data": {"tokenizer": "t", "datasets": ["/d"], "split": 0.1, "validation": {"v": ["/v"]}}},
        "by a split or by paths, not both",
    ),
}


@pytest.mark.parametrize(("given", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_said_is_refused(given: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as error:
        line(tmp_path, **given)
    assert error.value.where
    assert error.value.hint


def test_a_launchers_own_folder_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "launcher.sh"
    file.write_text("A_ARGS=( --train-iters 5 --load /theirs )")
    with pytest.raises(ConfigError, match="--load is the chain's: a run goes on from its own folder"):
        line(tmp_path, args_file=file)


def shard(prefix: Path, tokens: int) -> str:
    writer = ShardWriter(prefix, np.uint16)
    writer.add(np.arange(tokens, dtype=np.uint16), [tokens])
    writer.finish()
    return str(prefix)


def test_a_mixture_is_weights_and_prefixes(tmp_path: Path) -> None:
    a, b, c = (shard(tmp_path / name, tokens) for name, tokens in (("web/a", 30), ("web/b", 10), ("code/c", 5)))
    data = {
        "tokenizer": "t",
        "mixture": {
            "web": {"path": str(tmp_path / "web"), "weight": 0.8},
            "code": {"path": str(tmp_path / "code"), "weight": 0.2},
        },
    }
    found = line(tmp_path, data=data)
    assert values(found, "data-path", "split", "tokenizer-type", "tokenizer-model", "data-cache-path") == [
        ("0.6", a, "0.2", b, "0.2", c),  # the web's 0.8 by tokens
        ("100,0,0",),
        ("HuggingFaceTokenizer",),
        ("t",),
        (str(tmp_path / "run/data_cache"),),
    ]
    held_out = {"tokenizer": "t", "datasets": [str(tmp_path / "web")], "validation": {"v": [str(tmp_path / "code")]}}
    found = line(tmp_path, data=held_out, training=TRAINING | {"eval_interval": 10, "eval_steps": 3})
    names = ("data-path", "train-data-path", "valid-data-path", "split", "eval-iters", "eval-interval")
    assert values(found, *names) == [None, (a, b), (c,), None, ("3",), ("10",)]
    split = {"tokenizer": "t", "datasets": [str(tmp_path / "web")], "split": 0.075}
    assert values(line(tmp_path, data=split), "split", "data-path") == [("92.5,7.5,0",), (a, b)]
    mock = line(tmp_path, data={"tokenizer": "t", "mock_data": True})
    assert values(mock, "mock-data", "data-path", "data-cache-path") == [(), None, None]
    with pytest.raises(InputError, match="leads to no folder"):
        line(tmp_path, data={"tokenizer": "t", "datasets": [str(tmp_path / "gone")]})


def test_the_rest_of_the_table(tmp_path: Path) -> None:
    training = TRAINING | {
        "rampup_batch_size": [2, 2, 100],
        "recompute_granularity": "full",
        "recompute_num_layers": 3,
        "loss_mean": "token",
        "manual_gc_interval": 7,
    }
    optimizer = {
        "lr": 1e-3,
        "lr_warmup_tokens": 1000,
        "lr_decay_style": "WSD",
        "lr_wsd_decay_steps": 10,
        "lr_wsd_decay_style": "minus_sqrt",
    }
    found = line(tmp_path, args={"bf16": True}, training=training, optimizer=optimizer)
    names = (
        "rampup-batch-size recompute-method recompute-num-layers calculate-per-token-loss manual-gc lr-warmup-samples"
    )
    assert values(found, *names.split()) == [("2", "2", "100"), ("block",), ("3",), (), (), ("16",)]
    size = TRAINING["global_batch_size"]
    assert values(found, "lr-wsd-decay-style", "lr-wsd-decay-samples", "lr-wsd-decay-iters", "train-iters") == [
        ("1-sqrt",),
        (str(10 * size),),
        None,
        None,
    ]
    assert found.settings.total_steps == TRAINING["steps"]
    stand_in(tmp_path / "nvidia/checkout", dialect="nvidia")
    (tmp_path / "nvidia").mkdir(exist_ok=True)
    found = line(tmp_path / "nvidia", training=training | {"recompute_num_layers": None}, optimizer=optimizer)
    assert values(found, "lr-wsd-decay-style", "recompute-method", "recompute-num-layers", "exit-signal") == [
        ("minus_sqrt",),
        ("uniform",),
        ("1",),
        ("SIGUSR2",),
    ]
    assert found.settings.dialect == "nvidia"


@pytest.mark.parametrize(
    ("flags", "iterations"),
    [
        ({"train-samples": 1000, "global-batch-size": 8}, 125),
        ({"train-samples": 1007, "global-batch-size": 8}, 125),  # a last batch that is not full is left out
        ({"train-samples": 100, "global-batch-size": 8, "rampup-batch-size": [2, 2, 24]}, 9 + 8),
        ({"train-samples": 10, "global-batch-size": 8, "rampup-batch-size": [2, 2, 24]}, 5),
        # as Apertus 8B was published: 2'627'139 iterations
        (
            {"train-samples": 3662109375, "global-batch-size": 2048, "rampup-batch-size": [1024, 1024, 1718272000]},
            2_627_139,
        ),
        ({"train-samples": "1_000", "global-batch-size": 8}, 125),
    ],
)
def test_samples_are_iterations_as_megatron_lm_counts_them(
    flags: dict[str, Any], iterations: int, tmp_path: Path
) -> None:
    assert line(tmp_path, args=flags).settings.total_steps == iterations


@pytest.mark.parametrize(
    ("ramp", "interval", "twice"),
    [
        ([2, 2, 16], 4, [8]),  # 16 samples in eight iterations of two, then four each
        ([2, 2, 16], 5, []),
        ([2, 1, 16], 4, [4]),  # 2 x 4, 3 x 3, 4
        ([2, 2, 16], 40, []),
        ([2, 2, 200], 4, []),  # which the training does not leave
    ],
)
def test_an_iteration_that_megatron_lm_saves_twice_is_known(
    ramp: list[int], interval: int, twice: list[int], tmp_path: Path
) -> None:
    """It saves before the batch size grows, without asking whether the iteration is saved already."""
    flags = {"train-samples": 84, "global-batch-size": 4, "rampup-batch-size": ramp, "save-interval": interval}
    assert line(tmp_path, args=flags).repeated_saves == twice


@pytest.mark.parametrize("steps", [1, 5, 11, 12, 13, 40])
def test_a_ramp_gives_samples_that_make_the_same_iterations(steps: int, tmp_path: Path) -> None:
    """Megatron-LM takes a ramp with --train-samples alone, and counts its iterations from them."""
    training = TRAINING | {"steps": steps, "global_batch_size": 8, "rampup_batch_size": [2, 2, 24]}
    found = line(tmp_path, args={"bf16": True}, training=training, optimizer=OPTIMIZER)
    assert found.settings.total_steps == steps
    assert values(found, "train-iters", "lr-warmup-iters", "lr-decay-iters") == [None, None, None]


def begin(iteration: int = 0, path: str | None = None) -> AttemptStart:
    return AttemptStart(
        attempt=3,
        job_id="7",
        job_name="n",
        nodes="n1",
        config_revision=1,
        base_iteration=iteration,
        base_path=path,
        start_time=0.0,
        job_end_time=None,
        grace_period=1.0,
    )


def test_flags_of_a_loaded_checkpoint_are_given_while_it_is_the_base(tmp_path: Path) -> None:
    found = line(tmp_path, checkpoint={"interval": 5, "load": "/other/run", "finetune": True, "no_load_optim": True})
    run = Run(tmp_path / "run")
    trainer = MegatronTrainer(run, found.settings)
    first = trainer.command(begin(0, "/other/iter_0000040"))
    assert first[first.index("--load") :][:6] == [
        *["--load", "/other", "--ckpt-step", "40", "--finetune", "--no-load-optim"]
    ]
    later = trainer.command(begin(5, str(run.checkpoint(5))))
    assert later[later.index("--load") + 1] == str(run.checkpoints)
    assert "--finetune" not in later
    assert "--ckpt-step" not in later


def test_nsys_takes_a_users_options(tmp_path: Path) -> None:
    debug = {"profile": "nsys", "nsys_options": ["--trace=cuda", "--stats=true"], "profile_ranks": [0, 3]}
    found = line(tmp_path, debug=debug)
    run = Run(tmp_path / "run")
    words = MegatronTrainer(run, found.settings).command(begin())
    assert words[: words.index("/py")] == [
        *["nsys", "profile", "--sample=none"],
        f"--output={run.debug_of(3)}/profile/nsys-trace-hostname-%h-procid-%q{{SLURM_PROCID}}.nsys-rep",
        *["--force-overwrite=true", "--capture-range=cudaProfilerApi", "--capture-range-end=stop"],
        *["--trace=cuda", "--stats=true"],
    ]
    assert words[words.index("--profile-ranks") :][:3] == ["--profile-ranks", "0", "3"]


def test_a_backup_of_the_code_is_what_the_ranks_run(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.code.mkdir(parents=True)
    config = submission._with_checkout_snapshot(run, loaded(tmp_path, debug={"backup_codebase": True}))
    assert isinstance(config, MegatronConfig)
    copy = run.code / "megatron-lm/0001"
    found = command_line(config, run).settings
    assert (found.run[1], found.dir) == (str(copy / "pretrain_gpt.py"), str(copy))
    assert (copy / "megatron/training/arguments.py").is_file()
    plain = loaded(tmp_path)
    assert submission._with_checkout_snapshot(run, plain) is plain


def test_a_run_may_stop_before_its_last_iteration(tmp_path: Path) -> None:
    found = line(tmp_path, args={}, training=TRAINING | {"stop_after": 40}, checkpoint={"interval": 5, "keep_last": 2})
    assert values(found, "train-iters", "exit-interval") == [("100",), ("40",)]
    assert (found.settings.total_steps, found.settings.keep_last, found.settings.keep_every) == (
        TRAINING["steps"],
        2,
        None,
    )


def test_too_many_shards_for_a_command_line_lie_in_a_file(tmp_path: Path) -> None:
    prefixes = [f"/data/{number:09}" for number in range(COMMAND_LINE_BYTES // 16 + 1)]
    words, text = shorten_data_paths(["python", "p.py", "--data-path", *prefixes, "--lr", "1"], "/run/f")
    assert words == ["python", "p.py", "--lr", "1", "--data-args-path", "/run/f"]
    assert text is not None
    assert text.split() == prefixes
    some = ["python", "--data-path", *prefixes[:10]]
    assert shorten_data_paths(some, "/run/f") == (some, None)
    words, text = shorten_data_paths(["python", "--train-data-path", *prefixes, "--valid-data-path", "/v"], "/run/f")
    assert words == ["python", "--per-split-data-args-path", "/run/f"]
    assert text is not None
    assert json.loads(text) == {"train": prefixes, "valid": ["/v"], "test": None}
    run = Run(tmp_path / "run")
    run.attempt(3).path.mkdir(parents=True)
    settings = line(tmp_path).settings
    settings.run.extend(["--data-path", *prefixes])
    trainer = MegatronTrainer(run, settings)
    trainer.prepare(ResumePoint(iteration=0, path=None), attempt=3)
    command = trainer.command(begin())
    file = Path(command[command.index("--data-args-path") + 1])
    assert file.read_text().split() == prefixes


def test_a_prefix_with_a_blank_does_not_go_into_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_lm, "COMMAND_LINE_BYTES", 100)
    args = {"train-iters": 8, "data-path": [f"/data/a b/{number:09}" for number in range(10)]}
    with pytest.raises(ConfigError, match="holds a blank"):
        line(tmp_path, args=args)
    assert line(tmp_path, args={"train-iters": 8, "data-path": ["/data/a b"]}).settings.run[-1] == "/data/a b"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("pretrain_gpt.py: error: unrecognized arguments: --no-such 3", "unrecognized arguments: --no-such 3"),
        (
            "3: pretrain_gpt.py: error: argument --lr: invalid float value: 'x'",
            "argument --lr: invalid float value: 'x'",
        ),
    ],
)
def test_flags_that_megatron_refuses_end_the_chain(said: str, words: str, tmp_path: Path) -> None:
    log = tmp_path / "log.err"
    log.write_text(f"usage: pretrain_gpt.py [-h]\n{said}\n")
    program = MegatronProgram(
        dialect=MegatronDialect.SWISS_AI, logs=[(str(log), 0)], folder=tmp_path, trigger_folder=tmp_path, total_steps=5
    )
    assert program.steps() == []
    ending = program.ending(2)
    assert ending is not None
    assert (ending.outcome, ending.words) == ("fatal", f"Megatron-LM refuses its flags: {words}")


def test_the_last_of_a_name_holds_within_one_source() -> None:
    found = flags.merge_flags([[Flag(name="a", values=("1",), source="x"), Flag(name="a", values=("2",), source="y")]])
    assert found.words == ["--a", "2"]
    assert found.notes == ["--a 2 of y holds over --a 1 of x"]
    with pytest.raises(RelayrunError, match="'-x' stands behind no flag"):
        flags.flags_from_words([("--a", "f:1"), ("-x", "f:1")], where="f")


def test_arguments_of_a_checkpoint_become_the_settings_that_they_came_from(tmp_path: Path) -> None:
    model = MODEL | {"norm_epsilon": 1e-6, "attention_dropout": 0.2, "untie_embeddings_and_output_weights": False}
    optimizer = OPTIMIZER | {"adam_beta2": 0.9, "clip_grad": 0.5}
    data = {"tokenizer": "t", "mock_data": True, "eod_mask_loss": True}
    sections = {"checkpoint": {"interval": 5}, "parallel": {}, "data": data}
    config = loaded(tmp_path, model=model, training=TRAINING | {"seed": 7}, optimizer=optimizer, **sections)
    arguments = megatron_flags.megatron_checkpoint_args(config)
    assert (arguments["train_iters"], arguments["save_interval"], arguments["norm_epsilon"]) == (100, 5, 1e-6)
    for section in ("model", "training", "optimizer", "data"):
        found = megatron_flags.saved_settings(section, arguments)
        assert found == {name: getattr(getattr(config, section), name) for name in found}
        assert len(found) == {"model": 12, "training": 6, "optimizer": 8, "data": 3}[section]
    required = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4}
    by_default = {"rotary_base": 10_000, "norm_epsilon": 1e-5, "hidden_dropout": 0.1, "init_method_std": 0.02}
    assert megatron_flags.saved_settings("model", required).items() >= (required | by_default).items()
    with pytest.raises(KeyError, match="lr"):
        megatron_flags.saved_settings("optimizer", {})


def table_lines() -> list[str]:
    """The lines of the table of docs/reference/megatron-flags.md."""
    flags: dict[str, list[str]] = {}
    for row in megatron_flags.FLAG_TABLE:
        flags.setdefault(row.setting, []).append(row.words)
    others = [f"| `{setting}` | {words} |" for setting, words in SETTINGS_IN_OTHER_FLAGS.items()]
    return [
        *(f"| `{setting}` | {'; '.join(f'`{words}`' for words in each)} |" for setting, each in flags.items()),
        *others,
    ]


def test_the_page_has_the_table() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "reference" / "megatron-flags.md"
    lines = page.read_text().splitlines()
    assert [line for line in lines if line.startswith("| `")] == table_lines()
