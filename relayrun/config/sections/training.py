"""The section `training`, and the global batch size as a pure function of the consumed samples.

`GlobalBatchSizes` computes the ramp of `training.rampup_batch_size`: Megatron's START INCREMENT SAMPLES in exact
integers (megatron-core 0.16.1, num_microbatches_calculator.py:353), or a list [[SIZE, SAMPLES], ...]. An iteration has
the size of the stage in which it begins; it may end beyond that stage, and the next one begins there.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ModelWrapValidatorHandler, model_validator

from relayrun.config.sections.base import ImportPath, Section
from relayrun.config.sections.dataclass_section import NonNegative, Positive
from relayrun.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class BatchSizeStage:
    """A batch size, from a number of consumed samples on."""

    first: int
    size: int

    def __str__(self) -> str:
        return f"global batch size {self.size} from sample {self.first:,} on"


@dataclass(frozen=True)
class SameSizeIterations:
    """Consecutive iterations of one size."""

    iteration: int
    """Iterations before the first of these."""
    consumed_samples: int
    """Samples consumed before the first of these iterations."""
    size: int


class GlobalBatchSizes:
    """The batch sizes of a config: those of its ramp, then `global_batch_size`.

    Raises ValueError for a ramp that has neither form or does not rise.
    """

    def __init__(self, global_batch_size: int, rampup: Sequence[Any] | None = None) -> None:
        self.global_batch_size = global_batch_size
        self.rampup = rampup
        self.stages = _batch_size_stages(global_batch_size, rampup)
        self._firsts = [stage.first for stage in self.stages]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GlobalBatchSizes) and self.stages == other.stages

    def __hash__(self) -> int:
        return hash(self.stages)

    def at(self, consumed_samples: int) -> int:
        """Return the samples of the iteration that begins with `consumed_samples` consumed."""
        return self.stages[bisect_right(self._firsts, consumed_samples) - 1].size

    def indivisible(self, by: int, consumed_samples: int = 0) -> BatchSizeStage | None:
        """Return the first stage at or after the sample whose size is not divisible by `by`."""
        stages = self.stages[bisect_right(self._firsts, consumed_samples) - 1 :]
        return next((stage for stage in stages if stage.size % by), None)

    def runs(self, iteration: int, consumed_samples: int) -> list[SameSizeIterations]:
        """Yield the iterations from this one on, by size; the last run has no end. Short stages may be missing."""
        found = []
        for stage, after in pairwise(self.stages):
            if consumed_samples < after.first:
                found.append(SameSizeIterations(iteration, consumed_samples, stage.size))
                steps = -((consumed_samples - after.first) // stage.size)
                iteration += steps
                consumed_samples += steps * stage.size
        return [*found, SameSizeIterations(iteration, consumed_samples, self.global_batch_size)]

    def reaches(self, samples: int) -> int:
        """Return the iterations in which a run with these sizes from its beginning consumes this many samples."""
        return IterationRange(0, 0, self).reaches(samples)

    def consumed_by(self, iteration: int) -> int:
        """Return the samples that a run with these sizes from its beginning has consumed after these iterations."""
        return IterationRange(0, 0, self).consumed(iteration)

    def to_json(self) -> dict[str, Any]:
        return {"global_batch_size": self.global_batch_size, "rampup_batch_size": self.rampup}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        return cls(value["global_batch_size"], value["rampup_batch_size"])


@dataclass(frozen=True)
class IterationRange:
    """Iterations of one config, without a gap between their samples (a leg)."""

    iteration: int
    """Iterations before the leg."""
    consumed_samples: int
    """Number of the leg's first sample."""
    sizes: GlobalBatchSizes

    @cached_property
    def _runs(self) -> list[SameSizeIterations]:
        return self.sizes.runs(self.iteration, self.consumed_samples)

    def consumed(self, iteration: int) -> int:
        """Return the consumed samples after `iteration` iterations, which must not lie before the leg."""
        run = self._runs[bisect_right(self._runs, iteration, key=lambda run: run.iteration) - 1]
        return run.consumed_samples + (iteration - run.iteration) * run.size

    def reaches(self, samples: int) -> int:
        """Return the iterations, counted from the run's beginning, until the leg has consumed this many samples."""
        at = max(0, bisect_left(self._runs, samples, key=lambda run: run.consumed_samples) - 1)
        run = self._runs[at]
        return run.iteration + max(0, -((run.consumed_samples - samples) // run.size))

    def steps_within(self, samples: int) -> int:
        """Return the iterations, counted from the run's beginning, that consume at most this many samples."""
        return self.reaches(samples + 1) - 1


def _batch_size_stages(last: int, rampup: Sequence[Any] | None) -> tuple[BatchSizeStage, ...]:
    if rampup is None:
        return (BatchSizeStage(first=0, size=last),)
    if not _are_positive_integers(rampup) and not (
        rampup and all(_are_positive_integers(part) and len(part) == 2 for part in rampup)
    ):
        raise ValueError(
            f"{rampup!r} is neither [start, increment, samples] nor [[size, samples], ...], all integers above 0"
        )
    if not _are_positive_integers(rampup):
        ends = [samples for _, samples in rampup]
        if any(a >= b for a, b in pairwise(ends)):
            raise ValueError(f"the samples at which its stages end must rise, not be {ends}")
        sizes = [*(size for size, _ in rampup), last]
        return tuple(BatchSizeStage(first=first, size=size) for first, size in zip([0, *ends], sizes, strict=True))
    if len(rampup) != 3:
        raise ValueError(f"[start, increment, samples] has 3 numbers, not {len(rampup)}")
    start, increment, samples = rampup
    if start >= last or (last - start) % increment:
        raise ValueError(f"start {start} must be below global_batch_size {last} by a multiple of increment {increment}")
    count = (last - start) // increment
    by_first = {-(-number * samples // count): start + number * increment for number in range(count + 1)}
    return tuple(BatchSizeStage(first=first, size=size) for first, size in by_first.items())


def _are_positive_integers(value: object) -> bool:
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(isinstance(item, int) and not isinstance(item, bool) and item > 0 for item in value)
    )


LossMean = Literal["micro_batch", "sample", "token"]


class HookEntry(Section):
    """A user's hook (see relayrun/train/hooks.py); `module:Class` alone has no options."""

    hook: ImportPath
    """`module:Class`. Only ranks import it, because their Python finds the module."""
    options: dict[str, Any] = {}
    """Keyword arguments of the class."""

    @model_validator(mode="before")
    @classmethod
    def _text(cls, value: object) -> object:
        return {"hook": value} if isinstance(value, str) else value


class TrainingSection(Section):
    """Length and batches of the training."""

    steps: Positive
    """Iterations (optimizer steps) until the run is done; or `samples` or `tokens` in its place."""
    samples: Positive | None = None
    """Length in samples, ramp included; the last global batch is whole, as with Megatron's train_samples."""
    tokens: Positive | None = None
    """Length in tokens: samples of seq_length; the last global batch is whole."""
    stop_after: Positive | None = None
    """Iteration after which the run saves and its chain ends; the learning rate schedule and everything else that
    depends on `steps` is unchanged. To continue, raise it or set it to null, and resume. Megatron's exit_interval stops
    at every multiple instead."""
    micro_batch_size: Positive
    """Samples that a data-parallel rank processes at a time."""
    global_batch_size: Positive
    """Samples of an iteration over all ranks; the rest is gradient accumulation. With a ramp: at its end."""
    rampup_batch_size: list[Any] | None = None
    """Smaller batches at the beginning. As in Megatron [start, increment, samples]: from start to global_batch_size in
    steps of increment, over that many samples; or [[size, samples], ...]: size until samples are consumed."""
    seq_length: Positive
    """Tokens of a sample."""
    seed: NonNegative = 28
    """Seed of the weights, of dropout and of the data order."""
    eval_interval: NonNegative = 0
    """Iterations between evaluations on the validation sets; the last iteration always evaluates. 0: only then."""
    eval_steps: Positive = 8
    """Global batches per validation set and evaluation."""
    threads: NonNegative = 0
    """CPU threads of a rank (torch.set_num_threads); 0 keeps torch's default."""
    precision: Literal["fp32", "bf16"] | None = None
    """Type of weights and activations. With bf16 the optimizer keeps fp32 weights; gradients are summed in fp32. None:
    fp32, on CPUs only; required on GPUs, where bf16 is many times faster."""
    deterministic: bool = False
    """On GPUs: kernels and reductions that give the same bits at every run, so that a resume on the same layout, with
    the same versions, is exact; slower. On CPUs a resume is always exact. See `relayrun help exactness`."""
    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    """Layers of TransformerEngine, or local ones: attention on torch's SDPA (flash on GPUs) and torch's fused norms.
    auto: TransformerEngine on a GPU if it is installed, except with data.reset_attention_mask, for which torch attends
    to all documents in one call of a kernel for sequences of any length."""
    apply_rope_fusion: bool | None = None
    """Rotate queries and keys in one kernel of TransformerEngine, for either kind of layers. None: if available, as in
    Megatron; otherwise a line of the log says why. true: refuse an attempt without it."""
    gradient_accumulation_fusion: bool | None = None
    """Add the gradients of weights to their sum where they are computed, by Apex's fused_weight_gradient_mlp_cuda.
    None: if available, as in Megatron; otherwise a line of the log says so. true: refuse an attempt without it."""
    cross_entropy_loss_fusion: bool | None = None
    """Compute the loss from the logits in a few compiled kernels. None: on GPUs relayrun's own, which make no copy of
    the logits in fp32, unless training.deterministic is set; on CPUs single operations. true: megatron-core's, with
    precision bf16 alone, since the gradient of the logits leaves them in bf16; on CPUs uncompiled. false: single
    operations."""
    cross_entropy_fusion_impl: Literal["native", "te"] = "native"
    """Kernels for cross_entropy_loss_fusion: megatron-core's, or TransformerEngine's."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Parts that the backward pass recomputes instead of keeping them. full: everything except the inputs of the
    layers. selective: `recompute_modules` of every layer."""
    recompute_modules: list[Literal["core_attn", "mlp", "moe"]] | None = None
    """Modules for `selective`; by default core_attn, as in Megatron. Flash kernels recompute core_attn's scores
    themselves, so that it saves nothing with them. mlp applies to layers without experts, moe to those with. Megatron's
    layernorm is not available: without TransformerEngine it fails (megatron-core 0.16.1), and TransformerEngine's norms
    are parts of its linear layers."""
    recompute_num_layers: Positive | None = None
    """Number of first layers of each pipeline stage (of each part, with virtual stages) to recompute; Megatron's
    recompute_method block. None: all of them."""
    manual_gc_interval: NonNegative = 0
    """Iterations between Python's garbage collections, at the same time on all ranks; 0: Python decides."""
    on_nan: Literal["stop", "skip", "rollback"] = "stop"
    """Action for a loss or gradient norm that is not a finite number. stop: end the chain. skip: leave out this update.
    rollback: roll back to the newest checkpoint and pass over the samples from there up to these."""
    on_spike: Literal["ignore", "stop", "skip", "rollback"] = "ignore"
    """Action for a spike of the loss: above the median of the last losses by spike_threshold median deviations."""
    spike_window: Annotated[int, Field(ge=8)] = 128
    """Number of last losses for the median."""
    spike_threshold: Annotated[float, Field(gt=0)] = 10.0
    """Minimum distance of a spike from the median, in median absolute deviations; 10 are 6.7 standard deviations of
    normal noise."""
    max_skips: Positive = 10
    """Maximum consecutive updates left out; one more stops the chain."""
    max_rollbacks: NonNegative = 3
    """Maximum rollbacks of the whole run; one more stops the chain."""
    loss_mean: LossMean | None = None
    """Mean of a masked loss (data.eod_mask_loss). micro_batch: over the tokens that count in a micro-batch, then over
    the micro-batches, as in Megatron. sample: over the tokens that count in a sample, then over the samples. token:
    over the tokens that count in the global batch, whatever the layout; Megatron's calculate_per_token_loss. Without a
    mask all are equal. None: micro_batch in a new run, unchanged in a resumed one."""
    loss: ImportPath | None = None
    """`module:function`, your own function that gives each token its loss, from logits and labels or from the
    cross-entropy losses, see `relayrun help own-code`; `loss_mean` takes their mean. None: the cross-entropy."""
    hooks: list[HookEntry] = []
    """Your own hooks in the order of their calls, each `module:Class` or `{hook: module:Class, options: {...}}`."""

    @property
    def end_iteration(self) -> int:
        """Iteration at which the chain ends."""
        return self.stop_after or self.steps

    @property
    def batch_sizes(self) -> GlobalBatchSizes:
        return GlobalBatchSizes(self.global_batch_size, self.rampup_batch_size)

    @property
    def resolved_precision(self) -> Literal["fp32", "bf16"]:
        """The precision in use, for computation and reports."""
        return self.precision or "fp32"

    @property
    def resolved_loss_mean(self) -> LossMean:
        """The mean in use; default micro_batch."""
        return self.loss_mean or "micro_batch"

    def require_precision(self) -> None:
        """Raise ConfigError for a run on GPUs without `precision`."""
        if self.precision is None:
            hint = "set bf16; or fp32, if that is meant: it is many times slower on a GPU"
            raise ConfigError("this run has GPUs, and its precision is not set", where="training.precision", hint=hint)

    @property
    def length_in_samples(self) -> int | None:
        """The length in samples, if it is given in samples or tokens."""
        return self.samples if self.tokens is None else self.tokens // self.seq_length

    @model_validator(mode="wrap")
    @classmethod
    def _length(cls, value: Any, build: ModelWrapValidatorHandler[Self]) -> Self:
        """Derive `steps` from a length in samples or tokens."""
        if not isinstance(value, Mapping) or not (value.get("samples") or value.get("tokens")):
            return build(value)
        given, unit = value.get("steps"), "tokens" if value.get("tokens") else "samples"
        found = build({**value, "steps": 1, "stop_after": None})
        if found.samples is not None and found.tokens is not None:
            raise ValueError("samples and tokens say the same; set one of them")
        steps = IterationRange(0, 0, found.batch_sizes).steps_within(found.length_in_samples or 0)
        if not steps:
            raise ValueError(f"{found.length_in_samples} samples are no whole global batch; train longer")
        if given not in (None, steps):
            raise ValueError(f"steps {given} and {unit} say the same, and {unit} are {steps} steps; set one to null")
        return build({**value, "steps": steps})

    @model_validator(mode="after")
    def _rules(self) -> Self:
        if self.stop_after is not None and self.stop_after > self.steps:
            raise ValueError(f"stop_after {self.stop_after} lies behind the last of steps {self.steps}")
        if self.recompute_num_layers is not None and self.recompute_granularity != "full":
            raise ValueError("recompute_num_layers needs recompute_granularity full")
        if self.recompute_modules is not None and self.recompute_granularity != "selective":
            raise ValueError("recompute_modules needs recompute_granularity selective")
        if self.recompute_modules == []:
            raise ValueError("recompute_modules names nothing; leave out recompute_granularity")
        paths = [entry.hook for entry in self.hooks]
        if twice := sorted({path for path in paths if paths.count(path) > 1}):
            raise ValueError(f"hooks names {', '.join(twice)} twice; a checkpoint keeps one state for each")
        try:
            _ = self.batch_sizes
        except ValueError as error:
            raise ValueError(f"rampup_batch_size: {error}") from None
        return self
