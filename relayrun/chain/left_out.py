"""The nodes that the next job leaves out: those that a person excluded, and bad ones as far as others replace them.

A job that leaves out more nodes than that waits for ever, and Slurm 22.05 gives as its reason `BadConstraints`,
`ReqNodeNotAvail` or nothing at all. A node that failed before is better than no node.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from relayrun.chain import nodes
from relayrun.chain.log import log
from relayrun.rundir.plan import Plan
from relayrun.rundir.run import Run
from relayrun.scheduler.base import Job, NodeControl, Scheduler


def options_without(run: Run, plan: Plan, scheduler: Scheduler, options: Mapping[str, str]) -> dict[str, str]:
    """A job's options for the next one, which leaves out the nodes that are bad now. Raises SchedulerError."""
    strikes = nodes.read_strikes(run)
    if not strikes or scheduler.nodes is None:
        return dict(options)
    wished = plan.sbatch_options.get("exclude")
    by_hand = set(scheduler.nodes.expand(options["exclude"])) if "exclude" in options else set()
    by_hand -= {strike.node for strike in strikes}  # put there by us, and strikes expire
    by_hand |= set(scheduler.nodes.expand(wished)) if wished else set()
    known = scheduler.nodes.known()  # an unknown one would make sbatch fail
    by_hand &= known
    return _excluding(by_hand | _replaceable(run, plan, scheduler.nodes, options, by_hand, known), options)


def exclude(run: Run, plan: Plan, control: NodeControl, job: Job) -> None:
    """Let a queued job leave out the nodes that are bad now, too. Raises SchedulerError."""
    given = set(control.expand(job.options["exclude"])) if "exclude" in job.options else set()
    if bad := _replaceable(run, plan, control, job.options, given, control.known()):
        control.exclude(job.id, sorted(given | bad))  # nothing is taken away: it may be a person's wish
        log(f"job {job.id} leaves out {', '.join(sorted(bad))}; see {run.strikes}")


def _replaceable(
    run: Run, plan: Plan, control: NodeControl, options: Mapping[str, str], given: set[str], known: set[str]
) -> set[str]:
    """Bad nodes beyond those given, the worst ones where there are not enough others for all of them."""
    excluded = nodes.excluded(nodes.read_strikes(run), nodes=plan.nodes, now=time.time())
    bad = [node for node in excluded if node in known - given]
    count = len(bad)
    while count and not control.suffice(plan, run.job_script, _excluding(given | set(bad[:count]), options)):
        count //= 2
    if kept := bad[count:]:
        log(f"without {', '.join(kept)} this job has too few nodes that are up; so it may run there; see {run.strikes}")
    return set(bad[:count])


def _excluding(excluded: set[str], options: Mapping[str, str]) -> dict[str, str]:
    others = {name: value for name, value in options.items() if name != "exclude"}
    return others | ({"exclude": ",".join(sorted(excluded))} if excluded else {})
