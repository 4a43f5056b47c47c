"""Every command and program of docs/how-to/streams.md runs."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relayrun.config.compose import yaml_file
from relayrun.config.sections.data import DataSection
from tests.readme import ROOT, path_with_relayrun
from tests.workspace import Workspace, ends

PAGE = (ROOT / "docs/how-to/streams.md").read_text(encoding="utf-8")


def block(kind: str) -> str:
    (text,) = re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.M | re.S)
    return str(text)


def test_every_block_has_a_test() -> None:
    assert PAGE.count("```") == 2 * len([*map(block, ("yaml", "bash run", "python", "bash"))])


def test_the_mixture_of_the_page_is_one() -> None:
    data = DataSection.model_validate(yaml_file.parse_yaml(block("yaml"), source="page").values["data"])
    assert {name: source.source for name, source in data.mixture.items()} == {
        "web": "parquet",
        "code": "jsonl",
        "math": "tokens",
    }


def words(generator: np.random.Generator, count: int) -> list[str]:
    """Documents of the workspace's words."""
    return [
        " ".join(f"w{word}" for word in generator.integers(1, 90, size)) for size in generator.integers(4, 40, count)
    ]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder in which the data of the page lie."""
    Workspace.make(tmp_path)
    generator = np.random.default_rng(3)
    shutil.move(tmp_path / "data", tmp_path / "math")
    (tmp_path / "data" / "tokens").mkdir(parents=True)
    shutil.move(tmp_path / "math", tmp_path / "data" / "tokens" / "math")
    for name in ("web", "code", "genomes"):
        (tmp_path / "data" / name).mkdir()
    for number in range(4):
        texts = words(generator, 300)
        table = pa.table({"text": texts, "content": texts})
        pq.write_table(table, tmp_path / "data" / "web" / f"{number}.parquet", row_group_size=50)
        lines = "".join(json.dumps({"text": text}) + "\n" for text in words(generator, 200))
        (tmp_path / "data" / "code" / f"{number}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    genomes = ["".join(generator.choice([*"ACGT"], size)) for size in (20_000, 100, 9000)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in genomes)
    (tmp_path / "data" / "genomes" / "a.jsonl").write_text(lines)
    return tmp_path


def shell(project: Path, script: str) -> str:
    environment = os.environ | {"PATH": path_with_relayrun(), "HOME": str(project), "PYTHONPATH": str(ROOT)}
    command = ["bash", "-euo", "pipefail", "-c", script]
    done = subprocess.run(
        command, cwd=project, env=environment, capture_output=True, text=True, check=False, timeout=1000
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pieces(folder: Path) -> list[str]:
    files: Sequence[Path] = sorted(folder.glob("*.parquet"))
    return [text for file in files for text in pq.read_table(file)["text"].to_pylist()]


@pytest.mark.slow
def test_shuffles_and_tables(project: Path) -> None:
    shell(project, block("bash"))
    raw = pieces(project / "data" / "web")
    shuffled = pieces(project / "data" / "web-shuffled")
    assert shuffled != raw
    assert sorted(shuffled) == sorted(raw)
    windows = pieces(project / "data" / "genome-windows")
    assert sorted(map(len, windows)) == sorted([8190, 8190, 20_000 - 2 * 7990, 100, 8190, 9000 - 7990])
    program = (
        block("python").replace('"/data', f'"{project}/data').replace("table.to_pandas()", "rows += table.to_pylist()")
    )
    ends_with = "\nassert len(rows) == 1200 and {*rows[0]} == {'text'}\nprint('read')\n"
    (project / "look.py").write_text("rows = []\n" + program + ends_with)
    assert shell(project, "python look.py") == "read\n"


@pytest.mark.long
def test_a_run_over_the_mixture_of_the_page_is_checked_trained_and_looked_at(project: Path) -> None:
    data = yaml_file.parse_yaml(block("yaml").replace("/data", f"{project}/data"), source="page").values["data"]
    workspace = Workspace(project)
    config = workspace.config(
        "run",
        data=data | {"tokenizer": str(project / "tokenizer.json"), "datasets": []},
        training={"steps": 130, "global_batch_size": 8, "loss_mean": "token"},
        checkpoint={"interval": 65},
    )
    checked = shell(project, f"relayrun check {config}")
    assert "data set 'web': 4 parquet files with 137,823 bytes" in checked
    assert "data set 'code': 4 jsonl files" in checked
    shell(project, f"relayrun submit {config}")
    assert [end.cause for end in ends(workspace.run("run"))] == ["done"]
    said = shell(project, block("bash run").replace("RUN", "run"))
    for name in data["mixture"]:
        assert name in said
    assert ".parquet, row group" in said
    assert re.findall(r"^sample (\d+): (?:web|code|math), epoch", said, re.M) == [
        str(number) for number in range(1000, 1010)
    ]
