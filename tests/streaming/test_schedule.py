"""What crosses to and from the device, recomputation, dropout, and what is refused."""

import gc

import pytest
import torch
from transformers import CohereConfig, MixtralConfig, Qwen2Config, T5Config

from megatrain_verl.config import StreamingConfig
from megatrain_verl.streaming.batch import MicroBatch
from megatrain_verl.streaming.device_batch import DeviceBatch
from megatrain_verl.streaming.dropout import dropout_seed
from megatrain_verl.streaming.layer_major import backward_visits
from megatrain_verl.streaming.model_plan import plan_model
from tests import oracle
from tests.families.configs import family_config


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 2, 8])
def test_transfers_follow_the_plan_whatever_the_number_of_micro_batches(tied, micro_batches):
    config = oracle.tiny_config("qwen2", tied=tied)
    engine = oracle.make_engine(oracle.plain_model(config), config)
    rows = oracle.random_rows([6] * 8)
    engine.forward_backward(
        oracle.split_micro_batches(rows, 8 // micro_batches), lambda index, scores: -scores.log_probs.sum()
    )
    layers = sum(unit.numel for unit in engine.plan.layers)
    edges = sum(unit.numel for unit in engine.plan.units) - layers
    # Float32: layers twice, but the two that are still there at the turn; embedding and head once.
    assert engine.counters.h2d_bytes == 4 * (2 * layers - sum(unit.numel for unit in engine.plan.layers[-2:]) + edges)
    assert engine.counters.d2h_bytes == 4 * (layers + edges)  # each gradient once
    engine.close()


def test_backward_visits_walk_each_segment_before_running_it_backward():
    assert backward_visits(3, 1, 3) == [(2, True), (1, True), (0, True)]
    assert backward_visits(5, 3, 5) == [
        (3, False), (4, True), (3, True), (0, False), (1, False), (2, True), (1, True), (0, True),
    ]  # fmt: skip
    assert backward_visits(5, 2, 2) == [(4, True), (3, True), (2, True), (0, False), (1, True), (0, True)]


def plain_dropout_gradients(model, rows, seeds):
    """Gradients of the plain model on one row per micro-batch, each layer's dropout drawn from the engine's seed."""
    layers = model.model.layers
    model.train()
    model.zero_grad()
    for m, row in enumerate(rows):
        handles = [
            layer.register_forward_pre_hook(lambda *_, m=m, i=i: torch.manual_seed(seeds(m, i)) and None)
            for i, layer in enumerate(layers)
        ]
        (-oracle.plain_log_probs(model, row)[0].sum()).backward()
        for handle in handles:
            handle.remove()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_dropout_masks_are_redrawn_in_recomputation():
    config = oracle.tiny_config("qwen2", layers=4, attention_dropout=0.1)
    model = oracle.plain_model(config, attn_implementation="sdpa")
    rows = oracle.random_rows([12, 12])
    batches = oracle.split_micro_batches(rows, 1)
    grads = []
    for interval in (1, 2, 4):
        engine = oracle.make_engine(model, config, checkpoint_interval=interval, seed=5)
        engine.forward_backward(batches, lambda index, scores: -scores.log_probs.sum())
        grads.append(oracle.engine_gradients(engine))
        engine.close()
    for other in grads[1:]:
        assert all(torch.equal(other[name], grads[0][name]) for name in other)
    plain = plain_dropout_gradients(model, rows, lambda m, layer: dropout_seed((5, 0, 0), m, layer))
    for name, grad in grads[0].items():
        assert (grad - plain[name]).norm() <= 1e-5 * plain[name].norm() + 1e-4, name
    without = plain_dropout_gradients(model, rows, lambda m, layer: 1 + m + layer)
    assert (without["lm_head.weight"] - plain["lm_head.weight"]).norm() > 0.01 * plain["lm_head.weight"].norm()


def gradients_of_a_step(model, config, rows, **settings):
    """Gradients and norm of one step over `rows`, one per micro-batch, in an engine with `settings`."""
    engine = oracle.make_engine(model, config, **settings)
    batches = oracle.split_micro_batches(rows, 1)
    seen = []

    def loss_fn(index, scores):
        seen.append(index)
        return -scores.log_probs.sum() / 40

    outputs = engine.forward_backward(batches, loss_fn)
    assert seen == list(range(len(rows))) and len(outputs) == len(rows)
    grads = oracle.engine_gradients(engine)
    norm = engine.optimizer_step()
    engine.close()
    return grads, norm


def test_three_waves_with_two_slabs_equal_one_wave():
    config = oracle.tiny_config("qwen2", layers=4)
    model = oracle.plain_model(config)
    rows = oracle.random_rows([9, 14, 6, 11, 5, 8])
    whole, norm = gradients_of_a_step(model, config, rows)
    parts, norm_of_parts = gradients_of_a_step(model, config, rows, wave_tokens=23, num_grad_slabs=2)
    for name, grad in parts.items():
        assert (grad - whole[name]).norm() <= 1e-6 * whole[name].norm() + 1e-8, name
    assert norm_of_parts == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("interval", [1, 3])
def test_spilled_inputs_give_the_same_bits_as_resident_ones(interval):
    config = oracle.tiny_config("qwen2", layers=4)
    model = oracle.plain_model(config)
    rows = oracle.random_rows([9, 14, 6])
    resident, norm = gradients_of_a_step(model, config, rows, checkpoint_interval=interval)
    half = 4 / interval * sum(map(len, rows)) * 32 * 4 / 2 / 2**30
    for budget in (0.0, half):
        spilled, spilled_norm = gradients_of_a_step(
            model, config, rows, checkpoint_interval=interval, device_activation_gb=budget
        )
        assert all(torch.equal(spilled[name], resident[name]) for name in resident)
        assert spilled_norm == norm


@pytest.mark.usefixtures("compiler")
@pytest.mark.slow
def test_compiled_layers_give_the_same_step():
    """Rows of changing lengths, so that the compiled code is used with symbolic sizes too."""
    config = oracle.tiny_config("qwen2")
    model = oracle.plain_model(config)
    plain, compiled = oracle.make_engine(model, config), oracle.make_engine(model, config, compile_layers=True)
    for seed, lengths in enumerate(([9, 14, 6], [11, 20, 3], [30, 7])):
        batches = oracle.split_micro_batches(oracle.random_rows(lengths, seed=seed), 2)
        for engine in (plain, compiled):
            engine.zero_grad()
            engine.forward_backward(batches, lambda index, scores: -scores.log_probs.sum() / 40)
        expected = oracle.engine_gradients(plain)
        for name, grad in oracle.engine_gradients(compiled).items():
            assert (grad - expected[name]).norm() <= 1e-5 * expected[name].norm() + 1e-6, name
    plain.close()
    compiled.close()


@pytest.mark.parametrize("parts", [1, 2])
def test_a_wave_takes_what_it_had_on_the_device_with_it(parts):
    config = oracle.tiny_config("qwen2") if parts == 1 else family_config("Mixtral-8x7B")
    engine = oracle.make_engine(oracle.plain_model(config), config, wave_tokens=9, expert_parts=parts)
    alive = []
    gc.collect()  # what other tests have left

    def loss_fn(index, scores):
        alive.append(sum(type(each) is DeviceBatch for each in gc.get_objects()))
        return scores.log_probs.sum()

    outputs = engine.forward_backward(oracle.split_micro_batches(oracle.random_rows([9] * 3), 1), loss_fn)
    assert alive == [1, 1, 1] and len(outputs) == 3
    engine.close()


def test_an_engine_that_cannot_close_a_part_still_closes_the_rest(monkeypatch):
    config = oracle.tiny_config("qwen2")
    engine = oracle.make_engine(oracle.plain_model(config), config)

    def fail():
        raise RuntimeError("mailboxes in use")

    monkeypatch.setattr(engine._gradients, "close", fail)
    with pytest.raises(RuntimeError, match="mailboxes in use"):
        engine.close()
    assert engine.state.nbytes == 0


def test_a_micro_batch_larger_than_a_wave_is_refused():
    config = oracle.tiny_config("qwen2")
    engine = oracle.make_engine(oracle.plain_model(config), config, wave_tokens=8)
    with pytest.raises(ValueError, match="9 tokens exceeds wave_tokens=8"):
        engine.forward_backward([oracle.pack(oracle.random_rows([9]))], lambda index, scores: scores.log_probs.sum())
    engine.close()


@pytest.mark.parametrize(
    "config, message",
    [
        (T5Config(), "encoder-decoder"),
        (CohereConfig(), "cohere.*not supported"),
        (Qwen2Config(quantization_config={"quant_method": "fp8"}), "quantised .fp8"),
        (Qwen2Config(quantization_config={"quant_method": "gptq", "bits": 4}), "quantised .gptq"),
    ],
)
def test_models_it_would_train_wrongly_are_refused_by_name(config, message):
    with pytest.raises(ValueError, match=message):
        plan_model(config)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"dtype": "float16"}, "dtype must be one of bfloat16, float32"),
        ({"attn_implementation": "flash"}, "attn_implementation must be one of"),
        ({"checkpoint_interval": 0}, "checkpoint_interval must be a whole number >= 1"),
        ({"dtype": "float32", "grad_dtype": "bfloat16"}, "grad_dtype=auto"),
    ],
)
def test_bad_settings_name_the_field_and_the_choices(settings, message):
    with pytest.raises(ValueError, match=message):
        StreamingConfig(**settings)


@pytest.mark.parametrize("implementation", ["varlen", "flash_attention_2"])
def test_attention_that_this_machine_cannot_run_is_refused(implementation):
    config = oracle.tiny_config("qwen2")
    with pytest.raises(ValueError, match=implementation):
        oracle.make_engine(oracle.plain_model(config), config, attn_implementation=implementation)


def test_bad_batches_are_refused_before_any_work():
    config = oracle.tiny_config("qwen2")
    engine = oracle.make_engine(oracle.plain_model(config), config, max_seq_len=10)
    for rows, message in (
        ([torch.tensor([1, oracle.VOCAB])], "outside the vocabulary"),
        (oracle.random_rows([11]), "max_seq_len"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.forward([oracle.pack(rows)])
    assert engine.counters.h2d_bytes == 0
    ids = torch.tensor([1, 2, 3])
    for arguments, message in (
        ((ids, ids, [2]), "sum to 3"),
        ((ids, ids[:2], [3]), r"position_ids \(T,\) or \(4, T\)"),
        ((ids, ids, [3], 0.0), "temperature"),
    ):
        with pytest.raises(ValueError, match=message):
            MicroBatch(*arguments)
    engine.close()


def test_layers_of_different_behaviour_do_not_share_a_template():
    plan = plan_model(oracle.tiny_config("qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=2))
    assert [unit.structure for unit in plan.layers] == [0, 0, 1]
    assert len({unit.spans[0].shape for unit in plan.layers}) == 1  # same shapes: only the window differs


def test_a_token_passes_all_parameters_but_those_of_the_experts_it_is_not_sent_to():
    dense = plan_model(oracle.tiny_config("qwen2", hidden_size=36))
    assert dense.active_parameters == dense.num_parameters
    sizes = {**oracle.SIZES, "num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 1}
    mixture = plan_model(MixtralConfig(**sizes))
    expert = 3 * oracle.SIZES["hidden_size"] * oracle.SIZES["intermediate_size"]
    assert mixture.active_parameters == mixture.num_parameters - 2 * 3 * expert
