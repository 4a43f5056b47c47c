"""User errors, one by one: how each is provoked, and its whole text in `errors/NAME.txt`.

Every one is refused before anything is queued, and says where, what (with the value) and what to do; an error in a
config says the file and the line. `UPDATE_GOLDEN=1 pytest tests/golden/test_errors.py` writes the texts anew.
"""

from __future__ import annotations

import contextlib
import grp
import io
import os
import pwd
import re
import runpy
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import pytest

from relayrun.cli import main
from relayrun.config.compose import resolve, yaml_file
from relayrun.control.rundir import find_runs
from relayrun.control.rundir.records import ChainEnd, CheckpointCommit
from relayrun.control.rundir.run import Run, write_stop
from relayrun.files import read_json, write_json
from relayrun.submit import submission
from relayrun.tokens.shards.shard import (
    ShardRecord,
    ShardWriter,
    TokenizerRecord,
    write_shard_record,
)
from relayrun.tokens.tokenize.dumps import prepare_dumps
from relayrun.tokens.tokenize.encode.tokenizer import ids_fingerprint, load_tokenizer
from relayrun.tokens.tokenize.options import TokenizeOptions
from tests.history import began
from tests.megatron_lm.stand_in import stand_in
from tests.submit.test_submission_refusals import ordinary_user
from tests.workspace import CONFIG, Workspace

ROOT = Path(__file__).resolve().parents[2]
TEXTS = Path(__file__).parent / "errors"


class Place(Workspace):
    """A workspace, with what a user does in it. All paths of a case lie below `folder`."""

    def submit(self, path: Path, *options: str) -> int:
        return main(["submit", str(path), *options])

    def with_settings(self, *options: str, **sections: Any) -> int:
        return self.submit(self.config("run", **sections), *options)

    def with_data(self, **data: Any) -> int:
        return self.with_settings(data={"tokenizer": str(self.folder / "tokenizer.json"), **data})

    def with_text(self, text: str) -> int:
        """Submit a config with these lines behind its own."""
        path = self.config("run")
        path.write_text(path.read_text() + text)
        return self.submit(path)

    def script(self, name: str, *arguments: object) -> int:
        """Run a script of scripts/ or launchers/ as a program of its own would."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [name, *map(str, arguments)])
            with pytest.raises(SystemExit) as left:
                runpy.run_path(str(ROOT / name), run_name="__main__")
        assert isinstance(left.value.code, int)
        return left.value.code

    def made(self) -> TokenizerRecord:
        """What the workspace's own tokenizer leaves on record."""
        found = load_tokenizer(TokenizeOptions(tokenizer=str(self.folder / "tokenizer.json")))
        ids = ids_fingerprint(found.definition)
        return TokenizerRecord(fingerprint=found.fingerprint, ids=ids, size=found.size, eos=found.eos_id)

    def shard(self, name: str, tokens: int = 900) -> Path:
        writer = ShardWriter(self.folder / name, np.uint16, own_record=self.made())
        writer.add(np.arange(tokens) % 300, [tokens])
        writer.finish()
        return self.folder / name

    def dumps(self, files: dict[str, str]) -> Path:
        """The config of a tokenization of these files, in one dump."""
        for name, text in files.items():
            (self.folder / "raw").mkdir(exist_ok=True)
            (self.folder / "raw" / name).write_text(text)
        prepare_dumps(self.folder / "raw", self.folder / "meta", n_dumps=1)
        settings = {"tokenizer": str(self.folder / "tokenizer.json"), "tokenizer_name": "t", "dataset_name": "d"}
        settings |= {name: str(self.folder / name) for name in ("metadata_folder", "output_folder", "logs")}
        settings["metadata_folder"] = str(self.folder / "meta")
        path = self.folder / "tokenization.yaml"
        path.write_text(yaml_file.dump_yaml(settings))
        return path

    def tokenize(self, files: dict[str, str], **changes: Any) -> int:
        path = self.dumps(files)
        path.write_text(yaml_file.dump_yaml(yaml_file.read_yaml(path).values | changes))
        return self.script("launchers/submit_tokenization.py", path)

    def begun(self, **sections: Any) -> Run:
        """The run `run`, submitted, without a job that lives."""
        submission.submit_run(resolve.load_run_config(self.config("run", **sections)))
        for job in (self.folder / "run").glob("local*"):
            shutil.rmtree(job)
        return self.run("run")

    def trained(self) -> Run:
        """The same with a checkpoint of iteration 10."""
        run = self.begun()
        began(run, 1, base=0)
        run.checkpoint(10).mkdir(parents=True)
        commit = CheckpointCommit(
            iteration=10, path=str(run.checkpoint(10)), consumed_samples=80, time=0.0, seconds=0.0
        )
        run.attempt(1).append_commit(commit)
        return run


Provoke = Callable[[Place], int]


@dataclass(frozen=True)
class Case:
    """One error. `line`: it lies in a file with lines, so the text must name one."""

    name: str
    provoke: Provoke
    line: bool = False
    kept: list[str] = field(default_factory=list)
    """Files of the run that were there before."""


def half_a_shard(place: Place) -> int:
    (place.folder / "data" / "shard1.idx").unlink()
    return place.with_settings()


def dead_link(place: Place) -> int:
    (place.folder / "data" / "more.bin").symlink_to("/nowhere/more.bin")
    (place.folder / "data" / "more.idx").symlink_to("/nowhere/more.idx")
    return place.with_settings()


def torn_shards(place: Place) -> int:
    for number in (0, 2):
        os.truncate(place.folder / "data" / f"shard{number}.bin", 4)
    return place.with_settings()


def held_out_and_trained(place: Place) -> int:
    return place.with_data(datasets=[str(place.folder / "data")], validation={"held": [str(place.folder / "data")]})


def closed(place: Place, name: str) -> Path:
    """A folder that an ordinary user may not write."""
    for folder in (place.folder, *place.folder.parents):
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    path = place.folder / name
    path.mkdir(exist_ok=True)
    path.chmod(0o755 if os.geteuid() == 0 else 0o555)
    return path


def closed_run(place: Place) -> int:
    target = closed(place, "theirs") / "run"
    path = place.config("run", run_dir=str(target), cluster={"python": None})
    (place.folder / "root").mkdir(mode=0o777)
    (place.folder / "root").chmod(0o777)
    with ordinary_user():
        return place.submit(path)


def closed_output(place: Place) -> int:
    path, target = place.dumps({"a.jsonl": '{"text": "x"}\n'}), closed(place, "theirs")
    path.write_text(yaml_file.dump_yaml(yaml_file.read_yaml(path).values | {"output_folder": str(target / "tokens")}))
    for part in (place.folder / "meta", place.folder / "meta" / ".lock"):
        part.chmod(0o777)
    with ordinary_user():
        return place.script("launchers/submit_tokenization.py", path)


def closed_mixture(place: Place) -> int:
    target = closed(place, "theirs")
    with ordinary_user():
        return mixture(place, 1, output=target / "mixture")


def mixture(place: Place, *weights: float, output: Path | None = None, options: Sequence[str] = ()) -> int:
    folders = ["--folders", place.folder / "data", "--weights", *weights]
    output = output or place.folder / "mixture"
    return place.script("scripts/tools/create_data_mixture.py", *folders, "--output", output, *options)


def other_vocabulary(place: Place) -> int:
    """A merged shard says which tokenizer made it; here another one."""
    merged = place.folder / "merged" / "all"
    place.script("scripts/tools/merge_datasets.py", "--input", place.folder / "data", "--output-prefix", merged)
    record = read_json(f"{merged}.record.json")
    record["tokenizer"] = {"fingerprint": "0" * 64, "ids": "1" * 64, "size": 4096, "eos": 0}
    write_json(f"{merged}.record.json", record)
    return place.with_data(datasets=[str(place.folder / "merged")])


def preprocess(place: Place, *options: str, files: str = "a.jsonl\n") -> int:
    (place.folder / "paths").write_text(files)
    (place.folder / "a.jsonl").write_text('{"text": "x"}\n')
    arguments = ["--tokenizer-name-or-path", place.folder / "tokenizer.json", "--output-folder", place.folder / "out"]
    arguments += ["--dataset", place.folder, "--paths-file", place.folder / "paths"]
    return place.script("scripts/tokenization/preprocess_megatron.py", *arguments, *options)


def live(place: Place) -> int:
    submission.submit_run(resolve.load_run_config(place.config("run")))
    return place.with_settings()


def ended(place: Place) -> int:
    write_stop(place.begun(), ChainEnd("done", "all 20 steps are done"))
    return place.with_settings()


def other_length(place: Place) -> int:
    place.trained()
    return place.with_settings(training={"seq_length": 32})


def other_data(place: Place) -> int:
    place.trained()
    place.shard("data/shard1")
    return place.with_settings()


def no_such_iteration(place: Place) -> int:
    return main(["checkpoint", "verify", f"{place.trained().path}:99"])


def two_tokenizers(place: Place) -> int:
    for number in range(2):
        prefix = place.shard(f"two/{number}", tokens=900 + number)
        made = TokenizerRecord(fingerprint=str(number) * 64, ids=str(number) * 64, size=300, eos=0)
        write_shard_record(str(prefix), ShardRecord(made=made, xxh3_128={}))
    arguments = ["--input", place.folder / "two", "--output-prefix", place.folder / "merged"]
    return place.script("scripts/tools/merge_datasets.py", *arguments)


def tokenizer(content: str, name: str = "tokenizer.json") -> Provoke:
    def provoke(place: Place) -> int:
        path = place.folder / "own" / name
        path.parent.mkdir()
        path.write_text(content)
        return place.with_data(datasets=[str(place.folder / "data")], tokenizer=str(path))

    return provoke


def settings(**sections: Any) -> Provoke:
    return lambda place: place.with_settings(**sections)


def layout(*, parallel: dict[str, int], ranks: int = 2) -> Provoke:
    return settings(parallel=parallel, job={"ntasks_per_node": ranks})


def text(lines: str) -> Provoke:
    return lambda place: place.with_text(lines)


def options(*given: str) -> Provoke:
    return lambda place: place.with_settings(*given)


def foreign(trainer: str = "command", **sections: Any) -> Provoke:
    """A run of a trainer that is not the native one, with these sections."""

    def provoke(place: Place) -> int:
        (place.folder / "train.py").write_text("")
        own = {"run": [sys.executable, str(place.folder / "train.py"), "{checkpoints}"]}
        values: dict[str, Any] = {name: CONFIG[name] for name in ("project", "name", "job", "cluster")}
        values |= {"run_dir": str(place.folder / "run"), "trainer": trainer} | sections
        if trainer == "command":
            values["command"] = own | sections.get("command", {})
        path = place.folder / "run.yaml"
        path.write_text(yaml_file.dump_yaml(values), encoding="utf-8")
        return place.submit(path)

    return provoke


TRAINING = {name: value for name, value in CONFIG["training"].items() if name != "threads"}


def megatron(args: dict[str, Any] | None = None, *, arrays: str | None = None, **sections: Any) -> Provoke:
    """A run with a checkout of Megatron-LM, and these flags."""

    def provoke(place: Place) -> int:
        own: dict[str, Any] = {"dir": str(stand_in(place.folder / "Megatron-LM")), "args": args or {}}
        if arrays is not None:
            file = place.folder / "launcher.sh"
            file.write_text(arrays)
            own["args_file"] = str(file)
        return foreign("megatron-lm", **{"training": TRAINING, "megatron_lm": own} | sections)(place)

    return provoke


DOCUMENT = {"a.jsonl": '{"text": "x"}\n'}

CASES = [
    # paths
    Case("config-missing", lambda place: place.submit(place.config("run").with_name("rum.yaml"))),
    Case("config-is-a-folder", lambda place: place.submit(place.folder / "data")),
    Case("data-missing", lambda place: place.with_data(datasets=[str(place.folder / "dataa")])),
    Case("data-without-shards", lambda place: place.with_data(datasets=[str(closed(place, "empty"))])),
    Case("half-a-shard", half_a_shard),
    Case("link-leads-nowhere", dead_link),
    Case("torn-shards", torn_shards),
    Case("held-out-and-trained", held_out_and_trained),
    Case(
        "validation-missing",
        lambda place: place.with_data(datasets=[str(place.folder / "data")], validation={"v": [f"{place.folder}/dat"]}),
    ),
    Case(
        "forbidden-path",
        lambda place: place.with_settings(
            cluster={"read_only_paths": [str(place.folder / "closed")]}, run_dir=str(place.folder / "closed" / "run")
        ),
    ),
    Case("metadata-missing", lambda place: place.tokenize(DOCUMENT, metadata_folder=str(place.folder / "metta"))),
    Case("paths-file-empty", lambda place: preprocess(place, files="")),
    Case("input-missing", lambda place: preprocess(place, files="a.jsonl\nb.jsonl\n")),
    Case("mixture-in-its-input", lambda place: mixture(place, 1, output=place.folder / "data" / "m")),
    Case(
        "merge-exists",
        lambda place: place.script(
            "scripts/tools/merge_datasets.py",
            "--input",
            place.folder / "data",
            "--output-prefix",
            place.folder / "data" / "shard0",
        ),
    ),
    Case("import-missing", lambda place: main(["import", "hf", f"{place.folder}/nothing", "--output", "x"])),
    Case(
        "export-exists",
        lambda place: main(["export", "hf", str(place.trained().path), "--output", str(ROOT)]),
        kept=["plan.json"],
    ),
    # names
    Case("run-unknown", lambda place: main(["status", f"{place.begun().path}s"]), kept=["plan.json"]),
    Case("run-to-load-unknown", options("--load", "/nowhere/run")),
    Case("setting-unknown", settings(training={"step": 5}), line=True),
    Case("section-unknown", text("trainig:\n  steps: 5\n"), line=True),
    Case("set-unknown", options("--set", "training.stepz=5")),
    Case("cluster-unknown", settings(cluster="apls"), line=True),
    Case("explain-unknown", lambda place: main(["explain", "training.stepz"])),
    Case("revision-unknown", lambda place: main(["config", f"{place.begun().path}:9"]), kept=["plan.json"]),
    Case("iteration-unknown", no_such_iteration, kept=["plan.json"]),
    Case("include-missing", text("include: [modell.yaml]\n"), line=True),
    # trainers
    Case("trainer-unknown", foreign("megatron"), line=True),
    Case("section-of-another-trainer", foreign(model=CONFIG["model"]), line=True),
    Case("trainer-forgotten", text("command: {run: [train.py]}\n"), line=True),
    Case("program-missing", foreign(command={"run": ["/no/such/program"]}), line=True),
    Case("program-with-blanks", foreign(command={"run": ["python train.py"]}), line=True),
    Case("progress-without-iteration", foreign(command={"progress": "loss (.*)"}), line=True),
    Case("pattern-without-iteration", foreign(command={"checkpoint": {"pattern": "step"}}), line=True),
    Case("signal-unknown", foreign(command={"leave_signal": "USR2"}), line=True),
    Case("checkpoint-where-none-is", foreign(command={"run": ["/bin/true", "{checkpoint}"]}), line=True),
    Case("array-with-a-command", megatron(arrays="A_ARGS=(\n  --lr $(cat lr)\n)\n"), line=True),
    Case("array-with-an-unknown-variable", megatron(arrays="A_ARGS=( --seed $SEED )\n"), line=True),
    Case("flag-unknown", megatron(args={"num-layerz": 2})),
    Case("flag-of-the-chain", megatron(args={"save": "/elsewhere"})),
    Case("setting-without-a-flag", megatron(training=TRAINING | {"on_spike": "skip", "threads": 1})),
    Case("checkout-missing", foreign("megatron-lm", megatron_lm={"dir": "/no/checkout"})),
    # types
    Case("steps-no-number", settings(training={"steps": "many"}), line=True),
    Case("precision-of-megatron-lm", settings(training={"precision": "fp16"}), line=True),
    Case("steps-zero", settings(training={"steps": 0}), line=True),
    Case("yaml-broken", text("data: {a: [1, 2}\n"), line=True),
    Case("yaml-twice", text("name: again\n"), line=True),
    Case("yaml-tag", text("more: !!int abc\n"), line=True),
    Case("time-no-time", settings(job={"time": "soon"}), line=True),
    Case("override-without-value", options("--set", "training.steps")),
    Case(
        "samples-no-range",
        lambda place: main(["data", "show", str(place.begun().path), "--samples", "9:3"]),
        kept=["plan.json"],
    ),
    Case("size-no-size", lambda place: main(["export", "hf", "x", "--output", "x", "--max-shard-size", "5GX"])),
    Case("tokens-no-number", lambda place: mixture(place, 1, options=["--tokens", "10Q"])),
    Case("weights-too-many", lambda place: mixture(place, 1, 2)),
    Case("weight-negative", lambda place: mixture(place, -1)),
    Case("tasks-zero", lambda place: preprocess(place, "--n-tasks", "0")),
    # tokenizers
    Case("tokenizer-missing", lambda place: place.with_data(tokenizer=str(place.folder / "tokeniser.json"))),
    Case("tokenizer-of-no-hub", lambda place: place.with_data(tokenizer="no-such/tokenizer")),
    Case("tokenizer-broken", tokenizer("{}")),
    Case("tokenizer-tiktoken", tokenizer("IQ== 0\nIg== 1\n", "tokenizer.model")),
    Case("tokenizer-without-end", lambda place: preprocess(place, "--eos-token", "</no>")),
    Case("tokenizer-of-other-shards", other_vocabulary),
    Case("two-tokenizers", two_tokenizers),
    # columns
    Case("column-wrong", lambda place: place.tokenize({"a.jsonl": '{"contents": "x"}\n'}), line=True),
    Case("column-wrong-in-two", lambda place: place.tokenize({"a.csv": "id\n1\n", "b.csv": "no\n1\n"})),
    Case("json-array", lambda place: place.tokenize({"a.json": '[{"text": "x"}]'})),
    # ranks and layouts
    Case("heads-and-tensor-parallel", layout(parallel={"tensor_model_parallel_size": 8}, ranks=8), line=True),
    Case("ranks-and-layout", layout(parallel={"tensor_model_parallel_size": 4}), line=True),
    Case("batch-and-ranks", settings(training={"global_batch_size": 7}), line=True),
    Case("layers-and-pipeline", layout(parallel={"pipeline_model_parallel_size": 3}, ranks=3), line=True),
    Case(
        "transformer-engine-missing",
        settings(training={"transformer_impl": "transformer_engine", "precision": "bf16"}, job={"gpus_per_node": 1}),
    ),
    Case("window-too-long", settings(training={"seq_length": 100_000})),
    # Slurm
    Case("slurm-missing", settings(cluster={"scheduler": "slurm", "host_python": sys.executable})),
    Case("account-with-a-line-break", settings(job={"account": "a\nb"}), line=True),
    Case("group-unknown", settings(chain={"triggers_group": "no-such-group"})),
    Case("grace-period-too-long", settings(chain={"grace_period": 600})),
    # permissions
    Case("run-closed", closed_run),
    Case("output-closed", closed_output),
    Case("mixture-closed", closed_mixture),
    # resumes
    Case("jobs-already", live, kept=["plan.json", "local/job-0001.json"]),
    Case("chain-has-ended", ended, kept=["plan.json"]),
    Case("length-changed", other_length, kept=["plan.json"]),
    Case("data-changed", other_data, kept=["plan.json"]),
    Case("resume-of-no-run", lambda place: main(["resume", str(place.folder / "data")])),
]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace whose shards say which tokenizer made them."""
    made = Place(Workspace.make(tmp_path_factory.mktemp("prepared")).folder)
    for prefix in (made.folder / "data").glob("*.bin"):
        write_shard_record(str(prefix.with_suffix("")), ShardRecord(made=made.made(), xxh3_128={}))
    return made.folder


@pytest.fixture
def place(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    made = Place(tmp_path)
    monkeypatch.setattr(submission, "log_folder", lambda _: tmp_path / "root/logs/slurm/training")
    monkeypatch.setattr(find_runs, "runs_folder", lambda: tmp_path / "runs")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", "/the/cache")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir(tmp_path)
    return made


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_error_is_one_clear_text(case: Case, place: Place) -> None:
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = case.provoke(place)
    found = _steady(said.getvalue(), place.folder)
    golden = TEXTS / f"{case.name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(found)
    assert code == 1
    assert found == golden.read_text()
    assert found.count("error: ") == 1
    assert found.startswith("error: ")
    assert "\n  -> " in found, "it does not say what to do"
    assert not case.line or re.search(r"\.(?:yaml|jsonl?|sh):\d+", found), "it names no line"
    queued = [*place.folder.glob("run/local/job-*.json"), *place.folder.glob("run/plan.json")]
    assert sorted(str(path.relative_to(place.folder / "run")) for path in queued) == sorted(case.kept)


def test_every_text_has_its_case() -> None:
    assert sorted(path.stem for path in TEXTS.iterdir()) == sorted(case.name for case in CASES)
    assert len(CASES) >= 50


def _steady(said: str, folder: Path) -> str:
    """Without what differs from machine to machine: paths, this user, job numbers of processes."""
    said = said.replace(str(folder), "/HERE").replace(str(ROOT), "/ROOT")
    for name in {pwd.getpwuid(os.geteuid()).pw_name, str(os.geteuid())}:
        said = re.sub(rf"(belongs to|let) {re.escape(name)}\b", r"\1 USER", said)
    said = re.sub(rf"group {re.escape(grp.getgrgid(folder.stat().st_gid).gr_name)}\b", "group GROUP", said)
    return said.replace("dr-xr-xr-x", "drwxr-xr-x")
