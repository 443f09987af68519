# Shared part of scripts/demo and scripts/test: sourced, not run.
#
# `venv_ready` makes .venv in the root of the repository and installs the package with its dev
# extra, in the versions of constraints.txt. It does nothing when that was done already and neither
# pyproject.toml nor constraints.txt nor the Python changed since (a stamp in .venv says so).
# After `use_torch VERSION` it is .venv-torch-VERSION, with that torch and all else the same; after
# `use_extra NAME` it is .venv-NAME, with that extra instead of dev.
#
# PYTHON       the interpreter to make it with (default: python3)
# PIP_*        pip's own settings are honoured, for example
#              PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu gets torch without CUDA

say() { printf '\n== %s\n' "$*"; }

die() {
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
  exit 1
}

# Print the comment block at the top of the calling script.
print_header() { sed -n '2,/^[^#]/ { /^[^#]/d; s/^# \{0,1\}//; p; }' "$0"; }

VENV=.venv
TORCH=
EXTRA=dev

# Call it before `venv_ready`.
use_torch() {
  [[ $1 =~ ^[0-9][0-9a-z.+]*$ ]] || die "no version of torch: $1"
  TORCH=$1 VENV=.venv-torch-$1
}

# Call it before `venv_ready`.
use_extra() { EXTRA=$1 VENV=.venv-$1; }

# Print the versions to install.
pinned() { sed "${TORCH:+s/^torch==.*/torch==$TORCH/}" constraints.txt; }

venv_stamp() {
  {
    pwd
    "$1" -c 'import sys; print(sys.version)'
    cat pyproject.toml
    pinned
  } | "$1" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

# Call it in the root of the repository. Afterwards $VENV/bin/python has everything.
venv_ready() {
  local python=${PYTHON:-python3} lock
  [ -f pyproject.toml ] && [ -f constraints.txt ] || die "not in the root of the repository: $PWD"
  mkdir -p "$VENV"
  # two scripts at once on a fresh machine: the second waits for the first one's install
  if command -v flock >/dev/null; then
    exec {lock}>"$VENV/.lock"
    flock "$lock"
  fi
  if [ -x "$VENV/bin/python" ] &&
    [ "$(cat "$VENV/.stamp" 2>/dev/null)" = "$(venv_stamp "$VENV/bin/python")" ]; then
    say "$VENV is up to date"
  else
    rm -f "$VENV/.stamp"
    if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
      command -v "$python" >/dev/null || die "no $python; set PYTHON to a Python 3.10 or newer"
      "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        die "$("$python" --version) is too old; set PYTHON to a Python 3.10 or newer"
      say "making $VENV with $("$python" --version)"
      "$python" -m venv "$VENV" || die "could not make $VENV (on Debian: apt install python3-venv)"
    fi
    say "installing, a minute or two"
    pinned >"$VENV/constraints.txt"
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check \
      -c "$VENV/constraints.txt" -e ".[$EXTRA]"
    "$VENV/bin/python" -c 'import torch, dcp_checkfreq' ||
      die "the installed package cannot be imported"
    venv_stamp "$VENV/bin/python" >"$VENV/.stamp"
  fi
  if [ -n "${lock:-}" ]; then exec {lock}>&-; fi
}
