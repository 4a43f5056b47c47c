#!/usr/bin/env bash
# Slurm of another version than this machine's, for the test cluster and its tests: packages of another Debian release
# in a folder of their own, the root folder of the commands that run there.
#
#   slurm_version.sh build VERSION           22.05, 24.11 or 26.05: builds the root; does nothing where it is there
#   slurm_version.sh check VERSION           only says what is missing; exit status 1 if anything is
#   slurm_version.sh run VERSION COMMAND...  builds it if needed, and runs the command there, as root
#   slurm_version.sh remove VERSION          ends the munged of the root, and removes it
#
# A root needs a minute, 55 MB to download (26.05, with apptainer: 85 MB) and 650 MB of disk in
# ~/.cache/relayrun/slurm-versions (RELAYRUN_SLURM_ROOTS).
# The version that the machine has itself needs none: its commands run as they are.
# The command sees the machine's /tmp, /proc, /dev and /sys, this checkout and its interpreter. Processes and network
# are the machine's: clusters of several versions run side by side. Needs root and debootstrap.
set -euo pipefail
unset CDPATH # with it `cd` prints

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=scripts/tools/lib/slurm.sh
source "$here/lib/slurm.sh"
# shellcheck source=scripts/tools/lib/packages.sh
source "$here/lib/packages.sh"

checkout="$(cd -- "$here/../.." && pwd)"
roots="${RELAYRUN_SLURM_ROOTS:-${XDG_CACHE_HOME:-$HOME/.cache}/relayrun/slurm-versions}"

# what the cluster's scripts, the tests and an interpreter built on the machine need
readonly PACKAGES=(slurmctld slurmd slurm-client slurm-wlm-basic-plugins slurmdbd munge strace procps e2fsprogs iproute2
  ca-certificates mariadb-server-core mariadb-client-core git libssl3t64 libffi8 libsqlite3-0 libbz2-1.0 liblzma5
  libreadline8t64 libncursesw6 zlib1g)
# of the newest release alone, for the test of containers
readonly NEWEST_PACKAGES=(apptainer)

# suite VERSION: prints the Debian release that has it.
suite() {
  case "$1" in
    24.11) echo trixie ;;
    26.05) echo sid ;;
    *) fail "Slurm $1: no Debian release is known that has it; there are 22.05, 24.11 and 26.05" ;;
  esac
}

# is_own VERSION: the machine's own Slurm has this version ("slurm 25.11.0" where it is built from SchedMD's sources).
is_own() {
  [[ "$(slurmctld -V 2>/dev/null)" =~ ^slurm(-wlm)?" $1." ]]
}

is_built() {
  [[ -e "$roots/$1/.complete" ]]
}

# lacking: prints why no root can be built or entered here; nothing where it can.
lacking() {
  [[ "$EUID" -eq 0 ]] || echo "only root can build and enter a root folder"
  command -v debootstrap >/dev/null || echo "debootstrap is not installed: apt-get install debootstrap"
  unshare -m --propagation private true 2>/dev/null || echo "no mount namespaces (a container without CAP_SYS_ADMIN)"
  [[ -n "$(mirror)" ]] || echo "no Debian mirror in /etc/apt"
}

# check VERSION: exit status 1 and a line where commands cannot run with this Slurm.
check() {
  local lacks
  if is_own "$1"; then return 0; fi
  suite "$1" >/dev/null
  lacks="$(lacking | paste -sd ';' | sed 's/;/; /g')"
  [[ -z "$lacks" ]] || fail "Slurm $1: $lacks"
}

# mirror: prints this machine's own Debian mirror.
mirror() {
  {
    sed -n 's/^URIs: *\([^ ]*\/debian\/\{0,1\}\)$/\1/p' /etc/apt/sources.list.d/*.sources
    sed -n 's/^deb \(\[.*\] \)\{0,1\}\([^ ]*\/debian\/\{0,1\}\) .*/\2/p' /etc/apt/sources.list
  } 2>/dev/null | head -n 1
}

# inside ROOT COMMAND...: in the root as the packages leave it, for their installation.
inside() {
  local -r root="$1"
  shift
  # shellcheck disable=SC2016
  unshare -m --propagation private bash -c '
    mount -t proc proc "$0/proc" && mount --rbind /dev "$0/dev" && exec chroot "$0" "$@"' \
    "$root" env -i DEBIAN_FRONTEND=noninteractive PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root "$@"
}

# Slurm's database of 24.11 and 26.05 does not start with MariaDB's client library 3.4 ("5027 Number of columns in
# result (=1)"): the one of this machine's release takes its place.
old_database_library() {
  local -r root="$1" library="$1/usr/local/lib/$(uname -m)-linux-gnu"
  local folder
  folder="$(mktemp -d)"
  (cd "$folder" && apt-get download -qq libmariadb3 && dpkg -x libmariadb3_*.deb .) >&2
  mkdir -p "$library"
  cp "$folder/usr/lib/$(uname -m)-linux-gnu/libmariadb.so.3" "$library/"
  rm -rf -- "$folder"
  inside "$root" ldconfig
}

build_root() {
  local -r version="$1" root="$roots/$1"
  local found
  local -a packages=("${PACKAGES[@]}")
  [[ "$(suite "$version")" != sid ]] || packages+=("${NEWEST_PACKAGES[@]}")
  rm -rf -- "${root:?}"
  debootstrap --variant=minbase --include=ca-certificates "$(suite "$version")" "$root" "$(mirror)"
  printf '#!/bin/sh\nexit 101\n' >"$root/usr/sbin/policy-rc.d" # no service starts
  chmod 755 "$root/usr/sbin/policy-rc.d"
  echo force-unsafe-io >"$root/etc/dpkg/dpkg.cfg.d/relayrun" # no fsync after every file
  cp /etc/resolv.conf /etc/hosts "$root/etc/"
  [[ ! -d /etc/apt/apt.conf.d ]] || cp -n /etc/apt/apt.conf.d/*proxy* "$root/etc/apt/apt.conf.d/" 2>/dev/null || true
  inside "$root" apt-get install -y -qq --no-install-recommends "${packages[@]}"
  old_database_library "$root"
  rm -f -- "$root"/var/cache/apt/archives/*.deb
  found="$(inside "$root" slurmctld -V)"
  [[ "$found" == "slurm-wlm $version."* ]] || fail "Debian's $(suite "$version") has $found now, and not $version"
  echo "$found" >"$root/.complete"
}

build() {
  local -r version="$1" log="$roots/$1.log"
  check "$version"
  if is_own "$version" || is_built "$version"; then return 0; fi
  mkdir -p -- "$roots"
  (
    flock 9
    is_built "$version" || {
      echo "building a root with Slurm $version in $roots (about a minute)" >&2
      build_root "$version" >"$log" 2>&1 || {
        tail -n 5 -- "$log" >&2
        fail "no root with Slurm $version was built; see $log"
      }
    }
  ) 9>"$roots/$version.lock"
}

# folders: prints the folders that the command must see at their own place, one a line.
folders() {
  local python="$checkout/.venv/bin/python"
  [[ -x "$python" ]] || python=python3
  "$python" -c 'import sys; print(sys.base_prefix, sys.prefix, sep="\n")' | grep -vx /usr
  git -C "$checkout" rev-parse --path-format=absolute --git-common-dir 2>/dev/null || true
  printf '%s\n' "$checkout" "$PWD"
}

run() {
  local -r version="$1"
  shift
  build "$version"
  ! is_own "$version" || exec "$@"
  # pivot_root, not chroot: in a chroot no user namespace can be made (containers)
  # shellcheck disable=SC2016
  ROOT="$roots/$version" FOLDERS="$(folders)" exec unshare -m --propagation private bash -euc '
    mount --bind "$ROOT" "$ROOT"
    mkdir -p "$ROOT/.outside"
    for folder in proc dev sys tmp; do mount --rbind "/$folder" "$ROOT/$folder"; done
    while read -r folder; do
      mkdir -p "$ROOT$folder"
      mount --rbind "$folder" "$ROOT$folder"
    done <<<"$FOLDERS"
    cd "$ROOT"
    pivot_root . .outside
    umount -l /.outside
    cd "$0"
    exec env -u ROOT -u FOLDERS PATH="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" "$@"' "$PWD" "$@"
}

remove() {
  local -r root="$roots/$1"
  local pid
  suite "$1" >/dev/null
  if { read -r pid <"$root/run/munge/munged.pid"; } 2>/dev/null && [[ "$(cat "/proc/$pid/comm" 2>/dev/null)" == munged ]]; then
    kill "$pid"
  fi
  rm -rf --one-file-system -- "${root:?}" "$roots/$1.log" "$roots/$1.lock"
}

main() {
  local -r verb="${1:-}" version="${2:-}"
  case "$verb:$#" in
    build:2 | check:2 | remove:2) "$verb" "$version" ;;
    run:[12]) fail "usage: slurm_version.sh run VERSION COMMAND..." ;;
    run:*) shift && "$verb" "$@" ;;
    *)
      sed -n '2,/^set /s/^#[ ]\{0,1\}//p' "${BASH_SOURCE[0]}" >&2
      exit 2
      ;;
  esac
}

main "$@"
