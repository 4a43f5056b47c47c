"""What `relayrun data show`, `data ledger` and `status` know of streams, from the run directory alone."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from relayrun.cli import main
from relayrun.config.compose import resolve
from relayrun.config.compose.schema import RunConfig
from relayrun.control.rundir.records import CheckpointCommit
from relayrun.control.rundir.run import Run, stream_positions_path
from relayrun.errors import InputError
from relayrun.files import write_json
from relayrun.submit.check.data import build_manifest
from relayrun.tokens.mixture import audit
from relayrun.tokens.mixture.build_datasets import training_order
from relayrun.tokens.order.batches import TrainingProgress
from relayrun.tokens.shards.manifest import Manifest
from relayrun.tokens.streams import text_stream
from relayrun.watch.status import run_status, run_status_text
from tests.chain.conftest import MakeRun, make_run
from tests.history import began
from tests.streaming import write
from tests.workspace import Workspace

__all__ = ["make_run"]

LANES = 4
BATCH = 8


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_stream, "MIN_ROWS_PER_LANE", 3)


WORDS = {row: " ".join(f"w{1 + (row * 7 + place) % 60}" for place in range(5 + row % 30)) for row in range(100)}
"""The texts of rows, in words of the workspace's tokenizer."""


class StreamedRun:
    """A run over one stream and one data set of token shards, as attempts leave it, without a model."""

    def __init__(self, folder: Path, **stream: Any) -> None:
        self.workspace = Workspace.make(folder)
        self.dir: Run = self.workspace.run("run")
        for made in (self.dir.config, self.dir.attempts, self.dir.checkpoints):
            made.mkdir(parents=True)
        self.text = folder / "web"
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.stream = stream
        self.weights = {"web": 2.0, "tokens": 1.0}
        self.iteration = self.consumed = 0
        self.trained: dict[int, list[int]] = {}

    def submit(self, **weights: float) -> None:
        self.weights = weights or self.weights
        kind = "jsonl" if any(self.text.glob("*.jsonl*")) else "parquet"
        every: dict[str, Any] = {
            "web": {"source": kind, "path": str(self.text), "stream": {"shuffle_buffer": 16, **self.stream}},
            "tokens": {"path": str(self.workspace.folder / "data")},
        }
        mixture = {name: every[name] | {"weight": weight} for name, weight in self.weights.items()}
        tokenizer = str(self.workspace.folder / "tokenizer.json")
        data = {"tokenizer": tokenizer, "datasets": [], "mixture": mixture, "lanes": LANES}
        config = resolve.load_run_config(self.workspace.config("run", data=data, training={"global_batch_size": BATCH}))
        assert isinstance(config, RunConfig)
        found = build_manifest(config)
        before = Manifest.read(self.dir.manifest).datasets if self.dir.manifest.exists() else {}
        self.manifest = replace(found, datasets=before | found.datasets)
        self.manifest.write(self.dir.manifest)
        self.dir.config_revision(len(self.dir.revisions()) + 1).write_text(resolve.dump_run_config(config))
        self.config = config

    def attempt(self, saves: list[int], *, records: bool = True) -> None:
        """Begin at the newest commit, train, and save after so many iterations more each time."""
        number = len(self.dir.attempt_numbers()) + 1
        order = training_order(self.config, Manifest.read(self.dir.manifest))
        progress = TrainingProgress(self.config.training.batch_sizes)
        if number > 1:
            order.resume(self.state)
            progress = TrainingProgress.resume(self.state["progress"], self.config.training.batch_sizes)
        attempt = self.dir.attempt(number)
        began(self.dir, number, base=self.iteration, config_revision=self.dir.revisions()[-1])
        write_json(attempt.data, order.state(self.consumed) | {"progress": progress.state()})
        reading = order.lane_reader(self.consumed, 0, 1)
        for save in saves:
            for _ in range(save):
                for k in reading.numbers(self.consumed, self.consumed + BATCH):
                    self.trained[k] = reading.row(k).tokens.tolist()
                progress.advance()
                self.iteration, self.consumed = self.iteration + 1, self.consumed + BATCH
            self.state = order.state(self.consumed, [reading.cursors(self.consumed)]) | {"progress": progress.state()}
            folder = self.dir.checkpoint(self.iteration)
            folder.mkdir()
            if records:
                write_json(stream_positions_path(folder), self.state)
            commit = CheckpointCommit(
                iteration=self.iteration, path=str(folder), consumed_samples=self.consumed, time=0.0, seconds=1.0
            )
            attempt.append_commit(commit)
        reading.close()


def text_in(run: StreamedRun, sample: audit.AuditedSample) -> list[int]:
    """The tokens of a sample, from the raw files that its origins name."""
    found: list[int] = []
    for origin in sample.origins:
        path, _, group = origin.prefix.partition(", row group ")
        text = pq.ParquetFile(path).read_row_group(int(group))["text"][origin.document].as_py()
        ids = run.tokenizer.encode(text, add_special_tokens=False).ids
        found += [*ids, run.manifest.eod][origin.offset : origin.offset + origin.tokens]
    return found


@pytest.mark.slow
def test_every_sample_is_found_again_in_its_file_through_attempts_and_mixtures(tmp_path: Path) -> None:
    run = StreamedRun(tmp_path)
    write(run.text, "parquet", [40, 30], extra=WORDS)
    run.submit()
    run.attempt([2, 1])
    run.attempt([2], records=False)  # as an earlier version saved
    run.submit(web=1.0)
    run.attempt([1, 2])
    audited = audit.audit_run(run.dir)
    assert audited.consumed_samples == run.consumed == 8 * BATCH
    of_streams = 0
    for sample in audit.audited_samples(audited, range(run.consumed)):
        assert sample.tokens.tolist() == run.trained[sample.number]
        if sample.dataset == "web":
            of_streams += 1
            inputs = sample.tokens[:-1].tolist()
            text = text_in(run, sample)
            assert inputs[: len(text)] == text
            assert set(inputs[len(text) :]) <= {run.manifest.eod}
    assert of_streams > 30


@pytest.mark.slow
def test_the_nearest_record_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not all that a lane has read since its attempt began."""
    run = StreamedRun(tmp_path)
    write(run.text, "parquet", [40, 30], extra=WORDS)
    run.submit(web=1.0)
    run.attempt([3, 3, 3])
    audited = audit.audit_run(run.dir)
    took: list[int] = []
    lanes = type(run_stream(audited).open_lanes({0: run_stream(audited).first_cursors()[0]}))
    take = lanes.take
    monkeypatch.setattr(lanes, "take", lambda self, lane: (took.append(lane), take(self, lane))[1])
    found = next(audit.audited_samples(audited, range(6 * BATCH + 5, 6 * BATCH + 6)))
    assert found.tokens.tolist() == run.trained[6 * BATCH + 5]
    assert len(took) == 2
    for folder in run.dir.checkpoints.glob("iter_*"):
        stream_positions_path(folder).unlink()
    assert next(audit.audited_samples(audited, range(50, 51))).tokens.tolist() == run.trained[50]
    run.dir.attempt(1).data.unlink()
    with pytest.raises(InputError, match="sample 50 is of the stream 'web', and no record says"):
        next(audit.audited_samples(audited, range(50, 51)))


def run_stream(audited: audit.AuditedRun) -> Any:
    return audited.datasets["web"]


@pytest.mark.slow
def test_the_ledger_and_the_status_count_what_was_left_out(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    make_run: MakeRun,
) -> None:
    run = StreamedRun(tmp_path, on_error="skip-line", min_len=17)
    write(run.text, "jsonl", [40, 30, 30], extra=WORDS)
    lines = (run.text / "000.jsonl").read_bytes().splitlines()
    lines[3], lines[9] = b'{"text": 3}', b"torn"
    (run.text / "000.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    packed = (run.text / "001.jsonl.gz").read_bytes()
    (run.text / "001.jsonl.gz").write_bytes(packed[:-20])
    run.submit(web=1.0)
    run.attempt([4, 8])
    rows = {row.dataset: row for row in audit.dataset_ledgers(audit.audit_run(run.dir))}
    lanes = rows["web"].lanes
    assert lanes is not None
    assert lanes.sample == 12 * BATCH
    epochs, most = lanes.epochs
    assert epochs > 1
    assert lanes.files >= epochs
    assert epochs <= lanes.left_out["not JSON"] <= most
    assert epochs <= lanes.left_out["not text"] <= most
    assert lanes.left_out["min_len, max_len"] > 0
    assert main(["data", "ledger", str(run.dir.path)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"were left out \(.*\d not JSON.*\); left out whole: \d+ files, counted in every epoch", said)
    plan = make_run(folder="planned")[1]
    plan.write(run.dir.plan)
    status = run_status.read_run_status(run.dir, run_status.QueueStatus(), now=0.0)
    assert status.left_out == {
        "web": {"files": lanes.files} | {r: n for r, n in lanes.left_out.items() if "min" not in r}
    }
    text = dict(run_status_text._lines(status, 0.0))["left out"]
    assert (
        text
        == f"web: {lanes.files} files, {lanes.left_out['not JSON']} not JSON, {lanes.left_out['not text']} not text"
    )
