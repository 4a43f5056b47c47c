"""Settings of a dataset's tokenization, from a YAML file or from environment variables."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, ValidationError

from relayrun import places
from relayrun.config import yamlfile
from relayrun.config.section import Line, Positive, Section, SlurmTime
from relayrun.errors import ConfigError
from relayrun.tokenization.options import TokenizeOptions

FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
"""Becomes a part of folder and job names."""


class TokenizationSettings(TokenizeOptions):
    """How every dump of a dataset is tokenized, into `output_folder/tokenizer_name/dataset_name/dump-i`."""

    tokenizer_name: FileName
    dataset_name: FileName
    metadata_folder: str
    """As written by prepare_dumps.py."""
    output_folder: str
    logs: str = "logs"
    """Gets slurm/tokenization-T-D/ and datatrove/T/D/dump-i/."""

    @property
    def name(self) -> str:
        """The name of the jobs."""
        return f"tokenization-{self.tokenizer_name}-{self.dataset_name}"

    @property
    def dataset_output(self) -> Path:
        """Where `M/tokenized-dir-link` points."""
        return Path(self.output_folder, self.tokenizer_name, self.dataset_name)

    @property
    def job_logs(self) -> Path:
        """Output of the jobs."""
        return Path(self.logs, "slurm", self.name)

    @property
    def csv(self) -> Path:
        """One row per finished dump."""
        return Path(self.metadata_folder, f"tokenize-{self.tokenizer_name}-{self.dataset_name}.csv")

    def dump_output(self, index: int) -> Path:
        """Shards of dump `index`."""
        return self.dataset_output / f"dump-{index}"

    def dump_logs(self, index: int) -> Path:
        """The folder of the logs of dump `index`."""
        return Path(self.logs, "datatrove", self.tokenizer_name, self.dataset_name, f"dump-{index}")

    def absolute(self, base: str | os.PathLike[str]) -> Self:
        """With relative paths read from the folder `base`; a tokenizer that is no path stays a name."""
        tokenizer = os.path.join(base, self.tokenizer)
        return self.model_copy(
            update={
                "tokenizer": os.path.abspath(tokenizer) if os.path.exists(tokenizer) else self.tokenizer,
                "metadata_folder": os.path.abspath(os.path.join(base, self.metadata_folder)),
                "output_folder": os.path.abspath(os.path.join(base, self.output_folder)),
                "logs": os.path.abspath(os.path.join(base, self.logs)),
            }
        )


class SlurmOptions(Section):
    """Options of the jobs. Every dump gets one node."""

    time: SlurmTime = "12:00:00"
    partition: Line | None = None
    account: Line | None = None
    qos: Line | None = None
    constraint: Line | None = None
    exclude: Line | None = None
    cpus_per_task: Positive | None = None
    mem: Line | None = None
    exclusive: bool = True
    """The whole node for one dump."""
    setup: list[str] = Field(default_factory=list)
    """Shell lines of the job before Python starts, for example `module load ...`."""
    additional_parameters: dict[Line, Line] = Field(default_factory=dict)
    """Any other sbatch options by name, for example `reservation` or a container's `environment`."""


class TokenizationConfig(TokenizationSettings):
    """What `launchers/submit_tokenization.py` reads."""

    executor: Literal["local", "slurm"] = "slurm"
    max_parallel: Positive = 4
    """Dumps that are tokenized at a time."""
    slurm: SlurmOptions = SlurmOptions()


ENVIRONMENT = {
    "TOKENIZER": "tokenizer",
    "TOKENIZER_NAME": "tokenizer_name",
    "DATASET_NAME": "dataset_name",
    "MODEL_IDENTIFIER": "model_identifier",
    "COLUMN_KEY": "column",
    "TEXT_FIELD": "text_field",
    "EOS_TOKEN": "eos_token",
    "APPEND_EOD": "append_eod",
    "TOKENIZER_ENGINE": "engine",
    "ON_ERROR": "on_error",
    "PATH_TO_PREPROCESSING_METADATA": "metadata_folder",
    "PATH_TO_OUTPUT_FOLDER": "output_folder",
    "PATH_TO_LOGS": "logs",
    "NUMBER_OF_DATATROVE_TASKS": "tasks",
    "NUMBER_OF_DATATROVE_WORKERS": "workers",
    "TOKENIZER_BATCH_BYTES": "batch_bytes",
}
"""Names in the Bash launcher, and the setting that each of them is; Curator's own names too, but for PATH."""

CURATOR = {
    "model_identifier": "tokenizer",
    "path": "output_folder",
    "text_field": "column",
    "tokenization_batch_size": "batch_documents",
}
"""Names of NeMo Curator's MegatronTokenizerWriter, and the setting that each of them is, where the names differ."""

_Settings = TypeVar("_Settings", bound=Section)


def load_config(path: str | os.PathLike[str]) -> TokenizationConfig:
    """Read a YAML config. Relative paths in it start at the project that holds the file. Raises ConfigError."""
    source = yamlfile.read(Path(path))
    return _validate(TokenizationConfig, source).absolute(places.project(Path(path)))


def settings_from_environment(environment: Mapping[str, str]) -> TokenizationSettings:
    """Settings of the Bash launcher. Relative paths start at the working directory.

    Raises ConfigError for a missing or wrong value, and for a variable whose name is almost that of a setting.
    """
    for name in environment:
        if name not in ENVIRONMENT and (near := difflib.get_close_matches(name, ENVIRONMENT, n=1, cutoff=0.8)):
            raise ConfigError(
                f"{name} is no setting; did you mean {near[0]}?",
                where="environment",
                hint=f"rename it, or `unset {name}` if it is for another program",
            )
    given = {name: environment[name] for name in ENVIRONMENT if environment.get(name)}
    for name in ("NUMBER_OF_DATATROVE_TASKS", "NUMBER_OF_DATATROVE_WORKERS", "TOKENIZER_BATCH_BYTES"):
        if name in given and not given[name].removeprefix("-").isdecimal():
            raise ConfigError(f"{given[name]!r} is no number", where=name)
    values: dict[str, Any] = {ENVIRONMENT[name]: value for name, value in given.items()}
    values |= {name: int(values[name]) for name in ("tasks", "workers", "batch_bytes") if name in values}
    given_by: dict[yamlfile.Location, str] = {(setting,): name for name, setting in ENVIRONMENT.items()}
    settings = _validate(TokenizationSettings, yamlfile.LocatedSettings(values, given_by))
    if "logs" not in values:
        settings = settings.model_copy(update={"logs": str(places.project() / "logs")})
    return settings.absolute(os.getcwd())


def _validate(model: type[_Settings], source: yamlfile.LocatedSettings) -> _Settings:
    for other, name in CURATOR.items():
        if other in source.values:
            place = source.place((other,))
            if name in source.values:
                raise ConfigError(
                    f"{other}: this is another name of {name}, which is given too",
                    where=place,
                    hint=f"{name} is given at {source.place((name,))}; keep one of them",
                )
            source.values[name] = source.values.pop(other)
            source.places[(name,)] = place or other
    try:
        return model.model_validate(source.values)
    except ValidationError as error:
        detail = error.errors()[0]
        location = tuple(str(part) for part in detail["loc"])
        message = detail["msg"].removeprefix("Value error, ")
        if detail["type"] == "extra_forbidden":
            section = SlurmOptions if location[0] == "slurm" else model
            near = difflib.get_close_matches(location[-1], section.model_fields, n=1)
            message = "unknown setting; " + (
                f"did you mean {near[0]!r}?" if near else f"known: {', '.join(section.model_fields)}"
            )
        elif detail["type"] == "missing":
            message = "this setting is missing"
        raise ConfigError(f"{'.'.join(location)}: {message}", where=source.place(location)) from None
