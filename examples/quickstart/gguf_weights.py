"""A Llama model out of a GGUF file, as Hugging Face writes it: bfloat16 weights and the tokenizer."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of special tokens


def hf_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`.

    Raises:
        ValueError: a tensor that a Llama model does not have.
    """
    parts = gguf_name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER_NAMES:
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.{parts[3]}"
    if len(parts) == 2 and parts[0] in TOP_NAMES:
        return f"{TOP_NAMES[parts[0]]}.{parts[1]}"
    raise ValueError(f"{gguf_name} is not a tensor of a Llama model")


def split_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo GGUF's row order of q and k (heads * head_dim, hidden).

    GGUF interleaves the two halves of each head that rotary embedding pairs; Hugging Face keeps them apart.
    """
    rows, columns = weight.shape
    paired = weight.reshape(heads, rows // heads // 2, 2, columns)
    return paired.swapaxes(1, 2).reshape(rows, columns)


def read_weights(reader: GGUFReader, heads: int, kv_heads: int) -> dict[str, torch.Tensor]:
    """All weights by Hugging Face name, in bfloat16."""
    weights = {}
    for tensor in reader.tensors:
        name = hf_name(tensor.name)
        values = dequantize(tensor.data, tensor.tensor_type)
        if "q_proj" in name or "k_proj" in name:
            values = split_halves(values, heads if "q_proj" in name else kv_heads)
        weights[name] = torch.tensor(values, dtype=torch.bfloat16)
    return weights


def read_config(reader: GGUFReader, eos_token_id: int) -> LlamaConfig:
    """The model's shape. `eos_token_id` is given: GGUF files are often wrong about it."""
    heads = _field(reader, "llama.attention.head_count")
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    return LlamaConfig(
        vocab_size=_field(reader, "llama.vocab_size"),
        hidden_size=_field(reader, "llama.embedding_length"),
        intermediate_size=_field(reader, "llama.feed_forward_length"),
        num_hidden_layers=_field(reader, "llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=_field(reader, "llama.attention.head_count_kv"),
        max_position_embeddings=_field(reader, "llama.context_length"),
        rms_norm_eps=round(_field(reader, "llama.attention.layer_norm_rms_epsilon"), 9),
        rope_parameters={"rope_type": "default", "rope_theta": _field(reader, "llama.rope.freq_base")},
        tie_word_embeddings=tied,
        bos_token_id=_field(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=eos_token_id,
        pad_token_id=eos_token_id,
    )


def read_tokenizer(reader: GGUFReader, eos_token: str, chat_template: str) -> PreTrainedTokenizerFast:
    """The byte-level BPE tokenizer; every digit is a token of its own, as SmolLM's pre-tokenizer does it."""
    tokens = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    ids = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = _field(reader, "tokenizer.ggml.token_type")
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=eos_token,
        pad_token=eos_token,
        chat_template=chat_template,
        model_max_length=_field(reader, "llama.context_length"),
        clean_up_tokenization_spaces=False,
    )


def convert(gguf_file: Path, folder: Path, eos_token: str, chat_template: str) -> None:
    """Write `folder` so that `from_pretrained` and vLLM load it."""
    reader = GGUFReader(gguf_file)
    tokenizer = read_tokenizer(reader, eos_token, chat_template)
    config = read_config(reader, tokenizer.eos_token_id)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    weights = read_weights(reader, config.num_attention_heads, config.num_key_value_heads)
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _field(reader: GGUFReader, name: str) -> Any:
    return reader.fields[name].contents()
