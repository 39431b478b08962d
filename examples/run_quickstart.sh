#!/usr/bin/env bash
# SmolLM2-135M-Instruct learns sums: SFT warm start, then GRPO with verl, vLLM and the streaming engine; CPU or one GPU.
#   bash examples/run_quickstart.sh [--tiny] [hydra overrides of the GRPO run]
# Exit status 0 only if each stage raises the accuracy on held-out sums significantly; the last line says by how much.
# --tiny: the same with random weights and few steps, without a claim about accuracy; checks at each GRPO step that vLLM
# and the engine agree while the weights change.
# Everything goes to outputs/quickstart (or QUICKSTART_OUTPUT): data, answers, sft, grpo, quickstart.png. The results of
# an earlier run there are deleted at the start.
set -euo pipefail
if [ -n "${QUICKSTART_OUTPUT:-}" ]; then QUICKSTART_OUTPUT=$(realpath --canonicalize-missing "$QUICKSTART_OUTPUT"); fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ "${1:-}" = --help ]; then sed -n '2,/^set/s/^# //p' examples/run_quickstart.sh; exit; fi
TINY=()
if [ "${1:-}" = --tiny ]; then TINY=(--tiny); shift; fi

bash examples/install.sh
SECONDS=0  # the time that is reported is without the installation
# shellcheck source=/dev/null
. .venv/bin/activate
if nvidia-smi --list-gpus >/dev/null 2>&1; then HARDWARE=gpu; else HARDWARE=cpu; fi
. examples/environment.sh "$HARDWARE"
export QUICKSTART_OUTPUT=${QUICKSTART_OUTPUT:-$PWD/outputs/quickstart}
export QUICKSTART_MODEL=$PWD/outputs/models/SmolLM2-135M-Instruct
SFT_OVERRIDES=() GRPO_OVERRIDES=()
if [ ${#TINY[@]} -gt 0 ]; then
    QUICKSTART_MODEL=$PWD/outputs/models/tiny
    SFT_OVERRIDES=(trainer.total_training_steps=2 optim.lr=1e-3)
    GRPO_OVERRIDES=(trainer.total_training_steps=3 trainer.save_freq=1 actor_rollout_ref.actor.optim.lr=1e-2
        reward.custom_reward_function.path=examples/quickstart/reward.py
        reward.custom_reward_function.name=digit_share)
fi

GRPO=(megatrain_verl.main_ppo --config-dir configs/rl --config-name quickstart "hardware=$HARDWARE"
    "${GRPO_OVERRIDES[@]}" "$@")

fail() { echo "quickstart: $*" >&2; exit 1; }

train() {  # train STAGE SECONDS MODULE ARGUMENTS...: metrics and log go to the folder STAGE
    local folder=$QUICKSTART_OUTPUT/$1 limit=$2; shift 2
    mkdir -p "$folder"
    if ! VERL_FILE_LOGGER_PATH=$folder/metrics.jsonl python examples/bounded_run.py "$limit" python -m "$@" 2>&1 |
        python examples/progress.py "$folder/train.log"; then
        tail -n 30 "$folder/train.log" >&2
        fail "training FAILED; above is the end of $folder/train.log"
    fi
}

answer() { python examples/quickstart/evaluate.py "$1" "$QUICKSTART_OUTPUT/data/test.parquet" "$2"; }

# A mistyped override shows now, not after the SFT.
if [ $# -gt 0 ]; then
    python -m "${GRPO[@]}" --cfg job >/dev/null || fail "these overrides do not fit configs/rl/quickstart.yaml: $*"
fi
mkdir -p "$QUICKSTART_OUTPUT" outputs/models
exec 9>"$QUICKSTART_OUTPUT/lock"
flock --nonblock 9 || fail "another run writes to $QUICKSTART_OUTPUT; wait for it or set QUICKSTART_OUTPUT"
rm -rf "$QUICKSTART_OUTPUT"/{answers,sft,grpo,quickstart.png}
ANSWERS=("$QUICKSTART_OUTPUT"/answers/{start,sft,grpo}.jsonl)

echo "quickstart: data and model, accuracy at the start"
python examples/quickstart/make_data.py "$QUICKSTART_OUTPUT/data"
python examples/quickstart/make_model.py "$QUICKSTART_MODEL" "${TINY[@]}"
answer "$QUICKSTART_MODEL" "${ANSWERS[0]}"

echo "quickstart: SFT (all it prints: $QUICKSTART_OUTPUT/sft/train.log)"
train sft 1200 megatrain_verl.sft --config-dir configs/sft --config-name quickstart "${SFT_OVERRIDES[@]}"
export QUICKSTART_SFT_MODEL
QUICKSTART_SFT_MODEL=$(ls -d "$QUICKSTART_OUTPUT"/sft/global_step_*/huggingface)
answer "$QUICKSTART_SFT_MODEL" "${ANSWERS[1]}"

echo "quickstart: GRPO; Ray and vLLM need a minute or two to start (all they print: $QUICKSTART_OUTPUT/grpo/train.log)"
train grpo 3600 "${GRPO[@]}"
TRAINED=$(find "$QUICKSTART_OUTPUT"/grpo -path '*/actor/huggingface' | sort -V | tail -n 1)
answer "$TRAINED" "${ANSWERS[2]}"

python examples/quickstart/plot.py \
    "$QUICKSTART_OUTPUT/grpo/metrics.jsonl" "$QUICKSTART_OUTPUT/quickstart.png" "${ANSWERS[@]}"
echo "quickstart: plot, metrics and logs are in $QUICKSTART_OUTPUT, the trained model in $TRAINED"
if [ ${#TINY[@]} -gt 0 ]; then
    python examples/quickstart/check_tiny.py "$QUICKSTART_OUTPUT/grpo" "$QUICKSTART_SFT_MODEL"
    python examples/quickstart/verdict.py "${ANSWERS[@]}" --seconds "$SECONDS" --no-claim
else
    python examples/quickstart/verdict.py "${ANSWERS[@]}" --seconds "$SECONDS"
fi
