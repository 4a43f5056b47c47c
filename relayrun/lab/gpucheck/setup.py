"""Input of the parts of a check (folder, device, sizes), their figures on disk, and programs on ranks."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from relayrun import places
from relayrun.config.compose import yaml_file
from relayrun.control.chain.job_script import rank_defaults
from relayrun.errors import RelayrunError
from relayrun.files import last_lines, read_json, readable_text, write_json

DIGESTS_FILE = "gpu-check-digests.jsonl"
"""Records of `programs.hooks.DigestHook` in a run directory."""
TRACE_FILE = "trace.json.gz"
"""Name of the trace in the folder of the check."""


def last_log_line(path: Path) -> str:
    """Return the last line of a log that is not empty."""
    return next((line.strip() for line in reversed(readable_text(path).splitlines()) if line.strip()), "nothing")


def log_tail(path: Path, lines: int = 40) -> str:
    """Return the last lines of a log, for a person who cannot open it."""
    if not path.exists():
        return f"{path}: {os.strerror(errno.ENOENT)}"
    text, _ = last_lines(path, lines)
    return "\n".join([f"== {path}", *text.decode(errors="replace").splitlines()])


def log_error(log_file: Path, code: int) -> str:
    """Return the error of a program from its log: the text after its last `error:`, or else its last line."""
    text = readable_text(log_file)
    at = text.rfind("error: ")
    if at >= 0 and (at == 0 or text[at - 1] == "\n"):
        return " ".join(text[at + len("error: ") :].split())[:1500]
    return f"{last_log_line(log_file)} (exit code {code}, {log_file})"


class CheckFailed(RelayrunError):
    """A part of the check could not be measured; `found` holds the figures measured before."""

    def __init__(self, message: str, *, where: object = None, found: Any = None) -> None:
        super().__init__(message, where=where)
        self.found = found


@dataclass(frozen=True, kw_only=True)
class CheckSizes:
    """Sizes of models, data and repetitions: full for a GPU, tiny for CPUs."""

    model: Mapping[str, Any]
    """Section `model` of the timed run."""
    vocabulary: int
    seq_length: int
    micro_batches: int
    """Micro-batches per iteration and rank in the timed run."""
    warm_up: int
    measured: int
    """Iterations that are skipped (`warm_up`) and timed, in this order; then one is traced."""
    resumed_model: Mapping[str, Any]
    """Section `model` of the interrupted runs, and of the exported one."""
    resumed_vocabulary: int
    resumed_seq_length: int
    resumed_batch: int
    steps: int
    """Iterations of an interrupted run."""
    interval: int
    """Iterations between saves there, and in the run whose saves are timed."""
    stall_allowance: float
    """Seconds that a save of any size may stall training: above 0 only for a state whose copy takes no time."""
    copied_at_most: int
    """Bytes of the plain copy to host memory."""
    attention: Mapping[str, int]
    """Shape of an attention layer: batch, sequence, heads, groups, channels, documents."""
    repeats: int
    """Timed repetitions of an operation."""
    product: int
    """Rows of the square matrices of the timed product."""


@dataclass(frozen=True, kw_only=True)
class CheckSetup:
    """Arguments and device of a check, which its parts read from a file."""

    folder: str
    """Folder of the check; `parts/` below it holds figures and log of each part."""
    tiny: bool
    gpus: int = 0
    """Number of GPUs that torch sees."""
    device: str = "CPU"
    """Name of the first GPU."""
    memory_bytes: int = 0
    """Memory of the first GPU."""
    cluster: dict[str, Any] = field(default_factory=dict)
    """Section `cluster` of the training runs: the part of the site's file that applies inside a job."""
    overrides: list[str] = field(default_factory=list)
    """Settings of the training runs, as for `relayrun submit --set`."""
    hooks: list[str] = field(default_factory=list)
    """Hooks of the training runs, before the check's own."""

    @property
    def sizes(self) -> CheckSizes:
        """Sizes for a GPU, or tiny ones (`sizes.yaml`)."""
        values = yaml_file.read_yaml(Path(__file__).with_name("sizes.yaml")).values["tiny" if self.tiny else "full"]
        model = {} if self.tiny else yaml_file.read_yaml(places.shared_file("configs/models/llama3-1b.yaml")).values
        return CheckSizes(**model | values)

    @property
    def path(self) -> Path:
        return Path(self.folder)

    @property
    def parts(self) -> Path:
        """Figures and logs of the parts."""
        return self.path / "parts"

    @property
    def ranks(self) -> int:
        """Ranks of a training run: one per GPU."""
        return max(1, self.gpus)

    @property
    def precision(self) -> str:
        """`training.precision` of the training runs."""
        return "bf16" if self.gpus else "fp32"

    @property
    def python(self) -> str:
        """Python of the ranks."""
        return str(self.cluster.get("python") or sys.executable)

    @property
    def cpus_per_rank(self) -> int:
        """Processors of a rank: a share of this machine's, with a GPU."""
        return max(1, (os.cpu_count() or 1) // self.ranks) if self.gpus else 1

    def environment(self) -> dict[str, str]:
        """Return the environment of programs on the ranks, the same as a training run's."""
        path = os.pathsep.join(filter(None, [str(places.CODE_ROOT), os.environ.get("PYTHONPATH")]))
        site = {name: str(value) for name, value in self.cluster.get("environment", {}).items()}
        own = rank_defaults(str(self.cpus_per_rank), trainer="native", site=site)
        return os.environ | own | {"PYTHONPATH": path} | site

    def write(self, path: Path) -> None:
        write_json(path, asdict(self), durable=False)

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls(**read_json(path))


class PartFigures:
    """Figures of a part, written to disk after every addition: a killed part keeps its figures."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, Any] = {}

    def add(self, name: str, value: Any) -> None:
        """Record a figure, or an object of figures."""
        self.update({name: value})

    def update(self, found: Mapping[str, Any]) -> None:
        """Record several figures by their names."""
        self._found |= found
        write_json(self._path, self._found, durable=False)


def run_program(
    setup: CheckSetup,
    program: str,
    *,
    ranks: int = 1,
    record: Callable[[dict[str, Any]], object] = lambda found: None,
    **arguments: object,
) -> Any:
    """Run MODULE:FUNCTION of `programs`; return its `--output`. Raises CheckFailed with the figures written before.

    `record` gets the figures written so far, every second: a part that is ended keeps them."""
    module, _, short = program.partition(":")
    setup.parts.mkdir(parents=True, exist_ok=True)
    output, log, given = (setup.parts / f"program-{short}.{end}" for end in ("json", "log", "setup.json"))
    output.unlink(missing_ok=True)
    setup.write(given)
    options = [f"--{key.replace('_', '-')}={value}" for key, value in arguments.items()]
    starter = [sys.executable, "-m", "relayrun.control.scheduler.local_srun", f"--ntasks={ranks}", "--"]
    rank = ["bash", str(places.shared_file("launchers/lib/rank.sh")), *setup.cluster.get("command_prefix", [])]
    measure = ["-m", f"relayrun.lab.gpucheck.programs.{module}", short, f"--setup={given}", f"--output={output}"]
    command = [*starter, *rank, setup.python, *measure, *options]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=places.CODE_ROOT, env=setup.environment(), stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )
        code: int | None = None
        while code is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(1.0)
            found = read_json(output) if output.exists() else {}
            record(found)
    if code or not output.exists():
        print(log_tail(log), flush=True)
        raise CheckFailed(f"the program {short} failed: {log_error(log, code)}", found=found)
    return found
