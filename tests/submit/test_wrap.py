"""`relayrun wrap`: a batch script as it is becomes the program of a chain."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from relayrun.cli import main
from relayrun.control.rundir.checkpoint_records import resume_point
from relayrun.control.rundir.run import Run
from relayrun.errors import ConfigError
from relayrun.submit.sbatch_header import Adopted
from relayrun.submit.wrap import wrap

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """\
#!/bin/bash
#SBATCH -J my-model
#SBATCH --time=10 --nodes=2 --ntasks-per-node=4 -c 8
#SBATCH --gres=gpu:4
#SBATCH --account=a1 --output=%j.out
#SBATCH --signal=B:USR1@120
#SBATCH --mail-type=END
trap 'touch stop' USR1
srun python train.py
"""

TRAIN = """
import glob, os, sys, time
have = sorted(glob.glob("out/step-*.pt"))
start = int(open(have[-1]).read()) if have else 0
for iteration in range(start + 1, int(sys.argv[1]) + 1):
    time.sleep(0.05)
    print(f"step {iteration} of", *sys.argv[2:], flush=True)
    if iteration % 10 == 0:
        with open("new", "w") as file:
            file.write(str(iteration))
        os.rename("new", f"out/step-{iteration:06}.pt")
    if iteration == 35 and not os.path.exists("died"):
        open("died", "w").close()
        sys.exit(1)
"""

OUTSIDE_A_STEP = """
import os
assert not {"RANK", "WORLD_SIZE", "SLURM_PROCID"} & {*os.environ}, "those of the chain's step"
"""

QUEUES_ITSELF = """\
#!/bin/bash
#SBATCH --job-name=toy --time=10
{python} train.py "$@"
code=$?
sbatch --dependency=singleton "$0"
exit $code
"""


def wrapped(folder: Path, text: str = SCRIPT, checkpoints: str = "out/step-{iteration}.pt", **given: Any) -> Adopted:
    (folder / "train.sbatch").write_text(text)
    return wrap(folder / "train.sbatch", ["--lr", "1e-3"], checkpoints=checkpoints, site="generic", **given)


def test_the_lines_of_the_script_are_the_job(tmp_path: Path) -> None:
    found = wrapped(tmp_path)
    assert found.errors == []
    settings = found.settings
    assert (settings["project"], settings["name"], settings["trainer"]) == ("wrapped", "my-model", "command")
    job = settings["job"]
    assert job.pop("setup") == ['for name in "${!SLURM_@}"; do export "RELAYRUN_BATCH_${name}=${!name}"; done']
    numbers = {"nodes": 2, "ntasks_per_node": 4, "cpus_per_task": 8, "gpus_per_node": 4}
    assert job == {"time": "10", **numbers, "account": "a1", "sbatch": {"mail-type": "END"}}
    assert settings["command"] == {
        "run": [
            "bash",
            f"{ROOT}/launchers/lib/wrapped.sh",
            *map(str, (tmp_path, tmp_path / "train.sbatch")),
            "--lr",
            "1e-3",
        ],
        "leave_signal": "SIGUSR1",
        "checkpoint": {"folder": f"{tmp_path}/out", "pattern": "step-{iteration}.pt"},
    }
    assert settings["chain"] == {"auto_requeue": True, "grace_period": 120}
    own = settings["cluster_settings"]
    assert own["environment"] == {"RELAYRUN_WRAPPED_TRAPS": "USR1"}
    assert own["srun_options"][:4] == ["--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--cpus-per-task=32"]


def test_the_environment_of_the_header_is_the_container_of_the_run(tmp_path: Path) -> None:
    text = "#!/bin/bash\n#SBATCH --time=10 --environment=/e.toml\ntrap 'touch stop' USR1\n"
    own = wrapped(tmp_path, text).settings["cluster_settings"]
    assert own["container"] == {"runtime": "edf", "image": "/e.toml"}
    assert own["environment"] == {"RELAYRUN_WRAPPED_TRAPS": "USR1"}
    assert "--overlap" in own["srun_options"]


@pytest.mark.parametrize(
    ("pattern", "folder", "rest"),
    [
        ("step-{iteration}", "", "step-{iteration}"),
        ("/data/run/step-{iteration}", "/data/run/", "step-{iteration}"),
        ("logs/version_*/epoch=*-step={iteration}.ckpt", "logs/", "version_*/epoch=*-step={iteration}.ckpt"),
    ],
)
def test_the_folder_of_checkpoints_ends_at_the_first_placeholder(
    tmp_path: Path, pattern: str, folder: str, rest: str
) -> None:
    text = f"#!/bin/bash\n#SBATCH --time=10 --chdir={tmp_path}/other\n"
    rule = wrapped(tmp_path, text, checkpoints=pattern).settings["command"]["checkpoint"]
    assert rule["pattern"] == rest
    assert Path(rule["folder"]) == tmp_path / "other" / folder


def test_a_script_without_a_time_limit_or_with_an_array_is_refused(tmp_path: Path) -> None:
    (without,) = wrapped(tmp_path, "#!/bin/bash\nsrun a\n").errors
    assert "no #SBATCH line says the time limit" in without.message
    (array,) = wrapped(tmp_path, "#!/bin/bash\n#SBATCH --time=1 --array=1-4\n").errors
    assert array.message == "#SBATCH --array=1-4 is not taken"
    with pytest.raises(ConfigError, match="names no signal"):
        wrapped(tmp_path, "#!/bin/bash\n#SBATCH --time=1 --signal=10\n")


def test_a_script_is_not_started_again_inside_its_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An agent of each node would start a script of its own."""
    (tmp_path / "train.sbatch").write_text(SCRIPT)
    assert submit(tmp_path, "--set", "chain.recovery=node", "train.sbatch") == 1
    assert "set chain.recovery=job" in capsys.readouterr().err


def submit(folder: Path, *words: str) -> int:
    """Here and now, on this machine."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        return main(["wrap", "--checkpoints=out/step-{iteration}.pt", "--cluster=local", *words])
    finally:
        os.chdir(before)


@pytest.mark.slow
def test_a_script_runs_as_a_chain_and_begins_with_what_it_had_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ".relayrun").touch()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "step-000020.pt").write_text("20")
    (tmp_path / "train.py").write_text(OUTSIDE_A_STEP + TRAIN)
    (tmp_path / "train.sbatch").write_text(QUEUES_ITSELF.format(python=sys.executable))
    assert submit(tmp_path, r"--progress=step (?P<iteration>\d+)", "train.sbatch", "60", "two words") == 0
    run = Run(tmp_path / "logs/runs/wrapped/toy")
    assert resume_point(run).iteration == 60
    assert "the program ended by itself" in run.stop.read_text()
    logs = [path.read_text() for path in sorted((tmp_path / "logs/slurm/training").glob("*.out"))]
    assert ["step 1 of" in log for log in logs] == [False, False]
    assert ["step 21 of two words" in log for log in logs] == [True, False], "from the checkpoint before the chain"
    assert ["step 31 of two words" in log for log in logs] == [True, True], "from the newest one"
    errors = [path.read_text() for path in sorted((tmp_path / "logs/slurm/training").glob("*.err"))]
    assert all("sbatch train.sbatch: not done, the chain queues the next job" in text for text in errors)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [f"step-0000{n}0.pt" for n in range(2, 7)]
    capsys.readouterr()
    assert main(["status", str(run.path)]) == 0
    assert "the program ended by itself" in capsys.readouterr().out


@pytest.mark.parametrize("trap", [True, False])
def test_a_signal_reaches_a_script_that_traps_it_and_ends_no_other(tmp_path: Path, trap: bool) -> None:
    """rank.sh ignores the signals of the chain, and Bash cannot trap what is ignored at its start."""
    script = "trap 'echo heard; exit 7' USR1\n" * trap + "kill -USR1 $$\necho on\n"
    (tmp_path / "train.sbatch").write_text(script)
    own = wrap(tmp_path / "train.sbatch", [], checkpoints="{iteration}", site="generic").settings["cluster_settings"]
    start = ["bash", "-c", "trap '' USR1 USR2; exec \"$@\"", "_", "bash", str(ROOT / "launchers/lib/wrapped.sh")]
    variables = {"RELAYRUN_CLIENT": str(tmp_path), "PATH": os.environ["PATH"], **own.get("environment", {})}
    (tmp_path / "copy").mkdir()
    done = subprocess.run(
        [*start, str(tmp_path), str(tmp_path / "train.sbatch")],
        env=variables | {"RELAYRUN_CLIENT": str(tmp_path / "copy")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.returncode) == (("heard\n", 7) if trap else ("on\n", 0)), done.stderr
