#!/usr/bin/env bash
# GRPO of Qwen3-8B on GSM8K with one GPU, all parameters trained: verl, vLLM and the streaming engine.
#   bash examples/install.sh && . .venv/bin/activate && python examples/prepare_gsm8k.py data/gsm8k
#   MODEL_PATH=/path/to/Qwen3-8B bash examples/run_qwen3_8b_grpo.sh [hydra overrides]
# Hardware: a GPU with 48 GB or more, of which 16 GB must be free, and 138 GB of free host memory, 17 GB of it for the
# reference policy of the KL loss: with actor_rollout_ref.actor.use_kl_loss=False 121 GB are enough.
# A step of 64 sequences of 1,536 tokens on an H200 with 16 cores, not measured yet: computed bounds of 8.0 s for the
# update, 2.0 s each for old and reference log-probs and 1.8 s for AdamW under the weight transfer; the rollout comes on
# top. Computed by `python -m megatrain_verl.resources --model ... --reference --seq-len 1536 --tokens-per-step 98304`.
# Variants: +variant=dapo, +variant=gspo, +variant=fp8_rollout (configs/rl/variant). TRAIN_FILE and TEST_FILE name other
# verl parquet files, CUDA_VISIBLE_DEVICES the GPU. A stopped run goes on when started again. Logs, metrics and
# checkpoints: outputs/qwen3_8b_grpo_48gb.
set -euo pipefail
exec bash "$(dirname "${BASH_SOURCE[0]}")/run_grpo.sh" qwen3_8b_grpo_48gb "$@"
