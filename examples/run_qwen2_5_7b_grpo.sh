#!/usr/bin/env bash
# GRPO of Qwen2.5-7B on GSM8K with one GPU, all parameters trained: verl, vLLM and the streaming engine.
#   bash examples/install.sh && . .venv/bin/activate && python examples/prepare_gsm8k.py data/gsm8k
#   MODEL_PATH=/path/to/Qwen2.5-7B-Instruct bash examples/run_qwen2_5_7b_grpo.sh [hydra overrides]
# Hardware: a GPU with 80 GB or more, of which 17 GB must be free, and 128 GB of free host memory, 16 GB of it for the
# reference policy of the KL loss: with actor_rollout_ref.actor.use_kl_loss=False 112 GB are enough. With
# actor_rollout_ref.actor.megatrain.reference_folder=FOLDER it is read from a disk: 114 GB (docs/rl-timeline.md).
# A step of 64 sequences of 512 + 1,024 tokens on an H200 with 16 cores, random weights and no KL loss: 23.2 s, of which
# 7.2 s generation, 3.2 s old log-probs, 11.5 s update, 1.3 s weights to vLLM. Measured by
# `python benchmarks/grpo_step.py --model qwen2.5-7b --prompts 8 --n 8 --prompt-len 512 --response-len 1024` with half of the
# GPU for vLLM, see docs/rl-timeline.md. This script has a KL loss: reference log-probs take about as long as the old ones.
# Variants: +variant=dapo, +variant=gspo, +variant=fp8_rollout (configs/rl/variant). TRAIN_FILE and TEST_FILE name other
# verl parquet files, CUDA_VISIBLE_DEVICES the GPU. A stopped run goes on when started again. Logs, metrics and
# checkpoints: outputs/qwen2_5_7b_grpo_80gb.
set -euo pipefail
exec bash "$(dirname "${BASH_SOURCE[0]}")/run_grpo.sh" qwen2_5_7b_grpo_80gb "$@"
