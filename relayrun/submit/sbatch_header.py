"""The `#SBATCH` lines of a script of somebody else as the section job. Standard library only."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relayrun.config.sections.batch_systems import SETTINGS_INSTEAD
from relayrun.control.scheduler.slurm_commands import KNOWN_SBATCH_OPTIONS
from relayrun.errors import ConfigError

_OPTION_LETTERS = """
    A account C constraint D chdir G gpus H hold J job-name L licenses M clusters N nodes O overcommit S core-spec
    a array b begin c cpus-per-task d dependency e error i input k no-kill m distribution n ntasks o output p partition
    q qos s oversubscribe t time w nodelist x exclude
"""
SHORT_OPTIONS = dict(zip(_OPTION_LETTERS.split()[::2], _OPTION_LETTERS.split()[1::2], strict=True))
"""Options of sbatch by their letters."""
_OTHER_NAMES = {"tasks-per-node": "ntasks-per-node"}

_JOB_NUMBERS = {"nodes": "nodes", "ntasks-per-node": "ntasks_per_node", "cpus-per-task": "cpus_per_task"}
JOB_WORDS = ("time", "account", "partition", "qos", "reservation", "constraint", "exclude", "mem")
_GPUS = re.compile(r"(?:gres|gpus|gpus-per-node) (?:gpu:)?(?:([\w.-]+):)?(\d+)")
CHAIN_OPTIONS = frozenset({"job-name", "output", "error", "open-mode", "signal", "requeue", "no-requeue"})


@dataclass
class Adopted:
    """A run config with the origin of each value."""

    settings: dict[str, Any]
    rows: list[tuple[str, str, str, str]] = field(default_factory=list)
    """Line, what the launcher says, what the run has, and why."""
    errors: list[ConfigError] = field(default_factory=list)
    """Parts of the launcher that no setting takes."""

    def row(self, where: str, yours: str, used: str, why: str = "") -> None:
        self.rows.append((where.rpartition(":")[2] if ":" in where else "", yours, used, why))

    def refuse(self, where: str, words: str, hint: str) -> None:
        self.errors.append(ConfigError(words, where=where, hint=hint))


def section(found: Adopted, name: str) -> dict[str, Any]:
    """Return a section of the settings, to be filled."""
    values: dict[str, Any] = found.settings.setdefault(name, {})
    return values


def take_header(path: Path, header: Mapping[str, tuple[str | None, int]], found: Adopted) -> None:
    """Take the `#SBATCH` lines of a script as the section job."""
    job = section(found, "job")
    if "time" not in header:
        found.refuse(str(path), "no #SBATCH line says the time limit", "add #SBATCH --time=HH:MM:SS")
    for name, (value, line) in header.items():
        said, where = f"#SBATCH --{name}" + ("" if value is None else f"={value}"), f"{path}:{line}"
        gpus = _GPUS.fullmatch(f"{name} {value}")
        first = header.get("nodes", ("", 0))[0] or ""
        nodes = int(first) if first.isdigit() else int(name != "ntasks" or value == "1")  # Slurm spreads tasks itself
        own = name in CHAIN_OPTIONS or (name, value) == ("dependency", "singleton")
        if own:
            found.row(where, said, "the chain's own", SETTINGS_INSTEAD[name])
        elif name in _JOB_NUMBERS and (value or "").isdigit():
            job[_JOB_NUMBERS[name]] = int(value or 0)
        elif name == "ntasks" and nodes and (value or "").isdigit() and int(value or 0) % nodes == 0:
            job.setdefault("ntasks_per_node", int(value or 0) // nodes)
        elif gpus is not None and (name != "gpus" or int(gpus[2]) % nodes == 0):
            job["gpus_per_node"] = int(gpus[2]) // (nodes if name == "gpus" else 1)
            if gpus[1]:
                job.setdefault("sbatch", {})["gres"] = f"gpu:{gpus[1]}:{job['gpus_per_node']}"
        elif name == "mem" and (unit := re.fullmatch(r"(\d+)([KMGT]?)B?", value or "", re.I)) is not None:
            job["mem"] = unit[1] + unit[2].upper()
        elif name in JOB_WORDS and value is not None:
            job[name] = value
        elif name == "exclusive" and value in (None, "user"):  # whole nodes, which is more
            job["exclusive"] = True
        elif name == "environment":
            section(found, "cluster_settings")["container"] = {"runtime": "edf", "image": value}
        elif name in SETTINGS_INSTEAD or len(name) < 2:
            found.refuse(where, f"{said} is not taken", SETTINGS_INSTEAD.get(name, "leave it out"))
            continue
        else:
            job.setdefault("sbatch", {})[name] = True if value is None else value
        if not own:
            found.row(where, said, "job" if name != "environment" else "cluster.container")


def refuse_other_options(
    where: str, words: list[str], header: Mapping[str, tuple[str | None, int]], found: Adopted
) -> None:
    """Refuse options with which a script calls sbatch for itself, where its own lines say otherwise."""
    for name, (value, _) in option_words(words, 0):
        own = name in CHAIN_OPTIONS or name in ("dependency", "parsable", "wait")
        if not own and (name not in header or header[name][0] != value):
            hint = f"write #SBATCH --{name}, or give --env SLURM_JOB_ID=1, which a job has"
            found.refuse(where, f"sbatch --{name} holds over the lines #SBATCH", hint)


def sbatch_options(text: str) -> dict[str, tuple[str | None, int]]:
    """The options of sbatch in the lines #SBATCH before the first command, by their long names, with their lines."""
    found: dict[str, tuple[str | None, int]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.startswith("#"):
            break
        if re.match(r"#SBATCH\s", line):
            rest = line[len("#SBATCH") :]
            try:
                words = shlex.split(rest, comments=True)
            except ValueError:  # a quote that is not closed
                words = rest.split()
            found |= dict(option_words(words, number))
    return found


def option_words(words: list[str], line: int) -> Iterator[tuple[str, tuple[str | None, int]]]:
    """Yield options of sbatch by their long names, with their values and the line."""
    while words:
        word, *words = words
        if not word.startswith("-"):  # a script
            continue
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
        else:
            name, value = SHORT_OPTIONS.get(word[1:2], word), word[2:]
            equals = value
        longer = [each for each in KNOWN_SBATCH_OPTIONS if each.startswith(name)]  # sbatch takes a beginning, too
        name = _OTHER_NAMES.get(name, longer[0] if len(longer) == 1 else name)
        if not equals and words and not words[0].startswith("-"):
            value, *words = words
        if name == "nodes":
            value = re.sub(r"(\d+)-\1", r"\1", value)
        yield name, (value or None, line)
