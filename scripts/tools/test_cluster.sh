#!/usr/bin/env bash
# A throw-away Slurm on this machine: real slurmctld, slurmd and munge, several nodes with pretended GPUs.
#
#   test_cluster.sh up [DIR]              starts a fresh cluster in DIR; the last line printed is the one to run next
#   test_cluster.sh down [DIR]            ends it with all its jobs; the logs stay in DIR/log
#   test_cluster.sh env [DIR]             prints "export SLURM_CONF=..."
#   test_cluster.sh status [DIR]          daemons, nodes and queue; exit status 1 where a daemon does not run
#   test_cluster.sh kill-node DIR nX      SIGKILL of that node's slurmd (its job processes go on, as after a crash)
#   test_cluster.sh start-node DIR nX
#   test_cluster.sh stop-ctld DIR         the controller ends and keeps its queue
#   test_cluster.sh start-ctld DIR
#
# DIR: .test-cluster in the repository, if not given. Options of `up`, or variables of the environment:
#   --nodes N        CLUSTER_NODES      4     nodes n0, n1, ...; more than 64 need 4 MB each, and --port-base
#   --cpus N         CLUSTER_CPUS       8     CPUs of a node (pretended)
#   --gpus N         CLUSTER_GPUS       4     GPUs of a node (pretended: links to /dev/null)
#   --kill-wait S    CLUSTER_KILL_WAIT  3     seconds between SIGTERM and SIGKILL at the time limit
#   --grace S        CLUSTER_GRACE      10    seconds that a preempted job in the partition `low` has
#   --node-timeout S CLUSTER_NODE_TIMEOUT 10  seconds without an answer after which a node counts as lost
#   --first-job-id N CLUSTER_FIRST_JOB_ID 1   of it follows the MASTER_PORT: clusters side by side need others
#   --port-base P    CLUSTER_PORT_BASE  auto  NODES+2 TCP ports from P on; found and reserved, if not given
#   --accounting 0|1 CLUSTER_ACCOUNTING 0     slurmdbd and a database of its own: sacct answers, and limits are enforced
#   --apart 0|1      CLUSTER_APART      0     every node has process ids of its own, as a machine: needs root. `kill-node`
#                                             is a power loss there: the node's jobs end with its slurmd
#   --topology 0|1   CLUSTER_TOPOLOGY   0     two switches: the first half of the nodes hangs on the second one
# Partitions: debug (default), high and low (a job in high takes the nodes of one in low, which is requeued).
# With accounting, whoever submits needs `sacctmgr add user NAME account=team`; QOS: normal, and one (one submitted job).
# Needs scripts/tools/install_slurm.sh once (with --accounting for that). As root, jobs of any user run; else only one's own.
set -euo pipefail
unset CDPATH # with it `cd` prints
umask 022
# What the caller's shell holds for another cluster must not steer this one's commands.
unset "${!SLURM_@}" "${!SBATCH_@}" "${!SQUEUE_@}" "${!SINFO_@}" "${!SCANCEL_@}"

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=scripts/tools/lib/slurm.sh
source "$here/lib/slurm.sh"
# shellcheck source=scripts/tools/lib/cluster_conf.sh
source "$here/lib/cluster_conf.sh"
# shellcheck source=scripts/tools/lib/cluster_ports.sh
source "$here/lib/cluster_ports.sh"
# shellcheck source=scripts/tools/lib/cluster_processes.sh
source "$here/lib/cluster_processes.sh"
# shellcheck source=scripts/tools/lib/cluster_accounting.sh
source "$here/lib/cluster_accounting.sh"

nodes="${CLUSTER_NODES:-4}"
cpus="${CLUSTER_CPUS:-8}"
gpus="${CLUSTER_GPUS:-4}"
kill_wait="${CLUSTER_KILL_WAIT:-3}"
grace="${CLUSTER_GRACE:-10}"
node_timeout="${CLUSTER_NODE_TIMEOUT:-10}"
first_job_id="${CLUSTER_FIRST_JOB_ID:-1}"
port_base="${CLUSTER_PORT_BASE:-auto}"
accounting="${CLUSTER_ACCOUNTING:-0}"
apart="${CLUSTER_APART:-0}"
topology="${CLUSTER_TOPOLOGY:-0}"

usage() {
  sed -n '2,/^set /s/^#[ ]\{0,1\}//p' "${BASH_SOURCE[0]}"
}

# number NAME VALUE LEAST MOST
number() {
  if [[ ! "$2" =~ ^(0|[1-9][0-9]{0,5})$ ]] || (($2 < $3 || $2 > $4)); then
    fail "$1: '$2' is not a number from $3 to $4"
  fi
}

# option --NAME VALUE: sets the variable of that name.
option() {
  local -r name="${1#--}"
  printf -v "${name//-/_}" '%s' "$2"
}

check_settings() {
  number --nodes "$nodes" 1 1024
  number --cpus "$cpus" 1 1024
  number --gpus "$gpus" 1 64
  number --kill-wait "$kill_wait" 0 3600
  number --grace "$grace" 0 3600
  number --node-timeout "$node_timeout" 5 3600
  number --first-job-id "$first_job_id" 1 999999
  [[ "$port_base" == auto ]] || number --port-base "$port_base" 1024 $((65534 - nodes))
  number --accounting "$accounting" 0 1
  number --apart "$apart" 0 1
  number --topology "$topology" 0 1
}

# Refuses a folder in which no cluster was ever started.
require_cluster() {
  [[ -e "$1/nodes" ]] || fail "$1: no cluster was started here; start one: test_cluster.sh up $1"
}

require_node() {
  grep -qxF -e "$2" "$1/nodes" || fail "$1: no node $2; it has $(paste -sd ' ' "$1/nodes")"
}

# Prints one line a daemon, "NAME up|down"; status 1 if one is down.
daemons() {
  local -r dir="$1"
  local node status=0
  if daemon_pid "$dir" slurmctld >/dev/null; then echo "slurmctld up"; else echo "slurmctld down" && status=1; fi
  if has_accounting "$dir"; then
    if daemon_pid "$dir" mariadbd >/dev/null; then echo "mariadbd up"; else echo "mariadbd down" && status=1; fi
    if daemon_pid "$dir" slurmdbd >/dev/null; then echo "slurmdbd up"; else echo "slurmdbd down" && status=1; fi
  fi
  while read -r node; do
    if daemon_pid "$dir" slurmd "$node" >/dev/null; then echo "$node up"; else echo "$node down" && status=1; fi
  done <"$dir/nodes"
  return "$status"
}

# Waits until all nodes are idle.
wait_idle() {
  local -r dir="$1"
  local try states
  for ((try = 0; try < 1200 + 10 * nodes; try++)); do
    states="$(sinfo -h -N -p debug -o %T 2>/dev/null | sort | uniq -c | xargs)" || true
    [[ "$states" != "$nodes idle" ]] || return 0
    sleep 0.1
  done
  tail -n 8 -- "$dir"/log/* >&2 || true
  fail "the nodes are not idle after minutes (${states:-slurmctld does not answer}); the logs above are in $dir/log"
}

# Starts the controller with the queue that it had, and waits until it answers.
start_ctld() {
  local try
  daemon_start "$1" slurmctld ""
  for ((try = 0; try < 600; try++)); do
    ! scontrol ping >/dev/null 2>&1 || return 0
    sleep 0.1
  done
  fail "slurmctld runs and does not answer; see $1/log/slurmctld.log"
}

write_conf() {
  conf_write "$1" "$accounting" "$nodes" "$cpus" "$gpus" "$kill_wait" "$grace" "$node_timeout" "$first_job_id" "$2"
  ((nodes <= 64)) || conf_patient "$1"
  [[ "$topology" == 0 ]] || conf_topology "$1" "$nodes"
  [[ "$apart" == 0 ]] || conf_apart "$1"
}

up() {
  local -r dir="$1"
  local missing node
  missing="$(slurm_missing | paste -sd ',')"
  [[ -z "$missing" ]] || fail "Slurm is not complete; missing: $missing; install it: scripts/tools/install_slurm.sh"
  if [[ "$accounting" == 1 ]]; then
    missing="$(accounting_missing | paste -sd ',')"
    [[ -z "$missing" ]] || fail "accounting lacks: $missing; install it: scripts/tools/install_slurm.sh --accounting"
  fi
  if [[ -e "$dir/etc/slurm.conf" && -n "$(cluster_processes "$dir/etc/slurm.conf")" ]]; then
    daemons "$dir" >/dev/null || fail "$dir: parts of this cluster run and parts do not; end it: test_cluster.sh down $dir"
    echo "$dir: this cluster is already up; nothing was started or changed" >&2
    print_env "$dir"
    return 0
  fi
  munge_up
  # From here on an error or an interrupt must not leave half a cluster.
  starting="$dir"
  trap '[[ ! -e "$starting/etc/slurm.conf" ]] || down "$starting"' EXIT
  ports_locked ports_reserve "$port_base" $((nodes + 2)) "$dir" write_conf "$dir"
  ! has_accounting "$dir" || accounting_start "$dir"
  daemon_start "$dir" slurmctld "" -c
  while read -r node; do
    daemon_start "$dir" slurmd "$node"
  done <"$dir/nodes"
  wait_idle "$dir"
  trap - EXIT
  echo "$dir: $nodes nodes are up; to use the cluster, run:" >&2
  print_env "$dir"
}

down() {
  local -r dir="$1"
  local node
  # Its folder may be gone and its processes not.
  if [[ ! -e "$dir/etc/slurm.conf" && -z "$(cluster_processes "$dir/etc/slurm.conf")" ]]; then
    echo "$dir: no cluster here" >&2
    return 0
  fi
  daemon_stop "$dir" TERM slurmctld
  [[ ! -e "$dir/nodes" ]] || while read -r node; do
    daemon_stop "$dir" KILL slurmd "$node"
  done <"$dir/nodes"
  accounting_stop "$dir"
  processes_end "$dir/etc/slurm.conf"
  rm -rf -- "${dir:?}/db"
  ports_locked ports_release "$dir"
  echo "$dir: the cluster is down; its logs are in $dir/log" >&2
}

print_env() {
  printf 'export SLURM_CONF=%q\n' "$1/etc/slurm.conf"
}

show_status() {
  local -r dir="$1"
  local status=0
  daemons "$dir" || status=1
  if daemon_pid "$dir" slurmctld >/dev/null; then
    sinfo && squeue
  fi
  return "$status"
}

# locked DIR COMMAND...: one start or stop at a time in a folder (file descriptor 9).
locked() {
  local -r dir="$1"
  shift
  if [[ ! -d "$dir" ]]; then
    "$@"
    return
  fi
  exec 9<"$dir"
  flock 9
  "$@"
}

main() {
  local -a words=()
  while (($# > 0)); do
    case "$1" in
      --nodes | --cpus | --gpus | --kill-wait | --grace | --node-timeout | --first-job-id | --port-base | --accounting | \
        --apart | --topology)
        [[ $# -ge 2 ]] || fail "$1 needs a value"
        option "$1" "$2"
        shift
        ;;
      --nodes=* | --cpus=* | --gpus=* | --kill-wait=* | --grace=* | --node-timeout=* | --first-job-id=* | --port-base=* | \
        --accounting=* | --apart=* | --topology=*)
        option "${1%%=*}" "${1#*=}"
        ;;
      -h | --help)
        usage
        return 0
        ;;
      -*) fail "unknown option $1; test_cluster.sh --help lists them" ;;
      *) words+=("$1") ;;
    esac
    shift
  done
  local -r verb="${words[0]:-}"
  local -r node="${words[2]:-}"
  local dir="${words[1]:-$here/../../.test-cluster}"
  case "$verb" in
    up | down | env | status) ((${#words[@]} <= 2)) || fail "usage: test_cluster.sh $verb [DIR]" ;;
    kill-node | start-node) ((${#words[@]} == 3)) || fail "usage: test_cluster.sh $verb DIR NODE" ;;
    stop-ctld | start-ctld) ((${#words[@]} == 2)) || fail "usage: test_cluster.sh $verb DIR" ;;
    *)
      usage >&2
      fail "unknown command: ${verb:-(none)}"
      ;;
  esac
  dir="$(realpath -m -- "$dir")"
  export SLURM_CONF="$dir/etc/slurm.conf"
  [[ "$verb" == up || "$verb" == down ]] || require_cluster "$dir"
  [[ -z "$node" ]] || require_node "$dir" "$node"
  case "$verb" in
    up)
      check_settings
      conf_check_folder "$dir"
      mkdir -p -- "$dir"
      locked "$dir" up "$dir"
      ;;
    down) locked "$dir" down "$dir" ;;
    env) print_env "$dir" ;;
    status) show_status "$dir" ;;
    kill-node) locked "$dir" daemon_stop "$dir" KILL slurmd "$node" ;;
    start-node) locked "$dir" daemon_start "$dir" slurmd "$node" ;;
    stop-ctld) locked "$dir" daemon_stop "$dir" TERM slurmctld ;;
    start-ctld) locked "$dir" start_ctld "$dir" ;;
  esac
}

main "$@"
