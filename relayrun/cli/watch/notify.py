"""`relayrun notify`: test the targets of notices, and send unsent notices."""

from __future__ import annotations

import argparse
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from relayrun.cli import add_run
from relayrun.config.compose import resolve
from relayrun.control.notify import notices
from relayrun.control.notify.events import write_due_notices
from relayrun.control.notify.notices import Notice, NoticeMessage, NoticePolicy
from relayrun.control.rundir.find_runs import find_run
from relayrun.control.rundir.plan import Plan
from relayrun.errors import RunDirError
from relayrun.submit import policies
from relayrun.watch import send_notices, unsent_notices


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun notify`."""
    verbs = parser.add_subparsers(dest="verb", required=True)
    test = verbs.add_parser("test", help="send a test message to each target, and say what came back")
    test.add_argument("name", metavar="CONFIG|RUN", help="a run config; or a run directory, or project/name")
    test.add_argument("--set", dest="overrides", action="append", default=[], metavar="NAME=VALUE")
    test.set_defaults(run=run_test)
    send = verbs.add_parser("send", help="send now what could not be sent")
    add_run(send)
    send.set_defaults(run=run_send)


def run_test(options: argparse.Namespace) -> int:
    """Send a test message to each target; return 1 if one was not sent. Raises RelayrunError."""
    if Path(options.name).is_file():
        policy = policies.make_notice_policy(resolve.load_run_config(Path(options.name), options.overrides))
    else:
        policy = _policy(options.name)
    if not policy.targets:
        print("nobody is told: the config has no notify.targets (`relayrun help notify`)")
        return 1
    now = time.time()
    notice = Notice(id="test", event="test", cause="test", time=now, reason="a test: no run has changed")
    messages = [
        NoticeMessage(target=target, notice=notice, settles=[], count=1, since=now) for target in policy.every_target()
    ]
    with ThreadPoolExecutor(len(messages)) as pool:
        answers = list(pool.map(lambda message: send_notices.send_message(policy, message, os.environ), messages))
    width = max(len(message.target.name) for message in messages)
    for message, error in zip(messages, answers, strict=True):
        print(f"{message.target.name:<{width}}  {'sent' if error is None else f'NOT SENT: {error}'}")
    return int(any(answers))


def run_send(options: argparse.Namespace) -> int:
    """Send the due notices of a run; return 1 if one was not sent. Raises RelayrunError."""
    run = find_run(options.name)
    policy, plan = _policy(options.name), Plan.load_trusted(run)
    for words in write_due_notices(run, plan, policy, now=time.time(), at_work=False):
        print(f"not written: {words}")
    for words in send_notices.send_due_notices(run, job=False, environment=os.environ):
        print(f"NOT SENT: {words}")
    late, _ = unsent_notices.count_unsent(run, now=time.time())
    print(f"{late} notices are not sent" if late else "nothing is left to send")
    return int(bool(late))


def _policy(name: str) -> NoticePolicy:
    run = find_run(name)
    policy = notices.read_trusted_notice_policy(run)
    if policy is None:
        hint = "add a `notify` section to its config and submit it again"
        raise RunDirError("nobody is told of this run", where=run.path, hint=hint)
    return policy
