#!/usr/bin/env bash
# GRPO of Qwen3.5-27B on GSM8K with one GPU of 80 GB, all parameters trained.
#   bash examples/install.sh && . .venv/bin/activate && python examples/prepare_gsm8k.py data/gsm8k
#   MODEL_PATH=/path/to/Qwen3.5-27B bash examples/run_qwen3_5_27b_grpo.sh [hydra overrides]
# COMPUTED by megatrain_verl.resources, not measured: the update of a step with 64 rows of 1,536 tokens takes 27 s or
# more on an H200, with 28 GB of GPU memory and 478 GB of host memory; generation and log-probs come on top.
# Logs, metrics and the trained model: outputs/qwen3_5_27b_grpo_80gb. A stopped run starts again.
set -euo pipefail
exec bash "$(dirname "${BASH_SOURCE[0]}")/run_grpo.sh" qwen3_5_27b_grpo_80gb "$@"
