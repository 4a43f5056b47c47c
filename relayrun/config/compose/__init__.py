"""What a run is: the typed schema, its composition from YAML files, and its revisions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relayrun.config.compose.schema import RunConfig

__all__ = ["RunConfig"]


def __getattr__(name: str) -> Any:
    if name == "RunConfig":  # on demand: tokenization needs a section of its own, and the schema takes half a second
        from relayrun.config.compose.schema import RunConfig

        return RunConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
