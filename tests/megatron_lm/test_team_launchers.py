"""Launchers as teams write them: what Bash would start is what is read, and everything else is named with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from relayrun.errors import ConfigError
from relayrun.submit.megatron_lm.launcher_file import read_launcher
from tests.megatron_lm.team_launchers import ENVIRONMENT, HEAD, NAMED, TAKEN, started


@pytest.mark.parametrize("text", TAKEN.values(), ids=TAKEN)
def test_what_bash_starts_is_what_is_read(text: str, tmp_path: Path) -> None:
    file = tmp_path / "train.sbatch"
    file.write_text(HEAD + text)
    training = read_launcher(file, ENVIRONMENT).training
    assert training is not None
    program = next(number for number, word in enumerate(training.words) if "pretrain_" in word)
    assert training.words[program + 1 :] == started(file, tmp_path)


@pytest.mark.parametrize(("text", "line", "words"), NAMED.values(), ids=NAMED)
def test_what_only_a_job_knows_is_named_with_its_line(text: str, line: int | None, words: str, tmp_path: Path) -> None:
    file = tmp_path / "train.sbatch"
    file.write_text(HEAD + text)
    with pytest.raises(ConfigError) as caught:
        read_launcher(file, ENVIRONMENT)
    assert words in caught.value.message
    assert caught.value.where == (str(file) if line is None else f"{file}:{line}")
    assert caught.value.hint


def test_what_the_environment_gives_holds_over_a_default(tmp_path: Path) -> None:
    file = tmp_path / "train.sbatch"
    file.write_text(HEAD + TAKEN["defaults"])
    found = {flag.name: flag.values for flag in read_launcher(file, ENVIRONMENT | {"MBS": "1", "LR": ""}).flags}
    assert found == {
        "micro-batch-size": ("1",),
        "global-batch-size": ("32",),
        "seq-length": ("4096",),
        "lr": (),
    }
