"""The recorder: two records of one tree are equal, and a planted change of each kind is noticed."""

from __future__ import annotations

import argparse
import json
import os
import socket
import zipfile
from pathlib import Path

import pytest

from relayrun.cli.run import submit
from relayrun.control import decisions as control_decisions
from relayrun.control.chain import job_script
from tests.workspace import Workspace

from . import commands, counts, decisions, ends, plans, plant, staged, strings, tokens, training, users, wheel
from .__main__ import PARTS, main
from .differences import differences
from .faults import FAULTS, Fault
from .masks import ROOT, machine, masked, masked_values, write_text

PROGRAM = '''"""A program."""
import sys
{imports}
if __name__ == "__main__":
    sys.exit({status})
'''


def write_tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        write_text(root / name, text)
    return root


def test_differences_name_files_and_lines(tmp_path: Path) -> None:
    before = write_tree(tmp_path / "before", {"a/x": "1\n2\n", "a/gone": "", "b/x": "1\n"})
    now = write_tree(tmp_path / "now", {"a/x": "1\n3\n", "a/new": "", "b/x": "2\n"})
    found = list(differences(before, now, ["a"]))
    assert found[:2] == ["gone: a/gone", "new: a/new"]
    assert found[2:] == ["--- before/a/x", "+++ now/a/x", "@@ -1,2 +1,2 @@", " 1", "-2", "+3"]
    assert list(differences(before, before)) == []
    assert main(["compare", "--against", str(before), "--now", str(now)]) == 1 - ("a" not in PARTS)
    assert main(["compare", "--against", str(before), "--now", str(before)]) == 0


def test_masks_take_folders_and_module_paths_away_and_nothing_else() -> None:
    text = (
        "python -m relayrun.control.chain end; relayrun.control.decisions, see relayrun/control/decisions.py "
        "and /x/relayrun.toml"
    )
    assert masked(text, {"X": Path("/x")}) == ("python -m <supervisor> end; <module>, see <file> and /X/relayrun.toml")
    assert masked("relayrun submit") == "relayrun submit"
    values = {"time": 3.0, "each": [{"time": 0.0, "n": 1}, {"time": None}]}
    assert masked_values(values, {"time": "T"}) == {"time": "T", "each": [{"time": 0.0, "n": 1}, {"time": None}]}


def test_a_changed_job_script_or_plan_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_first_job", lambda *_: "")
    config = plans.variants(tmp_path)["rich"]
    for out in ("first", "again"):
        plans.of_config(config, tmp_path / out)
    assert list(differences(tmp_path / "first", tmp_path / "again")) == []
    assert {"plan.json", "job.sbatch", "evaluation.sbatch"} <= {path.name for path in (tmp_path / "first").iterdir()}
    kept = job_script.job_script
    monkeypatch.setattr(job_script, "job_script", lambda *given: kept(*given) + "# planted\n")
    plans.of_config(config, tmp_path / "planted")
    assert "+# planted" in list(differences(tmp_path / "first", tmp_path / "planted"))


@pytest.mark.slow
def test_what_the_first_job_asks_of_slurm_is_on_record(tmp_path: Path) -> None:
    config = plans.variants(tmp_path)["plain"]
    plans.of_config(config, tmp_path / "first")
    said = (tmp_path / "first" / "slurm_calls.txt").read_text()
    assert "sbatch --parsable --comment=relayrun:WORD --dependency=singleton" in said
    assert "== end: exit status 12" in said
    assert str(tmp_path) not in said


def test_another_decision_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [list(table()) for table in (decisions.begins, decisions.ends, decisions.others)]
    assert before == [list(table()) for table in (decisions.begins, decisions.ends, decisions.others)]
    monkeypatch.setattr(control_decisions, "BACKOFF_SECONDS", 31)
    monkeypatch.setattr(control_decisions, "done_reason", lambda iteration: f"{iteration} is the last")
    for lines, table in zip(before, (decisions.begins, decisions.ends, decisions.others), strict=True):
        assert lines != list(table())


def test_another_way_out_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def play(out: str) -> Path:
        folder = tmp_path / f"{out}-run"
        folder.mkdir()
        ends.keep_staged(staged.play("failed_for_the_last_time", folder).path, tmp_path / out, folder)
        return tmp_path / out

    first = play("first")
    assert list(differences(first, play("again"))) == []
    assert "reason: 1 attempt in a row without a new checkpoint" in (first / "STOP").read_text()
    assert json.loads((first / "attempts/0002/end.json").read_text().replace("TIME", "0"))["cause"] == "failed"
    monkeypatch.setattr(control_decisions, "_too_many_failed", lambda failed: f"{failed} in vain")
    assert any("in vain" in line for line in differences(first, play("planted")))


def test_every_way_out_has_a_name_of_its_own() -> None:
    assert len(staged.STAGES) > 30
    assert not staged.STAGES.keys() & ends.FALLBACK.keys()


def test_the_last_bit_of_a_loss_and_of_a_checkpoint_is_noticed(tmp_path: Path) -> None:
    line = {"iteration": 1, "loss": 0.1, "step_seconds": 3.0, "validation": {"held": 0.5}}

    def of_loss(loss: float, seconds: float) -> list[dict[str, object]]:
        text = json.dumps(line | {"loss": loss, "step_seconds": seconds}) + "\n"
        write_text(tmp_path / "metrics.jsonl", text)
        return training.metrics(tmp_path)

    assert of_loss(0.1, 1.0) == of_loss(0.1, 2.0)
    assert of_loss(0.1, 1.0) != of_loss(0.10000000000000002, 1.0)
    checkpoint = write_tree(tmp_path / "iter_1", {"__0_0.distcp": "bytes", ".metadata": "1"})
    before = training.files(checkpoint)
    write_text(checkpoint / ".metadata", "2")
    assert training.files(checkpoint) == before
    write_text(checkpoint / "__0_0.distcp", "bytez")
    assert training.files(checkpoint) != before
    assert training._exact({"a": [0.5, 1]}) == {"a": [0.5, 1]}


def test_the_settings_of_trainings_name_data_that_are_there(tmp_path: Path) -> None:
    space = Workspace.make(tmp_path)
    named = {word for word in json.dumps(training.RUNS).replace('"', " ").split() if word.startswith("DATA")}
    found = [Path(word.replace("DATA", str(space.folder / "data"))) for word in named]
    assert found
    assert all(path.is_dir() or path.with_suffix(".bin").is_file() for path in found)


def test_a_byte_of_a_shard_is_noticed_and_its_time_is_not(tmp_path: Path) -> None:
    record = {"started": 1790000000.5, "seconds": 0.25, "file": ["a.jsonl", 3, 1790000000123456789], "tokens": 7}
    folder = write_tree(tmp_path / "tokens", {"a.bin": "tokens", "a.json": json.dumps(record)})
    (folder / "link").symlink_to(folder / "a.bin")
    before = tokens.of_folder(folder, tmp_path)
    assert before["link"] == "-> /PLACE/tokens/a.bin"
    write_text(folder / "a.json", json.dumps(record | {"started": 1790000009.5, "seconds": 0.5}))
    os.utime(folder / "a.bin", (1, 1))
    assert tokens.of_folder(folder, tmp_path) == before
    write_text(folder / "a.json", json.dumps(record | {"tokens": 8}))
    assert tokens.of_folder(folder, tmp_path) != before
    write_text(folder / "a.json", json.dumps(record))
    write_text(folder / "a.bin", "tokenz")
    assert tokens.of_folder(folder, tmp_path) != before


def test_another_option_default_or_choice_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = commands._of_verb("submit")
    assert commands._of_verb("submit") == before
    assert before["submit"]["exit status"] == {"--help": 0, "no arguments": 2, commands.UNKNOWN: 2}
    kept = submit.add_submit_arguments

    def planted(parser: argparse.ArgumentParser) -> None:
        kept(parser)
        parser.add_argument("--planted", choices=("a", "b"), default="a")

    monkeypatch.setattr(submit, "add_submit_arguments", planted)
    now = commands._of_verb("submit")
    names = [entry["names"] for entry in now["submit"]["takes"]]
    assert names == [*(entry["names"] for entry in before["submit"]["takes"]), ["--planted"]]
    assert now["submit"]["takes"][-1]["choices"] == ["a", "b"]
    assert now["submit"]["takes"][-1]["default"] == "'a'"


def test_every_command_and_script_has_a_parser() -> None:
    assert {"submit", "status", "dumps", "cancel"} <= set(commands.verbs())
    assert commands._whole(["no-such-command"]) == 2
    assert commands._whole(["--version"]) == 0
    script = ROOT / "launchers" / "submit.py"
    assert commands._of_script(script) is not None


def test_a_name_of_a_user_is_imported_from_the_folder_alone(tmp_path: Path) -> None:
    text = "class Hook:\n    def step(self, n: int = 1) -> None: ...\nLIMIT = 3\n"
    target = write_tree(tmp_path / "target", {"relayrun/__init__.py": "", "relayrun/hooks.py": text})
    names = {f"relayrun.hooks:{name}": "a use" for name in ("Hook", "LIMIT", "gone")} | {"json:loads": "a use"}
    found = users.imported(target, names)
    assert found["relayrun.hooks:Hook"]["members"] == {"step": "function(self, n: int = 1) -> None"}
    assert found["relayrun.hooks:LIMIT"] == {"use": "a use", "kind": "int", "value": "3"}
    assert "AttributeError" in found["relayrun.hooks:gone"]["error"]
    assert "elsewhere" in found["json:loads"]["error"]
    write_text(target / "relayrun" / "hooks.py", text.replace("n: int = 1", "n: int"))
    assert (
        users.imported(target, {"relayrun.hooks:Hook": "a use"})["relayrun.hooks:Hook"] != found["relayrun.hooks:Hook"]
    )


def test_a_string_that_leads_nowhere_is_found_wherever_it_stands(tmp_path: Path) -> None:
    files = {
        "relayrun/__init__.py": '"""See `relayrun.control.chain.begin`."""\n',
        "relayrun/control/chain/__init__.py": (
            "def begin():\n    from relayrun.lost import x\n    return ['-m', 'relayrun.gone']\n"
        ),
        "relayrun/part.py": (
            'PARTS = ["relayrun.control.chain:begin", "relayrun.control.chain:lost"]\nOTHER = b"relayrun.torn"\n'
        ),
        "launchers/lib/job.sh": '"${PYTHON}" "${ROOT}/run_module.py" relayrun.away\nimport relayrun.missing\n',
        "container/relayrun.def": "Bootstrap: relayrun.sif\n",
    }
    root = write_tree(tmp_path, files)
    names, started = strings.scan(root)
    lost = strings.unresolved((each.text for each in names | started), root)
    assert {name.removeprefix("relayrun.") for name in lost} == {
        *("lost:x", "gone", "control.chain:lost", "torn", "away", "missing")
    }
    assert {each.text for each in started} == {"relayrun.gone", "relayrun.away"}
    assert strings.of_the_host(root) == {"relayrun.away"}


def test_a_program_that_does_not_start_or_needs_packages_is_found(tmp_path: Path) -> None:
    files = {
        "relayrun/__init__.py": "",
        "relayrun/good.py": PROGRAM.format(imports="", status=0),
        "relayrun/bad.py": PROGRAM.format(imports="import no_such_package", status=0),
        "relayrun/heavy.py": PROGRAM.format(imports="import pytest", status=0),
        "relayrun/no_program.py": "",
        "launchers/job.sh": '"${RELAYRUN_HOST_PYTHON}" "${ROOT}/run_module.py" relayrun.heavy\n',
    }
    root = write_tree(tmp_path, files)
    assert sorted(strings.guarded(root)) == ["relayrun.bad", "relayrun.good", "relayrun.heavy"]
    found = strings.programs(strings.guarded(root), root)
    what = {role.rpartition(".")[2]: calls for role, calls in found.items()}
    assert what["good"] == {"--help": "exit status 0"}
    assert what["bad"] == {"--help": "exit status 1, ModuleNotFoundError"}
    assert what["heavy"]["--help"] == "exit status 0"
    assert what["heavy"]["--help, standard library alone"] == "exit status 1, ModuleNotFoundError"


def test_another_file_of_the_wheel_is_noticed(tmp_path: Path) -> None:
    def of(name: str, **texts: str) -> dict[str, object]:
        files = {
            "relayrun/a.py": "1",
            "relayrun/py.typed": "",
            "relayrun/share/launchers/job.sh": "# relayrun.chain.x\n",
        }
        with zipfile.ZipFile(tmp_path / name, "w") as file:
            for path, text in (files | {key.replace("__", "/"): text for key, text in texts.items()}).items():
                file.writestr(path, text)
        return dict(wheel.contents(tmp_path / name))

    before = of("a.whl")
    assert sorted(before) == ["py.typed", "relayrun/share/launchers/job.sh"]
    assert of("b.whl", relayrun__new="") != before
    with zipfile.ZipFile(tmp_path / "c.whl", "w") as file:
        file.writestr("relayrun/share/launchers/job.sh", "# relayrun.chain.moved\n")
        file.writestr("relayrun/inner/py.typed", "")
    assert wheel.contents(tmp_path / "c.whl") == before


def test_a_test_or_an_assertion_that_is_gone_is_noticed(tmp_path: Path) -> None:
    text = "import pytest\ndef test_x():\n    assert 1\n    with pytest.raises(ValueError):\n        int('x')\n"
    root = write_tree(tmp_path, {"tests/unit/test_x.py": text, "tests/helper.py": "assert True\n"})
    assert counts.written(root) == {
        "tests": {"assert": 1},
        "all": {"assert": 2, "pytest.raises": 1},
        "tests/unit": {"assert": 1, "pytest.raises": 1},
    }
    listed = (
        "tests/unit/test_x.py::test_x[a::b]\ntests/unit/test_x.py::test_y\ntests/test_z.py::test_z\n\n3 tests collected"
    )
    assert counts.of_each_folder(listed) == {"tests/unit": 2, "tests": 1}


FAULT = Fault(name="f", room="r", function="Two.at", old="n + 1", new="n + 2", tests=("test_at",))

PLACES = {
    "relayrun/__init__.py": "",
    "relayrun/one.py": "def at(n):\n    return n + 1\n",
    "relayrun/two.py": "class Two:\n    def at(self, n):\n        return n + 1\n",
    "tests/unit/test_two.py": "from relayrun.two import Two\n\n\ndef test_at():\n    assert Two().at(1) == 2\n",
    "tests/unit/test_one.py": "def test_nothing():\n    pass\n",
}


def test_a_fault_is_found_by_its_function_wherever_that_lies(tmp_path: Path) -> None:
    root = write_tree(tmp_path, PLACES)
    assert plant.spot(FAULT, plant.Tree.read(root)).text == PLACES["relayrun/two.py"].replace("n + 1", "n + 2")
    (root / "relayrun/inner").mkdir()
    (root / "relayrun/two.py").rename(root / "relayrun/inner/three.py")
    assert plant.spot(FAULT, plant.Tree.read(root)).path == root / "relayrun/inner/three.py"
    write_text(root / "relayrun/inner/four.py", PLACES["relayrun/two.py"])
    with pytest.raises(plant.PlantError, match="four"):
        plant.spot(FAULT, plant.Tree.read(root))
    with pytest.raises(plant.PlantError, match="no file"):
        plant.spot(Fault(**vars(FAULT) | {"old": "n + 3"}), plant.Tree.read(root))


def test_a_fault_that_names_what_is_gone_is_refused(tmp_path: Path) -> None:
    tree = plant.Tree.read(write_tree(tmp_path, PLACES))
    for known in ("self", "Two", "len"):
        assert known in plant.spot(Fault(**vars(FAULT) | {"new": f"{known} or n"}), tree).text
    with pytest.raises(plant.PlantError, match=r"two\.py does not know FORMER"):
        plant.spot(Fault(**vars(FAULT) | {"new": "n + FORMER"}), tree)


def test_a_fault_whose_function_has_another_name_is_found_by_its_text(tmp_path: Path) -> None:
    root = write_tree(tmp_path, PLACES)
    renamed = Fault(**vars(FAULT) | {"function": "Two.former"})
    with pytest.raises(plant.PlantError, match=r"one\.py, relayrun/two\.py"):
        plant.spot(renamed, plant.Tree.read(root))
    (root / "relayrun/one.py").unlink()
    assert plant.spot(renamed, plant.Tree.read(root)).path == root / "relayrun/two.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tests", "new", "found"),
    [
        (("test_at",), "n + 2", "caught"),
        (("test_nothing",), "n + 2", "not caught"),
        (("test_at[no-such-case]",), "n + 2", "not tested"),
    ],
)
def test_a_fault_is_caught_by_a_test_that_fails(tests: tuple[str, ...], new: str, found: str, tmp_path: Path) -> None:
    root = write_tree(tmp_path, PLACES)
    assert plant.plant(Fault(**vars(FAULT) | {"tests": tests, "new": new}), plant.Tree.read(root)).startswith(found)
    assert (root / "relayrun/two.py").read_text() == PLACES["relayrun/two.py"]


def test_all_faults_can_be_placed_and_have_tests(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(FAULTS) >= 40
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert len({fault.room for fault in FAULTS}) >= 10
    assert plant.main(None, list_alone=True) == 0
    assert capsys.readouterr().out == f"{len(FAULTS)} faults can be placed\n"


def test_the_name_of_the_machine_is_masked_as_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "vm")
    assert machine('"node": "vm", run_vm.log, "id": "vmqhzc5m"') == '"node": "HOST", run_HOST.log, "id": "vmqhzc5m"'
