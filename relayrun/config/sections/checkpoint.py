"""The section `checkpoint` of a run config."""

from typing import Self

from pydantic import field_validator, model_validator

from relayrun.config.sections.base import Section
from relayrun.config.sections.dataclass_section import NonNegative, Positive, SingleLine
from relayrun.errors import why_url_is_refused


class MirrorSection(Section):
    """Copies of checkpoints in a second place, made at the lowest priority. Each is read back in full before it
    counts."""

    path: SingleLine
    """An existing absolute folder on another file system than the run; copies lie in PROJECT/NAME below it."""
    keep_last: Positive = 2
    """Newest copies to keep."""
    keep_every: Positive | None = None
    """Copies whose iteration is a multiple of this are never removed."""

    @field_validator("path")
    @classmethod
    def _absolute(cls, value: str) -> str:
        if not value.startswith("/"):
            raise ValueError(why_url_is_refused(value) or "is relative; write the absolute path of a folder")
        return value


class CheckpointSection(Section):
    """Saves of the state to disk. An early end (time, signal, trigger) and the last step always save too."""

    interval: Positive
    """Iterations between saves."""
    keep_last: Positive = 3
    """Published checkpoints to keep; older ones are removed."""
    keep_every: Positive | None = None
    """Checkpoints whose iteration is a multiple of this are never removed."""
    async_save: bool = True
    """Write while training continues, from a copy in host memory (on each rank, as large as its part of the
    checkpoint). A save that becomes due during another one waits for it."""
    writer_threads: Positive = 2
    """Files that each rank writes at a time."""
    fully_parallel_load: bool = True
    """Data-parallel replicas divide their common reads and send the data to each other, so that a load reads it once,
    not once a replica; Megatron's ckpt_fully_parallel_load. false: each rank reads everything that it needs."""
    mirror: MirrorSection | None = None
    """Destination of copies of committed checkpoints, made beside the jobs and by `relayrun checkpoint mirror`;
    default: nowhere. `relayrun checkpoint restore` brings a copy back."""
    memory_interval: NonNegative = 0
    """With chain.recovery `node`: iterations between copies of each rank's state in the memory of its own node and the
    next one (/dev/shm), from which restarted ranks resume. Takes the memory of two copies, on several nodes of four.
    0: resume from the disk."""
    load: str | None = None
    """First checkpoint of a run without its own: another run (its directory, or PROJECT/NAME), the folder of a
    checkpoint, or a folder of Megatron-LM's checkpoints; `:ITERATION` selects another than the newest."""
    finetune: bool = False
    """Take only the weights of `load`: iterations, optimizer, random numbers and data begin anew."""
    no_load_optim: bool = False
    """Leave out the optimizer state of `load`; iterations and data continue."""
    no_load_data: bool = False
    """Leave out the position in the data of `load`: the data begin anew, and may be others. Iterations continue."""

    @model_validator(mode="after")
    def _of_load(self) -> Self:
        for name in ("finetune", "no_load_optim", "no_load_data"):
            if getattr(self, name) and self.load is None:
                raise ValueError(f"{name} says what of `load` is left out, and load is not set")
        return self
