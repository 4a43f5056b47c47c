"""A list of fault tests in a folder, its cost estimate and its report as text, JSON and Markdown.

FOLDER/drill.json          the cluster when the session began
FOLDER/results/NAME.json   the result of a test; a finished test is not repeated
FOLDER/runs/NAME           the run directory of a test
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from relayrun.config.compose import resolve
from relayrun.control.chain.jobs import cancel_chain
from relayrun.errors import ConfigError, InputError, RelayrunError, did_you_mean
from relayrun.files import read_json, unused_name, write_json
from relayrun.lab.faults.experiment import FaultResult, FaultSite, run_fault
from relayrun.lab.faults.table import FAULTS, FAULTS_BY_NAME, UNDISTURBED, Fault
from relayrun.leftovers import exclusive_lock, open_lock
from relayrun.submit import submission
from relayrun.submit.check.existing_run import SubmitIntent
from relayrun.terminal import parse_column_header

CHECKED_CONFIG_NAME = "check"
"""Name of a run config that is only checked: a run of the drill may exist already."""
TESTS = {UNDISTURBED.name: UNDISTURBED} | FAULTS_BY_NAME
"""All tests by name, the undisturbed run first."""
MINUTES_PER_JOB = 3.0
"""Estimated minutes of a job, its start included."""
LOSS_COLUMNS = ("seconds lost|n", "steps lost|n")
TABLE_COLUMNS = ("fault", "what happened", "how attempts ended", *LOSS_COLUMNS, "bit for bit", "verdict")


def select_faults(names: str) -> list[Fault]:
    """Parse `all`, or names separated by commas. Raises ConfigError for an unknown name."""
    if names == "all":
        return list(FAULTS)
    wanted = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    known = f"there are: {', '.join(FAULTS_BY_NAME)}; or all"
    if not wanted:
        raise ConfigError("no fault is named", where="--faults", hint=known)
    for name in wanted:
        if name not in FAULTS_BY_NAME:
            hint = did_you_mean(name, FAULTS_BY_NAME) or known
            raise ConfigError(f"unknown fault {name!r}", where="--faults", hint=hint)
    return [FAULTS_BY_NAME[name] for name in wanted]


class FaultSession:
    """A drill in a folder."""

    def __init__(self, site: FaultSite, faults: Sequence[Fault]) -> None:
        self.site = site
        self.folder = site.folder
        self.faults = list(faults)

    def result(self, name: str) -> FaultResult | None:
        """Return the result of a test, None if it is not done. Raises RunDirError if the record is damaged."""
        return FaultResult.read(self.folder / "results" / f"{name}.json")

    def results(self) -> list[FaultResult]:
        """Return the results in the order of the table, the undisturbed run first."""
        return [found for name in TESTS if (found := self.result(name)) is not None]

    def failed_results(self) -> list[FaultResult]:
        return [result for result in self.results() if not result.passed]

    def pending_tests(self) -> list[str]:
        """Return the names of requested tests without a result, the undisturbed run first."""
        names = [each.name for each in self.faults if self.result(each.name) is None]
        reference = self.result(UNDISTURBED.name)
        return [UNDISTURBED.name, *names] if names and (reference is None or not reference.passed) else names

    def cost(self, names: Sequence[str]) -> str:
        """Return the estimated cost of these tests, as one sentence."""
        jobs, site = sum(len(TESTS[name].causes) for name in names), self.site
        minutes = jobs * (MINUTES_PER_JOB + site.step_seconds * 30 / 60)
        return (
            f"{len(names)} runs of a tiny model, one after the other: {jobs} jobs, about {minutes * site.nodes:.0f} "
            f"node minutes (at most {jobs * site.nodes * site.minutes}) and {minutes:.0f} minutes beside the queue"
        )

    def check(self) -> None:
        """Raise the errors of a submit before anything is queued; ConfigError for too few nodes or ranks."""
        known = len(self.site.slurm.nodes.all_nodes())
        if known < self.site.nodes:
            raise ConfigError(f"the cluster has {known} nodes, and the drill needs {self.site.nodes}", where="--nodes")
        if self.site.ranks < 2:
            hint = "--nodes 2, or job.ntasks_per_node in the cluster's file"
            raise ConfigError("a drill needs two ranks: faults of one, while another waits", where="--nodes", hint=hint)
        self._check_same_cluster()
        config = resolve.load_run_config(self.site.write_config(CHECKED_CONFIG_NAME, None))
        submission.check_submission(config, intent=SubmitIntent()).findings.raise_errors()

    def _check_same_cluster(self) -> None:
        """Raise InputError if the folder holds a drill with another cluster or number of nodes."""
        path = self.folder / "drill.json"
        asked: dict[str, Any] = {"cluster": dict(self.site.cluster), "nodes": self.site.nodes}
        if not path.exists():
            write_json(path, asked)
        elif read_json(path) != asked:
            hint = "name another one: --directory DIR"
            raise InputError("this folder has a drill with another cluster or other nodes", where=path, hint=hint)

    def forget_results(self) -> None:
        """Rename the results of the requested tests, so that they are repeated."""
        for fault in self.faults:
            _rename_aside(self.folder / "results" / f"{fault.name}.json", "before")

    def run_pending(self) -> None:
        """Do the tests without a result. Raises RelayrunError if the undisturbed run fails."""
        tell = self.site.tell
        for name in self.pending_tests():
            self.clear(name)
            tell(f"{time.strftime('%H:%M:%S')} {name} ...")
            result = run_fault(self.site, TESTS[name])
            result.write(self.folder / "results" / f"{name}.json")
            passed = f"passed ({', '.join(result.seen)}), {result.seconds:.0f} s"
            verdict = passed if result.passed else f"FAILED: {'; '.join(result.wrong)}"
            tell(f"{time.strftime('%H:%M:%S')} {name}: {verdict}")
            if name == UNDISTURBED.name and not result.passed:
                words = f"the undisturbed run failed, so no fault is tried: {'; '.join(result.wrong)}"
                hint = f"relayrun logs {result.run_dir}"
                raise RelayrunError(words, where=result.run_dir, hint=hint)

    def clear(self, name: str) -> None:
        """Clean up a test of a killed drill: cancel its jobs, rename its run directory."""
        run = self.site.run(name)
        if run.plan.exists():
            if not run.stop.exists():
                said = cancel_chain(run, self.site.slurm, user="the drill")
                self.site.tell(f"{name}: left by a drill that was stopped: {said}")
            _rename_aside(run.path, "stopped")

    def locked(self) -> AbstractContextManager[None]:
        """Keep other processes from doing tests in this folder. Raises InputError if one does."""
        (self.folder / "results").mkdir(parents=True, exist_ok=True)
        refusal = InputError("another drill is at work here", where=self.folder)
        return exclusive_lock(open_lock(self.folder / "lock"), refusal)


def _rename_aside(path: Path, suffix: str) -> None:
    if path.exists():
        os.rename(path, unused_name(path.parent, f"{path.name}.{suffix}"))


def session_as_json(session: FaultSession) -> dict[str, Any]:
    return {
        "cluster": session.site.cluster.get("name", ""),
        "nodes": session.site.nodes,
        "directory": str(session.folder),
        "passed": not session.failed_results(),
        "rows": [asdict(result) for result in session.results()],
        "not_done": session.pending_tests(),
    }


def markdown_report(session: FaultSession) -> str:
    """Return a drill as Markdown."""
    lines = [f"# {session_headline(session)}", "", *(f"{fact}  " for fact in session_facts(session)), ""]
    heads = [parse_column_header(name)[0] for name in TABLE_COLUMNS]
    rows = [heads, ["---"] * len(heads), *table_rows(session)]
    lines += [f"| {' | '.join(map(_markdown_cell, cells))} |" for cells in rows]
    for result in session.failed_results():
        lines += ["", f"## {result.name}", "", *(f"- {_markdown_cell(words)}" for words in result.wrong)]
        lines += ["", f"Run directory: `{result.run_dir}`"]
    return "\n".join(lines) + "\n"


def session_headline(session: FaultSession) -> str:
    """Return the number of passed faults, in one line."""
    done = [result for result in session.results() if result.name != UNDISTURBED.name]
    good = sum(result.passed for result in done)
    return f"drill on {session.site.cluster.get('name', 'a cluster')}: {good} of {len(done)} faults passed"


def session_facts(session: FaultSession) -> list[str]:
    """Return further facts, one sentence each."""
    used = sum(result.node_seconds for result in session.results()) / 60
    found = [
        f"{time.strftime('%Y-%m-%d %H:%M')}; jobs of {session.site.nodes} nodes with {session.site.ranks} ranks; "
        f"{used:.1f} node minutes were used.",
        "Seconds lost are those of a node: lost work, later starts, and the waits before them, the queue included.",
    ]
    if waiting := session.pending_tests():
        found.append(f"Not done yet: {', '.join(waiting)}.")
    return found


def table_rows(session: FaultSession) -> list[list[str]]:
    """Return the cells of the table."""
    return [
        [
            result.name,
            result.what,
            ", ".join(result.seen) or "–",
            f"{result.seconds_lost:.0f}",
            str(result.steps_lost),
            {True: "yes", False: "NO", None: "–"}[result.bit_for_bit],
            "passed" if result.passed else "FAILED",
        ]
        for result in session.results()
    ]


def _markdown_cell(text: str) -> str:
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
