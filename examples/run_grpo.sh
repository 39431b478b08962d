#!/usr/bin/env bash
# GRPO with a configuration of configs/rl: checks the machine, then trains with verl, vLLM and the streaming engine.
#   bash examples/run_grpo.sh CONFIG_NAME [hydra overrides]
# MODEL_PATH, TRAIN_FILE, TEST_FILE and CUDA_VISIBLE_DEVICES are read by the configuration and CUDA. Logs, metrics and
# checkpoints: outputs/CONFIG_NAME.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

NAME=${1:?usage: bash examples/run_grpo.sh CONFIG_NAME [hydra overrides]}
shift
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}
OUTPUT=outputs/$NAME

# shellcheck source=/dev/null
if [ -f .venv/bin/activate ]; then . .venv/bin/activate; fi
. examples/environment.sh gpu
python3 examples/preflight.py "$NAME" "$@"

mkdir -p "$OUTPUT"
export VERL_FILE_LOGGER_PATH=$PWD/$OUTPUT/metrics-$(date +%Y%m%d-%H%M%S).jsonl
if ! python examples/bounded_run.py "${TIME_LIMIT:-864000}" python -m megatrain_verl.main_ppo --config-dir configs/rl \
    --config-name "$NAME" "$@" 2>&1 | python examples/progress.py "$OUTPUT/train.log"; then
    tail -n 30 "$OUTPUT/train.log" >&2
    echo "run_grpo: training failed; above is the end of $OUTPUT/train.log" >&2
    exit 1
fi
