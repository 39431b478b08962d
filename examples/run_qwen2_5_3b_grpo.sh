#!/usr/bin/env bash
# GRPO of Qwen2.5-3B on GSM8K with one GPU, all parameters trained: verl, vLLM and the streaming engine.
#   bash examples/install.sh && . .venv/bin/activate && python examples/prepare_gsm8k.py data/gsm8k
#   MODEL_PATH=/path/to/Qwen2.5-3B-Instruct bash examples/run_qwen2_5_3b_grpo.sh [hydra overrides]
# Hardware: a GPU with 24 GB or more, of which 11 GB must be free, and 56 GB of free host memory, 7 GB of it for the
# reference policy of the KL loss: with actor_rollout_ref.actor.use_kl_loss=False 50 GB are enough.
# A step of 64 sequences of 1,536 tokens on an H200 with 16 cores, not measured yet: computed bounds of 3.2 s for the
# update, 0.8 s each for old and reference log-probs and 0.7 s for AdamW under the weight transfer; the rollout comes on
# top. Computed by `python -m megatrain_verl.resources --model ... --reference --seq-len 1536 --tokens-per-step 98304`.
# Variants: +variant=dapo, +variant=gspo, +variant=fp8_rollout (configs/rl/variant). TRAIN_FILE and TEST_FILE name other
# verl parquet files, CUDA_VISIBLE_DEVICES the GPU. A stopped run goes on when started again. Logs, metrics and
# checkpoints: outputs/qwen2_5_3b_grpo_24gb.
set -euo pipefail
exec bash "$(dirname "${BASH_SOURCE[0]}")/run_grpo.sh" qwen2_5_3b_grpo_24gb "$@"
