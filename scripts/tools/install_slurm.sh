#!/usr/bin/env bash
# Installs what tests need from Debian's packages: Slurm's daemons and clients, munge; and strace, which makes calls fail.
#   scripts/tools/install_slurm.sh           installs what is missing; does nothing where all is there
#   scripts/tools/install_slurm.sh --check   only says what is missing; exit status 1 if anything is
# Needs root or sudo. Slurm's own services stay without a configuration (they do not start); the test cluster needs none.
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=scripts/tools/lib/slurm.sh
source "$here/lib/slurm.sh"

readonly PACKAGES=(slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge strace)

# Runs a command as root.
as_root() {
  if [[ "$EUID" -eq 0 ]]; then
    "$@"
  else
    sudo -- "$@"
  fi
}

install_packages() {
  local -r why="missing: $1"
  command -v apt-get >/dev/null ||
    fail "$why; there is no apt-get here: install Slurm (slurmctld, slurmd, clients, basic plugins) and munge yourself"
  [[ "$EUID" -eq 0 ]] || command -v sudo >/dev/null ||
    fail "$why; neither root nor sudo here: ask root for apt-get install --no-install-recommends ${PACKAGES[*]}"
  as_root apt-get update -qq || fail "$why; apt-get update failed (see above)"
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${PACKAGES[@]}" >&2 ||
    fail "$why; apt-get install failed (see above)"
}

main() {
  local missing
  if [[ $# -gt 1 || ($# -eq 1 && "$1" != --check) ]]; then
    fail "unknown argument: $*; usage: install_slurm.sh [--check]"
  fi
  missing="$(slurm_missing | paste -sd ',' | sed 's/,/, /g')"
  if [[ -z "$missing" ]]; then
    echo "Slurm is installed: $(slurmctld -V)"
    return 0
  fi
  [[ "${1:-}" != --check ]] || fail "Slurm is not complete; missing: $missing; install it: scripts/tools/install_slurm.sh"
  install_packages "$missing"
  missing="$(slurm_missing | paste -sd ',' | sed 's/,/, /g')"
  [[ -z "$missing" ]] || fail "the packages are installed, yet this is missing: $missing"
  echo "Slurm is installed: $(slurmctld -V)"
}

main "$@"
