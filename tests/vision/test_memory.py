"""The device memory that is planned for images, and that they take."""

import copy
import re

import pytest
import torch

from benchmarks.simulate import Ledger
from megatrain_verl.config import StreamingConfig
from megatrain_verl.resources import GIB
from megatrain_verl.streaming import pass_plan
from megatrain_verl.streaming.device_plan import device_bytes
from megatrain_verl.streaming.image_memory import ImageSizes
from megatrain_verl.streaming.memory_advice import CUBLAS_WORKSPACE, USABLE, advice
from megatrain_verl.streaming.model_plan import plan_model
from megatrain_verl.streaming.pass_plan import PassPlan, PassPlanner
from megatrain_verl.streaming.vision_plan import image_features
from tests import oracle
from tests.vision import cases

WIDTH, DEPTH = 64, 8
FAMILIES = [
    "llava_next",
    "qwen2_5_vl",
    *(pytest.param(family, marks=pytest.mark.slow) for family in ("gemma3", "internvl", "qwen2_vl", "qwen3_vl")),
]


def config_of(family):
    """A config whose encoder is large beside its projector."""
    config = cases.tiny_config(family)
    width = "embed_dim" if family == "qwen2_vl" else "hidden_size"  # of the encoder
    sizes = {width: WIDTH, "depth": DEPTH, "num_hidden_layers": DEPTH, "intermediate_size": 4 * WIDTH, "mlp_ratio": 4}
    for name, size in sizes.items():
        if hasattr(config.vision_config, name):
            setattr(config.vision_config, name, size)
    return config


def taken_bytes(vision, images):
    """What tensors take at most in the forward and backward pass over `images`, and what the features take."""
    parameters = [parameter for parameter in vision.parameters() if parameter.requires_grad]
    ledger = Ledger("cpu")
    for tensor in (*vision.parameters(), *images.values()):
        ledger.ignore(tensor)
    with ledger:
        features = image_features(vision, images)
        torch.autograd.grad(features, parameters, [torch.ones_like(each) for each in features], allow_unused=True)
    return ledger.peak, sum(each.nbytes for each in features)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_planned_for_images_is_what_they_take(family):
    config = config_of(family)
    engine = oracle.make_engine(cases.plain_model(copy.deepcopy(config)), config, attn_implementation="sdpa")
    sizes = ImageSizes.of(engine.plan.vision)
    engine.acquire_device()
    vision = engine._ring.vision.train()
    for count in (1, 6):
        batch = cases.pack(cases.rows(family, [count] * 4))
        taken, features = taken_bytes(vision, batch.images)
        assert taken <= sizes.encoder_bytes(batch, 4) <= 1.9 * taken
        assert sizes.held_bytes(batch, 4) == sum(each.nbytes for each in batch.images.values()) + 2 * features
    assert sizes.held_bytes(oracle.pack(oracle.random_rows([9])), 4) == 0
    engine.close()


def planner_of(monkeypatch, freeze=()):
    plan = plan_model(config_of("qwen2_5_vl"), freeze)
    monkeypatch.setattr(pass_plan, "available_bytes", lambda own_bytes, utilization: 64 << 20)
    return PassPlanner(plan, StreamingConfig(head_chunk_tokens=8), "cuda", ImageSizes.of(plan.vision)), plan


@pytest.mark.parametrize("freeze", [[], ["*visual*"]], ids=["trained", "frozen"])
def test_images_leave_less_memory_for_what_is_kept(freeze, monkeypatch):
    planner, _ = planner_of(monkeypatch, freeze)
    batch = cases.pack(cases.rows("qwen2_5_vl", [20]))
    text = oracle.pack([batch.input_ids])
    room = [planner.plan([each] * 3, 0).input_bytes for each in (text, batch)]
    images, scored = (planner.image_bytes([batch] * 3, training=training) for training in (True, False))
    tokens = int((batch.input_ids == cases.IMAGE_TOKEN).sum())
    features = tokens * 32 * 2  # 32 wide, bfloat16; as large are their gradients
    pixels = sum(each.nbytes for each in batch.images.values())
    assert images.held == [pixels + (1 if freeze else 2) * features] * 3 and scored.held == [pixels + features] * 3
    assert images.encoder == scored.encoder if freeze else images.encoder > 2 * scored.encoder
    # The encoder needs more than a decoder layer does; of what a pass works with a quarter more is left free.
    assert sum(images.held) + images.encoder / 2 < room[0] - room[1] < sum(images.held) + 1.25 * images.encoder


def test_advice_counts_pixels_with_the_wave_and_the_encoder_with_the_micro_batch(monkeypatch):
    planner, plan = planner_of(monkeypatch)
    batches = [cases.pack(cases.rows("qwen2_5_vl", [200]))] * 320
    tokens, images = [batch.num_tokens for batch in batches], planner.image_bytes(batches)
    config = StreamingConfig(resident_layers=0, head_chunk_tokens=8)
    kinds = {"image_bytes": sum(images.held), "encoder_bytes": images.encoder}
    needed = sum(device_bytes(plan, config, max(tokens), sum(tokens), **kinds).values()) + CUBLAS_WORKSPACE
    plans = plan, config, tokens, PassPlan((320,), input_bytes=0)
    text = advice(*plans, wanted=needed, limit=needed - images.encoder // 2, images=images)
    (fitting,) = map(int, re.findall(r"at most about (\d+) tokens per micro-batch", text))
    assert USABLE * (max(tokens) / 2 - 64) - 64 < fitting <= USABLE * max(tokens) / 2
    (smaller,) = map(float, re.findall(r"wave_tokens=.*: ([\d.]+) GiB less", text))
    assert smaller == pytest.approx((sum(images.held) + sum(tokens) * 32 * 2) / 2 / GIB, abs=0.01) and smaller > 0.3
