"""Random histories of merges, cuts, copies, links, repeats, mixtures and splits: what a submit takes holds no held-out
document in training, found by brute force over the raw texts."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from relayrun.errors import ConfigError, InputError
from relayrun.tokens.mixture.create_mixture import create_mixture
from relayrun.tokens.order.datasets import WindowOrder
from relayrun.tokens.readers import deal_files
from relayrun.tokens.shards.manifest import DatasetManifest, Manifest, doubled_texts
from relayrun.tokens.shards.merge import merge_shards
from relayrun.tokens.shards.prefixes import find_prefixes
from relayrun.tokens.tokenize.options import TokenizeOptions
from relayrun.tokens.tokenize.pipeline import tokenize_paths_file
from tests.tokenization_corpus import shard_documents, train_tokenizer

HISTORIES, PER_TEST = 200, 20
FILES, DOCUMENTS = 3, 24


class Sources:
    """Raw files of distinct texts, and their tokenizations with one to five shards, some of ranges of a file."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(train_tokenizer(folder / "tokenizer.json")))
        rng = random.Random(0)
        self.texts: set[str] = set()
        for file in range(FILES):
            texts = [f"{file} {n} {'word ' * rng.randrange(1, 40)}" for n in range(DOCUMENTS)]
            self.texts |= set(texts)
            (folder / f"{file}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        self.folders = []
        for name in range(FILES):
            for tasks in (1, 3, 5):
                paths = folder / f"paths-{name}-{tasks}"
                paths.write_text(f"{name}.jsonl\n")
                options = TokenizeOptions(tokenizer=str(folder / "tokenizer.json"), tasks=tasks, workers=1)
                output = folder / f"tokens-{name}-{tasks}"
                tokenize_paths_file(options, output_folder=output, dataset=folder, paths_file=paths)
                self.folders.append(output)

    def documents(self, prefixes: list[str]) -> Counter[str]:
        """Return the raw texts of the documents of shards."""
        found = Counter(self.tokenizer.decode(ids) for prefix in prefixes for ids in shard_documents(Path(prefix)))
        assert set(found) <= self.texts
        return found


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deal_files, "SMALLEST_RANGE", 300)
        return Sources(tmp_path_factory.mktemp("sources"))


def change(rng: random.Random, folders: list[Path], output: Path) -> None:
    """Make one more folder of shards, unless the command refuses. Shards keep their records: without one a part of a
    merged shard is not known."""
    kind = rng.choice(["merge", "merge two", "copy", "link", "some", "mix", "cut", "repeat"])
    chosen = rng.sample(folders, 2)
    if kind in ("merge", "merge two"):
        prefixes = find_prefixes(chosen[: 1 + (kind == "merge two")], listed=True)
        output.mkdir()
        doubled_texts(prefixes, refuse=True)  # as the command does
        merge_shards(prefixes, output / "merged")
    elif kind == "copy":
        shutil.copytree(chosen[0], output, symlinks=True)
    elif kind == "link":
        output.symlink_to(chosen[0])
    elif kind == "some":
        output.mkdir()
        for number, prefix in enumerate(each for each in find_prefixes(chosen[:1]) if rng.random() < 0.5):
            for suffix in (".bin", ".idx"):
                os.symlink(prefix + suffix, output / f"{number}{suffix}")
    else:
        weights, repeat = [rng.random() + 0.05, rng.random() + 0.05], kind == "repeat"
        tokens = rng.randrange(200, 3000) if kind == "cut" else None
        create_mixture(chosen, weights, output, seed=rng.randrange(99), tokens=tokens, allow_repeats=repeat)


def build(training: list[list[str]], held_out: list[str], split: float) -> Manifest:
    names = {f"t{number}": prefixes for number, prefixes in enumerate(training)}
    validation = {"v": held_out} if held_out else {}
    return Manifest.build(names, validation, vocabulary_size=400, eod=0, tokenizer="t", split=split)


def split_documents(prefixes: list[str], split: float) -> tuple[set[tuple[str, int]], set[tuple[str, int]]]:
    """Return the documents of the training windows and of the held-out windows."""
    manifest, found = DatasetManifest.build(prefixes), []
    for held_out in (False, True):
        order = WindowOrder(manifest, seq_length=8, seed=1, split=split, held_out=held_out)
        places = (each for i in range(len(order)) for each in order.origins(0, i))
        found.append({(each.prefix, each.document) for each in places})
    return found[0], found[1]


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, HISTORIES, PER_TEST))
def test_no_held_out_document_is_trained_on(tmp_path: Path, sources: Sources, first: int) -> None:
    taken: Counter[str] = Counter()
    for seed in range(first, first + PER_TEST):
        rng, folders = random.Random(seed), list(sources.folders)
        for number in range(rng.randrange(1, 7)):
            try:
                change(rng, folders, output := tmp_path / f"{seed}-{number}")
                find_prefixes([output])
            except (InputError, ConfigError):
                continue
            folders += [output] * 3  # new folders are taken more often
        folders = list(dict.fromkeys(folders))
        pairs = rng.sample([(a, b) for a in folders for b in folders], min(30, len(folders) ** 2))
        passes = tmp_path / f"{seed}-passes"
        two = [sources.folders[3 * file + rng.randrange(3)] for file in rng.sample(range(FILES), 2)]
        create_mixture(two, [rng.uniform(0.7, 0.95), 0.1], passes, seed=seed, allow_repeats=True)
        for training, held_out in [(passes, passes), *pairs]:
            sets = [find_prefixes([training])], find_prefixes([held_out])
            if training is not passes and rng.random() < 0.3:
                sets[0].append(find_prefixes([rng.choice(folders)]))
            split = 0.2 if training is passes else rng.choice([0.0, 0.0, 0.2])
            try:
                build(sets[0], [] if split else sets[1], split)
            except InputError:
                taken["refused"] += 1
                continue
            documents = [sources.documents(prefixes) for prefixes in sets[0]]
            if not split:
                shared = set().union(*documents) & set(sources.documents(sets[1]))
                assert not shared, (seed, training, held_out, shared)
                taken["validation"] += 1
                continue
            every = sum(documents, Counter[str]())
            every_prefix = [prefix for prefixes in sets[0] for prefix in prefixes]
            texts = {prefix: [*map(sources.tokenizer.decode, shard_documents(Path(prefix)))] for prefix in every_prefix}
            try:
                sides = [split_documents(prefixes, split) for prefixes in sets[0]]
            except ConfigError:
                taken["too small"] += 1
                continue
            trained, kept = ({texts[prefix][n] for side in sides for prefix, n in side[of]} for of in (0, 1))
            assert not trained & kept, (seed, sets[0], trained & kept)
            taken["passes"] += max(every[text] for text in kept) > 1
            taken["split"] += 1
    assert min(taken[kind] for kind in ("refused", "validation", "split")) >= 5, taken
    assert taken["passes"], taken
