"""The section `optimizer` of a run config."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from relayrun.config.sections.base import Fraction, ImportPath, NonNegative, Positive, Section

StateType = Literal["fp32", "fp16", "bf16", "fp8"]


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


class OptimizerSection(Section):
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
        if self.use_precision_aware_optimizer and self.kind != "adam":
            raise ValueError(f"use_precision_aware_optimizer is an Adam; set it to false with {self.kind}")
        for name in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
            if getattr(self, name) != "fp32" and not self.use_precision_aware_optimizer:
                raise ValueError(
                    f"{name} {getattr(self, name)} needs use_precision_aware_optimizer: other optimizers keep their "
                    "state in fp32"
                )
        return self
