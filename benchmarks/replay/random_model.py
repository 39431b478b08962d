"""A random 13M-parameter Qwen2: `python -m benchmarks.replay.random_model FOLDER [--hidden-size 128]`.

Recorded batches are of use on another machine only with the model that they came from, and weights are too large to
carry along: these follow from a seed. The tokenizer is this file's own, so that the vocabulary stays what it was.
"""

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

SEED = 0
VOCABULARY = 326
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make(folder: Path, hidden_size: int = 384) -> None:
    """Write the model in float32 and its tokenizer unless `folder` has one. `hidden_size` is a multiple of 128."""
    if (folder / "config.json").exists():
        return
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 8 // 3 // 8 * 8,
        num_hidden_layers=8,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        # Three times the usual: attention and predictions far enough from uniform for errors in them to show.
        initializer_range=0.06,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(SEED)
    Qwen2ForCausalLM(config).save_pretrained(folder)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and the commonest pieces of sums: `VOCABULARY` entries, since vLLM must not know a token that has no name.

    Raises:
        ValueError: this version of tokenizers learns another vocabulary.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((f"What is {a} + {b}? It is {a + b}." for a in range(30) for b in range(30)), trainer)
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise ValueError(f"the tokenizer has {tokenizer.get_vocab_size()} entries, not {VOCABULARY}")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hidden-size", type=int, default=384, help="smaller: bfloat16 is slow on most CPUs")
    arguments = parser.parse_args()
    make(arguments.folder, arguments.hidden_size)
