# shellcheck shell=bash
# Candidates for the last of its arguments, one a line; nothing where it is a file of any kind. Plain Bash: no Python
# starts while somebody types. The lists above are relayrun's commands, as they were when this was written.

relayrun_project() {
  local folder=${PWD}
  while [[ -n ${folder} && ! -f ${folder}/.relayrun ]]; do
    folder=${folder%/*}
  done
  printf '%s' "${folder:-${relayrun_checkout:-${PWD}}}"
}

relayrun_candidates_of() { # kind, current word
  local each project
  case $1 in
    run)
      project=$(relayrun_project)
      for each in "${project}"/logs/runs/*/*/; do
        [[ -d ${each} ]] || continue
        each=${each#"${project}/logs/runs/"}
        printf '%s\n' "${each%/}"
      done
      ;;
    config)
      for each in "$2"*; do
        if [[ -d ${each} ]]; then
          printf '%s/\n' "${each}"
        elif [[ ${each} == *.yaml || ${each} == *.yml ]]; then
          printf '%s\n' "${each}"
        fi
      done
      ;;
    config-or-run)
      relayrun_candidates_of config "$2"
      relayrun_candidates_of run "$2"
      ;;
    setting) relayrun_settings ;;
    override) relayrun_settings | sed 's/$/=/' ;;
    word:*) tr ' ' '\n' <<<"${1#word:}" ;;
  esac
}

relayrun_candidates() { # words behind `relayrun`, the last of which is being typed
  local path="" word kind="" place=0 current=${!#}
  while (($# > 1)); do
    word=$1
    shift
    if [[ -n ${kind} ]]; then # the value of an option
      kind=""
    elif [[ ${word} == = ]]; then # Bash parts words at it: the value is the user's own
      kind="file"
    elif [[ ${word} == -* ]]; then
      kind=$(relayrun_kind "${path} ${word}")
    elif [[ -n $(relayrun_words "${path:+${path} }${word}") ]]; then
      path=${path:+${path} }${word}
    else
      place=$((place + 1))
    fi
  done
  {
    if [[ -n ${kind} ]]; then
      relayrun_candidates_of "${kind}" "${current}"
    elif [[ ${current} == -* ]]; then
      relayrun_words "${path}" | grep -e '^-'
    else
      relayrun_words "${path}" | grep -ve '^-'
      relayrun_candidates_of "$(relayrun_kind "${path} ${place}")" "${current}"
    fi
  } | while IFS= read -r word; do
    [[ ${word} != "${current}"* ]] || printf '%s\n' "${word}"
  done
}
