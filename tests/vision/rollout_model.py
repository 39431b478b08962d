"""Tiny models of Qwen's families with images that vLLM runs, with their processors.

`python -m tests.vision.rollout_model FOLDER FAMILY` saves one where torchvision is not imported in the test's process.
"""

import sys
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel, ProcessorMixin

from tests.vision import cases, processors

HEADS, HEAD_DIM = 2, 32  # the least that vLLM's CPU attention takes
SECTIONS = {"qwen3_vl": (6, 5, 5)}  # sixteenths of half a head for time, height and width
TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def save(folder: Path, family: str) -> None:
    """Random float32 weights, configuration and processor."""
    processor = processors.make(family)
    model = cases.plain_model(_config(family, processor))
    _never_predict(model, [processor.image_token_id, processor.video_token_id])
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def _config(family: str, processor: ProcessorMixin) -> PretrainedConfig:
    tokenizer, hidden = processor.tokenizer, HEADS * HEAD_DIM
    rope = {**cases.ROPE, "mrope_section": [HEAD_DIM * part // 32 for part in SECTIONS.get(family, (4, 6, 6))]}
    if family == "qwen3_vl":  # as in its configs; vLLM looks, transformers does not
        rope["mrope_interleaved"] = True
    config = cases.tiny_config(
        family,
        vocab_size=len(tokenizer),  # verl masks what the tokenizer does not have
        hidden_size=hidden,
        head_dim=HEAD_DIM,
        num_attention_heads=HEADS,
        num_key_value_heads=1,
        rope_parameters=rope,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    for name in ("embed_dim", "hidden_size") if family == "qwen2_vl" else ("hidden_size", "out_hidden_size"):
        setattr(config.vision_config, name, hidden)
    for name in TOKENS:
        setattr(config, name, getattr(tokenizer, name))
    # vLLM's CPU platform asks for the architecture of Qwen3-VL's language model, which its configs do not name.
    config.text_config.architectures = ["Qwen3ForCausalLM"] if family == "qwen3_vl" else None
    return config


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
    visual = model.model.visual
    last = visual.merger.mlp[-1] if hasattr(visual.merger, "mlp") else visual.merger.linear_fc2
    last.weight[0], last.bias[0] = 0, 1
    for merger in getattr(visual, "deepstack_merger_list", ()):
        merger.linear_fc2.weight[0], merger.linear_fc2.bias[0] = 0, 0
    model.lm_head.weight[tokens] = 0
    model.lm_head.weight[tokens, 0] = -100


if __name__ == "__main__":
    save(Path(sys.argv[1]), sys.argv[2])
