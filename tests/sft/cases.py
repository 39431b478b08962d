"""A byte tokenizer, chat templates of several kinds, and data sets in LLaMA-Factory's formats."""

import json
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
LAST_USER = (
    "{% set last = namespace(user=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
)
TEMPLATES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + PROMPT,
    "marked": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "<|im_end|>\n{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}" + PROMPT
    ),
    # Thinking is shown in turns after the last question only, and there even where the data has none.
    "drops thinking": (
        LAST_USER + "{% for m in messages %}<|im_start|>{{ m.role }}\n{% set parts = m.content.split('</think>') %}"
        "{% if m.role == 'assistant' and loop.index0 > last.user %}<think>\n"
        "{{ parts[0].removeprefix('<think>').strip() if parts[1:] else '' }}\n</think>\n\n{% endif %}"
        "{{ parts[-1].lstrip() }}<|im_end|>\n{% endfor %}" + PROMPT
    ),
    # The prompt opens the thinking, and closes it again if none is wanted.
    "prompts to think": (
        LAST_USER + "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.index0 > "
        "last.user %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% if enable_thinking is defined and "
        "not enable_thinking %}{{ '\n</think>\n\n' }}{% endif %}{% endif %}"
    ),
    "tools": (
        "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for m in messages %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}CALL "
        "{{ call.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}" + PROMPT
    ),
    "no end of turn": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    "numbers from the end": (
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ loop.revindex }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant 1\n{% endif %}"
    ),
    "ends the last turn differently": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{{ '<|endoftext|>' if loop.last else "
        "'<|im_end|>' }}\n{% endfor %}" + PROMPT
    ),
    "parts": "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}<|im_end|>{% endfor %}",
    "refuses system": (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + PROMPT
    ),
}


def byte_tokenizer(template: str | None, *, merge_newlines: bool = False) -> PreTrainedTokenizerFast:
    """One token per byte, and one for two newlines if asked for; `template` is a key of `TEMPLATES`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    newline = "\u010a"  # how byte-level vocabularies write it
    vocabulary = {token: index for index, token in enumerate([*SPECIALS, *alphabet, newline * 2])}
    merges = [(newline, newline)] if merge_newlines else []
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATES.get(template),
    )


def write_dataset(folder: Path, rows: Any, *, name: str = "rows", **entry: Any) -> DictConfig:
    """Register `rows` (or the text of a file) as data set `name`; returns verl's `data` section for it."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(rows if isinstance(rows, str) else json.dumps(rows), encoding="utf-8")
    registry = folder / "dataset_info.json"
    known = json.loads(registry.read_text()) if registry.exists() else {}
    registry.write_text(json.dumps({**known, name: {"file_name": f"{name}.json", **entry}}))
    return data_config(folder)


def data_config(folder: Path, **options: Any) -> DictConfig:
    """verl's `data` section for data sets in `folder`."""
    defaults = {
        "dataset_dir": str(folder),
        "max_length": 256,
        "truncation": "drop",
        "apply_chat_template_kwargs": {},
        "system_prompt": None,
        "train_on_prompt": False,
        "max_samples": None,
        "mix_strategy": "concat",
        "interleave_probs": None,
        "packing": False,
        "max_token_len_per_gpu": 256,
        "val_size": 0,
        "train_batch_size": 2,
        "seed": 1,
    }
    return OmegaConf.create({**defaults, **options})


def alpaca_rows(count: int) -> list[dict[str, str]]:
    """Rows whose answers, and so numbers of trained tokens, differ in length."""
    return [
        {
            "instruction": f"Say {chr(97 + row)}",
            "input": "now" if row % 3 else "",
            "output": chr(97 + row) * (1 + row % 5),
        }
        for row in range(count)
    ]
