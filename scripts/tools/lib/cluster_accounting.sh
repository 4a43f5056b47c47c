# shellcheck shell=bash
# Accounting of one test cluster: MariaDB and slurmdbd below its folder. Sourced by test_cluster.sh.

has_accounting() {
  [[ -e "$1/etc/slurmdbd.conf" ]]
}

# accounting_start DIR: an empty database, slurmdbd, and what the tests' users are given accounts in.
accounting_start() {
  local -r dir="$1"
  local try cluster
  mariadb-install-db --defaults-file="$dir/etc/mariadb.cnf" --auth-root-authentication-method=normal --skip-test-db \
    >"$dir/run/mariadb-install-db.out" 2>&1 || fail "no database could be made; see $dir/run/mariadb-install-db.out"
  daemon_start "$dir" mariadbd ""
  daemon_start "$dir" slurmdbd ""
  for ((try = 0; try < 600; try++)); do
    ! sacctmgr --noheader list cluster >/dev/null 2>&1 || break
    daemon_pid "$dir" slurmdbd >/dev/null || fail "slurmdbd has ended; see $dir/log/slurmdbd.log"
    ((try < 599)) || fail "slurmdbd runs and does not answer; see $dir/log/slurmdbd.log"
    sleep 0.1
  done
  # before the controller, which asks for its cluster as it starts
  cluster="$(sed -n 's/^ClusterName=//p' "$dir/etc/slurm.conf")"
  {
    sacctmgr --immediate add cluster "$cluster"
    sacctmgr --immediate add account team Cluster="$cluster"
    sacctmgr --immediate add qos one MaxSubmitJobsPerUser=1
    sacctmgr --immediate modify account team set qos=normal,one
  } >"$dir/run/sacctmgr.out" 2>&1 || fail "the accounts could not be made; see $dir/run/sacctmgr.out"
}

accounting_stop() {
  local -r dir="$1"
  daemon_stop "$dir" TERM slurmdbd
  daemon_stop "$dir" TERM mariadbd
}
