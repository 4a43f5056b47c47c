# shellcheck shell=bash
# The configuration of one test cluster below its folder. Sourced by test_cluster.sh.
#   nodes (the node names, one a line; written first, marks the folder as a cluster's)
#   etc/slurm.conf etc/gres.conf etc/gpu0..   state/ spool/ run/ log/ plugins/
#   etc/slurmdbd.conf etc/mariadb.cnf db/     of a cluster with accounting (db/ as long as it is up)

readonly CLUSTER_FOLDERS=(etc state spool run log plugins db)

# Refuses a folder that Slurm could not work in, or that holds something else than a cluster.
conf_check_folder() {
  local -r dir="$1"
  # Slurm cuts the path of a GPU at a blank, and gives the others a meaning: comments, host lists, %n, plugin folders.
  if [[ "$dir" == *[][:space:][:cntrl:]\[\"\'\#%,:\\\*\?\{\}]* ]]; then
    fail "$dir: Slurm cannot work in a folder whose path has a blank or one of [ ] \" ' # % , : \\ * ? { }; name another"
  fi
  # The step sockets spool/nX/nX_JOB.STEP must fit the 107 bytes of a unix socket's address.
  local -r bytes="$(printf '%s' "$dir" | wc -c)"
  ((bytes <= 72)) || fail "$dir: the path has $bytes bytes; a cluster's unix sockets allow 72; take a shorter one"
  if [[ -e "$dir" && ! -d "$dir" ]]; then
    fail "$dir: not a folder"
  fi
  if [[ -d "$dir" && ! -e "$dir/nodes" && -n "$(ls -A -- "$dir")" ]]; then
    fail "$dir: holds files that are not a test cluster's; take an empty or new folder"
  fi
}

# conf_write DIR ACCOUNTING NODES CPUS GPUS KILL_WAIT GRACE NODE_TIMEOUT FIRST_JOB_ID PORT_BASE: removes what an earlier cluster left there, writes the new.
conf_write() {
  local -r dir="$1" accounting="$2" nodes="$3" cpus="$4" gpus="$5" kill_wait="$6" grace="$7" node_timeout="$8" first="$9" base="${10}"
  local -r last=$((nodes - 1))
  local -r user="$(id -un)"
  local folder node gpu plugins
  for ((node = 0; node < nodes; node++)); do
    printf 'n%d\n' "$node"
  done >"$dir/nodes"
  for folder in "${CLUSTER_FOLDERS[@]}"; do
    rm -rf -- "${dir:?}/$folder"
    mkdir -p -- "$dir/$folder"
  done
  # The GPUs must be character devices (else CUDA_VISIBLE_DEVICES stays empty); links to one need no mknod.
  for ((gpu = 0; gpu < gpus; gpu++)); do
    ln -s /dev/null "$dir/etc/gpu$gpu"
  done
  # Debian ships the mpi/pmix plugin without its library: left out, for it fills every log with errors.
  plugins="$(slurm_plugin_dir)" || fail "no folder with Slurm's plugins"
  ln -s "$plugins"/*.so "$dir/plugins/"
  rm -f -- "$dir"/plugins/mpi_pmix*
  printf 'NodeName=n[0-%d] Name=gpu File=%s/etc/gpu[0-%d]\n' "$last" "$dir" "$((gpus - 1))" >"$dir/etc/gres.conf"
  for ((node = 0; node < nodes; node++)); do
    mkdir -- "$dir/spool/n$node"
  done
  local storage="AccountingStorageType=accounting_storage/none"
  if [[ "$accounting" == 1 ]]; then
    conf_accounting "$dir" "$user" $((base + nodes + 1))
    storage="AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=localhost
AccountingStoragePort=$((base + nodes + 1))
AccountingStorageEnforce=limits,qos"
  fi
  conf_slurm "$dir" "$base" "$nodes" "$cpus" "$gpus" "$kill_wait" "$grace" "$node_timeout" "$first" "$user" "$storage" >"$dir/etc/slurm.conf"
}

conf_slurm() {
  local -r dir="$1" base="$2" nodes="$3" cpus="$4" gpus="$5" kill_wait="$6" grace="$7" node_timeout="$8" first="$9" user="${10}" storage="${11}"
  local -r last=$((nodes - 1))
  cat <<END
ClusterName=test$base
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=$base
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
CredType=cred/munge
PluginDir="$dir/plugins"
StateSaveLocation="$dir/state"
SlurmdSpoolDir="$dir/spool/%n"
SlurmctldPidFile="$dir/run/slurmctld.pid"
SlurmdPidFile="$dir/run/slurmd-%n.pid"
SlurmctldLogFile="$dir/log/slurmctld.log"
SlurmdLogFile="$dir/log/slurmd-%n.log"
SlurmctldDebug=verbose
MailProg=/bin/true

# One machine, no cgroups; every node believes that it has what is written below.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
$storage
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu

# Tests wait for faults: seconds, not the minutes of a real site.
AuthInfo=cred_expire=5
ReturnToService=2
SlurmdTimeout=$node_timeout
SlurmctldTimeout=10
MessageTimeout=20
TCPTimeout=2
InactiveLimit=0
KillWait=$kill_wait
MinJobAge=3600
FirstJobId=$first
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=100000,bf_interval=1,bf_continue,bf_window=43200,batch_sched_delay=0
PriorityType=priority/basic

# A job in high takes the nodes of one in low, which gets its --signal, GraceTime seconds, and is requeued.
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal

NodeName=n[0-$last] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[$((base + 1))-$((base + nodes))] CPUs=$cpus RealMemory=16000 Gres=gpu:$gpus Feature=test State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=10
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=20 PreemptMode=OFF
PartitionName=low Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=$grace
END
}

# conf_patient DIR: the processors of one machine do not answer for very many nodes within a test's seconds.
conf_patient() {
  sed -i 's/^\(MessageTimeout\|TCPTimeout\|SlurmctldTimeout\)=.*/\1=100/; s/_interval=1,/_interval=30,/g' "$1/etc/slurm.conf"
}

# conf_topology DIR NODES: Slurm's order of nodes is another one than that of their names.
conf_topology() {
  local -r dir="$1" last=$(($2 - 1)) half=$((($2 + 1) / 2))
  {
    echo "SwitchName=s0 Nodes=n[$half-$last]"
    echo "SwitchName=s1 Nodes=n[0-$((half - 1))]"
    echo "SwitchName=top Switches=s[0-1]"
  } >"$dir/etc/topology.conf"
  echo "TopologyPlugin=topology/tree" >>"$dir/etc/slurm.conf"
}

# conf_apart DIR: a slurmd with process ids of its own cannot write the pid file that the machine reads.
conf_apart() {
  sed -i 's|^SlurmdPidFile=.*|SlurmdPidFile="'"$1"'/run/inside-%n.pid"|' "$1/etc/slurm.conf"
  : >"$1/etc/apart"
}

# conf_accounting DIR USER PORT: slurmdbd, and a database that only this user reaches, through a socket in db/.
conf_accounting() {
  local -r dir="$1" user="$2" port="$3"
  chmod 700 "$dir/db"
  cat >"$dir/etc/mariadb.cnf" <<END
[mariadbd]
user=$user
datadir=$dir/db/data
tmpdir=$dir/db
socket=$dir/db/socket
pid-file=$dir/run/mariadbd.pid
log-error=$dir/log/mariadbd.log
skip-networking
skip-name-resolve
performance-schema=OFF
innodb-buffer-pool-size=32M
innodb-log-file-size=8M
innodb-flush-log-at-trx-commit=0
innodb-lock-wait-timeout=900
END
  (
    umask 077
    cat >"$dir/etc/slurmdbd.conf" <<END
AuthType=auth/munge
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort=$port
SlurmUser=$user
PluginDir="$dir/plugins"
PidFile="$dir/run/slurmdbd.pid"
LogFile="$dir/log/slurmdbd.log"
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_accounting
END
  )
}
