"""What is trained and how: `model`, `training`, `optimizer`, `checkpoint` and `parallel`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from relayrun.config.rampup import BatchSizes
from relayrun.config.section import Fraction, NonNegative, Positive, Section
from relayrun.config.transformer import Transformer
from relayrun.errors import ConfigError

LossMean = Literal["micro_batch", "sample", "token"]

StateType = Literal["fp32", "fp16", "bf16", "fp8"]
ImportPath = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
"""`module:name` of something of a user's own. Imported by the ranks only, where their Python finds the module."""

LOSS_MEAN_BEFORE: LossMean = "sample"
"""The mean of runs that began before `training.loss_mean` was there: their revisions do not name one."""


class Model(Section):
    """A Llama: RMSNorm, SwiGLU, rotary positions, grouped-query attention (arXiv 2407.21783); and what `transformer`
    makes of it."""

    num_layers: Positive
    """Transformer layers."""
    hidden_size: Positive
    """Width of the residual stream."""
    ffn_hidden_size: Positive
    """Width of the feed-forward layers (SwiGLU has three matrices of it)."""
    num_attention_heads: Positive
    """Query heads; a head has hidden_size / num_attention_heads channels, or transformer.kv_channels."""
    num_query_groups: Positive
    """Key-value heads; equal to num_attention_heads for plain multi-head attention."""
    rotary_base: Positive = 500_000
    """Base of the rotary frequencies."""
    rope_scaling_factor: Annotated[float, Field(ge=1)] | None = None
    """Llama 3.1's stretching of the low rotary frequencies, over an original context of 8,192; None: none."""
    rotary_percent: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The part of a head's channels that is rotated, the first ones; 1: all."""
    norm_epsilon: float = 1e-5
    """Added to the mean square in RMSNorm."""
    init_method_std: float = 0.02
    """Standard deviation of fresh weights."""
    hidden_dropout: Fraction = 0.0
    """Probability of dropout behind attention and feed-forward layers."""
    attention_dropout: Fraction = 0.0
    """Probability of dropout of attention's weights."""
    untie_embeddings_and_output_weights: bool = True
    """The output layer has weights of its own, not those of the embedding."""
    make_vocab_size_divisible_by: Positive = 128
    """The vocabulary is padded to a multiple of this, however the model is split: a checkpoint fits every layout."""
    transformer: Transformer = Transformer()
    spec: ImportPath | None = None
    """`module:function`, a function of your own that gets megatron-core's TransformerConfig and returns the layers
    (ModuleSpec), the block (TransformerBlockSubmodules) or the whole model (a module), see docs/own-code.md."""

    @property
    def head_channels(self) -> int:
        """Channels of a head."""
        return self.transformer.kv_channels or self.hidden_size // self.num_attention_heads

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        own_heads = self.transformer.kv_channels or self.transformer.multi_latent_attention
        if self.hidden_size % self.num_attention_heads and not own_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is no multiple of num_attention_heads {self.num_attention_heads}; "
                "or set transformer.kv_channels"
            )
        self.transformer.check_layers(self.num_layers)
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is no multiple of "
                f"num_query_groups {self.num_query_groups}"
            )
        return self


class HookEntry(Section):
    """A hook of a user's own (see relayrun/training/hooks.py); `module:Class` alone is one without options."""

    hook: ImportPath
    """`module:Class`. Imported by the ranks only, where their Python finds the module."""
    options: dict[str, Any] = {}
    """Given to the class as keyword arguments."""

    @model_validator(mode="before")
    @classmethod
    def _text(cls, value: object) -> object:
        return {"hook": value} if isinstance(value, str) else value


class Training(Section):
    """How long and in which batches."""

    steps: Positive
    """Iterations (optimizer steps) until the run is done."""
    stop_after: Positive | None = None
    """Iteration after which the run saves and its chain ends; the learning rate, and all else that `steps` decides,
    goes its way as if nothing had happened. To go on, raise it or set it to null, and resume. Megatron's exit_interval
    stops at every multiple instead."""
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
    """Seed of the weights, of dropout and of the data order."""
    eval_interval: NonNegative = 0
    """Iterations between evaluations on the validation sets; the last iteration always evaluates. 0: only then."""
    eval_steps: Positive = 8
    """Global batches per validation set and evaluation."""
    threads: NonNegative = 0
    """CPU threads of a rank (torch.set_num_threads); 0 leaves torch's own choice."""
    precision: Literal["fp32", "bf16"] | None = None
    """Type of weights and activations. With bf16 the optimizer keeps fp32 weights; gradients are summed in fp32.
    None: fp32, on CPUs only; on GPUs, where bf16 is many times faster, it must be said."""
    deterministic: bool = False
    """On GPUs: kernels and reductions that give the same bits at every run, so that a resume on the same layout, with
    the same versions, is exact; slower. On CPUs a resume is exact without. See docs/exactness.md."""
    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    """Layers of TransformerEngine, or local ones: attention on torch's SDPA (flash on GPUs) and torch's fused norms.
    auto: TransformerEngine on a GPU where it is installed, except with data.reset_attention_mask, whose documents torch
    attends to in one call of a kernel for sequences of any length."""
    cross_entropy_loss_fusion: bool = False
    """The loss from the logits in a few compiled kernels. With precision bf16 alone: the gradient of the logits leaves
    them in bf16. On CPUs the same kernels run uncompiled."""
    cross_entropy_fusion_impl: Literal["native", "te"] = "native"
    """Whose kernels cross_entropy_loss_fusion takes: megatron-core's, or TransformerEngine's."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """What is computed again in the backward pass instead of being kept. full: all but the inputs of the layers.
    selective: `recompute_modules` of every layer."""
    recompute_modules: list[Literal["core_attn", "mlp", "moe"]] | None = None
    """What `selective` computes again; by default core_attn, as in Megatron. Flash kernels compute core_attn's scores
    again by themselves, so that it saves nothing with them. mlp is of layers without experts, moe of those with.
    Megatron's layernorm is left out: without TransformerEngine it fails (megatron-core 0.16.1), and TransformerEngine's
    norms are parts of its linear layers."""
    recompute_num_layers: Positive | None = None
    """So many layers, the first ones, of each pipeline stage (of each part, with virtual stages) are computed again;
    Megatron's recompute_method block. None: all of them."""
    manual_gc_interval: NonNegative = 0
    """Iterations between Python's garbage collections, at the same time on all ranks; 0 leaves it to Python."""
    on_nan: Literal["stop", "skip", "rewind"] = "stop"
    """Where loss or gradient norm are no finite number. stop: end the chain. skip: leave out this update.
    rewind: go back to the newest checkpoint and pass over the samples from there up to these."""
    on_spike: Literal["ignore", "stop", "skip", "rewind"] = "ignore"
    """What happens where the loss is a spike: above the median of the last losses by spike_threshold median
    deviations."""
    spike_window: Annotated[int, Field(ge=8)] = 128
    """Iterations whose losses a spike is measured against."""
    spike_threshold: Annotated[float, Field(gt=0)] = 10.0
    """Distance of a spike from the median, in median absolute deviations; 10 are 6.7 standard deviations of normal
    noise."""
    max_skips: Positive = 10
    """Updates left out in a row, after which one more stops the chain."""
    max_rewinds: NonNegative = 3
    """Rewinds of the whole run, after which one more stops the chain."""
    loss_mean: LossMean | None = None
    """What a masked loss (data.eod_mask_loss) is the mean over. micro_batch: the tokens that count in a micro-batch,
    then the micro-batches, as in Megatron. sample: the tokens that count in a sample, then the samples. token: the
    tokens that count in the global batch, whatever the layout; Megatron's calculate_per_token_loss. Without a mask they
    are one. None: micro_batch in a run that begins, what it was in one that goes on."""
    loss: ImportPath | None = None
    """`module:function`, a function of your own that gives each token its loss, from logits and labels or from the
    cross-entropy losses, see docs/own-code.md; `loss_mean` takes the mean of them. None: the cross-entropy."""
    hooks: list[HookEntry] = []
    """Hooks of your own in the order of their calls, each `module:Class` or `{hook: module:Class, options: {...}}`."""

    @property
    def end_iteration(self) -> int:
        """The iteration at which the chain ends."""
        return self.stop_after or self.steps

    @property
    def batch_sizes(self) -> BatchSizes:
        return BatchSizes(self.global_batch_size, self.rampup_batch_size)

    @property
    def resolved_precision(self) -> Literal["fp32", "bf16"]:
        """What `precision` comes to; whoever computes or reports with it reads this."""
        return self.precision or "fp32"

    @property
    def resolved_loss_mean(self) -> LossMean:
        """What `loss_mean` comes to in a run that begins."""
        return self.loss_mean or "micro_batch"

    def require_precision(self) -> None:
        """Raise ConfigError if a run on GPUs leaves out its precision."""
        if self.precision is None:
            raise ConfigError(
                "this run has GPUs, and its precision is not set",
                where="training.precision",
                hint="set bf16; or fp32, if that is meant: it is many times slower on a GPU",
            )

    @model_validator(mode="after")
    def _stop(self) -> Self:
        if self.stop_after is not None and self.stop_after > self.steps:
            raise ValueError(f"stop_after {self.stop_after} lies behind the last of steps {self.steps}")
        return self

    @model_validator(mode="after")
    def _recompute(self) -> Self:
        if self.recompute_num_layers is not None and self.recompute_granularity != "full":
            raise ValueError("recompute_num_layers needs recompute_granularity full")
        if self.recompute_modules is not None and self.recompute_granularity != "selective":
            raise ValueError("recompute_modules needs recompute_granularity selective")
        if self.recompute_modules == []:
            raise ValueError("recompute_modules names nothing; leave out recompute_granularity")
        return self

    @model_validator(mode="after")
    def _hooks(self) -> Self:
        paths = [entry.hook for entry in self.hooks]
        if twice := sorted({path for path in paths if paths.count(path) > 1}):
            raise ValueError(f"hooks names {', '.join(twice)} twice; a checkpoint keeps one state for each")
        return self

    @model_validator(mode="after")
    def _ramp(self) -> Self:
        try:
            _ = self.batch_sizes
        except ValueError as error:
            raise ValueError(f"rampup_batch_size: {error}") from None
        return self


class OptimizerGroup(Section):
    """Parameters with a learning rate or a weight decay of their own."""

    match: Annotated[str, Field(min_length=1)]
    """Pattern, with `*` and `?`, of the names of parameters: `decoder.layers.3.mlp.linear_fc1.weight`. Layers are
    counted over the whole model, whatever its layout."""
    lr_mult: Annotated[float, Field(ge=0)] | None = None
    """Their learning rate over that of the others, at every step."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Their weight decay; also where they are norms or biases, which have none of themselves."""

    @model_validator(mode="after")
    def _something(self) -> Self:
        if self.lr_mult is None and self.weight_decay is None:
            raise ValueError(f"match {self.match} sets nothing; give lr_mult or weight_decay")
        return self


class Optimizer(Section):
    """Adam with decoupled weight decay, or another optimizer, and the learning rate's way. Names as in Megatron's
    arguments."""

    name: Literal["adam", "muon"] = "adam"
    """What updates the weights. adam: Adam with decoupled weight decay. muon: Muon for the matrices, and this Adam for
    embeddings, output layer, norms and biases. Megatron's `--optimizer`."""
    lr: Annotated[float, Field(gt=0)]
    """The highest learning rate."""
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """The learning rate at the end of the decay."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "cosine"
    """Shape of the way down. `WSD`: constant after the warm-up, then down over lr_wsd_decay_steps."""
    lr_warmup_steps: NonNegative = 0
    """Iterations in which the learning rate rises from 0 to lr."""
    lr_warmup_tokens: Positive | None = None
    """Tokens of the warm-up, instead of lr_warmup_steps; rounded up to whole iterations."""
    lr_decay_steps: Positive | None = None
    """Iterations until min_lr is reached; default: training.steps."""
    lr_decay_tokens: Positive | None = None
    """Tokens until min_lr is reached, instead of lr_decay_steps; rounded up to whole iterations."""
    lr_wsd_decay_steps: Positive | None = None
    """Iterations of the way down of WSD, which end at lr_decay_steps."""
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt", "1-sqrt"] = "linear"
    """Shape of the way down of WSD. `1-sqrt` and `minus_sqrt` are two names of one: 1 minus the root of the share of
    the way."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Weight decay of matrices; norms and biases have none."""
    adam_beta1: Fraction = 0.9
    """Adam's decay of the mean of the gradient."""
    adam_beta2: Fraction = 0.95
    """Adam's decay of the mean of the squared gradient."""
    adam_eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root in Adam's denominator."""
    clip_grad: Annotated[float, Field(ge=0)] = 1.0
    """Gradients are scaled down to this norm; 0: never."""
    main_grads_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type in which the gradients of micro-batches are summed, and reduced over ranks. bf16 takes half the memory and
    half the traffic, and loses what small gradients add to large ones; with precision bf16 alone. Without
    use_precision_aware_optimizer each rank widens its part before the update."""
    use_precision_aware_optimizer: bool = False
    """TransformerEngine's Adam, which reads gradients as they are and keeps each part of its state in a type of choice:
    the four settings around this one. On GPUs with TransformerEngine, precision bf16 and
    parallel.use_distributed_optimizer."""
    main_params_dtype: Literal["fp32", "fp16"] = "fp32"
    """Type of the optimizer's own weights, with use_precision_aware_optimizer."""
    exp_avg_dtype: StateType = "fp32"
    """Type of Adam's mean of the gradient, with use_precision_aware_optimizer."""
    exp_avg_sq_dtype: StateType = "fp32"
    """Type of Adam's mean of the squared gradient, with use_precision_aware_optimizer."""

    __annotations__["class"] = Annotated[
        ImportPath | None,
        Field(
            default=None,
            description="`module:Class`, a torch.optim.Optimizer of your own or of a library in the place of Adam, "
            "see docs/own-code.md. It is called with the parameters, lr, weight_decay and `arguments`.",
        ),
    ]  # a word of Python's, which can stand no other way
    arguments: dict[str, Any] = {}
    """Keyword arguments of `class`, such as betas."""
    groups: list[OptimizerGroup] = []
    """Parameters with a learning rate or a weight decay of their own, by pattern of their names. Where several match,
    the last one that sets a value counts."""
    muon_momentum: Fraction = 0.95
    """Muon's decay of the mean of the gradient."""
    muon_use_nesterov: bool = False
    """Muon looks one step ahead along its momentum."""
    muon_num_ns_steps: Annotated[int, Field(gt=0, lt=100)] = 5
    """Steps of the Newton-Schulz iteration that makes Muon's update orthogonal."""
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = "spectral"
    """What Muon's update of a matrix of [rows, columns] is multiplied by. spectral: the root of the larger of the two.
    unit_rms_norm: the root of rows / columns. shape_scaling: the same, not below 1; it is torch.optim.Muon's."""
    muon_extra_scale_factor: Annotated[float, Field(gt=0)] = 1.0
    """Muon's update is multiplied by this too; 0.2 with spectral gives it the size of Adam's (arXiv 2502.16982)."""
    muon_split_qkv: bool = True
    """Muon takes the matrices of queries, keys and values apart; without it they are one."""
    muon_fp32_matmul_prec: Literal["highest", "high", "medium"] = "medium"
    """How torch multiplies fp32 matrices in Muon's iteration: medium in bf16 where the device can, highest in fp32."""
    muon_tp_mode: Literal["duplicated"] = "duplicated"
    """What Muon does with a matrix that tensor parallelism splits: every rank gathers the whole one, so that the
    mathematics does not depend on the layout. Megatron's blockwise, which does, is left out."""

    @property
    def class_path(self) -> str | None:
        """The import path of an optimizer of the user's own; None: it is that of `name`."""
        found: str | None = getattr(self, "class")
        return found

    @property
    def kind(self) -> str:
        """What updates the weights, in one word; one kind cannot read the state of another."""
        return self.class_path or self.name

    @model_validator(mode="after")
    def _one_optimizer(self) -> Self:
        default = {name: field.default for name, field in type(self).model_fields.items()}
        changed = {name for name in default if getattr(self, name) != default[name]}
        if self.class_path is not None:
            if self.name != "adam":
                raise ValueError(f"name {self.name} and class {self.class_path} are two optimizers; leave out one")
            if others := sorted(name for name in changed if name.startswith("adam_")):
                raise ValueError(f"{others[0]} is Adam's; write what {self.class_path} takes into arguments")
            if own := sorted({"params", "lr", "weight_decay"} & set(self.arguments)):
                raise ValueError(
                    f"arguments names {own[0]}; set optimizer.{own[0]} itself"
                    if own[0] != "params"
                    else "arguments names params, which are those of the model"
                )
        elif self.arguments:
            raise ValueError("arguments are those of `class`, which is not set")
        if self.name != "muon" and (others := sorted(name for name in changed if name.startswith("muon_"))):
            raise ValueError(f"{others[0]} needs name muon")
        return self

    @model_validator(mode="after")
    def _types(self) -> Self:
        for name in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
            if getattr(self, name) != "fp32" and not self.use_precision_aware_optimizer:
                raise ValueError(
                    f"{name} {getattr(self, name)} needs use_precision_aware_optimizer: other optimizers keep their "
                    "state in fp32"
                )
        return self


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
    """What a run without a checkpoint of its own goes on from: another run (its directory, or PROJECT/NAME), the
    folder of a checkpoint, or one of Megatron-LM with its checkpoints; `:ITERATION` takes another than the newest."""
    finetune: bool = False
    """Take only the weights of `load`: iterations, optimizer, random numbers and data begin anew."""
    no_load_optim: bool = False
    """Leave out the state of the optimizer of `load`; iterations and data go on."""
    no_load_data: bool = False
    """Leave out the position in the data of `load`: the data begin anew, and may be others. Iterations go on."""

    @model_validator(mode="after")
    def _of_load(self) -> Self:
        for name in ("finetune", "no_load_optim", "no_load_data"):
            if getattr(self, name) and self.load is None:
                raise ValueError(f"{name} says what of `load` is left out, and load is not set")
        return self


class Parallel(Section):
    """How the model is split over ranks; what is left of the ranks is data-parallel."""

    tensor_model_parallel_size: Positive = 1
    """Ranks over which every layer is split."""
    pipeline_model_parallel_size: Positive = 1
    """Stages into which the layers are split, one behind the other."""
    num_layers_per_virtual_pipeline_stage: Positive | None = None
    """Layers of one of several parts that a pipeline stage holds, for a smaller pipeline bubble; None: one part."""
    sequence_parallel: bool = False
    """Split norms and dropout over the tensor-parallel ranks by sequence."""
    context_parallel_size: Positive = 1
    """Split every sequence over this many ranks. Without TransformerEngine, and with data.reset_attention_mask,
    attention splits heads in its place: their number is a multiple of tensor x context parallel size."""
    expert_model_parallel_size: Positive = 1
    """Split the experts of every layer (model.transformer.num_moe_experts) over this many of the ranks that are data-
    or context-parallel for all else."""
    use_distributed_optimizer: bool = False
    """Split the optimizer's state over the data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Reduce gradients while the backward pass goes on."""
    overlap_param_gather: bool = False
    """Gather the updated weights while the forward pass goes on."""
    defer_embedding_wgrad_compute: bool = False
    """The last pipeline stage computes the gradients of the output layer's weights while it would wait for the others
    at the end of an iteration."""
    wgrad_deferral_limit: NonNegative = 0
    """So many micro-batches are deferred by defer_embedding_wgrad_compute, whose logits' gradients are kept until then;
    0: all."""
    overlap_p2p_communication_warmup_flush: bool = False
    """With virtual stages: pipeline stages send and receive while they compute also in the first and the last
    micro-batches of an iteration."""

    @property
    def virtual_stages(self) -> bool:
        return self.num_layers_per_virtual_pipeline_stage is not None

    @model_validator(mode="after")
    def _rules(self) -> Self:
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ValueError(
                "sequence_parallel splits over tensor-parallel ranks: it needs tensor_model_parallel_size above 1"
            )
        if self.virtual_stages and self.pipeline_model_parallel_size == 1:
            raise ValueError("num_layers_per_virtual_pipeline_stage needs pipeline_model_parallel_size above 1")
        if self.defer_embedding_wgrad_compute and self.pipeline_model_parallel_size == 1:
            raise ValueError(
                "defer_embedding_wgrad_compute fills the wait of a pipeline: it needs pipeline_model_parallel_size "
                "above 1"
            )
        if self.wgrad_deferral_limit and not self.defer_embedding_wgrad_compute:
            raise ValueError("wgrad_deferral_limit needs defer_embedding_wgrad_compute")
        if self.wgrad_deferral_limit == 1:
            raise ValueError(
                "wgrad_deferral_limit 1: megatron-core cannot compute the rest of a single micro-batch; set 2 or more, "
                "or 0 for all"
            )
        if self.overlap_p2p_communication_warmup_flush and not self.virtual_stages:
            raise ValueError("overlap_p2p_communication_warmup_flush needs num_layers_per_virtual_pipeline_stage")
        if self.overlap_param_gather and not (self.use_distributed_optimizer and self.overlap_grad_reduce):
            raise ValueError("overlap_param_gather needs use_distributed_optimizer and overlap_grad_reduce")
        return self
