"""Write the site settings of jobs that Bash scripts submit: `python -m relayrun.tokens.tokenize.site_environment
CLUSTER FILE`.

Such a job sources FILE: environment, modules and setup lines of the site, and the prefixes of its Python in the arrays
`site_srun` (srun's options for a container that is an srun plugin) and `site_command`. FILE.options has the options of
sbatch, each ended by a NUL. A job submitted from YAML gets the same settings (`job_config.TokenizationConfig`).
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from pydantic import ValidationError

from relayrun import places
from relayrun.config.compose import sites
from relayrun.config.compose.yaml_file import LocatedSettings
from relayrun.config.sections.job import ClusterSection
from relayrun.config.sections.job_script import sbatch_script_options
from relayrun.errors import ConfigError, run_main
from relayrun.files import write_atomic
from relayrun.tokens.tokenize.job_config import SITE_JOB_DEFAULTS, TokenizationJob, site_setup_lines


def write_site_files(name: str, file: Path) -> None:
    """Write the two files of cluster `name`. Raises ConfigError."""
    given = LocatedSettings({"cluster": name}, {("cluster",): sites.CLUSTER_VARIABLE})
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


def main(name: str, file: str) -> int:
    """Write the files of cluster `name`."""
    write_site_files(name, Path(os.path.abspath(file)))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(lambda: main(*sys.argv[1:])))
