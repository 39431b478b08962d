"""Refuses a Llama 4 whose attention vLLM would compute otherwise than the trainer.

Layers without rotary embedding multiply their queries by a factor that grows at every `floor_scale` positions. Whether
they do, transformers reads in config.json. vLLM 0.24 to 0.28 reads it in generation_config.json only
(`Llama4ForCausalLM`), and where that says nothing, has it on for more than 32,768 tokens and off for fewer.
"""

import json
from pathlib import Path

from omegaconf import DictConfig
from transformers import PretrainedConfig

OPTION = "attn_temperature_tuning"
ON_ABOVE = 32_768


def check(config: DictConfig, hf_config: PretrainedConfig, folder: str, longest_row: int) -> None:
    """Refuse rows of a whole verl run that are long enough to be computed differently.

    Args:
        config: of the run.
        hf_config: of its model.
        folder: the model's, on this host: where verl has copied it to, if MODEL_PATH is elsewhere.
        longest_row: in tokens.

    Raises:
        ValueError: names the file and what to write into it.
    """
    rollout, text = config.actor_rollout_ref.rollout, hf_config.get_text_config()
    if text.model_type != "llama4_text" or rollout.name != "vllm" or longest_row < text.floor_scale:
        return
    file = Path(folder) / "generation_config.json"
    written = json.loads(file.read_text()) if file.is_file() else {}
    limit = rollout.max_model_len or text.max_position_embeddings
    trained, generated = bool(text.attn_temperature_tuning), bool(written.get(OPTION, limit > ON_ABOVE))
    if trained != generated:
        raise ValueError(
            f"{OPTION} is {trained} in training (config.json), and {generated} in vLLM, which reads {file} and "
            f"actor_rollout_ref.rollout.max_model_len={rollout.max_model_len}: rows of {text.floor_scale} tokens and "
            f'more would get other log-probs there; write "{OPTION}": {json.dumps(trained)} into {file}'
        )
