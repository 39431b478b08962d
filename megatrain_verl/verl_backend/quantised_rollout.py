"""Lets vLLM run the unquantised model when MODEL_PATH holds quantised weights.

The engine trains what the quantised weights stand for and sends bfloat16 weights after every step. vLLM reads
config.json of MODEL_PATH by itself and would build quantised layers, which cannot take them; verl would make its FP8
patches. Both look at `quantization_config`, and both have an option that overrides it.
"""

import logging
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict
from verl.utils.fs import copy_to_local

from megatrain_verl.streaming.weight_folder import read_config

logger = logging.getLogger(__name__)

FIELD = "quantization_config"


def adapt(config: DictConfig) -> None:
    """Change `config` (a whole verl run) in place, if the model's folder is quantised.

    A rollout that is asked for as quantised (`rollout.quantization`) stays so: verl then quantises what it receives.
    """
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    folder = Path(copy_to_local(model.path, use_shm=model.get("use_shm", False)))  # as verl's model config does
    if not folder.is_dir() or read_config(folder).get(FIELD) is None:
        return
    with open_dict(config):
        OmegaConf.update(model, f"override_config.{FIELD}", None, force_add=True)
        if rollout.quantization is None:
            OmegaConf.update(rollout, f"engine_kwargs.vllm.hf_overrides.{FIELD}", None, force_add=True)
    logger.info(
        "%s is quantised: the rollout runs its unquantised model, with the weights that the engine sends", folder
    )
