"""Plans and job scripts: of every run config, of every launcher, and of small runs that use what those do not."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relayrun.config.compose import resolve
from relayrun.control.chain import job_script
from relayrun.control.rundir import triggers
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.local_queue import JOB_ID_VARIABLE, LocalJob, LocalQueue
from relayrun.submit import policies
from relayrun.submit.run_plan import make_plan
from tests.history import queue_is_run
from tests.megatron_lm.stand_in import stand_in
from tests.workspace import CONFIG, Workspace

from .masks import ROOT, environment, machine, masked, write_text
from .names import PROGRAMS
from .slurm_commands import SlurmCommands

SUPERVISOR = next(name for name, role in PROGRAMS.items() if role == "supervisor")

_TIME = re.compile(r"\b1[5-9]\d{8}(\.\d+)?\b")
_MADE_UP = (
    re.compile(r'(?<="id": ")[0-9a-f]{16}(?=")'),
    re.compile(r'(?<="owner": )\d+'),
    re.compile(r'(?<="directory": )\[[^]]*\]'),
    re.compile(r"\b[0-9a-f]{40}\b"),
    re.compile(r"(?<=WANDB_RUN_ID=)\w+"),
    re.compile(r'(?<="id": ")[a-z0-9]{8}(?=")'),
)


def stable(text: str, run_dir: Path, folders: Mapping[str, Path]) -> str:
    """Return a text of a run directory without paths, times, hashes of paths, and ids that are made up."""
    plan = run_dir / "plan.json"
    found = re.search(r'"job_name": "(.+?)"', plan.read_text(encoding="utf-8")) if plan.exists() else None
    if found is not None:
        text = text.replace(found[1], f"{found[1][:-8]}HASH")
    text = _TIME.sub("TIME", machine(masked(text, {"RUN": run_dir, **folders})))
    for made_up in _MADE_UP:
        text = made_up.sub("MADE-UP", text)
    return text


def keep(run_dir: Path, out: Path, folders: Mapping[str, Path]) -> None:
    """Copy every text file of a run directory into a record; a binary file by its name."""
    for path in sorted(run_dir.rglob("*")):
        name = path.relative_to(run_dir).as_posix()
        if path.is_file() and not name.startswith(("code/", "local/")) and name != ".submit.lock":
            try:
                text = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                text = "binary\n"
            write_text(out / name, stable(text, run_dir, folders))


def of_config(path: Path, out: Path) -> None:
    """Write what a submit of a run config writes, and what its first job does before its ranks start.

    Nothing is checked, so that configs whose data are not here have a record as well.
    """
    with tempfile.TemporaryDirectory(prefix="record-run-") as folder:
        run = Run(Path(folder) / "run")
        config = resolve.load_run_config(path, [*_checkout(path, Path(folder)), f"run_dir={run.path}"])
        plan = make_plan(config, run, ROOT, revision=1)
        run.path.mkdir()
        triggers.create_trigger_folder(run)
        plan.write(run.plan)
        run.config.mkdir()
        run.config_revision(1).write_text(resolve.dump_run_config(config), encoding="utf-8")
        run.job_script.write_text(job_script.job_script(plan, run), encoding="utf-8")
        if plan.fallback_job:
            run.fallback_script.write_text(job_script.fallback_script(plan, run), encoding="utf-8")
        policies.write_evaluation_policy(config, plan, run)
        policies.write_mirror_policy(config, run)
        policies.write_notice_policy(config, run)
        calls = _first_job(run, Path(folder))
        folders = {"FOLDER": Path(folder)}
        keep(run.path, out, folders)
        write_text(out / "slurm_calls.txt", stable(calls, run.path, folders))


def _checkout(config: Path, folder: Path) -> list[str]:
    """The overrides that give a run of Megatron-LM a checkout and data, where the config leaves both to the user."""
    if "dir: /set/megatron_lm.dir" not in config.read_text(encoding="utf-8"):
        return []
    Workspace.make(folder / "space")
    return [f"megatron_lm.dir={stand_in(folder / 'Megatron-LM')}", f"data.datasets=[{folder / 'space' / 'data'}]"]


def _first_job(run: Run, folder: Path) -> str:
    """Have the first job of a run begin, and end without its ranks; return the calls of Slurm's commands."""
    slurm = SlurmCommands(folder / "slurm")
    plan = json.loads(run.plan.read_text(encoding="utf-8"))
    local = plan["scheduler"] == "local"
    nodes = plan["nodes"] + plan.get("spare_nodes", 0)
    answers = {"name": plan["job_name"], "cpus": plan["cpus_per_task"], "limit": int(plan["time_limit"])}
    given = slurm.environment(inside=not local, nodes=nodes, **answers)
    if local:
        given[JOB_ID_VARIABLE] = _local_job(run, plan)
    called = ""
    for words in (["begin"], ["end", "--attempt=1", "--exit-code=1"]):
        command = [sys.executable, "-P", "-m", SUPERVISOR, *words, f"--run-dir={run.path}"]
        with queue_is_run(run) if local else contextlib.nullcontext():
            done = subprocess.run(
                command, env=given, cwd=folder, capture_output=True, text=True, check=False, timeout=300
            )
        called += f"== {words[0]}: exit status {done.returncode}\n{done.stdout}{done.stderr}{slurm.calls()}"
    return re.sub(r"\[relayrun [^]]*\]", "[relayrun TIME]", called)


def _local_job(run: Run, plan: Mapping[str, Any]) -> str:
    """Put a job that runs into the queue of this machine; return its id."""
    job = LocalJob(
        id="",
        name=plan["job_name"],
        script=str(run.job_script),
        log_folder=plan["log_folder"],
        time_limit=plan["time_limit"],
        signal_seconds=plan["signal_seconds"],
        eligible_time=0.0,
        state="RUNNING",
        pid=os.getpid(),
        start_time=time.time(),
        end_time=time.time() + plan["time_limit"],
    )
    return LocalQueue(run.path / "local").add(job)


SLURM = {"name": "c", "scheduler": "slurm", "python": None}

RICH: dict[str, Any] = {
    "cluster": SLURM
    | {
        "modules": ["cray", "a b"],
        "environment": {"NCCL_SOCKET_IFNAME": "hsn0", "PYTHONPATH": "/site/packages"},
        "srun_options": ["--mpi=none"],
        "command_prefix": ["numactl", "--membind=0-3"],
        "quota_command": ["echo", '{"used": 1, "limit": 1000000000000000}'],
    },
    "job": {
        "nodes": 4,
        "time": "2:00:00",
        "account": "a1",
        "partition": "normal",
        "exclude": "n009",
        "mem": "64G",
        "exclusive": True,
        "sbatch": {"gres": "gpu:4", "mail-type": "END", "wckey": 'it\'s "one"'},
        "setup": ["source /site/env.sh", 'export A="b c"'],
    },
    "chain": {"auto_requeue": True, "triggers_group": None, "grace_period": 120, "max_failed_attempts": 5},
    "evaluation": {"interval": 1000, "job": {"time": "20", "partition": "debug"}},
    "notify": {"targets": {"me": {"command": ["tell", "me"], "events": ["stopped", "done"]}}},
    "debug": {"log_nccl": True},
    "training": {"stop_after": 10, "global_batch_size": 16},
}

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"cluster": SLURM},
    "rich": RICH,
    "requeue": {"cluster": SLURM, "chain": {"auto_requeue": True, "mode": "requeue"}},
    "unattended": {"cluster": SLURM, "chain": {"auto_requeue": False}},
    "node-recovery": {"cluster": SLURM, "chain": {"recovery": "node"}, "job": {"nodes": 2}},
    "spare-nodes": {
        "cluster": SLURM,
        "chain": {"recovery": "node", "node_health": "exclude"},
        "job": {"nodes": 2, "spare_nodes": 1},
    },
    "container": {
        "cluster": SLURM
        | {"python": "python3", "container": {"runtime": "pyxis", "image": "/i.sqsh", "mounts": ["/s"]}}
    },
    "local": {"cluster": {"name": "local", "scheduler": "local", "python": None}},
}
"""Sections of small runs of the native trainer."""

COMMAND: dict[str, Any] = {
    "trainer": "command",
    "cluster": SLURM,
    "command": {"run": ["python3", "train.py", "--to={checkpoints}"], "resume": ["--from={checkpoint}"]},
}

MEGATRON_SECTIONS = ("project", "name", "model", "data", "training", "optimizer", "checkpoint", "chain", "job")


def variants(folder: Path) -> dict[str, Path]:
    """Write the configs of all small runs; return them by name."""
    space = Workspace.make(folder)
    held_out = Workspace.make(folder / "held-out", seed=2).folder / "data"
    own_data = {"rich": {"data": {"validation": {"held": [str(held_out)]}}}}
    found = {name: space.config(name, **sections, **own_data.get(name, {})) for name, sections in VARIANTS.items()}
    foreign = {key: value for key, value in CONFIG.items() if key in ("project", "name", "job", "chain")}
    found["command"] = _write(folder / "command.yaml", foreign | COMMAND)
    restarted = COMMAND | {"chain": {"recovery": "node", "auto_requeue": True}, "command": COMMAND["command"]}
    found["command-recovery"] = _write(folder / "command-recovery.yaml", foreign | restarted)
    own = {key: value for key, value in CONFIG.items() if key in MEGATRON_SECTIONS}
    own["training"] = {key: value for key, value in CONFIG["training"].items() if key != "threads"}
    own["data"] = {"tokenizer": str(folder / "tokenizer.json"), "datasets": [str(folder / "data")]}
    checkout = stand_in(folder / "Megatron-LM")
    flags = {"dir": str(checkout), "args": {"num-workers": 1, "no-rope-fusion": True}}
    own |= {"trainer": "megatron-lm", "cluster": SLURM, "megatron_lm": flags}
    found["megatron-lm"] = _write(folder / "megatron-lm.yaml", own)
    return found


def _write(path: Path, values: Mapping[str, Any]) -> Path:
    path.write_text(json.dumps(values), encoding="utf-8")  # which is YAML as well
    return path


def submitted(config: Path, out: Path, folder: Path) -> None:
    """Submit a run on Slurm by the command, and write its run directory and the calls of Slurm's commands."""
    slurm = SlurmCommands(folder / "slurm")
    run_dir = folder / "submitted"
    command = [sys.executable, "-P", "-m", "relayrun", "submit", str(config), "--set", f"run_dir={run_dir}"]
    done = subprocess.run(
        command, env=slurm.environment(), cwd=folder, capture_output=True, text=True, check=False, timeout=300
    )
    folders = {"FOLDER": folder}
    keep(run_dir, out, folders)
    said = f"exit status {done.returncode}\n{done.stdout}{done.stderr}{slurm.calls()}"
    write_text(out / "said.txt", stable(said, run_dir, folders))


def of_launcher(path: Path, out: Path) -> None:
    """Write what a launcher prints with `--dry-run`: the job, and what the check finds."""
    given = environment(PYTHON=sys.executable)
    done = subprocess.run(
        ["bash", path, "--dry-run"], env=given, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    text = re.sub(
        r"^((?:#SBATCH --job-name|export RELAYRUN_JOB_NAME)=.*-)[0-9a-f]{8}$", r"\1HASH", done.stdout, flags=re.M
    )
    errors = re.sub(r"scontrol: .*", "scontrol: NO SLURM", done.stderr)
    write_text(out / f"{path.stem}.txt", masked(f"{text}== exit status {done.returncode}\n{errors}"))


def record(folder: Path) -> None:
    """Write all plans and job scripts."""
    for path in sorted((ROOT / "configs" / "runs").glob("*.yaml")):
        of_config(path, folder / "configs" / path.stem)
    for path in sorted((ROOT / "examples").rglob("*.yaml")):
        of_config(path, folder / "examples" / path.stem)
    with tempfile.TemporaryDirectory(prefix="record-variants-") as place:
        for name, path in variants(Path(place)).items():
            of_config(path, folder / "variants" / name)
            for kept in (folder / "variants" / name).rglob("*"):
                if kept.is_file():
                    write_text(kept, kept.read_text(encoding="utf-8").replace(place, "/SPACE"))
        submitted(Path(place) / "rich.yaml", folder / "submitted", Path(place))
    for path in sorted((ROOT / "launchers").glob("*.sh")):
        of_launcher(path, folder / "launchers")
