"""Job scripts: the sbatch script that every attempt submits, the fallback job, evaluation jobs, and job.env.

Only quoted data is rendered; the logic is `launchers/lib/job.sh`, the same for every run.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from relayrun import places
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.base import BEGIN_BACKOFF, MAX_FAILED_BEGINS
from relayrun.errors import ConfigError
from relayrun.slurmtime import format_time

FALLBACK_TIME_LIMIT = 600
"""Time limit of the fallback job in seconds: enough if a controller or a file system is away for some minutes."""
FALLBACK_GIVE_UP_SECONDS = 60
"""Seconds before its limit at which the fallback job gives up: at the limit Slurm accepts no comment any more."""


def job_script(plan: Plan, run: Run) -> str:
    """Return the sbatch script of a run."""
    wished = plan.sbatch_options
    asks_for_processors = "cpus-per-gpu" in wished or "cpu" in (wished.get("tres-per-task") or "")
    options: dict[str, str | None] = {
        "job-name": plan.job_name,
        "time": format_time(plan.time_limit),
        "nodes": str(plan.nodes_of_job),
        "ntasks-per-node": str(plan.ntasks_per_node),
        **({} if asks_for_processors else {"cpus-per-task": str(plan.cpus_per_task)}),
        **plan.sbatch_options,
        # the script opens its log itself: if Slurm cannot open it, the job silently does not start
        "output": "/dev/null",
        # a second line of defence: rank 0 leaves by its own clock first. To the batch script alone (B:),
        # which asks the ranks to save; Slurm may send it up to 60 s early.
        "signal": f"B:USR2@{plan.signal_seconds}",
        # Slurm requeues it after the loss of its node; `begin` forbids that once a successor is queued
        "requeue" if plan.chain.auto_requeue else "no-requeue": None,
        **({"no-kill": None} if plan.outlives_nodes else {}),  # the loss of a node does not end the job
    }
    variables = {
        "RELAYRUN_RUN_DIR": str(run.path),
        "RELAYRUN_ROOT": plan.package_root,
        "RELAYRUN_HOST_PYTHON": plan.host_python,
        "RELAYRUN_JOB_NAME": plan.job_name,
        "RELAYRUN_AUTO_REQUEUE": "true" if plan.chain.auto_requeue else "false",
        "RELAYRUN_MAX_FAILED_BEGINS": str(MAX_FAILED_BEGINS),
        "RELAYRUN_BEGIN_BACKOFF": str(BEGIN_BACKOFF),
        "RELAYRUN_LOG_FOLDER": plan.log_folder,
    }
    if plan.outlives_nodes:  # for again.sh
        variables["RELAYRUN_NODE_COUNTS"] = " ".join(map(str, plan.node_counts))
        variables["RELAYRUN_NTASKS_PER_NODE"] = str(plan.ntasks_per_node)
    return _text(
        *_header(plan, options),
        "set -euo pipefail",
        *export_lines(variables),
        "",
        # copied and not sourced: the package itself may be away
        *(_launcher_text(name) for name in ("again.sh", "log.sh")),
        'within 600 grep -q . "${RELAYRUN_ROOT}/launchers/lib/job.sh" || again "reading launchers/lib/job.sh" "$?"',
        "# shellcheck source=/dev/null",
        'source "${RELAYRUN_ROOT}/launchers/lib/job.sh"',
    )


def fallback_script(plan: Plan, run: Run) -> str:
    """Return the sbatch script of a run's fallback job; its partition comes from the command line."""
    limit = min(FALLBACK_TIME_LIMIT, plan.time_limit)
    options: dict[str, str | None] = {
        "job-name": plan.fallback_job_name,
        "time": format_time(limit),
        "nodes": "1",
        "ntasks-per-node": "1",
        "cpus-per-task": "1",
        "output": "/dev/null",  # as in `job_script`
        "requeue": None,
    }
    if limit >= 5 * FALLBACK_GIVE_UP_SECONDS:  # Slurm may send it a minute early
        options["signal"] = f"B:USR2@{FALLBACK_GIVE_UP_SECONDS}"
    variables = {
        "RELAYRUN_RUN_DIR": str(run.path),
        "RELAYRUN_ROOT": plan.package_root,
        "RELAYRUN_HOST_PYTHON": plan.host_python,
        "RELAYRUN_JOB_NAME": plan.fallback_job_name,
        "RELAYRUN_LOG_FOLDER": plan.log_folder,
    }
    lines = [
        *_header(plan, options),
        "set -euo pipefail",
        *export_lines(variables),
        "",
        _launcher_text("again.sh"),
        "trap - EXIT  # this job is none of the chain's: it does not queue itself again",
        "set +e",
        *(_launcher_text(name) for name in ("log.sh", "fallback.sh")),
    ]
    return "\n".join(lines)


def _text(*lines: str) -> str:
    return "\n".join(lines) + "\n"


def _launcher_text(name: str) -> str:
    """Return the text of a file in launchers/lib without its first line."""
    return (places.shared_file("launchers/lib") / name).read_text(encoding="utf-8").partition("\n")[2]


def _launcher_function(file: str, name: str) -> str:
    text = _launcher_text(file)
    begin = text.index(f"\n{name}() {{") + 1
    return text[begin : text.index("\n}\n", begin) + 3]


def program_script(
    plan: Plan,
    name: str,
    options: Mapping[str, str | None],
    *,
    environment: Mapping[str, str],
    command: Sequence[str],
    fallback: Path,
) -> str:
    """Return the sbatch script of a job outside the chain that runs one program, an evaluation.

    The job's arguments are appended to `command`. The job opens its log itself, in `fallback` if the plan's folder is
    away.
    """
    every: dict[str, str | None] = {
        "job-name": f"{plan.job_name}-{name}",
        "nodes": "1",
        "ntasks-per-node": "1",
        **options,
        "output": "/dev/null",  # as in `job_script`
        "no-requeue": None,  # a requeued job would find its own claim
    }
    return _text(
        *_header(plan, every),
        "set -euo pipefail",
        f"RELAYRUN_LOG_FOLDER={shlex.quote(plan.log_folder)}",
        f"RELAYRUN_RUN_DIR={shlex.quote(str(fallback))}",
        f'RELAYRUN_JOB_NAME="${{SLURM_JOB_NAME:-{name}}}"',
        '[[ -n "${SLURM_JOB_ID:-}" ]] || relayrun_log_is_open=1 # the queue of one machine has opened it',
        _launcher_function("again.sh", "within"),
        _launcher_text("log.sh"),
        *export_lines(environment),
        # the submitter's PYTHONPATH comes last
        f'export PYTHONPATH={shlex.quote(":".join(python_path(plan)))}"${{PYTHONPATH:+:${{PYTHONPATH}}}}"',
        *setup_lines(plan.setup, modules=plan.modules),
        f'exec {shlex.join(command)} "$@"',
    )


def setup_lines(lines: Sequence[str], *, modules: Sequence[str] = (), report: str = "/dev/null") -> list[str]:
    """Return lines of Bash that load `modules` and run `job.setup` unchanged: the first that fails ends the script.

    The failed line and its exit code go to standard error and to the file `report`. The site's code, which these lines
    call or source, runs without `errexit` and `nounset`: a trap sees what fails in the lines themselves.
    """
    if not (lines or modules):
        return []
    return [
        "relayrun_failed() { # exit code, depth of the code that failed, its line in this file or nothing after `exit`",
        "  (($2 == relayrun_depth)) || return 0 # in a file of the site",
        "  trap - ERR EXIT",
        f"  printf '{'cluster.modules or ' if modules else ''}job.setup failed (exit code %s) %s\\n' \"$1\" "
        '"$([[ -z "${3:-}" ]] && echo "in a call of exit" || sed -n "$3s/^/at: /p" "${BASH_SOURCE[0]}")" | tee '
        + shlex.quote(report)
        + " >&2",
        "  exit $(($1 ? $1 : 1)) # a line may have ended the script: nothing may run behind it",
        "}",
        "relayrun_depth=${#BASH_SOURCE[@]} relayrun_options=$-",
        'trap \'relayrun_failed "$?" "${relayrun_depth}"\' EXIT',
        'trap \'relayrun_failed "$?" "${#BASH_SOURCE[@]}" "${LINENO}"\' ERR',
        "set +eu",
        *(f"module load {shlex.quote(module)}" for module in modules),
        *lines,
        "trap - ERR EXIT",
        '[[ "${relayrun_options}" != *e* ]] || set -e',
        '[[ "${relayrun_options}" != *u* ]] || set -u',
    ]


def setup_script(lines: Sequence[str], *, report: str) -> str:
    """Return a script that runs `job.setup`, which signals to ranks must not end, then the program in its arguments."""
    return _text(
        "#!/usr/bin/env bash",
        "set -euo pipefail",
        "trap '' USR1 USR2",
        *setup_lines(lines, report=report),
        "trap - USR1 USR2",
        'exec "$@"',
    )


def python_path(plan: Plan) -> list[str]:
    """Return the folders from which the ranks import: the package first, before the PYTHONPATH of the site."""
    return [plan.package_root, *(folder for folder in plan.environment.get("PYTHONPATH", "").split(":") if folder)]


def _header(plan: Plan, options: Mapping[str, str | None]) -> list[str]:
    words = (name if value is None else f"{name}={_quote(value)}" for name, value in options.items())
    note = f"# {plan.run}: rendered by relayrun; a submit writes it anew"
    return ["#!/usr/bin/env bash", note, *(f"#SBATCH --{word}" for word in words)]


def rank_defaults(cpus_per_task: str, *, trainer: str, site: Mapping[str, str]) -> dict[str, str]:
    """Return the default variables of every rank of a trainer; those of the site override them."""
    found = {
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": cpus_per_task,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",  # collectives that the flight recorder keeps
    }
    allocator = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch before 2.9 reads the second alone
    if trainer == "native" and not any(
        name in site for name in (*allocator, "PYTORCH_HIP_ALLOC_CONF")
    ):  # documents and experts change shapes
        found |= dict.fromkeys(allocator, "expandable_segments:True")
    if trainer == "megatron-lm":  # it refuses to split layers without; the native trainer looks at its layout
        found["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    return found


def export_lines(variables: Mapping[str, str]) -> list[str]:
    """Return `export NAME=value` lines. The schema checks the names."""
    return [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]


def rank_program(plan: Plan, command: Sequence[str], *, where: Sequence[str]) -> list[str]:
    """Return what the job starts: a rank's `command`, or the agent of a node with `where`, its run and attempt."""
    if plan.chain.recovery == "job":
        return list(command)
    # the working folder may hold another relayrun; a foreign program would inherit PYTHONSAFEPATH
    safe = [] if plan.trainer == "native" else ["-P"]
    agent = [plan.fork_server[0], *safe, "-m", "relayrun.control.agent", *where]
    if not plan.outlives_nodes:
        return agent
    return [*agent, "--", *plan.host_command("relayrun.control.chain"), "orphaned", *where]


def task_command(
    plan: Plan, starter: Sequence[str], program: Sequence[str], *, setup: Path, nodes: Sequence[str] = ()
) -> list[str]:
    """Return the command that starts `program` on the ranks. `setup`: the file of `job.setup`, if any. `nodes`: nodes
    on each of which `starter` starts one step."""
    rank = Path(plan.package_root) / "launchers" / "lib" / "rank.sh"
    before = ["bash", str(setup)] if plan.setup else []
    if nodes:
        where = [word for word in program[: program.index("--")] if word.startswith(("--run-dir=", "--attempt="))]
        step_per_node = plan.host_command("relayrun.control.agent.step_per_node")
        before += [*step_per_node, *where, f"--nodes={','.join(nodes)}", "--"]
    return [*before, *starter, "bash", str(rank), *plan.command_prefix, *program]


def _quote(value: str) -> str:
    """Quote for an #SBATCH line, in which Slurm knows "..." with backslash escapes; raise ConfigError if impossible."""
    if any(ord(char) < 32 or ord(char) == 127 for char in value):
        raise ConfigError("a control character cannot stand in a line of a job script", where=repr(value))
    if value and all(char.isalnum() or char in "-_./:,@%+=[]" for char in value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
