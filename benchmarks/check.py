"""What `relayrun check` costs: CPU and wall seconds of the command, of a small run's data and of 1,000 shards.

The shards have records of tokenization beside them, as relayrun's own; the run is of the demo's model.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for the tests' workspace

import _results  # noqa: E402
import numpy as np  # noqa: E402

from relayrun.config.compose import yaml_file  # noqa: E402
from relayrun.files import write_json  # noqa: E402
from relayrun.tokens.shards.shard import FOLDER_RECORD, ShardWriter  # noqa: E402
from tests.workspace import VOCABULARY, Workspace  # noqa: E402

SHARDS = {"demo": 4, "large": 1000}
DOCUMENTS = 1000
"""Documents of a shard."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", type=int, nargs="?", default=5, help="default: %(default)s")
    rounds = parser.parse_args().rounds
    figures: dict[str, object] = {"unit": "seconds", "load": os.getloadavg()[0], "documents_a_shard": DOCUMENTS}
    with tempfile.TemporaryDirectory(prefix="check-") as folder:
        python = _results.installed_python(Path(folder) / "environment")
        for name, shards in SHARDS.items():
            path = config(Path(folder) / name, shards)
            checked(python, path, shards)  # compiles
            found = [checked(python, path, shards) for _ in range(rounds)]
            figures[name] = {
                "shards": shards,
                "cpu": _results.spread([cpu for cpu, _ in found]),
                "wall": _results.spread([wall for _, wall in found]),
            }
            print(name, figures[name], flush=True)
    print(_results.write("check", figures))


def config(folder: Path, shards: int) -> Path:
    """Make the data and the config of a run whose jobs run on this machine."""
    workspace = Workspace.make(folder)
    generator, data = np.random.default_rng(0), folder / "many"
    for number in range(shards):
        lengths = generator.integers(20, 400, DOCUMENTS)
        writer = ShardWriter(data / f"{number:05}_tokens", np.uint16)
        writer.add(generator.integers(1, VOCABULARY, lengths.sum()), lengths)
        writer.finish()
    known = {"settings": {"tokenizer": "f" * 64, "eos": 0}}
    write_json(data / FOLDER_RECORD, known | {"shards": {f"{n:05}_tokens": {"largest_id": 299} for n in range(shards)}})
    model = yaml_file.read_yaml(ROOT / "configs" / "models" / "llama-3m.yaml").values["model"]
    own = {"datasets": [str(data)], "allow_other_tokenizer": True}
    return workspace.config("run", model=model, data=own, cluster={"python": None})


def checked(python: Path, path: Path, shards: int) -> tuple[float, float]:
    """CPU and wall seconds of one check, with the start of Python and what it starts."""
    command = [str(python), "-m", "relayrun.cli", "check", str(path), "--json"]
    env = _results.as_installed()
    before, start = os.times(), time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=env)
    wall, after = time.monotonic() - start, os.times()
    report = json.loads(done.stdout)
    assert not report["refused"], report
    assert report["data"][0]["shards"] == shards, report["data"]
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return cpu, wall


if __name__ == "__main__":
    main()
