# shellcheck shell=bash
# The site of the jobs: CLUSTER=NAME, a file of configs/clusters/, gives its account and partition, environment, modules,
# container, Python and command prefix to them. Sourced by scripts/tokenization/submit_*.sh behind python.sh, with $logs.
site=() # options of sbatch
if [[ -n ${CLUSTER:-} ]]; then
  export RELAYRUN_SITE=${logs:?}/site-$$.sh # the jobs source it
  "$PYTHON" -m relayrun.tokens.tokenize site "$CLUSTER" "$RELAYRUN_SITE"
  # shellcheck disable=SC2034  # whoever sources this reads it
  mapfile -d '' -t site <"$RELAYRUN_SITE.options"
fi
