"""A notice as text: a subject of one line and a body, plain and short. The standard library alone."""

from __future__ import annotations

import re
import time
import unicodedata

from relayrun.control.notify.notices import MAX_WORDS, NoticeMessage, NoticePolicy
from relayrun.masking import mask_tokens

SUBJECT_LENGTH = 160
"""Characters of a subject at most."""
BODY_LENGTH = 1800
"""Characters of a body at most: with its subject it is below what Discord takes (2000), and all others take more."""
EVENT_TITLES = {
    "stopped": "the chain has stopped",
    "failed": "attempts fail",
    "hang": "an attempt hung",
    "stalled": "no durable progress",
    "anomaly": "the loss is not as it should be",
    "disk": "the disk is nearly full",
    "node": "a node is sick",
    "done": "done",
    "evaluation": "evaluation",
    "test": "a test",
}
"""What happened, by event."""

_INVISIBLE = ("Cc", "Cf", "Zl", "Zp", "Cs", "Co", "Cn")
"""Unicode's categories of what is not seen: control characters, those that turn the direction of text, ..."""
_ACTIVE = str.maketrans({"<": "‹", ">": "›", "`": "'", "@": "(at)", "*": "∗", "~": "∼", "|": "¦", "\\": "/"})
"""What a chat takes for a mention, a link or a form of text."""


def plain_text(text: str) -> str:
    """A text from a rank or a log so that it does nothing where it is shown: no controls, mentions, links or markup.

    Lines stay lines; known forms of tokens are replaced by what they are.
    """
    text, _ = mask_tokens(text)
    lines = re.split(r"\r\n|[\n\r\v\f\x85\u2028\u2029]", text)
    seen = ["".join(" " if unicodedata.category(c) in _INVISIBLE else c for c in line).rstrip() for line in lines]
    text = "\n".join(seen).translate(_ACTIVE)
    return re.sub(r"\]\s*\(", "] - (", text).replace("://", ": //").replace("__", "_ _")


def one_line(text: str, most: int) -> str:
    """A text in one line of at most so many characters."""
    text = " ".join(plain_text(text).split())
    return text if len(text) <= most else text[: most - 3] + "..."


def message_subject(policy: NoticePolicy, message: NoticeMessage) -> str:
    """Which run, on which cluster, and what happened."""
    notice = message.notice
    what = f"{policy.run} on {policy.cluster}: {EVENT_TITLES.get(notice.event, notice.event)}"
    return one_line(f"[relayrun] {what}: {notice.reason}", SUBJECT_LENGTH)


def message_body(policy: NoticePolicy, message: NoticeMessage) -> str:
    """What happened, where the run stands, and what to do."""
    notice = message.notice
    facts = [
        ("what", notice.reason),
        ("run", f"{policy.run} on {policy.cluster}"),
        ("when", _clock(notice.time)),
        ("more", f"{message.count - 1} more since {_clock(message.since)}" if message.count > 1 else ""),
        ("attempt", _joined(notice.attempt, f"job {notice.job_id}" if notice.job_id else "", notice.nodes)),
        ("iteration", f"{notice.iteration} of {notice.total_steps}" if notice.iteration is not None else ""),
        ("durable", f"iteration {notice.durable_iteration}" if notice.durable_iteration is not None else ""),
        ("go on", notice.go_on or ""),
        ("log", notice.log or ""),
    ]
    lines = [f"{name + ':':<11}{one_line(text, 700)}" for name, text in facts if text]
    text = "\n".join(lines)
    if notice.words:
        text += "\n\n" + plain_text(notice.words[:MAX_WORDS])
    return text if len(text) <= BODY_LENGTH else text[: BODY_LENGTH - 4].rstrip() + "\n..."


def _joined(*parts: object) -> str:
    return ", ".join(str(part) for part in parts if part not in (None, ""))


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(seconds))
