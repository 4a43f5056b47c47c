"""What a run read, told from its directory: samples, ledger, difference of two runs; through the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relayrun.cli import main
from relayrun.config.compose import resolve
from relayrun.control.rundir import run as rundir
from relayrun.control.rundir.records import CheckpointCommit
from relayrun.errors import InputError
from relayrun.files import append_line, write_json
from relayrun.submit.check.data import build_manifest
from relayrun.tokens.mixture import audit
from relayrun.tokens.mixture.build_datasets import training_order
from relayrun.tokens.order.batches import TrainingProgress
from relayrun.tokens.shards.manifest import Manifest
from relayrun.tokens.shards.shard import Shard
from tests.history import began
from tests.workspace import Workspace


class Run:
    """A run directory as submits and attempts leave it, without training: two data sets of the workspace's shards."""

    def __init__(self, workspace: Workspace, name: str) -> None:
        self.workspace, self.dir, self.name = workspace, workspace.run(name), name
        for folder in (self.dir.config, self.dir.attempts, self.dir.checkpoints):
            folder.mkdir(parents=True)

    def submit(self, weights: dict[str, float], **training: Any) -> None:
        data = {
            "tokenizer": str(self.workspace.folder / "tokenizer.json"),
            "datasets": [],
            "mixture": {
                name: {"path": str(self.workspace.folder / "data" / shard), "weight": weights[name]}
                for name, shard in (("web", "shard[01]"), ("code", "shard2"))
                if name in weights
            },
        }
        config = resolve.load_run_config(self.workspace.config(self.name, data=data, training=training))
        found = build_manifest(config)
        if self.dir.manifest.exists():
            found = Manifest.build(
                {
                    n: [s.prefix for s in d.shards]
                    for n, d in (Manifest.read(self.dir.manifest).datasets | found.datasets).items()
                },
                {},
                vocabulary_size=found.vocabulary_size,
                eod=found.eod,
                tokenizer=found.tokenizer,
                tokenizer_fingerprint=found.tokenizer_fingerprint,
            )
        found.write(self.dir.manifest)
        self.dir.config_revision(len(self.dir.revisions()) + 1).write_text(resolve.dump_run_config(config))

    def attempt(self, iterations: int) -> None:
        """Begin at the newest commit, train so many iterations, commit."""
        number = max(self.dir.attempt_numbers(), default=0) + 1
        before = audit._durable_samples(self.dir)
        revision = self.dir.revisions()[-1]
        config = resolve.read_resolved_config(self.dir.config_revision(revision))
        order = training_order(config, Manifest.read(self.dir.manifest))
        progress = TrainingProgress(config.training.batch_sizes)
        if number > 1:
            state = json.loads((self.dir.checkpoint(before[0]) / "state.json").read_text())
            order.resume(state)
            progress = TrainingProgress.resume(state["progress"], config.training.batch_sizes)
        attempt = self.dir.attempt(number)
        began(self.dir, number, base=before[0], config_revision=revision)
        write_json(attempt.data, order.state(before[1]) | {"progress": progress.state()})
        for _ in range(iterations):
            progress.advance()
            append_line(
                attempt.metrics,
                {
                    "iteration": progress.iteration,
                    "loss": 1.0,
                    "grad_norm": 1.0,
                    "consumed_samples": progress.consumed_samples,
                },
            )
        end, consumed = progress.iteration, progress.consumed_samples
        self.dir.checkpoint(end).mkdir()
        (self.dir.checkpoint(end) / "state.json").write_text(
            json.dumps(order.state(consumed) | {"progress": progress.state()})
        )
        attempt.append_commit(
            CheckpointCommit(
                iteration=end, path=str(self.dir.checkpoint(end)), consumed_samples=consumed, time=0.0, seconds=0.0
            ),
        )


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """10 iterations of 8 samples of both data sets, then 5 of 4 samples of one of them."""
    made = Run(Workspace.make(tmp_path), "run")
    made.submit({"web": 3, "code": 1})
    made.attempt(10)
    made.submit({"web": 1}, global_batch_size=4)
    made.attempt(5)
    return made


def test_show_names_the_documents_that_a_sample_is_made_of(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    audited = audit.audit_run(run.dir)
    found = list(audit.audited_samples(audited, range(70, 90)))
    assert {sample.dataset for sample in found[:10]} == {"web", "code"}
    assert {sample.dataset for sample in found[10:]} == {"web"}
    for sample in found:
        tokens = []
        for origin in sample.origins:
            shard = Shard.open(origin.prefix)
            start = int(shard.offsets()[origin.document]) // 2 + origin.offset
            assert origin.offset + origin.tokens <= shard.lengths()[origin.document]
            tokens += shard.ids()[start : start + origin.tokens].tolist()
        assert tokens == sample.tokens.tolist()
    assert main(["data", "show", str(run.dir.path), "--samples", "79:101"]) == 0
    text = capsys.readouterr().out
    assert text.count("\nsample ") == 21
    assert "sample 100: web, epoch 0, number 80, step 16, not trained yet" in text
    assert f"  {found[9].origins[0].prefix}: document {found[9].origins[0].document}, offset" in text
    assert f"  | w{found[9].tokens[0]} w{found[9].tokens[1]} " in text


def test_the_ledger_counts_every_sample_once(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    audited = audit.audit_run(run.dir)
    assert (audited.iteration, audited.consumed_samples) == (15, 100)
    rows = {row.dataset: row for row in audit.dataset_ledgers(audited)}
    assert sum(row.samples for row in rows.values()) == 100
    assert {name: row.samples for name, row in rows.items()} == {"code": 20, "web": 80}
    web, code = rows["web"], rows["code"]
    assert code.exhausted_sample is None
    assert web.exhausted_sample is not None
    assert audited.order.locate(web.exhausted_sample) == ("web", 0, web.windows - 1)
    assert web.exhausted_step == 15 + (web.exhausted_sample - 100) // 4 + 1
    for sample, step in ((0, 1), (7, 1), (8, 2), (79, 10), (80, 11), (99, 15), (100, 16), (103, 16), (104, 17)):
        assert next(audit.audited_samples(audited, range(sample, sample + 1))).step == step
    assert main(["data", "ledger", str(run.dir.path)]) == 0
    text = capsys.readouterr().out
    assert "100 samples in 15 steps" in text
    assert "never" in text


@pytest.mark.slow
def test_diff_names_settings_phases_and_the_first_different_sample(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Run(run.workspace, "other")
    other.submit({"web": 3, "code": 1})
    other.attempt(15)
    found = audit.data_differences(audit.audit_run(run.dir), audit.audit_run(other.dir))
    assert found[0].startswith("phase 1: {'start': 80")
    assert found[-1].startswith("first different sample: 8")
    assert main(["data", "diff", str(run.dir.path), str(other.dir.path)]) == 1
    assert main(["data", "diff", str(run.dir.path), str(run.dir.path)]) == 0
    assert capsys.readouterr().out.endswith("the data of both runs are the same\n")
    third = Run(run.workspace, "third")
    third.submit({"web": 3, "code": 1}, seed=3)
    found = audit.data_differences(audit.audit_run(other.dir), audit.audit_run(third.dir))
    assert found == ["seed: 28 | 3", "first different sample: 0: web, epoch 0, number 0 | web, epoch 0, number 0"]


def test_a_run_that_has_not_begun_shows_what_it_will_read(run: Run) -> None:
    fresh = Run(run.workspace, "fresh")
    fresh.submit({"web": 3, "code": 1})
    audited = audit.audit_run(fresh.dir)
    assert audited.consumed_samples == 0
    assert np.array_equal(next(audit.audited_samples(audited, range(1))).tokens, audited.order.row(0).tokens)


def test_wrong_questions_are_answered_in_one_line(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "ledger", "no/such"]) == 1
    assert "there is no such run" in capsys.readouterr().err
    for text in ("5:5", "7:3", "a:b", "-1:4"):
        assert main(["data", "show", str(run.dir.path), f"--samples={text}"]) == 1
        assert "is no range of samples" in capsys.readouterr().err
    with pytest.raises(InputError, match="has no config"):
        audit.audit_run(rundir.Run(run.workspace.folder))
