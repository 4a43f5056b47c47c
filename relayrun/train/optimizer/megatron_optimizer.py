"""Adam and the learning rate schedule as megatron-core builds them, with a patched distributed optimizer.

`ShardedCheckpointOptimizer` saves its state without gathering it. A data-parallel rank holds a range of each flattened
parameter; a checkpoint names parts of tensors by offset and size along each axis. A range of a matrix is up to three
such blocks: the end of a row, whole rows, the beginning of a row (`state_shards`).

megatron-core 0.16.1 keeps Adam's `step` where TransformerEngine or Apex keep it: over torch.optim, as a plain `pip
install` has it, its DistributedOptimizer cannot resume. Each method of `TorchDistributedOptimizer` patches one of three
faults. torch's AdamW is fused on GPUs: one kernel reads and writes each state once, and counts the steps.

Without TransformerEngine and Apex megatron-core 0.16.1 reads the norm of every parameter from the GPU separately
(core/utils.py), and clips through a copy of every gradient. torch's functions on lists need a few kernels and one wait
for the norm; on CPUs they compute the same bits.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedStateDict
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE, DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from relayrun.config.compose.schema import OptimizerSection as Settings
from relayrun.config.compose.schema import RunConfig
from relayrun.errors import ConfigError, FatalTrainingError
from relayrun.tokens.order.batches import TrainingProgress
from relayrun.train import megatron_versions, user_code
from relayrun.train.model.gpt import ModelStage
from relayrun.train.optimizer import parameter_groups, user_optimizer
from relayrun.train.optimizer.muon import Muon


class ScheduledOptimizer:
    """Optimizer over the model's gradient buffers, and the schedule of its learning rate."""

    def __init__(self, config: RunConfig, model: ModelStage) -> None:
        """Build it on all ranks together. Raises ConfigError on all of them if a setting cannot be met."""
        settings = config.optimizer
        self._model = model
        self._clip = settings.clip_grad or float("inf")
        self.inner: MegatronOptimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=settings.lr,
                min_lr=settings.min_lr,
                weight_decay=settings.weight_decay,
                adam_beta1=settings.adam_beta1,
                adam_beta2=settings.adam_beta2,
                adam_eps=settings.adam_eps,
                clip_grad=self._clip,
                use_distributed_optimizer=config.parallel.use_distributed_optimizer,
                bf16=config.training.resolved_precision == "bf16",
                params_dtype=model.dtype,
                timers=model.timers if model.timers.level else None,
                **_types(settings),
            ),
            model.chunks,
            config_overrides=parameter_groups.group_overrides(settings, model.chunks, muon=settings.kind == "muon"),
            use_gloo_process_groups=False,
        )
        patch_distributed_optimizers(self.inner)
        self._own: set[str] = set()
        if settings.kind != "adam":
            user_code.agree_on_user_code(
                lambda: user_optimizer.replace_adam(self.inner, _make(settings, model)),
                model.ranks,
                setting="optimizer.class",
                hint="write module:Class, a class that inherits torch.optim.Optimizer, where the ranks' Python finds "
                "its module; it takes lr, weight_decay (unless that is 0) and optimizer.arguments",
            )
            self._own = user_optimizer.group_settings(self.inner)
        else:
            parameter_groups.patch_group_loading(self.inner)
        if model.device.type == "cuda" and settings.class_path is None:
            use_fused_adam(self.inner)
        self._config = config
        self._settings_of_groups = [_settings(group, self._own) for group in self.inner.param_groups]
        self.schedule = learning_rate_schedule(config, self.inner, TrainingProgress(config.training.batch_sizes))

    @property
    def lr(self) -> float:
        return float(self.schedule.get_lr({}))  # groups may have other rates

    def zero_grad(self) -> None:
        """Clear the gradients, in the model's buffers and in the optimizer's own copies."""
        self._model.zero_grad()
        self.inner.zero_grad()

    def prepare(self) -> float:
        """Make the gradients ready for an update; return their norm over all ranks."""
        self.inner.prepare_grads()
        return gradient_norm(self.inner, self._model.device)

    def step(self, norm: float | None) -> None:
        """Clip the prepared gradients of this norm, and update; None: skip the update. The schedule advances. `prepare`
        and `step` are the two parts of megatron-core's ChainedOptimizer.step (optimizer.py)."""
        if norm is not None:
            clip_gradients(self.inner, maximum=self._clip, norm=norm)
            self.inner.step_with_ready_grads()
        self._model.step_buffers.end_step(moved=norm is not None)
        self.schedule.step(increment=1)

    def load(self, state: dict[str, Any], position: TrainingProgress) -> None:
        """Load the state of a checkpoint, with groups from `parameter_groups.fit_groups`. Hyperparameters stay those of
        this attempt's config revision."""
        self.inner.load_state_dict(state)
        for group, settings in zip(self.inner.param_groups, self._settings_of_groups, strict=True):
            if not self._own:  # else the distributed optimizer merges groups with equal settings
                for name in group.keys() - settings.keys() - {"params", "step"}:
                    del group[name]
            group.update(settings)
        place_step_counts(self.inner)
        self._go_to(position)

    def begin(self, position: TrainingProgress) -> None:
        """Start without a state, from the current weights of the model."""
        self.inner.reload_model_params()  # fp32 copies of them
        self._go_to(position)

    def _go_to(self, position: TrainingProgress) -> None:
        self.schedule = learning_rate_schedule(self._config, self.inner, position)
        self.schedule.step(increment=position.iteration)


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8}


def _types(settings: Settings) -> dict[str, Any]:
    """Return the types of the optimizer's state, as fields of megatron-core's OptimizerConfig. Raises
    FatalTrainingError without TransformerEngine, whose Adam alone supports other types than fp32."""
    if not settings.use_precision_aware_optimizer:
        return {}  # otherwise the type of the gradients concerns their buffers only
    if importlib.util.find_spec("transformer_engine") is None:
        raise FatalTrainingError(
            "TransformerEngine is not installed where the ranks run, and optimizer.use_precision_aware_optimizer asks "
            "for its Adam",
            hint="use a container that has it, or set optimizer.use_precision_aware_optimizer=false",
        )
    names = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    return {
        "use_precision_aware_optimizer": True,
        # else a checkpoint would hold the lower half of each weight's bits instead of the weight
        "store_param_remainders": False,
        **{name: _DTYPES[getattr(settings, name)] for name in names},
    }


def _settings(group: dict[str, Any], own: set[str]) -> dict[str, Any]:
    """Return a group's settings. `own`: their names, if not everything but the step is a setting."""
    return {name: value for name, value in group.items() if name not in ("params", "step") and (not own or name in own)}


def _make(settings: Settings, model: ModelStage) -> user_optimizer.MakeOptimizer:
    if settings.class_path is not None:
        return user_optimizer.import_optimizer_class(settings)
    transformer = model.transformer
    queries = transformer.num_attention_heads // transformer.num_query_groups
    qkv = tuple(heads * transformer.kv_channels for heads in (queries, 1, 1))
    return partial(Muon, settings=settings, qkv=qkv)


def learning_rate_schedule(
    config: RunConfig, optimizer: MegatronOptimizer, position: TrainingProgress
) -> OptimizerParamScheduler:
    """Return the schedule in iterations; the run's past and future batch sizes convert lengths in tokens."""
    settings = config.optimizer
    warmup, decay = config.lr_steps(position.reaches)
    if warmup >= decay:
        raise ConfigError(
            f"in this run, whose batch sizes have changed, the warm-up ends at iteration {warmup} and "
            f"the decay at {decay}",
            where="optimizer",
            hint="set a longer decay",
        )
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0 if warmup else settings.lr,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,
        lr_decay_style=settings.lr_decay_style,
        wsd_decay_steps=settings.lr_wsd_decay_steps,
        lr_wsd_decay_style="minus_sqrt" if settings.lr_wsd_decay_style == "1-sqrt" else settings.lr_wsd_decay_style,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=decay,
        wd_incr_style="constant",
    )


@torch.no_grad()
def gradient_norm(optimizer: MegatronOptimizer, device: torch.device) -> float:
    """Return the norm of the prepared gradients over all ranks, which call it together; equal on each of them.
    `device`: of the gradients, also on a rank without any."""
    squares = []
    for group, gradients in _by_group(optimizer).items():
        square = torch.zeros(1, device=device)
        if gradients:
            # in fp32, whatever the gradients' type is
            norms = torch._foreach_norm(gradients, dtype=torch.float32)
            square += torch.linalg.vector_norm(torch.stack(norms)) ** 2
        dist.all_reduce(square, group=group)
        squares.append(square)
    return float(sum(squares[1:], squares[0]).item() ** 0.5)


@torch.no_grad()
def count_zero_gradients(optimizer: MegatronOptimizer, device: torch.device) -> torch.Tensor:
    """Return the number of zero elements in the prepared gradients over all ranks, which call it together: float64 [1].
    The result stays on the device, without a wait for it."""
    found = torch.zeros(1, dtype=torch.int64, device=device)
    for group, gradients in _by_group(optimizer).items():
        of_group = torch.zeros_like(found)
        for gradient in gradients:
            of_group += gradient.numel() - torch.count_nonzero(gradient)
        dist.all_reduce(of_group, group=group)
        found += of_group
    return found.double()


def _by_group(optimizer: MegatronOptimizer) -> dict[dist.ProcessGroup, list[torch.Tensor]]:
    """Return this rank's gradients by the ranks over which they are split: experts may have others than the rest."""
    found: dict[dist.ProcessGroup, list[torch.Tensor]] = {}
    for inner in optimizer.chained_optimizers:
        found.setdefault(inner.get_grad_stats_parallel_group(), []).extend(megatron_versions.gradients_for_norm(inner))
    return found


@torch.no_grad()
def clip_gradients(optimizer: MegatronOptimizer, *, maximum: float, norm: float) -> None:
    """Scale the prepared gradients of this norm to `maximum` if they are above it."""
    factor = maximum / (norm + 1e-6)
    if factor < 1.0:
        gradients = [
            gradient
            for inner in optimizer.chained_optimizers
            for parameter in inner.get_parameters()
            if (gradient := prepared_gradient(inner, parameter)) is not None
        ]
        if gradients:
            torch._foreach_mul_(gradients, factor)


def prepared_gradient(optimizer: MegatronOptimizer, parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient that `optimizer` will read for one of its parameters; None without one."""
    # with a precision-aware optimizer it may have another type than the parameter, which torch forbids for `grad`
    decoupled = optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    gradient: torch.Tensor | None = getattr(parameter, "decoupled_grad" if decoupled else "grad", None)
    return gradient


class ShardedCheckpointOptimizer(DistributedOptimizer):  # type: ignore[misc]  # megatron-core has no types
    """DistributedOptimizer of megatron-core; each rank saves and loads the part of the state it holds.

    megatron-core's `fully_reshardable` gathers the whole state on every data-parallel rank at a save, and reads all of
    it at a load: 12 bytes of host memory per parameter of the stage, on every rank, while training waits. Its
    `dp_reshardable` does neither, but fits one tensor and pipeline layout only. Here names and shapes are those of
    `fully_reshardable`, cut into the blocks that the ranks hold: nothing is sent, and a checkpoint fits every layout.
    Each reads the other's checkpoints.
    """

    def sharded_param_state_fully_reshardable(
        self,
        model_sharded_state_dict: ShardedStateDict,
        is_loading: bool = False,
        metadata: dict[str, Any] | None = None,
    ) -> dict[int, dict[str, dict[int, ShardedTensor]]]:
        """Return blocks by number of the parameter among this rank's, name of the tensor, and number of the block."""
        found, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
        wholes = {whole.data: whole for whole in nested_values(found)}
        result = {}
        for number, (parameter, held) in enumerate(self.held()):
            state = self._get_main_param_and_optimizer_states(parameter)
            state.pop("step", None)  # equal for all parameters, and part of the groups
            if is_loading:
                state = {name: torch.empty_like(tensor, device="cpu") for name, tensor in state.items()}
            result[number] = state_shards(
                parameter,
                wholes[parameter],
                held,
                state,
                prefix="optimizer.state",
                instance=self.distributed_optimizer_instance_id,
            )
        return result

    @torch.no_grad()
    def load_parameter_state_from_fully_reshardable(
        self, state_dict: dict[int, dict[str, dict[int, torch.Tensor]]]
    ) -> None:
        """Load the result of a load into `sharded_param_state_fully_reshardable`."""
        for number, (parameter, _) in enumerate(self.held()):
            tensors = {
                # a precision-aware optimizer narrows it on the device of its state
                name: torch.cat([block.flatten() for block in found.values()]).to(parameter.device)
                for name, found in state_dict[number].items()
            }
            self._set_main_param_and_optimizer_states(parameter, tensors)

    def held(self) -> Iterator[tuple[torch.nn.Parameter, range]]:
        """Yield the parameters of which this rank holds a part, each with its elements."""
        for by_type in self.gbuf_ranges:
            for buckets in by_type.values():
                for bucket in buckets:
                    for parameter, ranges in bucket["param_map"].items():
                        yield parameter, range(ranges["param"].start, ranges["param"].end)


class TorchDistributedOptimizer(ShardedCheckpointOptimizer):
    """DistributedOptimizer of megatron-core over torch.optim.AdamW, with an exact resume."""

    def initialize_state(self) -> None:
        """Give every parameter the state of its first step in torch.

        Fault: `state_dict` (distrib_optimizer.py) asserts that there is one common step, so it fails before the first
        step, into which a resume loads.
        """
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                self.optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }

    def _set_main_param_and_optimizer_states(
        self, model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]
    ) -> None:
        """Copy loaded tensors into a parameter and its state.

        Fault: the original (distrib_optimizer.py) needs a tensor for every key of the state, `step` too, which no
        checkpoint format holds per parameter: KeyError. The step is loaded already, so it gets its own value.
        """
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        super()._set_main_param_and_optimizer_states(model_param, {"step": state["step"], **tensors})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state.

        Fault: the original (distrib_optimizer.py) gives all parameters one step tensor. AdamW then increments it once
        per parameter: the run continues without an error, with wrong bias corrections.
        """
        super().load_state_dict(state_dict)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()


def patch_distributed_optimizers(optimizer: MegatronOptimizer) -> None:
    """Replace the class of the distributed optimizers inside `optimizer`, in place. megatron-core creates them inside
    get_megatron_optimizer, with no parameter for the class."""
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(inner, DistributedOptimizer) and not inner.is_stub_optimizer:
            inner.__class__ = ShardedCheckpointOptimizer if HAVE_APEX_OR_TE else TorchDistributedOptimizer
            if isinstance(inner, TorchDistributedOptimizer):
                inner.initialize_state()


def use_fused_adam(optimizer: MegatronOptimizer) -> None:
    """Let the torch.optim.AdamW inside `optimizer` update in one kernel, as TransformerEngine's and Apex's do.
    megatron-core has no option for it."""
    for adam in _adams(optimizer):
        for group in (adam.defaults, *adam.param_groups):
            group["fused"] = True
    place_step_counts(optimizer)


def place_step_counts(optimizer: MegatronOptimizer) -> None:
    """Move step counts, which a checkpoint has anywhere, to the parameter's device if AdamW is fused, else the host."""
    for adam in _adams(optimizer):
        for group in adam.param_groups:
            for parameter in group["params"]:
                state = adam.state.get(parameter, {})
                if "step" in state:
                    state["step"] = state["step"].to(parameter.device if group["fused"] else "cpu")


def _adams(optimizer: MegatronOptimizer) -> list[torch.optim.AdamW]:
    inner = [each.optimizer for each in optimizer.chained_optimizers]
    return [adam for adam in inner if isinstance(adam, torch.optim.AdamW)]


TensorBlock = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and size along each axis."""


def state_shards(
    parameter: torch.Tensor,
    whole: ShardedBase,
    held: range,
    state: Mapping[str, torch.Tensor],
    *,
    prefix: str,
    instance: int = 0,
) -> dict[str, dict[int, ShardedTensor]]:
    """Return the shards of a parameter's state that a rank saves, or reads into `state`: by name, in element order.

    `whole`: the model's shard of `parameter`. `held`: elements of the flattened parameter that the rank holds. `state`:
    flat tensors of these elements by name; the result has views of them. Keys are `<prefix>.<name>.<the parameter's
    key>`. `instance`: number of this distributed optimizer.
    """
    found: dict[str, dict[int, ShardedTensor]] = {name: {} for name in state}
    for piece in user_optimizer.parameter_sharded_tensors(whole):
        begins = piece.data.storage_offset() - parameter.storage_offset()
        assert piece.data.is_contiguous()
        assert piece.data.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
        start, stop = (min(max(at - begins, 0), piece.data.numel()) for at in (held.start, held.stop))
        at = begins + start - held.start
        stacked = (1,) * piece.prepend_axis_num  # megatron-core stacks layers along a first axis
        for block, elements in row_major_blocks(piece.local_shape, start, stop):
            offset, size = (0,) * len(stacked) + block, stacked + elements
            for name, flat in state.items():
                data = flat[at : at + math.prod(size)].view(size)
                found[name][len(found[name])] = ShardedTensor(
                    key=f"{prefix}.{name}.{piece.key}",
                    data=data,
                    dtype=data.dtype,
                    local_shape=size,
                    global_shape=piece.global_shape,
                    global_offset=tuple(a + b for a, b in zip(piece.global_offset, offset, strict=True)),
                    axis_fragmentations=None,
                    replica_id=(*piece.replica_id[:2], instance),  # held by no other rank of the instance
                )
            at += math.prod(size)
    return found


def row_major_blocks(shape: Sequence[int], start: int, stop: int) -> Iterator[TensorBlock]:
    """Yield the elements [start, stop) of a tensor of this shape, in row-major order, as blocks."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # inside one row
        yield from _inside(shape, last, start - last * row, stop - last * row)
        return
    yield from _inside(shape, first - 1, start - (first - 1) * row, row if start < first * row else 0)
    if first < last:
        yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
    yield from _inside(shape, last, 0, stop - last * row)


def _inside(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[TensorBlock]:
    for offset, size in row_major_blocks(shape[1:], start, stop):
        yield (row, *offset), (1, *size)
