# Shared part of scripts/demo and scripts/test: sourced, not run.
#
# `venv_ready` makes .venv in the root of the repository and installs the package with its dev
# extra, in the versions of constraints.txt. It does nothing when that was done already and neither
# pyproject.toml nor constraints.txt nor the Python changed since (a stamp in .venv says so).
#
# PYTHON       the interpreter to make .venv with (default: python3)
# PIP_*        pip's own settings are honoured, for example
#              PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu gets torch without CUDA

say() { printf '\n== %s\n' "$*"; }

die() {
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
  exit 1
}

# Print the comment block at the top of the calling script.
print_header() { sed -n '2,/^[^#]/ { /^[^#]/d; s/^# \{0,1\}//; p; }' "$0"; }

venv_stamp() {
  {
    pwd
    "$1" -c 'import sys; print(sys.version)'
    cat pyproject.toml constraints.txt
  } | "$1" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

# Call it in the root of the repository. Afterwards .venv/bin/python has everything.
venv_ready() {
  local python=${PYTHON:-python3} lock
  [ -f pyproject.toml ] && [ -f constraints.txt ] || die "not in the root of the repository: $PWD"
  mkdir -p .venv
  # two scripts at once on a fresh machine: the second waits for the first one's install
  if command -v flock >/dev/null; then
    exec {lock}>.venv/.lock
    flock "$lock"
  fi
  if [ -x .venv/bin/python ] && [ "$(cat .venv/.stamp 2>/dev/null)" = "$(venv_stamp .venv/bin/python)" ]; then
    say ".venv is up to date"
  else
    rm -f .venv/.stamp
    if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
      command -v "$python" >/dev/null || die "no $python; set PYTHON to a Python 3.10 or newer"
      "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        die "$("$python" --version) is too old; set PYTHON to a Python 3.10 or newer"
      say "making .venv with $("$python" --version)"
      "$python" -m venv .venv || die "could not make .venv (on Debian: apt install python3-venv)"
    fi
    say "installing, a minute or two"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check \
      -c constraints.txt -e '.[dev]'
    .venv/bin/python -c 'import torch, dcp_checkfreq' || die "the installed package cannot be imported"
    venv_stamp .venv/bin/python >.venv/.stamp
  fi
  if [ -n "${lock:-}" ]; then exec {lock}>&-; fi
}
