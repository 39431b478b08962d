"""verl 0.9.1: let the megatrain actor be its own reference policy.

Reason: verl asks the actor for reference log-probs (`no_lora_adapter=True`, which becomes `engine.disable_adapter()`)
only if it trains LoRA adapters; the decision is taken twice in `PPOTrainer`, without a hook. For every other actor it
builds a second engine. The streaming engine keeps the reference weights beside its own (2 bytes per parameter) and
swaps a pointer, so the second engine would only cost memory.

Patched: `PPOTrainer.ref_in_actor` becomes a property that is also true for a megatrain actor with
`megatrain.ref_in_actor`, and `_init_resource_pool_mgr` then asks for an actor worker without a reference.
"""

import functools
from types import ModuleType
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_patches.guard import check_source, first_time
from verl_patches.import_hook import after_import

TARGET = "verl.trainer.ppo.v1.trainer_base"
SOURCES = {
    "_setup": "041418ca8bb3f270",
    "_init_resource_pool_mgr": "96a4fe09dd4bb9c5",
    "_compute_ref_log_prob": "6144382217765824",
}


def apply() -> None:
    """Patch verl's V1 trainer, now or when it is imported."""
    after_import(TARGET, _patch)


def wanted(config: DictConfig) -> bool:
    """Whether `config` (a whole verl run) has a megatrain actor that keeps its own reference."""
    actor = "actor_rollout_ref.actor"
    is_megatrain = OmegaConf.select(config, f"{actor}.strategy") == "megatrain"
    return is_megatrain and bool(OmegaConf.select(config, f"{actor}.megatrain.ref_in_actor", default=True))


def _patch(module: ModuleType) -> None:
    trainer, roles = module.PPOTrainer, module.Role
    if not first_time("ref_in_actor", trainer):
        return
    check_source("ref_in_actor", trainer, SOURCES)
    init_resource_pool_mgr = trainer._init_resource_pool_mgr

    @functools.wraps(init_resource_pool_mgr)
    def _init_resource_pool_mgr(self: Any) -> None:
        init_resource_pool_mgr(self)
        if wanted(self.config):
            # Both dicts are shared with the resource pool manager, hence changed in place.
            for workers in (self.role_worker_mapping, self.mapping):
                if roles.ActorRolloutRef in workers:
                    workers[roles.ActorRollout] = workers.pop(roles.ActorRolloutRef)
                workers.pop(roles.RefPolicy, None)

    def get_ref_in_actor(self: Any) -> bool:
        return self.__dict__.get("ref_in_actor", False) or wanted(self.config)

    def set_ref_in_actor(self: Any, value: bool) -> None:
        self.__dict__["ref_in_actor"] = value

    trainer._init_resource_pool_mgr = _init_resource_pool_mgr
    trainer.ref_in_actor = property(get_ref_in_actor, set_ref_in_actor)
