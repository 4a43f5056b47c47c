"""Recipients of a run's notices, and checks that no secret stands in a config."""

import re
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from relayrun.config.sections.base import NAME_PATTERN, Section
from relayrun.config.sections.dataclass_section import NonNegative, Positive, SingleLine
from relayrun.masking import looks_random

Event = Literal["stopped", "failed", "hang", "stalled", "anomaly", "disk", "node", "done", "evaluation"]
EVENTS: tuple[Event, ...] = get_args(Event)

SECRET_HINT = (
    "secrets come from the environment alone: export it as a variable where you submit, and write ${VARIABLE} for it"
)

VARIABLE_PATTERN = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
"""Reference to a variable of the environment in a URL; the group is the name."""
_PUBLIC = ("mailto", "mailtos", "json", "jsons", "http", "https", "ntfy", "ntfys")
"""Schemes of URLs that may have no secret part."""
_SECRET_NAME = re.compile(
    r"pass(word|wd)?|pw|secret|token|(api|access|auth)?_?key|auth|sig(nature)?|credentials?", re.I
)
_SECRET_OPTION = re.compile(rf"--?[\w-]*({_SECRET_NAME.pattern})[\w-]*[=:](.+)", re.I)
_WEBHOOK = re.compile(r"(hooks\.slack\.com|(\w+\.)?discord(app)?\.com|[\w.-]*webhook\.office\.com)(:\d+)?/", re.I)
_KNOWN = re.compile(r"xox[abposr]-|gh[pousr]_|glpat-|hf_|tk_[A-Za-z0-9]{20}|AKIA|syt_|sk-")
"""Prefixes of tokens of well-known services."""


class NotifyTarget(Section):
    """A recipient: a URL, or a command of your own."""

    url: SingleLine | None = None
    """Recipient as a URL of apprise: mailto://SERVER?to=A@B&from=C@D, jsons://HOST/PATH (a webhook), slack://... and so
    on. ${VARIABLE} is read from the environment; no secret may stand here."""
    command: list[SingleLine] = []
    """Your own program and its arguments; it reads subject, an empty line and body. No secret may stand here."""
    events: list[Event] | None = None
    """Events for this target; default: notify.events."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.url is None) == (not self.command):
            raise ValueError("give either a url or a command")
        what = None if self.url is None else secret_in(self.url)
        what = next(filter(None, map(_secret_argument, self.command)), what)
        if what is not None:
            raise ValueError(f"holds {what}; {SECRET_HINT}")
        if self.url is not None and not VARIABLE_PATTERN.match(self.url) and "://" not in self.url:
            raise ValueError("is no URL; write SCHEME://..., or ${VARIABLE} for one that the environment holds")
        return self


class NotifySection(Section):
    """Notices of events of the run: one message of a cause an hour."""

    targets: dict[Annotated[str, Field(pattern=NAME_PATTERN)], NotifyTarget] = {}
    """Recipients, by a name of your choice. None: nobody."""
    events: list[Event] = list(EVENTS)
    """Events for the targets: chain stopped, attempts failed, hang, stalled (no durable progress), anomaly of the loss,
    disk nearly full, node sick, done, evaluation finished."""
    failed_attempts: Positive = 2
    """Consecutive attempts without a new checkpoint before `failed` is sent."""
    no_progress: Annotated[float, Field(gt=0)] = 21600.0
    """Seconds of jobs without a new checkpoint before `stalled` is sent, and again after as many."""
    disk_checkpoints: NonNegative = 2
    """`disk` is sent when there is room for fewer checkpoints than this; 0: only after a save met a full disk."""


def secret_in(url: str) -> str | None:
    """Describe the part of a URL that looks like a secret, without repeating it; None if there is none."""
    scheme, _, rest = url.partition("://")
    if _WEBHOOK.match(rest) and "$" not in rest:
        return "the address of a chat's webhook, which is its key"
    bare = VARIABLE_PATTERN.sub("$", rest)
    if _KNOWN.search(url):
        return "a token"
    address, _, query = bare.partition("?")
    user, at, _ = address.split("/", 1)[0].rpartition("@")
    if at and ":" in user and user.partition(":")[2] not in ("", "$"):
        return "a password, behind the user's name"
    for part in re.split(r"[&;]", query):
        name, _, value = part.partition("=")
        if value and "$" not in value and (_SECRET_NAME.fullmatch(name) or looks_random(value)):
            return f"what looks like a secret, as the value of {name}"
    for part in re.split(r"[/:@]", address.removeprefix(f"{user}@") if scheme in _PUBLIC else address):
        if looks_random(part):
            return f"what looks like a token: a part of {len(part)} letters and digits"
    if scheme and rest and scheme.lower() not in _PUBLIC and "$" not in bare and "@" not in address:
        return f"a whole {scheme} URL, whose parts are its keys"
    return None


def _secret_argument(argument: str) -> str | None:
    option = _SECRET_OPTION.fullmatch(argument)
    if _KNOWN.search(argument) or (option is not None and "$" not in argument):
        return "what looks like a secret, in an argument of the command, which every user of the machine can see"
    return "a secret in a URL among the command's arguments" if "://" in argument and secret_in(argument) else None


def may_be_shown(location: tuple[str, ...]) -> bool:
    """True if an error may show the value of the setting at `location`, which may be a misplaced secret."""
    return "notify" not in location[:2]
