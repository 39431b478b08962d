"""A tiny Qwen2.5-VL that vLLM runs, with its processor."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from tests.vision import cases, processors


def save(folder: Path, *, heads: int = 2, head_dim: int = 32) -> None:
    """Random float32 weights; heads of 32 are the least that vLLM's CPU attention takes."""
    processor = processors.make("qwen2_5_vl")
    hidden = heads * head_dim
    config = cases.tiny_config(
        "qwen2_5_vl",
        vocab_size=len(processor.tokenizer),  # verl masks what the tokenizer does not have
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=1,
        rope_parameters={**cases.ROPE, "mrope_section": [head_dim // 8, head_dim * 3 // 16, head_dim * 3 // 16]},
        bos_token_id=None,
        eos_token_id=processor.tokenizer.eos_token_id,
        pad_token_id=processor.tokenizer.pad_token_id,
    )
    config.vision_config.hidden_size = config.vision_config.out_hidden_size = hidden
    config.image_token_id, config.video_token_id = processor.image_token_id, processor.video_token_id
    model = cases.plain_model(config)
    _never_predict(model, [processor.image_token_id, processor.video_token_id])
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


@torch.no_grad()
def probabilities(model: PreTrainedModel, row: cases.Row) -> torch.Tensor:
    """(L, V) of the next tokens of a row of `cases.rows`, whose image tokens become those of `model`."""
    ids = torch.where(row.ids == cases.IMAGE_TOKEN, model.config.image_token_id, row.ids)[None]
    types = (ids == model.config.image_token_id).int()
    return model(input_ids=ids, **(row.images or {}), mm_token_type_ids=types).logits[0].softmax(-1)


@torch.no_grad()
def _never_predict(model: PreTrainedModel, tokens: list[int]) -> None:
    """Give `tokens` a probability near 0, as in a trained model: channel 0 is the same of every token.

    verl's rollout never samples the tokens of images and gives the probabilities of the others without them.
    """
    model.get_input_embeddings().weight[:, 0] = 1
    for layer in model.model.language_model.layers:
        for last in (layer.self_attn.o_proj, layer.mlp.down_proj):
            last.weight[0] = 0
    projected = model.model.visual.merger.mlp[-1]
    projected.weight[0], projected.bias[0] = 0, 1
    model.lm_head.weight[tokens] = 0
    model.lm_head.weight[tokens, 0] = -100
