#!/usr/bin/env bash
# Installs what tests need from Debian's packages: Slurm's daemons and clients, munge; and strace, which makes calls fail.
#   scripts/tools/install_slurm.sh           installs what is missing; does nothing where all is there
#   scripts/tools/install_slurm.sh --check   only says what is missing; exit status 1 if anything is
#   ... --accounting                         as well what accounting needs: slurmdbd and MariaDB (8 MB to download)
# Needs root or sudo. Slurm's own services stay without a configuration (they do not start); the test cluster needs none.
set -euo pipefail
unset CDPATH # with it `cd` prints

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=scripts/tools/lib/slurm.sh
source "$here/lib/slurm.sh"
# shellcheck source=scripts/tools/lib/packages.sh
source "$here/lib/packages.sh"

readonly PACKAGES=(slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge strace)
# MariaDB's programs without its service: a cluster starts its own
readonly ACCOUNTING_PACKAGES=(slurmdbd mariadb-server-core mariadb-client-core)

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
    install_packages "missing: $lacks" "install Slurm (slurmctld, slurmd, clients, basic plugins) and munge yourself" \
      "${packages[@]}"
    lacks="$(missing "$accounting")"
    [[ -z "$lacks" ]] || fail "the packages are installed, yet this is missing: $lacks"
  fi
  echo "Slurm is installed: $(slurmctld -V)${accounting:+, with accounting}"
}

main "$@"
