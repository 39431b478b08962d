"""InternLM2 and Baichuan2 as Llama and back; the packed layouts are written here as the families' code reads them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatrain_verl.llama_twins import to_hub, to_llama
from tests import oracle

HEADS, SIZE, HIDDEN, MLP, VOCAB = 4, 8, 32, 48, 97


def internlm2_attention(x, weights, layer, kv_heads):
    """q, k, v (T, heads, size) as InternLM2Attention: "b q (h gs d) -> b q h gs d" with gs = 2 + heads per key."""
    packed = (x @ weights[f"model.layers.{layer}.attention.wqkv.weight"].T).view(len(x), kv_heads, -1, SIZE)
    return packed[:, :, :-2].reshape(len(x), -1, SIZE), packed[:, :, -2], packed[:, :, -1]


def baichuan_attention(x, weights, layer, kv_heads):
    """q, k, v (T, heads, size) as Baichuan's Attention: (b, q, 3 * hidden) unflattened to (3, hidden)."""
    packed = x @ weights[f"model.layers.{layer}.self_attn.W_pack.weight"].T
    return packed.unflatten(-1, (3, HIDDEN)).unflatten(-1, (HEADS, SIZE)).unbind(1)


FAMILIES = {"internlm2": (internlm2_attention, 2), "baichuan": (baichuan_attention, HEADS)}


def hub_folder(path, family):
    """A tiny model as the hub holds it, with random weights."""
    _, kv_heads = FAMILIES[family]
    torch.manual_seed(0)
    shapes = {"model.norm.weight": (HIDDEN,)}
    attention, mlp = ("attention", "feed_forward") if family == "internlm2" else ("self_attn", "mlp")
    names = ("wqkv", "wo", "w1", "w3", "w2", "attention_norm", "ffn_norm")
    if family == "baichuan":
        names = ("W_pack", "o_proj", "gate_proj", "up_proj", "down_proj", "input_layernorm", "post_attention_layernorm")
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.{attention}.{names[0]}.weight"] = ((HEADS + 2 * kv_heads) * SIZE, HIDDEN)
        shapes[f"{prefix}.{attention}.{names[1]}.weight"] = (HIDDEN, HIDDEN)
        shapes[f"{prefix}.{mlp}.{names[2]}.weight"] = shapes[f"{prefix}.{mlp}.{names[3]}.weight"] = (MLP, HIDDEN)
        shapes[f"{prefix}.{mlp}.{names[4]}.weight"] = (HIDDEN, MLP)
        shapes[f"{prefix}.{names[5]}.weight"] = shapes[f"{prefix}.{names[6]}.weight"] = (HIDDEN,)
    edges = ("tok_embeddings", "output") if family == "internlm2" else ("embed_tokens", "lm_head")
    shapes[f"model.{edges[0]}.weight"] = (VOCAB, HIDDEN)
    shapes[f"{edges[1]}.weight"] = (VOCAB, HIDDEN)
    weights = {name: 0.3 * torch.randn(shape) for name, shape in shapes.items()}
    config = {
        "model_type": family,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "auto_map": {"AutoModelForCausalLM": "modeling.Model"},
    }
    if family == "internlm2":
        rope = {"type": "dynamic", "factor": 2.0}
        config |= {"num_key_value_heads": kv_heads, "rope_theta": 1e6, "rope_scaling": rope, "bias": False}
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    (path / "modeling.py").write_text("raise RuntimeError('code of the repository must not run')")
    (path / "tokenizer_config.json").write_text("{}")
    save_file(weights, path / "model.safetensors")
    return weights


@pytest.mark.parametrize("family", FAMILIES)
def test_twin_computes_the_family_s_attention_and_goes_back_bit_for_bit(family, tmp_path):
    weights = hub_folder(tmp_path / "hub", family)
    if family == "baichuan":  # its code divides the rows of the output matrix by their lengths
        weights["lm_head.weight"] /= weights["lm_head.weight"].norm(dim=1, keepdim=True)
        save_file(weights, tmp_path / "hub" / "model.safetensors")
    to_llama(tmp_path / "hub", tmp_path / "llama")
    assert not (tmp_path / "llama" / "modeling.py").exists()
    assert (tmp_path / "llama" / "tokenizer_config.json").exists()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "llama")
    assert model.config.rope_parameters["rope_theta"] == (1e6 if family == "internlm2" else 1e4)
    attention, kv_heads = FAMILIES[family]
    x = torch.randn(7, HIDDEN)
    for index, layer in enumerate(model.model.layers):
        expected = attention(x, weights, index, kv_heads)
        for name, part in zip("qkv", expected, strict=True):
            got = getattr(layer.self_attn, f"{name}_proj")(x).unflatten(-1, (-1, SIZE))
            torch.testing.assert_close(got, part)
    to_hub(tmp_path / "llama", tmp_path / "hub", tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == weights.keys()
    for name, weight in weights.items():
        tolerance = 1e-6 if name == "lm_head.weight" else 0.0
        torch.testing.assert_close(back[name], weight, atol=tolerance, rtol=0)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == family


@pytest.mark.parametrize("family", FAMILIES)
def test_twin_trains_as_plain_transformers(family, tmp_path):
    hub_folder(tmp_path / "hub", family)
    to_llama(tmp_path / "hub", tmp_path / "llama")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "llama", attn_implementation="eager")
    engine = oracle.make_engine(model, model.config)
    engine.load_weights(tmp_path / "llama")
    rows = oracle.random_rows([11, 24, 5])
    tokens = sum(len(row) - 1 for row in rows)
    loss = -torch.cat([oracle.plain_log_probs(model, row)[0] for row in rows]).sum() / tokens
    loss.backward()
    assert oracle.engine_pass(engine, [oracle.pack(rows)]) == pytest.approx(loss.item(), rel=1e-5)
    for name, grad in oracle.engine_gradients(engine).items():
        torch.testing.assert_close(grad, model.get_parameter(name).grad, atol=1e-6, rtol=1e-4)
    engine.close()


# transformers has the second class, and its own idea of what a Llama's normalizer is.
@pytest.mark.parametrize("named", ["OwnTokenizer", "LlamaTokenizer"])
@pytest.mark.parametrize("family", FAMILIES)
def test_twin_s_tokenizer_needs_no_code_where_tokenizer_json_says_all(family, named, tmp_path):
    hub_folder(tmp_path / "hub", family)
    code = {"auto_map": {"AutoTokenizer": ["code.OwnTokenizer", None]}, "tokenizer_class": named}
    (tmp_path / "hub" / "tokenizer_config.json").write_text(json.dumps({**code, "model_max_length": 77}))
    to_llama(tmp_path / "hub", tmp_path / "no-json")
    if named == "OwnTokenizer":  # as on the hub
        with pytest.raises(ValueError, match="custom code"):
            AutoTokenizer.from_pretrained(tmp_path / "no-json", trust_remote_code=False)
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "▁a": 1, "a": 2, "b": 3}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace("_", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "hub" / "tokenizer.json"))
    to_llama(tmp_path / "hub", tmp_path / "json")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "json", trust_remote_code=False)
    assert loaded("a _a b")["input_ids"] == [2, 1, 3] and loaded.model_max_length == 77
    to_hub(tmp_path / "json", tmp_path / "hub", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "tokenizer_config.json").read_text()).items() >= code.items()


def test_output_matrix_that_baichuan_s_code_cannot_express_is_refused(tmp_path):
    hub_folder(tmp_path / "hub", "baichuan")
    to_llama(tmp_path / "hub", tmp_path / "llama")
    weights = load_file(tmp_path / "llama" / "model.safetensors")
    weights["lm_head.weight"][5] *= 1.1
    save_file(weights, tmp_path / "llama" / "model.safetensors")
    with pytest.raises(ValueError, match="output matrix have lengths up to 0.100 away from 1"):
        to_hub(tmp_path / "llama", tmp_path / "hub", tmp_path / "back")


def test_other_families_are_refused_by_name(tmp_path):
    hub_folder(tmp_path / "hub", "baichuan")
    config = json.loads((tmp_path / "hub" / "config.json").read_text())
    for change, message in (({"model_type": "llama"}, "type 'llama'"), ({"max_position_embeddings": None}, "ALiBi")):
        changed = {name: value for name, value in {**config, **change}.items() if value is not None}
        (tmp_path / "hub" / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=message):
            to_llama(tmp_path / "hub", tmp_path / "llama")
