"""Slurm's commands on a controller in memory, with the words and the formats of Slurm 22.05."""

from __future__ import annotations

import signal
import subprocess
from typing import Any

from relayrun.slurmtime import parse_time

from .controller import FIELDS, USER, Controller, MemoryJob, RefusedError, header_of

AWAY = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
LOST = "error: Socket timed out on send/recv operation"
UNKNOWN = "slurm_load_jobs error: Invalid job id specified"


class Commands:
    """Answers the commands of one user."""

    def __init__(self, slurm: Controller, *, user: int = USER) -> None:
        self.slurm, self.user = slurm, user

    def run(self, command: list[str], **more: Any) -> subprocess.CompletedProcess[str]:
        """Stand in for `subprocess.run`."""
        slurm = self.slurm
        slurm.clock.only_the_program()
        if (running := slurm.clock.running) is not None and (seconds := slurm.latency()):
            running.wait(seconds)
        if command[0] not in ("sbatch", "squeue", "scontrol", "scancel", "sacct", "sinfo", "sdiag"):
            raise FileNotFoundError(2, "No such file or directory", command[0])
        if slurm.clock.now < slurm.away_until and command[:3] != ["scontrol", "show", "hostnames"]:
            return subprocess.CompletedProcess(command, 1, "", AWAY)
        lines = [[command[0], *line.split()] for line in (more.get("input") or "").splitlines()] or [list(command)]
        code, said, errors = 0, "", ""
        for line in lines:
            code, text, words = self._one(line)
            said, errors = said + text, errors + words
        if slurm.lost_answers and slurm.chance() < slurm.lost_answers:
            slurm.clock.note(f"the answer to {' '.join(command[:3])} is lost")
            return subprocess.CompletedProcess(command, 1, "", LOST)
        return subprocess.CompletedProcess(command, code, said, errors)

    def _one(self, line: list[str]) -> tuple[int, str, str]:
        try:
            return 0, getattr(self, line[0])(*self._parts(line[1:])), ""
        except KeyError:
            return 1, "", f"{UNKNOWN}\n"
        except RefusedError as error:
            return 1, "", f"{error}\n"

    @staticmethod
    def _parts(words: list[str]) -> tuple[dict[str, str], list[str]]:
        options: dict[str, str] = {}
        for number, word in enumerate(words):
            if not word.startswith("--"):
                return options, words[number:]
            name, _, value = word[2:].partition("=")
            options[name] = value
        return options, []

    def _job(self, job_id: str) -> MemoryJob:
        return self.slurm.jobs[int(job_id)]

    def sbatch(self, options: dict[str, str], rest: list[str]) -> str:
        if "test-only" in options:
            self._test(options, rest[0])
            return ""
        asked = {name: value for name, value in options.items() if name not in ("parsable", "kill-on-invalid-dep")}
        return f"{self.slurm.submit(rest[0], asked, rest[1:]).id}\n"

    def _test(self, options: dict[str, str], script: str) -> None:
        options = header_of(script) | options
        excluded = set(self.slurm.expand(options.get("exclude", "")))
        up = {name for name, state in self.slurm.nodes.items() if state != "down"}
        if len(up - excluded) < int(options.get("nodes", "1").partition("-")[0]):
            raise RefusedError("allocation failure: Requested node configuration is not available")

    def squeue(self, options: dict[str, str], _rest: list[str]) -> str:
        if "steps" in options:
            work = self._job(options["jobs"]).work
            if options["format"] == "%j":
                return "" if work is None else "relayrun-guard\n" * sum(not step.over for step in work.steps)
            return f"{options['jobs']}.0\n" if work is not None else ""
        found = [job for job in self.slurm.jobs.values() if job.live or options.get("states") == "all"]
        if "jobs" in options:
            found = [self._job(options["jobs"])]
        if options.get("states") == "PENDING":
            found = [job for job in found if job.state == "PENDING"]
        names = options.get("name")
        found = [job for job in found if names is None or job.name in names.split(",")]
        return "".join(self._row(job, options["format"]) + "\n" for job in found)

    def _row(self, job: MemoryJob, form: str) -> str:
        left = 0.0 if job.start is None else self.slurm.end_of(job) - self.slurm.clock.now
        values = {
            "%i": str(job.id),
            "%j": job.name,
            "%T": job.state,
            "%k": job.comment or "(null)",
            "%r": job.reason,
            "%x": job.options.get("exclude") or "(null)",
            "%L": f"0:{int(left) % 60:02}" if left < 60 else "9:00",
            "%b": "N/A",
        }
        for name, value in values.items():
            form = form.replace(name, value)
        return form

    def sacct(self, options: dict[str, str], _rest: list[str]) -> str:
        if not self.slurm.accounting:
            raise RefusedError("Slurm accounting storage is disabled")
        job = self.slurm.accounts[int(options["jobs"])]
        state = "RUNNING" if job.state == "COMPLETING" else job.state
        return f"CANCELLED by {job.cancelled_by}\n" if job.cancelled_by is not None else f"{state}\n"

    def sinfo(self, options: dict[str, str], _rest: list[str]) -> str:
        nodes = self.slurm.expand(options["nodes"]) if "nodes" in options else [*self.slurm.nodes]
        states = {"idle": "idle", "alloc": "allocated", "down": "down*"}
        rows = [(name, states[self.slurm.nodes[name]]) for name in nodes]
        form = options["format"].replace("%o", "127.0.0.1")
        return "".join(form.replace("%N", name).replace("%T", state) + "\n" for name, state in rows)

    def sdiag(self, _options: dict[str, str], _rest: list[str]) -> str:
        return f"sdiag output at Wed May 18 03:33:20 2033 ({self.slurm.clock.now:.0f})\n"

    def scancel(self, options: dict[str, str], rest: list[str]) -> str:
        job = self._job(rest[0].partition(".")[0])
        if "signal" not in options:
            self.slurm.cancel(job, self.user)
        elif job.work is not None:
            job.work.signal(signal.Signals[f"SIG{options['signal']}"], batch=False, steps=True)
        return ""

    def scontrol(self, _options: dict[str, str], rest: list[str]) -> str:
        rest = [word for word in rest if not word.startswith("--")]
        match rest:
            case ["show", "hostnames", nodes]:
                return "\n".join(self.slurm.expand(nodes)) + "\n"
            case ["show", "job", job_id]:
                return self._shown(self._job(job_id))
            case ["show", "partition"]:
                return "PartitionName=main Default=YES MinNodes=1\n"
            case ["show", "config"]:
                return "KillWait                = 30 sec\nMaxArraySize            = 1001\n"
            case ["show", "reservation", *names]:
                if set(names) - self.slurm.reservations.keys():
                    raise RefusedError(f"Reservation {names[0]} not found")
                ends = {name: self.slurm.reservations[name] for name in names or self.slurm.reservations}
                if not names:
                    for name, (begin, end) in self.slurm.maintenance.items():
                        nodes = ",".join(self.slurm.nodes)
                        ends[f"{name} StartTime={begin:.0f} Nodes={nodes} Flags=MAINT"] = end
                rows = [f"ReservationName={name} EndTime={end:.0f}\n" for name, end in ends.items()]
                return "".join(rows) or "No reservations in the system\n"
            case ["requeue", job_id]:
                if int(job_id) not in self.slurm.jobs:
                    raise RefusedError(f"Invalid job id specified for job {job_id}")
                self.slurm.order_requeue(self._job(job_id))
            case ["release", job_id]:
                self._job(job_id).held = ""
                self.slurm.kick()
            case ["hold", job_id]:
                self._job(job_id).held = "JobHeldUser"
            case ["update", *changes]:
                fields = dict(word.partition("=")[::2] for word in changes)
                self._update(self._job(fields.pop("JobId")), fields)
            case _:
                raise RefusedError(f"invalid keyword: {' '.join(rest[:2])}")
        return ""

    def _update(self, job: MemoryJob, fields: dict[str, str]) -> None:
        slurm = self.slurm
        if slurm.closed and self.user:
            raise RefusedError(f"Access/permission denied for job {job.id}")
        if not job.live or (job.state == "COMPLETING" and job.final != "PENDING"):
            raise RefusedError(f"Job has already finished for job {job.id}")
        if not job.waits and job.state != "COMPLETING" and {"StartTime", "ExcNodeList", "Dependency"} & set(fields):
            raise RefusedError(f"Job is no longer pending execution for job {job.id}")
        slurm.kick()
        for name, value in fields.items():
            self._change(job, name, value)

    def _change(self, job: MemoryJob, name: str, value: str) -> None:
        if name == "Requeue":
            job.requeue = value == "1"
        elif name == "Comment":
            job.comment = value
        elif name == "JobName":
            job.name = value
        elif name == "Dependency":
            job.singleton = value == "singleton"
            job.after = int(value[11:]) if value.startswith("afternotok:") else 0
        elif name == "StartTime":
            job.begin = self.slurm.clock.now + float(value.removeprefix("now+"))
        elif name == "NumNodes":
            job.options["nodes"] = value
        elif name == "NumTasks":
            pass
        elif name == "TimeLimit":
            if self.user and parse_time(value) > job.limit:
                raise RefusedError(f"Access/permission denied for job {job.id}")
            job.options["time"] = value
        else:
            option = next(option for option, field in FIELDS.items() if field == name)
            nodes = self.slurm.expand(value) if name == "ExcNodeList" else []
            if not set(nodes) <= set(self.slurm.nodes):
                raise RefusedError(f"Invalid node name specified for job {job.id}")
            job.options[option] = ",".join(nodes) if name == "ExcNodeList" else value

    def _shown(self, job: MemoryJob) -> str:
        start = job.start if job.start is not None else job.begin or None
        end = job.end if job.end is not None else None if job.start is None else self.slurm.end_of(job)
        fields = {
            "JobId": job.id,
            "JobName": job.name,
            "UserId": "user(1000)",
            "GroupId": "user(1000)",
            "Account": job.options.get("account"),
            "QOS": job.options.get("qos"),
            "JobState": job.state,
            "Reason": job.reason,
            "Dependency": None,
            "Requeue": int(job.requeue),
            "Restarts": job.restarts,
            "BatchFlag": 1,
            "ExitCode": f"{job.exit_code}:0",
            "TimeLimit": job.options["time"],
            "SubmitTime": f"{job.submit:.0f}",
            "EligibleTime": f"{job.submit:.0f}",
            "StartTime": "Unknown" if start is None else f"{start:.0f}",
            "EndTime": "Unknown" if end is None else f"{end:.0f}",
            "PreemptTime": "None" if job.preempted is None else f"{job.preempted:.0f}",
            "Partition": job.options.get("partition"),
            "ExcNodeList": job.options.get("exclude"),
            "NodeList": ",".join(job.nodes),
            "BatchHost": job.batch_host,
            "NumNodes": job.options["nodes"],
            "CPUs/Task": job.options.get("cpus-per-task"),
            "Features": job.options.get("constraint"),
            "Reservation": job.options.get("reservation"),
            "Network": None,
            "Command": job.script,
            "WorkDir": "/",
            "Comment": job.comment,
            "StdErr": "/dev/null",
            "StdIn": "/dev/null",
            "StdOut": "/dev/null",
        }
        return " ".join(f"{name}={'(null)' if value in (None, '') else value}" for name, value in fields.items()) + "\n"
