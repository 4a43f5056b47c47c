"""The section `optimizer` of a run config."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from relayrun.config.sections.base import Fraction, ImportPath, Section
from relayrun.config.sections.dataclass_section import NonNegative, Positive

StateType = Literal["fp32", "fp16", "bf16", "fp8"]


class OptimizerGroup(Section):
    """Parameters with their own learning rate or weight decay."""

    match: Annotated[str, Field(min_length=1)]
    """Pattern, with `*` and `?`, of the names of parameters: `decoder.layers.3.mlp.linear_fc1.weight`. Layers are
    counted over the whole model, whatever its layout."""
    lr_mult: Annotated[float, Field(ge=0)] | None = None
    """Factor of the learning rate, at every step."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Weight decay of the group, including norms and biases, which have none by default."""

    @model_validator(mode="after")
    def _something(self) -> Self:
        if self.lr_mult is None and self.weight_decay is None:
            raise ValueError(f"match {self.match} sets nothing; give lr_mult or weight_decay")
        return self


class OptimizerSection(Section):
    """Adam with decoupled weight decay, or another optimizer, and the learning rate schedule. Names as in Megatron's
    arguments."""

    name: Literal["adam", "muon"] = "adam"
    """Optimizer. adam: Adam with decoupled weight decay. muon: Muon for the matrices, and this Adam for embeddings,
    output layer, norms and biases. Megatron's `--optimizer`."""
    lr: Annotated[float, Field(gt=0)]
    """Maximum learning rate."""
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """The learning rate at the end of the decay."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "cosine"
    """Shape of the decay. `WSD`: constant after the warm-up, then down over lr_wsd_decay_steps."""
    lr_warmup_steps: NonNegative = 0
    """Iterations in which the learning rate rises from 0 to lr."""
    lr_warmup_tokens: Positive | None = None
    """Tokens of the warm-up, instead of lr_warmup_steps; rounded up to whole iterations."""
    lr_decay_steps: Positive | None = None
    """Iterations until min_lr is reached; default: training.steps."""
    lr_decay_tokens: Positive | None = None
    """Tokens until min_lr is reached, instead of lr_decay_steps; rounded up to whole iterations."""
    lr_wsd_decay_steps: Positive | None = None
    """Iterations of WSD's decay, which end at lr_decay_steps."""
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt", "1-sqrt"] = "linear"
    """Shape of WSD's decay. `1-sqrt` and `minus_sqrt` are equal: 1 minus the root of the decay's progress."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Weight decay of matrices; norms and biases have none."""
    adam_beta1: Fraction = 0.9
    """Adam's decay of the mean of the gradient."""
    adam_beta2: Fraction = 0.95
    """Adam's decay of the mean of the squared gradient."""
    adam_eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root in Adam's denominator."""
    clip_grad: Annotated[float, Field(ge=0)] = 1.0
    """Maximum norm of the gradients, which are scaled down to it; 0: no limit."""
    main_grads_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type in which the gradients of micro-batches are summed, and reduced over ranks. bf16 takes half the memory and
    half the traffic, and loses small gradients in sums with large ones; with precision bf16 alone. Without
    use_precision_aware_optimizer each rank widens its part before the update."""
    use_precision_aware_optimizer: bool = False
    """TransformerEngine's Adam, which reads gradients unconverted and keeps each part of its state in a chosen type:
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
            "see `relayrun help own-code`. It is called with the parameters, lr, weight_decay and `arguments`.",
        ),
    ]  # a Python keyword, which needs an alias
    arguments: dict[str, Any] = {}
    """Keyword arguments of `class`, such as betas."""
    groups: list[OptimizerGroup] = []
    """Parameters with their own learning rate or weight decay, by pattern of their names. The last matching group that
    sets a value counts."""
    muon_momentum: Fraction = 0.95
    """Muon's decay of the mean of the gradient."""
    muon_use_nesterov: bool = False
    """Look one step ahead along Muon's momentum."""
    muon_num_ns_steps: Annotated[int, Field(gt=0, lt=100)] = 5
    """Steps of the Newton-Schulz iteration that makes Muon's update orthogonal."""
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = "spectral"
    """Factor of Muon's update of a matrix of [rows, columns]. spectral: the root of the larger of the two.
    unit_rms_norm: the root of rows / columns. shape_scaling: as unit_rms_norm, not below 1, like torch.optim.Muon."""
    muon_extra_scale_factor: Annotated[float, Field(gt=0)] = 1.0
    """Further factor of Muon's update; 0.2 with spectral gives it the size of Adam's (arXiv 2502.16982)."""
    muon_split_qkv: bool = True
    """Update the matrices of queries, keys and values separately in Muon; otherwise as one matrix."""
    muon_fp32_matmul_prec: Literal["highest", "high", "medium"] = "medium"
    """Precision of fp32 products in Muon's iteration (torch): medium in bf16 if the device can, highest in fp32."""
    muon_tp_mode: Literal["duplicated"] = "duplicated"
    """Muon's update of a matrix split by tensor parallelism: every rank gathers the whole matrix, so that the
    mathematics does not depend on the layout. Megatron's blockwise depends on it and is not available."""

    @property
    def class_path(self) -> str | None:
        """Import path of a user's optimizer; None: `name` applies."""
        found: str | None = getattr(self, "class")
        return found

    @property
    def kind(self) -> str:
        """The optimizer in one word; a kind cannot read the state of another kind."""
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
        if self.use_precision_aware_optimizer and self.kind != "adam":
            raise ValueError(f"use_precision_aware_optimizer is an Adam; set it to false with {self.kind}")
        for name in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
            if getattr(self, name) != "fp32" and not self.use_precision_aware_optimizer:
                raise ValueError(
                    f"{name} {getattr(self, name)} needs use_precision_aware_optimizer: other optimizers keep their "
                    "state in fp32"
                )
        return self
