#!/usr/bin/env bash
# Makes the environment of this checkout: .venv with the locked packages, the demo model, and what tests need beside.
# Repeating it is cheap: packages are installed again only when the lock or the project file has changed.
#
#   PYTHON        the Python 3.11 to use (default: python3.11, else python3)
#   TORCH_INDEX   package index that has the pinned CPU build of torch, used when pip finds none by its own
#                 configuration (default: the CPU index that PyTorch's install page names)
#   VENV          where the environment goes (default: .venv)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

LOCK=cluster/requirements-cpu.lock
VENV=${VENV:-.venv}
TORCH_INDEX=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
STAMP=$VENV/.installed
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

say() { printf '[setup] %s\n' "$*"; }
die() { printf '[setup] error: %s\n' "$*" >&2; exit 1; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3.11 python3; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  die "Python 3.11 with venv is needed and was not found; install it, or name it: PYTHON=/path/to/python3.11 make setup"
}

make_venv() {
  if "$VENV/bin/python" -c 'import sys, pip; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then return; fi
  local python
  python=$(find_python)
  say "making $VENV with $($python --version)"
  "$python" -m venv --clear "$VENV"
}

# The hash of everything that decides what is installed.
wanted() { sha256sum "$LOCK" pyproject.toml "${BASH_SOURCE[0]}" | sha256sum | cut -d' ' -f1; }

install_torch() {
  local pin log
  pin=$(grep -E '^torch==' "$LOCK")
  if "$VENV/bin/python" -c "from importlib.metadata import version; assert 'torch==' + version('torch') == '$pin'" 2>/dev/null
  then return; fi
  say "installing $pin"
  log=$(mktemp)
  if ! "$VENV/bin/pip" install -qq --no-deps "$pin" 2>"$log" &&
    ! "$VENV/bin/pip" install -qq --no-deps --index-url "$TORCH_INDEX" "$pin" 2>>"$log"; then
    tail -n 3 "$log" >&2
    rm -f "$log"
    die "$pin (a CPU build) was found neither by pip's own configuration nor at TORCH_INDEX=$TORCH_INDEX; set TORCH_INDEX to an index that has it"
  fi
  rm -f "$log"
}

install_packages() {
  if [[ -f $STAMP && $(<"$STAMP") == "$(wanted)" ]]; then
    say "packages are up to date"
    return
  fi
  rm -f "$STAMP"
  install_torch
  say "installing $(grep -c == "$LOCK") packages from $LOCK"
  "$VENV/bin/pip" install -qq --no-deps -r "$LOCK" || die "a package of $LOCK could not be installed (see above)"
  "$VENV/bin/pip" install -qq --no-deps --no-build-isolation --editable . || die "pd_serve itself could not be installed"
  say "checking that transformers, vLLM and Ray can be imported"
  "$VENV/bin/python" -c 'import transformers, vllm, ray' >/dev/null 2>"$VENV/.import.log" ||
    { tail -n 3 "$VENV/.import.log" >&2; die "the installed packages cannot be imported"; }
  wanted >"$STAMP"
}

# Debian packages that tests use: "command package" a line.
install_debian_packages() {
  local command package missing=()
  while read -r command package; do
    [[ -z $command || $command == \#* ]] || command -v "$command" >/dev/null || missing+=("$package")
  done <cluster/test-packages.txt
  if [[ ${#missing[@]} -eq 0 ]]; then return; fi
  if [[ $(id -u) -eq 0 ]] && command -v apt-get >/dev/null; then
    say "installing Debian packages for tests: ${missing[*]}"
    if { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"; } \
      >/dev/null 2>&1 </dev/null; then return; fi
  fi
  printf '\n[setup] WARNING: tests that need these will say so and be skipped: %s\n' "${missing[*]}" >&2
  printf '[setup] WARNING: as root: apt-get install %s\n\n' "${missing[*]}" >&2
}

main() {
  local started=$SECONDS
  mkdir -p .cache
  if command -v flock >/dev/null; then # two at once take turns
    exec 9>.cache/setup.lock
    flock 9
  fi
  make_venv
  install_packages
  say "checking the demo model"
  "$VENV/bin/pd-serve" model fetch
  if [[ ${1:-} == --with-test-packages ]]; then install_debian_packages; fi
  say "ready after $((SECONDS - started)) s"
}

main "$@"
