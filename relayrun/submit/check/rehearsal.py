"""Asks the ranks' Python at a submit: what it has, whether a user's code can be used, and the rate of a next step.

The ranks' environment is that of `chain.supervisor`: the package, `PYTHONPATH` of the site, `PYTHONPATH` of the submit.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from relayrun import places
from relayrun.config.compose.schema import CommonConfig, RunConfig
from relayrun.control.scheduler.base import user_python_path
from relayrun.submit.check.findings import Findings
from relayrun.tokens.order.batches import TrainingProgress

CONTAINER_OPTIONS = ("--container-image", "--environment", "--container-name")
"""Options of srun with which the ranks see another file system than this program does."""
ANSWER_SECONDS = 60.0
"""Time limit for the start of a Python, which may lie on a loaded or remote file system."""
REHEARSAL_SECONDS = 300.0
"""Time limit for a rehearsal, which imports torch and the user's modules."""


def runs_in_container(config: CommonConfig) -> bool:
    """Return True if the ranks see other files than this program."""
    options = config.cluster.srun_options
    return config.cluster.container.runtime != "none" or any(each.startswith(CONTAINER_OPTIONS) for each in options)


def user_modules(config: RunConfig) -> dict[str, str]:
    """Return the packages of a user's own that the ranks import, each with its setting."""
    data = config.data
    paths = [(entry.hook, "training.hooks") for entry in config.training.hooks]
    paths += [(config.optimizer.class_path or "", "optimizer.class"), (config.model.spec or "", "model.spec")]
    paths += [(config.training.loss or "", "training.loss")]
    paths += [(source.order or data.order, "data.order") for source in data.sources.values()]
    paths += [(stream.map or "", f"data.mixture.{name}") for name, stream in data.streams.items()]
    return {path.partition(":")[0].partition(".")[0]: setting for path, setting in reversed(paths) if ":" in path}


def search_path(config: CommonConfig) -> str:
    """Return the folders in which the ranks look for modules first, as PYTHONPATH."""
    site = config.cluster.environment.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([str(places.CODE_ROOT), *filter(None, site), *user_python_path(os.environ)])


def run_python(
    command: Sequence[str], environment: dict[str, str], *, limit: float, text: str = ""
) -> subprocess.CompletedProcess[str] | str | None:
    """Run a program that reads `text`; return in words why it does not start, None if it takes too long."""
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit,
            check=False,
            input=text,
            env=os.environ | environment,
        )
    except subprocess.TimeoutExpired:
        return None
    except OSError as error:
        return error.strerror or str(error)


def ask_json(
    command: Sequence[str], environment: dict[str, str], *, limit: float, text: str = ""
) -> dict[str, Any] | str | None:
    """Return the JSON that a program answers `text` with; in words why it does not; None if it takes too long."""
    done = run_python(command, environment, text=text, limit=limit)
    if done is None or isinstance(done, str):
        return done
    try:
        return json.loads(done.stdout)  # type: ignore[no-any-return]
    except ValueError:
        said = [line for line in done.stderr.splitlines() if line[:1].strip()]  # hints are indented
        return said[-1] if said else f"exit code {done.returncode}"


def ask_ranks(
    config: RunConfig, module: str, request: Any, *, limit: float, variables: Mapping[str, str] | None = None
) -> dict[str, Any] | str:
    """Return the answer of a module of the ranks' Python to a request; in words why it does not answer."""
    if runs_in_container(config):
        return "the ranks run in a container, which is not started here"
    environment = {**config.cluster.environment, **(variables or {}), "PYTHONPATH": search_path(config)}
    python = config.cluster.rank_python
    answer = ask_json([python, "-m", module], environment, text=json.dumps(request), limit=limit)
    return answer if isinstance(answer, dict) else f"{python}: {answer or f'no answer within {limit:.0f} s'}"


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """The answer of `relayrun.train.rehearsal`."""

    faults: list[tuple[str, str]] = field(default_factory=list)
    """Setting and words of each object of a user's own that the ranks would refuse."""
    rates: list[float | None] = field(default_factory=list)
    """Learning rate of each step that was asked for; None if the schedule cannot be made."""
    silent: str | None = None
    """Why there is no answer."""


def rehearse(
    config: RunConfig, *, configs: Sequence[RunConfig] = (), steps: Sequence[tuple[RunConfig, TrainingProgress]] = ()
) -> Rehearsal:
    """Ask the ranks' Python of `config` to import the user code of `configs`, and for the rate of each next step."""
    request = {
        "configs": [each.model_dump(mode="json") for each in configs],
        "steps": [(each.model_dump(mode="json"), progress.state()) for each, progress in steps],
    }
    answer = ask_ranks(config, "relayrun.train.rehearsal", request, limit=REHEARSAL_SECONDS)
    if isinstance(answer, str):
        return Rehearsal(silent=answer)
    return Rehearsal(faults=[(setting, words) for setting, words in answer["faults"]], rates=answer["rates"])


def check_user_code(config: RunConfig, findings: Findings) -> None:
    """Import a user's own code in the ranks' Python, and look at what ranks look at before they use it."""
    own = user_modules(config)
    if not own or any(each.name.startswith("node.") for each in findings.errors):
        return
    answer, name = rehearse(config, configs=[config]), "node.user_code"
    tell = findings.warn if config.cluster.modules or config.job.setup else findings.refuse
    for setting, words in answer.faults:
        tell(name, words, setting=setting)
    if answer.silent is not None:
        findings.skip(name, f"{', '.join(own)}: {answer.silent}")
    elif not answer.faults:
        findings.ok(name, f"the ranks' Python imports {', '.join(own)}, and what the settings name can be used")


RateEdge = tuple[RunConfig, RunConfig, TrainingProgress, Findings]
"""Config before and behind this progress, and the findings that the change of the learning rate belongs to."""


def tell_rate_changes(name: str, edges: Sequence[RateEdge]) -> None:
    """Add the rates of the last step before each edge and of the first one behind it to its findings.

    A jump is a warning, unless the config before would have made it too.
    """
    if not edges:
        return
    steps = [(config, at) for before, after, at, _ in edges for config, at in _steps_around(before, after, at)]
    answer = rehearse(edges[0][1], steps=steps)
    rates = answer.rates or [None] * len(steps)
    for number, (_, _, at, findings) in enumerate(edges):
        last, former, after = rates[3 * number : 3 * number + 3]
        if last is None or former is None or after is None:
            why = answer.silent or "the schedule cannot be made"
            findings.skip(name, f"the learning rate of the next step: {why}")
            continue
        words = f"learning rate {last:.3g} at step {at.iteration:,}, {after:.3g} at the next one"
        if f"{former:.3g}" != f"{after:.3g}":
            words += f"; with the settings before it would be {former:.3g}"
        if abs(after - former) > 0.01 * former and not 0.5 * last <= after <= 1.1 * last:
            remedy = "keep optimizer.lr and the lengths of the schedule, unless it is to jump"
            findings.warn(name, words, setting="optimizer.lr", remedy=remedy)
        else:
            findings.ok(name, words)


def _steps_around(
    before: RunConfig, after: RunConfig, at: TrainingProgress
) -> list[tuple[RunConfig, TrainingProgress]]:
    """Return the last step of `before`, the step that would follow it, and the step of `after` in its place."""
    last = max(at.iteration - 1, 0)
    leg = next((leg for leg in reversed(at.legs) if leg.iteration <= last), at.legs[0])
    return [
        (before, TrainingProgress(leg.sizes, iteration=last, consumed_samples=leg.consumed(last), legs=[leg])),
        (before, at),
        (after, at),
    ]
