"""What the config of every run has, whatever its ranks execute."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from relayrun.config.sections.base import NAME_PATTERN, OutputPath, Section
from relayrun.config.sections.job import (
    ChainSection,
    ClusterSection,
    DebugSection,
    EvaluationSection,
    JobSection,
    TrackingSection,
)
from relayrun.config.sections.notify import NotifySection

PER_TASK_OPTIONS = ("--gpus-per-task", "--gpu-bind", "--tres-per-task", "--mem-per-gpu", "--cpus-per-gpu", "--ntasks")
"""Options of Slurm that an agent, the one task of its node, would hold for all of its ranks."""

TrainerName = Literal["native", "megatron-lm", "command"]


class CommonConfig(Section):
    """The settings of a run that do not depend on its trainer. Each trainer has a class of its own below this one."""

    project: Annotated[str, Field(pattern=NAME_PATTERN)]
    """Name of the project: the first part of the run's name, the W&B project, and a folder below logs/runs."""
    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    """Name of the run within its project. `{nodes}` in it becomes the number of nodes."""
    run_dir: OutputPath | None = None
    """Directory of the run; default: logs/runs/<project>/<name>."""
    trainer: TrainerName = "native"
    """What the ranks execute. `native`: relayrun's own training program. `megatron-lm`: a checkout of Megatron-LM.
    `command`: a program of your own. It decides which sections a run has."""
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
            if self.job.spare_nodes:
                raise ValueError(
                    "job.spare_nodes: a spare node takes the place of another one inside the job; "
                    "set chain.recovery=node, or leave it out"
                )
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
        if (setting := self.outlives_nodes) is None:
            return self
        if self.cluster.scheduler == "local":
            raise ValueError(f"{setting}: scheduler local has one machine; leave it out")
        if self.job.sbatch.get("gpus"):
            raise ValueError(
                f"job.sbatch: --gpus is of the whole job, and with {setting} the next one may have fewer nodes; "
                "set job.gpus_per_node, and leave it out"
            )
        if self.cluster.container.runtime != "none":
            raise ValueError(
                f"{setting}: where the batch host is lost, an agent asks Slurm by its commands, which a container "
                "does not have; leave it out, or set cluster.container.runtime=none"
            )
        return self

    @model_validator(mode="after")
    def _scored(self) -> Self:
        own = self.evaluation
        if own is None:
            return self
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
    def outlives_nodes(self) -> str | None:
        """The setting by which a job outlives the loss of one of its nodes; None: it does not."""
        return "job.spare_nodes" if self.job.spare_nodes else None

    @property
    def world_size(self) -> int:
        """Ranks of one job."""
        return self.job.nodes * self.job.ntasks_per_node
