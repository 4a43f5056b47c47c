from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from relayrun.errors import InputError
from relayrun.tokens.shards.shard import Shard
from relayrun.tokens.tokenize.options import TokenizeOptions
from relayrun.tokens.tokenize.pipeline import TokenizeResult, tokenize_paths_file
from tests import warm
from tests.tokenization_corpus import TEXTS, expected_ids, shard_documents, train_tokenizer, write_parquet
from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts/tokenization/preprocess_megatron.py"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return train_tokenizer(tmp_path / "tok" / "tokenizer.json")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "da ta").mkdir()
    return tmp_path / "da ta"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


Run = Callable[..., TokenizeResult]


@pytest.fixture
def run(tmp_path: Path, tokenizer: Path, data: Path, out: Path) -> Run:
    """Tokenize these files of the dataset, in this process."""

    def run(names: Sequence[str], **options: Any) -> TokenizeResult:
        paths = tmp_path / "paths_file_0.txt"
        paths.write_bytes(b"".join(os.fsencode(name) + b"\n" for name in names))
        where = {"output_folder": out, "dataset": data}
        where |= {name: options.pop(name) for name in list(options) if name in where}
        how = TokenizeOptions(**({"tokenizer": str(tokenizer), "workers": 1} | options))
        return tokenize_paths_file(how, paths_file=paths, **where)

    return run


def shards(folder: Path) -> list[str]:
    """Everything that carries or will carry a shard's name; all finished ones open."""
    for file in folder.glob("*.bin"):
        Shard.open(file.with_suffix(""))
    return sorted(file.name for file in folder.glob("*_tokens*"))


def write_jsonl(file: Path, texts: Sequence[str | None]) -> None:
    lines = "".join(json.dumps({"id": row, "text": text}) + "\n" for row, text in enumerate(texts)).encode()
    name = file.name.lower()
    file.write_bytes(
        gzip.compress(lines) if name.endswith(".gz") else zstandard.compress(lines) if name.endswith(".zst") else lines
    )


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["PARQUET", "jsonl", "jsonl.gz", "jsonl.Zst"])
def test_every_kind_of_file_gives_hugging_faces_ids_in_order(
    run: Run, data: Path, out: Path, tokenizer: Path, suffix: str
) -> None:
    texts = [*TEXTS, "a document of a megabyte " * 45_000, *reversed(TEXTS)]
    write = write_parquet if suffix == "PARQUET" else write_jsonl
    write(data / f"x.{suffix}", texts)
    result = run([f"x.{suffix}"])
    expected = expected_ids(tokenizer, texts)
    assert shard_documents(out / "00000_tokens") == expected
    assert (result.documents, result.tokens) == (len(texts), sum(map(len, expected)))


def test_empty_and_null_documents_are_dropped_and_counted(run: Run, data: Path, out: Path, tokenizer: Path) -> None:
    write_parquet(data / "a.parquet", ["one", None, "", None, " ", "two"])
    write_jsonl(data / "b.jsonl", ["", None, "three"])
    result = run(["a.parquet", "b.jsonl"], tasks=2)
    assert shard_documents(out / "00000_tokens") == expected_ids(tokenizer, ["one", " ", "two"])
    assert (result.documents, result.empty_documents, result.null_documents) == (4, 2, 3)
    assert "dropped: 2 empty and 3 null documents" in result.summary()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, -1])
def test_file_names_are_taken_literally(run: Run, data: Path, out: Path, tokenizer: Path, workers: int) -> None:
    names = [
        " lead.parquet",
        "q'u\"o.parquet",
        "-dash.parquet",
        "ünï.parquet",
        "zip::a.parquet",
        "[*]?.parquet",
        "~/x.parquet",
        "file:/y.parquet",
        "\udcff\udcfe.parquet",
        "cr\r.parquet",
        "sep\u2028.parquet",
    ]
    for number, name in enumerate(names):
        (data / name).parent.mkdir(exist_ok=True)
        write_parquet(os.fsencode(data / name), [f"file {number}"])
    result = run(names, tasks=2, workers=workers)
    assert result.documents == len(names)
    expected = expected_ids(tokenizer, [f"file {number}" for number in range(len(names))])
    assert shard_documents(out / "00000_tokens") == expected[0::2]  # task r takes files r, r + n, ...
    assert shard_documents(out / "00001_tokens") == expected[1::2]


@pytest.mark.slow
def test_there_are_never_more_tasks_than_files_and_names_are_plain(run: Run, data: Path, out: Path) -> None:
    for name in ("a", "b", "c"):
        write_parquet(data / f"{name}.parquet", ["x"])
    result = run(["a.parquet", "b.parquet", "c.parquet"], tasks=8, workers=-1)
    assert result.workers == 3
    assert shards(out) == [f"0000{rank}_tokens.{suffix}" for rank in range(3) for suffix in ("bin", "idx")]


@pytest.mark.slow
def test_workers_do_not_change_the_shards(run: Run, data: Path, tmp_path: Path) -> None:
    names = [f"{i}.parquet" for i in range(5)]
    for number, name in enumerate(names):
        write_parquet(data / name, [f"{text}{number}" for text in TEXTS])
    for folder, workers in (("one", 1), ("two", 2)):
        run(names, tasks=4, workers=workers, output_folder=tmp_path / folder)
    for name in shards(tmp_path / "one"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert len(shards(tmp_path / "two")) == 8


@pytest.mark.slow
def test_another_column_and_another_eos(run: Run, data: Path, out: Path) -> None:
    write_parquet(data / "a.parquet", ["x"], column="co.lumn")
    run(["a.parquet"], column="co.lumn", eos_token="<s>")
    (ids,) = shard_documents(out / "00000_tokens")
    assert ids[-1] == 1


@pytest.mark.slow
def test_a_second_run_finds_everything_done(run: Run, data: Path, out: Path) -> None:
    write_parquet(data / "a.parquet", list(TEXTS))
    first = run(["a.parquet"])
    stamp = (out / "00000_tokens.bin").stat().st_mtime_ns
    second = run(["a.parquet"])
    assert (second.tasks_run, second.tokens, second.documents) == (0, first.tokens, first.documents)
    assert (out / "00000_tokens.bin").stat().st_mtime_ns == stamp


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["missing .idx", "torn .bin", "changed input"])
def test_a_second_run_makes_again_what_is_not_whole_and_only_that(
    run: Run, data: Path, out: Path, tokenizer: Path, damage: str
) -> None:
    for name in ("a", "b"):
        write_parquet(data / f"{name}.parquet", list(TEXTS))
    run(["a.parquet", "b.parquet"])
    expected = expected_ids(tokenizer, TEXTS)
    if damage == "missing .idx":
        (out / "00001_tokens.idx").unlink()
    elif damage == "torn .bin":
        os.truncate(out / "00001_tokens.bin", 10)
    else:
        write_parquet(data / "b.parquet", ["other"])
        expected = expected_ids(tokenizer, ["other"])
    assert run(["a.parquet", "b.parquet"]).tasks_run == 1
    assert shard_documents(out / "00001_tokens") == expected
    assert len(shards(out)) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"tasks": 1}, "tasks"),
        ({"eos_token": "<s>"}, "eos"),
        ({"column": "id"}, "column"),
        ({"paths": ["b.parquet"]}, "paths"),
        ({"append_eod": "no"}, "eos"),
        ({"keep_empty": True}, "empty documents"),
    ],
)
def test_shards_of_another_choice_are_not_mixed_in(
    run: Run, data: Path, out: Path, options: dict[str, Any], what: str
) -> None:
    for name in ("a", "b"):
        write_parquet(data / f"{name}.parquet", list(TEXTS))
    run(["a.parquet", "b.parquet"])
    before = {file.name: file.read_bytes() for file in out.iterdir() if file.is_file()}
    with pytest.raises(InputError, match=f"another choice of {what}"):
        run(options.pop("paths", ["a.parquet", "b.parquet"]), **options)
    assert {file.name: file.read_bytes() for file in out.iterdir() if file.is_file()} == before


def test_shards_that_nobody_knows_are_not_mixed_in(run: Run, data: Path, out: Path) -> None:
    write_parquet(data / "a.parquet", ["x"])
    out.mkdir()
    (out / "mine.bin").write_bytes(b"")
    with pytest.raises(InputError, match="not of this run, for example mine"):
        run(["a.parquet"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("torn.parquet", b"PAR1 torn", r"torn\.parquet: cannot be read, it may be torn"),
        ("empty.parquet", b"", r"empty\.parquet: cannot be read"),
        (
            "t.jsonl.gz",
            gzip.compress(b'{"text": "x"}\n' * 99, mtime=0)[:-9],
            r"t\.jsonl\.gz: cannot be read, it may be torn: a member of gzip has no end",
        ),
        ("t.jsonl.zst", zstandard.compress(os.urandom(999).hex().encode())[:-9], r"t\.jsonl\.zst: cannot be read"),
        ("j.jsonl", b'{"text": "x"}\n{"text": \n', r"j\.jsonl:2: this line is not JSON"),
        ("j.jsonl", b'{"text": "x"}\n{"txt": 1}\n', r"j\.jsonl:2: no column 'text'; there are: txt"),
        ("j.jsonl", b'{"text": 1}\n', r"j\.jsonl:1: 'text' holds int, not text"),
        ("j.jsonl", b"[]\n", r"j\.jsonl:1: this line is no JSON object"),
        ("j.jsonl", b'{"text": "\\ud800"}\n', r"j\.jsonl:1: 'text' holds a lone surrogate"),
    ],
)
def test_a_bad_file_is_named_and_the_others_are_done(
    run: Run, data: Path, out: Path, name: str, content: bytes, message: str
) -> None:
    write_parquet(data / "good.parquet", list(TEXTS))
    (data / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        run([name, "good.parquet"])
    assert shards(out) == ["00001_tokens.bin", "00001_tokens.idx"]


@pytest.mark.slow
def test_a_column_that_is_missing_or_no_text_is_named_with_those_that_there_are(run: Run, data: Path) -> None:
    write_parquet(data / "a.parquet", ["x"], column="content")
    with pytest.raises(InputError, match=r"a\.parquet: no column 'text'; there are: id, content\n.*--column"):
        run(["a.parquet"])
    with pytest.raises(InputError, match=r"a\.parquet: column 'id' holds int64, not text"):
        run(["a.parquet"], column="id")


def test_several_text_types_are_read(run: Run, data: Path, out: Path, tokenizer: Path) -> None:
    table = pa.table({"text": pa.array(["a", "b", None, "a"]).dictionary_encode()})
    pq.write_table(table, data / "dictionary.parquet")
    pq.write_table(pa.table({"text": pa.array(["c"], pa.large_string())}), data / "large.parquet")
    run(["dictionary.parquet", "large.parquet"], tasks=1)
    assert shard_documents(out / "00000_tokens") == expected_ids(tokenizer, ["a", "b", "a", "c"])


@pytest.mark.slow
def test_input_without_text_is_an_error_and_leaves_no_shard(run: Run, data: Path, out: Path) -> None:
    write_parquet(data / "a.parquet", ["", None])
    write_parquet(data / "b.parquet", [])
    with pytest.raises(InputError, match=r"no document with text in 2 files.*1 empty and 1 null"):
        run(["a.parquet", "b.parquet"])
    assert shards(out) == []


@pytest.mark.slow
def test_a_part_without_text_leaves_no_shard_and_is_done(run: Run, data: Path, out: Path) -> None:
    write_parquet(data / "a.parquet", ["", None])
    write_parquet(data / "b.parquet", ["x"])
    run(["a.parquet", "b.parquet"])
    assert shards(out) == ["00001_tokens.bin", "00001_tokens.idx"]
    assert run(["a.parquet", "b.parquet"]).tasks_run == 0


def door(tokenizer: Path | str, data: Path, paths: Path, out: Path, *options: str) -> list[str]:
    arguments = [
        "--tokenizer-name-or-path",
        tokenizer,
        "--dataset",
        data,
        "--paths-file",
        paths,
        "--output-folder",
        out,
    ]
    return [sys.executable, str(SCRIPT), *map(str, arguments), *options]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("column", "good.parquet: no column 'nope'"),
        ("torn", "torn.parquet: cannot be read"),
        ("tokenizer", "no such tokenizer: "),
        ("eos", "the tokenizer has no token"),
        ("no files", "the paths file lists no file"),
        ("missing file", "gone.parquet: this file of the paths file is missing"),
        ("output", "Not a directory"),
        ("read-only output", "out"),
        ("tasks", "--n-tasks is at least 1"),
    ],
)
def test_each_foreseeable_error_is_one_message(
    tmp_path: Path, data: Path, tokenizer: Path, out: Path, case: str, message: str
) -> None:
    write_parquet(data / "good.parquet", ["x"])
    write_parquet(data / "fine.parquet", ["y"])
    (data / "torn.parquet").write_bytes(b"PAR1torn")
    paths, options = tmp_path / "paths", ["--n-workers", "2"]
    names = {"torn": "good.parquet\ntorn.parquet\n", "no files": "", "missing file": "gone.parquet\n"}
    paths.write_text(names.get(case, "good.parquet\nfine.parquet\n"))
    target = {"output": paths / "below", "read-only output": Path("/proc/sys/out")}.get(case, out)
    name = "no-such/tokenizer" if case == "tokenizer" else tokenizer
    options += {"column": ["--column", "nope"], "eos": ["--eos-token", "</no>"], "tasks": ["--n-tasks", "0"]}.get(
        case, []
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = warm.run(door(name, data, paths, target, *options), env=environment)
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("error: ") == 1
    assert "Traceback" not in done.stderr + done.stdout
    assert not list(tmp_path.rglob("*.tmp"))
    if case != "torn":
        assert not list(tmp_path.rglob("*.bin"))


@pytest.mark.slow
def test_the_door_prints_what_was_done(tmp_path: Path, data: Path, tokenizer: Path, out: Path) -> None:
    write_parquet(data / "good.parquet", ["x", "", None])
    (tmp_path / "paths").write_text("good.parquet\n")
    done = subprocess.run(
        door(tokenizer, data, tmp_path / "paths", out, "--logging-dir", str(tmp_path / "lo gs")),
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    assert done.stderr == ""
    assert "1 documents, 2 tokens from 1 files" in done.stdout
    assert "dropped: 1 empty and 1 null documents" in done.stdout
    assert [file.name for file in (tmp_path / "lo gs").iterdir()] == ["tokenizer.json"]
    assert sorted(file.name for file in out.iterdir()) == [
        ".lock",
        "00000_tokens.bin",
        "00000_tokens.idx",
        "tokenization.json",
    ]


@pytest.fixture
def stuck(tmp_path: Path, data: Path, tokenizer: Path, out: Path) -> Callable[[], tuple[subprocess.Popen[str], int]]:
    """Starts a run of two workers whose second task waits for ever for a pipe; returns it and that worker's pid."""

    def start() -> tuple[subprocess.Popen[str], int]:
        write_parquet(data / "a.parquet", list(TEXTS))
        os.mkfifo(data / "b.jsonl")
        (tmp_path / "paths").write_text("a.parquet\nb.jsonl\n")
        process = subprocess.Popen(
            door(tokenizer, data, tmp_path / "paths", out),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # whoever runs the tests in the background has it ignored
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        record = out / "tokenization.json"

        def is_stuck() -> bool:
            first_is_done = record.exists() and '"00000_tokens": {' in record.read_text()
            return first_is_done and (out / "00001_tokens.bin.tmp").exists()

        def what_it_says() -> tuple[str, str]:
            process.kill()
            return process.communicate(timeout=300)

        wait_for(is_stuck, words=what_it_says)
        return process, workers_of(process.pid)[-1]

    return start


def command_of(pid: int | str) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def workers_of(pid: int) -> list[int]:
    try:
        ours, children = command_of(pid), Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(child) for child in children if b"spawn_main" in command_of(child) or command_of(child) == ours]
    except FileNotFoundError:
        return []


@pytest.mark.slow
def test_a_killed_worker_is_an_error_and_no_hang_and_a_rerun_completes(
    stuck: Callable[[], tuple[subprocess.Popen[str], int]],
    tmp_path: Path,
    data: Path,
    tokenizer: Path,
    out: Path,
) -> None:
    process, worker = stuck()
    os.kill(worker, signal.SIGKILL)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "a tokenization worker was killed" in errors
    assert "Traceback" not in errors
    assert shards(out) == ["00000_tokens.bin", "00000_tokens.idx"]
    (data / "b.jsonl").unlink()
    write_jsonl(data / "b.jsonl", TEXTS)
    done = warm.run(door(tokenizer, data, tmp_path / "paths", out), check=True)
    assert "task 0" not in done.stdout
    expected = expected_ids(tokenizer, TEXTS)
    assert [shard_documents(out / f"0000{rank}_tokens") for rank in (0, 1)] == [expected, expected]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_worker_outlives_its_parent_and_no_shard_is_torn(
    stuck: Callable[[], tuple[subprocess.Popen[str], int]], out: Path, number: signal.Signals
) -> None:
    process, worker = stuck()
    process.send_signal(number)
    _, errors = process.communicate(timeout=300)
    assert "Traceback" not in errors
    wait_for(lambda: not Path(f"/proc/{worker}").exists(), words="the end of a worker without its parent")
    assert [name for name in shards(out) if not name.endswith(".tmp")] == ["00000_tokens.bin", "00000_tokens.idx"]


SEES = """
import os, sys, time
from pathlib import Path
from relayrun.tokens.tokenize import pipeline
from relayrun.tokens.tokenize.options import TokenizeOptions

def seen():
    return os.environb.get(b"HF_TOKEN", b"") + Path("/proc/self/environ").read_bytes()

def looks(task, *arguments, **options):
    Path(sys.argv[5], f"seen-{os.getpid()}").write_bytes(seen())
    until = time.monotonic() + 120
    while len(os.listdir(sys.argv[5])) < 2 and time.monotonic() < until:  # one worker would take both tasks
        time.sleep(0.05)
    return task(*arguments, **options)

class Looking:
    def __init__(self, task): self.task = task
    def __call__(self, *arguments, **options): return looks(self.task, *arguments, **options)

pipeline.tokenize_shard = Looking(pipeline.tokenize_shard)
if __name__ == "__main__":  # a pool may start its workers anew
    tokenizer, paths, data, out = sys.argv[1:5]
    options = TokenizeOptions(tokenizer=tokenizer, tasks=2, workers=2)
    pipeline.tokenize_paths_file(options, output_folder=out, dataset=data, paths_file=paths)
    print(os.environ["HF_TOKEN"], os.environ["HOME"])
"""


def test_a_worker_has_no_secret_in_its_environment(tmp_path: Path, tokenizer: Path, data: Path, out: Path) -> None:
    """An engine is a package of somebody else, which sees what its process sees."""
    write_jsonl(data / "a.jsonl", ["one text", "another text"])
    write_jsonl(data / "b.jsonl", ["a third text"])
    (tmp_path / "paths").write_text("a.jsonl\nb.jsonl\n")
    (tmp_path / "seen").mkdir()
    (tmp_path / "sees.py").write_text(SEES)
    secret = "a-secret-0123456789"
    done = subprocess.run(
        [sys.executable, tmp_path / "sees.py", tokenizer, tmp_path / "paths", data, out, tmp_path / "seen"],
        env=os.environ | {"HF_TOKEN": secret, "HOME": "/home/ann"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{secret} /home/ann"  # the caller has it again
    found = [path.read_bytes() for path in (tmp_path / "seen").iterdir()]
    assert len(found) == 2
    assert all(secret.encode() not in each and b"HOME=/home/ann" in each for each in found)
