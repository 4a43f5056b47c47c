"""What an attempt notes of its surroundings, and the switches that are set before torch is there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from relayrun.config.compose import resolve
from relayrun.config.compose.schema import DebugSection
from relayrun.control.rundir.records import AttemptStart
from relayrun.errors import ConfigError
from relayrun.tokens.order.datasets import MOCK_WINDOWS, MockDataset
from relayrun.train.reporting import debugging, environment
from tests.workspace import Workspace

BEGIN = AttemptStart(
    attempt=3,
    job_id="17",
    job_name="llama",
    nodes="n[0-3]",
    config_revision=2,
    base_iteration=0,
    base_path=None,
    start_time=0.0,
    job_end_time=None,
    grace_period=1.0,
)
SECRETS = {"WANDB_API_KEY": "0123456789abcdef", "HF_TOKEN": "hf_secret_of_mine", "SLURM_JWT": "eyJhbGciOiJIUzI1NiJ9"}


def test_the_environment_is_shown_by_an_allowlist() -> None:
    variables = SECRETS | {"SLURM_JOB_ID": "17", "NCCL_DEBUG": "INFO", "EDITOR": "vi", "PATH": "/bin", "PATHOLOGY": "x"}
    assert environment.shown_variables(variables) == ["NCCL_DEBUG=INFO", "PATH=/bin", "SLURM_JOB_ID=17"]


def test_a_description_says_what_ran_and_holds_no_secret(tmp_path: Path) -> None:
    workspace = Workspace.make(tmp_path)
    edf = tmp_path / "container.toml"
    edf.write_text('image = "ngc-25.01.sqsh"')
    cluster = {"name": "local", "scheduler": "local", "srun_options": ["--mpi=none", f"--environment={edf}"]}
    config = resolve.load_run_config(workspace.config("run", cluster=cluster))
    root = tmp_path / "code"
    root.mkdir()
    git = ["git", "-C", str(root), "-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    (root / "launcher.sh").write_text("first\n")
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "first"], check=True)
    (root / "launcher.sh").write_text(f"export WANDB_API_KEY={SECRETS['WANDB_API_KEY']}\n")
    script = tmp_path / "job.sbatch"
    script.write_text("#SBATCH --nodes=4\n")
    text = environment.describe_environment(
        config, BEGIN, root=root, job_script=script, environment=os.environ | SECRETS
    )
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    for expected in (
        f"commit {head}",
        "+export WANDB_API_KEY=<WANDB_API_KEY>",
        "17 (llama), attempt 3",
        "n[0-3]",
        "#SBATCH --nodes=4",
        "ngc-25.01.sqsh",
        "torch==",
        "pytest",
    ):
        assert expected in text, expected
    for secret in SECRETS.values():
        assert secret not in text


def make_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, answer: str, *, code: int = 0) -> None:
    """A stand-in for nvidia-smi, which has this answer to the fields that are asked for."""
    program = folder / "nvidia-smi"
    asked = "--query-gpu=" + ",".join(environment.GPU_FIELDS.values()) + " --format=csv,noheader,nounits"
    program.write_text(f'#!/bin/bash\n[[ "$*" == "{asked}" ]] && printf \'{answer}\'\nexit {code}\n', encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


GPUS = "0, GH200, 550.54, 1024, 97871, 345, 1980, 345, 95.20, 900.00, 31\\n1, GH200, 550.54" + 8 * ", [N/A]" + "\\n"


def test_memory_of_the_host_and_of_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # not installed
    assert debugging.memory_sample().count("GiB") == 1
    make_nvidia_smi(tmp_path, monkeypatch, "NVIDIA-SMI has failed, because it cannot talk to the driver\\n", code=9)
    assert debugging.memory_sample().count("GiB") == 1
    make_nvidia_smi(tmp_path, monkeypatch, GPUS)
    assert debugging.memory_sample().endswith("GiB, gpu 0: 1.0 of 95.6 GiB, gpu 1: ? of ? GiB")


def test_a_gpu_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_nvidia_smi(tmp_path, monkeypatch, GPUS)
    first, second = map(environment.gpu_line, environment.node_gpus())
    assert first == (
        "index 0, name GH200, driver 550.54, memory used 1024, memory total 97871, sm clock 345, sm clock max 1980, "
        "memory clock 345, power 95.20, power limit 900.00, temperature 31"
    )
    assert second.startswith("index 1, name GH200, driver 550.54, memory used [N/A], ")


def test_nccl_writes_a_file_per_rank_and_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_DEBUG", raising=False)
    monkeypatch.setenv("NCCL_DEBUG_FILE", "")
    debugging.log_nccl(tmp_path / "nccl", node="n3", rank=12)
    assert os.environ["NCCL_DEBUG_FILE"] == str(tmp_path / "nccl" / "n3-rank-0012.log")
    assert os.environ["NCCL_DEBUG"] == "INFO"
    monkeypatch.setenv("NCCL_DEBUG", "TRACE")
    debugging.log_nccl(tmp_path / "nccl", node="n3", rank=12)
    assert os.environ["NCCL_DEBUG"] == "TRACE"


def test_without_nsys_every_rank_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for rank in (0, 5):
        with pytest.raises(ConfigError, match="there is no nsys on the PATH of the ranks"):
            debugging.enter_nsys(DebugSection(profile="nsys", profile_ranks=[0]), tmp_path, rank)
    debugging.enter_nsys(DebugSection(profile="torch"), tmp_path, 0)
    monkeypatch.setenv(debugging.UNDER_NSYS, "1")
    debugging.enter_nsys(DebugSection(profile="nsys"), tmp_path, 0)


@pytest.mark.slow
def test_nsys_traces_what_the_earlier_system_traced_and_takes_options(tmp_path: Path) -> None:
    """The command is run, by a nsys that writes down its arguments and then runs the program."""
    nsys = tmp_path / "bin" / "nsys"
    nsys.parent.mkdir()
    nsys.write_text(
        '#!/bin/bash\nwhile [[ $1 != *python* ]]; do echo "$1"; shift; done >"$ASKED"\nexec "$@"\n', encoding="utf-8"
    )
    nsys.chmod(0o755)
    program = (
        "import sys; from pathlib import Path; from relayrun.config.compose.schema import DebugSection\n"
        "from relayrun.train.reporting import debugging\n"
        "options = ['--trace=cuda,osrt', '--gpu-metrics-devices=all'] if sys.argv[1:] else []\n"
        "debugging.enter_nsys(DebugSection(profile='nsys', nsys_options=options), Path('profile'), 0)\n"
        "print('trained')"
    )
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    environment = os.environ | {"PATH": f"{nsys.parent}:{os.environ['PATH']}", "ASKED": str(tmp_path / "asked")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))

    def asked(*arguments: str) -> list[str]:
        command = [sys.executable, "program.py", *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True, timeout=600
        )
        assert done.stdout == "trained\n"
        return (tmp_path / "asked").read_text(encoding="utf-8").split()

    usual = asked()
    assert usual == [
        "profile",
        "--sample=none",
        "--trace=nvtx,cudnn,cublas,cuda",
        "--output=profile/rank-0000",
        "--force-overwrite=true",
        "--capture-range=cudaProfilerApi",
        "--capture-range-end=stop",
    ]
    given = ["--trace=cuda,osrt", "--gpu-metrics-devices=all"]
    assert asked("with options") == [option for option in usual if not option.startswith("--trace")] + given


@pytest.mark.parametrize("option", ["--capture-range=none", "--output=x", "-t cuda", "cuda"])
def test_options_of_nsys_that_are_no_options_or_relayruns_own_are_refused(option: str) -> None:
    with pytest.raises(ValueError, match="nsys_options"):
        DebugSection(profile="nsys", nsys_options=[option])


def test_profiled_iterations_are_in_order() -> None:
    with pytest.raises(ValueError, match="profile_step_end 3 is before profile_step_start 10"):
        DebugSection(profile="torch", profile_step_end=3)


def test_a_rank_that_is_not_there_is_refused(tmp_path: Path) -> None:
    config = Workspace.make(tmp_path).config("run", debug={"profile": "torch", "profile_ranks": [0, 2]})
    with pytest.raises(ConfigError, match="there is no rank 2; the ranks are 0 to 1"):
        resolve.load_run_config(config)


def test_mock_data_are_a_function_of_seed_epoch_and_number(tmp_path: Path) -> None:
    def dataset(seed: int) -> MockDataset:
        source: Any = SimpleNamespace(seed=seed, seq_length=64, options={"vocabulary_size": 50})
        return MockDataset(source)

    window = dataset(1).read(2, 7)
    assert (window.dtype, window.shape, len(dataset(1))) == (np.int64, (65,), MOCK_WINDOWS)
    assert np.array_equal((window[:-1] + 1) % 50, window[1:])
    assert np.array_equal(dataset(1).read(2, 7), window)
    firsts = {int(dataset(seed).read(epoch, i)[0]) for seed in (1, 2) for epoch in (0, 1) for i in range(50)}
    assert len(firsts) > 40


def test_mock_data_take_the_place_of_everything(tmp_path: Path) -> None:
    workspace = Workspace.make(tmp_path)
    data = {"tokenizer": "nowhere/to-be-found", "datasets": ["/nowhere"], "validation": {"held-out": ["/nowhere"]}}
    config = resolve.load_run_config(
        workspace.config("run", data=data), ["data.mock_data=true", "data.mock_vocabulary_size=300"]
    )
    assert list(config.data.sources) == ["mock"]
    assert (config.data.datasets, config.data.validation) == ([], {})
    path = tmp_path / "resolved.yaml"
    path.write_text(resolve.dump_run_config(config))
    assert resolve.read_resolved_config(path) == config
