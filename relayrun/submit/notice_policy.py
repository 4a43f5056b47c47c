"""Who is told of what happens to a run: from its config to the record that the supervisor reads."""

from __future__ import annotations

import sys
import time

from relayrun.config.compose.schema import CommonConfig
from relayrun.control.notify import notices
from relayrun.control.notify.notices import NoticePolicy, NoticeTarget
from relayrun.control.rundir.run import Run


def write_notice_policy(config: CommonConfig, run: Run) -> None:
    """Write the policy; none where the config names nobody."""
    if config.notify.targets:
        notices.write_notice_policy(run, make_notice_policy(config))
    else:
        notices.notice_policy_path(run).unlink(missing_ok=True)


def make_notice_policy(config: CommonConfig) -> NoticePolicy:
    """The policy of a config, as of now. It holds the names of variables, never their values."""
    settings = config.notify
    targets = [
        NoticeTarget(
            name=name,
            url=target.url,
            command=list(target.command),
            events=list(settings.events if target.events is None else target.events),
        )
        for name, target in settings.targets.items()
    ]
    return NoticePolicy(
        run=f"{config.project}/{config.name}",
        cluster=config.cluster.name,
        since=time.time(),
        targets=[vars(target) for target in targets],
        failed_attempts=settings.failed_attempts,
        no_progress=settings.no_progress,
        disk_checkpoints=settings.disk_checkpoints,
        program=[config.cluster.python or sys.executable, "-m", "relayrun.watch.deliver"],
    )
