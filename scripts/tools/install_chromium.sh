#!/usr/bin/env bash
# Installs the browser that tests look at pages with: headless Chromium from Debian's packages.
#   scripts/tools/install_chromium.sh           installs it where there is none
#   scripts/tools/install_chromium.sh --check   only says whether it is missing; exit status 1 if it is
# Needs root or sudo.
set -euo pipefail
unset CDPATH # with it `cd` prints

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=scripts/tools/lib/packages.sh
source "$here/lib/packages.sh"

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

browser() {
  command -v chromium || command -v chromium-browser || command -v google-chrome
}

main() {
  if ! browser >/dev/null; then
    [[ "${1:-}" != --check ]] || fail "Chromium is missing; install it: scripts/tools/install_chromium.sh"
    install_packages "missing: Chromium" "install Chromium yourself" chromium fonts-dejavu-core
    browser >/dev/null || fail "the package chromium is installed, yet there is no program chromium"
  fi
  echo "Chromium is installed: $(browser)"
}

main "$@"
