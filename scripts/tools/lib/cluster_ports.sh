# shellcheck shell=bash
# Blocks of free TCP ports, shared out between test clusters of one machine. Sourced by test_cluster.sh.
#
# The registry has one line a cluster: BASE COUNT DIR. It is read and written under a lock, and an entry counts as long
# as DIR/etc/slurm.conf names that base: a cluster whose node or controller is down for the moment keeps its ports.
# The folder is fixed and not $TMPDIR, for ports are the machine's.

readonly PORTS_REGISTRY="/tmp/relayrun-test-clusters.$EUID"
# Below the ephemeral ports, and below 20000, where jobs choose their MASTER_PORT.
readonly PORTS_FIRST=11000 PORTS_LAST=16999

# ports_locked COMMAND...: runs the command with the registry locked (file descriptor 8).
ports_locked() {
  if [[ -L "$PORTS_REGISTRY" || (-e "$PORTS_REGISTRY" && ! -O "$PORTS_REGISTRY") ]]; then
    fail "$PORTS_REGISTRY: not a file of this user; remove it"
  fi
  (
    flock 8
    "$@"
  ) 8>>"$PORTS_REGISTRY"
}

# ports_entries [DIR]: the registry's live lines, without those of DIR.
ports_entries() {
  local -r without="${1:-}"
  local base count dir
  while read -r base count dir; do
    if [[ "$dir" != "$without" ]] && grep -qsx "SlurmctldPort=$base" "$dir/etc/slurm.conf"; then
      printf '%s %s %s\n' "$base" "$count" "$dir"
    fi
  done <"$PORTS_REGISTRY"
}

# ports_free BASE COUNT ENTRIES: no live entry overlaps the block and nothing listens in it.
ports_free() {
  local -r base="$1" count="$2" entries="$3"
  local other_base other_count port listening
  while read -r other_base other_count _; do
    if [[ -n "$other_base" ]] && ((base < other_base + other_count && other_base < base + count)); then
      return 1
    fi
  done <<<"$entries"
  # /proc/net/tcp: "sl: ADDRESS:PORT REMOTE STATE ...", hexadecimal; state 0A listens.
  listening="$(awk '$4 == "0A" {sub(/.*:/, "", $2); print $2}' /proc/net/tcp /proc/net/tcp6 2>/dev/null || true)"
  for ((port = base; port < base + count; port++)); do
    if [[ $'\n'"$listening"$'\n' == *$'\n'"$(printf '%04X' "$port")"$'\n'* ]]; then
      return 1
    fi
  done
}

# ports_reserve BASE|auto COUNT DIR COMMAND...: chooses a block, runs COMMAND with its base as last argument (it must
# write DIR/etc/slurm.conf), and records the block. To be called through ports_locked.
ports_reserve() {
  local -r wanted="$1" count="$2" dir="$3"
  shift 3
  local -r blocks=$(((PORTS_LAST - PORTS_FIRST + 1) / count))
  local entries base="" start block
  entries="$(ports_entries "$dir")"
  if [[ "$wanted" != auto ]]; then
    ports_free "$wanted" "$count" "$entries" ||
      fail "the ports $wanted to $((wanted + count - 1)) are not all free; take another --port-base, or none"
    base="$wanted"
  else
    # From a place of its own: a late client of a cluster that is gone does not meet the next one at its port.
    start="$(printf '%s' "$dir" | cksum)"
    start="${start%% *}"
    for ((block = 0; block < blocks; block++)); do
      base=$((PORTS_FIRST + (start + block) % blocks * count))
      ports_free "$base" "$count" "$entries" && break
      base=""
    done
    [[ -n "$base" ]] || fail "no $count free ports in a row between $PORTS_FIRST and $PORTS_LAST; see $PORTS_REGISTRY"
  fi
  "$@" "$base"
  printf '%s\n' "$entries" "$base $count $dir" | sed '/^$/d' >"$PORTS_REGISTRY"
}

# ports_release DIR; through ports_locked.
ports_release() {
  local entries
  entries="$(ports_entries "$1")"
  printf '%s\n' "$entries" | sed '/^$/d' >"$PORTS_REGISTRY"
}
