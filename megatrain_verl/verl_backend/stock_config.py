"""Turns the configuration of verl's stock command into a megatrain one.

`python -m verl.trainer.main_ppo actor_rollout_ref.actor.strategy=megatrain` composes verl's FSDP actor and reference.
How FSDP shards and offloads says nothing to the streaming engine and is dropped; `fsdp_config.dtype`, `seed` and
`full_determinism` are kept, and `+actor_rollout_ref.actor.megatrain.<option>=<value>` sets any other option.
"""

from dataclasses import fields
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from verl.workers.config import FSDPActorConfig

from megatrain_verl.verl_backend.config import MegaTrainActorConfig, MegaTrainEngineConfig
from megatrain_verl.verl_backend.options import unknown_option

FSDP_TARGET = "verl.workers.config.FSDPActorConfig"
KEPT_OF_FSDP = ("dtype", "seed", "full_determinism")
# A separate reference engine scores with the same model, so these follow the actor's.
SHARED_WITH_REFERENCE = ("ref_in_actor", "dtype", "attn_implementation", "max_seq_len", "cpu_threads", "host_memory_gb")


def adapt(config: DictConfig, use_reference_policy: bool) -> None:
    """Change `config` (a whole verl run) in place; one composed with `model_engine=megatrain` needs no change of class.

    Without a KL term nobody asks for reference log-probs: the actor then keeps no reference weights.

    Raises:
        ValueError: an option that neither verl's FSDP actor nor the megatrain actor has, or an FSDP option that would
            change what is computed.
    """
    actor, ref = config.actor_rollout_ref.actor, config.actor_rollout_ref.ref
    if actor.get("_target_") == FSDP_TARGET:
        rollout = config.actor_rollout_ref.rollout
        from_rollout = {
            "update_weights_bucket_megabytes": rollout.checkpoint_engine.update_weights_bucket_megabytes,
            "gpu_memory_utilization": rollout.gpu_memory_utilization,
        }
        _to_megatrain(actor, from_rollout)
        shared = {name: actor.megatrain[name] for name in SHARED_WITH_REFERENCE if name in actor.megatrain}
        _to_megatrain(ref, {"forward_only": True, **shared})
    if not use_reference_policy:
        with open_dict(actor):
            actor.megatrain.ref_in_actor = False


def _to_megatrain(node: DictConfig, options: dict[str, Any]) -> None:
    fsdp_config = node.get("fsdp_config") or OmegaConf.create()
    if OmegaConf.select(fsdp_config, "qat.enable") or fsdp_config.get("ulysses_sequence_parallel_size", 1) > 1:
        raise ValueError("fsdp_config.qat and ulysses_sequence_parallel_size are not supported by strategy=megatrain")
    kept = {name: fsdp_config[name] for name in KEPT_OF_FSDP if name in fsdp_config}
    engine = {**kept, **options, **(node.get("megatrain") or {})}

    own = {field.name for field in fields(MegaTrainActorConfig)}
    dropped = {field.name for field in fields(FSDPActorConfig)} - own
    module = MegaTrainActorConfig.__module__
    with open_dict(node):
        for name in list(node):
            if name in dropped:
                del node[name]
            elif name not in own and not name.startswith("log_prob_"):  # verl renames the reference's log_prob_*
                raise unknown_option(name, own, "actor_rollout_ref.actor")
        node["_target_"] = f"{module}.{MegaTrainActorConfig.__name__}"
        node["megatrain"] = {**engine, "_target_": f"{module}.{MegaTrainEngineConfig.__name__}"}
