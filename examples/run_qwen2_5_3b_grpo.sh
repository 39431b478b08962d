#!/usr/bin/env bash
# GRPO of Qwen2.5-3B on GSM8K with one GPU, all parameters trained: verl, vLLM and the streaming engine.
#   bash examples/install.sh && . .venv/bin/activate && python examples/prepare_gsm8k.py data/gsm8k
#   MODEL_PATH=/path/to/Qwen2.5-3B-Instruct bash examples/run_qwen2_5_3b_grpo.sh [hydra overrides]
# Hardware: a GPU with 24 GB or more, of which 11 GB must be free, and 56 GB of free host memory, 7 GB of it for the
# reference policy of the KL loss: with actor_rollout_ref.actor.use_kl_loss=False 50 GB are enough.
# A step of 64 sequences of 512 + 1,024 tokens on an H200 with 16 cores, random weights: 16.2 s, of which 5.2 s generation,
# 1.8 s old log-probs, 1.8 s reference log-probs, 6.8 s update, 0.5 s weights to vLLM. Measured by
# `python benchmarks/grpo_step.py --model qwen2.5-3b --prompts 8 --n 8 --prompt-len 512 --response-len 1024 --kl-reference`
# with half of the GPU for vLLM, see docs/rl-timeline.md. Other cards have not been measured.
# Variants: +variant=dapo, +variant=gspo, +variant=fp8_rollout (configs/rl/variant). TRAIN_FILE and TEST_FILE name other
# verl parquet files, CUDA_VISIBLE_DEVICES the GPU. A stopped run goes on when started again. Logs, metrics and
# checkpoints: outputs/qwen2_5_3b_grpo_24gb.
set -euo pipefail
exec bash "$(dirname "${BASH_SOURCE[0]}")/run_grpo.sh" qwen2_5_3b_grpo_24gb "$@"
