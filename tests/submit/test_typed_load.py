"""`--load` as it is typed: a folder of the working directory or of the project, a run or an import."""

from __future__ import annotations

from pathlib import Path

import pytest

from relayrun.cli.run.submit import _typed_load
from relayrun.errors import InputError


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "project"


@pytest.mark.parametrize("iteration", ["", ":40"])
def test_a_folder_of_the_working_directory_is_taken_by_its_whole_path(
    project: Path, tmp_path: Path, iteration: str
) -> None:
    (tmp_path / "elsewhere" / "start").mkdir()
    assert _typed_load(f"start{iteration}", project) == f"{tmp_path}/elsewhere/start{iteration}"


@pytest.mark.parametrize("place", ["models/start", "logs/runs/models/start"])
def test_a_name_of_the_project_stays(project: Path, place: str) -> None:
    (project / place).mkdir(parents=True)
    assert _typed_load("models/start", project) == "models/start"


@pytest.mark.parametrize("place", ["start", "logs/runs/start"])
def test_two_of_one_name_are_both_named(project: Path, tmp_path: Path, place: str) -> None:
    (project / place).mkdir(parents=True)
    (tmp_path / "elsewhere" / "start").mkdir()
    with pytest.raises(InputError) as error:
        _typed_load("start:3", project)
    assert error.value.message == f"start is {tmp_path}/elsewhere/start here, and {project}/{place} in the project"


def test_in_the_project_both_are_one(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "start").mkdir(parents=True)
    monkeypatch.chdir(project)
    assert _typed_load("start", project) == f"{project}/start"
