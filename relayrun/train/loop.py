"""The training loop of one attempt on one rank: set up, check the data, train, save, and record the outcome."""

from __future__ import annotations

import gc
import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from relayrun.config.compose.schema import RunConfig
from relayrun.control.rundir import restarts
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.checkpoint_records import Lineage, ResumePoint
from relayrun.control.rundir.records import AttemptOutcome, AttemptOutcomeName, AttemptStart, StartTimes
from relayrun.control.rundir.restarts import Rollback
from relayrun.control.rundir.run import Run
from relayrun.control.rundir.time_limit import GRACE_SAVES
from relayrun.errors import FatalTrainingError, InputError, RelayrunError, warned
from relayrun.files import write_json
from relayrun.tokens.mixture.build_datasets import training_order, validation_sets
from relayrun.tokens.mixture.stream_worker import RankStreamWorker
from relayrun.tokens.order.batches import BatchReader
from relayrun.tokens.order.sample_rows import RowBatch, row_statistics
from relayrun.tokens.shards.checks import check_data
from relayrun.tokens.shards.manifest import Manifest
from relayrun.tokens.streams.run_tokenizer import counted_token_ids
from relayrun.train import distributed, hook_list
from relayrun.train.checkpoint.checkpointer import Checkpointer
from relayrun.train.checkpoint.memory_tier import MemoryTier
from relayrun.train.checkpoint.save_and_restore import FINAL_SAVE_TRIES, Saver, StateRestorer
from relayrun.train.distributed import Ranks
from relayrun.train.hook_list import Hooks
from relayrun.train.hooks import Action, Gradients, HookContext, Step, StepStart, UpdateVerdict, ValidationResult
from relayrun.train.loss_guard import LossGuard
from relayrun.train.model import cpu_patches
from relayrun.train.model.gpt import MicroBatch, ModelStage
from relayrun.train.model.size import peak_flops
from relayrun.train.optimizer.megatron_optimizer import ScheduledOptimizer
from relayrun.train.reporting import liveness
from relayrun.train.reporting.liveness import NodeHeartbeatWriter, RankTimings, SectionReporter
from relayrun.train.reporting.measurements import IntervalMetrics, Stragglers
from relayrun.train.reporting.metrics import Metrics
from relayrun.train.requests import RequestPoller, SignalFlag
from relayrun.train.validation import Validation

log = logging.getLogger(__name__)


class FinalSaveFailed(RelayrunError):
    """The state could not be saved before leaving; the attempt has failed."""


class RollbackFailed(RelayrunError):
    """A rollback to the newest checkpoint failed; the attempt has failed."""


class TrainingLoop:
    """State of one attempt on this rank.

    The steps of the constructor depend on each other in their order, and contain collectives of all ranks.
    """

    def __init__(
        self,
        run: Run,
        begin: AttemptStart,
        config: RunConfig,
        ranks: Ranks,
        flag: SignalFlag,
        timings: RankTimings,
        heartbeat: NodeHeartbeatWriter,
    ) -> None:
        self.run_dir, self.attempt = run, run.attempt(begin.attempt)
        self.config, self.ranks, self.timings, self.heartbeat = config, ranks, timings, heartbeat
        self.sections = heartbeat.sections = SectionReporter(
            liveness.memory_folder(), ranks.rank, timings=timings, hang_timeout=config.chain.hang_timeout
        )
        self.manifest = Manifest.read(run.manifest)
        self._open_data()
        self.control = RequestPoller(run, begin, ranks, flag, agent=liveness.memory_folder())
        self.metrics = Metrics(self.attempt, ranks, total_steps=config.training.steps)
        self._build_model()
        self._make_hooks(begin)
        self.checkpointer = Checkpointer(
            run,
            begin.attempt,
            config,
            ranks=ranks,
            model=self.model,
            optimizer=self.optimizer,
            order=self.order,
            hooks=self.hooks,
        )
        self.initialised = time.time()
        self._restore(ResumePoint(iteration=begin.base_iteration, path=begin.base_path))
        self._say_start(begin.attempt)
        self.reader = self._open_reader()
        if self.memory is not None:
            self.memory.start(self.position.iteration)

    def _open_data(self) -> None:
        config, ranks, manifest = self.config, self.ranks, self.manifest
        names = [source.identity(name) for name, source in config.data.sources.items()]
        ranks.on_first_rank(partial(check_data, manifest, names, config.data), InputError)
        opening = ranks.on_first_rank(lambda: secrets.token_hex(8), InputError)
        cache = self.run_dir.data_cache
        self.order = training_order(config, manifest, opening=opening, cache=cache)
        self.evaluation = Validation(
            orders=validation_sets(config, manifest, opening=opening, cache=cache),
            training=config.training,
            ranks=ranks,
            vocabulary_size=manifest.vocabulary_size,
        )
        self.timings.expect_evaluation(self.evaluation.samples)
        self._counts_padding = bool(config.data.cut_by_document or config.data.streams)

    def _build_model(self) -> None:
        config, ranks, manifest = self.config, self.ranks, self.manifest
        self.model = ModelStage(
            config,
            ranks,
            manifest.vocabulary_size,
            eod=manifest.eod,
            counted=counted_token_ids(config.data, manifest),
            progress=self.heartbeat.beat,
        )
        self.optimizer = ScheduledOptimizer(config, self.model)
        self.measures = IntervalMetrics(config, self.model, self.optimizer, ranks)
        self.stragglers = Stragglers(self.model, self.optimizer, ranks, node=self.heartbeat.node, say=self.metrics.say)
        self.peak = peak_flops(ranks.device_name) if config.training.resolved_precision == "bf16" else None

    def _make_hooks(self, begin: AttemptStart) -> None:
        run, config, ranks, metrics = self.run_dir, self.config, self.ranks, self.metrics
        self.guard = LossGuard(config.training)
        reports = hook_list.report_hooks(run, begin, config, ranks, self.model, metrics)
        own = [self.timings, self.guard, metrics, *reports]
        self.hooks = Hooks(own, hook_list.import_hooks(config.training.hooks, ranks), ranks, self.sections)
        context = HookContext(
            run_dir=run.path,
            attempt=begin.attempt,
            config=config,
            ranks=ranks,
            model=self.model,
            optimizer=self.optimizer,
            say=metrics.say,
        )
        self.hooks.setup(context)

    def _restore(self, base: ResumePoint) -> None:
        folder = liveness.memory_folder()
        self.memory: MemoryTier | None = None
        if folder is not None and self.config.checkpoint.memory_interval:
            self.memory = MemoryTier(folder, self.checkpointer, metrics=self.metrics)
        self.restore = StateRestorer(
            attempt=self.attempt,
            checkpointer=self.checkpointer,
            guard=self.guard,
            memory=self.memory,
            say=self.metrics.say,
        )
        restored = self.restore.restore(base)
        self.position, self.source = restored.position, restored.source
        self.saver = Saver(
            checkpointer=self.checkpointer,
            control=self.control,
            hooks=self.hooks,
            say=self.metrics.say,
            timings=self.timings,
            heartbeat=self.heartbeat,
            asynchronous=self.config.checkpoint.async_save,
            saved_iteration=restored.durable,
        )

    def _say_start(self, attempt: int) -> None:
        ranks, deterministic = self.ranks, ", deterministic" if self.config.training.deterministic else ""
        start = f"iteration {self.position.iteration} ({self.source})" if self.source else "the beginning"
        self.metrics.say(
            f"attempt {attempt}: {self.model.parameters():,} parameters on {ranks.world_size} ranks "
            f"({ranks.layout}, {ranks.device.type}{deterministic}), from {start}"
        )

    def _open_reader(self) -> BatchReader:
        """Return a reader that starts at the current position; rank 0 writes that position into data.json."""
        consumed, ranks = self.position.consumed_samples, self.ranks
        if ranks.rank == 0:
            write_json(self.attempt.data, self.order.state(consumed) | {"progress": self.position.state()})
        reading = None
        if self.order.lanes is not None:
            replica, replicas = ranks.data_parallel_rank, ranks.data_parallel_size
            openers = None
            if self.config.data.num_workers:
                worker = RankStreamWorker(
                    self.config,
                    self.run_dir.manifest,
                    self.order,
                    consumed=consumed,
                    replica=replica,
                    replicas=replicas,
                )
                openers = worker.openers()
            reading = self.order.lane_reader(consumed, replica, replicas, openers=openers)
        self.checkpointer.reading = reading
        return BatchReader(
            reading or self.order,
            data_parallel_rank=ranks.data_parallel_rank,
            data_parallel_size=ranks.data_parallel_size,
            micro_batch_size=self.config.training.micro_batch_size,
            batch_sizes=self.config.training.batch_sizes,
            consumed_samples=consumed,
            vocabulary_size=self.manifest.vocabulary_size,
        )

    def run(self) -> AttemptOutcome:
        """Train until the last iteration or until asked to leave; return the outcome, with the state durable.

        Raises FinalSaveFailed if the last save fails, FatalTrainingError if the loss is not finite (`training.on_nan:
        stop`).
        """
        self.model.train_mode(True)
        steps, end = self.config.training.steps, self.config.training.end_iteration
        if self.config.training.manual_gc_interval:
            gc.disable()  # else ranks collect at different times, and all wait for each of them
        gc.freeze()  # objects of the set-up live on: a collection, which every save causes, need not scan them
        while True:
            at = self.position.iteration
            self.sections.enter("triggers", at)
            agreed = self.saver.poll_requests()
            if at >= end:
                stopped = ", where training.stop_after ends the run" if end < steps else ""
                return self._leave("done", f"iteration {at} of {steps} reached{stopped}")
            if self.config.training.manual_gc_interval and at % self.config.training.manual_gc_interval == 0:
                gc.collect()
            if agreed.leave is not None:
                return self._leave(agreed.leave, agreed.reason)
            if agreed.save and at:  # at iteration 0 the request waits
                self.saver.save_on_request(self.position)
            if at % self.config.checkpoint.interval == 0:
                self.saver.save_at_interval(self.position)
            if self.memory is not None and self.memory.due(at):
                self.sections.enter("save")
                self.saver.stall_seconds += self.memory.save(self.position)
            if not self._step():
                continue
            interval = self.config.training.eval_interval
            at = self.position.iteration
            if at == steps or (interval and at % interval == 0):
                self._evaluate()

    def _step(self) -> bool:
        """Run one iteration; return False if it ended in a rollback."""
        number, size = self.position.iteration + 1, self.position.batch_size
        consumed = self.position.consumed_samples
        self.hooks.before_step(StepStart(iteration=number, consumed_samples=consumed, global_batch_size=size))
        self.heartbeat.enter("step", self.position.iteration)
        self.sections.enter("data")
        started = time.perf_counter()
        lr = self.optimizer.lr
        self.optimizer.zero_grad()
        rows = next(self.reader)
        read = time.perf_counter()
        self.stragglers.record_read(read - started)
        self.sections.enter("forward")
        loss, counts, auxiliary = self._forward_backward(rows)
        computed = time.perf_counter()
        self.sections.enter("optimizer")
        grad_norm = self.optimizer.prepare()
        self.measures.measure_gradients(number)
        gradients = Gradients(
            iteration=number, loss=loss, grad_norm=grad_norm, lr=lr, consumed_samples=consumed, global_batch_size=size
        )
        verdict, waited = self._update(gradients)
        updated = time.perf_counter()
        self.sections.enter("report")
        self.position.advance(skipped=verdict.action is Action.SKIP)
        self._report(
            gradients,
            verdict,
            seconds=time.perf_counter() - started - waited,
            data_seconds=read - started,
            forward_backward_seconds=computed - read,
            optimizer_seconds=updated - computed - waited,
            auxiliary_losses=auxiliary or None,
            **row_statistics(counts, tokens=size * self.config.training.seq_length, samples=size),
        )
        return self._act_on(verdict)

    def _forward_backward(self, rows: Sequence[RowBatch]) -> tuple[float, list[int], dict[str, float]]:
        """Return the mean loss, the counts of padding and windows, and the auxiliary losses of an iteration."""
        batches = [MicroBatch(tokens=one.tokens, lengths=one.lengths, loss_mask=one.loss_mask) for one in rows]
        counts = [sum(one.padding for one in rows), sum(one.windows for one in rows)] if self._counts_padding else []
        loss, counts = self.ranks.mean_loss_and(counts, self.model.run(batches, train=True))
        return loss, counts, self.model.auxiliary_losses.take(len(batches))

    def _update(self, gradients: Gradients) -> tuple[UpdateVerdict, float]:
        """Agree on the iteration and update the weights; return the verdict, and the seconds of a wait for a copy."""
        verdict = self.hooks.before_update(gradients)
        verdict = self.guard.within_limits(verdict.action, verdict.reason)  # verdicts of a user's hooks, too
        with self.sections.within("save"):
            waited = self.saver.wait_for_copy()
        self.optimizer.step(gradients.grad_norm if verdict.action is Action.UPDATE else None)
        self.measures.measure_weights(gradients.iteration)
        distributed.wait_for_device(self.ranks)  # else the update's time would count for the next forward pass
        return verdict, waited

    def _report(self, gradients: Gradients, verdict: UpdateVerdict, *, seconds: float, **fields: Any) -> None:
        """Pass the measurements of the iteration to the hooks. `fields`: of `Step`."""
        number, size = gradients.iteration, gradients.global_batch_size
        tokens = size * self.config.training.seq_length
        flops = self.model.flops_per_token() * tokens / seconds / self.ranks.world_size
        measured = self.measures.take(number)
        measured |= self.stragglers.take(number, save_seconds=self.checkpointer.take_own_seconds())
        self.hooks.after_step(
            Step(
                iteration=number,
                loss=gradients.loss,
                grad_norm=gradients.grad_norm,
                lr=gradients.lr,
                consumed_samples=self.position.consumed_samples,
                consumed_tokens=self.position.consumed_samples * self.config.training.seq_length,
                global_batch_size=size,
                tokens_per_second=tokens / seconds,
                step_seconds=seconds,
                save_seconds=self.saver.stall_seconds,
                model_tflops_per_gpu=flops / 1e12,
                mfu=None if self.peak is None else flops / self.peak,
                memory_bytes=distributed.peak_memory(self.ranks),
                **distributed.gpu_memory_fields(self.ranks),
                **measured,
                time=time.time(),
                skipped=verdict.reason,
                hooks_seconds=self.hooks.take_seconds(),
                **fields,
            )
        )
        self.saver.stall_seconds = 0.0

    def _act_on(self, verdict: UpdateVerdict) -> bool:
        """Reserve memory after an update, or stop or roll back; return False after a rollback."""
        at = self.position.iteration
        if verdict.action is Action.UPDATE:
            self.saver.reserve(at)
        if self.timings.estimates_evaluation:  # it may be due before anything else moves the deadline
            self.control.grace_period = self.timings.grace_period()
        if verdict.action is Action.STOP:
            self.saver.wait_for_save(at)
            raise FatalTrainingError(
                f"iteration {at}: {verdict.reason}; nothing was saved since iteration {self.saver.saved_iteration}",
                hint="lower the learning rate, or look at the data of this iteration; to pass over it: training.on_nan",
            )
        if verdict.action is Action.SKIP:
            self.metrics.say(f"iteration {at}: {verdict.reason}; its update is left out")
        if verdict.action is Action.ROLLBACK:
            self._roll_back(verdict.reason or "")
        return verdict.action is not Action.ROLLBACK

    def _roll_back(self, reason: str) -> None:
        """Load the newest checkpoint; the samples up to the current position are skipped."""
        at = self.position.iteration
        self.saver.wait_for_save(at)
        base = self.saver.saved_iteration
        if not base:
            raise FatalTrainingError(f"iteration {at}: {reason}; there is no checkpoint to go back to")
        self.metrics.say(f"iteration {at}: {reason}; back to iteration {base}")
        if self.memory is not None:
            self.memory.discard()
            self.ranks.maximum([0])  # all ranks discard their copies before the rollback is recorded
        self.heartbeat.enter("start", base)
        rollback = Rollback(
            iteration=at,
            reason=reason,
            base_iteration=base,
            next_sample=self.position.consumed_samples,
            time=time.time(),
        )
        path = self.ranks.on_first_rank(partial(record_rollback, self.run_dir, self.attempt, rollback), RollbackFailed)
        self.reader.close()
        self.position, taken = self.restore.load_newest_intact(ResumePoint(iteration=base, path=path))
        if taken.iteration != base:  # the samples that led to trouble come again, and are skipped then
            self.metrics.at_rollback(rollback)
            rollback = replace(
                rollback,
                reason=f"{reason}; the checkpoint of iteration {base} is damaged",
                base_iteration=taken.iteration,
                next_sample=self.position.consumed_samples,
                time=time.time(),
            )
            self.ranks.on_first_rank(partial(rollback.append, self.attempt.rollbacks), RollbackFailed)
            self.saver.saved_iteration = taken.iteration
        self.hooks.at_rollback(rollback)
        self.reader = self._open_reader()

    def _evaluate(self) -> None:
        if not self.evaluation.orders:
            return
        self.heartbeat.enter("evaluation", self.position.iteration)
        started = time.perf_counter()
        losses = self.evaluation.run(self.model)
        seconds = time.perf_counter() - started
        self.hooks.at_evaluation(ValidationResult(iteration=self.position.iteration, losses=losses, seconds=seconds))
        self.saver.update_grace_period()

    def _leave(self, name: AttemptOutcomeName, reason: str) -> AttemptOutcome:
        at = self.position.iteration
        asked = self.control.take()
        result = f"nothing trained since iteration {at}" if at == self.saver.saved_iteration else "saved"
        failure = self.saver.save_before_leaving(self.position)
        if failure is not None:  # triggers stay: an exit request must reach the next attempt
            raise FinalSaveFailed(f"iteration {at} could not be saved ({FINAL_SAVE_TRIES} tries): {failure}")
        outcome = AttemptOutcome(outcome=name, reason=reason, iteration=at, time=time.time())
        self.hooks.at_end(outcome)  # a hook may fail the attempt; an exit request must then reach the next
        self.ranks.maximum([0])  # the hooks of all ranks are through
        if self.ranks.rank == 0:
            outcome.write(self.attempt.outcome)  # before the acknowledgement: a kill between them keeps the request
        self.control.acknowledge(asked, at, result)
        return outcome


def train_attempt(
    run: Run,
    begin: AttemptStart,
    config: RunConfig,
    flag: SignalFlag,
    timings: RankTimings,
    heartbeat: NodeHeartbeatWriter,
    *,
    process_began: float,
) -> None:
    """Run the attempt and write its outcome. Raises as `TrainingLoop.run`, ConfigError, and NoGpuFound.

    `process_began`: seconds since 1970, for `started.json`.
    """
    imported = time.time()
    cpu_patches.patch_for_cpu()
    if config.training.threads:
        torch.set_num_threads(config.training.threads)
    distributed.enable_determinism(config)
    distributed.require_gpu(config)
    ranks = distributed.start_process_groups(config)
    for seconds in ranks.on_first_rank(lambda: Lineage(run).newest_saves(GRACE_SAVES), InputError):
        timings.save(seconds)
    training = TrainingLoop(run, begin, config, ranks, flag, timings, heartbeat)
    if ranks.rank == 0:
        times = StartTimes(
            process=process_began, imported=imported, initialised=training.initialised, loaded=time.time()
        )
        source = training.source if training.source in restarts.STATE_SOURCES else "disk"
        liveness.tell_agent("started", **asdict(times), source=source, iteration=training.position.iteration)
        if not run.attempt(begin.attempt).started.exists():  # restarts.jsonl has the times of later restarts
            with warned(log, "started.json not written"):  # if the disk is full, training continues without it
                times.write(run.attempt(begin.attempt).started)
    training.hooks.at_start(training.position.iteration, training.position.consumed_samples)
    outcome = training.run()
    if training.memory is not None:
        training.memory.finish()
    training.reader.close()
    training.metrics.say(f"leaving at iteration {outcome.iteration}: {outcome.outcome} ({outcome.reason})")
    distributed.stop_process_groups()
    training.hooks.close()


def record_rollback(run: Run, attempt: Attempt, rollback: Rollback) -> str:
    """Record a rollback; return the path of its checkpoint. Raises RelayrunError if that is not the newest one."""
    newest = next(Lineage(run).backwards(), None)
    if newest is None or newest.commit.iteration != rollback.base_iteration:
        raise RelayrunError(
            f"iteration {rollback.iteration}: {rollback.reason}; the checkpoint of iteration "
            f"{rollback.base_iteration}, to go back to, is not the newest of this run",
            where=run.checkpoints,
        )
    rollback.append(attempt.rollbacks)
    return newest.commit.path
