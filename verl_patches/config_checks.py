"""verl 0.9.1: accept megatrain runs of the stock command, and check them before Ray and the models start.

Reason: `python -m verl.trainer.main_ppo actor_rollout_ref.actor.strategy=megatrain` composes verl's FSDP actor, whose
class accepts no `megatrain.*` option; and verl finds bad input (an empty data set, a model we do not train) only after
it has started its workers.

Patched: `verl.utils.config.validate_config`, which verl calls in the driver with the whole composed configuration,
first turns an FSDP actor with strategy megatrain into a megatrain actor and a quantised model's rollout into an
unquantised one, and at the end runs this package's checks.
Runs with another strategy are not touched.
"""

import functools
from types import ModuleType

from omegaconf import DictConfig, OmegaConf

from verl_patches.guard import check_source, first_time
from verl_patches.import_hook import after_import

TARGET = "verl.utils.config"
SOURCES = {"validate_config": "ab4096deecfec745"}


def apply() -> None:
    """Patch verl's configuration check, now or when it is imported."""
    after_import(TARGET, _patch)


def _patch(module: ModuleType) -> None:
    if not first_time("config_checks", module):
        return
    check_source("config_checks", module, SOURCES)
    validate_config = module.validate_config

    @functools.wraps(validate_config)
    def wrapper(config: DictConfig, use_reference_policy: bool, use_critic: bool) -> None:
        if OmegaConf.select(config, "actor_rollout_ref.actor.strategy") != "megatrain":
            return validate_config(config, use_reference_policy, use_critic)
        from megatrain_verl.verl_backend import preflight, quantised_rollout, stock_config

        stock_config.adapt(config, use_reference_policy)
        quantised_rollout.adapt(config)
        preflight.check_options(config)
        validate_config(config, use_reference_policy, use_critic)
        preflight.check_inputs(config)

    module.validate_config = wrapper
