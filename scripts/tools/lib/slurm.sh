# shellcheck shell=bash
# What the tests need of the machine: Slurm's programs and plugins, strace, and an answering munged. Sourced.

# Distributions put the daemons and the plugins here; a login PATH often lacks the former.
PATH="${PATH:-/usr/bin:/bin}:/usr/sbin:/sbin"
export PATH
readonly SLURM_PROGRAMS=(slurmctld slurmd sbatch srun squeue scontrol scancel sinfo munge unmunge munged strace)
readonly ACCOUNTING_PROGRAMS=(slurmdbd sacct sacctmgr mariadbd mariadb-install-db my_print_defaults)

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# Prints the folder with Slurm's plugins, beside the daemons or where distributions put them; status 1 where there is none.
slurm_plugin_dir() {
  local file prefix
  prefix="$(command -v slurmctld)" || return 1
  for file in "${prefix%/*/*}"/lib{,64}/slurm/select_cons_tres.so /usr/lib/*/slurm-wlm/select_cons_tres.so /usr/lib/*/slurm/select_cons_tres.so \
    /usr/lib{64,}/slurm/select_cons_tres.so /usr/local/lib/slurm/select_cons_tres.so; do
    if [[ -e "$file" ]]; then
      dirname "$file"
      return 0
    fi
  done
  return 1
}

# Prints what is missing, one thing a line; nothing where Slurm and munge are complete.
slurm_missing() {
  local program
  for program in "${SLURM_PROGRAMS[@]}"; do
    [[ -x "$(command -v "$program")" ]] || printf 'program %s\n' "$program"
  done
  slurm_plugin_dir >/dev/null || echo "plugin select_cons_tres.so"
}

# The same for Slurm's accounting.
accounting_missing() {
  local program plugins
  for program in "${ACCOUNTING_PROGRAMS[@]}"; do
    [[ -x "$(command -v "$program")" ]] || printf 'program %s\n' "$program"
  done
  plugins="$(slurm_plugin_dir)" && [[ -e "$plugins/accounting_storage_mysql.so" ]] ||
    echo "plugin accounting_storage_mysql.so"
}

munge_answers() {
  munge -n 2>/dev/null | unmunge >/dev/null 2>&1
}

# Makes munged answer. It is shared by everything on the machine: started where it does not answer, never stopped.
munge_up() {
  munge_answers && return 0
  [[ "$EUID" -eq 0 ]] || fail "munged does not answer, and only root can start it: sudo systemctl start munge"
  # Two clusters that come up at once must not both start it.
  (
    flock 9
    munge_answers || munge_start
  ) 9>/run/relayrun-munge.lock
}

munge_start() {
  [[ -d /etc/munge ]] || fail "/etc/munge is missing: install the package munge"
  if [[ ! -s /etc/munge/munge.key ]]; then
    (umask 077 && head -c 1024 /dev/urandom >/etc/munge/munge.key)
  fi
  mkdir -p /run/munge /var/log/munge /var/lib/munge
  # munged refuses a key, log, seed or socket folder of another owner, or one that others may write.
  chown -R munge:munge /etc/munge /run/munge /var/log/munge /var/lib/munge
  chmod 700 /etc/munge /var/log/munge
  chmod 600 /etc/munge/munge.key
  chmod 755 /run/munge
  chmod 711 /var/lib/munge
  # A socket that nobody answers, left by a crash, would stop the new one.
  rm -f /run/munge/munge.socket.2 /run/munge/munge.socket.2.lock
  # It outlives the script: a session of its own, a clean environment, no inherited lock.
  env -i PATH="$PATH" setsid setpriv --reuid munge --regid munge --init-groups munged >/dev/null 9>&- ||
    fail "munged does not start; see /var/log/munge/munged.log"
  local try
  for ((try = 0; try < 100; try++)); do
    munge_answers && return 0
    sleep 0.1
  done
  fail "munged was started and does not answer after 10 s; see /var/log/munge/munged.log"
}
