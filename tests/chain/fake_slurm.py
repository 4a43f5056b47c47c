"""Slurm's commands as far as a chain uses them, on a queue in one JSON file: for tests in which every call may fail."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

Jobs = dict[str, dict[str, Any]]

NODES = {"n0", "n1", "n2", "n3"}
LIVE = ("PENDING", "RUNNING", "COMPLETING", "RESV_DEL_HOLD", "SUSPENDED", "SIGNALING")


class RefusedError(Exception):
    """What Slurm refuses, in the words of Slurm 22.05, where each was seen."""


class FakeSlurm:
    """Stands in for `subprocess.run` of a Slurm command. The queue outlives a process that is killed."""

    def __init__(self, file: Path, name: str) -> None:
        self.file = file
        self.name = name
        """Job name in the header of every script."""
        self.limit = 99
        """The most jobs that may be queued or run."""
        self.unchangeable = False
        """Whether nobody may change a job."""
        self.keeps_nodes = False
        """Whether nobody may change how many nodes a job asks for."""
        self.down: set[str] = set()
        """Nodes that are down."""
        self.tests_nothing = False
        """Whether `sbatch --test-only` gets no answer, which costs a busy controller more than any other question."""
        self.demanded = ""
        """The option that a job must have, but for those of the chain, in whose script it stands."""

    def jobs(self) -> Jobs:
        return json.loads(self.file.read_text()) if self.file.exists() else {}  # type: ignore[no-any-return]

    def write(self, jobs: Jobs) -> None:
        self.file.write_text(json.dumps(jobs))

    def add(self, name: str = "", *, state: str = "PENDING", **fields: Any) -> str:
        jobs = self.jobs()
        job_id = str(max(map(int, jobs), default=0) + 1)
        jobs[job_id] = {
            "name": name or self.name,
            "state": state,
            "comment": "",
            "requeue": 1,
            "delay": 0,
            "exclude": "",
            "nodes": "1",
            "after": "",
        } | fields
        self.write(jobs)
        return job_id

    def set(self, job_id: str, **fields: Any) -> None:
        jobs = self.jobs()
        jobs[job_id].update(fields)
        self.write(jobs)

    def pending(self, *, but: str = "") -> list[str]:
        """The chain's jobs that wait."""
        jobs = self.jobs().items()
        return [key for key, job in jobs if (job["state"], job["name"]) == ("PENDING", self.name) and key != but]

    def fallback_jobs(self, state: str = "PENDING") -> dict[str, str]:
        """Ids of the jobs in this state that start only if another one fails, with that one's id."""
        return {key: job["after"] for key, job in self.jobs().items() if job["after"] and job["state"] == state}

    def start_fallback_jobs(self) -> list[str]:
        """Start those whose job has failed; cancel those whose job can fail no more. Returns the ids of the first."""
        started = []
        for key, after in self.fallback_jobs().items():
            state = self.jobs()[after]["state"]
            if state not in LIVE:
                self.set(key, state="CANCELLED" if state == "COMPLETED" else "RUNNING")
                started += [key] if state != "COMPLETED" else []
        return started

    def run(self, command: list[str], lines: str = "") -> subprocess.CompletedProcess[str]:
        """Execute a command; an unknown one is an error of the test."""
        orders = [[command[0], *line.split()] for line in lines.splitlines()] or [command]
        code, said, errors = 0, "", ""
        for order in orders:  # of several it says of the last alone how it went
            code = 0
            try:
                said += self._answer(order)
            except KeyError:
                code, errors = 1, errors + "slurm_load_jobs error: Invalid job id specified\n"
            except RefusedError as error:
                code, errors = 1, errors + f"{error}\n"
        return subprocess.CompletedProcess(command, code, said, errors)

    def _answer(self, command: list[str]) -> str:
        program, *words = command
        options = dict(word[2:].partition("=")[::2] for word in words if word.startswith("--"))
        rest = [word for word in words if not word.startswith("--")]
        jobs = self.jobs()
        if program == "sbatch":
            delay = int(options.get("begin", "now+0").removeprefix("now+"))
            name = options.get("job-name") or self._header(rest[0], "job-name") or self.name
            comment, exclude = options.get("comment", ""), options.get("exclude", self._header(rest[0], "exclude"))
            self._known(exclude, "sbatch: error: Batch job submission failed: Invalid node name specified")
            if sum(job["state"] in LIVE for job in jobs.values()) >= self.limit:
                raise RefusedError("sbatch: error: QOSMaxSubmitJobPerUserLimit")
            if self.demanded and self.demanded not in options and name != self.name:
                raise RefusedError("sbatch: error: Batch job submission failed: Unspecified error")
            after = options.get("dependency", "").removeprefix("singleton").removeprefix("afternotok:")
            if after and after not in jobs:
                raise RefusedError("sbatch: error: Batch job submission failed: Job dependency problem")
            if "test-only" in options and self.tests_nothing:
                raise RefusedError("allocation failure: Socket timed out on send/recv operation")
            if set(filter(None, self._header(rest[0], "nodelist").split(","))) & set(exclude.split(",")):
                raise RefusedError("allocation failure: Invalid node name specified")
            others = NODES - set(exclude.split(","))
            asked = options.get("nodes") or self._header(rest[0], "nodes") or "1"
            needed = int(asked.partition("-")[0])
            if "test-only" in options:
                if len(others - self.down) < needed:
                    raise RefusedError("allocation failure: Requested node configuration is not available")
                return ""
            if len(others) < needed:  # one that is down may come back
                raise RefusedError(
                    "sbatch: error: Batch job submission failed: Requested node configuration is not available"
                )
            further = {"nodes": asked, "options": options}
            return self.add(name, comment=comment, delay=delay, exclude=exclude, after=after, **further) + "\n"
        if program == "squeue":
            if "steps" in options:
                return "relay\n" if options["format"] == "%j" else f"{options['jobs']}.0\n"
            live = {key: job for key, job in jobs.items() if job["state"] in LIVE or options.get("states") == "all"}
            if "jobs" in options:
                live = {options["jobs"]: live[options["jobs"]]}
            rows = [
                (key, job) for key, job in live.items() if job["name"] in options.get("name", job["name"]).split(",")
            ]
            form = options["format"]
            values = [
                {"%i": key, "%j": job["name"], "%T": job["state"], "%k": job["comment"]}
                | {"%r": job.get("reason", "None")}
                for key, job in rows
            ]
            return "".join("|".join(value[field] for field in form.split("|")) + "\n" for value in values)
        if program in ("sacct", "sacctmgr"):  # a cluster without accounting
            return ""
        if program == "sinfo":
            if options.get("format") == "%o":
                return f"{options['nodes']}\n"
            if options.get("format", "").startswith("%P|%N|%T"):
                states = {node: "down" if node in self.down else "idle" for node in sorted(NODES)}
                return "".join(f"debug*|{node}|{state}|8|16000|(null)|(null)\n" for node, state in states.items())
            return "\n".join(sorted(NODES)) + "\n" if "Node" in options else "idle\n"
        if program == "scancel":
            if "signal" not in options:
                for job in rest:
                    if jobs[job]["state"] in LIVE:
                        self.set(job, state="CANCELLED")
            elif options["signal"] == "KILL":
                self.set(rest[0].partition(".")[0], killed=True)
            return ""
        assert program == "scontrol", command
        if rest[:2] == ["show", "hostnames"]:
            return rest[2].replace(",", "\n") + "\n"
        if rest[:2] == ["show", "job"]:
            return self._shown(rest[2], jobs[rest[2]])
        if rest[:2] == ["show", "partition"]:
            return "PartitionName=debug Default=YES MinNodes=1\n"
        if rest[:2] == ["show", "reservation"]:
            return "No reservations in the system\n"
        if rest[0] == "requeue":
            if jobs[rest[1]]["state"] == "PENDING":
                raise RefusedError(f"Job is pending execution for job {rest[1]}")
            if not jobs[rest[1]]["requeue"]:
                raise RefusedError(f"Requested operation is presently disabled for job {rest[1]}")
            self.set(rest[1], state="PENDING")
            return ""
        assert rest[0] == "update", command
        fields = dict(word.partition("=")[::2] for word in rest[1:])
        job_id = fields["JobId"]
        if self.unchangeable or (self.keeps_nodes and "NumNodes" in fields):
            raise RefusedError(f"Access/permission denied for job {job_id}")
        if jobs[job_id].get("lost") and "NumNodes" in fields:
            raise RefusedError(f"The job's DB index is being set, try again in a bit for job {job_id}")
        if jobs[job_id]["state"] not in ("PENDING", "RUNNING"):
            raise RefusedError(f"Job has already finished for job {job_id}")
        if jobs[job_id]["state"] != "PENDING" and {"StartTime", "ExcNodeList", "Dependency"} & set(fields):
            raise RefusedError(f"Job is no longer pending execution for job {job_id}")
        self._known(fields.get("ExcNodeList", ""), f"Invalid node name specified for job {job_id}")
        known = {"Comment": "comment", "JobName": "name", "ExcNodeList": "exclude"}
        changes: dict[str, Any] = {known[key]: value for key, value in fields.items() if key in known}
        if "Requeue" in fields:
            changes["requeue"] = int(fields["Requeue"])
        if "Dependency" in fields:
            changes["after"] = fields["Dependency"].removeprefix("afternotok:")
        if "StartTime" in fields:
            changes["delay"] = int(fields["StartTime"].removeprefix("now+"))
        if "NumNodes" in fields:
            first, _, most = fields["NumNodes"].partition("-")
            most = most or jobs[job_id]["nodes"].rpartition("-")[2]  # a number alone is the least one
            if int(first) > int(most):
                raise RefusedError(f"Node count specification invalid for job {job_id}")
            changes |= {"nodes": f"{first}-{most}", "tasks": fields["NumTasks"]}
        self.set(job_id, **changes)
        return ""

    @staticmethod
    def _known(nodes: str, refusal: str) -> None:
        if not set(filter(None, nodes.split(","))) <= NODES:
            raise RefusedError(refusal)

    @staticmethod
    def _header(script: str, option: str) -> str:
        """An option of the script's own; one of the command line stands before it."""
        found = re.search(rf"^#SBATCH --{option}=(.*)$", Path(script).read_text(), re.M)
        return found[1] if found else ""

    @staticmethod
    def _shown(job_id: str, job: dict[str, Any]) -> str:
        minutes, seconds = divmod(48 * 60 + 32 + job.get("seconds", 3600), 60)
        hours, minutes = divmod(4 * 60 + minutes, 60)
        return (
            f"JobId={job_id} JobName={job['name']} JobState={job['state']} Requeue={job['requeue']} "
            f"TimeLimit={job.get('limit', '01:00:00')} Partition={job.get('partition', 'debug')} "
            f"StartTime=2026-11-21T04:48:32 EndTime=2026-11-21T{hours:02}:{minutes:02}:{seconds:02} "
            f"NodeList={job.get('lost', 'n0')} BatchHost=n0 Reservation={job.get('reservation', '(null)')} "
            f"NumNodes={job['nodes']} ExcNodeList={job['exclude'] or '(null)'} Comment={job['comment'] or '(null)'}\n"
        )
