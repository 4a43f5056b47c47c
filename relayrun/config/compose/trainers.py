"""The configs of runs by trainer: settings of every run, and those of the trainers `megatron-lm` and `command`.

`CommonConfig` has the settings of every run, `CommandConfig` adds a user's own program, `MegatronConfig` a checkout of
Megatron-LM. The native trainer's config is `relayrun.config.compose.schema.RunConfig`.
"""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from relayrun.config.sections.base import NAME_PATTERN, Section
from relayrun.config.sections.batch_systems import batch_system
from relayrun.config.sections.chain import ChainSection
from relayrun.config.sections.checkpoint import CheckpointSection
from relayrun.config.sections.command import CommandSection
from relayrun.config.sections.data import DataSection
from relayrun.config.sections.dataclass_section import OutputPath, SingleLine, one_line
from relayrun.config.sections.job import ClusterSection, DebugSection, EvaluationSection, JobSection, TrackingSection
from relayrun.config.sections.model import ModelSection
from relayrun.config.sections.notify import NotifySection
from relayrun.config.sections.optimizer import OptimizerSection
from relayrun.config.sections.parallel import ParallelSection
from relayrun.config.sections.training import TrainingSection

PER_TASK_OPTIONS = ("--gpus-per-task", "--gpu-bind", "--tres-per-task", "--mem-per-gpu", "--cpus-per-gpu", "--ntasks")
"""Options of Slurm that would give the resources of all ranks of a node to its only task, the agent."""

TrainerName = Literal["native", "megatron-lm", "command"]


def check_multiple(name: str, value: int, of: str, divisor: int, why: str = "") -> None:
    """Raise ValueError if the setting `name` is not a multiple of another."""
    if value % divisor:
        raise ValueError(f"{name} {value} is no multiple of {of} {divisor}{why}")


class CommonConfig(Section):
    """The settings of a run that do not depend on its trainer. Each trainer has its own class below this one."""

    project: Annotated[str, Field(pattern=NAME_PATTERN)]
    """Name of the project: the first part of the run's name, the W&B project, and a folder below logs/runs."""
    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    """Name of the run within its project. `{nodes}` in it becomes the number of nodes."""
    run_dir: OutputPath | None = None
    """Directory of the run; default: logs/runs/<project>/<name>."""
    trainer: TrainerName = "native"
    """The program of the ranks. `native`: relayrun's own training program. `megatron-lm`: a checkout of Megatron-LM.
    `command`: a program of your own. The trainer decides which sections a run has."""
    chain: ChainSection = ChainSection()
    tracking: TrackingSection = TrackingSection()
    debug: DebugSection = DebugSection()
    notify: NotifySection = NotifySection()
    evaluation: EvaluationSection | None = None
    job: JobSection
    cluster: ClusterSection

    @model_validator(mode="after")
    def _recovered(self) -> Self:
        if self.chain.recovery == "job":
            why = ""
            if self.job.spare_nodes:
                why = "job.spare_nodes: a spare node takes the place of another one inside the job"
            elif self.chain.node_health_command and self.trainer != "native":
                why = "chain.node_health_command: without agents the trainer native alone checks nodes"
            if why:
                raise ValueError(f"{why}; set chain.recovery=node, or leave it out")
            return self
        if self.debug.profile == "nsys" and self.trainer == "native":
            raise ValueError(
                "debug.profile: nsys must start a rank, and with chain.recovery=node it is forked; "
                "set debug.profile=torch or chain.recovery=job"
            )
        own = [f"--{name}" for name, value in self.job.sbatch.items() if value is not False]
        for option in [*own, *self.cluster.srun_options]:
            if (name := option.partition("=")[0].partition(" ")[0]) in PER_TASK_OPTIONS:
                raise ValueError(
                    f"{name} gives each task its own GPUs or processors, and with chain.recovery=node one task of a "
                    "node, the agent, has them all; set job.gpus_per_node and leave it out, or set chain.recovery=job"
                )
        if not self.job.spare_nodes:
            return self
        if batch_system(self.cluster.scheduler).one_machine:
            raise ValueError(f"job.spare_nodes: scheduler {self.cluster.scheduler} has one machine; leave it out")
        if self.job.sbatch.get("gpus"):
            raise ValueError(
                "job.sbatch: --gpus is of the whole job, and with job.spare_nodes the next one may have fewer nodes; "
                "set job.gpus_per_node, and leave it out"
            )
        if self.cluster.container.runtime != "none":
            raise ValueError(
                "job.spare_nodes: where the batch host is lost, an agent asks Slurm by its commands, which a container "
                "does not have; leave it out, or set cluster.container.runtime=none"
            )
        return self

    @model_validator(mode="after")
    def _scored(self) -> Self:
        if (own := self.evaluation) is None:
            return self
        if self.checkpoint_section is not None:
            interval = self.checkpoint_section.interval
            check_multiple("evaluation.interval", own.interval, "checkpoint.interval", interval)
        if self.trainer == "native" and own.convert:
            raise ValueError(
                "evaluation.convert: relayrun exports its own checkpoints; leave it out, see model.mapping"
            )
        if self.trainer != "native" and not own.tasks and not own.command:
            raise ValueError(
                f"evaluation: with trainer {self.trainer} there is no mean loss on validation sets; "
                "set evaluation.tasks or evaluation.command"
            )
        return self

    @property
    def checkpoint_section(self) -> CheckpointSection | None:
        """The section `checkpoint`; None if the run has none."""
        found: CheckpointSection | None = getattr(self, "checkpoint", None)
        return found

    @property
    def world_size(self) -> int:
        """Ranks of a job."""
        return self.job.nodes * self.job.ntasks_per_node


class CommandConfig(CommonConfig):
    """All settings of a run of trainer `command`."""

    trainer: Literal["command"] = "command"
    command: CommandSection

    @model_validator(mode="after")
    def _without_effect(self) -> Self:
        """Refuse settings of the native trainer's ranks, which have no effect in another program."""
        for name, instead in (
            ("debug.profile", "put the profiler in front of the program in command.run"),
            ("debug.log_nccl", "set NCCL_DEBUG in cluster.environment"),
            ("tracking.tensorboard", "let the program write event files"),
        ):
            section, _, setting = name.partition(".")
            if getattr(getattr(self, section), setting):
                raise ValueError(f"{name} has no effect with trainer command; {instead}")
        return self


FlagValue = bool | int | float | str | list[int | float | str]


_FLAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


class MegatronLMSection(Section):
    """A checkout of Megatron-LM, and flags besides those from the settings."""

    dir: SingleLine
    """Folder of the checkout."""
    program: SingleLine = "pretrain_gpt.py"
    """Training program, by its path from the checkout's folder."""
    args: dict[str, FlagValue] = {}
    """Any flags of that checkout, without their dashes, as in {qk-layernorm: true, profile-ranks: [0, 4]}. They take
    precedence over the settings. `true`: the flag alone; `false`: without it; a list: several words after it; `null`:
    as if the line did not exist."""
    args_file: SingleLine | None = None
    """A launcher, read and never run. One that starts a training gives all flags, another its NAME_ARGS arrays."""

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
    """All settings of a run of trainer `megatron-lm`. The flags replace sections that are left out."""

    trainer: Literal["megatron-lm"] = "megatron-lm"
    megatron_lm: MegatronLMSection
    model: ModelSection | None = None
    data: DataSection | None = None
    training: TrainingSection | None = None
    optimizer: OptimizerSection | None = None
    checkpoint: CheckpointSection | None = None
    parallel: ParallelSection | None = None
