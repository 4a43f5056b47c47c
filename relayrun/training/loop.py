"""One attempt on one rank: set up, train until something says leave, save, say how it went."""

from __future__ import annotations

import gc
import math
import sys
import time
from functools import partial
from pathlib import Path

import torch

from relayrun.config.schema import RunConfig
from relayrun.data.batches import BatchReader
from relayrun.data.build import mixture_of, training_order, validation_orders
from relayrun.data.manifest import Manifest
from relayrun.data.progress import Progress
from relayrun.errors import FatalTrainingError, InputError, RelayrunError
from relayrun.files import write_json
from relayrun.rundir.layout import AttemptDir, RunDir
from relayrun.rundir.lineage import Durable, is_own
from relayrun.rundir.records import Begin, Left, Outcome, Started
from relayrun.training import device_shim, parallel
from relayrun.training.checkpoint import Checkpointer
from relayrun.training.control import Control
from relayrun.training.debugging import Profiler
from relayrun.training.evaluation import Evaluation
from relayrun.training.heartbeat import Pulse
from relayrun.training.metrics import Metrics, Step
from relayrun.training.model import MicroBatch, Model
from relayrun.training.optimizer import Optimizer
from relayrun.training.pace import Pace
from relayrun.training.parallel import Ranks
from relayrun.training.progress_log import ProgressLog
from relayrun.training.saver import LEAVE_TRIES, Saver
from relayrun.training.signals import SignalFlag
from relayrun.training.size import peak_flops
from relayrun.training.trackers import Trackers


class LeaveFailed(RelayrunError):
    """The state could not be saved when leaving; the attempt has failed."""


class Training:
    """The state of one attempt on this rank."""

    def __init__(
        self, run: RunDir, begin: Begin, config: RunConfig, ranks: Ranks, flag: SignalFlag, pace: Pace, pulse: Pulse
    ) -> None:
        self.config = config
        self.ranks = ranks
        self.pace = pace
        self.pulse = pulse
        manifest = Manifest.read(run.manifest)
        ranks.on_first_rank(partial(check_data, manifest, mixture_of(config)), InputError)
        settings = config.training
        order = training_order(config, manifest)
        self.evaluation = Evaluation(orders=validation_orders(config, manifest), training=settings, ranks=ranks)
        self.control = Control(run, begin, ranks, flag)
        self.metrics = Metrics(run.attempt(begin.attempt), ranks, total_steps=settings.steps)
        traces = run.debug_of(begin.attempt) / "profile"
        self.profiler = Profiler(config.debug, rank=ranks.rank, folder=traces, say=self.metrics.say)
        self.model = Model(config, ranks, manifest.vocabulary_size, eod=manifest.eod, progress=pulse.beat)
        self.optimizer = Optimizer(config, self.model)
        checkpointer = Checkpointer(
            run,
            begin.attempt,
            ranks=ranks,
            model=self.model,
            optimizer=self.optimizer,
            order=order,
            settings=config.checkpoint,
            fixed={
                "parallel.use_distributed_optimizer": config.parallel.use_distributed_optimizer,
                "training.precision": config.training.precision,
            },
        )
        self.position = Progress(settings.batch_sizes)
        self.initialised = time.time()
        if begin.base_path is not None:
            own = is_own(run, Durable(iteration=begin.base_iteration, path=begin.base_path))
            self.position = checkpointer.load(Path(begin.base_path), settings.batch_sizes, foreign=not own)
            if self.position.iteration != begin.base_iteration:
                raise FatalTrainingError(
                    f"holds iteration {self.position.iteration}, but this attempt begins at {begin.base_iteration}",
                    where=begin.base_path,
                )
        progress = None
        if ranks.rank == 0:
            progress = ProgressLog(
                run.progress,
                job_id=begin.job_id,
                ranks=ranks.world_size,
                flops_per_token=self.model.flops_per_token(),
                seq_length=settings.seq_length,
                consumed_samples=self.position.consumed_samples,
            )
        self.saver = Saver(
            checkpointer,
            control=self.control,
            metrics=self.metrics,
            pace=pace,
            pulse=pulse,
            progress=progress,
            asynchronous=config.checkpoint.async_save,
            saved_iteration=self.position.iteration,
        )
        self.peak = peak_flops(ranks.device_name) if config.training.precision == "bf16" else None
        if ranks.rank == 0:
            data = order.state(self.position.consumed_samples) | {"progress": self.position.state()}
            write_json(run.attempt(begin.attempt).data, data)
        self.metrics.say(
            f"attempt {begin.attempt}: {self.model.parameters():,} parameters on {ranks.world_size} ranks "
            f"({ranks.layout}, {ranks.device.type}), from "
            + (f"iteration {self.position.iteration} ({begin.base_path})" if begin.base_path else "the beginning")
        )
        self.reader = BatchReader(
            order,
            data_parallel_rank=ranks.data_parallel_rank,
            data_parallel_size=ranks.data_parallel_size,
            micro_batch_size=settings.micro_batch_size,
            batch_sizes=settings.batch_sizes,
            consumed_samples=self.position.consumed_samples,
        )

    def run(self) -> Left:
        """Train until done or asked to leave; return how it ended. The state is durable then.

        Raises LeaveFailed if the last save did not work, FatalTrainingError on a loss that is no number.
        """
        self.model.train_mode(True)
        steps = self.config.training.steps
        if self.config.training.manual_gc_interval:
            gc.disable()  # else each rank stops at another time, and all wait for each
        while True:
            order = self.saver.look()
            at = self.position.iteration
            if at >= steps:
                return self._leave("done", f"iteration {at} of {steps} reached")
            if self.config.training.manual_gc_interval and at % self.config.training.manual_gc_interval == 0:
                gc.collect()
            if order.leave is not None:
                return self._leave(order.leave, order.reason)
            if order.save and at:  # before the first iteration there is nothing to save: answered after it
                self.saver.asked(self.position)
            if at % self.config.checkpoint.interval == 0:
                self.saver.due(self.position)
            self._step()
            interval = self.config.training.eval_interval
            at = self.position.iteration
            if at == steps or (interval and at % interval == 0):
                self._evaluate()

    def _step(self) -> None:
        self.profiler.before(self.position.iteration + 1)
        size = self.position.batch_size
        tokens = size * self.config.training.seq_length
        self.pulse.enter("step", self.position.iteration)
        started = time.perf_counter()
        lr = self.optimizer.lr
        self.optimizer.zero_grad()
        batches = [MicroBatch(tokens=tokens) for tokens in next(self.reader)]
        read = time.perf_counter()
        losses = self.model.run(batches, train=True)
        computed = time.perf_counter()
        waited = self.saver.before_update()
        grad_norm = self.optimizer.step()
        updated = time.perf_counter()
        loss = self.ranks.sum_over_samples([sum(losses)])[0] / size
        self.position.advance()
        seconds = time.perf_counter() - started - waited
        self.pace.step(seconds, size)
        flops = self.model.flops_per_token() * tokens / seconds / self.ranks.world_size
        self.metrics.step(
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
                memory_bytes=parallel.peak_memory(self.ranks),
                time=time.time(),
            )
        )
        self.saver.stall_seconds = 0.0
        self.profiler.after(self.position.iteration)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            self.saver.settle(self.position.iteration)
            raise FatalTrainingError(
                f"iteration {self.position.iteration}: loss {loss}, gradient norm {grad_norm}; nothing was saved since "
                f"iteration {self.saver.saved_iteration}",
                hint="lower the learning rate, or look at the data of this iteration",
            )

    def _evaluate(self) -> None:
        if self.evaluation.orders:
            self.pulse.enter("evaluation", self.position.iteration)
            self.metrics.evaluation(self.position.iteration, self.evaluation.run(self.model))

    def _leave(self, outcome: Outcome, reason: str) -> Left:
        at = self.position.iteration
        asked = self.control.take()
        result = f"nothing trained since iteration {at}" if at == self.saver.saved_iteration else "saved"
        failure = self.saver.last(self.position)
        if failure is not None:  # triggers stay: an exit asked for must reach the next attempt
            raise LeaveFailed(f"iteration {at} could not be saved ({LEAVE_TRIES} tries): {failure}")
        self.control.acknowledge(asked, at, result)
        return Left(outcome=outcome, reason=reason, iteration=at, time=time.time())


def train(
    run: RunDir, begin: Begin, config: RunConfig, flag: SignalFlag, pace: Pace, pulse: Pulse, *, process_began: float
) -> None:
    """Run the attempt; on return its outcome is written. Raises what `Training` raises, and ConfigError.

    `process_began`: seconds since 1970, for the record.
    """
    imported = time.time()
    device_shim.install()
    if config.training.threads:
        torch.set_num_threads(config.training.threads)
    ranks = parallel.start(config)
    training = Training(run, begin, config, ranks, flag, pace, pulse)
    if ranks.rank == 0:
        times = Started(process=process_began, imported=imported, initialised=training.initialised, loaded=time.time())
        record_start(run.attempt(begin.attempt), times)
        trackers = Trackers(run, begin.attempt, config, training.metrics.say)
    left = training.run()
    training.reader.close()
    training.profiler.close()
    training.metrics.say(f"leaving at iteration {left.iteration}: {left.outcome} ({left.reason})")
    if ranks.rank == 0:
        left.write(run.attempt(begin.attempt).outcome)
    parallel.stop()
    if ranks.rank == 0:
        trackers.stop()


def record_start(attempt: AttemptDir, started: Started) -> None:
    """Leave started.json. On a full disk training goes on without it."""
    try:
        started.write(attempt.started)
    except OSError as error:
        print(f"warning: {attempt.started.name} not written: {error}", file=sys.stderr, flush=True)


def check_data(manifest: Manifest, mixture: list[str]) -> None:
    """Raises FatalTrainingError if a shard is not what it was, InputError if files are only missing.

    A missing file may be a file system that is away for a while: the next attempt may find it again.
    """
    try:
        manifest.verify(mixture)
    except InputError as error:
        if all(line.endswith(": missing") for line in manifest.differences(mixture)):
            raise
        raise FatalTrainingError(error.message, hint=error.hint) from None
