#!/usr/bin/env bash
# Installs what tests need from Debian's packages: Slurm's daemons and clients, munge; and strace, which makes calls fail.
#   scripts/tools/install_slurm.sh           installs what is missing; does nothing where all is there
#   scripts/tools/install_slurm.sh --check   only says what is missing; exit status 1 if anything is
#   ... --accounting                         as well what accounting needs: slurmdbd and MariaDB (8 MB to download)
# Needs root or sudo. Slurm's own services stay without a configuration (they do not start); the test cluster needs none.
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=scripts/tools/lib/slurm.sh
source "$here/lib/slurm.sh"

readonly PACKAGES=(slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge strace)
# MariaDB's programs without its service: a cluster starts its own
readonly ACCOUNTING_PACKAGES=(slurmdbd mariadb-server-core mariadb-client-core)

# Runs a command as root.
as_root() {
  if [[ "$EUID" -eq 0 ]]; then
    "$@"
  else
    sudo -- "$@"
  fi
}

# install_packages MISSING PACKAGE...
install_packages() {
  local -r why="missing: $1"
  shift
  command -v apt-get >/dev/null ||
    fail "$why; there is no apt-get here: install Slurm (slurmctld, slurmd, clients, basic plugins) and munge yourself"
  [[ "$EUID" -eq 0 ]] || command -v sudo >/dev/null ||
    fail "$why; neither root nor sudo here: ask root for apt-get install --no-install-recommends $*"
  as_root apt-get update -qq || fail "$why; apt-get update failed (see above)"
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >&2 ||
    fail "$why; apt-get install failed (see above)"
}

# missing [--accounting]: what is missing, in one line.
missing() {
  {
    slurm_missing
    [[ -z "$1" ]] || accounting_missing
  } | paste -sd ',' | sed 's/,/, /g'
}

main() {
  local lacks check="" accounting=""
  while (($# > 0)); do
    case "$1" in
      --check) check=1 ;;
      --accounting) accounting="$1" ;;
      *) fail "unknown argument: $1; usage: install_slurm.sh [--check] [--accounting]" ;;
    esac
    shift
  done
  lacks="$(missing "$accounting")"
  if [[ -n "$lacks" ]]; then
    [[ -z "$check" ]] ||
      fail "Slurm is not complete; missing: $lacks; install it: scripts/tools/install_slurm.sh${accounting:+ $accounting}"
    local -a packages=("${PACKAGES[@]}")
    [[ -z "$accounting" ]] || packages+=("${ACCOUNTING_PACKAGES[@]}")
    install_packages "$lacks" "${packages[@]}"
    lacks="$(missing "$accounting")"
    [[ -z "$lacks" ]] || fail "the packages are installed, yet this is missing: $lacks"
  fi
  echo "Slurm is installed: $(slurmctld -V)${accounting:+, with accounting}"
}

main "$@"
