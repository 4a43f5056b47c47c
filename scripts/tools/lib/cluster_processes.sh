# shellcheck shell=bash
# The processes of one test cluster: started, recognised and ended by its configuration file. Sourced by
# test_cluster.sh. Every daemon is started with "-f DIR/etc/slurm.conf", so its command line says whose it is; those of
# accounting know no such option, and their environment says it. A pid is never signalled before that was looked at.

# process_is PID CONF PROGRAM [NODE]: that process is this cluster's daemon. A zombie is none.
process_is() {
  local -r pid="$1" conf="$2" program="$3" node="${4:-}"
  local -a words=()
  [[ "$pid" =~ ^[1-9][0-9]*$ ]] || return 1
  { mapfile -d '' -t words <"/proc/$pid/cmdline"; } 2>/dev/null || return 1
  local -r line=" ${words[*]:1} "
  [[ "${words[0]:-}" == "$program" || "${words[0]:-}" == */"$program" ]] ||
    [[ "$program" == slurmd && "${words[0]:-}" == unshare ]] || return 1
  if [[ "$program" == slurmdbd || "$program" == mariadbd ]]; then
    grep -qzxsF -e "SLURM_CONF=$conf" "/proc/$pid/environ"
    return
  fi
  [[ "$line" == *" -f $conf "* && (-z "$node" || "$line" == *" -N $node "*) ]]
}

# daemon_pid DIR PROGRAM [NODE]: prints the pid of the running daemon; status 1 where it does not run.
daemon_pid() {
  local -r dir="$1" program="$2" node="${3:-}"
  local -r file="$dir/run/$program${node:+-$node}.pid"
  local pid=""
  { read -r pid <"$file"; } 2>/dev/null || true
  process_is "$pid" "$dir/etc/slurm.conf" "$program" "$node" || return 1
  printf '%s\n' "$pid"
}

# daemon_start DIR PROGRAM NODE|"" [OPTION...]: starts it, waits until it wrote its pid file.
daemon_start() {
  local -r dir="$1" program="$2" node="$3"
  shift 3
  local -r name="$program${node:+-$node}"
  local -r conf="$dir/etc/slurm.conf"
  local pid try
  local -a command=("$program" -D -f "$conf")
  case "$program" in
    slurmdbd) command=("$program" -D) ;;
    mariadbd) command=("$program" --defaults-file="$dir/etc/mariadb.cnf") ;;
    slurmd) [[ ! -e "$dir/etc/apart" ]] || command=(unshare --pid --fork --kill-child --mount-proc "${command[@]}") ;;
  esac
  if pid="$(daemon_pid "$dir" "$program" "$node")"; then
    echo "$name already runs (pid $pid)" >&2
    return 0
  fi
  rm -f -- "$dir/run/$name.pid"
  # A clean environment: nothing of the caller's reaches prologs, epilogs or steps. No inherited locks.
  env -i PATH="$PATH" HOME=/ LANG=C.UTF-8 SLURM_CONF="$conf" MYSQL_UNIX_PORT="$dir/db/socket" \
    setsid "${command[@]}" ${node:+-N "$node"} "$@" >>"$dir/run/$name.out" 2>&1 </dev/null 9>&- &
  pid="$!"
  disown "$pid"
  [[ "${command[0]}" != unshare ]] || echo "$pid" >"$dir/run/$name.pid"
  for ((try = 0; try < 1200; try++)); do
    daemon_pid "$dir" "$program" "$node" >/dev/null && return 0
    [[ -d "/proc/$pid" ]] || break
    sleep 0.05
  done
  tail -n 5 -- "$dir/run/$name.out" >&2 || true
  fail "$name did not start; see $dir/log"
}

# daemon_stop DIR SIGNAL PROGRAM [NODE]: ends it and waits until it is gone; after 10 s by SIGKILL.
daemon_stop() {
  local -r dir="$1" signal="$2" program="$3" node="${4:-}"
  local pid try
  pid="$(daemon_pid "$dir" "$program" "$node")" || return 0
  kill -s "$signal" "$pid" 2>/dev/null || true
  for ((try = 0; try < 200; try++)); do
    process_is "$pid" "$dir/etc/slurm.conf" "$program" "$node" || return 0
    ((try != 100)) || kill -s KILL "$pid" 2>/dev/null || true
    sleep 0.05
  done
  fail "$program${node:+ $node} (pid $pid) does not end"
}

# cluster_processes CONF: prints the pids of all that belongs to the cluster, except this script and its parents:
# daemons (by command line), step daemons and job processes (by environment), and the latters' descendants.
# The children of a killed job wrapper escape Slurm's process tracking; their environment still names the job.
cluster_processes() {
  local -r conf="$1"
  local -r cluster="$(sed -n 's/^ClusterName=//p' "$conf" 2>/dev/null)"
  local pid file found=" "
  while read -r file; do
    pid="${file//[!0-9]/}"
    if process_is "$pid" "$conf" slurmctld || process_is "$pid" "$conf" slurmd ||
      process_is "$pid" "$conf" slurmdbd || process_is "$pid" "$conf" mariadbd ||
      process_is_of_job "$pid" "$conf" "$cluster"; then
      found+="$pid "
    fi
  done < <(
    grep -lzxsF -e "$conf" /proc/[0-9]*/cmdline || true
    grep -lzxsF -e "SLURM_CONF=$conf" /proc/[0-9]*/environ || true
  )
  [[ "$found" != " " ]] || return 0
  # Lines: /proc/PID/status:PPid: PPID and /proc/PID/status:State: LETTER (word)
  { grep -sE '^(PPid|State):' /proc/[0-9]*/status || true; } | awk -F '[/: \t]+' -v found="$found" -v self="$BASHPID" '
    $5 == "PPid" { parent[$3] = $6 }
    $5 == "State" { zombie[$3] = $6 == "Z" }
    END {
      for (up = self; up > 1; up = parent[up]) mine[up] = 1
      for (pid in zombie)
        for (up = pid; up > 1; up = parent[up])
          if (index(found, " " up " ")) {
            if (!zombie[pid] && !mine[pid]) print pid
            break
          }
    }'
}

# process_is_of_job PID CONF CLUSTER: its environment says that a node of this cluster started it.
# A SLURM_CONF alone is not enough (a person's shell has it), nor is one beside the job id of another cluster.
# CLUSTER is empty where the configuration was deleted under a running cluster.
process_is_of_job() {
  local -r environ="/proc/$1/environ" conf="$2" cluster="$3"
  local name=""
  grep -qzxsF -e "SLURM_CONF=$conf" "$environ" || return 1
  { read -r name <"/proc/$1/comm"; } 2>/dev/null || return 1
  [[ "$name" != slurmstepd ]] || return 0
  grep -qzsE '^(SLURM_JOB_ID|SLURMD_NODENAME)=.' "$environ" || return 1
  [[ -z "$cluster" ]] || grep -qzxsF -e "SLURM_CLUSTER_NAME=$cluster" "$environ" || ! grep -qzsE '^SLURM_CLUSTER_NAME=' "$environ"
}

# processes_end CONF: kills all that cluster_processes names until none is left.
processes_end() {
  local -r conf="$1"
  local -a pids
  local try
  for ((try = 0; try < 600; try++)); do
    mapfile -t pids < <(cluster_processes "$conf")
    [[ "${#pids[@]}" -gt 0 ]] || return 0
    kill -s KILL "${pids[@]}" 2>/dev/null || true
    sleep 0.05
  done
  fail "these processes of the cluster do not end: ${pids[*]}"
}
