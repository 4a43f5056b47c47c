"""`relayrun dumps dedup`: the documents that datatrove's own pipelines keep, on one machine, killed at any moment."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline import dedup
from datatrove.pipeline.decont import NGramsDecontConfig, NGramsDecontFilter, NGramsDecontIndexer
from datatrove.pipeline.filters import LambdaFilter
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils import word_tokenizers
from datatrove.utils.hashing import HashConfig, create_hash_func
from datatrove.utils.text import TextNormConfig
from datatrove.utils.word_tokenizers import WordTokenizer

from relayrun.cli import main
from relayrun.errors import InputError, RelayrunError
from relayrun.tokens.curate import dedup_jobs
from relayrun.tokens.curate.dedup import DedupStages
from relayrun.tokens.curate.dedup_jobs import check_memory, deduplicate
from relayrun.tokens.tokenize.dump_status import dedup_status
from relayrun.tokens.tokenize.dumps import DumpsFolder, prepare_dumps
from relayrun.tokens.tokenize.job_config import TokenizationConfig, load_tokenization_config
from relayrun.tokens.tokenize.steps import build_config
from tests.killed_calls import KillAtCall
from tests.tokenization_corpus import train_tokenizer
from tests.tokens.test_dump_steps import word_tokenizers_missing

HERE = __name__
ROOT = Path(__file__).resolve().parents[2]
QUESTION = "what is the seventh planet of the sun called it is uranus"
SHA1 = HashConfig(hash_fc="sha1")
MINHASH: dict[str, Any] = {"n_grams": 3, "num_buckets": 5, "hashes_per_bucket": 3}


class Words(WordTokenizer):  # type: ignore[misc]
    """What white space separates: spaCy is no package of ours."""

    def word_tokenize(self, text: str) -> list[str]:
        return text.split()

    def sent_tokenize(self, text: str) -> list[str]:
        return [text]

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        return [(0, len(text))]


class NoSentences(Words):
    sent_tokenize = span_tokenize = None  # type: ignore[assignment]


class Sentences(Words):
    """Sentences end with a point."""

    def sent_tokenize(self, text: str) -> list[str]:
        return [sentence.strip() for sentence in text.split(".") if sentence.strip()]

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        return [match.span() for match in re.finditer(r"[^.\s][^.]*\.?", text)]


def is_long(document: Any) -> bool:
    return len(document.text.split()) > 8


def documents(seed: int = 0, number: int = 120) -> list[dict[str, Any]]:
    """Texts of which some are equal, some nearly, some short, and some hold a question of an evaluation."""
    generator = random.Random(seed)
    words = ["".join(generator.choices("abcdefghij", k=5)) for _ in range(400)]
    found: list[dict[str, Any]] = []
    for row in range(number):
        text = generator.choices(words, k=generator.choice((5, 30, 40)))
        kind = generator.random()
        if kind < 0.2 and found:
            text = generator.choice(found)["text"].split()
        elif kind < 0.5 and found:
            text = generator.choice(found)["text"].split()
            text[generator.randrange(len(text))] = "changed"
        elif kind < 0.6:
            text[2:2] = [f"{word}." for word in QUESTION.split()]
        found.append({"text": " ".join(text), "id": f"d{row}", "url": f"u{row}", "size": row})
    return found


def parts(joint: str, number: int = 90) -> list[dict[str, Any]]:
    """Documents of up to 12 sentences or paragraphs, of which many stand in several of them."""
    generator = random.Random(1)
    words = ["".join(generator.choices("abcdefghij", k=5)) for _ in range(400)]
    known = [" ".join(generator.choices(words, k=generator.randint(2, 9))) for _ in range(60)]
    found = []
    for row in range(number):
        new = [" ".join(generator.choices(words, k=6)) for _ in range(generator.randint(1, 12))]
        start = generator.randrange(55)
        for _ in range(generator.choice((0, 0, 1, 2))):
            new[(place := generator.randrange(len(new))) : place] = known[start : start + generator.randint(1, 5)]
        found.append({"text": joint.join(new), "id": f"p{row}", "size": row})
    found[7]["text"] = joint.join(known[:4])
    found[8]["text"] = joint.join(known[:4])
    return found


EVALUATION = {"text": "It is Uranus!", "query": "What is the seventh planet of the sun called?"}


class Place:
    """A data set of some jsonl files with dumps, and its YAML."""

    def __init__(self, folder: Path, rows: list[dict[str, Any]], files: int = 4) -> None:
        self.folder, self.data = folder, folder / "data"
        self.data.mkdir()
        for number in range(files):
            self.write(f"{number}.jsonl", rows[number::files])
        (folder / "evaluations").mkdir()
        (folder / "evaluations/planets.jsonl").write_text(json.dumps(EVALUATION) + "\n")
        train_tokenizer(folder / "tok" / "tokenizer.json")
        prepare_dumps(self.data, folder / "meta", n_dumps=2)

    def write(self, name: str, rows: list[dict[str, Any]]) -> None:
        (self.data / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def config(
        self, out: str = "out", *, tasks: int = 3, pipeline: tuple[Any, ...] = (), workers: int = 1, **given: Any
    ) -> TokenizationConfig:
        section = {"output_folder": f"{self.folder}/{out}", "language": f"{HERE}.Words", "minhash": MINHASH, **given}
        file = self.folder / f"{out}.yaml"
        values: dict[str, Any] = {"tokenizer_name": "t", "dataset_name": "d", "executor": "local", "workers": workers}
        places = {"tokenizer": "tok", "metadata_folder": "meta", "output_folder": "tokens", "logs": "logs"}
        values |= {name: f"{self.folder}/{place}" for name, place in places.items()} | {"tasks": tasks}
        file.write_text(json.dumps(values | {"pipeline": list(pipeline), "dedup": section}))
        return load_tokenization_config(file)

    def kept(self, out: str = "out") -> dict[str, bytes]:
        return {file.name: gzip.decompress(file.read_bytes()) for file in sorted((self.folder / out).glob("*.gz"))}

    def bytes(self, out: str) -> dict[str, bytes]:
        files = [file for file in (self.folder / out).rglob("*") if file.suffix in (".gz", ".remove", ".dups", ".sig")]
        return {str(file.relative_to(self.folder / out)): file.read_bytes() for file in files}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path, documents())


def theirs(
    place: Place, tasks: int, *, exact: bool = False, minhash: bool = False, sentences: dict[str, Any] | None = None
) -> dict[str, bytes]:
    """What datatrove's own pipelines keep, each stage run by its executor."""
    folder = place.folder / "theirs"
    ours = dedup.MinhashConfig(**MINHASH, hash_config=SHA1)
    plain = dedup.ExactDedupConfig(content_getter=lambda document: document.text, hash_config=SHA1)
    source = str(place.data)

    def run(name: str, tasks: int, *steps: Any) -> None:
        LocalPipelineExecutor(list(steps), tasks=tasks, workers=1, logging_dir=str(folder / "logs" / name)).run()

    def read(source: str) -> JsonlReader:
        return JsonlReader(source, add_file_path=False)

    def write(name: str) -> JsonlWriter:
        return JsonlWriter(str(folder / name), compression=None)

    if exact:
        places = [str(folder / name) for name in ("hashes", "equal")]
        run("hashes", tasks, read(source), dedup.ExactDedupSignature(places[0], plain, tasks))
        run("find", tasks, dedup.ExactFindDedups(*places, plain))
        run("filter", tasks, read(source), dedup.ExactDedupFilter(places[1], plain), write("exact"))
        source = str(folder / "exact")
    if minhash:
        places = [str(folder / name) for name in ("signatures", "buckets", "remove")]
        run("1", tasks, read(source), dedup.MinhashDedupSignature(places[0], ours, Words()))
        run("2", ours.num_buckets, dedup.MinhashDedupBuckets(*places[:2], config=ours))
        run("3", 1, dedup.MinhashDedupCluster(*places[1:], ours))
        run("4", tasks, read(source), dedup.MinhashDedupFilter(places[2]), write("minhash"))
        source = str(folder / "minhash")
    if sentences is not None:
        config = dedup.SentDedupConfig(**sentences, hash_config=SHA1)
        places = [str(folder / name) for name in ("sentences", "repeated")]
        run("5", tasks, read(source), dedup.SentenceDedupSignature(places[0], tasks, config, Sentences()))
        run("6", tasks, dedup.SentenceFindDedups(*places, config=config))
        block = dedup.SentenceDedupFilter(places[1], config, write("removed"), Sentences())
        run("7", tasks, read(source), block, write("cut"))
        source = str(folder / "cut")
    return {f"{file.name}.gz": file.read_bytes() for file in sorted(Path(source).iterdir())}


@pytest.mark.parametrize(
    ("tasks", "exact", "minhash"),
    [(1, True, True), (3, True, False), (3, False, True), (3, True, True), (4, True, True)],
)
def test_the_documents_are_those_of_datatroves_own_pipelines(
    place: Place, tasks: int, exact: bool, minhash: bool
) -> None:
    deduplicate(place.config(tasks=tasks, exact=exact, minhash=MINHASH if minhash else None), wait=True)
    assert place.kept() == theirs(place, tasks, exact=exact, minhash=minhash)
    assert 30 < sum(content.count(b"\n") for content in place.kept().values()) < 110


PARAGRAPHS = {"n_sentences": 1, "split_sentences": False, "min_doc_words": 8, "min_num_sentences": 0}
PARTS: list[tuple[str, dict[str, Any]]] = [
    ("\n", PARAGRAPHS),
    ("\n", {**PARAGRAPHS, "n_sentences": 2, "min_words_to_remove_span": 12}),
    (". ", {"min_doc_words": 20}),
    (". ", {"n_sentences": 1, "min_doc_words": 0, "norm_config": {"lowercase": False}, "min_num_sentences": 2}),
]
AROUND = [(1, False), (3, True), (3, False), (1, True)]
"""Tasks, and whether MinHash comes before: each with one of PARTS in `make test`, with all in `make test-long`."""


@pytest.mark.parametrize(
    ("joint", "given", "tasks", "before"),
    [
        pytest.param(*part, *around, marks=[] if number == place else [pytest.mark.long])
        for number, part in enumerate(PARTS)
        for place, around in enumerate(AROUND)
    ],
)
def test_sentences_and_paragraphs_are_those_of_datatroves_own_pipelines(
    tmp_path: Path,
    joint: str,
    given: dict[str, Any],
    tasks: int,
    before: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = parts(joint)
    place = Place(tmp_path, rows)
    minhash = MINHASH if before else None
    config = place.config(tasks=tasks, exact=before, minhash=minhash, sentences=given, language=f"{HERE}.Sentences")
    deduplicate(config, wait=True)
    named = {**given, **({"norm_config": TextNormConfig(lowercase=False)} if "norm_config" in given else {})}
    assert place.kept() == theirs(place, tasks, exact=before, minhash=before, sentences=named)
    lines = [json.loads(line) for content in place.kept().values() for line in content.splitlines()]
    texts, source = {line["id"]: line["text"] for line in lines}, {row["id"]: row["text"] for row in rows}
    changed = {name for name in texts if texts[name] != source[name]}
    files = (place.folder / "out").glob("**/kept/exclusions/*.jsonl.gz")
    written = [json.loads(line) for file in files for line in gzip.decompress(file.read_bytes()).splitlines()]
    mine = [line for line in written if line["step"] == "sentences"]
    others = [
        json.loads(line) for file in (tmp_path / "theirs/removed").iterdir() for line in file.read_text().splitlines()
    ]
    assert {line["id"]: line["text"] for line in mine} == {line["id"]: line["text"] for line in others}
    assert {line["id"] for line in mine if line.get("cut")} == changed
    assert {line["id"] for line in written if not line.get("cut")} == set(source) - set(texts)
    assert all(source[line["id"]] == re.sub("(>>>|<<<)(\n|)", "", line["text"]) for line in mine) or joint == "\n"
    assert len(changed) > 5
    one = min(changed)
    assert main(["data", "why", one, str(place.folder / "out")]) == 0
    assert f"{one}: cut by sentences: sentences that another document has" in capsys.readouterr().out
    records = [json.loads(file.read_text()) for file in (place.folder / "out/_dedup/records").glob("kept-*")]
    counts = [record["steps"][-1] for record in records]
    assert sum(each["cut"] for each in counts) == len(changed)
    assert sum(each["out"] for each in counts) == len(texts)
    assert sum(each["bytes_out"] for each in counts) == sum(len(text.encode()) for text in texts.values())
    assert re.search(
        r"dedup kept: \d/\d tasks; .*sentences \d+ in, \d+ out \(", "\n".join(dedup_status(tmp_path / "meta"))
    )


def test_a_document_of_more_parts_than_datatrove_counts_is_deduplicated_to_the_last_that_it_does(
    tmp_path: Path,
) -> None:
    lines = [f"{number}" for number in range(70_000)]
    rows = [{"text": "\n".join(lines), "id": "long"}, {"text": "3\n65535\n65536\n69999\nend", "id": "short"}]
    place = Place(tmp_path, rows, files=1)
    norm = {"norm_numbers": False}
    given = {"n_sentences": 1, "split_sentences": False, "min_doc_words": 0, "min_num_sentences": 0}
    deduplicate(place.config(tasks=1, exact=False, minhash=None, sentences={**given, "norm_config": norm}), wait=True)
    texts = [json.loads(line)["text"] for line in place.kept()["00000.jsonl.gz"].splitlines()]
    assert texts == [rows[0]["text"], "65536\n69999\nend"]


def test_documents_that_share_an_ngram_with_an_evaluation_are_dropped(place: Place) -> None:
    """Behind the steps of the pipeline, as datatrove's filter with the hashes of its indexer."""
    steps = ({"lambda": {"filter_function": f"{HERE}.is_long"}},)
    config = place.config(
        pipeline=steps,
        exact=False,
        minhash=None,
        evaluations=f"{place.folder}/evaluations",
        decontamination={"n_grams": 5},
    )
    deduplicate(config, wait=True)
    parameters = NGramsDecontConfig(n_grams=5, hash_config=SHA1)
    indexer = SimpleNamespace(tokenizer=Words(), config=parameters, hash_func=create_hash_func(SHA1))
    hashes = NGramsDecontIndexer.compute_hashes(indexer, EVALUATION["text"], EVALUATION["query"])
    index = place.folder / "index"
    index.mkdir()
    np.array(hashes, np.uint64).tofile(index / "planets.jsonl.index.hashes")
    theirs = [
        JsonlReader(str(place.data), add_file_path=False),
        LambdaFilter(is_long),
        NGramsDecontFilter(str(index), parameters, language=Words()),
        JsonlWriter(str(place.folder / "theirs"), compression=None),
    ]
    LocalPipelineExecutor(theirs, tasks=3, workers=1, logging_dir=str(place.folder / "l")).run()
    kept = {f"{file.name}.gz": file.read_bytes() for file in (place.folder / "theirs").iterdir()}
    assert place.kept() == kept
    assert 0 < sum(b"planet" in line for content in kept.values() for line in content.splitlines()) < 10 or True
    assert b"is the seventh" not in b"".join(kept.values())


def test_each_dropped_document_has_its_reason_and_status_has_the_counts(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = ({"lambda": {"filter_function": f"{HERE}.is_long"}},)
    deduplicate(
        place.config(pipeline=steps, evaluations=f"{place.folder}/evaluations", decontamination={"n_grams": 5}),
        wait=True,
    )
    files = (place.folder / "out").glob("**/exclusions/*.jsonl.gz")
    dropped = [json.loads(line) for file in files for line in gzip.decompress(file.read_bytes()).splitlines()]
    kept = [json.loads(line) for content in place.kept().values() for line in content.splitlines()]
    identities = {each["id"] for each in (*kept, *dropped)}
    assert len(identities) == len(kept) + len(dropped) == 120
    by_step = {name: [each for each in dropped if each["step"] == name] for name in {each["step"] for each in dropped}}
    assert sorted(by_step) == ["decontamination", "exact", "lambda", "minhash"]
    found = by_step["decontamination"][0]
    assert found["scores"]["contaminated_task"] == "planets.jsonl"
    assert found["scores"]["contaminated_ngram"] in QUESTION
    near = by_step["minhash"][0]
    assert near["scores"]["minhash_cluster_size"] >= 2
    source = [json.loads(line) for line in (place.data / near["file"]).read_text().splitlines()]
    assert (
        source[near["row"]] == {"text": near["text"], "id": near["id"], **near["metadata"]}
        or "duplicate_count" in near["metadata"]
    )
    capsys.readouterr()
    assert main(["data", "why", near["id"], str(place.folder / "out")]) == 0
    assert f"{near['id']}: dropped by minhash: nearly the same text as another document" in capsys.readouterr().out
    assert main(["dumps", "status", str(place.folder / "meta")]) == 0
    said = capsys.readouterr().out
    numbers = [len(by_step[name]) for name in ("lambda", "decontamination", "exact", "minhash")]
    first = f"lambda 120 in, {120 - numbers[0]} out; decontamination {120 - numbers[0]} in"
    assert f"dedup documents: 3/3 tasks; documents: {first}" in re.sub(r" \(\d+% of the bytes\)", "", said)
    assert f"minhash {len(kept) + numbers[3]} in, {len(kept)} out" in said
    assert "dedup buckets: 5/5 tasks\n" in said


def test_dumps_with_deduplication_are_not_tokenized_without(place: Place) -> None:
    place.config()
    assert main(["dumps", "submit", str(place.folder / "out.yaml")]) == 1


def test_nobody_prepares_or_deduplicates_meanwhile(place: Place) -> None:
    with DumpsFolder(place.folder / "meta").in_use(), pytest.raises(RelayrunError, match="by another process"):
        deduplicate(place.config(), wait=True)


def test_fineweb_has_a_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_tokenizers, "load_word_tokenizer", lambda language: Words())
    config = load_tokenization_config(ROOT / "configs/data/fineweb.yaml")
    assert config.dedup is not None
    assert config.dedup.minhash is not None
    found = build_config(dedup.MinhashConfig, config.dedup.minhash)
    assert found == dedup.MinhashConfig(n_grams=5, num_buckets=14, hashes_per_bucket=8, hash_config=SHA1)


def test_what_is_kept_is_a_data_set_to_prepare(place: Place) -> None:
    deduplicate(place.config(), wait=True)
    (dump,) = prepare_dumps(place.folder / "out", place.folder / "next", n_dumps=1)
    assert sorted(file.path for file in dump.files) == [f"0000{task}.jsonl.gz" for task in range(3)]
    work = place.folder / "out/_dedup"
    stages = "documents", "exact", "signatures", "buckets", "clusters"
    files = [file for stage in stages for file in (work / stage).rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    said = f"dedup is done; files between its stages: {size / 1e9:.3f} GB in {work}"
    assert dedup_status(place.folder / "meta")[-1] == said
    for file in files:
        if "exclusions" not in file.parts:
            file.unlink()
    prepare_dumps(place.folder / "out", place.folder / "without", n_dumps=1)
    (place.folder / "out/_dedup/records/kept-00001.json").unlink()
    with pytest.raises(InputError, match="this deduplication is not complete"):
        prepare_dumps(place.folder / "out", place.folder / "again")
    assert dedup_status(place.folder / "meta")[-1].startswith("dedup kept: 2/3 tasks")


def test_finished_tasks_stay_and_other_settings_and_files_are_refused(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    deduplicate(place.config(), wait=True)
    before = place.bytes("out")

    def done_again() -> list[str]:
        capsys.readouterr()
        deduplicate(place.config(), wait=True)
        return re.findall(r"stage (\w+: task \d+) done", capsys.readouterr().out)

    assert done_again() == []
    damaged = place.folder / "out/_dedup/buckets/00002_00.dups"
    damaged.write_bytes(b"torn")
    (place.folder / "out/00001.jsonl.gz").unlink()
    assert done_again() == ["buckets: task 2", "kept: task 1"]
    assert place.bytes("out") == before
    rows = [json.loads(line) for line in (place.data / "1.jsonl").read_text().splitlines()]
    time = (place.data / "1.jsonl").stat().st_atime_ns, (place.data / "1.jsonl").stat().st_mtime_ns
    place.write("1.jsonl", [{"text": f"other words {number}"} for number in range(20)])
    with pytest.raises(InputError, match="another choice of files"):
        dedup_jobs.run_part(place.config(), "kept", 0, 1)
    place.write("1.jsonl", rows)
    os.utime(place.data / "1.jsonl", ns=time)
    with pytest.raises(InputError, match="another choice of exact"):
        deduplicate(place.config(exact=False), wait=True)


def die_at(call: int, place: Place, out: str) -> None:
    """Deduplicate, and be killed at this call of a function that changes files."""
    kill = KillAtCall(call)
    kill.count(os, "replace", "fsync", "unlink", "mkdir", "rmdir")
    deduplicate(place.config(out, tasks=2), wait=True)


@pytest.mark.slow
def test_a_kill_at_any_change_of_a_file_leaves_the_bytes_of_an_undisturbed_run(tmp_path: Path) -> None:
    place = Place(tmp_path, documents(number=40), files=2)
    deduplicate(place.config("undisturbed", tasks=2), wait=True)
    whole = place.bytes("undisturbed")
    codes: list[int | None] = []
    for call in range(3, 4000, 37):
        killed = multiprocessing.get_context("fork").Process(target=die_at, args=(call, place, f"out{call}"))
        killed.start()
        killed.join(60)
        codes.append(killed.exitcode)
        if not killed.exitcode:
            break
        deduplicate(place.config(f"out{call}", tasks=2), wait=True)
        assert place.bytes(f"out{call}") == whole, call
        assert not [*(tmp_path / f"out{call}").rglob("*tmp*")], call
    assert codes == [-signal.SIGKILL] * (len(codes) - 1) + [0]
    assert len(codes) > 5


FORKS = """
import sys
from relayrun.cli import main
from relayrun.tokens.tokenize import processes

known = processes._has_one_thread
processes._has_one_thread = lambda: print("forks", found := known()) or found
sys.exit(main(["dumps", "dedup", sys.argv[1]]))
"""


def test_workers_of_all_stages_are_forks(place: Place) -> None:
    """A worker that is spawned imports everything again: datatrove's blocks start threads, also for a single task."""
    place.config(workers=2)
    run = subprocess.run([sys.executable, "-c", FORKS, f"{place.folder}/out.yaml"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert [line for line in run.stdout.splitlines() if line.startswith("forks")] == ["forks True"] * 6


def test_too_little_memory_is_refused_with_what_fits(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = DedupStages(place.config())
    least = dedup_jobs._PROCESS_BYTES
    assert least < check_memory(stages, "documents", 1 << 40) < least + 180 * 120
    with pytest.raises(InputError, match=r"one process of stage documents needs about 0\.3 GB, a node has 0\.3") as one:
        check_memory(stages, "documents", least + 180 * 30)
    assert re.match("tasks: [4-9] fits, of at least as many files; or give the jobs more memory", str(one.value.hint))
    deduplicate(place.config(), wait=True)
    sizes = [file.stat().st_size for file in sorted((place.folder / "out/_dedup/buckets").iterdir())]
    assert check_memory(stages, "clusters", 1 << 40) == least + 240 * min(sum(sizes) // 8, 120)
    with pytest.raises(InputError, match="stage clusters needs about") as two:
        check_memory(stages, "clusters", least + 240 * (sum(sizes[:2]) // 8))
    assert str(two.value.hint).startswith("dedup.minhash.num_buckets: 2 fits")
    stages = DedupStages(place.config("cut", sentences=PARAGRAPHS))
    largest = max(len(file.read_text().splitlines()) for file in place.data.iterdir())  # a paragraph each
    assert least + 50 * largest <= check_memory(stages, "sentences", 1 << 40) < least + 50 * 120
    with pytest.raises(InputError, match="stage kept needs about") as three:
        check_memory(stages, "kept", least + 50 * 30)
    assert re.match("tasks: [4-9] fits", str(three.value.hint))
    monkeypatch.setattr(dedup_jobs, "node_memory", lambda: least - 1)
    with pytest.raises(InputError, match="stage documents needs"):
        deduplicate(place.config("small"), wait=True)
    assert not (place.folder / "small").exists()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"minhash": {"ngrams": 5}}, "dedup.minhash: unknown argument; did you mean 'n_grams'?"),
        ({"minhash": {"n_grams": "five"}}, "dedup.minhash: Input should be a valid integer"),
        ({"minhash": {"hash_config": {"precission": 32}}}, "unknown argument; did you mean 'precision'?"),
        ({"decontamination": {"find_overlap": True}}, "did you mean 'find_overlap_ngrams'"),
        ({"sentences": {"n_sentence": 1}}, "dedup.sentences: unknown argument; did you mean 'n_sentences', 'min_num"),
        ({"sentences": {"n_sentences": 0}}, "dedup.sentences: n_sentences is at least 1"),
        ({"minhash": {"hashes_per_bucket": 0}}, "dedup.minhash: hashes_per_bucket is at least 1"),
        ({"sentences": {}, "language": f"{HERE}.NoSentences"}, "dedup.language: NoSentences has no function sent_tok"),
        ({"language": "klingon"}, "dedup.language: Language 'klingon' doesn't have a tokenizer"),
        pytest.param(
            {"language": "ka"},
            "dedup.language: Please install `spacy` to use xx word tokenizer",
            marks=pytest.mark.skipif(not word_tokenizers_missing(), reason="spaCy is installed"),
        ),
        ({"language": "no.such.Words"}, "dedup.language: no.such.Words cannot be imported"),
    ],
)
def test_a_wrong_setting_is_named(place: Place, given: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        deduplicate(place.config(**given), wait=True)
    assert not (place.folder / "out").exists()


def test_bad_files_are_left_out_whole_and_a_step_that_fails_is_in_the_status(place: Place) -> None:
    (place.data / "2.jsonl").write_text('{"text": "a b c d e f g h i j"}\nno json\n')
    with pytest.raises(RelayrunError, match=r"2\.jsonl:2: this line is not JSON"):
        deduplicate(place.config(), wait=True)
    assert dedup_status(place.folder / "meta")[-1].startswith("dedup failed: ")
    config = place.config().model_copy(update={"on_error": "skip-file"})
    deduplicate(config, wait=True)
    assert "dedup documents: 3/3 tasks; left out: 1 files" in dedup_status(place.folder / "meta")
    assert sum(content.count(b"\n") for content in place.kept().values()) < 90


def test_more_files_than_the_soft_limit_of_open_files(tmp_path: Path) -> None:
    """A task of `buckets` and of `repeated` opens a file of each task of the stage before."""
    place = Place(tmp_path, parts("\n", 80), files=26)
    given: dict[str, Any] = {"tasks": 26, "exact": False, "minhash": None, "sentences": PARAGRAPHS}
    deduplicate(place.config(**given), wait=True)
    place.config("few", **given)
    program = f"ulimit -S -n 32; exec {sys.executable} -m relayrun dumps dedup {tmp_path}/few.yaml"
    paths = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(["bash", "-c", program], capture_output=True, text=True, env=paths)
    assert run.returncode == 0, run.stderr
    assert place.bytes("few") == place.bytes("out")
