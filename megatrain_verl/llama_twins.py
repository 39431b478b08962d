"""InternLM2.5 and Baichuan2 as Llama, and back: the same model with its matrices cut and named another way.

    python -m megatrain_verl.llama_twins to_llama HUB_FOLDER NEW_FOLDER             before training
    python -m megatrain_verl.llama_twins to_hub TRAINED_FOLDER HUB_FOLDER NEW_FOLDER    afterwards

transformers runs both families only by the code in their repositories, which this package never executes. InternLM2
keeps the rows of q, k and v together for each group of heads (`wqkv`: the group's queries, its key, its value),
Baichuan one behind the other (`W_pack`). Baichuan2's code divides every row of its output matrix by the row's length; a
Llama does not, so the rows are divided once, on the way to Llama.
"""

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig

from megatrain_verl.streaming.atomic_folder import atomic_folder, check_disk_space
from megatrain_verl.streaming.checkpoint import export_pretrained, write_shards
from megatrain_verl.streaming.weight_folder import WeightFolder, read_config

# Parts of names: the family's -> Llama's.
INTERNLM2 = {
    "model.tok_embeddings.": "model.embed_tokens.",
    ".attention.wo.": ".self_attn.o_proj.",
    ".feed_forward.w1.": ".mlp.gate_proj.",
    ".feed_forward.w3.": ".mlp.up_proj.",
    ".feed_forward.w2.": ".mlp.down_proj.",
    ".attention_norm.": ".input_layernorm.",
    ".ffn_norm.": ".post_attention_layernorm.",
    "output.": "lm_head.",
}
RENAMED = {"internlm2": INTERNLM2, "baichuan": {}}
PACKED = {"internlm2": ".attention.wqkv.", "baichuan": ".self_attn.W_pack."}
PARTS = tuple(f".self_attn.{part}_proj." for part in "qkv")
LLAMA_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "hidden_act",
    "initializer_range",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "tie_word_embeddings",
)
UNIT_TOLERANCE = 0.01  # of the length of a row that bfloat16 holds


def to_llama(hub: str | Path, folder: str | Path) -> None:
    """Write the Llama twin of the model in `hub` to `folder`, with its tokenizer files but none of its code.

    Raises:
        ValueError: another family, a Baichuan without rotary embeddings, pickled weights, too little disk space.
    """
    with WeightFolder(hub) as source:
        fields = read_config(source.path)
        family = _family(fields, source.path)
        config = _llama_config(family, fields)
        num_bytes = sum(path.stat().st_size for path in source.path.glob("*.safetensors"))
        export_pretrained(folder, _unpacked(source, family, config), config, num_bytes)
    for path in source.path.iterdir():
        wanted = path.suffix in (".json", ".model", ".jinja") and not path.name.endswith(".index.json")
        if wanted and not (Path(folder) / path.name).exists():
            shutil.copy(path, folder)
    _name_tokenizer_class(Path(folder))


def to_hub(trained: str | Path, hub: str | Path, folder: str | Path) -> None:
    """Write the Llama in `trained` to `folder` with the names and layout of its twin in `hub`, and the twin's files.

    Raises:
        ValueError: another family, too little disk space, or a Baichuan2 whose output matrix was trained: the family's
            own code divides its rows by their length, so it cannot express it.
    """
    with WeightFolder(trained) as source, WeightFolder(hub) as original:
        family = _family(read_config(original.path), original.path)
        config = _llama_config(family, read_config(original.path))
        if family == "baichuan":
            _check_unit_rows(source.tensor("lm_head.weight"))
        check_disk_space(folder, sum(path.stat().st_size for path in source.path.glob("*.safetensors")))
        with atomic_folder(folder) as partial:
            write_shards(partial, _packed(source, family, config))
            for path in original.path.iterdir():
                if path.is_file() and ".safetensors" not in path.name and path.suffix not in (".bin", ".pt", ".pth"):
                    shutil.copy(path, partial)


def split_qkv(family: str, packed: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of queries, keys and values of a packed matrix or bias ((heads + 2 kv_heads) * head size, ...)."""
    rows = packed.shape[0] // (heads + 2 * kv_heads)
    if family == "baichuan":
        return packed.split([heads * rows, kv_heads * rows, kv_heads * rows])
    groups = packed.unflatten(0, (kv_heads, heads // kv_heads + 2, rows))
    query, key, value = groups.split([heads // kv_heads, 1, 1], dim=1)
    return tuple(part.flatten(0, 2).contiguous() for part in (query, key, value))


def join_qkv(family: str, parts: tuple[Tensor, Tensor, Tensor], heads: int, kv_heads: int) -> Tensor:
    """The reverse of `split_qkv`."""
    if family == "baichuan":
        return torch.cat(parts)
    rows = parts[1].shape[0] // kv_heads
    return torch.cat([part.unflatten(0, (kv_heads, -1, rows)) for part in parts], dim=1).flatten(0, 2).contiguous()


def _family(fields: dict[str, object], path: Path) -> str:
    family = str(fields.get("model_type"))
    if family not in PACKED:
        raise ValueError(f"{path} holds a model of type {family!r}; Llama twins exist for {' and '.join(PACKED)}")
    if family == "baichuan" and "max_position_embeddings" not in fields:
        raise ValueError(f"{path} has no rotary embeddings (Baichuan 13B uses ALiBi), so it is no Llama")
    return family


def _llama_config(family: str, fields: dict[str, object]) -> LlamaConfig:
    rope = {"rope_type": "default", **(fields.get("rope_scaling") or {})}
    rope["rope_type"] = rope.pop("type", rope["rope_type"])
    settings = {name: fields[name] for name in LLAMA_FIELDS if name in fields}
    return LlamaConfig(
        **settings,
        attention_bias=bool(fields.get("bias", False)),
        rope_parameters={**rope, "rope_theta": float(fields.get("rope_theta", 10000.0))},
    )


def _name_tokenizer_class(folder: Path) -> None:
    """Make transformers read tokenizer.json, which says all, with its own class instead of the repository's code.

    With tokenizer.model alone the file stays, and transformers refuses it: its own classes put a space before the text
    or none, whatever the family does.
    """
    path = folder / "tokenizer_config.json"
    if path.exists() and (folder / "tokenizer.json").exists():
        fields = json.loads(path.read_text())
        if fields.pop("auto_map", None) is not None:
            fields["tokenizer_class"] = "PreTrainedTokenizerFast"
            path.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n")


def _unpacked(source: WeightFolder, family: str, config: LlamaConfig) -> Iterator[tuple[str, Tensor]]:
    heads = (config.num_attention_heads, config.num_key_value_heads)
    for header in source.headers:
        tensor = source.tensor(header.name)
        if PACKED[family] in header.name:
            for part, rows in zip(PARTS, split_qkv(family, tensor, *heads), strict=True):
                yield header.name.replace(PACKED[family], part), rows.clone()
        elif header.name.endswith("rotary_emb.inv_freq"):
            continue
        elif family == "baichuan" and header.name == "lm_head.weight":
            yield header.name, F.normalize(tensor.float()).to(tensor.dtype)
        else:
            yield _renamed(header.name, RENAMED[family]), tensor


def _packed(source: WeightFolder, family: str, config: LlamaConfig) -> Iterator[tuple[str, Tensor]]:
    heads = (config.num_attention_heads, config.num_key_value_heads)
    names = {part: name for name, part in RENAMED[family].items()}
    for header in source.headers:
        if PARTS[0] in header.name:
            parts = tuple(source.tensor(header.name.replace(PARTS[0], part)) for part in PARTS)
            yield header.name.replace(PARTS[0], PACKED[family]), join_qkv(family, parts, *heads)
        elif not any(part in header.name for part in PARTS):
            yield _renamed(header.name, names), source.tensor(header.name)


def _renamed(name: str, parts: dict[str, str]) -> str:
    found = next((part for part in parts if re.search(rf"(^|(?<=\d)){re.escape(part)}", name)), None)
    return name if found is None else name.replace(found, parts[found])


def _check_unit_rows(matrix: Tensor) -> None:
    furthest = (matrix.float().norm(dim=1) - 1).abs().max().item()
    if furthest > UNIT_TOLERANCE:
        raise ValueError(
            f"rows of the output matrix have lengths up to {furthest:.3f} away from 1; Baichuan2's own code divides by "
            "them: keep the Llama form (vLLM and transformers run it), or train with freeze=['lm_head.weight']"
        )


if __name__ == "__main__":
    commands = {"to_llama": (to_llama, 2), "to_hub": (to_hub, 3)}
    if sys.argv[1:] in (["--help"], ["-h"]):
        print(__doc__)
        sys.exit()
    if len(sys.argv) < 2 or sys.argv[1] not in commands or len(sys.argv) - 2 != commands[sys.argv[1]][1]:
        sys.exit(__doc__)
    commands[sys.argv[1]][0](*sys.argv[2:])
