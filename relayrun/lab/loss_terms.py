"""Compares losses and gradients of a layout with those of one rank, on CPUs, for each term of the loss by itself.

    python -m relayrun.lab.loss_terms < request > answer

The request is JSON, two small run configs: one in the asked layout, and the same for one rank; for the answer see
`compare`. All begin with the same weights and take the same global batch. A term is measured alone, with the others'
factors 0. Gradients are compared by name and position in the whole tensor, as a checkpoint holds them; a piece that
several ranks hold must be equal on all of them.
"""

from __future__ import annotations

import math
import os
import signal
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from torch.multiprocessing.spawn import start_processes

from relayrun.config.compose.schema import RunConfig
from relayrun.control.scheduler.local_srun import die_with_parent, free_port
from relayrun.tokens.order.datasets import ValidationSet
from relayrun.tokens.order.sample_rows import SampleRow
from relayrun.train import distributed
from relayrun.train.distributed import Ranks
from relayrun.train.model import cpu_patches
from relayrun.train.model.gpt import MicroBatch, ModelStage
from relayrun.train.optimizer.megatron_optimizer import ScheduledOptimizer, ShardedCheckpointOptimizer, state_shards
from relayrun.train.user_code import answer_request
from relayrun.train.validation import Validation

Array = npt.NDArray[Any]
VOCABULARY, EOD = 96, 5
TOKENS, VALIDATION, SPEC = "tokens", "validation sets", "losses inside model.spec"
NOISE = 0.05
"""Standard deviation of the noise on initial weights; constants among them would hide faults."""
FLOOR = 1e-3
"""Smallest norm that a difference is divided by, as a share of the largest norm."""
Cases = dict[str, tuple[RunConfig, Sequence[str]]]  # by name the config and the terms to measure with it


def reference_cases(config: RunConfig, reference: RunConfig) -> Cases:
    """Return the cases of one rank: `layout` with the micro-batches of the layout, and other ways to the same terms."""
    settings, size = config.model.transformer, config.training.micro_batch_size
    routers = list(settings.router_losses)
    terms = [TOKENS, *([] if config.model.spec is None else [SPEC]), *routers, VALIDATION]
    found: Cases = {"layout": (reference, terms)}

    def add(name: str, terms: Sequence[str], **sections: Mapping[str, Any]) -> None:
        values = reference.model_dump(mode="json")
        values |= {section: values[section] | fields for section, fields in sections.items()}
        found[name] = RunConfig.model_validate(values), terms

    if "global_aux_loss" in routers:  # a running mean: it depends on the number of micro-batches
        add("whole", ["global_aux_loss"], training={"micro_batch_size": size * config.data_parallel_size})
    if size > 1 and not (settings.moe_expert_capacity_factor or settings.moe_router_load_balancing_type == "sinkhorn"):
        depends = config.data.masks_loss and config.training.resolved_loss_mean == "micro_batch"
        same = ([] if depends else [TOKENS]) + [each for each in routers if each in ("seq_aux_loss", "z_loss")]
        add("micro-batches of 1", same, training={"micro_batch_size": 1})
    if config.data.masks_loss and routers:
        add("no mask", routers, data={"eod_mask_loss": False})
    return found


class _Samples:
    """Random samples with ends of documents; with a loss mask, later samples have more masked tokens."""

    def __init__(self, config: RunConfig, count: int) -> None:
        self.seq_length = config.training.seq_length
        generator = np.random.default_rng(count)
        self.tokens = generator.integers(EOD, VOCABULARY, (count, self.seq_length + 1))
        random = generator.random((count, self.seq_length)) > np.linspace(0.1, 0.9, count)[:, None]
        self.mask = random.astype(np.float32) if config.data.masks_loss else None

    def __len__(self) -> int:
        return len(self.tokens)

    def row(self, epoch: int, i: int) -> SampleRow:
        return SampleRow(tokens=self.tokens[i], loss_mask=None if self.mask is None else self.mask[i])

    def batch(self, first: int, size: int) -> MicroBatch:
        rows = slice(first, first + size)
        return MicroBatch(tokens=self.tokens[rows], loss_mask=None if self.mask is None else self.mask[rows])


class TermMeasurement:
    """The model of a case on this rank."""

    def __init__(self, config: RunConfig, ranks: Ranks, weights: Path) -> None:
        """`weights`: the whole tensors by name; the first case of one rank writes them."""
        self.config, self.ranks = config, ranks
        self.model = ModelStage(config, ranks, VOCABULARY, eod=EOD)
        self._held: dict[torch.nn.Parameter, range] = {}
        if config.parallel.use_distributed_optimizer:
            for each in ScheduledOptimizer(config, self.model).inner.chained_optimizers:
                self._held |= dict(each.held()) if isinstance(each, ShardedCheckpointOptimizer) else {}
        state, _ = extract_sharded_tensors_and_factories(self.model.sharded_state_dict({}))
        self._wholes = {whole.data: whole for whole in nested_values(state)}
        with torch.no_grad():
            if not weights.exists():
                for name, parameter in self.model.chunks[0].named_parameters():
                    noise = np.random.default_rng(zlib.crc32(name.encode())).normal(0, NOISE, tuple(parameter.shape))
                    parameter.add_(torch.from_numpy(noise))
                np.savez(weights, **self._assembled(lambda each: each, held=False))  # type: ignore[arg-type]
            with np.load(weights) as found:
                for key, part, where, _ in self._pieces(lambda each: each, held=False):
                    part[...] = found[key][where]

    def _pieces(
        self, values: Callable[[Any], torch.Tensor], *, held: bool
    ) -> Iterator[tuple[str, Array, tuple[slice, ...], tuple[int, ...]]]:
        """Yield pieces of the parameters' values: key, view, place in the whole tensor, and its shape. `held`: pieces
        with complete gradients on this rank."""
        for parameter in (each for chunk in self.model.chunks for each in chunk.parameters()):
            elements = range(parameter.numel())
            if held and self._held:
                elements = self._held.get(parameter, range(0))
            flat = values(parameter).detach().view(-1)[elements.start : elements.stop]
            for piece in state_shards(parameter, self._wholes[parameter], elements, {"": flat}, prefix="")[""].values():
                sides = zip(piece.global_offset, piece.local_shape, strict=True)
                where = tuple(slice(start, start + length) for start, length in sides)
                yield piece.key.lstrip("."), piece.data.numpy(), where, tuple(piece.global_shape)

    def _assembled(self, values: Callable[[Any], torch.Tensor], *, held: bool) -> dict[str, Array]:
        """Return the whole tensors by key, with NaN where this rank has no piece."""
        found: dict[str, Array] = {}
        for key, part, where, shape in self._pieces(values, held=held):
            found.setdefault(key, np.full(shape, np.nan, part.dtype))[where] = np.where(np.isnan(part), np.inf, part)
        return found

    def measure(self, term: str) -> dict[str, Array]:
        """Return the reported value of a term and its gradients, by name of the tensor."""
        training = self.config.training
        if term == VALIDATION:  # the last micro-batch is not full
            self.model.with_token_loss = True
            samples = _Samples(self.config, 2 * training.global_batch_size - 1)
            orders = {term: ValidationSet(name=term, dataset=samples)}  # type: ignore[arg-type]
            found = Validation(orders=orders, training=training, ranks=self.ranks, vocabulary_size=VOCABULARY)
            return {"value": np.array(found.run(self.model)[term])}
        self.model.with_token_loss = term == TOKENS
        factors = self.config.model.transformer.router_losses
        self.model.router_losses.factors = {term: factors[term]} if term in factors else {}
        samples, size = _Samples(self.config, training.global_batch_size), training.micro_batch_size
        firsts = range(self.ranks.data_parallel_rank * size, len(samples), self.ranks.data_parallel_size * size)
        self.model.train_mode(True)
        self.model.zero_grad()
        loss = self.ranks.mean_loss(self.model.run([samples.batch(at, size) for at in firsts], train=True))
        reported = sum(self.model.auxiliary_losses.take(len(firsts)).values())
        self.model.step_buffers.end_step(moved=False)
        value = loss if term in (TOKENS, SPEC) else reported
        return {"value": np.array(value)} | self._assembled(lambda each: each.main_grad, held=True)


def _measure(rank: int, cases: Cases, folder: Path, port: int) -> None:
    """Measure the cases on a forked rank, and write NAME.RANK.npz for each."""
    die_with_parent(signal.SIGKILL)
    layout = next(iter(cases.values()))[0]
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": layout.world_size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in own.items()}, MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(1)
    ranks = distributed.start_process_groups(layout)
    for case, (config, terms) in cases.items():
        measured = TermMeasurement(config, ranks, folder / "weights.npz")
        found = {f"{term}/{name}": each for term in terms for name, each in measured.measure(term).items()}
        np.savez(folder / f"{case}.{rank}.npz", **found)  # type: ignore[arg-type]
    distributed.stop_process_groups()


def difference(term: str, paths: Sequence[Path], reference: Path) -> tuple[float, str]:
    """Return the largest relative difference of a term between the files of all ranks and the file of one rank, and the
    tensor that has it, or `value`."""

    def read(path: Path) -> dict[str, Array]:
        with np.load(path) as arrays:
            return {name.partition("/")[2]: arrays[name] for name in arrays.files if name.startswith(f"{term}/")}

    wanted = read(reference)
    norms = {name: float(np.linalg.norm(each)) for name, each in wanted.items()}
    floor = FLOOR * max((norm for name, norm in norms.items() if name != "value"), default=0.0)
    if len(norms) > 1 and not floor and term != SPEC:
        return 1.0, "there is no gradient"
    found, seen = (0.0, "value"), {name: np.zeros(each.shape, bool) for name, each in wanted.items()}
    for rank, path in enumerate(paths):
        for name, each in read(path).items():
            here = ~np.isnan(each)
            seen[name] |= here
            apart = float(np.linalg.norm((each - wanted[name])[here])) / max(norms[name], floor, 1e-12)
            apart = apart if np.isfinite(apart) else math.inf  # one is infinite or no number
            found = max(found, (apart, f"{name}, rank {rank}" if len(paths) > 1 else name))
    missing = [name for name, each in seen.items() if not each.all()]
    return (1.0, f"{missing[0]}: NaN, or a part on no rank") if missing else found


def compare(config: RunConfig, reference: RunConfig) -> dict[str, dict[str, tuple[float, str]]]:
    """Return for each term and each way to compute it the largest relative difference and the tensor that has it."""
    cases, count = reference_cases(config, reference), config.world_size
    terms = cases["layout"][1]
    rows: dict[str, dict[str, tuple[float, str]]] = {term: {} for term in terms}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        launches = [(1, cases), (count, {"asked": (config, terms)})]
        for ranks, each in launches if count > 1 else launches[:1]:
            start_processes(_measure, (each, path, free_port()), ranks, start_method="fork")  # type: ignore[no-untyped-call]
        for term, row in rows.items():
            if count > 1:
                of_one = "whole" if term == "global_aux_loss" else "layout"
                asked = [path / f"asked.{rank}.npz" for rank in range(count)]
                row[f"{count} ranks"] = difference(term, asked, path / f"{of_one}.0.npz")
            for name, (_, measured) in cases.items():
                if name not in ("layout", "whole") and term in measured:
                    row[name] = difference(term, [path / f"{name}.0.npz"], path / "layout.0.npz")
    return rows


def main() -> None:
    """Answer one request."""
    cpu_patches.patch_for_cpu()
    answer_request(lambda request: compare(*map(RunConfig.model_validate, request)))


if __name__ == "__main__":
    main()
