#!/usr/bin/env bash
# 30 GRPO steps on the quickstart's prompts, on the CPU, with the streaming engine or verl's own FSDP2 engine:
#   bash benchmarks/replay/grpo.sh megatrain|fsdp2 MODEL FOLDER [hydra overrides]      (in the environment of install.sh)
# FOLDER gets metrics.jsonl, train.log and, with the streaming engine, what benchmarks/replay/replay.py replays.
# The reward is the share of digits in a response, which also a random model (random_model.py) learns.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
ENGINE=$1 MODEL=$2 FOLDER=$3; shift 3

. examples/environment.sh cpu
mkdir -p "$FOLDER"
FOLDER=$(cd "$FOLDER" && pwd) MODEL=$(cd "$MODEL" && pwd)
rm -f "$FOLDER"/{metrics.jsonl,train.log,options.json} "$FOLDER"/batch_*.safetensors  # of an earlier run
export QUICKSTART_OUTPUT=$FOLDER REPLAY_FOLDER=$FOLDER VERL_FILE_LOGGER_PATH=$FOLDER/metrics.jsonl
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
ACTOR=actor_rollout_ref.actor ROLLOUT=actor_rollout_ref.rollout

# Two mini-batches per step: the second is off-policy, so that clipping and importance ratios count.
# No KL loss: verl's FSDP2 cannot build the reference policy on a CPU (it pins memory).
OPTIONS=("actor_rollout_ref.model.path=$MODEL" data.train_batch_size=4 data.max_response_length=12
    "$ACTOR.ppo_mini_batch_size=2" "$ACTOR.ppo_micro_batch_size_per_gpu=8"
    "$ACTOR.use_kl_loss=False" "$ACTOR.entropy_coeff=0.01" "$ACTOR.data_loader_seed=0"
    "$ACTOR.optim.lr=1e-4" "$ROLLOUT.log_prob_micro_batch_size_per_gpu=32"
    reward.custom_reward_function.path=examples/quickstart/reward.py reward.custom_reward_function.name=digit_share
    trainer.total_training_steps=30 trainer.val_before_train=False trainer.test_freq=-1 trainer.save_freq=-1)
case $ENGINE in
    megatrain) OPTIONS+=(actor_rollout_ref.model.external_lib=benchmarks.replay.recorder) ;;
    fsdp2)
        export VERL_ENGINE_DEVICE=cuda  # verl registers FSDP for accelerators only
        OPTIONS+=(model_engine=dp "~$ACTOR.megatrain" "$ACTOR.strategy=fsdp2" "$ACTOR.fsdp_config.use_torch_compile=False"
            "+$ACTOR.fsdp_config.mixed_precision={param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"
            actor_rollout_ref.model.use_remove_padding=False
            "+actor_rollout_ref.model.override_config.attn_implementation=sdpa") ;;
    *) echo "$0: unknown engine $ENGINE: megatrain or fsdp2" >&2; exit 1 ;;
esac

python examples/quickstart/make_data.py "$FOLDER/data"
python examples/bounded_run.py 1800 python -m megatrain_verl.main_ppo --config-dir configs/rl --config-name quickstart \
    hardware=cpu "${OPTIONS[@]}" "$@" 2>&1 | python examples/progress.py "$FOLDER/train.log"
