"""A new project: a folder with launchers, configs and a site file that works with an installed relayrun.

my-project/
  .relayrun       makes the folder a project (`relayrun.places`), and names a Python for the launchers
  configs/        a run, its model, tokenization, and the cluster
  launchers/      the run for sbatch
  logs/           runs and the logs of jobs
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from relayrun import places
from relayrun.config.compose import resolve, yaml_file
from relayrun.config.compose.schema import RunConfig
from relayrun.config.sections.base import NAME_PATTERN
from relayrun.errors import ConfigError, InputError, on_interrupt
from relayrun.files import write_atomic
from relayrun.leftovers import remove_leftovers
from relayrun.submit import submission
from relayrun.submit.launcher_overrides import SETTING_VARIABLES, variable_text

RUN_CONFIG = "configs/runs/my-run.yaml"
"""The run of a new project."""
LAUNCHER_TEMPLATE = "launchers/submit-llama3-1b.sh"
LAUNCHER_PATH = "launchers/submit-my-run.sh"

_SETTING = re.compile(r'^(export (\w+)="\$\{\2:-.*\}" +# )[^\s;]+', re.M)

_MARKER = """\
# A project of relayrun: relative paths in its configs start here, and its runs lie below logs/runs/.
# The Python of launchers/*.sh, where PYTHON is not set and there is no .venv/ here:
python={python}
"""

_IGNORED = """\
.venv/
__pycache__/
data/
logs/**
!logs/**/
!logs/**/.gitkeep
"""

_README = """\
# {name}

A project of relayrun. Relative paths in configs start in this folder, from wherever a command is called.

```
relayrun check {run} --set data.mock_data=true         # what would be refused, and the plan
relayrun submit {run} --set data.mock_data=true --dry-run   # print the job; nothing is submitted
relayrun submit {run} --set data.mock_data=true        # train on made-up tokens
relayrun status                                        # all runs of this project
```

- `{run}` says what is trained, on what, and for how long. `relayrun explain` says what each setting means.
- `configs/models/` has shapes of models, `configs/clusters/{cluster}.yaml` what this site needs.
- `configs/data/tokenization-example.yaml` turns text into tokens: `relayrun dumps prepare`, then `dumps submit`.
- `sbatch {launcher}` submits the same run from a script: `MBS=2 sbatch {launcher}` changes a setting.
- `logs/runs/` has a folder a run, `logs/slurm/training/` what the jobs print.
"""


def site_names() -> list[str]:
    """Return the names of the site files that relayrun brings."""
    return sorted(path.stem for path in places.shared_file("configs/clusters").glob("*.yaml"))


@on_interrupt(lambda: "what is made stays; the same command goes on")
def make_project(folder: Path, *, cluster: str) -> dict[str, bool]:
    """Write a project into `folder`, which need not be empty; return each file, and whether it was written. A file that
    is there stays as it is. Raises ConfigError for a cluster that is not known, and InputError if `folder` is no
    folder."""
    if cluster not in site_names():
        raise ConfigError(f"unknown cluster {cluster!r}; there are: {', '.join(site_names())}", where="--cluster")
    if folder.exists() and not folder.is_dir():
        raise InputError("this is no folder", where=folder)
    name = folder.absolute().name
    made = _write(folder, _files(name if re.fullmatch(NAME_PATTERN, name) else "my-project", cluster))
    config = resolve.require_native(resolve.load_run_config(folder / RUN_CONFIG))
    return made | _write(folder, {LAUNCHER_PATH: launcher_text(config, RUN_CONFIG)})


def launcher_text(config: RunConfig, path: str) -> str:
    """Return a launcher for sbatch of the run config at `path`: its header asks for what the config says."""
    _, _, body = places.shared_file(LAUNCHER_TEMPLATE).read_text(encoding="utf-8").partition("set -euo pipefail\n")
    header = [line for line in submission.dry_run(config).splitlines() if line.startswith("#SBATCH ")]
    own = ("#SBATCH --output=", "#SBATCH --job-name=")  # the first job cannot have these: decision 0003
    kept = [line.replace("B:USR2@", "B:SIGUSR2@") for line in header if not line.startswith(own)]
    kept.insert(0, f"#SBATCH --job-name={config.project}-{config.name}")
    settings = {variable: _shown(config, name) for variable, name in SETTING_VARIABLES.items()}
    body = _SETTING.sub(lambda match: match[1] + settings.get(match[2], "false"), body)
    body = re.sub(r'"\$\{CONFIG:-[^"]+\}"', lambda _: f'"${{CONFIG:-{path}}}"', body)
    body = body.replace(LAUNCHER_TEMPLATE, LAUNCHER_PATH)
    return "\n".join(["#!/usr/bin/env bash", *kept, "set -euo pipefail", ""]) + body


def _shown(config: RunConfig, name: str) -> str:
    """A setting as the comments of a launcher show it; paths as the config has them, from the project's folder."""
    root, text = f"{places.project_folder(Path(config.run_dir or ''))}/", variable_text(config, name)
    return (text.replace(root, "") if name == "data.datasets" else text) or "none"


def _files(name: str, cluster: str) -> dict[str, str]:
    """Texts of the project's files by their places, without the launcher, which needs the config."""
    shared = places.shared_file("configs")
    run = (shared / "runs" / Path(RUN_CONFIG).name).read_text(encoding="utf-8")
    run = re.sub(r"^project: .*", f"project: {name}", run, flags=re.M)
    run = re.sub(r"^cluster: \S+", f"cluster: {cluster}", run, flags=re.M)
    if gpus := (yaml_file.read_yaml(shared / "clusters" / f"{cluster}.yaml").values.get("job") or {}).get(
        "gpus_per_node"
    ):
        # a rank for each GPU, and as many sequences for each as the template has
        run = re.sub(r"^  ntasks_per_node: .*", f"  ntasks_per_node: {gpus}", run, flags=re.M)
        run = re.sub(r"^  global_batch_size: .*", f"  global_batch_size: {4 * gpus}", run, flags=re.M)
        run = re.sub(r"^training:$", "training:\n  precision: bf16", run, flags=re.M)
    copied = [*sorted((shared / "models").glob("*.yaml")), shared / "clusters" / f"{cluster}.yaml"]
    data = shared / "data" / "tokenization-example.yaml"
    data_text = data.read_text(encoding="utf-8").replace("launchers/submit_tokenization.py", "relayrun dumps submit")
    return {
        places.PROJECT_MARKER: _MARKER.format(python=sys.executable),
        ".gitignore": _IGNORED,
        "README.md": _README.format(name=name, run=RUN_CONFIG, cluster=cluster, launcher=LAUNCHER_PATH),
        RUN_CONFIG: run,
        **{f"configs/{path.relative_to(shared)}": path.read_text(encoding="utf-8") for path in copied},
        "configs/data/tokenization-example.yaml": data_text,
        "launchers/lib/launch.sh": places.shared_file("launchers/lib/launch.sh").read_text(encoding="utf-8"),
        "logs/runs/.gitkeep": "",
        "logs/slurm/training/.gitkeep": "",
    }


def _write(folder: Path, files: Mapping[str, str]) -> dict[str, bool]:
    made = {}
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path.parent, shared=True)
        try:
            write_atomic(path, text, mode=0o777 if name == LAUNCHER_PATH else 0o666, new=True)
            made[name] = True
        except FileExistsError:
            made[name] = False
    return made
