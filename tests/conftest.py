"""Warnings go to standard error in tests too, as in every program."""

from __future__ import annotations

from relayrun.errors import log_to_stderr

log_to_stderr()
