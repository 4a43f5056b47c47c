"""Dumps as Slurm jobs: both launchers give the shards that the local way gives."""

from __future__ import annotations

import csv
import os
import sys
from pathlib import Path

import pyarrow.parquet as parquet
import pytest

from relayrun.config.compose import yaml_file
from relayrun.errors import RelayrunError
from relayrun.tokens.tokenize.dumps import DumpsFolder, prepare_dumps
from relayrun.tokens.tokenize.job_config import TokenizationSettings
from tests import stand_ins

from .cluster import TestCluster
from .token_dataset import BASH, DUMPS, PYTHON, Dataset, environment, make_dataset, shards, write_config

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("a ' b"))


def assert_all_done(settings: TokenizationSettings, expected: dict[str, bytes], cluster: TestCluster) -> list[str]:
    """Shards, links, CSV and logs; returns the job ids of the CSV."""
    metadata = DumpsFolder(settings.metadata_folder)
    assert (metadata.pending(), metadata.finished()) == ([], list(range(DUMPS)))
    assert shards(settings) == expected
    assert os.readlink(metadata.tokenized_link) == str(settings.dataset_output)
    with settings.csv.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == DUMPS
    assert {row["node"] for row in rows} <= {"n0", "n1", "n2", "n3"}
    logs = sorted(path.name for path in settings.job_output_files.glob("R-*"))
    assert len(logs) == 2 * DUMPS
    assert all(name.startswith(f"R-{settings.name}-") for name in logs)
    assert all("tokens" in file.read_text() for file in settings.job_output_files.glob("R-*.out"))
    assert len(list(Path(settings.logs, "datatrove/T", settings.dataset_name).glob("dump-*/tokenizer.json"))) == DUMPS
    return [row["slurm_job_id"] for row in rows]


def test_the_bash_launcher_gives_the_shards_of_the_local_way(cluster: TestCluster, dataset: Dataset) -> None:
    settings = dataset.settings("bash")
    done = cluster.run([BASH], env=environment(settings), cwd=Path("/"))
    submitted = [line.rpartition(" ")[2] for line in done.stdout.splitlines() if line.startswith("dump ")]
    assert len(submitted) == DUMPS
    for job in submitted:
        assert cluster.wait_job(job, timeout=360) == "COMPLETED"
        assert cluster.job(job)["NumNodes"] == "1"
    assert sorted(assert_all_done(settings, dataset.expected, cluster)) == sorted(submitted)


def test_the_python_launcher_gives_the_shards_of_the_local_way(cluster: TestCluster, dataset: Dataset) -> None:
    settings = dataset.settings("python")
    config = write_config(settings, max_parallel=2)
    cluster.run([sys.executable, PYTHON, config, "--wait"], timeout=540, cwd=Path("/"))
    ids = assert_all_done(settings, dataset.expected, cluster)
    (array,) = {job.partition("_")[0] for job in ids}
    assert sorted(ids) == [f"{array}_{element}" for element in range(DUMPS)]


def test_pending_and_running_jobs_keep_the_dumps_from_being_prepared_anew(
    cluster: TestCluster, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = dataset.settings("held")
    config = write_config(settings, max_parallel=1)
    blocker = cluster.sbatch(["--nodes=4", "--exclusive", "--wrap=sleep 300"])
    cluster.wait_running(blocker)
    cluster.run([sys.executable, PYTHON, config])
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
    with pytest.raises(RelayrunError, match="pending or running as Slurm jobs"):
        prepare_dumps(dataset.folder / "data", settings.metadata_folder)
    again = cluster.run([BASH], env=environment(settings), check=False)
    assert again.returncode == 1
    assert "pending or running as Slurm jobs" in again.stderr
    array = cluster.queue()[-1].id.partition("_")[0]
    cluster.run(["scancel", blocker, array])
    cluster.wait_until(lambda: not cluster.queue(), what="the queue is empty")
    assert len(prepare_dumps(dataset.folder / "data", settings.metadata_folder, n_dumps=DUMPS)) == DUMPS


def break_end(file: Path) -> None:
    """Make the last rows of a parquet file unreadable, and only them."""
    table = parquet.read_table(file)
    parquet.write_table(table, file, row_group_size=-(-len(table) // 2))
    found = parquet.ParquetFile(file).metadata
    last = found.row_group(found.num_row_groups - 1).column(0)
    with file.open("r+b") as opened:
        opened.seek(last.dictionary_page_offset or last.data_page_offset)
        opened.write(bytes(40))


@pytest.mark.long
def test_a_failed_dump_is_one_message_and_submitting_again_completes_it(cluster: TestCluster, dataset: Dataset) -> None:
    settings = dataset.settings("failed")
    files = sorted((dataset.folder / "data").rglob("*.parquet"))
    whole = {file: file.read_bytes() for file in files}
    for file in files:
        break_end(file)  # a submit looks at the beginning
    try:
        config = write_config(settings, max_parallel=4)
        failed = cluster.run([sys.executable, PYTHON, config, "--wait"], timeout=540, check=False)
    finally:
        for file, content in whole.items():
            file.write_bytes(content)
    assert failed.returncode == 1
    assert "3 of 3 dumps failed (dump 0, 1, 2). Dump 0: " in failed.stderr
    assert ".parquet: " in failed.stderr
    assert "Traceback" not in failed.stderr
    assert shards(settings) == {}
    for file in settings.job_output_files.glob("R-*"):
        file.unlink()
    cluster.run([sys.executable, PYTHON, write_config(settings, max_parallel=4), "--wait"], timeout=540)
    assert_all_done(settings, dataset.expected, cluster)


def test_what_slurm_refuses_is_one_message(cluster: TestCluster, dataset: Dataset) -> None:
    settings = dataset.settings("refused")
    config = write_config(settings, max_parallel=4)
    config.write_text(config.read_text().replace("partition: debug", "partition: nowhere"))
    refused = cluster.run([sys.executable, PYTHON, config], check=False)
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: sbatch refused: ")
    assert "invalid partition" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.long
def test_more_dumps_than_an_array_takes(cluster: TestCluster, dataset: Dataset) -> None:
    by_bash, by_python = dataset.settings("many-by-bash"), dataset.settings("many-by-python")
    cluster.stop_ctld()
    former = cluster.conf.read_text()
    cluster.conf.write_text(former + "MaxArraySize=2\n")
    cluster.start_ctld()
    try:
        cluster.run([BASH], env=environment(by_bash), cwd=Path("/"))
        cluster.run([sys.executable, PYTHON, write_config(by_python, max_parallel=1), "--wait"], timeout=540)
        cluster.wait_until(lambda: not cluster.queue(), timeout=600, what="the queue is empty")
    finally:
        cluster.stop_ctld()
        cluster.conf.write_text(former)
        cluster.start_ctld()
    assert len(set(assert_all_done(by_bash, dataset.expected, cluster))) == DUMPS
    ids = assert_all_done(by_python, dataset.expected, cluster)
    first = min(ids).partition("_")[0]
    assert sorted(ids)[:2] == [f"{first}_0", f"{first}_1"]
    assert "_" not in sorted(ids)[2]  # an array of one is a plain job
    assert cluster.job(sorted(ids)[2])["StartTime"] >= cluster.job(f"{first}_1")["EndTime"]  # max_parallel holds


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["yaml", "bash"])
def test_dumps_in_a_container_have_the_same_bytes(
    cluster: TestCluster, dataset: Dataset, tmp_path: Path, launcher: str
) -> None:
    """A stand-in for apptainer; everything else is real."""
    path = f"{stand_ins.write(tmp_path / 'bin')}:{cluster.env['PATH']}"
    (tmp_path / "bin/srun").unlink()  # Slurm's own
    (tmp_path / "image.sif").touch()
    seen = tmp_path / "seen"
    site = {
        "name": "here",
        "scheduler": "slurm",
        "job": {"partition": "debug", "setup": ["export FROM_SETUP=yes"]},
        "container": {"runtime": "apptainer", "image": str(tmp_path / "image.sif")},
        "command_prefix": ["bash", "-c", f'echo "$IN_CONTAINER $FROM_SETUP" >>{seen}; exec "$@"', "wrapper"],
        "python": sys.executable,
    }
    (tmp_path / "here.yaml").write_text(yaml_file.dump_yaml(site))
    settings = dataset.settings(f"container-{launcher}")
    given = environment(settings) | {"PATH": path}
    if launcher == "yaml":
        config = write_config(settings, max_parallel=4)
        config.write_text(f"{config.read_text()}cluster: {tmp_path}/here.yaml\n".replace(", partition: debug", ""))
        cluster.run([sys.executable, PYTHON, config, "--wait"], timeout=540, env={"PATH": path})
    else:
        done = cluster.run([BASH], env=given | {"CLUSTER": f"{tmp_path}/here.yaml"}, cwd=Path("/"))
        for line in done.stdout.splitlines():
            if line.startswith("dump "):
                assert cluster.wait_job(line.rpartition(" ")[2], timeout=360) == "COMPLETED"
    assert_all_done(settings, dataset.expected, cluster)
    assert seen.read_text().splitlines() == [f"{tmp_path}/image.sif yes"] * DUMPS
