"""Deduplication and decontamination of a data set in stages, each a number of tasks that do not wait for each other.

    evaluations  n-grams of the evaluation sets                                     1 task
    documents    what the steps of the YAML and the n-grams leave, and text hashes  `tasks`, each with its files
    exact        documents with equal hashes, by ranges of the hash                 `tasks`
    signatures   MinHash signatures of what the exact stage leaves                  `tasks`
    buckets      pairs of documents with an equal part of their signatures          `minhash.num_buckets`
    clusters     the documents to remove                                            1
    sentences    hashes of the sentences or paragraphs of what these leave          `tasks`
    repeated     sentences with equal hashes, by ranges of the hash                 `tasks`
    kept         the documents that stay, as .jsonl.gz in the output folder         `tasks`
    stats        statistics of the documents that stay                              `tasks`
    merged       their sums over the tasks, in `_stats` of the output folder        1

The blocks and their files are datatrove's. A task makes its files in a temporary folder of `_dedup`. They get
their names, and then a record has their checksums. A task is done if its files are those of its record. A killed task
begins again, with the same bytes: they depend on the input files and the settings, which may not change meanwhile.

If the output folder is a URL, `_dedup` is in the metadata folder. The store gets the documents that stay and that are
dropped, and `_stats`, each file read back in full, and copies of the settings and of the last stage's records, by which
`relayrun dumps prepare` sees whether all are there.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import importlib.metadata
import itertools
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
from datatrove.data import Document
from datatrove.pipeline import decont, dedup, stats
from datatrove.pipeline.readers import JsonlReader
from datatrove.utils.hashing import HashConfig, create_hash_func
from loguru import logger
from tqdm import tqdm  # type: ignore[import-untyped]

from relayrun.errors import InputError, RelayrunError
from relayrun.files import fsync_directory, fsync_tree, read_json, write_json
from relayrun.leftovers import remove_leftovers
from relayrun.publishing import work_folder
from relayrun.tokens.readers.inputs import read_paths_file, stat_inputs, take_inventory
from relayrun.tokens.stores.direct_io import file_checksum
from relayrun.tokens.stores.urls import is_url, join_path, put_file
from relayrun.tokens.tokenize.dumps import DEDUP_WORK as WORK
from relayrun.tokens.tokenize.dumps import DumpsFolder
from relayrun.tokens.tokenize.job_config import TokenizationSettings
from relayrun.tokens.tokenize.shard_folder import exclusion_file, file_fault
from relayrun.tokens.tokenize.step_task import (
    DocumentRows,
    ExclusionWriter,
    JsonLines,
    ShardSteps,
    exclusion_line,
    read_texts,
)
from relayrun.tokens.tokenize.steps import build_config, build_step, describe_steps, find_word_tokenizer

_CLUSTER_SIZE = "minhash_cluster_size"
_SAME = "same text as another document"
_CUT, _SHORT = "sentences that another document has", "too little is left without sentences that another document has"
_LINES = 1000
"""Signatures and pairs read at a time; datatrove reads 5."""


def _text(document: Any) -> Any:
    return document.text


def _line(document: Any, **place: Any) -> bytes:
    """Return the line that datatrove's JsonlWriter writes, and the `place` of the document in its file."""
    found = {"text": document.text, "id": document.id, "metadata": document.metadata} | place
    found = {name: value for name, value in found.items() if value or name in place}
    return orjson.dumps(found, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY, default=str)


class _Placed(Document):  # type: ignore[misc]
    """A document that knows its file and its row."""


def _read(file: Path) -> Iterator[Any]:
    with gzip.open(file, "rb") as lines:
        for line in map(orjson.loads, lines):
            document = _Placed(text=line["text"], id=line["id"], metadata=line.get("metadata", {}))
            document.place = {"file": line["file"], "row": line["row"]}
            yield document


class _Passage(ExclusionWriter):
    """The exclusion writer of a block of datatrove, and the counts of what passes the block."""

    def __init__(self, lines: JsonLines | None, step: str, reason: str) -> None:
        self._lines, self._place = lines, {"step": step, "reason": reason}
        self.counts: dict[str, Any] = {"step": step, "in": 0, "out": 0, "bytes_in": 0, "bytes_out": 0, "cut": 0}

    def through(self, block: Any, documents: Iterator[Any], task: int) -> Iterator[Any]:
        """Return what a block leaves of the documents."""
        return self._count(block.run(self._count(documents, "in"), task), "out")

    def _count(self, documents: Iterator[Any], way: str) -> Iterator[Any]:
        for self._document in documents:
            self._document.metadata.pop(_CLUSTER_SIZE, None)
            self.counts[way] += 1
            self.counts[f"bytes_{way}"] += len(self._document.text.encode())
            yield self._document

    def write(self, document: Any, rank: int = 0) -> None:
        """Take the document that the block drops, or a copy of one that it cuts, with marks at the cuts."""
        cut = {} if document is self._document else {"cut": True, "reason": _CUT}
        self.counts["cut"] += bool(cut)
        if self._lines is not None:
            before = {name: value for name, value in document.metadata.items() if name != _CLUSTER_SIZE}
            place = {"id": document.id, **self._document.place, **self._place, **cut}
            self._lines.write(exclusion_line(document, before, place))


def _parameters(cls: Any, given: Mapping[str, Any] | None) -> Any:
    """Return datatrove's parameters. Text is hashed by sha1, as FineWeb's is: xxhash 4 takes bytes alone."""
    config = build_config(cls, {"hash_config": {"hash_fc": "sha1"}} | dict(given or {}))
    create_hash_func(config.hash_config)("text")
    for name in ("n_sentences", "n_grams", "num_buckets", "hashes_per_bucket"):
        if getattr(config, name, 1) < 1:
            raise InputError(f"{name} is at least 1")
    return config


class DedupStages:
    """The stages of a data set, and the work of each task."""

    def __init__(self, settings: TokenizationSettings) -> None:
        """Raises InputError for a wrong parameter, a missing package, and a metadata folder without dumps."""
        if settings.dedup is None:
            raise InputError("this data set has no `dedup`", hint="`relayrun help clean` shows one")
        self.options, self.settings = settings, settings.dedup
        metadata = DumpsFolder(settings.metadata_folder)
        self.dataset = metadata.dataset()
        self.files = sorted(name for file in metadata.paths_files() for name in read_paths_file(file))
        self.output = settings.local_folder(self.settings.output_folder)
        self.store = self.settings.output_folder if is_url(self.settings.output_folder) else ""
        self.work = self.output / WORK
        self._records = self.work / "records"
        self.minhash = self._made("minhash", functools.partial(_parameters, dedup.MinhashConfig))
        self.ngrams = self._made("decontamination", functools.partial(_parameters, decont.NGramsDecontConfig))
        self.sentences = self._made("sentences", functools.partial(_parameters, dedup.SentDedupConfig))
        self._exact = dedup.ExactDedupConfig(content_getter=_text, hash_config=HashConfig(hash_fc="sha1"))
        exact, minhash = self.settings.exact, self.settings.minhash is not None
        sentences = self.settings.sentences is not None
        index, self.tasks = self.settings.evaluations is not None, min(settings.tasks, len(self.files))
        if minhash or index or sentences:
            splits = sentences and (self.sentences.split_sentences or self.sentences.min_num_sentences > 0)
            self._made("language", functools.partial(find_word_tokenizer, sentences=splits))
        numbers = {"evaluations": int(index), "documents": self.tasks, "exact": exact * self.tasks}
        numbers |= {"signatures": minhash * self.tasks, "buckets": minhash * self.minhash.num_buckets}
        numbers |= {"clusters": int(minhash), "sentences": sentences * self.tasks}
        numbers |= {"repeated": sentences * self.tasks, "kept": self.tasks}
        numbers |= {"stats": self.tasks * bool(self.settings.stats), "merged": int(bool(self.settings.stats))}
        self.stages = {name: number for name, number in numbers.items() if number}
        """Tasks of each stage, in order."""

    def _words(self) -> Any:  # not an attribute: some have a large model, and tasks are sent to processes
        return find_word_tokenizer(self.settings.language)

    def count_parts(self, text: str) -> int:
        """Return the number of sentences or paragraphs of a text."""
        return len(self._words().sent_tokenize(text) if self.sentences.split_sentences else text.splitlines())

    def _made(self, name: str, make: Callable[[Any], Any]) -> Any:
        """Return what datatrove makes of a setting. Raises InputError."""
        try:
            return make(getattr(self.settings, name))
        except (InputError, ImportError, OSError, TypeError, ValueError) as error:
            raise InputError(getattr(error, "message", str(error)), where=f"dedup.{name}") from None

    def _evaluations(self) -> list[str]:
        found = take_inventory(str(self.settings.evaluations))
        found.refuse()
        return [file.path for file in found.taken]

    def _inputs(self) -> list[Any]:
        """Return path, size and time of each input file, as JSON has them."""
        found = stat_inputs(self.dataset, self.files, missing_ok=self.options.skips_files)
        if self.settings.evaluations is not None:
            found += stat_inputs(self.settings.evaluations, self._evaluations())
        return [list(file) for file in found]

    def begin(self) -> None:
        """Write down the settings and the inputs. Raises InputError if the folder holds a deduplication of others."""
        options, file = self.options, self.work / "settings.json"
        now = self.settings.model_dump(exclude={"output_folder", "stats"})
        now |= describe_steps(options.pipeline, options.reader, self.settings.stats)
        now |= {name: getattr(options, name) for name in ("metadata_folder", "column", "tasks", "exclusions")}
        now |= {"datatrove": importlib.metadata.version("datatrove"), "files": self._inputs(), "stages": self.stages}
        before = read_json(file) if file.exists() else now
        if different := sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name)):
            words = f"this folder holds a deduplication with another choice of {', '.join(different)}"
            hint = "use another output folder, or delete this one to begin again"
            raise InputError(words, where=self.output, hint=hint)
        self._records.mkdir(parents=True, exist_ok=True)
        for folder in (self.work, self._records):
            remove_leftovers(folder)
        write_json(file, now)

    def copy_settings(self) -> None:
        """Put a copy of the settings into the store. Raises InputError if it holds a deduplication of others."""
        file, place = self.work / "settings.json", join_path(self.store, f"{WORK}/settings.json")
        if file_fault(place, checksum := file_checksum(file)) not in (None, f"{place} is gone"):
            hint = "use another output folder, or delete this one to begin again"
            raise InputError("another metadata folder made the documents here", where=self.store, hint=hint)
        put_file(file, place, checksum)

    def records(self, stage: str) -> list[dict[str, Any]]:
        """Return the records of the finished tasks of a stage."""
        return [read_json(file) for file in sorted(self._records.glob(f"{stage}-[0-9]*.json"))]

    def unfinished(self, stage: str, tasks: Sequence[int], threads: int) -> list[int]:
        """Return the tasks that are not done. Reads every file of a finished task. Raises RelayrunError if a stage
        before this one is not complete."""
        for earlier in itertools.takewhile(lambda name: name != stage, self.stages):
            if (done := len(self.records(earlier))) < self.stages[earlier]:
                words = f"stage {earlier} is not complete: {done} of {self.stages[earlier]} tasks are done"
                raise RelayrunError(words, where=self.work, hint="the same command again makes the others")
        with ThreadPoolExecutor(threads) as pool:
            are_done = list(pool.map(functools.partial(self._is_done, stage), tasks))
        return [task for task, is_done in zip(tasks, are_done, strict=True) if not is_done]

    def _record_file(self, stage: str, task: int) -> Path:
        return self._records / f"{stage}-{task:05d}.json"

    def _is_done(self, stage: str, task: int) -> bool:
        try:
            record = read_json(self._record_file(stage, task))
            files, stored = record["files"].items(), record.get("stored", {})
            return not any(file_fault(self._place(name), digest, stored.get(name, ())) for name, digest in files)
        except (OSError, ValueError, KeyError):
            return False

    def _place(self, name: str) -> str:
        """Return the place of a file: in the store, if it holds documents that stay or are dropped, or merged stats."""
        in_store = self.store and (not name.startswith(f"{WORK}/") or "/exclusions/" in name)
        return join_path(self.store if in_store else str(self.output), name)

    def run_task(self, stage: str, task: int) -> dict[str, Any]:
        """Do a task; return its record."""
        logger.disable("datatrove")
        for module in (dedup.minhash, dedup.exact_dedup, dedup.sentence_dedup, stats.merger):
            module.tqdm = functools.partial(tqdm, disable=True)
        started = time.time()
        with work_folder(self.work) as folder:
            (folder / WORK / stage).mkdir(parents=True)
            record: dict[str, Any] = getattr(self, f"_make_{stage}")(folder, task) or {}
            made = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
            record["files"] = {name: file_checksum(folder / name) for name in made}
            record["bytes"] = sum((folder / name).stat().st_size for name in made)
            fsync_tree(folder)
            places = {name: place for name in made if is_url(place := self._place(name))}
            record["stored"] = {name: put_file(folder / name, places[name], record["files"][name]) for name in places}
            here = [name for name in made if name not in places]
            for name in here:
                (self.output / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(folder / name, self.output / name)
            for parent in {(self.output / name).parent for name in here}:
                fsync_directory(parent)
            record["seconds"] = round(time.time() - started, 3)
            if self.store and stage == "kept":
                write_json(copy := folder / self._record_file(stage, task).name, record)
                put_file(copy, join_path(self.store, f"{WORK}/records/{copy.name}"), file_checksum(copy))
        write_json(self._record_file(stage, task), record)
        return record

    def _make_evaluations(self, folder: Path, task: int) -> None:
        """Write the n-grams of datatrove's indexer, which itself asks for a package with evaluation sets."""
        hashing = create_hash_func(self.ngrams.hash_config)
        indexer = SimpleNamespace(tokenizer=self._words(), config=self.ngrams, hash_func=hashing)
        for name in self._evaluations():
            hashes: set[int] = set()
            rows, options = DocumentRows(self.options), self.options.model_copy(update={"reader": None})
            for array in map(rows.end_array, read_texts(options, str(self.settings.evaluations), name, faults=rows)):
                for text in array.to_pylist():
                    query = rows.others.popleft().get("query")
                    hashes.update(decont.NGramsDecontIndexer.compute_hashes(indexer, text or "", query))
            index = np.array(sorted(hashes), dtype=self.ngrams.hash_config.np_descr)
            index.tofile(folder / WORK / "evaluations" / f"{name.replace('/', '_')}.index.hashes")

    def _make_documents(self, folder: Path, task: int) -> dict[str, Any]:
        place, last = folder / WORK / "documents", []
        if self.settings.evaluations is not None:
            index = str(self.work / "evaluations")
            last.append({"decontamination": {"index_folder": index, "config": self.ngrams, "language": self._words()}})
        steps = ShardSteps(self.options, output=str(place), shard=f"{task:05d}", last=last)
        documents, skipped, bad = 0, {}, Counter[str]()
        lines = JsonLines(place / f"{task:05d}.jsonl.gz", level=1)  # for the stages alone
        with contextlib.closing(lines), contextlib.closing(steps):
            for name in self.files[task :: self.tasks]:
                rows, before = steps.begin_file(name), documents
                lines.begin_member()
                try:
                    for array in map(rows.end_array, read_texts(self.options, self.dataset, name, faults=rows)):
                        for document in filter(lambda document: document.text, steps.documents(array)):
                            lines.write(_line(document, file=name, row=steps.row - 1))
                            documents += 1
                    bad.update(rows.counts)
                except InputError as error:
                    if not self.options.skips_files:
                        raise
                    steps.rollback()
                    lines.rollback()
                    skipped[name], documents = str(error), before
            counts = steps.finish()[0]
        if self.settings.exact:
            hashes = dedup.ExactDedupSignature(str(place / "hashes"), self._exact, self.tasks)
            hashes.run(_read(lines.path), task)
        return {"steps": counts, "documents": documents, "skipped": skipped, "bad_lines": bad}

    def _make_exact(self, folder: Path, task: int) -> None:
        hashes, found = str(self.work / "documents" / "hashes"), str(folder / WORK / "exact")
        dedup.ExactFindDedups(hashes, found, self._exact).run(None, task, self.tasks)

    def _left(self, task: int, until: str, lines: JsonLines | None = None) -> tuple[Iterator[Any], list[Any]]:
        """Return the documents of a task that the stages before `until` leave, and their counts; `lines` takes the
        others."""
        given, blocks = self.settings, list[Any]()
        if given.exact:
            passage = _Passage(lines, "exact", _SAME)
            blocks.append(dedup.ExactDedupFilter(str(self.work / "exact"), self._exact, passage))
        if given.minhash is not None and until != "signatures":
            passage, place = _Passage(lines, "minhash", f"nearly the {_SAME}"), str(self.work / "clusters")
            blocks.append(dedup.MinhashDedupFilter(place, passage, load_cluster_sizes=True))
        if given.sentences is not None and until == "kept":
            passage, place = _Passage(lines, "sentences", _SHORT), str(self.work / "repeated")
            blocks.append(dedup.SentenceDedupFilter(place, self.sentences, passage, self._words()))
        documents = _read(self.work / "documents" / f"{task:05d}.jsonl.gz")
        for block in blocks:
            documents = block.exclusion_writer.through(block, documents, task)
        return documents, [block.exclusion_writer.counts for block in blocks]

    def _make_signatures(self, folder: Path, task: int) -> None:
        place = str(folder / WORK / "signatures")
        dedup.MinhashDedupSignature(place, self.minhash, self._words()).run(self._left(task, "signatures")[0], task)

    def _make_buckets(self, folder: Path, task: int) -> None:
        places, config = (str(self.work / "signatures"), str(folder / WORK / "buckets")), self.minhash
        block = dedup.MinhashDedupBuckets(*places, config=config, lines_to_buffer=_LINES)
        block.run(None, task, config.num_buckets)

    def _make_clusters(self, folder: Path, task: int) -> None:
        places, config = (str(self.work / "buckets"), str(folder / WORK / "clusters")), self.minhash
        dedup.MinhashDedupCluster(*places, config, save_cluster_size=True, lines_to_buffer=_LINES).run()

    def _make_sentences(self, folder: Path, task: int) -> None:
        """As the block's `run`, which holds Python's numbers, and has no room for a sentence beyond the 65,536th."""
        place = str(folder / WORK / "sentences")
        block = dedup.SentenceDedupSignature(place, self.tasks, self.sentences, self._words())
        kind = np.dtype([("hash", self.sentences.hash_config.np_descr), ("doc", "<u4"), ("sent", "<u2")])
        found = [np.empty(0, kind)]
        for number, document in enumerate(self._left(task, "sentences")[0]):
            hashes = block.get_hashes(document, number)
            found.append(np.array([each for each in hashes if each[2] < 1 << 16], kind))
        block.save_hashes(task, np.concatenate(found))

    def _make_repeated(self, folder: Path, task: int) -> None:
        places = str(self.work / "sentences"), str(folder / WORK / "repeated")
        block = dedup.SentenceFindDedups(*places, config=self.sentences, lines_to_buffer=_LINES)
        block.run(None, task, self.tasks)

    def _make_kept(self, folder: Path, task: int) -> dict[str, Any]:
        file = exclusion_file(folder / WORK / "kept", f"{task:05d}", self.options.exclusions)
        lines, kept = JsonLines(file), JsonLines(folder / f"{task:05d}.jsonl.gz")
        with contextlib.closing(lines), contextlib.closing(kept):
            documents, counts = self._left(task, "kept", lines)
            for document in documents:
                kept.write(_line(document))
        return {"steps": counts}

    def _make_stats(self, folder: Path, task: int) -> None:
        documents = JsonlReader(self.store or str(self.output)).read_file(f"{task:05d}.jsonl.gz")
        for entry in self.settings.stats:
            block = build_step(entry, "stats", str(folder / WORK / "stats"))
            # the package's own list of suffixes: a newer one is in the network, which few nodes have
            block.tld_extractor = type(block.tld_extractor)(suffix_list_urls=(), cache_dir=None)
            documents = block.run(documents, task, self.tasks)
        try:
            deque(documents, maxlen=0)
        except KeyError as error:
            hint = "`groups_to_compute: [summary, histogram]` needs no addresses"
            raise InputError(f"a document has no {error} in its metadata", where="dedup.stats", hint=hint) from error

    def _make_merged(self, folder: Path, task: int) -> None:
        deque(stats.StatsMerger(str(self.work / "stats"), str(folder / "_stats")).run(None), maxlen=0)
