from __future__ import annotations

import csv
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relayrun.errors import ConfigError, InputError, RelayrunError, SchedulerError
from relayrun.tokens.tokenize.dump_jobs import (
    append_csv_row,
    prepare_submission,
    submit_dumps,
    tokenize_dump,
)
from relayrun.tokens.tokenize.dumps import DumpsFolder, prepare_dumps
from relayrun.tokens.tokenize.job_config import (
    TokenizationConfig,
    TokenizationSettings,
    load_tokenization_config,
    settings_from_environment,
)
from relayrun.tokens.tokenize.options import TokenizeOptions
from relayrun.tokens.tokenize.pipeline import tokenize_paths_file
from tests.publish.test_progress import LINE, make_terminal
from tests.tokenization_corpus import TEXTS, train_tokenizer, write_parquet
from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts/tokenization"

CSV_HEADER = (
    "slurm_job_id,node,start,end,paths_file,output_folder,dataset_total_size,processed_total_size,"
    "number_of_workers_per_node,time,bw,total_tokens_processed,throughput"
)


@pytest.fixture
def settings(tmp_path: Path) -> TokenizationSettings:
    """Two prepared dumps of two files each; paths with blanks."""
    for number in range(4):
        file = tmp_path / "da ta" / f"{number} '.parquet"
        file.parent.mkdir(exist_ok=True)
        write_parquet(file, [f"{text}{number}" for text in TEXTS])
    prepare_dumps(tmp_path / "da ta", tmp_path / "meta data", n_dumps=2)
    return TokenizationSettings(
        tokenizer=str(train_tokenizer(tmp_path / "tok" / "tokenizer.json").parent),
        tokenizer_name="T-1",
        dataset_name="D.2",
        metadata_folder=str(tmp_path / "meta data"),
        output_folder=str(tmp_path / "out put"),
        logs=str(tmp_path / "lo gs"),
        tasks=2,
        workers=1,
    )


def environment(settings: TokenizationSettings, **more: str) -> dict[str, str]:
    """The settings as variables of the Bash launcher."""
    return os.environ | {
        "TOKENIZER": settings.tokenizer,
        "TOKENIZER_NAME": settings.tokenizer_name,
        "DATASET_NAME": settings.dataset_name,
        "PATH_TO_PREPROCESSING_METADATA": settings.metadata_folder,
        "PATH_TO_OUTPUT_FOLDER": settings.output_folder,
        "PATH_TO_LOGS": settings.logs,
        "NUMBER_OF_DATATROVE_TASKS": "2",
        "NUMBER_OF_DATATROVE_WORKERS": "1",
        "PYTHON": sys.executable,
        **more,
    }


def config(settings: TokenizationSettings, **changes: Any) -> TokenizationConfig:
    """The settings as those of a YAML config."""
    return TokenizationConfig(**(settings.model_dump() | changes))


def rows(settings: TokenizationSettings) -> list[dict[str, str]]:
    with settings.csv.open(newline="") as file:
        return list(csv.DictReader(file))


def shard_bytes(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.glob("*_tokens.*")}


@pytest.mark.slow
def test_a_dump_is_tokenized_moved_and_noted(settings: TokenizationSettings, tmp_path: Path) -> None:
    row = tokenize_dump(settings, 1)
    metadata = DumpsFolder(settings.metadata_folder)
    assert (metadata.pending(), metadata.finished()) == ([0], [1])
    output = tmp_path / "out put/T-1/D.2/dump-1"
    direct = tokenize_paths_file(
        TokenizeOptions(tokenizer=settings.tokenizer, tasks=2, workers=1),
        output_folder=tmp_path / "direct",
        dataset=metadata.raw_link,
        paths_file=metadata.completed / "paths_file_1.txt",
    )
    assert shard_bytes(output) == shard_bytes(tmp_path / "direct")
    assert ",".join(row) == CSV_HEADER
    (noted,) = rows(settings)
    assert noted == {name: str(value) for name, value in row.items()}
    sizes = [file.stat().st_size for file in (tmp_path / "da ta").iterdir()]
    assert int(noted["dataset_total_size"]) == sizes[1] + sizes[3] == direct.input_bytes
    assert int(noted["total_tokens_processed"]) == direct.tokens
    assert int(noted["processed_total_size"]) == sum(file.stat().st_size for file in output.glob("*.bin"))
    assert noted["paths_file"] == str(metadata.completed / "paths_file_1.txt")


@pytest.mark.slow
def test_all_dumps_are_tokenized_through_submitit_here(
    settings: TokenizationSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = make_terminal(monkeypatch)
    assert submit_dumps(config(settings, executor="local", max_parallel=2)) == [0, 1]
    lines = [line for line in LINE.findall(terminal.getvalue()) if line]
    assert re.fullmatch(r"tokenizing: 0% of [\d.]+k? bytes", lines[0]), lines
    shares = [int(line.split()[1].rstrip("%")) for line in lines]
    assert shares == sorted(shares)
    assert re.search(r", [\d.]+k? per second, 0:00:\d\d left$", lines[-1]), lines
    metadata = DumpsFolder(settings.metadata_folder)
    assert (metadata.pending(), metadata.finished()) == ([], [0, 1])
    output = tmp_path / "out put/T-1/D.2"
    assert os.readlink(metadata.tokenized_link) == str(output)
    assert sorted(path.relative_to(output).as_posix() for path in output.rglob("*.bin")) == [
        f"dump-{dump}/0000{rank}_tokens.bin" for dump in (0, 1) for rank in (0, 1)
    ]
    assert len(rows(settings)) == 2
    assert submit_dumps(config(settings, executor="local")) == []  # a requeued script must not stop here
    write_parquet(tmp_path / "da ta" / "new.parquet", ["later"])
    assert [dump.index for dump in prepare_dumps(tmp_path / "da ta", metadata.path)] == [2]
    assert submit_dumps(config(settings, executor="local")) == [2]


@pytest.mark.slow
def test_a_dump_that_fails_is_one_message_and_the_others_are_done(
    settings: TokenizationSettings, tmp_path: Path
) -> None:
    metadata = DumpsFolder(settings.metadata_folder)
    torn = (tmp_path / "da ta") / metadata.paths_file(0).read_text().splitlines()[0]
    whole = torn.read_bytes()
    texts = pa.array([b"its beginning is fine", b"a stray \x80"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": texts}), torn)
    config = tmp_path / "config.yaml"
    config.write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in settings if value is not None))
    launcher = [sys.executable, ROOT / "launchers/submit_tokenization.py", config, "--executor", "local"]
    done = subprocess.run(launcher, capture_output=True, text=True, cwd=tmp_path, timeout=600)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: 1 of 2 dumps failed (dump 0). Dump 0: {torn}")
    assert "row 1" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert (metadata.pending(), metadata.finished()) == ([0], [1])
    torn.write_bytes(whole)
    done = subprocess.run(launcher, capture_output=True, text=True, cwd=tmp_path, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
    assert "dump 0 done (1/1)" in done.stdout
    assert (metadata.pending(), metadata.finished()) == ([], [0, 1])
    assert len(rows(settings)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGKILL], ids=lambda number: number.name)
def test_local_jobs_end_with_the_command_however_it_ends(
    settings: TokenizationSettings, tmp_path: Path, number: signal.Signals
) -> None:
    """Orphans went on writing, and the same command at once failed at their locks."""
    path = tmp_path / "config.yaml"
    words = "".join(f"{name}: {json.dumps(value)}\n" for name, value in settings if value is not None)
    path.write_text(f"{words}max_parallel: 1\n")
    launcher = [sys.executable, ROOT / "launchers/submit_tokenization.py", path, "--executor", "local"]
    with subprocess.Popen(launcher, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path) as run:
        wait_for(lambda: len(psutil.Process(run.pid).children(recursive=True)) > 1)  # submitit's, ours
        jobs = psutil.Process(run.pid).children(recursive=True)
        run.send_signal(number)
        words = run.communicate(timeout=60)[0]
    if number == signal.SIGKILL:
        assert run.returncode == -number
    else:
        assert run.returncode == 128 + number
        assert "0 of 2 dumps are done and kept; the same command goes on" in words.splitlines()[-1]
    assert "Traceback" not in words
    assert not psutil.wait_procs(jobs, timeout=60)[1]
    assert not list((tmp_path / "out put").rglob("*_tokens.bin"))
    assert submit_dumps(config(settings, executor="local", max_parallel=2)) == [0, 1]


def test_what_is_wrong_is_said_before_any_job_starts(settings: TokenizationSettings, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such tokenizer file"):
        prepare_submission(settings.model_copy(update={"tokenizer": str(tmp_path / "nothing")}))
    with pytest.raises(InputError, match="no such metadata folder"):
        submit_dumps(config(settings, metadata_folder=str(tmp_path / "nothing")))
    tokenize_dump(settings, 0)
    prepare_submission(settings)
    with pytest.raises(InputError, match="finished dumps of this folder went to"):
        prepare_submission(settings.model_copy(update={"output_folder": str(tmp_path / "other")}))


def test_files_without_a_row_are_named(
    settings: TokenizationSettings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "da ta" / "blank.jsonl").write_text("\n\n")
    (tmp_path / "da ta" / "none.jsonl.gz").write_bytes(gzip.compress(b""))
    prepare_dumps(tmp_path / "da ta", tmp_path / "meta data", n_dumps=1)
    tokenize_dump(settings.model_copy(update={"column": "text"}), 0)
    assert "2 files gave no row: blank.jsonl, none.jsonl.gz" in caplog.text


def test_dumps_that_are_all_done_are_those_of_these_settings(settings: TokenizationSettings, tmp_path: Path) -> None:
    submit_dumps(config(settings, executor="local"))
    for other in ({"output_folder": str(tmp_path / "other")}, {"tokenizer_name": "other"}):
        with pytest.raises(InputError, match="finished dumps of this folder went to"):
            submit_dumps(config(settings, executor="local", **other))
    assert submit_dumps(config(settings, executor="local")) == []
    settings.dataset_output.rename(tmp_path / "away")
    with pytest.raises(InputError, match="the finished dumps of this metadata folder are gone"):
        submit_dumps(config(settings, executor="local"))


@pytest.mark.parametrize("where", ["job.setup", "cluster.environment.HF_TOKEN"])
def test_a_secret_does_not_get_into_the_jobs_script(settings: TokenizationSettings, where: str) -> None:
    made = config(settings, executor="slurm")
    secret = {"job": {"setup": ["export PASSWORD=x0123456789"]}}
    if where != "job.setup":
        secret = {"cluster": {"name": "c", "scheduler": "slurm", "environment": {"HF_TOKEN": "x0123456789"}}}
    made = type(made).model_validate(made.model_dump(exclude_unset=True) | secret)
    with pytest.raises(ConfigError, match="looks like a secret") as error:
        submit_dumps(made)
    assert error.value.where == where
    assert "0123456789" not in str(error.value)


def test_without_slurm_the_slurm_executor_says_so(
    settings: TokenizationSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SchedulerError, match="Slurm is not installed here"):
        submit_dumps(config(settings, executor="slurm"))


def test_a_dump_is_not_prepared_anew_while_it_is_tokenized(settings: TokenizationSettings, tmp_path: Path) -> None:
    with DumpsFolder(settings.metadata_folder).in_use(), pytest.raises(RelayrunError, match="another process"):
        prepare_dumps(tmp_path / "da ta", settings.metadata_folder)


def test_rows_are_appended_whole_behind_a_torn_line_and_by_many_at_once(tmp_path: Path) -> None:
    row = dict.fromkeys(CSV_HEADER.split(","), "x,\"y'")
    file = tmp_path / "t.csv"
    file.write_text(CSV_HEADER + "\ntorn,li")
    threads = [threading.Thread(target=append_csv_row, args=(file, row)) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    with file.open(newline="") as opened:
        read = list(csv.DictReader(opened))
    assert read[0]["slurm_job_id"] == "torn"
    assert read[1:] == [row] * 20


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tokeniser: x\n", r"config\.yaml:1: tokeniser: unknown setting; did you mean 'tokenizer'\?"),
        ("tokenizer: x\n", "tokenizer_name: this setting is missing"),
        ("tokenizer_name: a b\n", r"config\.yaml:1: tokenizer_name: String should match"),
        ("tokenizer: x\njob: {partitions: p}\n", r":2: job\.partitions: unknown.*did you mean 'partition'"),
        ("job: {time: soon}\n", r":1: job\.time: 'soon' is no Slurm time"),
        (
            "tokenizer: x\nmodel_identifier: y\n",
            r":2: model_identifier: this is another name of tokenizer, which is [\s\S]*:1;",
        ),
        ("tokenization_batch_size: 0\n", r":1: batch_documents: Input should be greater than"),
    ],
)
def test_a_wrong_config_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    given = {"tokenizer: x", "tokenizer_name: t", "dataset_name: d", "metadata_folder: m", "output_folder: o"}
    if "missing" in message:
        given.discard("tokenizer_name: t")
    names = {line.partition(":")[0] for line in text.splitlines()}
    (tmp_path / "config.yaml").write_text(
        text + "".join(f"{line}\n" for line in sorted(given) if line.partition(":")[0] not in names)
    )
    with pytest.raises(ConfigError, match=message):
        load_tokenization_config(tmp_path / "config.yaml")


def test_a_config_in_the_names_of_nemo_curator(settings: TokenizationSettings, tmp_path: Path) -> None:
    ours = {name: value for name, value in settings if value is not None} | {
        "column": "body",
        "append_eod": "no",
        "batch_documents": 7,
        "cache_dir": "c",
    }
    theirs = {
        "tokenizer": "model_identifier",
        "output_folder": "path",
        "column": "text_field",
        "batch_documents": "tokenization_batch_size",
    }
    texts = [
        {name: ours[name] for name in ours},
        {theirs.get(name, name): False if name == "append_eod" else ours[name] for name in ours},
    ]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.yaml").write_text(json.dumps(text))
    assert load_tokenization_config(tmp_path / "0.yaml") == load_tokenization_config(tmp_path / "1.yaml")


def test_the_bash_launcher_takes_names_of_nemo_curator(settings: TokenizationSettings) -> None:
    given = environment(settings, MODEL_IDENTIFIER=settings.tokenizer, TEXT_FIELD="body")
    with pytest.raises(ConfigError, match=r"^MODEL_IDENTIFIER: .*another name of tokenizer.*\n.*given at TOKENIZER;"):
        settings_from_environment(given)
    del given["TOKENIZER"]
    assert settings_from_environment(given) == settings.model_copy(update={"column": "body"})


def test_the_example_config_is_valid_and_its_paths_start_beside_launchers() -> None:
    config = load_tokenization_config(ROOT / "configs/data/tokenization-example.yaml")
    assert config.metadata_folder == str(ROOT / "data/my-text-dumps")
    assert config.job.time == "12:00:00"


def test_settings_of_the_environment(settings: TokenizationSettings) -> None:
    assert settings_from_environment(environment(settings)) == settings


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("TOKENIZERNAME", "x", r"TOKENIZERNAME is no setting; did you mean TOKENIZER_NAME\?"),
        ("NUMBER_OF_DATATROVE_TASK", "3", r"did you mean NUMBER_OF_DATATROVE_TASKS\?"),
        ("NUMBER_OF_DATATROVE_TASKS", "many", "NUMBER_OF_DATATROVE_TASKS: 'many' is no number"),
        ("NUMBER_OF_DATATROVE_TASKS", "0", "NUMBER_OF_DATATROVE_TASKS: tasks: .*greater than 0"),
        ("DATASET_NAME", "", "DATASET_NAME: dataset_name: this setting is missing"),
        ("DATASET_NAME", "../x", "DATASET_NAME: dataset_name: String should match"),
    ],
)
def test_a_wrong_or_misspelt_variable_is_named(
    settings: TokenizationSettings, variable: str, value: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        settings_from_environment(environment(settings, **{variable: value}))


@pytest.fixture
def fake_slurm(tmp_path: Path) -> Path:
    """An sbatch that runs the job at once and a squeue that knows no job; sbatch's arguments go to a file."""
    folder = tmp_path / "bin"
    folder.mkdir()
    sbatch = """#!/bin/bash
printf '%s\\0' "$@" >>"$SBATCH_LOG"
echo >>"$SBATCH_LOG"
while [[ $1 == --* ]]; do shift; done
cp "$1" "$SBATCH_LOG.spool" # the job sees a copy of its script, as on Slurm
echo "100$2;cluster"
bash "$SBATCH_LOG.spool" "${@:2}" >/dev/null
"""
    for name, text in (("sbatch", sbatch), ("squeue", "#!/bin/bash\n")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


@pytest.mark.slow
def test_the_bash_launcher_submits_every_dump_from_any_directory(
    settings: TokenizationSettings, tmp_path: Path, fake_slurm: Path
) -> None:
    log = tmp_path / "sbatch log"
    variables = environment(settings, PATH=f"{fake_slurm}:{os.environ['PATH']}", SBATCH_LOG=str(log))
    done = subprocess.run(
        [SCRIPTS / "submit_tokenization.sh"], env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[:2] == ["dump 0: Slurm job 1000", "dump 1: Slurm job 1001"]
    logs = tmp_path / "lo gs/slurm/tokenization-T-1-D.2"
    assert logs.is_dir()
    assert [line.split("\0")[:-1] for line in log.read_text().splitlines()] == [
        [
            "--parsable",
            "--job-name=tokenization-T-1-D.2",
            f"--output={logs}/R-%x-%j.out",
            f"--error={logs}/R-%x-%j.err",
            str(SCRIPTS / "tokenize.sh"),
            dump,
        ]
        for dump in ("0", "1")
    ]
    metadata = DumpsFolder(settings.metadata_folder)
    assert (metadata.pending(), metadata.finished()) == ([], [0, 1])
    assert (metadata.path / "jobs.jsonl").read_text().count("slurm_job_id") == 2
    assert len(shard_bytes(tmp_path / "out put/T-1/D.2/dump-0")) == 4


@pytest.mark.slow
def test_the_bash_launcher_stops_at_a_wrong_setting(
    settings: TokenizationSettings, tmp_path: Path, fake_slurm: Path
) -> None:
    variables = environment(
        settings, PATH=f"{fake_slurm}:{os.environ['PATH']}", SBATCH_LOG=str(tmp_path / "log"), DATASETNAME="x"
    )
    done = subprocess.run(
        [SCRIPTS / "submit_tokenization.sh"], env=variables, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: environment: DATASETNAME is no setting; did you mean DATASET_NAME?")
    assert not (tmp_path / "log").exists()
