#!/usr/bin/env bash
# The log of a job, which its script opens itself: a job whose output file Slurm cannot open never starts, and nobody
# says so. A part of every rendered job script, behind again.sh.
#
# Needs RELAYRUN_LOG_FOLDER, RELAYRUN_RUN_DIR, RELAYRUN_JOB_NAME.

appendable() { # file, without its suffix
  { mkdir -p "${1%/*}" && : >>"$1.out" && : >>"$1.err"; } 2>&1
}

# Append to the log; where its folder is away, to one in the run directory, on the node, or the node's own.
open_log() {
  local -r name="${RELAYRUN_JOB_NAME}-${SLURM_JOB_ID:-${RELAYRUN_LOCAL_JOB_ID:-}}"
  local folder why="" failure
  for folder in "${RELAYRUN_LOG_FOLDER}" "${RELAYRUN_RUN_DIR}" "${TMPDIR:-/tmp}"; do
    if failure="$(within 60 appendable "${folder}/${name}")"; then
      exec >>"${folder}/${name}.out" 2>>"${folder}/${name}.err"
      break
    fi
    why+="${failure:-${folder}: no answer within 60 s}; "
    folder=""
  done
  [[ -n "${folder}" ]] || exec > >(logger -t "${name}") 2>&1
  [[ -n "${why}" ]] || return 0
  echo "[relayrun $(date +%FT%T)] ${why}this log is in ${folder:-the journal} of ${SLURMD_NODENAME:-$(uname -n)}" >&2
}
[[ -n "${relayrun_log_is_open:-}" ]] || open_log
