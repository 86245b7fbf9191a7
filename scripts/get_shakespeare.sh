#!/usr/bin/env bash
# Fetches nanoGPT's Shakespeare text (1.1 MB) and prepares it as configs/shakespeare.yaml wants it.
set -euo pipefail
cd "$(dirname "$0")/.."

mkdir -p data/sources
curl --fail --location --silent --show-error --output data/sources/shakespeare.txt \
  https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt
.venv/bin/pretrain prepare data/sources/shakespeare.txt --output data/shakespeare --tokenizer byte --val-split tail --val-fraction 0.1
