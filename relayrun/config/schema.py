"""What a run is: every setting with its unit, its default and what it is called elsewhere.

A field name is the one that Megatron or Slurm use, where they have one. Unknown names are errors;
`relayrun.config.compose` turns them into one that names the file, the line and the nearest valid name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from relayrun.config.rampup import BatchSizes
from relayrun.slurmtime import parse_time

_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


def _time_text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f"{value!r} is no Slurm time; write MM, HH:MM:SS or D-HH:MM:SS")
    if parse_time(str(value)) <= 0:
        raise ValueError("the time limit must be positive")
    return str(value).strip()


SlurmTime = Annotated[str, BeforeValidator(_time_text)]
Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A part of the config: no unknown names, no silent conversion, no change after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Model(Section):
    """A Llama: RMSNorm, SwiGLU, rotary positions, grouped-query attention (arXiv 2407.21783)."""

    num_layers: Positive
    hidden_size: Positive
    ffn_hidden_size: Positive
    num_attention_heads: Positive
    num_query_groups: Positive
    """Key-value heads; equal to num_attention_heads for plain multi-head attention."""
    rotary_base: Positive = 500_000
    rope_scaling_factor: Annotated[float, Field(ge=1)] | None = None
    """Llama 3.1's stretching of the low rotary frequencies, over an original context of 8,192; None: none."""
    norm_epsilon: float = 1e-5
    init_method_std: float = 0.02
    hidden_dropout: Fraction = 0.0
    attention_dropout: Fraction = 0.0
    untie_embeddings_and_output_weights: bool = True
    make_vocab_size_divisible_by: Positive = 128
    """The vocabulary is padded to a multiple of this, however the model is split: a checkpoint fits every layout."""

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(f"hidden_size {self.hidden_size} is no multiple of "
                             f"num_attention_heads {self.num_attention_heads}")  # fmt: skip
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(f"num_attention_heads {self.num_attention_heads} is no multiple of "
                             f"num_query_groups {self.num_query_groups}")  # fmt: skip
        return self


class Source(Section):
    """One data set of a mixture."""

    path: str | list[str] | None = None
    """Folders of .bin/.idx shards, shards (without suffix), or patterns of either; only a user's own order may
    do without."""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """Share of the samples, in any unit: the weights of a mixture are divided by their sum."""
    order: str | None = None
    """`window`, `megatron` or `module:callable`; default: data.order."""
    options: dict[str, Any] = {}
    """Given to a user's own order."""
    edition: Positive = 1
    """Rises when the files are replaced by others. Set by submit."""

    def identity(self, name: str) -> str:
        """Under which the data set called `name` is counted."""
        return name if self.edition == 1 else f"{name}@{self.edition}"

    @property
    def paths(self) -> list[str]:
        return [] if self.path is None else [self.path] if isinstance(self.path, str) else self.path


MOCK_ORDER = "relayrun.data.mock:MockDataset"

_ORDER = re.compile(r"window|megatron|[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class Data(Section):
    """Which tokens are read, and in which order. Relative paths start at the folder that holds `launchers/`."""

    tokenizer: str
    """Folder or file of the tokenizer the shards were made with (for its size and its end of document)."""
    datasets: list[str] = []
    """Folders of .bin/.idx shards; links are followed. Short for a mixture of one data set, `train`."""
    mixture: dict[Annotated[str, Field(pattern=_NAME)], Source] = {}
    """Data sets by name. May be given as the name of a YAML or JSON file that holds this, or as `path*,0.3;path*,0.7`.
    A mixture that is changed on a resume goes on in every data set where it was."""
    validation: dict[Annotated[str, Field(pattern=_NAME)], list[str]] = {}
    """Held-out sets by name, each a list of folders; never part of training."""
    split: Fraction = 0.0
    """Share of each data set's windows, at its end, that is held out: a validation set of the data set's name."""
    order: str = "window"
    """How a data set's windows are cut and shuffled: `window`, without an index; `megatron`, megatron-core's
    GPTDataset for each epoch; `module:callable`, a user's own."""
    data_cache_dir: str | None = None
    """Folder for the indices of `order: megatron`; without it every rank builds them in memory."""
    reset_position_ids: bool = False
    """Positions start at 0 after each end of document. Rotary positions are relative: no effect on a Llama."""
    reset_attention_mask: bool = False
    """A token sees only its own document."""
    eod_mask_loss: bool = False
    """What follows an end of document is not predicted: its loss does not count."""
    mock_data: bool = False
    """Made-up tokens in place of tokenizer, data sets and validation sets, whatever these are: nothing is read."""
    mock_vocabulary_size: Positive = 128_256
    """Of the made-up tokens; Llama 3's."""

    @model_validator(mode="before")
    @classmethod
    def _mock(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("mock_data") is not True:
            return values
        size = values.get("mock_vocabulary_size", cls.model_fields["mock_vocabulary_size"].default)
        source = {"weight": 1.0, "order": MOCK_ORDER, "options": {"vocabulary_size": size}}
        rest = {name: value for name, value in values.items() if name not in ("datasets", "validation", "split")}
        return rest | {"mixture": {"mock": source}}

    @property
    def sources(self) -> dict[str, Source]:
        """The mixture, also where `datasets` is given."""
        return self.mixture or {"train": Source(path=self.datasets, weight=1.0)}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if bool(self.datasets) == bool(self.mixture):
            raise ValueError("give either datasets or mixture")
        for name, source in self.sources.items():
            order = source.order or self.order
            if not _ORDER.fullmatch(order):
                raise ValueError(f"order {order!r} is none of window, megatron, module:callable")
            own = ":" in order
            if not source.paths and not own:
                raise ValueError(f"mixture.{name}: this data set has no path")
            if own and self.split:
                raise ValueError(f"mixture.{name}: data.split cannot hold out a part of a user's own order {order!r}; "
                                 "hold data out by path")  # fmt: skip
            if self.split and name in self.validation:
                raise ValueError(f"data.split makes a validation set {name!r}, and data.validation has one too")
        return self


class Training(Section):
    """How long and in which batches."""

    steps: Positive
    """Iterations (optimizer steps) until the run is done."""
    micro_batch_size: Positive
    """Samples that one data-parallel rank runs at a time."""
    global_batch_size: Positive
    """Samples of one iteration over all ranks; the rest is gradient accumulation. With a ramp: at its end."""
    rampup_batch_size: list[Any] | None = None
    """Smaller batches at the beginning. As in Megatron [start, increment, samples]: from start to global_batch_size in
    steps of increment, over that many samples; or [[size, samples], ...]: size until samples are consumed."""
    seq_length: Positive
    """Tokens of one sample."""
    seed: NonNegative = 28
    """Of weights, dropout and data order."""
    eval_interval: NonNegative = 0
    """Iterations between evaluations on the validation sets; the last iteration always evaluates. 0: only then."""
    eval_steps: Positive = 8
    """Global batches per validation set and evaluation."""
    threads: NonNegative = 0
    """CPU threads of a rank (torch.set_num_threads); 0 leaves torch's own choice."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of weights and activations. With bf16 the optimizer keeps fp32 weights; gradients are summed in fp32."""
    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    """Layers of TransformerEngine, or local ones: attention on torch's SDPA (flash on GPUs) and torch's fused norms.
    auto: TransformerEngine on a GPU where it is installed, except with data.reset_attention_mask."""
    recompute_granularity: Literal["full"] | None = None
    """full: keep only the inputs of the layers and compute the rest again in the backward pass. Saves memory."""
    recompute_num_layers: Positive | None = None
    """Of each pipeline stage (of each part, with virtual stages) only so many layers, the first ones; Megatron's
    recompute_method block. None: all of them."""
    manual_gc_interval: NonNegative = 0
    """Iterations between Python's garbage collections, at the same time on all ranks; 0 leaves it to Python."""
    on_nan: Literal["stop", "skip", "rewind"] = "stop"
    """Where loss or gradient norm are no finite number. stop: end the chain. skip: leave out this update.
    rewind: go back to the newest checkpoint and pass over the samples from there up to these."""
    on_spike: Literal["ignore", "stop", "skip", "rewind"] = "ignore"
    """The same where the loss is a spike: above the median of the last losses by spike_threshold median deviations."""
    spike_window: Annotated[int, Field(ge=8)] = 128
    """Iterations whose losses a spike is measured against."""
    spike_threshold: Annotated[float, Field(gt=0)] = 10.0
    """In median absolute deviations; 10 are 6.7 standard deviations of normal noise."""
    max_skips: Positive = 10
    """Updates left out in a row, after which one more stops the chain."""
    max_rewinds: NonNegative = 3
    """Rewinds of the whole run, after which one more stops the chain."""

    @property
    def batch_sizes(self) -> BatchSizes:
        return BatchSizes(self.global_batch_size, self.rampup_batch_size)

    @model_validator(mode="after")
    def _recompute(self) -> Self:
        if self.recompute_num_layers is not None and self.recompute_granularity is None:
            raise ValueError("recompute_num_layers needs recompute_granularity full")
        return self

    @model_validator(mode="after")
    def _ramp(self) -> Self:
        try:
            _ = self.batch_sizes
        except ValueError as error:
            raise ValueError(f"rampup_batch_size: {error}") from None
        return self


class Optimizer(Section):
    """Adam with decoupled weight decay, and the learning rate's way. Names as in Megatron's arguments."""

    lr: Annotated[float, Field(gt=0)]
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "cosine"
    """WSD: constant after the warm-up, then down over lr_wsd_decay_steps."""
    lr_warmup_steps: NonNegative = 0
    lr_warmup_tokens: Positive | None = None
    """Instead of lr_warmup_steps; rounded up to whole iterations."""
    lr_decay_steps: Positive | None = None
    """Iterations until min_lr is reached; default: training.steps."""
    lr_decay_tokens: Positive | None = None
    """Instead of lr_decay_steps; rounded up to whole iterations."""
    lr_wsd_decay_steps: Positive | None = None
    """Iterations of the way down of WSD, which end at lr_decay_steps."""
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "linear"
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    adam_beta1: Fraction = 0.9
    adam_beta2: Fraction = 0.95
    adam_eps: Annotated[float, Field(gt=0)] = 1e-8
    clip_grad: Annotated[float, Field(ge=0)] = 1.0


class Checkpoint(Section):
    """When the state is made durable. A leave (time, signal, trigger, last step) always saves too."""

    interval: Positive
    """Iterations between saves."""
    keep_last: Positive = 3
    """Published checkpoints that are kept; older ones are removed."""
    keep_every: Positive | None = None
    """Checkpoints whose iteration is a multiple of this are never removed."""
    async_save: bool = True
    """Write while training goes on, from a copy in host memory (on each rank, as large as what it saves). A save that
    is due while one is under way waits for it."""
    writer_threads: Positive = 2
    """Files that each rank writes at a time."""
    load: str | None = None
    """What a run without a checkpoint of its own goes on from: another run (its directory, or PROJECT/NAME) or the
    folder of a checkpoint; `:ITERATION` behind a run takes another than its newest."""
    finetune: bool = False
    """Of `load` the weights alone: iterations, optimizer, random numbers and data begin anew."""
    no_load_optim: bool = False
    """Of `load` not the state of the optimizer; iterations and data go on."""
    no_load_data: bool = False
    """Of `load` not the position in the data: they begin anew, and may be others. Iterations go on."""

    @model_validator(mode="after")
    def _of_load(self) -> Self:
        for name in ("finetune", "no_load_optim", "no_load_data"):
            if getattr(self, name) and self.load is None:
                raise ValueError(f"{name} says what of `load` is left out, and load is not set")
        return self


class Parallel(Section):
    """How the model is split over ranks; what is left of the ranks is data-parallel."""

    tensor_model_parallel_size: Positive = 1
    pipeline_model_parallel_size: Positive = 1
    num_layers_per_virtual_pipeline_stage: Positive | None = None
    """Layers of one of several parts that a pipeline stage holds, for a smaller pipeline bubble; None: one part."""
    sequence_parallel: bool = False
    """Split norms and dropout over the tensor-parallel ranks by sequence."""
    context_parallel_size: Positive = 1
    """Split every sequence over this many ranks; needs TransformerEngine's attention."""
    use_distributed_optimizer: bool = False
    """Split the optimizer's state over the data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Reduce gradients while the backward pass goes on."""
    overlap_param_gather: bool = False
    """Gather the updated weights while the forward pass goes on."""

    @property
    def virtual_stages(self) -> bool:
        return self.num_layers_per_virtual_pipeline_stage is not None

    @model_validator(mode="after")
    def _rules(self) -> Self:
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ValueError("sequence_parallel splits over tensor-parallel ranks: it needs "
                             "tensor_model_parallel_size above 1")  # fmt: skip
        if self.virtual_stages and self.pipeline_model_parallel_size == 1:
            raise ValueError("num_layers_per_virtual_pipeline_stage needs pipeline_model_parallel_size above 1")
        if self.overlap_param_gather and not (self.use_distributed_optimizer and self.overlap_grad_reduce):
            raise ValueError("overlap_param_gather needs use_distributed_optimizer and overlap_grad_reduce")
        return self


class Chain(Section):
    """How one job follows the other."""

    auto_requeue: bool = False
    """Queue a successor behind every job until the run is done. Costs node hours unattended: off by default."""
    mode: Literal["singleton", "requeue"] = "singleton"
    """singleton: a successor is queued behind every job. requeue: the job queues itself again, under the same id."""
    max_failed_attempts: Positive = 3
    """Attempts in a row without a new durable iteration, after which the chain stops."""
    lead: Literal["auto"] | Annotated[int, Field(gt=0)] = "auto"
    """Seconds before the job's end at which rank 0 saves and leaves. auto: min(600, a quarter of the limit) for the
    first attempt, later what steps and saves took, measured while it runs."""
    lead_floor: Positive = 30
    """The measured lead is never below this many seconds (nor above half the time limit)."""
    signal_lead: Literal["auto"] | Annotated[int, Field(gt=0)] = "auto"
    """Seconds before the end at which Slurm sends SIGUSR2, the backstop; auto: 60 less than the lead, or half of it."""
    hang_timeout: Positive = 300
    """Seconds without progress after which the ranks are ended; ten usual steps if that is longer."""
    start_timeout: Positive = 1800
    """The same before the first step: imports, set-up, loading."""
    triggers_group: str | None = None
    """Name or number of the group that may touch triggers; default: the group of the run directory."""


class Tracking(Section):
    """Where the metrics go besides the run directory. W&B is on where WANDB_API_KEY or WANDB_MODE=offline is in the
    environment, under `project` and `name`."""

    tensorboard: bool = False
    """Write event files into the run directory's `tensorboard` folder."""


class Debug(Section):
    """What helps to find out what is wrong; files go to debug/<attempt>/ of the run directory."""

    log_nccl: bool = False
    """NCCL_DEBUG=INFO (where the environment says nothing else), into a file per rank and node."""
    profile: Literal["nsys", "torch"] | None = None
    """nsys: NVIDIA's Nsight Systems around the ranks. torch: torch.profiler, a Chrome trace per rank."""
    profile_step_start: Positive = 10
    """The first iteration that is profiled."""
    profile_step_end: Positive = 12
    """The last one."""
    profile_ranks: list[NonNegative] = [0]
    backup_codebase: bool = False
    """Every attempt runs the code as it was at the submit, uncommitted changes included."""
    memory_interval: NonNegative = 60
    """Seconds between lines of memory_logging-<node>.txt; 0: none."""

    @model_validator(mode="after")
    def _steps(self) -> Self:
        if self.profile_step_end < self.profile_step_start:
            raise ValueError(f"profile_step_end {self.profile_step_end} is before "
                             f"profile_step_start {self.profile_step_start}")  # fmt: skip
        return self


class Job(Section):
    """What one job asks of the scheduler; names are Slurm's."""

    time: SlurmTime
    nodes: Positive = 1
    ntasks_per_node: Positive = 1
    """Ranks per node, one per GPU where there are GPUs."""
    cpus_per_task: Positive = 1
    gpus_per_node: NonNegative = 0
    mem: Annotated[str, Field(pattern=r"^\d+[KMGT]?$")] | None = None
    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    reservation: str | None = None
    constraint: str | None = None
    exclude: str | None = None
    exclusive: bool = False


class EvaluationJob(Section):
    """What the job of an evaluation asks of the scheduler: one node, one task. What is left out is as in `job`."""

    time: SlurmTime = "01:00:00"
    cpus_per_task: Positive | None = None
    gpus_per_node: NonNegative | None = None
    """Default: one where the run's jobs have GPUs."""
    mem: Annotated[str, Field(pattern=r"^\d+[KMGT]?$")] | None = None
    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    reservation: str | None = None
    constraint: str | None = None
    exclude: str | None = None


class Evaluation(Section):
    """Checkpoints that are exported to Hugging Face's form and evaluated, each in a job of its own beside the chain."""

    interval: Positive
    """Iterations; a multiple of checkpoint.interval. The last iteration is always evaluated."""
    tasks: list[str] = []
    """Tasks of lm-evaluation-harness (extra `evaluation`); none: the mean loss on the validation sets."""
    include_path: str | None = None
    """Folder of task files (YAML) of your own."""
    num_fewshot: NonNegative | None = None
    limit: Positive | None = None
    """Documents of each task, or windows of each validation set; default: all, or as training evaluates."""
    batch_size: Positive = 8
    keep_exported: bool = False
    """Keep the exported folders, in evaluations/ of the run directory."""
    hold: NonNegative = 3
    """Checkpoints that may wait for their export although checkpoint.keep_last would remove them."""
    job: EvaluationJob = EvaluationJob()


class Cluster(Section):
    """What a site needs; a file of configs/clusters/."""

    name: Annotated[str, Field(pattern=_NAME)]
    scheduler: Literal["slurm", "local"]
    job: dict[str, Any] = {}
    """Defaults of the `job` section at this site (account, partition, ...)."""
    environment: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str] = {}
    """Variables of every rank. They override relayrun's own defaults. Never put secrets here."""
    modules: list[str] = []
    """`module load` names, loaded in the batch script."""
    srun_options: list[str] = []
    """Options of srun alone: container image, mounts (`--environment=...`, `--container-image=...`)."""
    command_prefix: list[str] = []
    """Put before the program of every rank, for example `numactl --membind=0-3`."""
    python: str | None = None
    """Python of the ranks; default: the one that submits."""
    transformer_engine: bool = False
    """TransformerEngine is installed where the ranks run (in the container)."""
    host_python: str = "python3"
    """Python of the batch script, 3.11 or newer; needs the standard library alone."""
    read_only_paths: list[str] = []
    """Nothing may be written below these."""


class RunConfig(Section):
    """One experiment."""

    project: Annotated[str, Field(pattern=_NAME)]
    name: Annotated[str, Field(pattern=_NAME)]
    run_dir: str | None = None
    """Default: logs/runs/<project>/<name>."""
    model: Model
    data: Data
    training: Training
    optimizer: Optimizer
    checkpoint: Checkpoint
    parallel: Parallel = Parallel()
    chain: Chain = Chain()
    tracking: Tracking = Tracking()
    debug: Debug = Debug()
    job: Job
    evaluation: Evaluation | None = None
    cluster: Cluster

    @property
    def world_size(self) -> int:
        """Ranks of one job."""
        return self.job.nodes * self.job.ntasks_per_node

    @property
    def virtual_stages(self) -> int:
        """Parts of the model on one pipeline stage."""
        layers = self.parallel.num_layers_per_virtual_pipeline_stage
        return self.model.num_layers // self.parallel.pipeline_model_parallel_size // layers if layers else 1

    @property
    def data_parallel_size(self) -> int:
        return self.world_size // self.model_parallel_size

    @property
    def model_parallel_size(self) -> int:
        """Ranks that share one replica of the model and one sequence: tensor x pipeline x context parallel."""
        parallel = self.parallel
        return (
            parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size * parallel.context_parallel_size
        )

    @model_validator(mode="after")
    def _profiled(self) -> Self:
        beyond = [rank for rank in self.debug.profile_ranks if rank >= self.world_size]
        if self.debug.profile is not None and beyond:
            raise ValueError(
                f"debug.profile_ranks: there is no rank {beyond[0]}; the ranks are 0 to {self.world_size - 1}"
            )
        return self

    @model_validator(mode="after")
    def _layout(self) -> Self:
        tensor, pipeline = self.parallel.tensor_model_parallel_size, self.parallel.pipeline_model_parallel_size
        context = self.parallel.context_parallel_size
        if self.world_size % self.model_parallel_size:
            raise ValueError(
                f"{self.world_size} ranks (job.nodes x job.ntasks_per_node) are no multiple of "
                f"tensor x pipeline x context parallel size {tensor} x {pipeline} x {context}"
            )
        self._check_attention()
        if self.model.num_layers % pipeline:
            raise ValueError(f"model.num_layers {self.model.num_layers} is no multiple of "
                             f"parallel.pipeline_model_parallel_size {pipeline}")  # fmt: skip
        for name in ("num_query_groups", "ffn_hidden_size"):
            if getattr(self.model, name) % tensor:
                raise ValueError(f"model.{name} {getattr(self.model, name)} is no multiple of "
                                 f"parallel.tensor_model_parallel_size {tensor}")  # fmt: skip
        if self.model.make_vocab_size_divisible_by % tensor:
            raise ValueError(
                f"model.make_vocab_size_divisible_by {self.model.make_vocab_size_divisible_by} is no multiple of "
                f"parallel.tensor_model_parallel_size {tensor}"
            )
        if self.parallel.sequence_parallel and self.training.seq_length % tensor:
            raise ValueError(f"training.seq_length {self.training.seq_length} is no multiple of "
                             f"parallel.tensor_model_parallel_size {tensor}, as sequence_parallel needs")  # fmt: skip
        batch = self.training.micro_batch_size * self.data_parallel_size
        stages = self.training.batch_sizes.stages
        for number, part in enumerate(stages, start=1):
            what = f"training.global_batch_size {part.size}"
            if number < len(stages):
                what = f"training.rampup_batch_size, stage {number} of {len(stages)}: {part}"
            if part.size % batch:
                raise ValueError(
                    f"{what} is no multiple of micro_batch_size x data-parallel size = "
                    f"{self.training.micro_batch_size} x {self.data_parallel_size}"
                )
            if self.parallel.virtual_stages and part.size // batch % pipeline:
                raise ValueError(
                    f"{what}: {part.size // batch} micro-batches per iteration and rank are no multiple of "
                    f"parallel.pipeline_model_parallel_size {pipeline}, as virtual stages need"
                )
        if (layers := self.parallel.num_layers_per_virtual_pipeline_stage) is not None:
            stage = self.model.num_layers // pipeline
            if stage % layers or stage == layers:
                raise ValueError(f"the {stage} layers of a pipeline stage cannot be split into several parts of "
                                 f"parallel.num_layers_per_virtual_pipeline_stage {layers}")  # fmt: skip
        return self

    def _check_attention(self) -> None:
        """What the two implementations of attention can do. Raises ValueError."""
        context, tensor = self.parallel.context_parallel_size, self.parallel.tensor_model_parallel_size
        masked = self.data.reset_attention_mask
        if self.training.transformer_impl == "transformer_engine" and masked:
            raise ValueError("data.reset_attention_mask needs the local attention; "
                             "set training.transformer_impl=local")  # fmt: skip
        if context == 1:
            return
        if self.training.transformer_impl == "local" or masked or self.data.eod_mask_loss:
            raise ValueError(
                "parallel.context_parallel_size above 1 needs the attention of TransformerEngine, and so neither "
                "training.transformer_impl=local nor data.reset_attention_mask nor data.eod_mask_loss"
            )
        parts = 2 * context * (tensor if self.parallel.sequence_parallel else 1)
        if self.training.seq_length % parts:
            raise ValueError(
                f"training.seq_length {self.training.seq_length} is no multiple of {parts}: each of the "
                f"{context} context-parallel ranks takes two parts of it"
                + (", which sequence_parallel splits again" if parts > 2 * context else "")
            )

    @model_validator(mode="after")
    def _evaluated_checkpoints(self) -> Self:
        if self.evaluation is not None and self.evaluation.interval % self.checkpoint.interval:
            raise ValueError(f"evaluation.interval {self.evaluation.interval} is no multiple of "
                             f"checkpoint.interval {self.checkpoint.interval}")  # fmt: skip
        return self

    def lr_steps(self, reaches: Callable[[int], int]) -> tuple[int, int]:
        """Iterations of the warm-up, and until the learning rate has come down.

        `reaches(samples)` is the iteration with which a run has consumed that many: what is given in tokens
        ends with the iteration that trains on the last of them.
        """
        optimizer, length = self.optimizer, self.training.seq_length
        warmup, decay = optimizer.lr_warmup_steps, optimizer.lr_decay_steps or self.training.steps
        if optimizer.lr_warmup_tokens is not None:
            warmup = reaches(-(-optimizer.lr_warmup_tokens // length))
        if optimizer.lr_decay_tokens is not None:
            decay = reaches(-(-optimizer.lr_decay_tokens // length))
        return warmup, decay

    @model_validator(mode="after")
    def _schedule(self) -> Self:
        optimizer = self.optimizer
        warmup, decay = self.lr_steps(self.training.batch_sizes.reaches)
        if optimizer.lr_warmup_tokens is not None and optimizer.lr_warmup_steps:
            raise ValueError("optimizer.lr_warmup_steps and lr_warmup_tokens say the same; set one of them")
        if optimizer.lr_decay_tokens is not None and optimizer.lr_decay_steps is not None:
            raise ValueError("optimizer.lr_decay_steps and lr_decay_tokens say the same; set one of them")
        if warmup >= decay:
            first = "lr_warmup_steps" if optimizer.lr_warmup_tokens is None else "lr_warmup_tokens, in steps"
            last = "training.steps"
            if optimizer.lr_decay_tokens is not None:
                last = "optimizer.lr_decay_tokens, in steps"
            elif optimizer.lr_decay_steps is not None:
                last = "optimizer.lr_decay_steps"
            raise ValueError(f"optimizer.{first} {warmup} must be below {last} {decay}; "
                             f"set optimizer.lr_warmup_steps={decay // 10}, or train longer")  # fmt: skip
        if (optimizer.lr_decay_style == "WSD") != (optimizer.lr_wsd_decay_steps is not None):
            raise ValueError("optimizer.lr_wsd_decay_steps belongs to lr_decay_style WSD, which needs it")
        if (optimizer.lr_wsd_decay_steps or 0) > decay - warmup:
            raise ValueError(f"optimizer.lr_wsd_decay_steps {optimizer.lr_wsd_decay_steps} must fit between "
                             f"the warm-up of {warmup} steps and the end of the decay at {decay}")  # fmt: skip
        if optimizer.min_lr > optimizer.lr:
            raise ValueError(f"optimizer.min_lr {optimizer.min_lr} is above optimizer.lr {optimizer.lr}")
        return self
