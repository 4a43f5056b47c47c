"""Programs that fail as programs of users fail: by their text, what they say, and whose cause it is.

They are written from public reports of failed trainings, not from the table of failures.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FailingProgram:
    """A program that fails."""

    text: str
    """A Bash script; it runs in a folder of its own with the Python of the tests as `python`."""
    words: str
    """Part of the words that a person would quote; empty: there are none."""
    whose: tuple[str, ...]
    """Whose cause a person would call it; empty: nobody could tell."""


def _python(text: str, start: str = "python train.py") -> str:
    return f"cat > train.py <<'END'\n{text}END\n{start}\n"


def _compiled(text: str) -> str:
    return f"cat > train.cpp <<'END'\n{text}END\ng++ -O0 -w -o train train.cpp && ./train\n"


_BOX = """import rich.traceback
rich.traceback.install(show_locals=True)
def batch(rows):
    width = 4
    raise ValueError("row 17 has 5 columns")
batch([])
"""
_LAUNCHER = """import subprocess, sys
child = subprocess.run([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
print(f"[2026-01-05 10:11:12,131] [INFO] [launch.py:315:sigkill_handler] Killing subprocess {4711}", file=sys.stderr)
print(f"[2026-01-05 10:11:12,139] [ERROR] [launch.py:321:sigkill_handler] ['python', '-u', 'main.py', "
      f"'--local_rank=1'] exits with return code = {child.returncode}", file=sys.stderr)
sys.exit(child.returncode)
"""
_WORKER = """import os, torch
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, n): os.kill(os.getpid(), 9)
for batch in torch.utils.data.DataLoader(Rows(), num_workers=1): pass
"""
_HYDRA = """import sys
class ConfigAttributeError(Exception):
    pass
ConfigAttributeError.__module__ = "omegaconf.errors"
print("Error executing job with overrides: ['model=7b', 'optimizer.lr=3e-4']", file=sys.stderr)
raise ConfigAttributeError("Key 'warmup' is not in struct\\n    full_key: optimizer.warmup\\n    object_type=dict")
"""
_LATE = """import atexit, sys
def words():
    for n in range(30):
        print(f"wandb:  train/loss_{n} ▁▂▃ {n}", file=sys.stderr)
    print("wandb: 🚀 View run at: https://example.invalid/run", file=sys.stderr)
class Engine:
    def __del__(self):
        self.pool.close()
atexit.register(words)
engine = Engine()
for n in range(60):
    print(f"step {n} loss 2.1")
raise OSError(5, "Input/output error", "/scratch/shard-17.bin")
"""
_GROUP = """import asyncio
async def read(n):
    await asyncio.sleep(0)
    if n == 2:
        raise ValueError(f"shard {n} is shorter than its index")
async def main():
    async with asyncio.TaskGroup() as group:
        for n in range(3):
            group.create_task(read(n))
asyncio.run(main())
"""
_NOTES = """try:
    {}["lr"]
except KeyError as error:
    error.add_note("while the schedule of step 12 was read")
    raise
"""
_POOL = """from multiprocessing import Pool
def encode(n):
    return [1, 2][n + 2]
if __name__ == "__main__":
    with Pool(2) as pool:
        pool.map(encode, range(2))
"""
_BROKEN_POOL = """import os
from concurrent.futures import ProcessPoolExecutor
def encode(n):
    os._exit(9)
if __name__ == "__main__":
    with ProcessPoolExecutor(1) as pool:
        list(pool.map(encode, [1]))
"""
_SERVER = """import http.server, threading, urllib.request
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_error({code})
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
urllib.request.urlopen(f"http://127.0.0.1:{{server.server_port}}/tokenizer.json")
"""
_LOGGED = """import logging, sys
logging.basicConfig(format="%(asctime)s | %(levelname)s | %(name)s | %(message)s")
try:
    rate = 1 / 0
except Exception:
    logging.getLogger("trainer").exception("training failed")
    sys.exit(1)
"""
_LOGURU = """import sys
from loguru import logger
@logger.catch(onerror=lambda _: sys.exit(1))
def train(step):
    raise RuntimeError("optimizer state of step 12 is empty")
train(3)
"""
_BUS = """#include <sys/mman.h>
#include <fcntl.h>
#include <unistd.h>
int main() {
    int file = open("rows.bin", O_RDWR | O_CREAT, 0600);
    ftruncate(file, 8192);
    char *rows = (char *) mmap(0, 8192, PROT_READ, MAP_SHARED, file, 0);
    ftruncate(file, 0);
    return rows[5000];
}
"""
_CLICK = """import click
@click.command()
@click.option("--data", required=True)
def train(data): pass
train()
"""
_ABSL = """from absl import app, flags
flags.DEFINE_float("learning_rate", 1e-3, "")
app.run(lambda _: None, argv=["train.py", "--learing_rate=3"])
"""
_TORN = """import struct
open("toy.idx", "wb").write(b"MMIDIDX" + bytes(3))
with open("toy.idx", "rb") as file:
    file.read(9)
    version, = struct.unpack("<Q", file.read(8))
"""
_GZIP = """import gzip
data = gzip.compress(b"text" * 9999)
open("rows.gz", "wb").write(data[:60])
print(len(gzip.open("rows.gz").read()))
"""
_ZIP = """import numpy
open("rows.npz", "wb").write(b"PK\\x03\\x04" + bytes(90))
numpy.load("rows.npz")
"""
_SILENT_RANK = """import os, sys
if os.environ["RANK"] == "1":
    raise IndexError("bucket 31 of 30")
"""
_KILLED_RANK = """import os, time
os.kill(os.getpid(), 9) if os.environ["RANK"] == "1" else time.sleep(60)
"""
_TORCHRUN = "python -m torch.distributed.run --standalone --nproc-per-node 2"
_RETRIES = """import sys, time
for n in range(3):
    print(f"WARNING: fetch of shard {n} failed, HTTP 503, retrying", file=sys.stderr)
for n in range(60):
    print(f"iteration {n} | loss 2.0")
raise ZeroDivisionError("float division by zero")
"""
_EARLIER = """import sys
print("ImportError: flash_attn is not installed; using the slow attention", file=sys.stderr)
print("error: no kernel for sm_61 here, so it is compiled anew", file=sys.stderr)
assert 768 % 7 == 0, f"hidden size 768 cannot be divided by 7 heads"
"""

PROGRAMS = {
    "a launcher's child is killed": FailingProgram(
        _python(_LAUNCHER), "return code = -9", ("unknown", "configuration")
    ),
    "torchrun's child is killed": FailingProgram(
        _python(_KILLED_RANK, f"{_TORCHRUN} train.py"), "-9", ("unknown", "configuration")
    ),
    "torchrun keeps the words in its own logs": FailingProgram(
        _python(_SILENT_RANK, f"{_TORCHRUN} --log-dir words --redirects 3 train.py"), "bucket 31 of 30", ("program",)
    ),
    "a worker of the data loader is killed": FailingProgram(
        _python(_WORKER), "is killed by signal", ("unknown", "configuration")
    ),
    "a traceback in a box": FailingProgram(_python(_BOX), "row 17 has 5 columns", ()),
    "a message of several lines": FailingProgram(_python(_HYDRA), "Key 'warmup' is not in struct", ("configuration",)),
    "words after the exception": FailingProgram(_python(_LATE), "shard-17.bin", ("node", "file system")),
    "a group of exceptions": FailingProgram(_python(_GROUP), "shard 2 is shorter", ("configuration", "file system")),
    "an exception with a note": FailingProgram(_python(_NOTES), "KeyError: 'lr'", ("program",)),
    "a pool's worker raises": FailingProgram(_python(_POOL), "list index out of range", ("program",)),
    "a pool's worker leaves": FailingProgram(_python(_BROKEN_POOL), "BrokenProcessPool", ("program", "unknown")),
    "a server is busy": FailingProgram(_python(_SERVER.format(code=503)), "HTTP Error 503", ("network",)),
    "a server limits the rate": FailingProgram(_python(_SERVER.format(code=429)), "HTTP Error 429", ("network",)),
    "a server refuses": FailingProgram(_python(_SERVER.format(code=403)), "HTTP Error 403", ("configuration",)),
    "an exception in a logger": FailingProgram(_python(_LOGGED), "ZeroDivisionError: division by zero", ("program",)),
    "an exception in loguru": FailingProgram(_python(_LOGURU), "optimizer state of step 12 is empty", ()),
    "a mapped file became shorter": FailingProgram(_compiled(_BUS), "Bus error", ("unknown", "program")),
    "memory in C++": FailingProgram(
        _compiled("#include <vector>\nint main() { std::vector<char> rows(1UL << 50); return rows[7]; }\n"),
        "std::bad_alloc",
        ("configuration",),
    ),
    "Click misses an option": FailingProgram(_python(_CLICK), "Missing option '--data'", ("configuration",)),
    "an unknown flag of absl": FailingProgram(_python(_ABSL), "learing_rate", ("configuration",)),
    "make has no such rule": FailingProgram("make train\n", "No rule to make target", ("configuration",)),
    "a module of Perl": FailingProgram(
        "perl -e 'use Tokens::Encode; print 1'\n", "Can't locate Tokens/Encode.pm", ("configuration",)
    ),
    "Node throws": FailingProgram(
        "node -e 'const rows = undefined; console.log(rows.length)'\n", "Cannot read properties", ("program",)
    ),
    "a variable that Bash needs": FailingProgram(
        "unset DATA; echo ${DATA:?set it to the folder of the shards}\n", "set it to the folder", ("configuration",)
    ),
    "a file over the limit": FailingProgram(
        'ulimit -f 1; python -c \'open("w.pt", "wb").write(bytes(9999999))\'\n',
        "File too large",
        ("configuration", "file system"),
    ),
    "the limit of CPU time": FailingProgram(
        "ulimit -St 1; python -c 'while True: pass'\nexit $?\n", "CPU time limit exceeded", ("configuration",)
    ),
    "an index that is cut": FailingProgram(
        _python(_TORN), "unpack requires a buffer", ("configuration", "file system")
    ),
    "a compressed file that is cut": FailingProgram(
        _python(_GZIP), "end-of-stream marker", ("configuration", "file system")
    ),
    "an archive that is none": FailingProgram(_python(_ZIP), "BadZipFile", ("configuration", "file system")),
    "warnings of another time": FailingProgram(_python(_RETRIES), "float division by zero", ("program",)),
    "warnings before the exception": FailingProgram(_python(_EARLIER), "cannot be divided by 7", ("configuration",)),
    "git has no repository": FailingProgram(
        "export GIT_CEILING_DIRECTORIES=/; cd /; git rev-parse HEAD\n",
        "not a git repository",
        (),
    ),
    "words before exit 1": FailingProgram(
        _python('import sys\nsys.exit("the tokenizer has 300 words, the model 256")\n'),
        "the tokenizer has 300 words",
        (),
    ),
    "no words": FailingProgram("exit 5\n", "", ()),
}
