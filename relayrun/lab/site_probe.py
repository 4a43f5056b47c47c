"""`relayrun site probe`: what a cluster does with jobs, measured by a job of two minutes, and written to its site file.

`site_probe.sh` is the job. The facts are the site's `probed`: `relayrun check` warns of those that a run meets.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from relayrun.config.compose.sites import OPTIONS_FROM_ENVIRONMENT, sbatch_options_from_environment
from relayrun.control.chain_state import CLOCK_TOLERANCE
from relayrun.control.scheduler.base import Job
from relayrun.control.scheduler.error_lines import first_failure
from relayrun.control.scheduler.factory import slurm_scheduler
from relayrun.errors import SchedulerError
from relayrun.files import write_atomic
from relayrun.slurmtime import parse_time

JOB_NAME = "relayrun-site-probe"
ORDER_SECONDS = 30.0  # until an order that Slurm accepted shows in the job


class SiteProbe:
    """One probe of a cluster. `queue`: seconds for which its job may wait; `folder`: one that all nodes see."""

    def __init__(self, cluster: Mapping[str, Any], folder: Path, *, queue: float) -> None:
        self.slurm = slurm_scheduler(patience=30.0)
        self.cluster, self.folder, self.queue = cluster, folder, queue
        self.script = Path(__file__).with_name("site_probe.sh")
        self.facts: dict[str, list[str]] = {"refused": [], "denied": []}
        self._job_id = ""

    def run(self) -> dict[str, list[str]]:
        """Queue the job, measure, and cancel it; return the facts. Raises SchedulerError."""
        options = self._accepted_options()
        command = [f"--job-name={JOB_NAME}", "--hold", "--requeue", f"--output={self.folder}/job.log"]
        command += [f"--{name}={value}" for name, value in options.items()]
        command += [str(self.script), str(self.folder), *self.cluster.get("modules", [])]
        self._job_id = self.slurm.submit_once(command, name=JOB_NAME)
        try:
            self.facts["rewritten"] = [each for each in options if _differs(self._job().options, each, options[each])]
            self._order("release", lambda job: "Held" not in self.slurm.field(job.id, "%r"))
            self._wait(lambda _: (self.folder / "done").exists(), self.queue)
            self._read_job()
            self._order("requeue", lambda job: job.restarts > 0)
            if not self.facts["denied"]:
                self._order("hold", lambda job: "Held" in self.slurm.field(job.id, "%r"))
        finally:
            self.slurm.cancel(self._job_id)
        return {name: list(dict.fromkeys(found)) for name, found in self.facts.items() if found}

    def _accepted_options(self) -> dict[str, str]:
        """Return the options of the job, without those that the site refuses; `refused` names them."""
        job = self.cluster.get("job", {})
        known: dict[str, Any] = {**self.slurm.default_options(), **job.get("sbatch", {})}
        known |= {name: job[name] for name in OPTIONS_FROM_ENVIRONMENT if job.get(name)}
        known |= sbatch_options_from_environment(os.environ)
        options = {name: str(value) for name, value in known.items() if value} | {"nodes": "2", "time": "2"}
        if self._refusal(options) and not self._refusal(options | {"nodes": "1"}):
            options["nodes"] = "1"
        while words := self._refusal(options):
            rest = {name: {each: options[each] for each in options if each != name} for name in options}
            if not (harmful := [name for name in rest if name in known and not self._refusal(rest[name])]):
                raise SchedulerError(words, hint="set the job section of the site file, or SBATCH_ACCOUNT and the like")
            self.facts["refused"].append(harmful[0])
            options = rest[harmful[0]]
        return options

    def _refusal(self, options: Mapping[str, str]) -> str:
        try:
            self.slurm.test(self.script, options)
        except SchedulerError as error:
            return error.message
        return ""

    def _job(self) -> Job:
        job = self.slurm.query(self._job_id)
        if job is None or not job.live:
            state = "forgotten" if job is None else job.state
            raise SchedulerError(f"the job of the probe, {self._job_id}, is {state}")
        return job

    def _order(self, order: str, has_effect: Callable[[Job], bool]) -> None:
        """Give one of Slurm's orders to the job; `denied` names it if it has no effect."""
        try:
            self.slurm.order_job(self._job_id, order)
            self._wait(has_effect, ORDER_SECONDS)
        except SchedulerError:
            self.facts["denied"].append(order)

    def _wait(self, done: Callable[[Job], bool], seconds: float) -> None:
        until = time.monotonic() + seconds
        while not done(job := self._job()):
            if time.monotonic() > until:
                reason = self.slurm.field(job.id, "%r")
                raise SchedulerError(f"job {job.id} is {job.state} ({reason}) after {seconds:.0f} s")
            time.sleep(1)

    def _read_job(self) -> None:
        said: dict[str, list[str]] = {}
        for line in (self.folder / "facts").read_text(errors="replace").splitlines():
            name, _, value = line.partition(" ")
            said.setdefault(name, []).append(value)
        now, clocks = float(said["controller"][0] or "nan"), [row.split() for row in said.get("clock", [])]
        self.facts |= {name: said.get(name, []) for name in ("modules", "connection_ports", "variables")}
        self.facts["clocks"] = [node for node, clock in clocks if abs(float(clock) - now) > CLOCK_TOLERANCE / 10]
        self.facts["misplaced"] = [each for each in ("by-name", "by-number") if said.get(each) != said["batch_host"]]
        text = (self.folder / "cancelled").read_text(errors="replace")
        if first_failure(text, []) is not None:  # a node would be blamed for a cancelled step
            self.facts["cancelled_step"] = text.splitlines()


def _differs(found: Mapping[str, str], name: str, asked: str) -> bool:
    """True if Slurm shows another value; of an option that a job does not show nothing is known."""
    shown = found.get(name, asked)
    same = parse_time(shown) == parse_time(asked) if name == "time" else asked in (shown, shown.partition("-")[0])
    return not same  # of nodes it is `2-2` while the job waits


def write_facts(file: Path, facts: Mapping[str, list[str]]) -> None:
    """Write `probed` into a site file, in the place of that of an earlier probe; the rest stays as it is."""
    text = re.sub(r"^probed:.*\n(?:[ \t-].*\n?|\n(?=[ \t-]))*", "", file.read_text(encoding="utf-8"), flags=re.M)
    write_atomic(file, text.rstrip("\n") + "\n" + yaml.safe_dump({"probed": dict(facts)}, width=110))
