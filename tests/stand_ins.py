"""Container runtimes that are none: programs that look at their command line as the real ones do, and go on with it."""

from __future__ import annotations

from pathlib import Path

APPTAINER = r"""#!/usr/bin/env bash
set -euo pipefail
refuse() { echo "apptainer: $*" >&2; exit 255; }
[[ "${1-}" == exec ]] || refuse "no exec"
shift
binds=() folder=""
while [[ "${1-}" == -* ]]; do
  case "$1" in
    --nv | --rocm | --no-home | --writable-tmpfs | --cleanenv) shift ;;
    --bind)
      [[ -e "${2%%:*}" ]] || refuse "mount source ${2%%:*} doesn't exist"
      binds+=("$2")
      shift 2
      ;;
    --pwd) folder="$2" && shift 2 ;;
    *) refuse "unknown flag: $1" ;;
  esac
done
[[ -e "${1-}" ]] || refuse "no such image: ${1-}"
export IN_CONTAINER="$1" IN_BINDS="${binds[*]-}"
shift
[[ -z "${folder}" ]] || cd "${folder}"
[[ $# != 0 ]] || refuse "no command"
exec "$@"
"""

SRUN = r"""#!/usr/bin/env bash
# One task, with the options of pyxis and of CSCS's container engine.
set -euo pipefail
refuse() { echo "srun: error: $*" >&2; exit 1; }
while [[ "${1-}" == -* ]]; do
  case "$1" in
    --container-image=* | --environment=*)
      [[ -e "${1#*=}" ]] || refuse "no such image: ${1#*=}"
      export IN_CONTAINER="${1#*=}"
      ;;
    --container-mounts=*)
      IFS=, read -r -a binds <<<"${1#*=}"
      for bind in "${binds[@]}"; do
        [[ "${bind}" == /*:/* && -e "${bind%%:*}" ]] || refuse "pyxis: invalid mount: ${bind}"
      done
      export IN_BINDS="${binds[*]}"
      ;;
    --container-workdir=*) cd "${1#*=}" ;;
    --no-container-mount-home | --container-mount-home | --container-writable | --container-readonly) ;;
    --export=ALL | --nodes=* | --ntasks=* | --cpus-per-task=* | --cpu-bind=none | --mpi=none) ;;
    *) refuse "unrecognized option '$1'" ;;
  esac
  shift
done
export SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=1
exec "$@"
"""


def write(folder: Path) -> Path:
    """Write `apptainer` and `srun` into a folder for PATH; return it."""
    folder.mkdir(exist_ok=True)
    for name, text in (("apptainer", APPTAINER), ("srun", SRUN)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder
