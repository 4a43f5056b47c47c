"""Forms of secrets: names of files and variables, values, and tokens that are known by their form.

No list is complete. They keep common secrets of a checkout out of run directories, which others may read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import PurePosixPath
from typing import Any

_NAMES = re.compile(
    r"""\.env(\.(?!example$|sample$|template$|dist$).*)? | .*\.env
    | [._]netrc | \.git-credentials | \.npmrc | \.pypirc | \.pgpass | \.htpasswd | \.boto | \.s3cfg
    | id_(rsa|dsa|ecdsa|ed25519)(_sk)? | .*\.(pem|key|p12|pfx|jks|keystore|kdbx|ppk|token)
    | (.*[._-])?(credentials?|secrets?|tokens?|passwords?|api[._-]?keys?)(\.(json|ya?ml|toml|ini|cfg|conf|txt|csv))?
    | service[._-]?account.*\.json""",
    re.IGNORECASE | re.VERBOSE,
)
_FOLDERS = frozenset({".aws", ".azure", ".config", ".docker", ".gcloud", ".gnupg", ".huggingface", ".kube", ".ssh"})

TOKEN_FORMS = {
    "GitHub token": r"gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{22,}",
    "GitLab token": r"glpat-[A-Za-z0-9_-]{20,}",
    "Hugging Face token": r"(?:hf|api_org)_[A-Za-z0-9]{30,}",
    "AWS key": r"(?:AKIA|ASIA)[0-9A-Z]{16}(?![0-9A-Z])"
    r"|(?i:(?<=secret_access_key)|(?<=secretaccesskey))[\"']?[\s=:]{1,5}[\"']?[A-Za-z0-9/+]{40}",
    "W&B key": r"wandb_v1_[A-Za-z0-9_]{40,}"
    # as long as a commit's name, so only behind what says that it is a key
    r"|(?i:(?<=wandb_api_key)|(?<=wandb.login)|(?<=password)|(?<=api_key))(?:\s+--[\w-]+)*[\"']?[\s=:(\"'-]{1,5}"
    r"(?:key=)?[\"']?[0-9a-f]{40}\b",
    "private key": r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----[\s\S]*?(?:-----END (?:[A-Z]+ )*PRIVATE KEY-----|\Z)",
}
"""Patterns of tokens, by kind."""

_TOKEN = re.compile("|".join(f"(?P<_{number}>{form})" for number, form in enumerate(TOKEN_FORMS.values())))
_KINDS = list(TOKEN_FORMS)


def is_secret_name(name: str) -> bool:
    """Return whether a file of this name, a path with slashes, is likely to hold only secrets; code never is."""
    path = PurePosixPath(name)
    return bool(_NAMES.fullmatch(path.name)) or not _FOLDERS.isdisjoint(path.parts[:-1])


def mask_tokens(text: str) -> tuple[str, list[str]]:
    """Return `text` with every token replaced by its kind in angle brackets, and the kinds."""
    found: list[str] = []

    def replace(match: re.Match[str]) -> str:
        assert match.lastgroup is not None
        found.append(_KINDS[int(match.lastgroup[1:])])
        return f"<{found[-1]}>"

    return _TOKEN.sub(replace, text), found


_SECRET = re.compile(
    r".*(?:password|passwd|passphrase)|(?:.*[_-])?(?:pass|pwd|secret|authorization|jwt|credentials?"
    r"|(?:api|access|secret|private|auth|account)[_-]?key|connection[_-]?string)",
    re.I,
)
"""Names of variables and options whose value is a secret."""
_PERHAPS_SECRET = re.compile(r"(?:.*[_-])?(?:token|key|auth|sig(?:nature)?|webhook(?:[_-]url)?)", re.I)
"""Names whose value is a secret if it looks random."""
_HARMLESS = re.compile(
    r"""['"]?(?:(?:bearer|basic|token)(?: +|$))?(?:$|[$`~/.<]"""
    r"""|(?:true|false|yes|no|on|off|none|null|[0-9]{1,5})['"]?$)""",
    re.I,
)
"""Values that are no secrets: references, paths, switches and numbers."""
_LITERAL = re.compile(r"""['"]?(?:\$['"](.*?)['"]?|\$\{\w+:?[-=](.*?)\}['"]?)$""")
"""A value that begins with `$` and is no reference to Bash: a quoted text `$'...'`, or the default of a variable."""
SECRET_WORD = re.compile(r"KEY|TOKEN|SECRET|PASS|JWT|CREDENTIAL|AUTH", re.I)
"""A variable whose name contains this is never shown with its value, such as SLURM_JWT."""
_ASSIGNMENT = re.compile(r"(?<![\w$-])-{0,2}([A-Za-z_][\w-]*)=(\S*)|(?<!\S)--([A-Za-z][\w-]*) +([^\s-]\S*)")
_URL_PASSWORD = re.compile(r"://[^/\s:@]*:[^/\s@$]+@")
_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


def is_secret_variable(name: str, value: str) -> bool:
    """Return whether a variable or option of this name with this value is likely to hold a secret."""
    if literal := _LITERAL.match(value):
        return is_secret_variable(name, literal[1] or literal[2] or "")
    if _HARMLESS.match(value) and not (value.strip("'\"")[:1] == "/" and looks_random(value)):
        return False
    if _SECRET.fullmatch(name) or (name.isupper() and name.endswith("TOKEN")):
        return True
    return _PERHAPS_SECRET.fullmatch(name) is not None and looks_random(value)


def describe_secret(text: str, *, variable: str = "") -> str | None:
    """Describe what in a text, the value of `variable` if given, looks like a secret, without repeating it."""
    if tokens := mask_tokens(text)[1]:
        return f"a {tokens[0]}"
    if _URL_PASSWORD.search(text):
        return "a password in a URL"
    pairs = [(found[1] or found[3], found[2] or found[4] or "") for found in _ASSIGNMENT.finditer(text)]
    named = (name for name, value in [(variable, text), *pairs] if is_secret_variable(name, value))
    return next((f"the value of {name}" for name in named), None)


SECRET_REMEDY = 'export it where you submit, or read a file of mode 0600 in job.setup: export NAME="$(cat FILE)"'


def find_secrets(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the settings of a config that look like secrets, by dotted names, each with what it looks like."""
    environment = "cluster.environment."
    for name, texts in groupby(setting_texts(settings), key=itemgetter(0)):
        variable = name.removeprefix(environment) if name.startswith(environment) else ""
        if found := describe_secret(" ".join(text for _, text in texts), variable=variable):
            yield name, found


def setting_texts(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Every text below a value, by the dotted name of the setting that holds it."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from setting_texts(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for inner in value:
            yield from setting_texts(inner, name)
    elif isinstance(value, str):
        yield name, value


def looks_random(part: str) -> bool:
    """Return whether a part of a text looks like a key: a long word that mixes letters and digits unlike a name."""
    return _UUID.search(part) is not None or any(_is_random(word) for word in re.split(r"[-_.,/+ ]", part))


def _is_random(word: str) -> bool:
    if "$" in word or len(word) < 9:
        return False
    runs = len(re.findall(r"[A-Za-z]+|[0-9]+", word))
    if word.isdigit():
        return len(word) >= 16  # the number of a Discord webhook
    if word.isalpha():
        return len(word) >= 20 and len(re.findall(r"[a-z][A-Z]", word)) >= 3
    return runs >= 5 or (len(word) >= 16 and runs >= 3)
