"""What sorted files do to training that reads them as a stream, against the same text shuffled globally.

    python benchmarks/sorted_files.py [--steps 300] [--picture docs/pictures/sorted-and-shuffled.svg]

OpenGenome2 in small: files in which sequences lie from long to short, and in which long sequences differ from short
ones in more than their length. A small model (two layers, in plain torch, one thread) trains on the rows of the same
stream with the same buffer, once over these files, once over what `relayrun dumps shuffle` makes of them. For each
step: its loss, the CPU time to get its rows, and that of the whole step. At the end the loss on held-out sequences.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _results
import numpy as np
import torch
from torch import nn
from torch.nn import functional

from relayrun.config.sections.data import DataSource, DocumentWindowSection, SourceKind, StreamSection
from relayrun.tokens.order.document_lengths import measure_length_order
from relayrun.tokens.order.sample_rows import SampleRow
from relayrun.tokens.readers.texts import PackedTexts
from relayrun.tokens.shuffle.reshard import ReshardOptions, reshard
from relayrun.tokens.streams.files import freeze_text_files
from relayrun.tokens.streams.samples import SampleShape
from relayrun.tokens.streams.text_stream import TextStream
from relayrun.tokens.tokenize.encode.libraries import Encoded

ROW, BATCH, FILES, SEQUENCES, BUFFER = 256, 4, 8, 6000, 256
MEDIAN, SPREAD = 55.0, 1.1
"""What lengths are drawn from: a fortieth of OpenGenome2's median, and a mean of 1.8 times the median as there."""
HELD_OUT_ROWS = 64
BASES = np.frombuffer(b"ACGT", np.uint8)
WIDTH, HEADS, LAYERS = 64, 4, 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), options.steps)
    path = _results.write("sorted_files", figures)
    print(
        json.dumps(
            {
                name: {key: value for key, value in found.items() if key != "steps"}
                for name, found in figures["runs"].items()
            },
            indent=2,
        )
    )
    print(f"written to {path}")
    if options.picture is not None:
        draw(figures, options.picture)
    return 0


def measure(folder: Path, steps: int) -> dict[str, Any]:
    generator = np.random.default_rng(1)
    texts = sequences(generator, SEQUENCES)
    lengths = write_sorted(folder / "sorted", texts)
    write_sorted(folder / "held-out", sequences(generator, SEQUENCES // 10))
    reshard(
        ReshardOptions(
            dataset_folder=str(folder / "sorted"),
            output=folder / "shuffled",
            file_size=50_000,
            row_group_size=64,
            seed=1,
        )
    )
    held_out = [row for row, _ in zip(rows(folder / "held-out", "jsonl"), range(HELD_OUT_ROWS), strict=False)]
    runs = {
        name: train(rows(folder / name, source), held_out, steps)
        for name, source in (("sorted", "jsonl"), ("shuffled", "parquet"))
    }
    order = measure_length_order(lengths, batch=64)
    return {
        "sequences": SEQUENCES,
        "bases": sum(map(len, texts)),
        "files": FILES,
        "row": ROW,
        "rows_per_step": BATCH,
        "shuffle_buffer": BUFFER,
        "lag_1_correlation": order.lag_1_correlation,
        "batch_mean_variance_ratio": order.batch_mean_variance_ratio,
        "runs": runs,
        "loss_noise_ratio": runs["sorted"]["loss_noise"] / runs["shuffled"]["loss_noise"],
        "longest_step_ratio": runs["sorted"]["longest_step"] / runs["shuffled"]["longest_step"],
        "load_average": os.getloadavg()[0],
    }


def sequences(generator: np.random.Generator, count: int) -> list[bytes]:
    """Sequences of random lengths; a third by length has repeats of its own, in which one base in ten is random."""
    lengths = (generator.lognormal(np.log(MEDIAN), SPREAD, count)).astype(int) + 16
    motifs = np.random.default_rng(0).choice(BASES, (3, 12))
    kinds = np.searchsorted(np.quantile(lengths, (1 / 3, 2 / 3)), lengths)
    made = []
    for length, kind in zip(lengths.tolist(), kinds.tolist(), strict=True):
        begin = int(generator.integers(12))
        repeats = np.resize(motifs[kind], length + 12)[begin : begin + length]
        made.append(np.where(generator.random(length) < 0.1, generator.choice(BASES, length), repeats).tobytes())
    return made


def write_sorted(folder: Path, texts: list[bytes]) -> list[tuple[str, Any]]:
    """Deal sequences to files, and write each file from long to short; return the lengths of each."""
    folder.mkdir()
    found = []
    for number in range(FILES):
        part = sorted(texts[number::FILES], key=len, reverse=True)
        lines = "".join(json.dumps({"text": text.decode()}) + "\n" for text in part)
        (folder / f"{number}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
        found.append((str(number), np.array([*map(len, part)])))
    return found


def rows(folder: Path, source: SourceKind) -> Iterator[SampleRow]:
    """The rows of a stream over a folder, one lane; nothing is read ahead, so that its time is that of the step."""
    settings = StreamSection(shuffle_buffer=BUFFER, nb_prefetch=0)
    files = freeze_text_files("genomes", DataSource(path=str(folder), weight=1.0, source=source, stream=settings), 1)
    cut = DocumentWindowSection(window=ROW, overlap=12, bos=2, eos=0, packing="split")
    shape = SampleShape.from_settings(cut, seq_length=ROW, eod=None, vocabulary_size=256, where="genomes")
    stream = TextStream(files.files, settings, shape, encode, name="genomes", seed=1, lanes=1)
    lane = stream.open_lanes({0: stream.first_cursors()[0]})
    while True:
        yield lane.take(0)


def encode(texts: PackedTexts) -> Encoded:
    """A byte is a token."""
    return texts.used.astype(np.uint32), texts.sizes


class Model(nn.Module):
    """A small language model of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding(ROW, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 2 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.output = nn.Linear(WIDTH, 256, bias=False)

    def loss(self, batch: list[SampleRow]) -> torch.Tensor:
        """The mean over the tokens that count; a token sees its own window alone."""
        tokens = torch.from_numpy(np.stack([row.tokens for row in batch]))
        counted = torch.from_numpy(np.stack([row.loss_mask for row in batch if row.loss_mask is not None]))
        counted = counted * torch.isin(tokens[:, 1:], torch.from_numpy(BASES.astype(np.int64)))
        numbers = torch.stack(
            [torch.repeat_interleave(torch.arange(len(row.lengths or ())), torch.tensor(row.lengths)) for row in batch]
        )
        apart = numbers[:, :, None] != numbers[:, None, :]
        hidden = apart | torch.ones(ROW, ROW, dtype=torch.bool).triu(1)
        starts = torch.where(
            torch.diff(numbers, dim=1, prepend=-torch.ones(len(batch), 1, dtype=torch.int64)) > 0, 1, 0
        )
        begins = torch.cummax(starts * torch.arange(ROW), dim=1).values
        states = self.embedding(tokens[:, :-1]) + self.positions(torch.arange(ROW) - begins)
        states = self.layers(states, mask=hidden.repeat_interleave(HEADS, 0))
        losses = functional.cross_entropy(self.output(states).flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        return (losses * counted.flatten()).sum() / counted.sum()


def train(stream: Iterator[SampleRow], held_out: list[SampleRow], steps: int) -> dict[str, Any]:
    torch.manual_seed(1)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    kept: dict[str, list[float]] = {"loss": [], "data_cpu_seconds": [], "step_cpu_seconds": [], "windows_per_row": []}
    for _ in range(steps):
        begun = time.process_time()
        batch = [next(stream) for _ in range(BATCH)]
        read = time.process_time()
        loss = model.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        kept["loss"].append(float(loss.detach()))
        kept["data_cpu_seconds"].append(read - begun)
        kept["step_cpu_seconds"].append(time.process_time() - begun)
        kept["windows_per_row"].append(sum(row.windows for row in batch) / BATCH)
    with torch.no_grad():
        last = [float(model.loss(held_out[at : at + BATCH])) for at in range(0, len(held_out), BATCH)]
    losses, seconds = np.array(kept["loss"]), np.array(kept["step_cpu_seconds"])
    second_half = losses[steps // 2 :]
    return {
        "held_out_loss": float(np.mean(last)),
        "loss_noise": float(np.abs(np.diff(second_half)).mean()),
        "largest_rise": float(np.diff(second_half).max()),
        "longest_step": float(seconds[5:].max() / np.median(seconds[5:])),
        "longest_read": float(max(kept["data_cpu_seconds"])),
        "steps": {name: [round(value, 6) for value in values] for name, values in kept.items()},
    }


def draw(figures: dict[str, Any], picture: Path) -> None:
    """Loss and CPU time of every step, of both runs."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = {
        "loss": "loss",
        "step_cpu_seconds": "CPU seconds of a step",
        "windows_per_row": "windows in a row",
    }
    with rc_context({"svg.hashsalt": "relayrun", "svg.fonttype": "none"}):
        figure = Figure(figsize=(9, 7), layout="constrained")
        FigureCanvasAgg(figure)
        for axes, (name, label) in zip(figure.subplots(len(panels), 1, sharex=True), panels.items(), strict=True):
            for run, color in (("sorted", "tab:red"), ("shuffled", "tab:blue")):
                values = figures["runs"][run]["steps"][name]
                axes.plot(range(1, len(values) + 1), values, color=color, linewidth=0.9, label=f"{run} files")
            axes.set_ylabel(label)
            axes.grid(visible=True, linewidth=0.3)
        figure.axes[0].legend()
        figure.axes[-1].set_xlabel("step")
        figure.savefig(picture, metadata={"Date": None} if picture.suffix == ".svg" else None)


if __name__ == "__main__":
    raise SystemExit(main())
