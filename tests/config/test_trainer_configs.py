"""`trainer: native | megatron-lm | command`: each has a class of settings, and errors say whose a section is."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from relayrun.cli import main
from relayrun.config.compose import describe, resolve, yaml_file
from relayrun.config.compose.schema import CONFIG_CLASSES, CommandConfig, MegatronConfig, RunConfig
from relayrun.errors import ConfigError
from tests.workspace import Workspace

COMMON: dict[str, Any] = {
    "project": "tests",
    "name": "foreign",
    "job": {"time": "5"},
    "cluster": {"name": "local", "scheduler": "local"},
}
COMMAND: dict[str, Any] = {"trainer": "command", "command": {"run": ["python3", "train.py", "{checkpoints}"]}}
MEGATRON: dict[str, Any] = {"trainer": "megatron-lm", "megatron_lm": {"dir": "/checkout", "args": {"train-iters": 8}}}


def written(folder: Path, values: dict[str, Any], **changes: Any) -> Path:
    path = folder / "run.yaml"
    path.write_text(yaml_file.dump_yaml(COMMON | {"run_dir": str(folder / "run")} | values | changes), encoding="utf-8")
    return path


def refused(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        resolve.load_run_config(path, overrides)
    return str(error.value)


def with_command(**changes: Any) -> dict[str, Any]:
    return COMMAND | {"command": COMMAND["command"] | changes}


def test_the_trainer_decides_the_class(tmp_path: Path) -> None:
    assert type(resolve.load_run_config(written(tmp_path, COMMAND))) is CommandConfig
    megatron = resolve.load_run_config(written(tmp_path, MEGATRON))
    assert isinstance(megatron, MegatronConfig)
    assert megatron.model is megatron.data is megatron.training is None
    workspace = Workspace.make(tmp_path)
    assert type(resolve.load_run_config(workspace.config("run"))) is RunConfig
    assert type(resolve.load_run_config(workspace.config("run", trainer="native"))) is RunConfig
    assert {name: kind.model_fields["trainer"].default for name, kind in CONFIG_CLASSES.items()} == {
        name: name for name in CONFIG_CLASSES
    }


@pytest.mark.parametrize("values", [COMMAND, MEGATRON])
def test_a_config_is_read_back_as_it_was(values: dict[str, Any], tmp_path: Path) -> None:
    config = resolve.load_run_config(written(tmp_path, values))
    (tmp_path / "0001.yaml").write_text(resolve.dump_run_config(config))
    assert resolve.read_resolved_config(tmp_path / "0001.yaml") == config


def test_a_section_of_another_trainer_says_whose_it_is(tmp_path: Path) -> None:
    text = refused(written(tmp_path, COMMAND, model={"num_layers": 2}))
    assert (
        "run.yaml:15: model: only a run of trainer native or megatron-lm has this; this one's trainer is comm" in text
    )
    assert "leave it out, or set trainer to native or megatron-lm" in text
    text = refused(written(tmp_path, COMMAND, trainer="native"))
    assert "command: only a run of trainer command has this; this one's trainer is native" in text
    assert "missing" not in text  # nobody wants to hear what a native run would need
    assert "with trainer megatron-lm there is no mean loss on validation sets; set evaluation.tasks or" in refused(
        written(tmp_path, MEGATRON, evaluation={"interval": 3})
    )
    assert "run.yaml:15: jobb: unknown setting; did you mean 'job'?" in refused(written(tmp_path, COMMAND, jobb={}))


def test_an_unknown_trainer_has_a_nearest_one(tmp_path: Path) -> None:
    text = refused(written(tmp_path, COMMAND, trainer="megatron"))
    assert "run.yaml:9: trainer: there is no trainer 'megatron'; there are: native, megatron-lm, command" in text
    assert "did you mean 'megatron-lm'?" in text
    assert "there is no trainer ['a']" in refused(written(tmp_path, COMMAND, trainer=["a"]))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"progress": "step ("}, "command.progress: this is no regular expression: missing ), unterminated subpattern"),
        ({"progress": "step"}, "command.progress: it needs a group `iteration`"),
        ({"leave_signal": "USR1"}, "command.leave_signal: 'USR1' is no signal"),
        ({"save_signal": "SIGKILL"}, "command.save_signal: no program hears SIGKILL"),
        ({"save_signal": "SIGUSR2"}, "command: save_signal and leave_signal are both SIGUSR2"),
        ({"run": []}, "command.run: List should have at least 1 item"),
        ({"run": "python train.py"}, "command.run: Input should be a valid list"),
        ({"checkpoint": {"pattern": "step-"}}, "command.checkpoint.pattern: it needs {iteration} once"),
        ({"checkpoint": {"pattern": "/a/{iteration}"}}, "command.checkpoint.pattern: this is a path below the folder"),
        ({"checkpoint": {"pattern": "{iteration}/a"}}, "pattern: it needs {iteration} once, in its last part"),
        ({"checkpoint": {"pattern": "a/{iteration}", "tracker": "x"}}, "a tracker lies beside the checkpoints"),
        ({"checkpoint": {"unfinished_when": "x"}}, "command.checkpoint: unfinished_when needs `pattern`"),
        ({"checkpoint": {"whole_when": "state"}}, "command.checkpoint: whole_when needs `pattern`"),
        ({"checkpoint": {"pattern": "{iteration}", "folder": "s3://b/c"}}, "s3://b/c is a URL"),
        ({"checkpoint": {"tracker": "latest"}}, "command.checkpoint: tracker needs `pattern`"),
        ({"checkpoint": {"pattern": "{iteration}", "whole_when": "../x"}}, "whole_when: this is a path below"),
    ],
)
def test_a_mistake_of_a_command_is_named_by_its_line(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    text = refused(written(tmp_path, with_command(**changes)))
    assert words in text
    assert "run.yaml:1" in text


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"--qk": True}, "megatron_lm.args: '--qk' is no name of a flag; write it without dashes in front"),
        ({"a": {"b": 1}}, "megatron_lm.args: a: a flag takes true, false, a number, a text, or a list of these"),
        ({"a": [[1]]}, "megatron_lm.args: a: a flag takes true"),
        ({"a": "x\ny"}, "megatron_lm.args: holds the control character"),
    ],
)
def test_a_mistake_in_a_flag_is_named(args: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert words in refused(written(tmp_path, MEGATRON, megatron_lm={"dir": "/x", "args": args}))


def test_flags_keep_their_kinds_and_an_override_takes_one_away(tmp_path: Path) -> None:
    args = {"qk-layernorm": True, "profile-ranks": [0, 4], "lr": 1e-3, "lr-decay-style": "WSD", "seed": 3}
    path = written(tmp_path, MEGATRON, megatron_lm={"dir": "checkout", "args": args, "args_file": "my-args.sh"})
    config = resolve.load_run_config(path)
    assert isinstance(config, MegatronConfig)
    assert config.megatron_lm.args == args
    assert {type(value) for value in config.megatron_lm.args.values()} == {bool, list, float, str, int}
    assert Path(config.megatron_lm.dir).is_absolute()
    assert Path(config.megatron_lm.args_file or "").is_absolute()
    config = resolve.load_run_config(path, ["megatron_lm.args.lr=null", "megatron_lm.args.seed=4"])
    assert isinstance(config, MegatronConfig)
    assert config.megatron_lm.args == {name: value for name, value in args.items() if name != "lr"} | {"seed": 4}


@pytest.mark.parametrize("setting", ["debug.profile=nsys", "debug.log_nccl=true", "tracking.tensorboard=true"])
def test_what_only_our_ranks_do_is_refused_for_a_command(setting: str, tmp_path: Path) -> None:
    name = setting.partition("=")[0]
    assert f"{name} has no effect with trainer command" in refused(written(tmp_path, COMMAND), setting)


def test_files_that_a_command_names_are_absolute_and_other_words_stay(tmp_path: Path) -> None:
    (tmp_path / ".relayrun").write_text("")
    (tmp_path / "train.py").write_text("")
    (tmp_path / "data").write_text("")
    words = ["python3", "train.py", "other.py", "data", "./data", "--file=train.py", "{checkpoints}"]
    config = resolve.load_run_config(written(tmp_path, with_command(run=words)))
    assert isinstance(config, CommandConfig)
    here = str(tmp_path)
    assert config.command.run == [words[0], f"{here}/train.py", "other.py", "data", f"{here}/data", *words[5:]]


def test_what_needs_a_native_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tests/foreign is a run of trainer command, and this is for the native one"):
        resolve.require_native(resolve.load_run_config(written(tmp_path, COMMAND)))


@pytest.mark.slow
def test_config_explain_and_diff_know_every_kind(tmp_path: Path) -> None:
    def said(*arguments: str) -> tuple[int, str]:
        with redirect_stdout(io.StringIO()) as out:
            code = main(list(arguments))
        return code, out.getvalue()

    path = written(tmp_path, with_command(steps=40))
    assert "  steps: 40 " in said("config", str(path))[1]
    (tmp_path / "again.yaml").write_text(said("config", str(path))[1])
    assert said("diff", str(path), str(tmp_path / "again.yaml")) == (0, "the settings of both are the same\n")
    other = tmp_path / "other.yaml"
    other.write_text(path.read_text())
    written(tmp_path, with_command(steps=50))
    assert said("diff", str(other), str(path)) == (1, "command.steps: 40 -> 50\n")
    assert said("explain", "trainer")[1].startswith("trainer: native | megatron-lm | command, default native\n")
    assert "In the launchers: TRAINING_STEPS" in said("explain", "command.steps")[1]
    assert "In the launchers: MEGATRON_LM_DIR" in said("explain", "megatron_lm.dir")[1]
    (command,) = (setting for setting in describe.find_setting("command") if setting.name == "command")
    assert command.words.endswith("Of runs with trainer command.")


@pytest.mark.slow
def test_the_json_schema_goes_by_the_trainer_where_a_file_names_it() -> None:
    schema = json.loads(json.dumps(describe.json_schema()))
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)

    def wrong(values: dict[str, Any]) -> list[str]:
        return [error.message for error in validator.iter_errors(values)]

    assert wrong(COMMON | COMMAND) == wrong(COMMON | MEGATRON) == []
    assert wrong(COMMON | COMMAND | {"model": {"num_layers": 2}}) == ["False schema does not allow {'num_layers': 2}"]
    assert wrong(COMMON | MEGATRON | {"model": {"num_layers": 2}}) == []
    assert wrong({"model": {"num_layers": 2}}) == []  # a file that others include
    assert wrong(COMMON | COMMAND | {"trainer": "commando"}) == [
        "'commando' is not one of ['native', 'megatron-lm', 'command']"
    ]
    assert schema["properties"]["megatron_lm"]["$ref"] == "#/$defs/MegatronLMSection"
