#!/usr/bin/env bash
# GRPO of Qwen2.5-7B on GSM8K with one GPU, all parameters trained: verl, vLLM and the streaming engine.
#   bash examples/install.sh && . .venv/bin/activate && python examples/prepare_gsm8k.py data/gsm8k
#   MODEL_PATH=/path/to/Qwen2.5-7B-Instruct bash examples/run_qwen2_5_7b_grpo.sh [hydra overrides]
# TRAIN_FILE and TEST_FILE name other verl parquet files, CUDA_VISIBLE_DEVICES the GPU. A stopped run goes on when
# started again. Logs, metrics and checkpoints: outputs/qwen2_5_7b_grpo_80gb.
set -euo pipefail
exec bash "$(dirname "${BASH_SOURCE[0]}")/run_grpo.sh" qwen2_5_7b_grpo_80gb "$@"
