#!/usr/bin/env bash
# Is an interrupted run the uninterrupted one, bit for bit? Kills, damage and full disks at random, for as long as you like:
# scripts/conformance.sh --minutes 30 [--seed N] [--strategies ddp,fsdp2] [--processes 4]. Exit status 1 if anything was lost.
set -euo pipefail
cd "$(dirname "$0")/.."

./scripts/setup.sh
exec .venv/bin/python scripts/conformance.py "$@"
