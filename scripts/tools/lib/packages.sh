# shellcheck shell=bash
# Installing from Debian's packages. Sourced, by what has a function `fail`.

# Runs a command as root.
as_root() {
  if [[ "$EUID" -eq 0 ]]; then
    "$@"
  else
    sudo -- "$@"
  fi
}

# install_packages WHY OTHERWISE PACKAGE...: what is missing, what a person does where there is no apt-get, what is installed.
install_packages() {
  local -r why="$1" otherwise="$2"
  shift 2
  command -v apt-get >/dev/null || fail "$why; there is no apt-get here: $otherwise"
  [[ "$EUID" -eq 0 ]] || command -v sudo >/dev/null ||
    fail "$why; neither root nor sudo here: ask root for apt-get install --no-install-recommends $*"
  as_root apt-get update -qq || fail "$why; apt-get update failed (see above)"
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >&2 ||
    fail "$why; apt-get install failed (see above)"
}
