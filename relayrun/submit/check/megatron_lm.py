"""A checkout of Megatron-LM: whether its program is there, and whether it takes the flags of the run."""

from __future__ import annotations

import glob
import re
from pathlib import Path

from relayrun.config.compose.schema import DataSection, MegatronConfig, RunConfig, TrainingSection
from relayrun.control.rundir.run import Run
from relayrun.control.trainers.megatron_lm_program import MegatronDialect
from relayrun.errors import URL_WRITE_HINT, RelayrunError, why_url_is_refused
from relayrun.submit.check.findings import Findings, count_noun
from relayrun.submit.megatron_lm.command_line import CommandLine, command_line, rank_python
from relayrun.submit.megatron_lm.flags import Flag
from relayrun.submit.megatron_lm.parsed import ask_parser

_FLAGS_THAT_WRITE = frozenset(
    {"data-cache-path", "tensorboard-dir", "wandb-save-dir", "memory-snapshot-path"}
    | {f"non-persistent-{kind}-ckpt-dir" for kind in ("global", "local")}
)
"""Flags that name a place that Megatron-LM writes to, and makes as a local folder; of URLs it knows msc:// alone."""


def check_megatron_lm(config: MegatronConfig, findings: Findings, *, contained: bool) -> None:
    """Look at the program of the checkout and at its flags. `contained`: the ranks' Python is in a container."""
    _check_program(config, findings)
    with findings.catching("megatron_lm.flags"):
        line = command_line(config, Run(Path(config.run_dir or "")))
        _check_flags(config, line, findings, contained=contained)
        _check_chain_flags(config, line, findings)


def _check_flags(config: MegatronConfig, line: CommandLine, findings: Findings, *, contained: bool) -> None:
    """What holds, and what the checkout says of it."""
    name = "megatron_lm.flags"
    for flag in line.merged.flags:
        for value in flag.values if flag.name in _FLAGS_THAT_WRITE else ():
            if (url := why_url_is_refused(value)) is not None and not value.startswith("msc://"):
                findings.refuse(name, f"{flag.text}: {url}", where=flag.source, remedy=URL_WRITE_HINT)
    for note in line.notes:
        findings.ok("megatron_lm.args", note)
    program = config.megatron_lm.program
    said = ask_parser(
        line.checkout, line.merged.flags, python=rank_python(config), in_container=contained, program=program
    )
    for refusal in said.refusals:
        tell = findings.refuse if said.certain else findings.warn
        tell(name, refusal.words, where=refusal.source, remedy=refusal.hint)
    number, version = count_noun(len(line.merged.flags), "flag"), line.checkout.version
    if not said.certain:
        findings.ok(
            name,
            f"{version}: its own parser could not be asked ({said.unavailable}), so its text was searched for "
            f"{number}; the job asks the parser, and ends the chain where it refuses one",
        )
    elif not said.refusals:
        findings.ok(name, f"{version}: its own parser takes all {number}")


def _check_chain_flags(config: MegatronConfig, line: CommandLine, findings: Findings) -> None:
    """What the chain could not do with these flags."""
    if line.merged.find("profile") is not None and line.checkout.dialect is MegatronDialect.SWISS_AI:
        findings.warn(
            "megatron_lm.profile",
            "with --profile this checkout takes no signal: relayrun asks it by its own files; where Slurm alone asks, "
            "the attempt does not save, and the next one goes on from its last checkpoint",
            setting="debug.profile",
            remedy="profile in a run of its own, with checkpoint.interval below what may be lost",
        )
    interval = line.merged.find("log-interval")
    if interval is not None and interval.values != ("1",):
        findings.warn(
            "megatron_lm.log",
            f"{interval.text}: the chain sees only those iterations, and chain.hang_timeout must be longer than the "
            "time between two of them",
            where=interval.source,
            remedy="leave log-interval out",
        )


def _check_program(config: MegatronConfig, findings: Findings) -> None:
    folder, program = Path(config.megatron_lm.dir), config.megatron_lm.program
    if not (folder / program).is_file():
        programs = ", ".join(sorted(path.name for path in folder.glob("pretrain_*.py")))
        findings.refuse(
            "megatron_lm.program",
            f"{folder} has no {program}",
            setting="megatron_lm.program",
            remedy=f"it has {programs}" if programs else None,
        )


_NUMBERS = {
    "steps": "train-iters",
    "micro_batch_size": "micro-batch-size",
    "global_batch_size": "global-batch-size",
    "seq_length": "seq-length",
}
_END_OF_DOCUMENT_FLAGS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")


def as_native_config(config: MegatronConfig, findings: Findings) -> RunConfig | None:
    """Return what the flags of a run say that it reads, as a config of the native trainer says it; else None.

    It is no whole config: it has the sections `data` and `training`, and of the latter what is known; a sequence of one
    token says that no length is.
    """
    try:
        merged = command_line(config, Run(Path(config.run_dir or ""))).merged
    except RelayrunError:  # said already
        return None
    if merged.find("mock-data") is not None:
        findings.ok("data.shards", "made-up tokens: nothing is read", setting="data.mock_data")
        return None
    shards, model = merged.find("data-path") or merged.find("train-data-path"), merged.find("tokenizer-model")
    kind, files = (
        merged.find("tokenizer-type"),
        merged.find("data-args-path") or merged.find("per-split-data-args-path"),
    )
    other = files or (None if kind is None or kind.values == ("HuggingFaceTokenizer",) else kind)
    sets = {name: merged.find(f"{name}-data-path") for name in ("valid", "test")}
    held_out = {name: _prefixes_of_flag(given) for name, given in sets.items() if given is not None}
    if shards is None or model is None or not model.values or other is not None:
        why = "no flag names both" if other is None else f"{other.text} of {other.source}"
        findings.ok("data.tokenizer", f"shards and their tokenizer are not compared: {why}")
        return None
    data = config.data
    if data is None or not shards.source.startswith("data."):
        if urls := [
            word for words in (_prefixes_of_flag(shards), *held_out.values()) for word in words if "://" in word
        ]:
            findings.ok("data.tokenizer", f"shards and their tokenizer are not compared: {urls[0]} is a URL")
            return None
        own = {} if data is None else {name: getattr(data, name) for name in ("allow_other_tokenizer", "max_epochs")}
        words = [glob.escape(word) for word in _prefixes_of_flag(shards)]  # which Megatron-LM takes for no pattern
        data = DataSection.model_construct(datasets=words, validation=held_out, **own)
    if (split := merged.find("split")) is not None and (parts := re.findall(r"[.\d]+", "".join(split.values))):
        first, *rest = map(float, parts)
        data = data.model_copy(update={"split": sum(rest) / (first + sum(rest)) if first else data.split})
    said = {name: merged.find(name.replace("_", "-")) is not None for name in _END_OF_DOCUMENT_FLAGS}
    data = data.model_copy(update={"tokenizer": model.values[0], **said})
    found = {name: merged.find(flag) for name, flag in _NUMBERS.items()}
    numbers = {name: int(flag.values[0]) for name, flag in found.items() if flag and "".join(flag.values).isdecimal()}
    training = TrainingSection.model_construct(**{"seq_length": 1} | dict(config.training or {}) | numbers)
    return RunConfig.model_construct(trainer=config.trainer, data=data, training=training)


def _prefixes_of_flag(found: Flag) -> list[str]:
    """The words of a flag that are no weights."""
    return [word for word in found.values if re.fullmatch(r"[\d.]+([eE][-+]?\d+)?", word) is None]


def has_known_length(read: RunConfig) -> bool:
    """Return whether the flags say how much is read: the number of sequences, and their length."""
    return read.training.seq_length > 1 and {"steps", "global_batch_size"} <= read.training.model_fields_set
