"""vLLM takes what the engine exports: hub folder -> engine -> export -> the greedy tokens of transformers."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from megatrain_verl.config import StreamingConfig
from megatrain_verl.streaming.checkpoint import export_pretrained
from megatrain_verl.streaming.engine import StreamingEngine
from tests.families.vllm_generate import NEW_TOKENS
from tests.oracle import plain_model

# vLLM's CPU attention takes heads of 32 and more.
SIZES = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 32,
    "tie_word_embeddings": False,
}
FAMILIES = {
    "qwen2": {"tie_word_embeddings": True},
    "llama": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "gemma3_text": {"query_pre_attn_scalar": 32, "sliding_window": 6},
}
PROMPTS = [[5, 77, 31, 9, 100, 2, 64], [90, 3, 3, 18]]


def through_engine(model: nn.Module, config: PretrainedConfig, folder: Path) -> Path:
    """The folder that an engine exports which was loaded from the one that transformers writes of `model`."""
    model.save_pretrained(folder / "hub")
    engine = StreamingEngine(copy.deepcopy(config), StreamingConfig(dtype="float32"), None, device="cpu")
    engine.load_weights(folder / "hub")
    export_pretrained(folder / "exported", engine.named_weights(), config, 0)
    engine.close()
    return folder / "exported"


def greedy_tokens(model: nn.Module) -> list[list[int]]:
    """transformers' own, without a cache: one forward per token."""
    rows = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(NEW_TOKENS):
            tokens.append(model(torch.tensor([tokens])).logits[0, -1].argmax().item())
        rows.append(tokens[len(prompt) :])
    return rows


@pytest.mark.slow
@torch.no_grad()
def test_vllm_generates_what_transformers_does(tmp_path: Path):
    (tmp_path / "prompts.json").write_text(json.dumps(PROMPTS))
    expected = {}
    for family, settings in FAMILIES.items():
        config = AutoConfig.for_model(family, **{**SIZES, **settings})
        model = plain_model(config).eval()
        (tmp_path / family).mkdir()
        folder = through_engine(model, config, tmp_path / family)
        expected[str(folder)] = greedy_tokens(model)
        assert greedy_tokens(AutoModelForCausalLM.from_pretrained(folder, dtype="auto")) == expected[str(folder)]
        assert len({token for row in expected[str(folder)] for token in row}) > 2  # no model that repeats itself
    command = [sys.executable, "-m", "tests.families.vllm_generate", str(tmp_path / "prompts.json"), *expected]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARN", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    run = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr[-3000:]
    assert json.loads(run.stdout.splitlines()[-1]) == expected
