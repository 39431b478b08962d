"""A random 57M-parameter Qwen2 with the tiny quickstart's tokenizer: `python -m benchmarks.replay.random_model FOLDER`.

For machines that have no model: the weights follow from the seed.
"""

import argparse
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "quickstart"))  # scripts, not a package
from make_model import make_tiny  # noqa: E402

SEED = 0


def make(folder: Path) -> None:
    """Write the model in float32 unless `folder` has one."""
    if (folder / "config.json").exists():
        return
    make_tiny(folder)  # for its tokenizer; the larger model replaces its weights
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=9,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        # Twice the usual: attention and predictions far enough from uniform for errors in them to show.
        initializer_range=0.04,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(SEED)
    Qwen2ForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    make(parser.parse_args().folder)
