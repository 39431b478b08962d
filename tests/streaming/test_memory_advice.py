"""Out of device memory: the note says which option and by how much, and the engine goes on as if nothing was."""

import re
from dataclasses import dataclass

import pytest
import torch

from megatrain_verl.config import StreamingConfig
from megatrain_verl.model_sizes import ModelSizes
from megatrain_verl.resources import GIB
from megatrain_verl.streaming.device_plan import device_bytes
from megatrain_verl.streaming.memory_advice import USABLE, advice
from megatrain_verl.streaming.model_plan import plan_model
from megatrain_verl.streaming.pass_plan import PassPlan
from tests import oracle
from tests.families.configs import family_config


@dataclass
class Qwen7B:
    """Shapes of Qwen2.5-7B."""

    layer_sizes = (233_057_792,) * 28
    edge_sizes = (544_997_376, 545_000_960)
    trained_layer_sizes, trained_edge_sizes = layer_sizes, edge_sizes
    expert_sizes = trained_expert_sizes = (0,) * 28
    separable_experts = 0
    slot_sizes = trained_slot_sizes = {"edge": 545_000_960}
    tied = False
    hidden_size, intermediate_size, experts_per_token, vocab_size = 3584, 18944, 0, 152_064


def figures(text: str) -> dict[str, float]:
    """GiB by option."""
    return {option: float(size) for option, size in re.findall(r"^\s*(\w+).*?: ([\d.]+) GiB less", text, re.M)}


def test_advice_names_options_and_amounts():
    """24 GiB are full at 8 x 2048 tokens in one micro-batch; half of them fit, in two micro-batches."""
    plan = PassPlan((1,), layer_slots=6, keep_logit_gradients=True)
    text = advice(Qwen7B(), StreamingConfig(), [16_384], plan, wanted=int(27 * GIB), limit=int(24 * GIB))
    assert text.startswith("27.00 GiB of device memory were needed, 24.00 GiB can be had")
    (tokens,) = map(int, re.findall(r"at most about (\d+) tokens per micro-batch instead of 16384", text))
    assert 8_192 < tokens < 14_400 and tokens % 64 == 0
    saved = figures(text)
    # Four more layer slots, embedding and head over the layers, and the kept logits of the micro-batch.
    assert saved["resident_layers"] > (4 * 2 * 233_057_792 + 2 * 16_384 * 152_064) / GIB
    assert saved["device_activation_gb"] == pytest.approx(28 * 16_384 * 3584 * 2 / GIB, abs=0.01)
    # Neither is a smaller chunk of the head of use, where a layer needs more, nor a smaller wave than a micro-batch.
    assert set(saved) == {"resident_layers", "device_activation_gb"}


def test_a_smaller_chunk_of_the_head_is_advised_where_it_needs_the_most():
    text = advice(Qwen7B(), StreamingConfig(), [512], PassPlan((1,)), wanted=int(9 * GIB), limit=int(8 * GIB))
    assert "tokens per micro-batch" not in text  # its layers have room
    assert figures(text)["head_chunk_tokens"] == pytest.approx(512 * 152_064 * 18 / GIB, abs=0.01)


def test_tokens_that_fit_do_not_depend_on_where_in_a_layer_the_pass_failed():
    """65,536 tokens on 12 GiB fail at the first norm, with little allocated; the backward pass would need 30 GiB."""
    plan, config = PassPlan((1,), input_bytes=0), StreamingConfig(resident_layers=0)
    text = advice(Qwen7B(), config, [65_536], plan, wanted=int(12.1 * GIB), limit=int(12 * GIB))
    (tokens,) = map(int, re.findall(r"at most about (\d+) tokens", text))
    needed = sum(device_bytes(Qwen7B(), config, int(tokens / USABLE), 65_536).values())
    assert 11.5 * GIB < needed < 12 * GIB


STEP = [8_192] * 64
LARGE = {
    "hidden states": (StreamingConfig(resident_layers=0), PassPlan((64,), input_bytes=0)),
    "recomputed inputs": (StreamingConfig(resident_layers=0, checkpoint_interval=4), PassPlan((64,), input_bytes=0)),
    "scores": (StreamingConfig(resident_layers=0), None),
}


@pytest.mark.parametrize("what", LARGE)
def test_a_wave_too_large_is_made_smaller_and_not_its_micro_batches(what):
    """What the 524,288 tokens of the step have on the device alone leaves no room."""
    config, plan = LARGE[what]
    whole, half = (
        sum(device_bytes(Qwen7B(), config, 8_192, tokens, training=plan is not None).values())
        for tokens in (524_288, 262_144)
    )
    unmoved = sum(device_bytes(Qwen7B(), config, 64, 524_288, training=plan is not None).values())
    text = advice(Qwen7B(), config, STEP, plan, wanted=whole, limit=unmoved)
    assert "tokens per micro-batch" not in text
    options = [line.strip() for line in text.splitlines() if line.endswith(f": {(whole - half) / GIB:.2f} GiB less")]
    wave = "fewer rows at a time (data.train_batch_size)" if plan is None else "wave_tokens=262144 (gradients"
    assert len(options) == 1 and options[0].startswith(wave)


def test_what_a_step_in_one_wave_has_more_is_taken_off_the_savings_of_lean_mode():
    """64 waves of one micro-batch become one, whose hidden states take more than the two kept layers did."""
    plan = PassPlan((1,) * 64, kept_layers=2, input_bytes=0)
    kept = 2 * 8_192 * 155 * 1024
    text = advice(Qwen7B(), StreamingConfig(), STEP, plan, int(20 * GIB), int(19 * GIB), 155 * 1024)
    edge, layers = 2 * 545_000_960, 2 * 2 * 233_057_792
    over_each_other = (2 + 4) / 2 * (edge + layers - max(edge, layers))  # weights and their gradients
    one_wave = 63 * 8_192 * 3584 * 2
    assert one_wave > kept
    saved = (kept + over_each_other - one_wave) / GIB
    assert figures(text)["resident_layers"] == pytest.approx(saved, abs=0.01)


def test_advice_for_a_lean_scoring_pass_names_no_option_of_training():
    config = StreamingConfig(resident_layers=0)
    text = advice(Qwen7B(), config, [65_536, 100], None, wanted=int(12 * GIB), limit=int(10 * GIB))
    assert "tokens per micro-batch instead of 65536" in text
    assert not figures(text)


@dataclass
class GptOss120B(Qwen7B):
    """Shapes of GPT-OSS-120B, of whose layers 99% are experts."""

    layer_sizes = trained_layer_sizes = (3_213_080_192,) * 36
    edge_sizes = trained_edge_sizes = (579_133_440, 579_136_320)
    expert_sizes = trained_expert_sizes = (3_186_000_000,) * 36
    separable_experts = 128
    slot_sizes = trained_slot_sizes = {"edge": 579_136_320}
    hidden_size, intermediate_size, experts_per_token, vocab_size = 2880, 4 * 2880, 4, 201_088


def test_advice_for_a_mixture_names_parts_of_its_experts():
    plan, config = PassPlan((1,)), StreamingConfig(resident_layers=0)
    text = advice(GptOss120B(), config, [8_192], plan, wanted=int(60 * GIB), limit=int(40 * GIB))
    # Two slots, two float32 sums and the gradient that autograd returns are of half the experts instead of all.
    saved = (2 * 2 + 2 * 4 + 2) * 3_186_000_000 / 2
    assert figures(text)["expert_parts"] == pytest.approx(saved / GIB, rel=0.02)
    assert "expert_parts=2" in text
    split = StreamingConfig(expert_parts=4)
    assert "expert_parts=8" in advice(GptOss120B(), split, [8_192], plan, wanted=int(60 * GIB), limit=int(40 * GIB))


@pytest.mark.parametrize("name, parts", [("Llama-4-Scout", 0), ("Llama-2-7B", 0), ("GPT-OSS-20B", 8)])
def test_advice_names_parts_only_where_the_engine_takes_them(name, parts):
    """The experts of Llama 4 take other inputs, see test_expert_parts.py."""
    config = family_config(name, hidden_size=256, intermediate_size=8192)
    sizes, plan = ModelSizes.of(config), plan_model(config)
    assert sizes.separable_experts == plan.separable_experts == parts
    for model in (sizes, plan):
        text = advice(model, StreamingConfig(resident_layers=0), [64], PassPlan((1,)), int(2 * GIB), int(1 * GIB))
        assert ("expert_parts=2" in text) == (parts > 0)


@pytest.mark.parametrize("place", ["head", "layer"])
def test_out_of_memory_keeps_weights_moments_and_count(place, monkeypatch):
    """The error of the CUDA allocator, raised in the middle of a pass; then the step that fits is as without it."""
    config = oracle.tiny_config("qwen2", layers=3)
    model = oracle.plain_model(config)
    hit, control = (oracle.make_engine(model, config) for _ in range(2))
    batches = oracle.split_micro_batches(oracle.random_rows([9, 14, 6]), 1)

    def loss(index, scores):
        return -scores.log_probs.sum()

    def refuse(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    for engine in (hit, control):
        engine.forward_backward(batches, loss)
        engine.optimizer_step()
        engine.zero_grad()
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        if place == "layer":
            patch.setattr(hit._functions, "layer", refuse)
        hit.forward_backward(batches, refuse if place == "head" else loss)
    assert hit._ring is None and hit.step_count == 1  # nothing is held on the device
    for engine in (hit, control):
        engine.forward_backward(oracle.split_micro_batches(oracle.random_rows([9, 14, 6]), 3), loss)
        engine.optimizer_step()
    kept, expected = oracle.masters(hit), oracle.masters(control)
    assert all(torch.equal(kept[name], expected[name]) for name in expected)
    for left, right in zip(hit.state.units, control.state.units, strict=True):
        assert torch.equal(left.exp_avg, right.exp_avg) and torch.equal(left.exp_avg_sq, right.exp_avg_sq)
    hit.close(), control.close()
