"""Whether the variables that stand for secrets in the targets of messages are set where somebody submits."""

from __future__ import annotations

import os
from collections.abc import Mapping

from relayrun.config.compose.schema import CommonConfig
from relayrun.config.sections.notify import VARIABLE_PATTERN
from relayrun.submit.check.findings import Findings


def check_notify_variables(
    config: CommonConfig, findings: Findings, environment: Mapping[str, str] = os.environ
) -> None:
    """Warn of a `${VARIABLE}` that this environment, which the jobs inherit, and `cluster.environment` do not set."""
    name = "notify.variables"
    environment = {**environment, **config.cluster.environment}
    complete = True
    for target, settings in config.notify.targets.items():
        variables = dict.fromkeys(VARIABLE_PATTERN.findall(settings.url or ""))
        if missing := [variable for variable in variables if not environment.get(variable)]:
            complete = False
            findings.warn(
                name,
                f"{' and '.join(missing)} not set in this environment: nothing could be sent to {target!r}",
                setting=f"notify.targets.{target}",
                remedy=f"export {missing[0]} where you submit",
            )
    if config.notify.targets and complete:
        findings.ok(name, "every variable of the targets of messages is set")
