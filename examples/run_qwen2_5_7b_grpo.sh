#!/usr/bin/env bash
# GRPO of Qwen2.5-7B on GSM8K with one GPU, all parameters trained: verl, vLLM and the streaming engine.
#   bash examples/install.sh && . .venv/bin/activate && python examples/prepare_gsm8k.py data/gsm8k
#   MODEL_PATH=/path/to/Qwen2.5-7B-Instruct bash examples/run_qwen2_5_7b_grpo.sh [hydra overrides]
# TRAIN_FILE and TEST_FILE name other verl parquet files, CUDA_VISIBLE_DEVICES the GPU. A stopped run goes on when
# started again. Logs, metrics and checkpoints: outputs/qwen2_5_7b_grpo.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export MODEL_PATH=${MODEL_PATH:-models/Qwen2.5-7B-Instruct}
export TRAIN_FILE=${TRAIN_FILE:-data/gsm8k/train.parquet} TEST_FILE=${TEST_FILE:-data/gsm8k/test.parquet}
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}
OUTPUT=outputs/qwen2_5_7b_grpo

# shellcheck source=/dev/null
if [ -f .venv/bin/activate ]; then . .venv/bin/activate; fi
. examples/environment.sh gpu
python3 examples/preflight.py qwen2_5_7b_grpo "$@"

mkdir -p "$OUTPUT"
export VERL_FILE_LOGGER_PATH=$PWD/$OUTPUT/metrics-$(date +%Y%m%d-%H%M%S).jsonl
if ! python examples/bounded_run.py "${TIME_LIMIT:-864000}" python -m megatrain_verl.main_ppo --config-dir configs/rl \
    --config-name qwen2_5_7b_grpo "$@" 2>&1 | python examples/progress.py "$OUTPUT/train.log"; then
    tail -n 30 "$OUTPUT/train.log" >&2
    echo "run_qwen2_5_7b_grpo: training failed; above is the end of $OUTPUT/train.log" >&2
    exit 1
fi
