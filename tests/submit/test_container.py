"""Containers as settings: the command lines, proven by stand-in runtimes that refuse what the real ones refuse."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import submitit
from pydantic import ValidationError

from relayrun.config.compose import resolve
from relayrun.config.compose.schema import RunConfig
from relayrun.config.sections.job_script import ContainerSection
from relayrun.control.chain import job_script
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.slurm import Slurm
from relayrun.errors import ConfigError, SchedulerError
from relayrun.submit import policies, run_plan
from relayrun.tokens.shards.shard import ShardWriter
from relayrun.tokens.tokenize import dump_jobs
from relayrun.tokens.tokenize.job_config import TokenizationConfig, load_tokenization_config
from tests import stand_ins

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """#!/bin/bash
echo "container=${IN_CONTAINER-none} binds=${IN_BINDS-} prefix=${PREFIX-} setup=${FROM_SETUP-} $PWD"
echo "arguments $*"
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an image, an environment definition file, data, a Python that tells, and the stand-ins in PATH."""
    (tmp_path / "image.sif").touch()
    (tmp_path / "edf.toml").touch()
    (tmp_path / "data").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "python").write_text(PROGRAM)
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setenv("PATH", f"{stand_ins.write(tmp_path / 'bin')}:{os.environ['PATH']}")
    return tmp_path


def container(place: Path, runtime: str) -> dict[str, Any]:
    if runtime == "edf":
        return {"runtime": "edf", "image": str(place / "edf.toml")}
    return {
        "runtime": runtime,
        "image": str(place / "image.sif"),
        "mounts": [f"{place}/data:/mnt:ro"],
        "workdir": str(place),
    }


def config(place: Path, runtime: str) -> RunConfig:
    cluster = {
        "name": "here",
        "scheduler": "slurm",
        "container": container(place, runtime),
        "command_prefix": ["env", "PREFIX=numactl"],
        "python": str(place / "python"),
    }
    overrides = [f"run_dir={place}/run", "job.setup=[export FROM_SETUP=yes]", "evaluation.interval=100"]
    settings = resolve.read_settings(ROOT / "configs/runs/demo-slurm.yaml", overrides)
    settings.values["cluster"] = cluster
    return resolve.validate_settings(settings)


@pytest.mark.parametrize("runtime", ["pyxis", "edf", "apptainer"])
@pytest.mark.parametrize("job", ["ranks", "evaluation"])
def test_a_program_runs_in_the_container_behind_the_prefix(place: Path, runtime: str, job: str) -> None:
    given, run = config(place, runtime), Run(place / "run")
    plan = run_plan.make_plan(given, run, ROOT, revision=1)
    script = place / "job.sh"
    if job == "ranks":
        starter = Slurm().single_task_command(plan, cpus_per_task="1")
        setup = run.attempt(1).setup
        setup.parent.mkdir(parents=True)
        setup.write_text(job_script.setup_script(plan.setup, report=str(run.attempt(1).setup_failed)))
        script.write_text(
            shlex.join(job_script.task_command(plan, starter, [*plan.program, "--attempt=1"], setup=setup))
        )
    else:
        script.write_text(policies.evaluation_script(given, plan, run))
    done = subprocess.run(["bash", script], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done
    told, arguments = done.stdout.splitlines()
    image = container(place, runtime)["image"]
    assert told.startswith(f"container={image} ")
    assert " prefix=numactl setup=yes " in told
    assert f"--run-dir={run.path}" in arguments
    if runtime != "edf":
        assert told.endswith(f" {place}")  # its working directory
        for bind in (f"{place}/data:/mnt:ro", str(ROOT), str(run.path)):
            assert bind in told


@pytest.mark.parametrize("runtime", ["pyxis", "edf", "apptainer", "none"])
def test_the_job_of_a_dump_starts_python_in_the_container(
    place: Path, runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "clusters").mkdir()
    site = {
        "name": "here",
        "scheduler": "slurm",
        "job": {"account": "proj", "gpus_per_node": 4, "cpus_per_task": 72, "sbatch": {"gres": "gpu:4"}},
        "environment": {"SITE": "it's"},
        "command_prefix": ["env", "PREFIX=numactl"],
        "python": str(place / "python"),
    }
    if runtime != "none":
        site["container"] = container(place, runtime)
    (place / "clusters/here.yaml").write_text(resolve.yaml_file.dump_yaml(site))
    (place / "dumps.yaml").write_text(
        "tokenizer: x\ntokenizer_name: t\ndataset_name: d\ncluster: here\n"
        f"metadata_folder: {place}/data\noutput_folder: {place}/data\nlogs: {place}/run\n"
        "job: {time: 1:00:00, setup: [export FROM_SETUP=yes], sbatch: {mail-type: END, contiguous: true}}\n"
    )
    texts: list[str] = []

    def map_array(self: submitit.SlurmExecutor, *_: object) -> None:
        texts.append(self._make_submission_file_text(self._submitit_command_str, "uid"))
        raise SchedulerError("enough")

    monkeypatch.setattr(submitit.SlurmExecutor, "map_array", map_array)
    monkeypatch.setattr(Slurm, "max_array_size", lambda self: 1000)
    monkeypatch.setattr(submitit.SlurmExecutor, "affinity", classmethod(lambda cls: 2))
    with pytest.raises(SchedulerError, match="enough"):
        dump_jobs._submit_slurm(load_tokenization_config(place / "dumps.yaml"), [0, 1])
    (text,) = texts
    header = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    for option in ("--account=proj", "--gres=gpu:4", "--mail-type=END", "--contiguous", "--time=60", "--exclusive"):
        assert option in header, header
    assert not any(option.startswith(("--gpus-per-node", "--cpus-per-task")) for option in header)
    script = place / "dump.sh"
    script.write_text(text)
    done = subprocess.run(["bash", script], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done
    told, arguments = done.stdout.splitlines()
    image = container(place, runtime)["image"] if runtime != "none" else "none"
    assert told.startswith(f"container={image} ")
    assert " prefix=numactl setup=yes " in told
    assert arguments.startswith("arguments -u -m submitit.core._submit ")


def test_a_dump_without_a_cluster_runs_as_before(tmp_path: Path) -> None:
    given = TokenizationConfig(
        tokenizer="x", tokenizer_name="t", dataset_name="d", metadata_folder="m", output_folder="o"
    )
    assert (given.command, given.preparation) == ([sys.executable], [])


def test_a_dump_may_not_be_written_below_a_protected_path(place: Path) -> None:
    (place / "clusters").mkdir()
    (place / "clusters/here.yaml").write_text(f"name: here\nscheduler: local\nread_only_paths: [{place}/data]\n")
    text = "tokenizer: x\ntokenizer_name: t\ndataset_name: d\ncluster: here\n"
    (place / "a.yaml").write_text(text + f"metadata_folder: {place}/meta\noutput_folder: {place}/data/tokens\n")
    given = load_tokenization_config(place / "a.yaml")
    assert given.executor == "local"
    with pytest.raises(ConfigError, match=r"output_folder: .*/data/tokens lies below .*/data, where cluster 'here'"):
        dump_jobs.submit_dumps(given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"runtime": "pyxis"}, "runtime pyxis needs an image"),
        ({"image": "/x"}, "image belongs to a container"),
        ({"runtime": "edf", "image": "a", "mounts": ["/x"]}, "mounts belongs into the environment definition file a"),
        ({"runtime": "pyxis", "image": "a", "gpus": "rocm"}, "gpus is a setting of runtime apptainer"),
        ({"runtime": "pyxis", "image": "a", "mounts": ["relative"]}, "mounts.0"),
        ({"runtime": "pyxis", "image": "a", "mounts": ["/a:/b:/c"]}, "mounts.0"),
        ({"runtime": "pyxis", "image": "a", "mounts": ["/a,/b"]}, "mounts.0"),
        ({"runtime": "docker", "image": "a"}, "runtime"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as error:
        ContainerSection.model_validate(given)
    assert said in str(error.value)


def test_a_container_needs_a_python_of_its_own() -> None:
    with pytest.raises(ConfigError, match=r"cluster: a container has a Python of its own; set cluster.python"):
        resolve.load_run_config(
            ROOT / "configs/runs/demo-slurm.yaml", ["cluster.container={runtime: pyxis, image: /x.sqsh}"]
        )


def test_options_of_srun_need_srun() -> None:
    with pytest.raises(ConfigError, match=r"container.runtime pyxis is srun's, and scheduler local has none"):
        resolve.load_run_config(
            ROOT / "configs/runs/demo.yaml",
            ["cluster.container={runtime: pyxis, image: /x.sqsh}", "cluster.python=/usr/bin/python3"],
        )


def test_command_lines() -> None:
    given = {"image": "/i.sqsh", "mounts": ["/scratch", "/data:/mnt:ro"], "options": ["--container-env=PYTHONPATH"]}
    pyxis = ContainerSection(runtime="pyxis", workdir="/w", writable=True, **given)
    assert pyxis.srun_options == [
        "--container-image=/i.sqsh",
        "--container-mounts=/scratch:/scratch,/data:/mnt:ro",
        "--container-workdir=/w",
        "--no-container-mount-home",
        "--container-writable",
        "--container-env=PYTHONPATH",
    ]
    apptainer = ContainerSection(runtime="apptainer", image="/i.sif", mounts=["/scratch"], gpus="rocm", mount_home=True)
    assert shlex.join(apptainer.command) == "apptainer exec --rocm --bind /scratch /i.sif"
    assert ContainerSection(runtime="edf", image="relayrun").srun_options == ["--environment=relayrun"]
    assert (ContainerSection().srun_options, ContainerSection().command) == ([], [])


def test_what_a_mount_shows_already_is_not_mounted_again() -> None:
    given = ContainerSection(runtime="apptainer", image="/i", mounts=["/scratch", "/home/me:/work", "/a:/a:ro"])
    added = given.with_mounts(["/scratch/run", "/home/me/code", "/a/b", "/scratchy", "/scratchy/x"])
    assert added.mounts == [*given.mounts, "/home/me/code", "/scratchy"]
    with pytest.raises(ConfigError, match="a comma or a colon cannot be mounted"):
        given.with_mounts(["/x:y"])


SBATCH = """#!/bin/bash
printf '%s\\n' "$@" >"$SBATCH_LOG"
while [[ $1 == --* ]]; do shift; done
echo 7
exec bash "$@" >"$SBATCH_LOG.out" 2>&1
"""


@pytest.mark.slow
@pytest.mark.parametrize(("script", "runtime"), [("merge", "pyxis"), ("reshard", "apptainer")])
def test_the_jobs_of_bash_scripts_run_in_the_site_of_cluster(place: Path, script: str, runtime: str) -> None:
    """An sbatch that runs the job at once, and a Python that tells instead of working."""
    site = {
        "name": "here",
        "scheduler": "slurm",
        "job": {"account": "proj", "cpus_per_task": 72, "setup": ["export FROM_SETUP=yes"], "sbatch": {"nice": 7}},
        "command_prefix": ["env", "PREFIX=it's numactl"],
        "python": str(place / "python"),
    }
    if runtime != "none":
        site["container"] = container(place, runtime) | {"mounts": [str(place)]}
    (place / "here.yaml").write_text(resolve.yaml_file.dump_yaml(site))
    (place / "bin/sbatch").write_text(SBATCH)
    (place / "bin/sbatch").chmod(0o755)
    srun = (place / "bin/srun").read_text().replace("--export=ALL |", "--export=ALL | --kill-on-bad-exit=1 |")
    (place / "bin/srun").write_text(srun)
    shard = ShardWriter(place / "data/dump-0/00000", np.uint16)
    shard.add(np.arange(5), [2, 3])
    shard.finish()
    (place / "raw").mkdir()
    (place / "raw/text.jsonl").write_text('{"text": "a"}\n')
    folders = {"dataset": place / "raw", "output": place / "out", "temp": place / "temporary"}
    arguments = {
        "merge": [str(place / "data")],
        "reshard": [f"--{name}-{'dir' if name == 'temp' else 'folder'}={path}" for name, path in folders.items()],
    }[script]
    environment = os.environ | {
        "CLUSTER": str(place / "here.yaml"),
        "PYTHON": sys.executable,
        "PATH_TO_LOGS": str(place / "lo gs"),
        "SBATCH_LOG": str(place / "sbatch"),
    }
    command = ["bash", str(ROOT / f"scripts/tokenization/submit_{script}.sh"), *arguments]
    done = subprocess.run(command, env=environment, cwd=place, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done
    assert {"--account=proj", "--nice=7"} <= set((place / "sbatch").read_text().splitlines())
    told = (place / "sbatch.out").read_text().splitlines()
    image = "none" if runtime == "none" else container(place, runtime)["image"]
    assert told[0].startswith(f"container={image} "), told
    assert " prefix=it's numactl setup=yes " in told[0]
    assert len(told) == 2
    assert told[1].startswith(f"arguments {ROOT}/scripts/")
