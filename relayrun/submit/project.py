"""A new project: a folder with launchers, configs and a site file that works with an installed relayrun.

my-project/
  .relayrun       makes the folder a project (`relayrun.places`), and names a Python for the launchers
  configs/        a run, its model, tokenization, and the cluster
  launchers/      the run for sbatch
  logs/           runs and the logs of jobs
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from relayrun import places
from relayrun.config.compose import describe, resolve, yaml_file
from relayrun.config.compose.schema import RunConfig
from relayrun.errors import ConfigError, InputError, on_interrupt
from relayrun.files import write_atomic
from relayrun.leftovers import remove_leftovers
from relayrun.submit import submission
from relayrun.submit.launcher_overrides import SETTING_VARIABLES, variable_text

RUN_CONFIG = "configs/runs/my-run.yaml"
"""The run of a new project."""
DATA_CONFIG = "configs/data/tokenization-example.yaml"
LAUNCHER_TEMPLATE = "launchers/submit-llama3-1b.sh"
LAUNCHER_PATH = "launchers/submit-my-run.sh"

_MOCK = "--set data.mock_data=true"
_CHECKOUT = "--set megatron_lm.dir=../Megatron-LM"
TEMPLATES = {
    "native": (f"relayrun check {RUN_CONFIG} {_MOCK}", f"relayrun submit {RUN_CONFIG} {_MOCK} --set training.steps=40"),
    "megatron-lm": tuple(f"relayrun {verb} {RUN_CONFIG} {_MOCK} {_CHECKOUT}" for verb in ("check", "submit")),
    "command": (f"relayrun check {RUN_CONFIG}", f"relayrun submit {RUN_CONFIG}"),
    "tokenize": (
        "relayrun dumps example --output-folder data/example --megabytes 4",
        "relayrun dumps tokenizer --dataset-folder data/example/docs --output-folder data/tokenizer"
        " --vocabulary-size 4096",
        "relayrun dumps prepare --dataset-folder data/example/docs --preprocessing-metadata-folder data/my-text-dumps"
        " --n-dumps 1",
        f"relayrun dumps submit {DATA_CONFIG} --executor local",
    ),
}
"""The first commands in a project of each template, behind `cd`."""

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
{commands}
relayrun status   # all runs of this project
```

{notes}- `configs/clusters/{cluster}.yaml` has what this site needs. `relayrun explain` says what each setting means.
- `logs/runs/` has a folder for each run, `logs/slurm/` what the jobs print.
"""

_NOTES = f"""\
- `{RUN_CONFIG}` says what is trained, on what, and for how long; `configs/models/` has shapes of models.
- `{DATA_CONFIG}` turns text into tokens: `relayrun dumps prepare`, then `dumps submit`.
- `sbatch {LAUNCHER_PATH}` submits the same run from a script: `MBS=2 sbatch {LAUNCHER_PATH}` changes a setting.
"""


def site_names() -> list[str]:
    """Return the names of the site files that relayrun brings."""
    return sorted(path.stem for path in places.shared_file("configs/clusters").glob("*.yaml"))


@on_interrupt(lambda: "what is made stays; the same command goes on")
def make_project(folder: Path, *, cluster: str, template: str = "native", inside: bool = False) -> dict[str, bool]:
    """Write a project into `folder`; return each file, and whether it was written: an existing file stays as it is.

    `cluster` is a name of `site_names` or the path of a site file. Raises ConfigError for an unknown cluster, and
    InputError if `folder` is no folder, or lies in another project and not `inside`.
    """
    given = cluster.endswith((".yaml", ".yml"))
    site = Path(cluster) if given else places.shared_file("configs/clusters") / f"{cluster}.yaml"
    if not site.is_file():
        words = f"unknown cluster {cluster!r}; there are: {', '.join(site_names())}"
        raise ConfigError(words, where="--cluster", hint="name one of them, or give the path of a site file, x.yaml")
    if folder.exists() and not folder.is_dir():
        raise InputError("this is no folder", where=folder)
    if not inside and (outer := places.nearest_root(folder.resolve().parent)):
        raise InputError(f"this lies in the project {outer}", where=folder, hint="take a folder outside, or --inside")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).lstrip("._-") or "my-project"
    made = _write(folder, _files(name, site, template))
    if template == "native":
        config = resolve.require_native(resolve.load_run_config(folder / RUN_CONFIG))
        made |= _write(folder, {LAUNCHER_PATH: launcher_text(config, RUN_CONFIG)})
    return made


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


def _files(name: str, site: Path, template: str) -> dict[str, str]:
    """Texts of the project's files by their places, without the launcher, which needs the config."""
    shared = places.shared_file("configs")
    copied = {f"configs/clusters/{site.stem}.yaml": site}
    if template in ("native", "megatron-lm"):
        copied |= {f"configs/models/{path.name}": path for path in sorted((shared / "models").glob("*.yaml"))}
    if template == "command":
        copied["train.py"] = shared / "templates/train.py"
    data = places.shared_file(DATA_CONFIG).read_text(encoding="utf-8")
    made = {
        places.PROJECT_MARKER: _MARKER.format(python=sys.executable),
        ".gitignore": _IGNORED,
        "README.md": _README.format(
            name=name,
            commands="\n".join(TEMPLATES[template]),
            notes=_NOTES if template == "native" else "",
            cluster=site.stem,
        ),
        **{place: path.read_text(encoding="utf-8") for place, path in copied.items()},
        "logs/runs/.gitkeep": "",
        "logs/slurm/training/.gitkeep": "",
    }
    if template == "native":
        made["launchers/lib/launch.sh"] = places.shared_file("launchers/lib/launch.sh").read_text(encoding="utf-8")
    if template != "command":
        made[DATA_CONFIG] = data.replace("launchers/submit_tokenization.py", "relayrun dumps submit")
    if template != "tokenize":
        made[RUN_CONFIG] = f"# yaml-language-server: $schema=../run.schema.json\n{_run_text(name, site, template)}"
        made["configs/run.schema.json"] = json.dumps(describe.json_schema(), indent=1) + "\n"
    return made


def _run_text(name: str, site: Path, template: str) -> str:
    """Return the run config, with a rank for each GPU of a node."""
    source = "templates/command.yaml" if template == "command" else "runs/my-run.yaml"
    run = (places.shared_file("configs") / source).read_text(encoding="utf-8")
    run = re.sub(r"^project: .*", f"project: {name}", run, flags=re.M)
    run = re.sub(r"^cluster: \S+", f"cluster: {site.stem}", run, flags=re.M)
    if template == "megatron-lm":
        checkout = "megatron_lm:\n  dir: /set/megatron_lm.dir # your checkout: its pretrain_gpt.py trains"
        run = run.replace("\ndata:\n", f"\ntrainer: megatron-lm\n{checkout}\n\ndata:\n", 1)
        run = re.sub(r"^  mock_vocabulary_size: .*\n", "", run, flags=re.M)
    if template != "command" and (gpus := (yaml_file.read_yaml(site).values.get("job") or {}).get("gpus_per_node")):
        # a rank for each GPU, and as many sequences for each as the template has
        run = re.sub(r"^  ntasks_per_node: .*", f"  ntasks_per_node: {gpus}", run, flags=re.M)
        run = re.sub(r"^  global_batch_size: .*", f"  global_batch_size: {4 * gpus}", run, flags=re.M)
        run = re.sub(r"^training:$", "training:\n  precision: bf16", run, flags=re.M)
    return run


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
