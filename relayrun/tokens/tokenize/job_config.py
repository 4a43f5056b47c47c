"""Settings of a data set's tokenization, from a YAML file or from environment variables."""

from __future__ import annotations

import difflib
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, ValidationError, model_validator

from relayrun import places
from relayrun.config.compose import sites, yaml_file
from relayrun.config.compose.writable import check_outputs, check_writable
from relayrun.config.sections.base import Section, SlurmTime
from relayrun.config.sections.dataclass_section import Checked, OutputPath, Positive, SingleLine, on_this_machine
from relayrun.config.sections.job import ClusterSection, JobPlacement
from relayrun.config.sections.job_script import check_setup_lines, sbatch_script_options
from relayrun.control.chain import job_script
from relayrun.control.scheduler import slurm_commands
from relayrun.control.scheduler.slurm import whole_job_command
from relayrun.errors import ConfigError
from relayrun.files import write_atomic
from relayrun.masking import SECRET_REMEDY, find_secrets
from relayrun.tokens.stores.urls import absolute_path, is_url
from relayrun.tokens.tokenize.options import TokenizeOptions
from relayrun.tokens.tokenize.steps import check_steps

FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
"""Part of folder and job names."""


def _folder_or_store(value: str) -> str:
    if (scheme := re.match(r"([a-z][a-z0-9+.-]+):(?!/)", value)) is not None:
        from fsspec.registry import known_implementations

        if scheme[1] in known_implementations:
            raise ValueError(f"is a URL without its slashes; write {scheme[1]}://...")
    return on_this_machine(value) if value.startswith("file:") or not is_url(value) else absolute_path(value)


FolderOrStore = Annotated[SingleLine, Checked(_folder_or_store)]


class DedupSettings(Section):
    """Stages over the documents of all dumps, behind the steps of `pipeline`: `relayrun dumps dedup`."""

    output_folder: FolderOrStore
    """Gets the documents that stay as .jsonl.gz, and the work of the stages in `_dedup`. For a URL the work stays in
    metadata_folder, but for the documents that are dropped."""
    exact: bool = True
    """Keep one of the documents with the same text."""
    minhash: dict[str, Any] | None = None
    """Keep one of the documents with nearly the same text, by these parameters of datatrove's MinhashConfig."""
    sentences: dict[str, Any] | None = None
    """Cut sentences or paragraphs that another document has, by these parameters of datatrove's SentDedupConfig."""
    evaluations: str | None = None
    """Folder of evaluation sets; documents that share an n-gram with them are dropped."""
    decontamination: dict[str, Any] = {}
    """Parameters of datatrove's NGramsDecontConfig."""
    language: str = "en"
    """Language of the words of an n-gram, or the import path of a class of datatrove's WordTokenizer."""
    stats: list[Any] = []
    """Statistics of datatrove of the documents that stay, in the folder `_stats`: `DocStats`, or `DocStats: {...}`."""


class TokenizationSettings(TokenizeOptions):
    """Settings for every dump of a data set; the output is `output_folder/tokenizer_name/dataset_name/dump-i`."""

    tokenizer_name: FileName
    dataset_name: FileName
    metadata_folder: OutputPath
    """Folder written by `relayrun dumps prepare`."""
    output_folder: FolderOrStore
    """A folder, or a URL that fsspec can write below (`s3://bucket/tokens`); then records are in metadata_folder."""
    logs: OutputPath = "logs"
    """Folder for slurm/tokenization-T-D/ and datatrove/T/D/dump-i/."""
    dedup: DedupSettings | None = None
    """Deduplication and decontamination before the tokenization; None: none."""

    @property
    def outputs(self) -> dict[str, str]:
        """Folders to which jobs write, by setting."""
        names = ("metadata_folder", "output_folder", "scratch_folder", "logs")
        found = {name: place for name in names if (place := getattr(self, name))}
        found |= {} if self.dedup is None else {"dedup.output_folder": self.dedup.output_folder}
        return {name: place for name, place in found.items() if not is_url(place)}

    @property
    def name(self) -> str:
        return f"tokenization-{self.tokenizer_name}-{self.dataset_name}"

    @property
    def dataset_output(self) -> Path:
        """Target of `M/tokenized-dir-link`: the dumps' records, and their shards unless these lie below a URL."""
        return self.local_folder(self.output_folder) / self.tokenizer_name / self.dataset_name

    def local_folder(self, output: str) -> Path:
        """Return an output folder, or that of the records of a URL."""
        scheme, _, rest = output.rpartition("://")
        return Path(self.metadata_folder, scheme, rest.lstrip("/")) if scheme else Path(rest)

    @property
    def job_output_files(self) -> Path:
        """Folder of the output of the jobs."""
        return Path(self.logs, "slurm", self.name)

    @property
    def csv(self) -> Path:
        """Table with one row per finished dump."""
        return Path(self.metadata_folder, f"tokenize-{self.tokenizer_name}-{self.dataset_name}.csv")

    def dump_output(self, index: int) -> Path:
        return self.dataset_output / f"dump-{index}"

    def dump_store(self, index: int) -> str:
        """Return the URL of the shards of dump `index`; empty if they lie in its folder."""
        url = f"{self.output_folder}/{self.tokenizer_name}/{self.dataset_name}/dump-{index}"
        return url if is_url(url) else ""

    def dump_logs(self, index: int) -> Path:
        return Path(self.logs, "datatrove", self.tokenizer_name, self.dataset_name, f"dump-{index}")

    def absolute(self, base: str | os.PathLike[str]) -> Self:
        """Resolve relative paths from the folder `base`; a tokenizer that is not a path stays a name."""

        def resolved(place: str) -> str:
            return os.path.abspath(os.path.join(base, place))

        changed: dict[str, Any] = {name: resolved(place) for name, place in self.outputs.items()}
        if self.dedup is not None:
            own = {"output_folder": changed.pop("dedup.output_folder", self.dedup.output_folder)}
            own |= {"evaluations": resolved(self.dedup.evaluations)} if self.dedup.evaluations else {}
            changed["dedup"] = self.dedup.model_copy(update=own)
        if os.path.exists(tokenizer := resolved(self.tokenizer)):
            changed["tokenizer"] = tokenizer
        return self.model_copy(update=changed)


class TokenizationJob(JobPlacement):
    """Slurm request of the job of a dump, in Slurm's names. Every dump gets one node."""

    time: SlurmTime = "12:00:00"
    """Time limit of one start; a longer job queues itself again."""
    cpus_per_task: Positive | None = None
    """Processors of the job; default: Slurm's."""
    exclusive: bool = True
    """Allocate the whole node for one dump."""
    setup: list[SingleLine] = []
    """Lines of Bash that run in the job before Python starts, after `cluster.modules`; a failing line ends the job."""
    dependency: SingleLine | None = None
    """Dependency of the jobs, for example afterok:123."""


def site_setup_lines(cluster: ClusterSection | None, setup: Sequence[str]) -> list[str]:
    """Return the lines of a job before its Python starts: the site's environment and modules, then the user's own."""
    lines: list[str] = []
    if cluster is not None:
        lines += job_script.export_lines(cluster.environment)
        lines.append(f'export PYTHONPATH={shlex.quote(str(places.CODE_ROOT))}"${{PYTHONPATH:+:${{PYTHONPATH}}}}"')
    return lines + job_script.setup_lines(setup, modules=cluster.modules if cluster is not None else ())


SITE_JOB_DEFAULTS = ("account", "partition", "qos", "reservation", "constraint", "exclude", "sbatch", "setup")
"""Job defaults of a site that apply to tokenization; the others are meant for GPUs and ranks."""


class TokenizationConfig(TokenizationSettings):
    """Config of `launchers/submit_tokenization.py`."""

    executor: Literal["local", "slurm"] = "slurm"
    """Slurm jobs, or local processes; default: the cluster's scheduler, or slurm."""
    max_parallel: Positive = 4
    """Dumps tokenized at a time."""
    job: TokenizationJob = TokenizationJob()
    cluster: ClusterSection | None = None
    """Name of a file of configs/clusters/, or its content, as for training."""

    @model_validator(mode="after")
    def _container_on_slurm(self) -> Self:
        if self.executor == "local" and self.cluster is not None and self.cluster.container.runtime != "none":
            raise ValueError("executor local runs in no container; use executor slurm, or runtime none")
        return self

    @property
    def command(self) -> list[str]:
        """Command of a job that starts Python: in the site's container, after its command prefix."""
        site = self.cluster
        if site is None:
            return [sys.executable]
        container = site.container.with_mounts([str(places.CODE_ROOT), *self.outputs.values()])
        options = [*site.srun_options, *container.srun_options] if container.srun_options else []
        starter = whole_job_command(options) if options else []
        return [*starter, *container.command, *site.command_prefix, site.python or sys.executable]

    @property
    def preparation(self) -> list[str]:
        """Lines of the job before Python starts: the site's environment and modules, then the user's own."""
        lines = site_setup_lines(self.cluster, self.job.setup)
        return ["set -euo pipefail", *lines] if self.cluster is not None or self.job.setup else lines

    def check(self) -> None:
        """Raise ConfigError for outputs that are not writable, and for options that Slurm or Bash would refuse."""
        if self.cluster is None:
            check_outputs(self.outputs)
        else:
            check_writable(self.outputs, cluster=self.cluster.name, read_only_paths=self.cluster.read_only_paths)
        check_setup_lines(self.job.setup, where="job.setup")
        for name, found in find_secrets(self.model_dump(mode="json")):
            words = f"{found} looks like a secret, and others may read the job's script"
            raise ConfigError(words, where=name, hint=SECRET_REMEDY)
        if self.executor == "slurm":
            slurm_commands.check_sbatch_options(self.job.sbatch, where="job.sbatch")


ENVIRONMENT_SETTINGS = {
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
"""Variables of the Bash launcher and their settings; Curator's own names too, except PATH."""

CURATOR_NAMES = {
    "model_identifier": "tokenizer",
    "path": "output_folder",
    "text_field": "column",
    "tokenization_batch_size": "batch_documents",
}
"""Arguments of NeMo Curator's MegatronTokenizerWriter that have other names here, and their settings."""

_Settings = TypeVar("_Settings", bound=Section)


def load_tokenization_config(path: str | os.PathLike[str]) -> TokenizationConfig:
    """Read a YAML config. Relative paths in it start at the project that holds the file. Raises ConfigError."""
    source = yaml_file.read_yaml(Path(path))
    sites.insert_site(source, folders=sites.site_folders(Path(path)))
    sites.refuse_other_cluster(source, os.environ)
    sites.insert_environment(source, os.environ)
    sites.insert_job_defaults(source, only=SITE_JOB_DEFAULTS)
    if isinstance(cluster := source.values.get("cluster"), dict) and "scheduler" in cluster:
        source.values.setdefault("executor", cluster["scheduler"])
    config = _validate(TokenizationConfig, source)
    check_steps(config.pipeline, source.place, reader=config.reader, stats=config.dedup.stats if config.dedup else ())
    return config.absolute(places.project_folder(Path(path)))


def settings_from_environment(environment: Mapping[str, str]) -> TokenizationSettings:
    """Read the settings of the Bash launcher. Relative paths start at the working directory. Raises ConfigError for a
    missing or wrong value, and for a variable whose name is close to that of a setting."""
    for name in environment:
        if name not in ENVIRONMENT_SETTINGS and (
            near := difflib.get_close_matches(name, ENVIRONMENT_SETTINGS, n=1, cutoff=0.8)
        ):
            hint = f"rename it, or `unset {name}` if it is for another program"
            raise ConfigError(f"{name} is no setting; did you mean {near[0]}?", where="environment", hint=hint)
    given = {name: environment[name] for name in ENVIRONMENT_SETTINGS if environment.get(name)}
    for name in ("NUMBER_OF_DATATROVE_TASKS", "NUMBER_OF_DATATROVE_WORKERS", "TOKENIZER_BATCH_BYTES"):
        if name in given and not given[name].removeprefix("-").isdecimal():
            raise ConfigError(f"{given[name]!r} is no number", where=name)
    values: dict[str, Any] = {ENVIRONMENT_SETTINGS[name]: value for name, value in given.items()}
    values |= {name: int(values[name]) for name in ("tasks", "workers", "batch_bytes") if name in values}
    given_by: dict[yaml_file.Location, str] = {(setting,): name for name, setting in ENVIRONMENT_SETTINGS.items()}
    settings = _validate(TokenizationSettings, yaml_file.LocatedSettings(values, given_by))
    if "logs" not in values:
        settings = settings.model_copy(update={"logs": str(places.project_folder() / "logs")})
    return settings.absolute(os.getcwd())


def _validate(model: type[_Settings], source: yaml_file.LocatedSettings) -> _Settings:
    for other, name in CURATOR_NAMES.items():
        if other in source.values:
            place = source.place((other,))
            if name in source.values:
                words = f"{other}: this is another name of {name}, which is given too"
                hint = f"{name} is given at {source.place((name,))}; keep one of them"
                raise ConfigError(words, where=place, hint=hint)
            source.values[name] = source.values.pop(other)
            source.places[(name,)] = place or other
    try:
        return model.model_validate(source.values)
    except ValidationError as error:
        detail = error.errors()[0]
        location = tuple(str(part) for part in detail["loc"])
        message = detail["msg"].removeprefix("Value error, ")
        if detail["type"] == "extra_forbidden":
            sections: Any = {"job": TokenizationJob, "cluster": ClusterSection, "dedup": DedupSettings}
            section = sections.get(location[0], model)
            near = difflib.get_close_matches(location[-1], section.model_fields, n=1)
            message = "unknown setting; " + (
                f"did you mean {near[0]!r}?" if near else f"known: {', '.join(section.model_fields)}"
            )
        elif detail["type"] == "missing":
            message = "this setting is missing"
        raise ConfigError(f"{'.'.join(location)}: {message}", where=source.place(location)) from None


def write_site_shell_file(name: str, file: Path) -> None:
    """Write the site settings of jobs that Bash scripts submit to cluster `name`. Raises ConfigError.

    Such a job sources `file`: environment, modules and setup lines of the site, and the prefixes of its Python in the
    arrays `site_srun` (srun's options for a container that is an srun plugin) and `site_command`. `file`.options holds
    the options of sbatch, each ended by a NUL. A job submitted from YAML gets the same settings.
    """
    given = yaml_file.LocatedSettings({"cluster": name}, {("cluster",): sites.CLUSTER_VARIABLE})
    sites.insert_site(given, folders=sites.site_folders())
    sites.insert_environment(given, os.environ)
    sites.insert_job_defaults(given, only=SITE_JOB_DEFAULTS)
    try:
        cluster = ClusterSection.model_validate(given.values["cluster"])
        job = TokenizationJob.model_validate(given.values.get("job", {}))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(first["msg"].removeprefix("Value error, "), where=f"cluster {name}: {place}") from None
    container = cluster.container.with_mounts([str(places.CODE_ROOT)])
    srun = [*cluster.srun_options, *container.srun_options] if container.srun_options else []
    lines = [
        *site_setup_lines(cluster, job.setup),
        f"site_srun=({shlex.join(srun)})",
        f"site_command=({shlex.join([*container.command, *cluster.command_prefix])})",
    ]
    if cluster.python is not None:
        lines.append(f"export PYTHON={shlex.quote(cluster.python)}")
    write_atomic(file, "\n".join(lines) + "\n")
    options: dict[str, str | None] = {**job.placement, **sbatch_script_options(job.sbatch)}
    words = [f"--{option}" if value is None else f"--{option}={value}" for option, value in options.items()]
    write_atomic(file.with_name(f"{file.name}.options"), "".join(f"{word}\0" for word in words))
