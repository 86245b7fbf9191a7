#!/usr/bin/env bash
# Sets up, lints, checks types, runs the tests; with --all, as CI does, also the few that take half of the time.
# Other arguments go to pytest: scripts/test.sh tests/test_loader.py
set -euo pipefail
cd "$(dirname "$0")/.."

if [ "${1-}" = --all ]; then
  shift
  set -- -m "not slow" "$@"
fi

./scripts/setup.sh
export PATH="$PWD/.venv/bin:$PATH" HF_HUB_OFFLINE=1 WANDB_MODE=offline
ruff check .
ruff format --check .
mypy
shellcheck scripts/*.sh slurm/*.sbatch slurm/*.sh .ci/run
# Two at a time, as launches start one process after the other. A file stays together, with what its tests share; the longest come first.
pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder "$@"
