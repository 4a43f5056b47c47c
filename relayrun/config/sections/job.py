"""Where a run's jobs run and what accompanies them: `chain`, `tracking`, `debug`, `job`, `evaluation`, `cluster`.

`chain.node_health_limits` stands here, too.
"""

from __future__ import annotations

import difflib
import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from relayrun.config.sections.base import (
    NAME_PATTERN,
    NonNegative,
    NonNegativeFloat,
    Positive,
    Section,
    SingleLine,
    SlurmTime,
)
from relayrun.config.sections.job_script import ContainerSection, SbatchOptions


class NodeHealthLimits(Section):
    """Limits of `chain.node_health`. What is beyond one is on record with both figures."""

    memory_gb: Literal["auto"] | NonNegativeFloat = "auto"
    """Free memory of a node, in 10^9 bytes; with less it is left out. `auto`: what the ranks of a node took in this run
    so far; with less than half of it a node is left out."""
    shm_gb: NonNegativeFloat = 0.05
    """Free room in /dev/shm, in 10^9 bytes."""
    tmp_gb: NonNegativeFloat = 0.5
    """Free room in the folder for temporary files (TMPDIR), in 10^9 bytes."""
    clock_seconds: Annotated[float, Field(gt=0)] = 1.0
    """Seconds by which a node's clock may differ from the median of all."""
    open_files: NonNegative = 1024
    """Files that a process may open at least: the hard limit."""
    slower: Annotated[float, Field(gt=1)] = 1.5
    """How many times the run's median a matrix product, or an exchange with the neighbours, may take."""
    command_seconds: Annotated[float, Field(gt=0, le=40)] = 20.0
    """Seconds in which node_health_command must answer."""


class ChainSection(Section):
    """How one job follows the other."""

    auto_requeue: bool = False
    """Queue a successor behind every job until the run is done. Costs node hours unattended: off by default."""
    mode: Literal["singleton", "requeue"] = "singleton"
    """`singleton`: a successor is queued behind every job. `requeue`: a job queues itself again, under the same id."""
    fallback_job: bool = True
    """On Slurm, with auto_requeue: keep one small job queued (`...-fallback` in squeue), which starts only where a job
    of the chain fails, and then queues the next one or says why not. It needs one CPU for seconds."""
    max_failed_attempts: Positive = 3
    """Attempts in a row without a new durable iteration, after which the chain stops."""
    recovery: Literal["job", "node"] = "job"
    """What starts again when a rank dies. `job`: the next job of the chain. `node`: the ranks, inside the same job, by
    an agent on each node. What that cannot cure ends the attempt as with `job`."""
    max_failed_rounds: Positive = 5
    """With `recovery: node`, starts of the ranks in a row that brought no later state to start from, after which the
    attempt ends."""
    node_health: Literal["off", "warn", "exclude"] = "warn"
    """With `recovery: node`, look at each node before its ranks begin and between rounds. `warn`: a node on which ranks
    cannot train is left out, what is less is told. `exclude`: so is one that is slow or short of something, where
    another takes its place."""
    node_health_limits: NodeHealthLimits = NodeHealthLimits()
    node_health_command: list[SingleLine] = []
    """A site's own check of a node (program and arguments, no shell), before the first ranks on each node. Exit status
    0: it is well."""
    lead: Literal["auto"] | Annotated[int, Field(gt=0)] = "auto"
    """Seconds before the job's end at which rank 0 saves and leaves. `auto`: min(600, a quarter of the limit) for the
    first attempt, later what steps and saves took, measured while it runs."""
    lead_floor: Positive = 30
    """The measured lead is never below this many seconds (nor above half the time limit)."""
    signal_lead: Literal["auto"] | Annotated[int, Field(gt=0)] = "auto"
    """Seconds before the end at which Slurm sends SIGUSR2, the backstop; `auto`: 60 less than the lead, or half."""
    hang_timeout: Positive = 300
    """Seconds without progress after which the ranks are ended; ten usual steps if that is longer. With `recovery:
    node` steps, saves and reads have limits of their own, never shorter than 60 s or this (docs/hangs.md)."""
    start_timeout: Positive = 1800
    """Seconds without progress before the first step (imports, set-up, loading) after which the ranks are ended."""
    triggers_group: str | None = None
    """Name or number of the group that may touch triggers; default: the group of the run directory."""


class TrackingSection(Section):
    """Where the metrics go besides the run directory. W&B is on where WANDB_API_KEY or WANDB_MODE=offline is in the
    environment, under `project` and `name`."""

    tensorboard: bool = False
    """Write event files into the run directory's `tensorboard` folder."""
    log_interval: Positive = 10
    """Iterations between two measurements of what the next four settings ask for. What every line of metrics.jsonl has
    (loss, norm of the gradient, speed, memory) is measured at each."""
    log_params_norm: bool = False
    """Measure the norm of all weights, those of the optimizer where it keeps its own."""
    log_params_norm_per_param: bool = False
    """Measure the norm of each weight by itself; names are those of the model's modules, layers counted from 0 over the
    whole model."""
    log_num_zeros_in_grad: bool = False
    """Count the elements of the gradient that are 0."""
    timing_log_level: Annotated[int, Field(ge=0, le=2)] = 0
    """Megatron's timers. 0: none. 1: what an iteration does once. 2: also what each micro-batch does, as every send and
    receive of the pipeline. Times are taken on the device, and no rank waits for another."""


RESERVED_NSYS_OPTIONS = ("--output", "--capture-range", "--capture-range-end")
"""Options of nsys that say where the files go and what is recorded, which other settings decide."""


class DebugSection(Section):
    """What helps to find out what is wrong; files go to debug/<attempt>/ of the run directory."""

    log_nccl: bool = False
    """NCCL_DEBUG=INFO (where the environment says nothing else), into a file per rank and node."""
    profile: Literal["nsys", "torch"] | None = None
    """`nsys`: NVIDIA's Nsight Systems around the ranks. `torch`: torch.profiler, a Chrome trace per rank."""
    profile_step_start: Positive = 10
    """The first iteration that is profiled."""
    profile_step_end: Positive = 12
    """The last iteration that is profiled."""
    profile_ranks: list[NonNegative] = [0]
    """Ranks that are profiled."""
    nsys_options: list[Annotated[SingleLine, Field(pattern=r"^--[a-z0-9-]+(=.*)?$")]] = []
    """Further options of `nsys profile`, each `--NAME=VALUE`; one that relayrun gives itself takes the place of its:
    --trace=nvtx,cudnn,cublas,cuda and --sample=none."""
    backup_codebase: bool = False
    """Every attempt runs the code as it was at the submit, uncommitted changes included."""
    memory_interval: NonNegative = 60
    """Seconds between lines of memory_logging-<node>.txt; 0: none."""

    @model_validator(mode="after")
    def _own_options_of_nsys(self) -> Self:
        for option in self.nsys_options:
            if (name := option.partition("=")[0]) in RESERVED_NSYS_OPTIONS:
                raise ValueError(
                    f"nsys_options: {name} is relayrun's own; profile_step_start, profile_step_end and "
                    "profile_ranks say what is recorded"
                )
        return self

    @model_validator(mode="after")
    def _steps(self) -> Self:
        if self.profile_step_end < self.profile_step_start:
            raise ValueError(
                f"profile_step_end {self.profile_step_end} is before profile_step_start {self.profile_step_start}"
            )
        return self


class JobPlacement(Section):
    """Where a job may run, and what else it asks of sbatch; names are Slurm's."""

    account: SingleLine | None = None
    """Account that the job is charged to."""
    partition: SingleLine | None = None
    """Partition in which the job waits and runs."""
    qos: SingleLine | None = None
    """Quality of service, a name of the site."""
    reservation: SingleLine | None = None
    """Reservation in which the job runs."""
    constraint: SingleLine | None = None
    """Features that its nodes must have."""
    exclude: SingleLine | None = None
    """Nodes that are left out, as in n[1-3],n7. Bad nodes are left out besides."""
    mem: Annotated[str, Field(pattern=r"^\d+[KMGT]?$")] | None = None
    """Memory of each node, as in 64G."""
    sbatch: SbatchOptions = {}
    """Any other option of sbatch by its long name, as in {gres: "gpu:4", mail-type: END, contiguous: true}."""

    @property
    def placement(self) -> dict[str, str]:
        """The settings that have a value, as options of sbatch, without those of `sbatch`."""
        names = ("account", "partition", "qos", "reservation", "constraint", "exclude", "mem")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @property
    def mem_bytes(self) -> int | None:
        """`mem` in bytes; without a unit it is MiB, as in Slurm. None: not set, or 0, which is all that a node has."""
        if self.mem is None:
            return None
        unit = 10 * (1 + "KMGT".index(self.mem[-1])) if self.mem[-1].isalpha() else 20
        return int(self.mem.rstrip("KMGT")) << unit or None


class JobSection(JobPlacement):
    """What one job asks of the scheduler; names are Slurm's."""

    time: SlurmTime
    """Time limit of one job of the chain: MM, HH:MM:SS or D-HH:MM:SS."""
    nodes: Positive = 1
    """Nodes of one job whose ranks train."""
    spare_nodes: NonNegative = 0
    """Further nodes of one job, with `chain.recovery: node` on Slurm: one takes the place of a node that is lost,
    inside the same job. Until then they do nothing, and cost as much."""
    ntasks_per_node: Positive = 1
    """Ranks per node, one per GPU where there are GPUs."""
    cpus_per_task: Positive = 1
    """Processors of each rank."""
    gpus_per_node: NonNegative = 0
    """GPUs of each node; 0: training on CPUs."""
    exclusive: bool = False
    """No other job runs on the nodes."""
    setup: list[SingleLine] = []
    """Lines of Bash that run on the job's first node before its programs, behind `cluster.modules`. They see the job's
    environment, and change it for the programs. A line that fails ends the chain: it would fail again."""


class EvaluationJob(JobPlacement):
    """What the job of an evaluation asks of the scheduler: one node, one task. What is left out is as in `job`."""

    time: SlurmTime = "01:00:00"
    """Time limit of one evaluation."""
    cpus_per_task: Positive | None = None
    """Processors of the evaluation; default: as many as one rank has."""
    gpus_per_node: NonNegative | None = None
    """GPUs of the evaluation's job; default: one where the run's jobs have GPUs."""


EVALUATION_PLACEHOLDERS = ("model", "results", "checkpoint", "iteration", "checkpoints", "run_dir", "python")
"""What an evaluation job fills in where it stands in braces in its commands."""
_PLACEHOLDER_PATTERN = re.compile(r"\{(\w+)\}")
_PLACEHOLDER_MEANING = {"model": "folder that it makes", "results": "file that it writes"}


class EvaluationSection(Section):
    """Checkpoints that are exported to Hugging Face's form and evaluated, each in a job of its own beside the chain."""

    interval: Positive
    """Iterations between evaluations, a multiple of checkpoint.interval. The last iteration is always evaluated."""
    tasks: list[str] = []
    """Tasks of lm-evaluation-harness (extra `evaluation`); none: `command`, or the mean loss on the validation sets,
    which trainer native alone has."""
    command: list[SingleLine] = []
    """A program of your own in the place of `tasks`, word by word, without a shell: it scores the folder `{model}`, one
    of transformers, and writes a JSON object of numbers by task and metric to `{results}`. Filled in, too:
    `{checkpoint}`, `{iteration}`, `{checkpoints}`, `{run_dir}`, `{python}`."""
    convert: list[SingleLine] = []
    """Where the trainer is not native: a program that makes the folder `{model}` of the checkpoint `{checkpoint}`, with
    the same names filled in. Without it the checkpoint is such a folder itself."""
    include_path: str | None = None
    """Folder of task files (YAML) of your own."""
    num_fewshot: NonNegative | None = None
    """Examples in front of each question; default: the task's own."""
    limit: Positive | None = None
    """Documents of each task, or windows of each validation set; default: all, or as training evaluates."""
    batch_size: Positive = 8
    """Sequences that are scored at a time."""
    keep_exported: bool = False
    """Keep the exported folders, in evaluations/ of the run directory."""
    hold: NonNegative = 3
    """Checkpoints that may wait for their export although checkpoint.keep_last would remove them."""
    job: EvaluationJob = EvaluationJob()

    @model_validator(mode="after")
    def _of_commands(self) -> Self:
        if self.tasks and self.command:
            raise ValueError("tasks and command are two ways to a score; set one of them")
        for name, words, needed in (("convert", self.convert, "model"), ("command", self.command, "results")):
            found = [each[1] for word in words for each in _PLACEHOLDER_PATTERN.finditer(word)]
            if words and needed not in found:
                raise ValueError(f"{name} needs {{{needed}}}, the {_PLACEHOLDER_MEANING[needed]}, among its words")
            for each in found:
                near = difflib.get_close_matches(each, EVALUATION_PLACEHOLDERS, n=1, cutoff=0.7)
                if each not in EVALUATION_PLACEHOLDERS and near:
                    raise ValueError(f"{name}: {{{each}}} is not filled in; did you mean {{{near[0]}}}?")
        return self


class ClusterSection(Section):
    """What a site needs; a file of configs/clusters/."""

    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    """Name of the site."""
    not_checked: list[SingleLine] = []
    """What of its site file could not be read in the site's documentation. `relayrun check` names it."""
    scheduler: Literal["slurm", "local"]
    """`slurm`, or `local` for jobs one after the other on this machine."""
    job: dict[str, Any] = {}
    """Defaults of the `job` section at this site (account, partition, ...)."""
    notify: dict[str, Any] = {}
    """Defaults of the `notify` section at this site."""
    environment: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], SingleLine] = {}
    """Variables of every rank. They override relayrun's own defaults. Never put secrets here."""
    modules: list[SingleLine] = []
    """`module load` names, loaded in the batch script."""
    srun_options: list[SingleLine] = []
    """Options of srun alone, for example `--mpi=none`."""
    container: ContainerSection = ContainerSection()
    """What ranks, evaluations and tokenization run in."""
    command_prefix: list[SingleLine] = []
    """Put before the program of every rank, in the container, for example `numactl --membind=0-3`."""
    python: SingleLine | None = None
    """Python of the ranks, in the container; default without a container: the one that submits."""
    transformer_engine: bool = False
    """TransformerEngine is installed where the ranks run (in the container)."""
    host_python: SingleLine = "python3"
    """Python of the batch script, 3.11 or newer; needs the standard library alone."""
    read_only_paths: list[str] = []
    """Nothing may be written below these."""
    purge_days: dict[SingleLine, Annotated[float, Field(gt=0)]] = {}
    """Folders whose files the site removes, each with the days without use after which it does, for example
    `{/scratch: 30}`. `relayrun check`, `status` and `sentinel` tell before the newest checkpoint or data go."""
    quota_command: list[SingleLine] = []
    """Program and arguments that say the quota where `lfs quota` and `quota` do not; `{path}` becomes the run's folder
    of checkpoints, `{user}` the user's number. It prints `{"used": BYTES, "limit": BYTES}` (and `used_files`,
    `limit_files`), or a table as `quota` does. `status`, `sentinel` and notices tell before it is full."""
    gpu_memory_gb: Annotated[float, Field(gt=0)] | None = None
    """Memory of one GPU in 10^9 bytes, for `relayrun check`; None: not known."""
    tflops_per_gpu: Annotated[float, Field(gt=0)] | None = None
    """Model TFLOP/s that a GPU is taken to reach until a run of the same shape has been measured; None: not known."""
    cost_per_node_hour: Annotated[float, Field(gt=0)] | None = None
    """What an hour of one node costs, for `relayrun check`."""
    currency: SingleLine = ""
    """Unit of cost_per_node_hour, for example CHF."""
    node_mtbf_hours: Annotated[float, Field(gt=0)] | None = None
    """Mean hours between failures of one node; a run's own failures count instead, where it has had any."""

    @model_validator(mode="after")
    def _fitting_container(self) -> Self:
        if self.scheduler == "local" and self.container.runtime in ("pyxis", "edf"):
            raise ValueError(f"container.runtime {self.container.runtime} is srun's, and scheduler local has none")
        if self.container.runtime != "none" and self.python is None:
            raise ValueError("a container has a Python of its own; set cluster.python to its path in the container")
        return self
