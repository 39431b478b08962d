"""A model with random weights, and prompts of one length: `python benchmarks/grpo/inputs.py FOLDER --model NAME ...`

For machines without network. The tokenizer is a table of bytes with as many unused entries as the model's vocabulary
needs: verl masks ids beyond the tokenizer in vLLM, which would change the log-probs there. A process of its own makes
the weights, so that no memory of the device stays behind.
"""

import argparse
import json
import random
import string
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

sys.path.insert(0, str(Path(__file__).parents[1]))
from shapes import model_config  # noqa: E402
from workload import draw_weight  # noqa: E402

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHARD_BYTES = 4 << 30


def make_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """One token per byte, and unused ones up to `vocab_size`.

    Raises:
        ValueError: the vocabulary is too small for the bytes.
    """
    entries = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    if vocab_size < len(entries):
        raise ValueError(f"a vocabulary of {vocab_size} is too small: bytes and special tokens are {len(entries)}")
    entries += [f"<|unused_{index}|>" for index in range(vocab_size - len(entries))]
    tokenizer = Tokenizer(models.BPE({entry: index for index, entry in enumerate(entries)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SPECIAL[2],
        pad_token=SPECIAL[0],
        extra_special_tokens=[SPECIAL[1]],
        chat_template=CHAT_TEMPLATE,
    )


def random_weights(config: PreTrainedConfig, device: str) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, bfloat16 tensor on the host) of every weight, a tied one once."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():  # a tied head is not listed
        yield name, draw_weight(name, parameter.shape, device).cpu()


def write_weights(folder: Path, weights: Iterator[tuple[str, Tensor]]) -> None:
    """Safetensors of at most about 4 GiB with their index; no more than one of them is held in memory."""
    shard: dict[str, Tensor] = {}
    places: dict[str, str] = {}

    def flush() -> None:
        if shard:
            file = f"model-{len(set(places.values())) + 1:05}.safetensors"
            save_file(shard, folder / file, metadata={"format": "pt"})
            places.update(dict.fromkeys(shard, file))
            shard.clear()

    for name, weight in weights:
        if sum(other.nbytes for other in shard.values()) + weight.nbytes > SHARD_BYTES:
            flush()
        shard[name] = weight
    flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def make_model(folder: Path, name: str, layers: int | None) -> PreTrainedTokenizerFast:
    """Write config, weights and tokenizer unless `folder` has them; returns the tokenizer."""
    config = model_config(name, layers)
    tokenizer = make_tokenizer(config.vocab_size)
    if (folder / "complete").exists():
        return tokenizer
    folder.mkdir(parents=True, exist_ok=True)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.bos_token_id, config.dtype = None, torch.bfloat16
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_weights(folder, random_weights(config, "cuda" if torch.cuda.is_available() else "cpu"))
    (folder / "complete").touch()
    return tokenizer


def make_prompts(file: Path, tokenizer: PreTrainedTokenizerFast, count: int, tokens: int) -> None:
    """`count` different prompts in verl's format, each of exactly `tokens` tokens as a chat.

    Raises:
        ValueError: the chat's own tokens leave no room.
    """
    letters, rows = random.Random(0), []
    overhead = _chat_tokens(tokenizer, "")
    if tokens <= overhead:
        raise ValueError(f"a prompt needs more than the {overhead} tokens of the chat template, got {tokens}")
    for index in range(count):
        text = "".join(letters.choices(string.ascii_lowercase, k=tokens - overhead))
        rows.append(
            {
                "data_source": "random",
                "prompt": [{"role": "user", "content": text}],
                "reward_model": {"style": "rule", "ground_truth": ""},
                "extra_info": {"index": index},
            }
        )
    if (found := _chat_tokens(tokenizer, text)) != tokens:
        raise ValueError(f"a prompt has {found} tokens instead of {tokens}")
    pd.DataFrame(rows).to_parquet(file)


def _chat_tokens(tokenizer: PreTrainedTokenizerFast, text: str) -> int:
    messages = [{"role": "user", "content": text}]
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return len(tokenizer(chat, add_special_tokens=False)["input_ids"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="gets model/ and prompts.parquet")
    parser.add_argument("--model", required=True, help="a name of shapes.py, or a folder with config.json")
    parser.add_argument("--layers", type=int, help="cut the model to that many")
    parser.add_argument("--prompts", type=int, required=True)
    parser.add_argument("--prompt-len", type=int, required=True, help="tokens of each prompt")
    arguments = parser.parse_args()
    made = make_model(arguments.folder / "model", arguments.model, arguments.layers)
    make_prompts(arguments.folder / "prompts.parquet", made, arguments.prompts, arguments.prompt_len)
