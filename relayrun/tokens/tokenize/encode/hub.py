"""Whether the Hugging Face hub has a tokenizer: asked once and with a short limit, before transformers is imported.

transformers tries again for a minute where the hub does not answer, and for a name that is a typo of a path as well.
"""

from __future__ import annotations

import http.client
import os
import re
import ssl
import urllib.error
import urllib.request

from relayrun.errors import InputError, did_you_mean_path

HUB_TIMEOUT_SECONDS = 5.0
"""How long the hub may take for its answer."""

_HUB_NAME_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_HUB_NAME = re.compile(rf"(?:{_HUB_NAME_PART}/)?{_HUB_NAME_PART}")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "config.json",
)
"""What a copy of a tokenizer on this machine has at least one of."""


def is_hub_name(text: str) -> bool:
    """Whether something on the hub may be called so: `gpt2`, `org/name`."""
    return _HUB_NAME.fullmatch(text) is not None and ".." not in text and "--" not in text and len(text) <= 96


def missing_tokenizer_error(path: str | os.PathLike[str]) -> InputError:
    """The error for a tokenizer that can only be a file or folder, and is not there."""
    hint = (
        did_you_mean_path(path) or "give a tokenizer.json, a folder that holds one, or a name on the Hugging Face hub"
    )
    return InputError("there is no such tokenizer file", where=path, hint=hint)


def check_hub(name: str, cache_dir: str | None) -> bool:
    """Return whether only the copy on this machine may be read, since the hub is away.

    Raises InputError where neither the hub nor this machine has such a tokenizer.
    """
    from huggingface_hub import constants, get_token, try_to_load_from_cache

    copied = any(isinstance(try_to_load_from_cache(name, file, cache_dir=cache_dir), str) for file in _TOKENIZER_FILES)
    copies = cache_dir or constants.HF_HUB_CACHE
    if constants.HF_HUB_OFFLINE:
        if not copied:
            raise _not_on_hub_error(name, f"the hub is switched off (HF_HUB_OFFLINE), and {copies} has no copy")
        return True
    token = get_token()
    request = urllib.request.Request(f"{constants.ENDPOINT}/api/models/{name}")
    if token is not None:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=HUB_TIMEOUT_SECONDS):
            return False
    except urllib.error.HTTPError as error:
        error.close()
        if error.code not in (401, 403, 404):
            return False  # it is there, and busy: transformers tries again
        if not copied:
            shown = "" if token is not None else ", or shows it to nobody without a token (HF_TOKEN)"
            raise _not_on_hub_error(name, f"{constants.ENDPOINT} has none of this name{shown}") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLError):
            return False  # transformers may have certificates of its own
        if not copied:
            what = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
            raise _not_on_hub_error(
                name, f"{constants.ENDPOINT} does not answer ({what}), and {copies} has no copy"
            ) from None
    return True


def _not_on_hub_error(name: str, why: str) -> InputError:
    usual = "give a tokenizer.json, a folder that holds one, or a name on the Hugging Face hub"
    hint = "; ".join(filter(None, [did_you_mean_path(name), usual]))
    return InputError(f"no such tokenizer: there is no such file or folder, and {why}", where=name, hint=hint)
