"""One object for how to tokenize: no default of it stands anywhere else, whichever way one comes in."""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relayrun.config.compose import yaml_file
from relayrun.errors import InputError
from relayrun.slurmtime import parse_time
from relayrun.tokens.tokenize import MegatronTokenWriter, tune
from relayrun.tokens.tokenize.job_config import (
    CURATOR_NAMES,
    ENVIRONMENT_SETTINGS,
    TokenizationConfig,
    TokenizationJob,
    TokenizationSettings,
    settings_from_environment,
)
from relayrun.tokens.tokenize.options import (
    OPTION_FLAGS,
    STEP_FIELDS,
    AppendEod,
    EngineName,
    OnError,
    TokenizeOptions,
    add_tokenize_flags,
    options_from_flags,
    options_to_flags,
)
from relayrun.tokens.tokenize.pipeline import tokenize_paths_file

ROOT = Path(__file__).resolve().parents[2]
FIELDS = TokenizeOptions.model_fields
DEFAULTS: dict[str, Any] = {name: field.default for name, field in FIELDS.items() if not field.is_required()}
OTHER_NAMES = {
    "n_tasks": "tasks",
    "n_workers": "workers",
    "add_bos": "bos",
    "batch_size": "batch_documents",
} | CURATOR_NAMES
"""What keywords are called elsewhere, and the field that each of them is."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    add_tokenize_flags(made)
    return made


def test_a_command_line_without_options_is_the_object_as_it_is() -> None:
    assert options_from_flags(parser().parse_args(["--tokenizer-name-or-path", "t"])) == TokenizeOptions(tokenizer="t")
    assert set(DEFAULTS) == set(FIELDS) - {"tokenizer"}


def test_the_help_names_every_default() -> None:
    text = " ".join(parser().format_help().split())
    for name, value in DEFAULTS.items():
        if value is not None and value is not False and name not in STEP_FIELDS:  # these are of YAML alone
            assert re.search(rf"{OPTION_FLAGS[name]}\b[^()]*\(default: {re.escape(str(value))}\b", text), name


def test_settings_of_a_dataset_are_the_object_with_places() -> None:
    for settings in (TokenizationSettings, TokenizationConfig):
        assert issubclass(settings, TokenizeOptions)
        assert {name: settings.model_fields[name].default for name in DEFAULTS} == DEFAULTS
        assert not set(settings.__annotations__) & set(FIELDS)


def test_the_function_takes_the_object_and_places() -> None:
    parameters = inspect.signature(tokenize_paths_file).parameters
    assert list(parameters) == ["options", "output_folder", "dataset", "paths_file", "logging_dir", "store"]


def test_a_datatrove_step_without_options_has_the_object_as_it_is(tmp_path: Path) -> None:
    assert MegatronTokenWriter(tmp_path, "t").options == TokenizeOptions(tokenizer="t")
    step = MegatronTokenWriter(tmp_path, "t", append_eod=False, batch_size=3, add_bos=True)
    assert step.options == TokenizeOptions(tokenizer="t", append_eod="no", batch_documents=3, bos=True)
    with pytest.raises(InputError, match="batch_size is at least 1, not 0"):
        MegatronTokenWriter(tmp_path, "t", batch_size=0)


def functions(path: Path) -> Iterator[tuple[int, str, ast.expr]]:
    """Every default of a parameter, and of a field of a class: line, name, value."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, Function):
            given = node.args.posonlyargs + node.args.args
            yield from (
                (value.lineno, argument.arg, value)
                for argument, value in [
                    *zip(given[len(given) - len(node.args.defaults) :], node.args.defaults, strict=True),
                    *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True),
                ]
                if value is not None
            )
        elif isinstance(node, ast.ClassDef):
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.value is not None:
                    yield line.lineno, line.target.id, line.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            names = [a.value.lstrip("-").replace("-", "_") for a in node.args if isinstance(a, ast.Constant)]
            yield from ((k.value.lineno, name, k.value) for k in node.keywords if k.arg == "default" for name in names)


def twice(path: Path) -> list[str]:
    """Literal defaults in a file for what has its default in `TokenizeOptions`; None leaves the choice to that."""
    found = []
    for line, name, value in functions(path):
        field = OTHER_NAMES.get(name, name)
        text = ast.unparse(value)
        if field in DEFAULTS and text not in ("None", "''") and isinstance(value, ast.Constant | ast.UnaryOp):
            found.append(f"{path.name}:{line}: {name} = {text}")
    return found


def sources() -> list[Path]:
    rooms = ("tokenize", "readers", "stores", "shards", "shuffle")
    inside = [path for room in rooms for path in (ROOT / "relayrun/tokens" / room).rglob("*.py")]
    programs = [*(ROOT / "scripts/tokenization").glob("*.py"), *(ROOT / "launchers").glob("*.py")]
    return [*inside, *programs, ROOT / "relayrun/cli/data/dumps.py"]


def test_no_default_stands_twice() -> None:
    assert len(sources()) > 40
    options = ROOT / "relayrun/tokens/tokenize/options.py"
    assert len(twice(options)) == sum(value not in (None, ()) for value in DEFAULTS.values())
    assert [line for path in sources() if path != options for line in twice(path)] == []


@pytest.mark.parametrize(
    "planted",
    [
        "def f(n_tasks: int = 8): ...",
        "def f(*, batch_size=1000): ...",
        "class Job:\n    batch_bytes: int = 4_000_000",
        "parser.add_argument('--n-tasks', default=8)",
        "class A:\n    def f(self, append_eod='yes', x=None): ...",
    ],
)
def test_a_planted_default_is_found(tmp_path: Path, planted: str) -> None:
    (tmp_path / "x.py").write_text(planted)
    assert len(twice(tmp_path / "x.py")) == 1


BLOCK = re.compile(r'^export (\w+)="\$\{\1:-(.*)\}" +# (?:(\S+); )?', re.M)


def test_the_block_of_the_bash_launcher_shows_the_defaults_and_sets_none() -> None:
    lines = BLOCK.findall((ROOT / "scripts/tokenization/submit_tokenization.sh").read_text())
    names = {"TOKENIZER", "TOKENIZER_NAME", "DATASET_NAME", "PATH_TO_PREPROCESSING_METADATA", "PATH_TO_OUTPUT_FOLDER"}
    given = dict.fromkeys(names, "x")
    expected = settings_from_environment(given)
    for name, value, shown in lines:
        assert value == "", name
        if shown == "none":
            assert name == "PATH_TO_LOGS" or DEFAULTS[ENVIRONMENT_SETTINGS[name]] is None
        elif shown:
            assert ENVIRONMENT_SETTINGS[name] in DEFAULTS
            assert settings_from_environment(given | {name: shown}) == expected, name
    assert {name for name, _, shown in lines if not shown} == names
    assert {name for name, _, _ in lines} == set(ENVIRONMENT_SETTINGS) - {"MODEL_IDENTIFIER", "TEXT_FIELD"}


def test_the_job_of_the_bash_launcher_asks_for_what_the_settings_say() -> None:
    header = (ROOT / "scripts/tokenization/tokenize.sh").read_text()
    limit = re.search(r"^#SBATCH --time=(\S+)$", header, re.M)
    assert limit
    assert parse_time(limit[1]) == parse_time(TokenizationJob().time)
    assert ("#SBATCH --exclusive\n" in header) == TokenizationJob().exclusive


def test_the_example_shows_the_defaults() -> None:
    """Also where they stand behind a #, to be uncommented."""
    text = (ROOT / "configs/data/tokenization-example.yaml").read_text()
    shown = {
        name: yaml_file.parse_yaml_value(value)
        for name, value in re.findall(r"^(?:# )?(\w+): (.*?)(?: #.*)?$", text, re.M)
        if name in DEFAULTS and name not in ("eos_token", "pipeline")
    }
    assert len(shown) == 6
    assert shown == {name: DEFAULTS[name] for name in shown}


def test_tune_tries_the_default_and_its_neighbours() -> None:
    assert tune.TRIED_BATCH_BYTES == (1_000_000, 4_000_000, 16_000_000)
    assert DEFAULTS["batch_bytes"] in tune.TRIED_BATCH_BYTES


words = st.text(st.characters(exclude_categories=["Cs", "Cc"]))
numbers = st.integers(1, 10**9)


@pytest.mark.slow
@given(
    st.fixed_dictionaries(
        {"tokenizer": words},
        optional={
            "column": words,
            "tasks": numbers,
            "workers": numbers | st.just(-1),
            "eos_token": words | st.none(),
            "append_eod": st.sampled_from(typing.get_args(AppendEod)),
            "bos": st.booleans(),
            "special_text": st.booleans(),
            "keep_empty": st.booleans(),
            "engine": st.sampled_from(typing.get_args(EngineName)),
            "batch_documents": numbers,
            "batch_bytes": numbers,
            "on_error": st.sampled_from(typing.get_args(OnError)),
            "cache_dir": words | st.none(),
        },
    )
)
def test_a_command_line_there_and_back(values: dict[str, Any]) -> None:
    options = TokenizeOptions(**values)
    assert options_from_flags(parser().parse_args(options_to_flags(options))) == options


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--n-tasks", "0"], "^--n-tasks is at least 1, not 0"),
        (["--n-workers", "0"], "^--n-workers at least 1, or -1 for as many as tasks, not 0"),
        (["--n-workers", "-2"], "^--n-workers .*greater than or equal to -1, not -2"),
        (["--batch-bytes", "-5"], "^--batch-bytes is at least 1"),
        (["--tokenization-batch-size", "0"], "^--batch-documents is at least 1"),
    ],
)
def test_a_wrong_option_is_named(arguments: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        options_from_flags(parser().parse_args(["--model-identifier", "t", *arguments]))
