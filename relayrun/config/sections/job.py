"""Jobs of a run and their company: `chain`, `tracking`, `debug`, `job`, `evaluation`, `cluster`."""

import difflib
import re
import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from relayrun.config.sections.base import NAME_PATTERN, Section, SlurmTime
from relayrun.config.sections.batch_systems import BATCH_SYSTEMS, batch_system
from relayrun.config.sections.chain import FailureSignature
from relayrun.config.sections.dataclass_section import NonNegative, Positive, SingleLine
from relayrun.config.sections.job_script import ContainerSection, SbatchOptions


class TrackingSection(Section):
    """Destinations of metrics besides the run directory. W&B is on if the environment has WANDB_API_KEY or
    WANDB_MODE=offline, under `project` and `name`."""

    tensorboard: bool = False
    """Write event files into the run directory's `tensorboard` folder."""
    log_interval: Positive = 10
    """Iterations between two measurements for the next four settings. The fields of every line of metrics.jsonl (loss,
    norm of the gradient, speed, memory) are measured at each iteration."""
    log_params_norm: bool = False
    """Measure the norm of all weights, of the optimizer's own weights if it has them."""
    log_params_norm_per_param: bool = False
    """Measure the norm of each weight; names are those of the model's modules, layers counted from 0 over the whole
    model."""
    log_num_zeros_in_grad: bool = False
    """Count the elements of the gradient that are 0."""
    timing_log_level: Annotated[int, Field(ge=0, le=2)] = 0
    """Megatron's timers. 0: none. 1: parts of an iteration that run once. 2: also parts of each micro-batch, such as
    every send and receive of the pipeline. Times are taken on the device, and no rank waits for another."""


RESERVED_NSYS_OPTIONS = ("--output", "--capture-range", "--capture-range-end")
"""Options of nsys for files and recording, which other settings decide."""


class DebugSection(Section):
    """Debugging aids; files go to debug/<attempt>/ of the run directory."""

    log_nccl: bool = False
    """Set NCCL_DEBUG=INFO (unless the environment sets it), into a file per rank and node."""
    profile: Literal["nsys", "torch"] | None = None
    """`nsys`: NVIDIA's Nsight Systems around the ranks. `torch`: torch.profiler, a Chrome trace per rank."""
    profile_step_start: Positive = 10
    """First iteration to profile."""
    profile_step_end: Positive = 12
    """Last iteration to profile."""
    profile_ranks: list[NonNegative] = [0]
    """Ranks to profile."""
    nsys_options: list[Annotated[SingleLine, Field(pattern=r"^--[a-z0-9-]+(=.*)?$")]] = []
    """Further options of `nsys profile`, each `--NAME=VALUE`; they replace equal options of relayrun:
    --trace=nvtx,cudnn,cublas,cuda and --sample=none."""
    backup_codebase: bool = False
    """Every attempt runs the code as it was at the submit, uncommitted changes included."""
    memory_interval: NonNegative = 60
    """Seconds between lines of memory_logging-<node>.txt; 0: none."""

    @model_validator(mode="after")
    def _profiler(self) -> Self:
        for option in self.nsys_options:
            if (name := option.partition("=")[0]) in RESERVED_NSYS_OPTIONS:
                raise ValueError(
                    f"nsys_options: {name} is relayrun's own; profile_step_start, profile_step_end and "
                    "profile_ranks say what is recorded"
                )
        if self.profile_step_end < self.profile_step_start:
            raise ValueError(
                f"profile_step_end {self.profile_step_end} is before profile_step_start {self.profile_step_start}"
            )
        return self


class JobPlacement(Section):
    """Placement of a job, and its other options of sbatch; names are Slurm's."""

    account: SingleLine | None = None
    """Account that the job is charged to."""
    partition: SingleLine | None = None
    """Partition in which the job waits and runs."""
    qos: SingleLine | None = None
    """Quality of service, a name of the site."""
    reservation: SingleLine | None = None
    """Reservation in which the job runs."""
    constraint: SingleLine | None = None
    """Required features of the nodes."""
    exclude: SingleLine | None = None
    """Nodes to exclude, as in n[1-3],n7. Bad nodes are excluded in addition."""
    mem: Annotated[str, Field(pattern=r"^\d+[KMGT]?$")] | None = None
    """Memory of each node, as in 64G."""
    sbatch: SbatchOptions = {}
    """Any other option of sbatch by its long name, as in {gres: "gpu:4", mail-type: END, contiguous: true}."""

    @property
    def placement(self) -> dict[str, str]:
        """The settings with a value, as options of sbatch, without those in `sbatch`."""
        names = ("account", "partition", "qos", "reservation", "constraint", "exclude", "mem")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @property
    def mem_bytes(self) -> int | None:
        """`mem` in bytes; without a unit it is MiB, as in Slurm. None: not set, or 0, which is the whole memory of a
        node."""
        if self.mem is None:
            return None
        unit = 10 * (1 + "KMGT".index(self.mem[-1])) if self.mem[-1].isalpha() else 20
        return int(self.mem.rstrip("KMGT")) << unit or None


class JobSection(JobPlacement):
    """Resources of a job; names are Slurm's."""

    time: SlurmTime
    """Time limit of a job of the chain: MM, HH:MM:SS or D-HH:MM:SS."""
    nodes: Positive = 1
    """Nodes of a job whose ranks train, ntasks_per_node on each."""
    spare_nodes: NonNegative = 0
    """Further nodes of a job, with `chain.recovery: node` on Slurm: a spare node replaces a lost node inside the same
    job. Until then spare nodes are idle, and cost as much."""
    ntasks_per_node: Positive = 1
    """Ranks per node, one per GPU if there are GPUs."""
    cpus_per_task: Positive = 1
    """Processors of each rank."""
    gpus_per_node: NonNegative = 0
    """GPUs of each node; 0: training on CPUs."""
    exclusive: bool = False
    """Allocate whole nodes to the job."""
    setup: list[SingleLine] = []
    """Lines of Bash that run on the job's first node before its programs, after `cluster.modules`. They see the job's
    environment, and change it for the programs. A failing line ends the chain: it would fail again."""


class EvaluationJob(JobPlacement):
    """Resources of the job of an evaluation: one node, one task. Settings that are left out are as in `job`."""

    time: SlurmTime = "01:00:00"
    """Time limit of an evaluation."""
    cpus_per_task: Positive | None = None
    """Processors of the evaluation; default: as many as a rank."""
    gpus_per_node: NonNegative | None = None
    """GPUs of the evaluation's job, over which the model is spread; default: one if the run's jobs have GPUs."""

    def gpus(self, of_run: int) -> int:
        """Return the GPUs of the job. `of_run`: GPUs of a node of the run's jobs."""
        return min(1, of_run) if self.gpus_per_node is None else self.gpus_per_node


EVALUATION_PLACEHOLDERS = ("model", "results", "checkpoint", "iteration", "checkpoints", "run_dir", "python")
"""Placeholders in braces in the commands of an evaluation job."""
_PLACEHOLDER_PATTERN = re.compile(r"\{(\w+)\}")
_PLACEHOLDER_MEANING = {"model": "folder that it makes", "results": "file that it writes"}


class EvaluationSection(Section):
    """Evaluation of checkpoints: exported to Hugging Face's format and scored, each in its own job beside the chain."""

    interval: Positive
    """Iterations between evaluations, a multiple of checkpoint.interval. The last iteration is always evaluated."""
    tasks: list[str] = []
    """Tasks of lm-evaluation-harness (extra `evaluate`); none: `command`, or the mean loss on the validation sets,
    with trainer native alone."""
    command: list[SingleLine] = []
    """A program of your own in place of `tasks`, word by word, without a shell: it scores the folder `{model}`, in
    transformers' format, and writes a JSON object of numbers by task and metric to `{results}`. Further placeholders:
    `{checkpoint}`, `{iteration}`, `{checkpoints}`, `{run_dir}`, `{python}`."""
    convert: list[SingleLine] = []
    """For trainers other than native: a program that makes the folder `{model}` from the checkpoint `{checkpoint}`,
    with the same placeholders. Without it the checkpoint itself is such a folder."""
    include_path: str | None = None
    """Folder of your own task files (YAML)."""
    num_fewshot: NonNegative | None = None
    """Examples in front of each question; default: the task's own."""
    limit: Positive | None = None
    """Documents of each task, or windows of each validation set; default: all, or as in training."""
    batch_size: Positive = 8
    """Sequences that are scored at a time."""
    keep_exported: bool = False
    """Keep the exported folders, in evaluations/ of the run directory."""
    hold: NonNegative = 3
    """Maximum checkpoints that wait for their export although checkpoint.keep_last would remove them."""
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


if TYPE_CHECKING:
    SchedulerName = str
else:
    SchedulerName = Literal[tuple(BATCH_SYSTEMS)]


class ClusterSection(Section):
    """Settings of a site; a file of configs/clusters/."""

    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    """Name of the site."""
    not_checked: list[SingleLine] = []
    """Facts of the site file that the site's documentation does not confirm. `relayrun check` names them."""
    probed: dict[SingleLine, list[SingleLine]] = {}
    """Facts that `relayrun site probe` measured. `relayrun check` warns of those that a run meets."""
    scheduler: SchedulerName
    """`slurm`, or `local` for jobs one after the other on this machine."""
    job: dict[str, Any] = {}
    """Defaults of the `job` section at this site (account, partition, ...)."""
    notify: dict[str, Any] = {}
    """Defaults of the `notify` section at this site."""
    environment: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], SingleLine] = {}
    """Variables of every rank. They override relayrun's own defaults. Never put secrets here."""
    modules: list[SingleLine] = []
    """Names for `module load` in the batch script."""
    srun_options: list[SingleLine] = []
    """Options of srun alone, for example `--mpi=none`."""
    container: ContainerSection = ContainerSection()
    """Container of ranks, evaluations and tokenization."""
    command_prefix: list[SingleLine] = []
    """Words before the program of every rank, in the container, for example `numactl --membind=0-3`."""
    python: SingleLine | None = None
    """Python of the ranks, in the container; default without a container: the one that submits."""
    transformer_engine: bool = False
    """TransformerEngine is installed for the ranks (in the container)."""
    host_python: SingleLine = "python3"
    """Python of the batch script, 3.10 or newer; needs the standard library alone."""
    read_only_paths: list[str] = []
    """Folders that relayrun never writes to."""
    quota_command: list[SingleLine] = []
    """Program and arguments that report the quota if `lfs quota` and `quota` do not; `{path}` becomes the run's folder
    of checkpoints, `{user}` the user's number. It prints `{"used": BYTES, "limit": BYTES}` (and `used_files`,
    `limit_files`), or a table like `quota`. `status`, `sentinel` and notices say how full it is."""
    gpu_memory_gb: Annotated[float, Field(gt=0)] | None = None
    """Memory of a GPU in 10^9 bytes, for `relayrun check`; None: unknown."""
    tflops_per_gpu: Annotated[float, Field(gt=0)] | None = None
    """Assumed model TFLOP/s of a GPU until a run of the same shape has been measured; None: unknown."""
    cost_per_node_hour: Annotated[float, Field(gt=0)] | None = None
    """Cost of an hour of a node, for `relayrun check` and `submit`."""
    currency: SingleLine = ""
    """Unit of cost_per_node_hour, for example CHF."""
    ask_above_node_hours: Annotated[float, Field(ge=0)] | None = None
    """The site's value of chain.ask_above_node_hours; None: a submit never asks."""
    failure_signatures: list[FailureSignature] = []
    """The site's entries of the table of failures (`relayrun help why`): they stand before relayrun's own."""
    node_mtbf_hours: Annotated[float, Field(gt=0)] | None = None
    """Mean hours between failures of a node; replaced by the run's own failures once it has had any."""

    @model_validator(mode="after")
    def _fitting_container(self) -> Self:
        if not batch_system(self.scheduler).slurm and self.container.runtime in ("pyxis", "edf"):
            words = f"container.runtime {self.container.runtime} is srun's, and scheduler {self.scheduler} has none"
            raise ValueError(words)
        if self.container.runtime != "none" and self.python is None:
            raise ValueError("a container has a Python of its own; set cluster.python to its path in the container")
        return self

    @property
    def rank_python(self) -> str:
        """Python of the ranks: `python`, or the interpreter that submits."""
        return self.python or sys.executable
