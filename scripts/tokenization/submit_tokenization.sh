#!/bin/bash
# Tokenizes a dataset on Slurm: one job, on one node, for every dump that prepare_dumps.py made.
#   TOKENIZER=... TOKENIZER_NAME=... scripts/tokenization/submit_tokenization.sh
# CLUSTER=NAME: in that site's surroundings. Options for all jobs (partition, account, time) stand in tokenize.sh, or in sbatch's own variables, for
# example SBATCH_PARTITION. The same from YAML, with a limit on jobs at a time: launchers/submit_tokenization.py.
set -euo pipefail
unset CDPATH # with it `cd` prints

# Settings: the first five must be given, here behind :- or in the environment, which holds over this block. The others
# may be: behind the # stands what holds where they are empty.
export TOKENIZER="${TOKENIZER:-}"                                           # tokenizer.json, its folder, or a hub name
export TOKENIZER_NAME="${TOKENIZER_NAME:-}"                                 # names the output folder and the jobs
export DATASET_NAME="${DATASET_NAME:-}"                                     # likewise
export PATH_TO_PREPROCESSING_METADATA="${PATH_TO_PREPROCESSING_METADATA:-}" # as written by prepare_dumps.py
export PATH_TO_OUTPUT_FOLDER="${PATH_TO_OUTPUT_FOLDER:-}"                   # gets TOKENIZER_NAME/DATASET_NAME/dump-i
export COLUMN_KEY="${COLUMN_KEY:-}"                                         # text; column of the text
export EOS_TOKEN="${EOS_TOKEN:-}"                                           # none; ends a document in place of the tokenizer's own
export APPEND_EOD="${APPEND_EOD:-}"                                         # yes; no, auto
export TOKENIZER_ENGINE="${TOKENIZER_ENGINE:-}"                             # auto; or huggingface alone
export ON_ERROR="${ON_ERROR:-}"                                             # fail; skip-file, skip-line: leave out what cannot be read
export NUMBER_OF_DATATROVE_TASKS="${NUMBER_OF_DATATROVE_TASKS:-}"           # 20; shards of a dump
export NUMBER_OF_DATATROVE_WORKERS="${NUMBER_OF_DATATROVE_WORKERS:-}"       # -1; shards at a time; -1: all tasks
export TOKENIZER_BATCH_BYTES="${TOKENIZER_BATCH_BYTES:-}"                   # 4000000; see relayrun dumps tune
export PATH_TO_LOGS="${PATH_TO_LOGS:-}"                                     # none; logs/ beside scripts/

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/lib/python.sh"

plan=$("$PYTHON" -m relayrun.tokens.tokenize begin)
mapfile -t lines <<<"$plan"
logs=${lines[0]}
name=${lines[1]}
source "$here/lib/site.sh"
submit() {
  local dump job
  for dump in "$@"; do
    job=$(sbatch --parsable "${site[@]}" --job-name="$name" --output="$logs/R-%x-%j.out" --error="$logs/R-%x-%j.err" \
      "$here/tokenize.sh" "$dump")
    echo "${job%%;*} $dump" # a federation adds the name of the cluster
  done
}
submit "${lines[@]:2}" | "$PYTHON" -m relayrun.tokens.tokenize record
echo "logs: $logs"
