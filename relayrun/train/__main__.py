"""Training program of one rank: `python -m relayrun.train --run-dir R --attempt N`.

Exit codes: 0 for the outcomes done, saved and exit; 3 for a fatal error, which every attempt would meet; 1 otherwise.
Rank 0 writes `outcome.json` last. It is missing with code 1 and if another rank had the fatal error, whose failure
record says so. On a node without an agent its first rank checks the node before training.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import logging
import os
import re
import sys
import time
import traceback
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from relayrun.control.agent import node_facts
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import AttemptOutcome, RankFailure
from relayrun.control.rundir.run import Run
from relayrun.errors import ConfigError, FatalTrainingError, RelayrunError, log_to_stderr, warned
from relayrun.terminal import inert
from relayrun.train import megatron_versions
from relayrun.train.reporting import liveness
from relayrun.train.reporting.liveness import NodeHeartbeatWriter, RankTimings, is_first_of_node, node_name
from relayrun.train.requests import SignalFlag, dump_stacks_on_request
from relayrun.trust import refuse_untrusted

if TYPE_CHECKING:
    from relayrun.config.compose.schema import RunConfig

log = logging.getLogger(__name__)
FATAL_EXIT_CODE = 3
PROGRAM_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    NotImplementedError,
    SyntaxError,
    TypeError,
    ValueError,
)
"""Errors of the code or its input. Before the first step, where nothing is computed yet, every attempt meets them.

Not listed: errors that a node, a device, a file system or another rank can cause (OSError, ImportError, RuntimeError).
"""
DEVICE_ASSERTION = re.compile(r"\bdevice|\bcuda\b", re.I)
"""Matches torch's assertions about the GPUs of a node."""
TORN_FILE_ERRORS = (UnicodeError, json.JSONDecodeError)
"""Kinds of ValueError that a file system outage causes, too."""
PROGRAM_MODULES = ("relayrun.config.compose.resolve", "relayrun.train.loop", "relayrun.train.reporting.debugging")
"""Modules that `main` imports after its first heartbeat."""
FAILURE_TEXT_LIMIT = 2000
"""Characters of an error that a failure record keeps."""


def main(flag: SignalFlag) -> int:
    """Train one attempt on this rank until it leaves; return the exit code, see the module.

    An error of the attempt is printed and becomes a failure record, and a fatal outcome if every attempt would meet it.
    """
    parser = argparse.ArgumentParser(prog="python -m relayrun.train", description="Train one attempt on this rank.")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--base-iteration", type=int, help="of a later restart, which starts from another checkpoint")
    parser.add_argument("--base-path", help="the folder of that checkpoint; none: the beginning")
    arguments = parser.parse_args()
    began = time.time()
    run = Run(arguments.run_dir.absolute())
    attempt = run.attempt(arguments.attempt)
    rank, node = int(os.environ["RANK"]), node_name(os.environ)
    dump_stacks_on_request(run.stacks(attempt.number) / f"rank-{rank:04}.txt")
    base = 0
    heartbeat: NodeHeartbeatWriter | None = None
    try:
        begin = attempt.read_begin()
        if begin is None:
            raise RelayrunError("this attempt has not begun", where=attempt.begin)
        if arguments.base_iteration is not None:
            begin = replace(begin, base_iteration=arguments.base_iteration, base_path=arguments.base_path)
        base = begin.base_iteration
        judges = is_first_of_node() and not liveness.has_agent()  # else the agent's server has judged the code
        load = Plan.load_before_ranks if judges else Plan.load_in_job
        plan = load(run) if run.plan.exists() else None  # else started by hand
        if plan is not None:
            refuse_untrusted(run.path, [f"config/{run.config_revision(begin.config_revision).name}"])
        timings = RankTimings(begin)
        heartbeat = NodeHeartbeatWriter(
            folder=attempt.heartbeats,
            node=node,
            active=is_first_of_node(),
            iteration=base,
            timings=timings,
            rare=liveness.memory_folder() is not None,
        )
        heartbeat.beat()
        if plan is not None and judges:
            check_node_at_start(plan, attempt, node)
        quiet_libraries()
        megatron_versions.check_version()
        # slow imports follow; nsys must wrap the process before torch is imported
        from relayrun.train.reporting import debugging

        config = read_attempt_config(run.config_revision(begin.config_revision))
        debug = run.debug_of(attempt.number)
        debugging.enter_nsys(config.debug, debug / "profile", rank)
        if config.debug.log_nccl:
            debugging.log_nccl(debug / "nccl", node=node, rank=rank)
        from relayrun.train.loop import train_attempt

        debugging.write_surroundings(run, begin, config, rank=rank, node=node, first_of_node=is_first_of_node())
        train_attempt(run, begin, config, flag, timings, heartbeat, process_began=began)
    except BaseException as error:
        if isinstance(error, RelayrunError):
            print(inert(f"error: {error}"), file=sys.stderr)
        else:
            traceback.print_exc()
        fatal = fails_on_every_attempt(error, before_first_step=heartbeat is None or heartbeat.phase == "start")
        record_failure(attempt, rank, node, error, repeats=fatal)
        if fatal and rank == 0:
            reason = str(error) if isinstance(error, RelayrunError) else f"{type(error).__name__}: {error}"
            saved = [commit.iteration for commit in attempt.read_commits()]
            outcome = AttemptOutcome(
                outcome="fatal", reason=reason, iteration=max(saved, default=base), time=time.time()
            )
            outcome.write(attempt.outcome)
        return FATAL_EXIT_CODE if fatal else 1
    return 0


@functools.cache
def read_attempt_config(revision: Path) -> RunConfig:
    """Read a config revision, which never changes; a fork server has read it for its ranks."""
    from relayrun.config.compose import resolve

    return resolve.require_native(resolve.read_resolved_config(revision))


def quiet_libraries() -> None:
    """Suppress warnings of torch and megatron-core for their own developers, at every import, config and save.

    PYTHONWARNINGS can enable them.
    """
    for kind in (FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=kind, module=r"(torch|megatron)\.")
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")


def import_program_modules() -> None:
    """Import PROGRAM_MODULES, for a process that forks ranks. Computes nothing."""
    quiet_libraries()
    megatron_versions.check_version()
    for module in PROGRAM_MODULES:
        importlib.import_module(module)


class UnhealthyNode(RelayrunError):
    """Ranks cannot train on this node; they may on another node."""


def check_node_at_start(plan: Plan, attempt: Attempt, node: str) -> None:
    """Record the findings about this node. Raises UnhealthyNode if ranks cannot train on it."""
    if plan.chain.node_health == "off":
        return
    facts = node_facts.gather_facts(plan, attempt.path)
    sick = ""
    for found in node_facts.findings_of_facts(node, facts, plan):
        seen = replace(found, time=time.time(), action="ended" if found.hard else "warned")
        log.warning("%s", seen.told)
        with warned(log, "that is not on record"):
            seen.append(attempt.node_health)
        sick = sick or (found.words if found.hard else "")
    if sick:
        raise UnhealthyNode(
            f"ranks cannot train on {node}: {sick}",
            hint="the next job leaves the node out; chain.node_health and chain.node_health_limits decide what is "
            "looked for",
        )


def fails_on_every_attempt(error: BaseException, *, before_first_step: bool) -> bool:
    """True if every attempt would meet this error on any node."""
    if isinstance(error, (FatalTrainingError, ConfigError)):
        return True
    if isinstance(error, RelayrunError) and error.__cause__ is not None:  # a user's hook failed in this way
        return fails_on_every_attempt(error.__cause__, before_first_step=before_first_step)
    node = isinstance(error, TORN_FILE_ERRORS) or (
        isinstance(error, AssertionError) and DEVICE_ASSERTION.search(str(error))
    )
    return before_first_step and isinstance(error, PROGRAM_ERRORS) and not node


def record_failure(attempt: Attempt, rank: int, node: str, error: BaseException, *, repeats: bool = False) -> None:
    """Write the failure record of this rank; the earliest of all ranks has the cause, others fail after it."""
    words = f"{type(error).__name__}: {error}"[:FAILURE_TEXT_LIMIT]
    failure = RankFailure(rank=rank, node=node, error=words, time=time.time(), repeats=repeats)
    with warned(log, "failure not recorded"):
        attempt.failures.mkdir(exist_ok=True)
        failure.write(attempt.failures / f"rank-{rank:04}.json")


if __name__ == "__main__":
    log_to_stderr()
    flag = SignalFlag()
    flag.install()
    code = main(flag)
    sys.stdout.flush()
    sys.stderr.flush()
    # do not wait for threads and process groups: a failed rank must end, so that the others are ended
    os._exit(code)
