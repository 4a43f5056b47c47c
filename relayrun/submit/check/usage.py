"""How much of each data set a run reads: windows, epochs, and the step at which a data set is used up."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

from relayrun.config.compose.schema import MOCK_ORDER, RunConfig
from relayrun.control.rundir.run import Run
from relayrun.errors import ConfigError, FatalTrainingError
from relayrun.files import read_json
from relayrun.tokens.mixture.build_datasets import document_order
from relayrun.tokens.order.progress import TrainingProgress
from relayrun.tokens.order.samples import held_out_window_count
from relayrun.tokens.order.schedule import Schedule, integer_weights
from relayrun.tokens.shards.manifest import Manifest

WINDOW_ORDERS = ("window", "megatron")
"""Those that cut a stream of tokens into windows; what a user's own makes of few tokens only it knows."""

MAX_PACKED_DOCUMENTS = 1_000_000
"""Documents of a data set of `order: document-window` whose rows a check counts, which takes some seconds."""


@dataclass(frozen=True, kw_only=True)
class DatasetUsage:
    """One data set of the mixture, and what the whole run reads of it."""

    name: str
    shards: int
    documents: int
    tokens: int
    """Tokens of its shards."""
    windows: int | None
    """Samples of one epoch; None where only a user's own order knows, of a stream, or counting takes too long."""
    share: float
    """Its part of the samples."""
    samples: int
    """How many the run reads of it until its last step."""
    used_up_at: int | None
    """The step that reads the last window of its first epoch; None where the run does not come so far."""

    @property
    def epochs(self) -> float | None:
        return self.samples / self.windows if self.windows else None


def data_usage(config: RunConfig, manifest: Manifest, run: Run) -> list[DatasetUsage]:
    """What a run reads, its past included where it has one. `manifest` names data sets as the config does."""
    data, training = config.data, config.training
    weights = integer_weights({source.identity(name): source.weight for name, source in data.sources.items()})
    schedule, position = _past_schedule(run, config, weights, data.lanes if data.streams else None)
    samples = position.legs[-1].consumed(max(training.steps, position.iteration))
    counts = schedule.counts(samples)
    total = sum(weights.values())
    found = []
    for name, source in data.sources.items():
        identity = source.identity(name)
        shards = manifest.datasets[name]
        windows = None
        order = source.order or data.order
        if source.is_stream:
            windows = None  # known when it is tokenized
        elif name in data.cut_by_document and shards.documents <= MAX_PACKED_DOCUMENTS:
            with contextlib.suppress(ConfigError):  # said by the look at the shards
                windows = len(document_order(config, manifest, name, shards))
        elif order in WINDOW_ORDERS:
            every = max(0, shards.tokens - 1) // training.seq_length
            windows = every - held_out_window_count(every, data.split)
        last = schedule.sample_of(identity, windows - 1) if windows and counts[identity] >= windows else None
        found.append(
            DatasetUsage(
                name=name,
                shards=len(shards.shards),
                documents=shards.documents,
                tokens=shards.tokens,
                windows=None if order == MOCK_ORDER else windows,
                share=weights[identity] / total,
                samples=counts[identity],
                used_up_at=None if last is None else position.reaches(last + 1),
            )
        )
    return found


def _past_schedule(
    run: Run, config: RunConfig, weights: Mapping[str, int], lanes: int | None
) -> tuple[Schedule, TrainingProgress]:
    """The schedule that a run has had, with the config's mixture from where it stands, and how far it is.

    A run that has not trained begins at sample 0; so does, for this forecast, one whose record cannot be read.
    """
    sizes = config.training.batch_sizes
    for number in reversed(run.attempt_numbers()):
        try:
            state = read_json(run.attempt(number).data)
            position = TrainingProgress.resume(state["progress"], sizes)
            schedule = Schedule.from_json(state["phases"])
            return schedule.with_phase(position.consumed_samples, weights, lanes), position
        except (OSError, ValueError, KeyError, TypeError, FatalTrainingError):
            continue
    return Schedule.of(weights, lanes), TrainingProgress(sizes)
