"""How much of a held-out data set stands in the training data."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from relayrun.cli import main
from relayrun.config.compose import resolve
from relayrun.config.compose.schema import RunConfig
from relayrun.control.rundir.run import Run
from relayrun.errors import InputError
from relayrun.submit import submission
from relayrun.submit.check.data import check_data
from relayrun.submit.check.existing_run import SubmitIntent
from relayrun.submit.check.findings import Findings
from relayrun.tokens.mixture import overlap
from relayrun.tokens.mixture.overlap import NGRAM, measure_overlap
from relayrun.tokens.shards.shard import ShardWriter
from tests.shard_records import write_folder_record
from tests.workspace import Workspace


def write(folder: Path, *shards: list[list[int]]) -> list[str]:
    folder.mkdir()
    for number, documents in enumerate(shards):
        writer = ShardWriter(str(folder / f"{number:05d}_tokens"), np.uint16)
        writer.add(np.array([i for d in documents for i in d], np.uint16), np.array([*map(len, documents)], np.int64))
        writer.finish()
    return [str(folder / f"{number:05d}_tokens") for number in range(len(shards))]


def texts(seed: int, documents: int, length: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(5, 60_000) for _ in range(length)] for _ in range(documents)]


def by_brute_force(held_out: list[list[int]], training: list[list[int]]) -> tuple[int, float]:
    def grams(text: list[int]) -> list[tuple[int, ...]]:
        return [tuple(text[i : i + NGRAM]) for i in range(len(text) - NGRAM + 1)]

    known = {gram for text in training for gram in grams(text)}
    every = [gram for text in held_out for gram in grams(text)]
    return sum(text in training for text in held_out), sum(gram in known for gram in every) / len(every)


@pytest.mark.parametrize("seed", range(5))
def test_documents_and_ngrams_are_those_of_brute_force(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(overlap, "_BLOCK", rng.choice([50, 300, 1 << 20]))
    held_out = [*texts(seed, 30), [7], [], [8, 9]]
    training = [*texts(seed + 100, 40), [7], []]
    for text in rng.sample(held_out, 8):
        training.insert(rng.randrange(len(training)), text[: rng.choice([len(text), len(text), 15, 30])])
    both = write(tmp_path / "a", held_out[:20], held_out[20:]), write(tmp_path / "b", training[:9], training[9:])
    found = measure_overlap(*both, most=1 << 40)
    assert (found.documents, found.read, found.of) == (len(held_out), len(training), len(training))
    assert (found.same, found.ngram_share) == by_brute_force(held_out, training)
    assert measure_overlap(both[0], both[0], most=1 << 40).same == len(held_out)
    grams = {tuple(text[i : i + NGRAM]) for text in training for i in range(len(text) - NGRAM + 1)}
    known = [[tuple(text[i : i + NGRAM]) in grams for i in range(len(text) - NGRAM + 1)] for text in held_out]
    pairs = zip(held_out, known, strict=True)
    assert found.nearly == sum(sum(each) >= 0.95 * len(each) > 0 for text, each in pairs if text not in training)


def test_a_large_set_is_sampled_evenly_and_the_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "_BLOCK", 400)
    training = texts(1, 1000)
    first, second = write(tmp_path / "a", training[::50]), write(tmp_path / "b", training[:500], training[500:])
    found = measure_overlap(first, second, most=10_000)
    assert 200 <= found.read <= 300
    assert 0.1 < found.ngram_share < 0.5
    assert str(found).endswith(f" stand in {found.read} of 1,000 documents")


def test_frames_do_not_count_and_two_tokenizers_are_refused(tmp_path: Path) -> None:
    documents = texts(3, 5)
    first = write(tmp_path / "a", documents)
    second = write(tmp_path / "b", [[1, *text, 2] for text in documents])
    write_folder_record(tmp_path / "a", {"00000_tokens": {}}, settings={"eos": None})
    write_folder_record(tmp_path / "b", {"00000_tokens": {}}, settings={"eos": 2, "bos": 1})
    assert measure_overlap(first, second, most=1 << 40).same == 5
    write_folder_record(tmp_path / "b", {"00000_tokens": {}}, fingerprint="e" * 64)
    with pytest.raises(InputError, match="two tokenizers"):
        measure_overlap(first, second, most=1 << 40)


def test_the_command_prints_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    documents = texts(1, 20)
    write(tmp_path / "a", documents[:10])
    write(tmp_path / "b", documents[5:])
    assert main(["data", "overlap", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    words = "5 of 10 documents and 50.00% of their 13-grams stand in 15 of 15 documents\n"
    assert capsys.readouterr().out == words


def test_the_check_says_how_much_of_a_validation_set_is_trained_on(tmp_path: Path) -> None:
    workspace, documents = Workspace.make(tmp_path), texts(1, 200)
    write(tmp_path / "train", documents)
    others = texts(2, 20)
    cases = {
        "apart": (others, "ok", "0 of 20 documents and "),
        "leak": ([*others, documents[7]], "warning", "1 of 21 documents and "),
        "one token more": ([*others, [9, *documents[7]]], "warning", "0 of 21 documents (and 1 but for a few tokens)"),
        "halves": ([documents[i][:30] + others[i][:15] for i in range(20)], "warning", "0 of 20 documents and 54.55%"),
        "quotes": ([documents[i][:20] + others[i] for i in range(20)], "ok", "0 of 20 documents and 16.67%"),
    }
    for name, (held_out, level, words) in cases.items():
        write(tmp_path / name, held_out)
        data = {"datasets": [str(tmp_path / "train")], "validation": {"v": [str(tmp_path / name)]}}
        config = resolve.load_run_config(workspace.config("run", data={"allow_other_tokenizer": True} | data))
        assert isinstance(config, RunConfig)
        findings = Findings(config)
        check_data(config, Run(workspace.folder / "run"), findings)
        (found,) = (finding for finding in findings.all if finding.name == "data.overlap")
        assert (found.level, found.words.startswith("validation 'v': ")) == (level, True)
        assert words in found.words


def test_a_submit_keeps_what_the_check_measured(tmp_path: Path) -> None:
    workspace = Workspace.make(tmp_path)
    write(tmp_path / "v", [[i % 7 + 1 for i in range(begin, begin + 90)] for begin in range(20)])
    config = resolve.load_run_config(workspace.config("run", data={"validation": {"v": [str(tmp_path / "v")]}}))
    with submission.prepared_run(config, SubmitIntent()) as (run, _):
        pass
    assert run.overlap.read_text() == (
        "validation 'v': 0 of 20 documents and 0.00% of their 13-grams "
        "stand in 120 of 120 documents of the training shards\n"
    )
