"""`trainer: megatron-lm`: a checkout of Megatron-LM, and the settings that become its flags."""

from __future__ import annotations

import re
from typing import Any, Literal, Self

from pydantic import field_validator, model_validator

from relayrun.config.compose.common import CommonConfig
from relayrun.config.sections.base import Section, SingleLine, one_line
from relayrun.config.sections.checkpoint import CheckpointSection
from relayrun.config.sections.data import DataSection
from relayrun.config.sections.model import ModelSection
from relayrun.config.sections.optimizer import OptimizerSection
from relayrun.config.sections.parallel import ParallelSection
from relayrun.config.sections.training import TrainingSection

FlagValue = bool | int | float | str | list[int | float | str]


_FLAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


class MegatronLMSection(Section):
    """A checkout of Megatron-LM, and flags besides those that the settings become."""

    dir: SingleLine
    """Folder of the checkout."""
    program: SingleLine = "pretrain_gpt.py"
    """Training program, by its path from the checkout's folder."""
    args: dict[str, FlagValue] = {}
    """Any flags of that checkout, without their dashes, as in {qk-layernorm: true, profile-ranks: [0, 4]}. They hold
    over the settings. `true`: the flag alone; `false`: without it; a list: several words behind it; `null`: as if the
    line were not there."""
    args_file: SingleLine | None = None
    """A Bash file whose arrays NAME_ARGS=(--flag value ...) are flags, too; no other line of it runs."""

    @field_validator("args", mode="before")
    @classmethod
    def _flags(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        for name, words in value.items():
            if _FLAG.fullmatch(name) is None:
                raise ValueError(f"{name!r} is no name of a flag; write it without dashes in front: qk-layernorm: true")
            for word in words if isinstance(words, list) else [words]:
                if isinstance(word, dict | list) or (word is None and isinstance(words, list)):
                    raise ValueError(f"{name}: a flag takes true, false, a number, a text, or a list of these")
                one_line(str(word))
        return {name: words for name, words in value.items() if words is not None}


class MegatronConfig(CommonConfig):
    """All settings of a run of trainer `megatron-lm`. What a left-out section would say stands in its flags."""

    trainer: Literal["megatron-lm"] = "megatron-lm"
    megatron_lm: MegatronLMSection
    model: ModelSection | None = None
    data: DataSection | None = None
    training: TrainingSection | None = None
    optimizer: OptimizerSection | None = None
    checkpoint: CheckpointSection | None = None
    parallel: ParallelSection | None = None

    @model_validator(mode="after")
    def _evaluated_checkpoints(self) -> Self:
        if self.evaluation and self.checkpoint and self.evaluation.interval % self.checkpoint.interval:
            raise ValueError(
                f"evaluation.interval {self.evaluation.interval} is no multiple of "
                f"checkpoint.interval {self.checkpoint.interval}"
            )
        return self
