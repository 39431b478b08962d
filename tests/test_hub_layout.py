"""Checkpoint names and cuts of every family: those with which transformers saves its model."""

import copy

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DeepseekV3Config,
    Gemma3Config,
    GptOssConfig,
    InternVLConfig,
    LlavaNextConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3_5MoeConfig,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from transformers.core_model_loading import revert_weight_conversion

from megatrain_verl.streaming.hub_layout import HubLayout

TEXT = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "shared_expert_intermediate_size": 16}
CONFIGS = {
    "mixtral": MixtralConfig(**TEXT, num_local_experts=4),
    "qwen3_moe": Qwen3MoeConfig(**TEXT, **EXPERTS),
    "qwen3_next": Qwen3NextConfig(**TEXT, **EXPERTS),
    "deepseek_v3": DeepseekV3Config(**TEXT, n_routed_experts=4, moe_intermediate_size=16, first_k_dense_replace=1),
    "gpt_oss": GptOssConfig(**TEXT, num_local_experts=4),
    "qwen3_5_text": Qwen3_5TextConfig(**TEXT),
    "qwen3_5_moe": Qwen3_5MoeConfig(text_config={**TEXT, **EXPERTS}, vision_config={"depth": 1}),
    "qwen2_5_vl": Qwen2_5_VLConfig(text_config=TEXT, vision_config={"depth": 1}),
    "llava_next": LlavaNextConfig(text_config={"model_type": "llama", **TEXT}, vision_config={"num_hidden_layers": 1}),
    "internvl": InternVLConfig(text_config={"model_type": "qwen2", **TEXT}, vision_config={"num_hidden_layers": 1}),
    "gemma3": Gemma3Config(text_config=TEXT, vision_config={"num_hidden_layers": 1}),
}


def meta_model(config: PretrainedConfig) -> torch.nn.Module:
    kind = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    with torch.device("meta"):
        return kind.from_config(copy.deepcopy(config))


def own_state(model: torch.nn.Module) -> dict[str, Tensor]:
    """The state without second names of tied weights."""
    return {name: tensor for name, tensor in model.named_parameters()} | {
        name: tensor for name, tensor in model.named_buffers() if name in model.state_dict()
    }


@pytest.mark.parametrize("family", CONFIGS)
def test_names_and_shapes_are_those_that_transformers_saves(family: str):
    model = meta_model(CONFIGS[family])
    state = own_state(model)
    layout = HubLayout(model, state, {})
    own = {
        layout.checkpoint_name(block): (block.shape, layout.find(layout.checkpoint_name(block)))
        for name in state
        for block in layout.blocks(name)
    }
    saved = revert_weight_conversion(model, dict(state))
    assert {name: shape for name, (shape, _) in own.items()} == {n: tuple(t.shape) for n, t in saved.items()}
    for name in state:  # every checkpoint tensor finds back to its block
        assert [own[layout.checkpoint_name(block)][1].block for block in layout.blocks(name)] == layout.blocks(name)
        assert all(own[layout.checkpoint_name(block)][1].parameter == name for block in layout.blocks(name))


def test_blocks_are_the_experts_in_their_order():
    config = CONFIGS["mixtral"]
    model = AutoModelForCausalLM.from_config(config)
    layout = HubLayout(model, own_state(model), {})
    saved = revert_weight_conversion(model, dict(own_state(model)))
    for name, parameter in model.named_parameters():
        for key, view in layout.export(name, parameter.detach()):
            assert torch.equal(view, saved[key]), key
            assert view.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()


def test_an_export_keeps_the_names_of_the_folder_that_was_loaded():
    """The hub's text weights of Qwen3.5 lie under the name of the multimodal model; vLLM expects them there."""
    model = meta_model(CONFIGS["qwen3_5_text"])
    names = list(own_state(model))
    layout = HubLayout(model, names, {})
    own = [layout.checkpoint_name(block) for name in names for block in layout.blocks(name)]
    hub = [name.replace("model.", "model.language_model.", 1) for name in own]
    assert own == names and hub != own
    as_hub, as_own = layout.as_in(hub), layout.as_in(own)
    assert [as_hub.checkpoint_name(block) for name in names for block in as_hub.blocks(name)] == hub
    assert [as_own.checkpoint_name(block) for name in names for block in as_own.blocks(name)] == own
    assert [layout.find(name).parameter for name in hub] == names


def test_merged_experts_stay_merged_in_an_export():
    model = meta_model(CONFIGS["qwen3_moe"])
    names = list(own_state(model))
    layout = HubLayout(model, names, {}).as_in(names)
    assert [layout.checkpoint_name(block) for name in names for block in layout.blocks(name)] == names


def test_weights_that_transformers_leaves_out_are_known():
    layout = HubLayout(meta_model(CONFIGS["qwen3_next"]), [], {})
    assert layout.ignores("mtp.fc.weight") and layout.ignores("model.layers.0.self_attn.rotary_emb.inv_freq")
    assert not layout.ignores("model.layers.0.mtp.weight")
