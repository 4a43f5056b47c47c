"""Which errors of a load say that no attempt can load this checkpoint."""

from __future__ import annotations

import re

from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

CONTENT_ERRORS = (LookupError, TypeError, ValueError, AttributeError, AssertionError, CheckpointingException)
"""What megatron-core and torch raise over keys that are missing, or values of another kind or shape."""

_STATE_ERROR_TEXT = re.compile(r"loading state_dict|(?:missing|unexpected) key|size mismatch|not in state dict", re.I)
"""What they say in a RuntimeError, which may be a device's, too."""

ERROR_TEXT_LIMIT = 300


def why_not_loadable(error: BaseException) -> str | None:
    """What is wrong with the content of a checkpoint; None where a file system, a device or another rank may be.

    torch gathers what all ranks met in one exception: then every rank must have found fault with the content.
    """
    if isinstance(error, CheckpointException):
        causes = [why_not_loadable(cause) for cause, _ in error.failures.values()]
        return causes[0] if causes and all(causes) else None
    if isinstance(error, OSError):
        return None
    if isinstance(error, CONTENT_ERRORS) or (isinstance(error, RuntimeError) and _STATE_ERROR_TEXT.search(str(error))):
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return text if len(text) <= ERROR_TEXT_LIMIT else text[: ERROR_TEXT_LIMIT - 3] + "..."
    return None
