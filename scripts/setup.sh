#!/usr/bin/env bash
# Makes .venv with the pinned versions and installs this checkout into it. Safe to call again: does nothing when up to date.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "pretrain needs Python 3.11 or newer; $("$python" --version) was found. Set PYTHON=/path/to/python3.11." >&2
  exit 2
}

stamp=.venv/installed.txt
wanted=$(cat pyproject.toml scripts/constraints.txt scripts/setup.sh)
# A stamp outlives the Python that .venv/bin/python points to, and a move of the checkout.
imported='import os, pretrain; raise SystemExit(not os.path.samefile(pretrain.__file__, "pretrain/__init__.py"))'
[ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && .venv/bin/python -I -c "$imported" 2> /dev/null && exit 0

echo "Installing into .venv (about a minute; torch is the large one) ..."
# Anew where it is dead, has no pip because making it was interrupted, or was moved: then its programs start the Python of the old place.
if ! pip=$(.venv/bin/python -m pip --version 2> /dev/null) || [ "$(.venv/bin/pip --version 2> /dev/null)" != "$pip" ]; then
  "$python" -m venv --clear .venv
fi
install() { .venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint scripts/constraints.txt "$@"; }
install "torch==$(sed -n 's/^torch==//p' scripts/constraints.txt)"   # first and pinned: another package would pull in its own choice of build
install --editable '.[quickstart,dev]'
printf '%s' "$wanted" > "$stamp"
