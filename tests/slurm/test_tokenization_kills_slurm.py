"""Jobs that tokenize, killed whole or brought to their time limit, on a real Slurm: what comes out is the same."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from relayrun.files import read_json_lines
from relayrun.tokens.shards.shard import Shard
from relayrun.tokens.tokenize.dump_status import read_status
from relayrun.tokens.tokenize.dumps import DumpsFolder
from relayrun.tokens.tokenize.job_config import TokenizationSettings

from .cluster import TestCluster
from .conftest import MakeCluster
from .token_dataset import BASH, DUMPS, PYTHON, Dataset, environment, make_dataset, shards, write_config

pytestmark = pytest.mark.slurm

LAUNCHERS = ("bash", "python")


@pytest.fixture(scope="module")
def cluster(make_cluster: MakeCluster) -> TestCluster:
    """A node for every dump of both launchers."""
    return make_cluster(nodes=2 * DUMPS)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("kills"))


def submit(cluster: TestCluster, launcher: str, settings: TokenizationSettings, *, minutes: int = 5) -> list[str]:
    """Ids of the jobs that this makes, by dump."""
    record = Path(settings.metadata_folder, "jobs.jsonl")
    before = len(list(read_json_lines(record)))
    if launcher == "bash":
        variables = environment(settings) | {"SBATCH_TIMELIMIT": str(minutes)}
        cluster.run([BASH], env=variables, cwd=Path("/"))
    else:
        config = write_config(settings, max_parallel=DUMPS)
        config.write_text(config.read_text().replace("time: 5", f"time: {minutes}"))
        cluster.run([sys.executable, PYTHON, config])
    made = sorted(list(read_json_lines(record))[before:], key=lambda line: line["dump"])
    return [line["slurm_job_id"] for line in made]


def processes(cluster: TestCluster, job: str) -> list[int]:
    """Processes of one job, on all nodes."""
    job_id = cluster.job(job)["JobId"]
    wanted = {f"SLURM_JOB_ID={job_id}", f"SLURM_CONF={cluster.conf}"}
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted <= set((folder / "environ").read_bytes().decode("utf-8", "replace").split("\0")):
                found.append(int(folder.name))
    return found


def assert_whole(settings: TokenizationSettings, dataset: Dataset) -> None:
    """The bytes of an undisturbed run, a complete record of each dump, and nothing else."""
    metadata = DumpsFolder(settings.metadata_folder)
    assert (metadata.pending(), metadata.finished()) == ([], list(range(DUMPS)))
    assert shards(settings) == dataset.expected
    for dump in range(DUMPS):
        output = settings.dump_output(dump)
        record = json.loads((output / "tokenization.json").read_text())
        assert sorted(record["shards"]) == sorted(record["parts"])
        for name, task in record["shards"].items():
            assert Shard.open(output / name).tokens == task["tokens"]
        assert not list(output.glob("*.tmp"))


def wait_for_ends(cluster: TestCluster, jobs: list[str]) -> None:
    for job in jobs:
        assert cluster.wait_job(job, timeout=360) == "COMPLETED", cluster.output(job)


class Blocked:
    """The same work by several launchers at once; every dump has a finished shard, and one of a file without end."""

    def __init__(
        self,
        cluster: TestCluster,
        dataset: Dataset,
        name: str,
        *,
        minutes: int = 5,
        launchers: tuple[str, ...] = LAUNCHERS,
    ) -> None:
        self.cluster, self.dataset, self.minutes = cluster, dataset, minutes
        self.settings = {launcher: dataset.settings(f"{name}-{launcher}") for launcher in launchers}
        self.files: dict[Path, bytes] = {}
        metadata = DumpsFolder(self.settings[launchers[0]].metadata_folder)
        for dump in range(DUMPS):
            file = dataset.folder / "data" / metadata.paths_file(dump).read_text().splitlines()[-1]
            self.files[file] = file.read_bytes()
            file.unlink()
            os.mkfifo(file)
        self.jobs = self.submit()
        self.all = [job for jobs in self.jobs.values() for job in jobs]
        cluster.wait_until(self.stand, timeout=600, what="every dump has an open shard")

    def submit(self) -> dict[str, list[str]]:
        return {
            launcher: submit(self.cluster, launcher, settings, minutes=self.minutes)
            for launcher, settings in self.settings.items()
        }

    def stand(self) -> bool:
        for settings in self.settings.values():
            for dump in range(DUMPS):
                output = settings.dump_output(dump)
                with contextlib.suppress(FileNotFoundError):
                    record = json.loads((output / "tokenization.json").read_text())
                    if len(record["shards"]) == 1 and any(output.glob("*.bin.tmp")):
                        continue
                return False
        return True

    def release(self) -> None:
        """The files have an end again."""
        for file, content in self.files.items():
            file.unlink(missing_ok=True)
            file.write_bytes(content)

    def restarts(self) -> list[str]:
        return [self.cluster.job(job)["Restarts"] for job in self.all]

    def assert_whole(self) -> None:
        for settings in self.settings.values():
            assert_whole(settings, self.dataset)


def tell_to_leave(cluster: TestCluster, job: str) -> None:
    for process in processes(cluster, job):
        with contextlib.suppress(OSError):
            name = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ")
            if b"relayrun.tokens.tokenize run" in name or b"submitit.core._submit" in name:
                os.kill(process, signal.SIGUSR2)


@pytest.mark.long
def test_a_job_that_is_told_to_leave_queues_itself_alone_again_and_goes_on(
    cluster: TestCluster, dataset: Dataset
) -> None:
    both = Blocked(cluster, dataset, "told")
    last = both.jobs["python"][-1]
    assert cluster.job(last)["JobId"] == last.partition("_")[0]  # its plain id is that of the whole array
    tell_to_leave(cluster, last)
    cluster.wait_until(lambda: cluster.job(last)["Restarts"] == "1", what="it is queued again")
    assert sorted(both.restarts()) == ["0"] * (2 * DUMPS - 1) + ["1"]
    for job in both.all:
        if job != last:
            tell_to_leave(cluster, job)
    cluster.wait_until(lambda: both.restarts() == ["1"] * 2 * DUMPS, what="all are queued again")
    both.release()
    wait_for_ends(cluster, both.all)
    assert both.restarts() == ["1"] * 2 * DUMPS
    both.assert_whole()


@pytest.mark.long
@pytest.mark.parametrize(("launcher", "minutes"), [("bash", 4), ("python", 1)])
def test_a_job_leaves_before_its_time_limit_and_goes_on(
    cluster: TestCluster, dataset: Dataset, launcher: str, minutes: int
) -> None:
    """Slurm signals the Bash launcher's jobs 120 to 180 s before the limit; those of the other have a deadline."""
    work = Blocked(cluster, dataset, "limit", minutes=minutes, launchers=(launcher,))
    cluster.wait_until(lambda: work.restarts() == ["1"] * DUMPS, timeout=540, what="all are queued again")
    work.release()
    wait_for_ends(cluster, work.all)
    assert work.restarts() == ["1"] * DUMPS
    work.assert_whole()


@pytest.mark.long
def test_a_job_that_is_killed_whole_leaves_no_process_and_submitting_again_completes_it(
    cluster: TestCluster, dataset: Dataset
) -> None:
    both = Blocked(cluster, dataset, "killed")
    for settings in both.settings.values():
        for dump in read_status(settings.metadata_folder):
            assert (dump.state, len(dump.finished), len(dump.running)) == ("running", 1, 1)
            assert dump.nodes in {f"n{number}" for number in range(2 * DUMPS)}
    cluster.run(["scancel", "--signal=KILL", *both.all])
    gone = lambda: not any(processes(cluster, job) for job in both.all)  # noqa: E731
    cluster.wait_until(gone, timeout=120, what="no process of the jobs is left")
    cluster.wait_until(lambda: not cluster.queue(), what="the queue is empty")
    both.release()
    for jobs in both.submit().values():
        wait_for_ends(cluster, jobs)
    both.assert_whole()


@pytest.mark.long
def test_a_job_that_slurm_kills_and_queues_again_goes_on(cluster: TestCluster, dataset: Dataset) -> None:
    """As after the loss of a node, or by an administrator."""
    both = Blocked(cluster, dataset, "requeued")
    for job in both.all:
        cluster.run(["scontrol", "update", f"JobId={job}", "Requeue=1"])  # tokenize.sh asks for --no-requeue
        cluster.run(["scontrol", "requeue", job])
    both.release()
    wait_for_ends(cluster, both.all)
    assert both.restarts() == ["1"] * 2 * DUMPS
    both.assert_whole()


@pytest.fixture(scope="module")
def seconds(cluster: TestCluster, dataset: Dataset) -> float:
    """From the submission to the end of all jobs, undisturbed."""
    settings = dataset.settings("measured")
    started = time.monotonic()
    wait_for_ends(cluster, submit(cluster, "python", settings))
    assert_whole(settings, dataset)
    return time.monotonic() - started


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
def test_jobs_killed_at_any_moment_give_the_same_files(
    cluster: TestCluster, dataset: Dataset, seconds: float, seed: int
) -> None:
    generator = random.Random(seed)
    launcher, moment = generator.choice(LAUNCHERS), generator.uniform(0, seconds)
    print(f"seed {seed}: SIGKILL to all jobs of the {launcher} launcher after {moment:.2f} s of {seconds:.2f}")
    settings = dataset.settings(f"seed-{seed}")
    started = time.monotonic()
    jobs = submit(cluster, launcher, settings)
    time.sleep(max(0.0, moment - (time.monotonic() - started)))
    cluster.run(["scancel", "--signal=KILL", *jobs], check=False)  # some may have ended
    cluster.run(["scancel", *jobs], check=False)  # those that are still pending
    cluster.wait_until(lambda: not cluster.queue(), what="the queue is empty")
    for job in jobs:  # one may finish its dump after Slurm has ended it
        cluster.wait_until(lambda job=job: not processes(cluster, job), what=f"job {job} has no process")
    if DumpsFolder(settings.metadata_folder).pending():
        wait_for_ends(cluster, submit(cluster, launcher, settings))
    assert_whole(settings, dataset)
