"""What a worker needs for long documents: real workers, the largest resident set of each."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.tokenization_corpus import TEXTS, train_tokenizer

MB = 1_000_000
PROGRAM = """
import json, sys
from relayrun.tokens.tokenize.processes import use_one_thread
use_one_thread()
import resource
from relayrun.tokens.tokenize.options import TokenizeOptions
from relayrun.tokens.tokenize.pipeline import tokenize_paths_file
if __name__ == "__main__":
    tokenizer, data = sys.argv[1:]
    options = TokenizeOptions(tokenizer=tokenizer, workers=2)
    tokenize_paths_file(options, output_folder="out", dataset=data, paths_file="paths")
    lines = dict(line.split(":") for line in open("/proc/self/status"))  # its ru_maxrss begins with pytest's
    largest = [int(lines["VmHWM"].split()[0]), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss]
    print(json.dumps([1024 * each for each in largest]))
"""


def largest(folder: Path, tokenizer: Path, file: Path) -> tuple[int, int]:
    """Bytes of the starting process and of the larger of its two workers; the other one has a short file."""
    folder.mkdir()
    (file.parent / "short.jsonl").write_text('{"text": "short"}\n')
    (folder / "paths").write_text(f"{file.name}\nshort.jsonl\n")
    (folder / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "program.py", tokenizer, file.parent],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    parent, worker = json.loads(done.stdout.splitlines()[-1])
    return parent, worker


def document(kind: str, size: int) -> str:
    text = "a line of plain text, as long as most\n" if kind == "ascii" else "\n".join(TEXTS[1:6]) + "\n\U0001f600\n"
    return text * (size // len(text.encode()))


def write(file: Path, kind: str, size: int) -> None:
    text = document(kind, size)
    if file.suffix == ".parquet":
        table = pa.table({"text": ["short", text, text]})
        pq.write_table(table, file, use_dictionary=kind == "dictionary", write_batch_size=1)
        return
    line = json.dumps({"id": 7, "text": text}, ensure_ascii=kind == "escaped").encode() + b"\n"
    line += line  # one is not kept while the next is read
    packed = {".gz": lambda: gzip.compress(line, 1), ".zst": lambda: zstandard.compress(line)}
    file.write_bytes(packed.get(file.suffix, lambda: line)())


@pytest.mark.parametrize(
    ("suffix", "kind", "factor"),
    [
        pytest.param("jsonl", "escaped", 1.0, marks=pytest.mark.slow),
        pytest.param("jsonl", "ascii", 1.0, marks=pytest.mark.long),
        pytest.param("jsonl", "wide", 1.0, marks=pytest.mark.long),
        pytest.param("jsonl.gz", "escaped", 1.0, marks=pytest.mark.long),
        pytest.param("jsonl.zst", "escaped", 1.0, marks=pytest.mark.long),
        pytest.param("parquet", "wide", 3.5, marks=pytest.mark.long),
        pytest.param("parquet", "dictionary", 4.5, marks=pytest.mark.long),
    ],
)
def test_a_document_of_60_mb_needs_little_more_memory_than_its_bytes(
    suffix: str, kind: str, factor: float, tmp_path: Path
) -> None:
    tokenizer = train_tokenizer(tmp_path / "tok" / "tokenizer.json")
    for name, size in (("small", MB), ("large", 60 * MB)):
        (tmp_path / name).mkdir()
        write(tmp_path / name / f"a.{suffix}", kind, size)
    small, large = (
        largest(tmp_path / f"{name} run", tokenizer, tmp_path / name / f"a.{suffix}") for name in ("small", "large")
    )
    more = [round((there - here) / (59 * MB), 2) for here, there in zip(small, large, strict=True)]
    print(f"{suffix} {kind}: bytes of memory for a byte of the document: {more} (the starting process, a worker)")
    assert max(more) < factor


@pytest.mark.parametrize(
    "kind", [pytest.param("lines", marks=pytest.mark.long), pytest.param("bytes", marks=pytest.mark.long)]
)
def test_a_document_of_any_length_needs_no_more_memory_than_one_of_60_mb(kind: str, tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    if kind == "lines":
        train_tokenizer(tokenizer)
    else:  # a token for every byte, as genomes are read: there is no line to cut at
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.add_special_tokens(["<eos>"])
        made.save(str(tokenizer))
    megabyte = "ACGT" * 250_000 if kind == "bytes" else document("ascii", MB)
    peaks = []
    for size in (60, 700):
        folder = tmp_path / str(size)
        folder.mkdir()
        with (folder / "a.jsonl").open("w") as file:
            file.write('{"text": "')
            for _ in range(size):
                file.write(json.dumps(megabyte)[1:-1])
            file.write('"}\n')
        peaks.append(largest(tmp_path / f"{size} run", tokenizer, folder / "a.jsonl"))
    more = [there - here for here, there in zip(*peaks, strict=True)]
    print(f"{kind}: {[each / MB for each in more]} MB more for a document of 700 MB than for one of 60 MB")
    assert max(more) < 60 * MB
