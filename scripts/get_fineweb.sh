#!/usr/bin/env bash
# Fetches FineWeb, tokenised for GPT-2 in llm.c's format, into data/fineweb.
# usage: scripts/get_fineweb.sh [shards]     each holds 100 M tokens (200 MB); 103 are all of it, and the default
set -euo pipefail
cd "$(dirname "$0")/.."

shards=${1:-103}
files=(fineweb_val_000000.bin)
for ((i = 1; i <= shards; i++)); do files+=("$(printf 'fineweb_train_%06d.bin' "$i")"); done
.venv/bin/hf download kjj0/fineweb10B-gpt2 "${files[@]}" --repo-type dataset --local-dir data/fineweb
.venv/bin/pretrain inspect data/fineweb
