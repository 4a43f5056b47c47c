#!/usr/bin/env python3
"""The work of curation.py as jobs of a Slurm of this machine: datatrove's SlurmPipelineExecutor beside ours.

    python benchmarks/curation_slurm.py                           40 MB of text
    python benchmarks/curation_slurm.py --megabytes 8 --faults   what is done again after kills

Two nodes with a processor each; the same files, tasks and number of jobs: FineWeb's filters with tokenization, four
tasks of a job each; MinHash, two jobs a stage. Compared is the CPU time of all jobs. That of the commands that submit
them, and the seconds from the submission to the end, are shown: Slurm starts jobs when it likes.

With `--faults` each loses a node (all its processes, as by a power loss) and has a job killed (SIGKILL): one of the
last two with filters, or one of MinHash's signatures; and one file of a finished MinHash is cut in half. What a side
does without a command is noted, then the same command is given again.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import curation
from _results import spread, write
from tokenization import EOS, digests

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the tests' cluster

from tests.slurm import power_loss
from tests.slurm.cluster import TestCluster

RELAYRUN = [sys.executable, "-m", "relayrun", "dumps"]
WORKERS = 2
"""Jobs at a time."""
NEVER = "DependencyNeverSatisfied"
SETUP = """
# the script once more in a shell below this one, whose CPU time is written down
if [[ -z "${{TIMED:-}}" ]]; then
  TIMED=1 bash "$0"
  code=$?
  trap - ERR EXIT
  times >{folder}/times/$SLURM_JOB_ID-$(date +%N)
  exit $code
fi
"""

THEIRS = """
import json, sys
import _curation_steps as steps
from datatrove.executor import SlurmPipelineExecutor
from datatrove.pipeline import dedup
from datatrove.pipeline.formatters import PIIFormatter
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens.megatron_tokenizer import MegatronDocumentTokenizer
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils.hashing import HashConfig
if __name__ == "__main__":
    data, out, tokenizer, eos, tasks, workers, setup, given, *names = sys.argv[1:]

    def jobs(name, tasks, pipeline, depends=None, each=1):
        return SlurmPipelineExecutor(
            pipeline, tasks=tasks, time="01:00:00", partition="debug", workers=int(workers), job_name=name,
            env_command=setup, logging_dir=f"{out}-logs/{name}", tasks_per_job=each, depends=depends, with_srun=False,
        )

    if names:
        filters = [getattr(steps, name)(exclusion_writer=JsonlWriter(f"{out}-removed/{name}")) for name in names]
        write = MegatronDocumentTokenizer(out, tokenizer_name_or_path=tokenizer, eos_token=eos)
        jobs("filters", int(tasks), [JsonlReader(data), *filters, PIIFormatter(), write]).run()
    else:
        config = dedup.MinhashConfig(**json.loads(given), hash_config=HashConfig(hash_fc="sha1"))
        read = JsonlReader(data, add_file_path=False)
        writer = JsonlWriter(f"{out}-removed")
        signatures, buckets, clusters = (f"{out}-{name}" for name in ("signatures", "buckets", "clusters"))
        before = None
        for name, number, pipeline in (
            ("signatures", int(tasks), [read, dedup.MinhashDedupSignature(signatures, config, steps.WORDS)]),
            ("buckets", config.num_buckets, [dedup.MinhashDedupBuckets(signatures, buckets, config=config)]),
            ("clusters", 1, [dedup.MinhashDedupCluster(buckets, clusters, config)]),
            ("kept", int(tasks), [read, dedup.MinhashDedupFilter(clusters, writer), JsonlWriter(out)]),
        ):
            before = jobs(name, number, pipeline, before, -(-number // int(workers)))
        before.run()
"""


class Side:
    """One of the two, with a folder of its own for a work."""

    def __init__(self, cluster: TestCluster, place: Path, name: str, work: str) -> None:
        self.cluster, self.place, self.name, self.work = cluster, place, name, work
        self.folder = place / "slurm" / f"{name}-{work}"
        shutil.rmtree(self.folder, ignore_errors=True)
        (self.folder / "times").mkdir(parents=True)
        self.commands = 0.0
        setup = self.folder / "setup.sh"
        setup.write_text(SETUP.format(folder=self.folder))
        self.setup = f". {setup}"
        self.first = True

    def submit(self) -> None:
        """Give the command, the first time or again."""
        commands = self._our_commands() if self.name == "relayrun" else [self._their_command()]
        for command in commands if self.first else commands[-1:]:
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            self.cluster.run(command, env={"PYTHONPATH": f"{curation.HERE}:{self.cluster.env.get('PYTHONPATH', '')}"})
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            self.commands += after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        self.first = False

    def _their_command(self) -> list[str]:
        program, out = self.folder / "program.py", self.folder / "out"
        program.write_text(THEIRS)
        given = [self.place / "text", out, self.place.parent / "tokenizer.json", EOS, curation.FILES, WORKERS]
        names = curation.FILTERS if self.work.startswith("filters") else ()
        return [sys.executable, *map(str, [program, *given, self.setup, json.dumps(curation.MINHASH), *names])]

    def _our_commands(self) -> list[list[str]]:
        filters = self.work.startswith("filters")
        values = curation.settings(self.folder, 1) | {"executor": "slurm", "max_parallel": WORKERS}
        values |= {"job": {"time": 60, "partition": "debug", "exclusive": False, "setup": [self.setup]}}
        if filters:
            tokenizer = {"tokenizer": str(self.place.parent / "tokenizer.json"), "eos_token": EOS, "tasks": 1}
            steps = [*(f"_curation_steps.{name}" for name in curation.FILTERS), "pii"]
            values |= tokenizer | {"pipeline": steps, "output_folder": f"{self.folder}/out"}
        else:
            words = {"language": "_curation_steps.Words", "minhash": curation.MINHASH, "exact": False}
            values["dedup"] = {"output_folder": f"{self.folder}/out", **words}
        config = self.folder / "config.yaml"
        config.write_text(json.dumps(values))
        places = ["--dataset-folder", self.place / "text", "--preprocessing-metadata-folder", self.folder / "meta"]
        prepare = [*RELAYRUN, "prepare", *map(str, places), "--n-dumps", str(curation.FILES if filters else 1)]
        return [prepare, [*RELAYRUN, "submit" if filters else "dedup", str(config)]]

    def wait(self) -> list[str]:
        """Wait until no job is left that can run; return those that stay in the queue, after their removal."""

        stuck: list[str] = []

        def is_over() -> bool:
            words = ["squeue", "--noheader", "--array", "--format=%i %r"]
            lines = [line.split() for line in self.cluster.run(words).stdout.splitlines()]
            stuck[:] = [job for job, reason in lines if "Dependency" in reason]  # also on one that never starts
            return not lines or (len(stuck) == len(lines) and any(NEVER in reason for _, reason in lines))

        self.cluster.wait_until(is_over, interval=0.3)
        if stuck:
            self.cluster.run(["scancel", *stuck])
            self.cluster.wait_until(lambda: not self.cluster.queue())
        return stuck

    def cpu_seconds(self) -> float:
        """CPU time of the jobs that came to their end."""
        return sum(map(job_seconds, (self.folder / "times").iterdir()))

    def done(self, stage: str) -> int:
        """Return the number of finished tasks of a stage."""
        if self.name == "datatrove":
            return len(list(self.folder.glob(f"out-logs/{stage}/completions/*")))
        finished = "meta/completed-dumps/*.txt" if stage == "filters" else f"out/_dedup/records/{stage}-*"
        return len(list(self.folder.glob(finished)))

    def result(self) -> Any:
        """Return what is compared: hashes of the shards, or the texts that stay."""
        if not self.work.startswith("filters"):
            return curation.texts(self.folder / "out")
        folders = [self.folder / "out", *self.folder.glob("out/t/d/dump-*")]
        return sorted(digest for folder in folders for digest in digests(folder).values())


def job_seconds(file: Path) -> float:
    """Return the CPU seconds of a shell and its children, as Bash's `times` prints them."""
    parts = [word.rstrip("s").split("m") for word in file.read_text().split()]
    return sum(60 * float(minutes) + float(seconds) for minutes, seconds in parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=40, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--faults", action="store_true", help="write curation_slurm_faults.json")
    options = parser.parse_args()
    works = ("filters", "minhash")
    place = curation.FOLDER / f"{options.megabytes}-mb"
    curation.make_text(place / "text", options.megabytes)
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # short: sockets lie below it
    cluster = TestCluster(folder / "c", nodes=2, cpus=1, gpus=1, node_timeout=10)
    try:
        cluster.up()
        rounds = [{work: both(cluster, place, work) for work in works} for _ in range(options.rounds)]
        after = faults(cluster, place) if options.faults else {}
    finally:
        cluster.down()
        shutil.rmtree(folder)
    figures: dict[str, Any] = {
        "text_mb": options.megabytes,
        "jobs_at_a_time": WORKERS,
        "same_bytes_as_datatrove": True,
        "load_average": os.getloadavg()[0],
        "slurm": subprocess.check_output(["slurmctld", "-V"], text=True).strip(),
        **{f"{work}_over_datatrove": spread([ratio(each[work]) for each in rounds]) for work in works},
        "commands_cpu_s": {work: {s: rounds[-1][work][s]["commands_cpu_s"] for s in SIDES} for work in rounds[-1]},
        "seconds_to_the_end": {work: {s: rounds[-1][work][s]["wall_s"] for s in SIDES} for work in rounds[-1]},
        "rounds": rounds,
    }
    if options.faults:
        figures = {"text_mb": options.megabytes, "jobs_at_a_time": WORKERS, **after}
    write("curation_slurm_faults" if options.faults else "curation_slurm", figures)
    print(json.dumps(figures, indent=1))


SIDES = ("datatrove", "relayrun")
Figures = dict[str, Any]


def ratio(both: dict[str, Figures]) -> float:
    return float(both["datatrove"]["cpu_s"] / both["relayrun"]["cpu_s"])


def both(cluster: TestCluster, place: Path, work: str) -> dict[str, Figures]:
    """Do a work on both sides; raises AssertionError if their bytes differ."""
    found, results = {}, []
    for name in SIDES:
        side, began = Side(cluster, place, name, work), time.monotonic()
        side.submit()
        assert not side.wait()
        jobs = len(list((side.folder / "times").iterdir()))
        found[name] = {"cpu_s": side.cpu_seconds(), "commands_cpu_s": side.commands, "jobs": jobs}
        found[name]["wall_s"] = time.monotonic() - began
        results.append(side.result())
        print(work, name, found[name], flush=True)
    assert len(results[0]) >= curation.FILES, "there is nothing to compare"
    assert results[0] == results[1], "ours differs from datatrove"
    return found


def faults(cluster: TestCluster, place: Path) -> dict[str, dict[str, Figures]]:
    """Return what each side does after each fault."""
    return {
        "node_lost": {side: lose(cluster, place, side, "filters", lose_node) for side in SIDES},
        "node_lost_minhash": {side: lose(cluster, place, side, "minhash", lose_node) for side in SIDES},
        "task_killed": {side: lose(cluster, place, side, "filters", kill_task) for side in SIDES},
        "task_killed_minhash": {side: lose(cluster, place, side, "minhash", kill_task) for side in SIDES},
        "file_cut": {side: cut(cluster, place, side) for side in SIDES},
    }


def lose_node(cluster: TestCluster, job: str) -> Callable[[], None]:
    """Lose the node of a job; return what brings it back."""
    node = cluster.job(job)["NodeList"]
    power_loss.lose(cluster, node)
    cluster.wait_until(lambda: "DOWN" in cluster.node_state(node), what="the node is down")
    return lambda: cluster.start_node(node)


def kill_task(cluster: TestCluster, job: str) -> Callable[[], None]:
    power_loss.kill_job(cluster, job)
    return lambda: None


Fault = Callable[[TestCluster, str], Callable[[], None]]


def lose(cluster: TestCluster, place: Path, name: str, work: str, fault: Fault) -> Figures:
    """Do a work with this fault while the third task of four is at work, then give the command again."""
    side = Side(cluster, place, name, f"{work}-{fault.__name__}")
    stage = "filters" if work == "filters" else "signatures"
    side.submit()
    wanted = ("", 2) if work == "filters" else (stage, 0)
    job = cluster.wait_until(lambda: running(cluster, *wanted), what="a job runs") or ""
    time.sleep(3)
    mend = fault(cluster, job)
    done = side.done(stage)
    mend()
    stuck = side.wait()
    complete = bool(side.result()) and side.result() == Side.result(reference(cluster, place, name, work))
    alone, before = side.done(stage), side.cpu_seconds()
    again = 0
    while not complete and again < 3:
        again += 1
        side.submit()
        stuck += side.wait()
        complete = side.result() == Side.result(reference(cluster, place, name, work))
    figures = {
        "tasks_done_before": done,
        "tasks_done_without_a_command": alone,
        "commands_again": again,
        "jobs_that_never_start": len(stuck),
        "same_bytes": complete,
        "cpu_s_again": side.cpu_seconds() - before,
    }
    print(side.folder.name, figures, flush=True)
    return figures


def running(cluster: TestCluster, name: str, first: int) -> str | None:
    """Return a job that runs, of an array with these words in its name, from this element on."""
    jobs = [job.id for job in cluster.queue() if job.state == "RUNNING" and name in job.name]
    return next((job for job in jobs if int(job.partition("_")[2] or -1) >= first), None)


def reference(cluster: TestCluster, place: Path, name: str, work: str) -> Side:
    """Return a side whose folder has the undisturbed work."""
    found = object.__new__(Side)
    found.cluster, found.place, found.name, found.work = cluster, place, name, work
    found.folder = place / "slurm" / f"{name}-{work}"
    return found


def cut(cluster: TestCluster, place: Path, name: str) -> Figures:
    """Cut a file of the finished MinHash in half and give the command again: is it made again?"""
    expected = Side.result(reference(cluster, place, name, "minhash"))
    side = Side(cluster, place, name, "minhash-cut")
    side.submit()
    side.wait()
    file = sorted((side.folder / "out").glob("*.jsonl.gz"))[1]
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    side.submit()
    side.wait()
    figures = {"made_again": file.read_bytes() == whole and side.result() == expected}
    print(side.folder.name, figures, flush=True)
    return figures


if __name__ == "__main__":
    main()
