#!/usr/bin/env bash
# SmolLM2-135M-Instruct learns one-digit sums by GRPO: verl's trainer, vLLM, the streaming engine; on a CPU or one GPU.
#   bash examples/run_quickstart.sh [--tiny] [hydra overrides]
# --tiny: random weights and three steps; checks at each step that vLLM and the engine agree while the weights change.
# Everything goes to outputs/quickstart (or QUICKSTART_OUTPUT): metrics.jsonl, rewards.png, train.log, checkpoints.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

TINY=()
if [ "${1:-}" = --tiny ]; then TINY=(--tiny); shift; fi

bash examples/install.sh
# shellcheck source=/dev/null
. .venv/bin/activate
if nvidia-smi --list-gpus >/dev/null 2>&1; then HARDWARE=gpu; else HARDWARE=cpu; fi
. examples/environment.sh "$HARDWARE"
export QUICKSTART_OUTPUT=${QUICKSTART_OUTPUT:-$PWD/outputs/quickstart}
export VERL_FILE_LOGGER_PATH=$QUICKSTART_OUTPUT/metrics.jsonl
LOG=$QUICKSTART_OUTPUT/train.log
mkdir -p "$QUICKSTART_OUTPUT"
rm -rf "$QUICKSTART_OUTPUT"/{checkpoints,metrics.jsonl,rewards.png,train.log}  # of an earlier run

LIMIT=3600
OVERRIDES=()
export QUICKSTART_MODEL=$PWD/outputs/models/SmolLM2-135M-Instruct
if [ ${#TINY[@]} -gt 0 ]; then
    LIMIT=600
    export QUICKSTART_MODEL=$PWD/outputs/models/tiny
    OVERRIDES=(trainer.total_training_steps=3 trainer.save_freq=1 trainer.val_before_train=False trainer.test_freq=-1
        actor_rollout_ref.actor.optim.lr=1e-2 reward.custom_reward_function.name=digit_share)
fi
echo "quickstart: data and model"
python examples/quickstart/make_data.py "$QUICKSTART_OUTPUT/data"
mkdir -p outputs/models
python examples/quickstart/make_model.py "$QUICKSTART_MODEL" "${TINY[@]}"

echo "quickstart: training; Ray, vLLM and the engine need a minute or two to start (all they print: $LOG)"
if ! python examples/bounded_run.py "$LIMIT" python -m megatrain_verl.main_ppo --config-dir configs/rl \
    --config-name quickstart "hardware=$HARDWARE" "${OVERRIDES[@]}" "$@" 2>&1 | python examples/progress.py "$LOG"; then
    tail -n 30 "$LOG" >&2
    echo "quickstart: training FAILED; above is the end of $LOG" >&2
    exit 1
fi
python examples/quickstart/plot.py "$VERL_FILE_LOGGER_PATH" "$QUICKSTART_OUTPUT/rewards.png"
if [ ${#TINY[@]} -gt 0 ]; then python examples/quickstart/check_tiny.py "$QUICKSTART_OUTPUT" "$QUICKSTART_MODEL"; fi
echo "quickstart: done in $SECONDS s; metrics, plot and log are in $QUICKSTART_OUTPUT, the trained model in"
ls -d "$QUICKSTART_OUTPUT"/checkpoints/global_step_*/actor/huggingface | sort -V | tail -n 1
