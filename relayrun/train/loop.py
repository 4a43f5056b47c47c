"""One attempt on one rank: set up, check the data, train until something asks to leave, save, record the outcome."""

from __future__ import annotations

import gc
import logging
import secrets
import time
from dataclasses import asdict, replace
from functools import partial

import torch

from relayrun.config.compose.schema import RunConfig
from relayrun.control.rundir import restarts
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.checkpoint_records import Lineage, ResumePoint
from relayrun.control.rundir.records import AttemptOutcome, AttemptOutcomeName, AttemptStart, StartTimes
from relayrun.control.rundir.restarts import Rollback
from relayrun.control.rundir.run import Run
from relayrun.control.rundir.time_limit import GRACE_SAVES
from relayrun.errors import FatalTrainingError, InputError, RelayrunError
from relayrun.files import write_json
from relayrun.tokens.mixture.build_datasets import mixture_datasets, training_order, validation_sets
from relayrun.tokens.mixture.stream_worker import StreamWorker
from relayrun.tokens.order.batches import BatchReader
from relayrun.tokens.order.sample_rows import row_statistics
from relayrun.tokens.shards.checks import check_data
from relayrun.tokens.shards.manifest import Manifest
from relayrun.tokens.streams.run_tokenizer import loss_token_ids
from relayrun.train import distributed
from relayrun.train.checkpoint.checkpointer import Checkpointer
from relayrun.train.checkpoint.memory_tier import MemoryTier
from relayrun.train.checkpoint.save_and_restore import FINAL_SAVE_TRIES, Saver, StateRestorer
from relayrun.train.distributed import Ranks
from relayrun.train.hooks import Action, Gradients, Step, StepStart, UpdateVerdict, ValidationResult
from relayrun.train.loss_guard import LossGuard
from relayrun.train.model import cpu_patches
from relayrun.train.model.gpt import MicroBatch, ModelStage
from relayrun.train.model.size import peak_flops
from relayrun.train.optimizer.megatron_optimizer import ScheduledOptimizer
from relayrun.train.reporting import liveness
from relayrun.train.reporting.attempt_hooks import attempt_hooks
from relayrun.train.reporting.liveness import HeartbeatWriter, SectionReporter, Timings
from relayrun.train.reporting.metrics import IntervalMetrics, Metrics, Stragglers
from relayrun.train.requests import RequestPoller, SignalFlag
from relayrun.train.validation import Validation

log = logging.getLogger(__name__)


class FinalSaveFailed(RelayrunError):
    """The state could not be saved when leaving; the attempt has failed."""


class RollbackFailed(RelayrunError):
    """The newest checkpoint cannot be taken up; the attempt has failed."""


class TrainingLoop:
    """The state of one attempt on this rank."""

    def __init__(
        self,
        run: Run,
        begin: AttemptStart,
        config: RunConfig,
        ranks: Ranks,
        flag: SignalFlag,
        timings: Timings,
        pulse: HeartbeatWriter,
    ) -> None:
        self.config = config
        self.ranks = ranks
        self.timings = timings
        self.pulse = pulse
        self.sections = pulse.sections = SectionReporter(
            liveness.memory_folder(), ranks.rank, timings=timings, hang_timeout=config.chain.hang_timeout
        )
        manifest = Manifest.read(run.manifest)
        ranks.on_first_rank(partial(check_data, manifest, mixture_datasets(config), config.data), InputError)
        settings = config.training
        self.run_dir, self.attempt = run, run.attempt(begin.attempt)
        opening = ranks.on_first_rank(lambda: secrets.token_hex(8), InputError)
        self.order = training_order(config, manifest, opening=opening, cache=run.data_cache)
        self.vocabulary_size = manifest.vocabulary_size
        self.evaluation = Validation(
            orders=validation_sets(config, manifest, opening=opening, cache=run.data_cache),
            training=settings,
            ranks=ranks,
            vocabulary_size=manifest.vocabulary_size,
        )
        timings.expect_evaluation(self.evaluation.samples)
        self.control = RequestPoller(run, begin, ranks, flag, agent=liveness.memory_folder())
        self.metrics = Metrics(run.attempt(begin.attempt), ranks, total_steps=settings.steps)
        self.model = ModelStage(
            config,
            ranks,
            manifest.vocabulary_size,
            eod=manifest.eod,
            counted=loss_token_ids(config.data, manifest),
            progress=pulse.beat,
        )
        self.optimizer = ScheduledOptimizer(config, self.model)
        self.measures = IntervalMetrics(config, self.model, self.optimizer, ranks)
        self.stragglers = Stragglers(self.model, self.optimizer, ranks, node=pulse.node, say=self.metrics.say)
        self.guard = LossGuard(settings)
        self.hooks = attempt_hooks(
            run,
            begin,
            config,
            ranks,
            self.model,
            self.optimizer,
            timings=timings,
            guard=self.guard,
            metrics=self.metrics,
            sections=self.sections,
        )
        self.checkpointer = Checkpointer(
            run,
            begin.attempt,
            ranks=ranks,
            model=self.model,
            optimizer=self.optimizer,
            order=self.order,
            hooks=self.hooks,
            settings=config.checkpoint,
            fixed={
                "parallel.use_distributed_optimizer": config.parallel.use_distributed_optimizer,
                "training.precision": config.training.resolved_precision,
                "optimizer": config.optimizer.kind,
            },
            groups=[group.model_dump() for group in config.optimizer.groups],
        )
        self._counts_padding = bool(config.data.cut_by_document or config.data.streams)
        self.initialised = time.time()
        self.memory = self._memory_tier()
        self.restore = StateRestorer(
            run=run,
            attempt=self.attempt,
            config=config,
            ranks=ranks,
            checkpointer=self.checkpointer,
            guard=self.guard,
            memory=self.memory,
            say=self.metrics.say,
        )
        restored = self.restore.first(ResumePoint(iteration=begin.base_iteration, path=begin.base_path))
        self.position, self.source = restored.position, restored.source
        self.saver = Saver(
            self.checkpointer,
            control=self.control,
            hooks=self.hooks,
            say=self.metrics.say,
            timings=timings,
            pulse=pulse,
            asynchronous=config.checkpoint.async_save,
            saved_iteration=restored.durable,
        )
        self.peak = peak_flops(ranks.device_name) if config.training.resolved_precision == "bf16" else None
        where = f"{ranks.layout}, {ranks.device.type}" + (", deterministic" if settings.deterministic else "")
        self.metrics.say(
            f"attempt {begin.attempt}: {self.model.parameters():,} parameters on {ranks.world_size} ranks "
            f"({where}), from "
            + (f"iteration {self.position.iteration} ({self.source})" if self.source else "the beginning")
        )
        self.reader = self._set_out()
        if self.memory is not None:
            self.memory.begin(self.position.iteration)

    def _memory_tier(self) -> MemoryTier | None:
        """Copies of the state in this node's memory, where there is an agent to keep them."""
        folder = liveness.memory_folder()
        if folder is None or not self.config.checkpoint.memory_interval:
            return None
        return MemoryTier(folder, self.config, self.attempt, self.checkpointer, self.ranks, metrics=self.metrics)

    def _set_out(self) -> BatchReader:
        """Read from the position on; data.json says what."""
        if self.ranks.rank == 0:
            data = self.order.state(self.position.consumed_samples) | {"progress": self.position.state()}
            write_json(self.attempt.data, data)
        reading = None
        if self.order.lanes is not None:
            consumed, ranks = self.position.consumed_samples, self.ranks
            replica, replicas = ranks.data_parallel_rank, ranks.data_parallel_size
            streams = None
            if self.config.data.num_workers:
                worker = StreamWorker(
                    self.config,
                    self.run_dir.manifest,
                    self.order,
                    consumed=consumed,
                    replica=replica,
                    replicas=replicas,
                )
                streams = worker.streams(self.order.streams)
            reading = self.order.reading(consumed, replica, replicas, streams=streams)
        self.checkpointer.reading = reading
        return BatchReader(
            reading or self.order,
            data_parallel_rank=self.ranks.data_parallel_rank,
            data_parallel_size=self.ranks.data_parallel_size,
            micro_batch_size=self.config.training.micro_batch_size,
            batch_sizes=self.config.training.batch_sizes,
            consumed_samples=self.position.consumed_samples,
            vocabulary_size=self.vocabulary_size,
        )

    def run(self) -> AttemptOutcome:
        """Train until done or asked to leave; return how it ended. The state is durable then.

        Raises LeaveFailed if the last save did not work, FatalTrainingError on a loss that is no number.
        """
        self.model.train_mode(True)
        steps, end = self.config.training.steps, self.config.training.end_iteration
        if self.config.training.manual_gc_interval:
            gc.disable()  # else each rank stops at another time, and all wait for each
        gc.freeze()  # what set-up made stays: collections, of which every save has one, look at the rest alone
        while True:
            at = self.position.iteration
            self.sections.enter("triggers", at)
            agreed = self.saver.look()
            if at >= end:
                stopped = ", where training.stop_after ends the run" if end < steps else ""
                return self._leave("done", f"iteration {at} of {steps} reached{stopped}")
            if self.config.training.manual_gc_interval and at % self.config.training.manual_gc_interval == 0:
                gc.collect()
            if agreed.leave is not None:
                return self._leave(agreed.leave, agreed.reason)
            if agreed.save and at:  # before the first iteration there is nothing to save: answered after it
                self.saver.asked(self.position)
            if at % self.config.checkpoint.interval == 0:
                self.saver.due(self.position)
            if self.memory is not None and self.memory.due(at):
                self.sections.enter("save")
                usual = self.timings.step_median or 0.0
                self.saver.stall_seconds += self.memory.save(self.position, step_seconds=usual)
            if not self._step():
                continue
            interval = self.config.training.eval_interval
            at = self.position.iteration
            if at == steps or (interval and at % interval == 0):
                self._evaluate()

    def _step(self) -> bool:
        """One iteration; False if it was a rewind."""
        size, consumed = self.position.batch_size, self.position.consumed_samples
        number = self.position.iteration + 1
        self.hooks.before_step(StepStart(iteration=number, consumed_samples=consumed, global_batch_size=size))
        tokens = size * self.config.training.seq_length
        self.pulse.enter("step", self.position.iteration)
        self.sections.enter("data")
        started = time.perf_counter()
        lr = self.optimizer.lr
        self.optimizer.zero_grad()
        rows = next(self.reader)
        batches = [MicroBatch(tokens=one.tokens, lengths=one.lengths, loss_mask=one.loss_mask) for one in rows]
        read = time.perf_counter()
        self.stragglers.read(read - started)
        self.sections.enter("forward")
        counts = [sum(one.padding for one in rows), sum(one.windows for one in rows)] if self._counts_padding else []
        loss, counts = self.ranks.mean_loss_and(counts, self.model.run(batches, train=True))
        auxiliary = self.model.auxiliary_losses.take(len(batches))
        computed = time.perf_counter()
        self.sections.enter("optimizer")
        grad_norm = self.optimizer.prepare()
        self.measures.of_gradients(number)
        gradients = Gradients(
            iteration=number,
            loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            consumed_samples=consumed,
            global_batch_size=size,
        )
        verdict = self._judge(gradients)
        with self.sections.within("save"):
            waited = self.saver.before_update()
        self.optimizer.step(grad_norm if verdict.action is Action.UPDATE else None)
        self.measures.of_weights(number)
        distributed.wait_for_device(self.ranks)  # else the next forward pass would seem to take the update's time
        updated = time.perf_counter()
        self.sections.enter("report")
        self.position.advance(skipped=verdict.action is Action.SKIP)
        seconds = time.perf_counter() - started - waited
        if self.memory is not None:
            self.memory.stepped(seconds, samples=size)
        flops = self.model.flops_per_token() * tokens / seconds / self.ranks.world_size
        measured = self.measures.take(number)
        measured |= self.stragglers.take(number, save_seconds=self.checkpointer.take_own_seconds())
        self.hooks.after_step(
            Step(
                iteration=self.position.iteration,
                loss=loss,
                grad_norm=grad_norm,
                lr=lr,
                consumed_samples=self.position.consumed_samples,
                consumed_tokens=self.position.consumed_samples * self.config.training.seq_length,
                global_batch_size=size,
                tokens_per_second=tokens / seconds,
                step_seconds=seconds,
                data_seconds=read - started,
                forward_backward_seconds=computed - read,
                optimizer_seconds=updated - computed - waited,
                save_seconds=self.saver.stall_seconds,
                model_tflops_per_gpu=flops / 1e12,
                mfu=None if self.peak is None else flops / self.peak,
                memory_bytes=distributed.peak_memory(self.ranks),
                **distributed.gpu_memory_fields(self.ranks),
                **measured,
                time=time.time(),
                skipped=verdict.reason,
                hooks_seconds=self.hooks.take_seconds(),
                auxiliary_losses=auxiliary or None,
                **row_statistics(counts, tokens=tokens, samples=size),
            )
        )
        self.saver.stall_seconds = 0.0
        if verdict.action is Action.UPDATE:
            self.saver.reserve(self.position.iteration)
        if self.timings.estimates_evaluation:  # it may be due before a save or an evaluation moves the deadline
            self.control.lead = self.timings.lead()
        at = self.position.iteration
        if verdict.action is Action.STOP:
            self.saver.settle(at)
            raise FatalTrainingError(
                f"iteration {at}: {verdict.reason}; nothing was saved since iteration {self.saver.saved_iteration}",
                hint="lower the learning rate, or look at the data of this iteration; to pass over it: training.on_nan",
            )
        if verdict.action is Action.SKIP:
            self.metrics.say(f"iteration {at}: {verdict.reason}; its update is left out")
        if verdict.action is Action.REWIND:
            self._rewind(verdict.reason or "")
        return verdict.action is not Action.REWIND

    def _judge(self, gradients: Gradients) -> UpdateVerdict:
        """What all ranks do with this iteration."""
        verdict = self.hooks.before_update(gradients)
        return self.guard.limited(verdict.action, verdict.reason)  # those of a user's hooks, too

    def _rewind(self, reason: str) -> None:
        """Back to the newest checkpoint; the samples up to here are passed over."""
        at = self.position.iteration
        self.saver.settle(at)
        base = self.saver.saved_iteration
        if not base:
            raise FatalTrainingError(f"iteration {at}: {reason}; there is no checkpoint to go back to")
        self.metrics.say(f"iteration {at}: {reason}; back to iteration {base}")
        if self.memory is not None:
            self.memory.void()
            self.ranks.maximum([0])  # on every rank, before the rewind is on record
        self.pulse.enter("start", base)
        rewind = Rollback(
            iteration=at,
            reason=reason,
            base_iteration=base,
            next_sample=self.position.consumed_samples,
            time=time.time(),
        )
        path = self.ranks.on_first_rank(partial(record_rollback, self.run_dir, self.attempt, rewind), RollbackFailed)
        self.reader.close()
        self.position, taken = self.restore.newest_whole(ResumePoint(iteration=base, path=path))
        if taken.iteration != base:  # what led to trouble is trained on again, and passed over when it comes again
            self.metrics.at_rewind(rewind)
            rewind = replace(
                rewind,
                reason=f"{reason}; the checkpoint of iteration {base} is damaged",
                base_iteration=taken.iteration,
                next_sample=self.position.consumed_samples,
                time=time.time(),
            )
            self.ranks.on_first_rank(partial(restarts.record_rollback, self.attempt, rewind), RollbackFailed)
            self.saver.saved_iteration = taken.iteration
        self.hooks.at_rewind(rewind)
        self.reader = self._set_out()

    def _evaluate(self) -> None:
        if self.evaluation.orders:
            self.pulse.enter("evaluation", self.position.iteration)
            started = time.perf_counter()
            losses = self.evaluation.run(self.model)
            seconds = time.perf_counter() - started
            self.hooks.at_evaluation(
                ValidationResult(iteration=self.position.iteration, losses=losses, seconds=seconds)
            )
            self.saver.move_deadline()

    def _leave(self, name: AttemptOutcomeName, reason: str) -> AttemptOutcome:
        at = self.position.iteration
        asked = self.control.take()
        result = f"nothing trained since iteration {at}" if at == self.saver.saved_iteration else "saved"
        failure = self.saver.last(self.position)
        if failure is not None:  # triggers stay: an exit asked for must reach the next attempt
            raise FinalSaveFailed(f"iteration {at} could not be saved ({FINAL_SAVE_TRIES} tries): {failure}")
        outcome = AttemptOutcome(outcome=name, reason=reason, iteration=at, time=time.time())
        self.hooks.at_end(outcome)  # what a hook raises fails the attempt, and an exit asked for must reach the next
        self.ranks.maximum([0])  # on every rank
        if self.ranks.rank == 0:
            outcome.write(self.attempt.outcome)  # before the exit is acknowledged: a kill between the two keeps it
        self.control.acknowledge(asked, at, result)
        return outcome


def train_attempt(
    run: Run,
    begin: AttemptStart,
    config: RunConfig,
    flag: SignalFlag,
    timings: Timings,
    pulse: HeartbeatWriter,
    *,
    process_began: float,
) -> None:
    """Run the attempt; on return its outcome is written. Raises what `TrainingLoop` raises, ConfigError, and
    NoGpu.

    `process_began`: seconds since 1970, for the record.
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
    training = TrainingLoop(run, begin, config, ranks, flag, timings, pulse)
    if ranks.rank == 0:
        times = StartTimes(
            process=process_began, imported=imported, initialised=training.initialised, loaded=time.time()
        )
        source = training.source if training.source in restarts.STATE_SOURCES else "disk"
        liveness.tell_agent("started", **asdict(times), source=source, iteration=training.position.iteration)
        if not run.attempt(begin.attempt).started.exists():  # of later rounds, rounds.jsonl has the times
            record_start(run.attempt(begin.attempt), times)
    training.hooks.at_start(training.position.iteration, training.position.consumed_samples)
    outcome = training.run()
    if training.memory is not None:
        training.memory.finish()
    training.reader.close()
    training.metrics.say(f"leaving at iteration {outcome.iteration}: {outcome.outcome} ({outcome.reason})")
    distributed.stop_process_groups()
    training.hooks.close()


def record_rollback(run: Run, attempt: Attempt, rewind: Rollback) -> str:
    """Put a rewind on record; return the path of its checkpoint. Raises RelayrunError if that is not the newest."""
    newest = next(Lineage(run).backwards(), None)
    if newest is None or newest.commit.iteration != rewind.base_iteration:
        raise RelayrunError(
            f"iteration {rewind.iteration}: {rewind.reason}; the checkpoint of iteration "
            f"{rewind.base_iteration}, to go back to, is not the newest of this run",
            where=run.checkpoints,
        )
    restarts.record_rollback(attempt, rewind)
    return newest.commit.path


def record_start(attempt: Attempt, started: StartTimes) -> None:
    """Leave started.json. On a full disk training goes on without it."""
    try:
        started.write(attempt.started)
    except OSError as error:
        log.warning("%s not written: %s", attempt.started.name, error)
