"""The simulated step: its ledger against tensors of known size, and GPT-OSS-120B on a GPU with 80 GB."""

import json

import pytest
import torch

from benchmarks import simulate
from benchmarks.simulate import Ledger
from tests.config_headers import MODELS


def test_ledger_counts_what_lives_and_what_lived_at_once() -> None:
    ledger = Ledger()
    with ledger:
        first = torch.empty(1000, dtype=torch.float32, device="meta")
        second = first + first  # 4,000 bytes each, in blocks of 512
        view = second[10:].view(torch.int32)
        assert ledger.current == ledger.peak == 2 * 4096
        torch.empty(10_000, device="cpu")
        del first
        ledger.ignore(torch.empty(5, dtype=torch.uint8, device="meta"))
    assert ledger.current == 4096 and view.numel() == 990
    del second
    assert ledger.current == 4096  # the view refers to it
    del view
    assert ledger.current == 0 and ledger.peak == 2 * 4096


def step_of_120b(*options: str) -> dict:
    sizes = ["--rows", "4", "--row-tokens", "2048", "--micro-batch", "4"]
    arguments = simulate.command_line().parse_args(["--model", str(MODELS / "gpt-oss-120b"), *sizes, *options])
    return simulate.simulate(arguments)


def test_gpt_oss_120b_trains_on_80_gb() -> None:
    result = step_of_120b("--lean")
    assert result["parameters"] == 116_829_156_672
    # Two slots and the accumulators of whole layers alone: 2 x (2 + 4) bytes for each of a layer's 3.2e9 parameters.
    assert 12 * 3.2e9 < result["gpu_total"] <= 80e9
    inputs = 36 * result["tokens_per_step"] * 2880 * 2
    assert result["gpu_total"] == pytest.approx(result["planned_without_kept_inputs"] + inputs, rel=0.1)
    assert result["host_total"] == pytest.approx(1.05 * 14 * result["parameters"], rel=0.01)
    # Every weight crosses twice, but for the embedding, and every gradient once; what is still there need not come.
    assert 2 * 2 * 34 * 3_213_080_192 < result["sent_to_gpu"] < 2 * 2 * result["parameters"]
    assert result["sent_to_host"] == pytest.approx(2 * result["parameters"], rel=0.001)


@pytest.mark.slow
def test_planner_uses_80_gb_and_no_more_for_gpt_oss_120b() -> None:
    result = step_of_120b()
    assert result["planned_without_kept_inputs"] < result["gpu_total"] <= 80e9


def test_parts_of_experts_divide_the_memory_of_gpt_oss_120b(tmp_path) -> None:
    """Four of its layers: in eight parts they need a fraction, and cross as often."""
    fields = json.loads((MODELS / "gpt-oss-120b" / "config.json").read_text())
    fields |= {"num_hidden_layers": 4, "layer_types": fields["layer_types"][:4]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    sizes = ["--rows", "4", "--row-tokens", "2048", "--micro-batch", "4", "--lean", "--model", str(tmp_path)]
    whole, split = (
        simulate.simulate(simulate.command_line().parse_args([*sizes, "--expert-parts", parts])) for parts in "18"
    )
    inputs = 4 * split["tokens_per_step"] * 2880 * 2
    for result in (whole, split):
        assert result["gpu_total"] == pytest.approx(result["planned_without_kept_inputs"] + inputs, rel=0.1)
        assert result["sent_to_host"] == pytest.approx(2 * result["parameters"], rel=0.001)
    assert split["gpu_total"] < 0.3 * whole["gpu_total"]
    assert split["sent_to_gpu"] == pytest.approx(whole["sent_to_gpu"], rel=0.01)


@pytest.mark.slow
def test_gpt_oss_120b_trains_on_16_gb_with_eight_parts() -> None:
    result = step_of_120b("--expert-parts", "8")
    assert result["parameters"] == 116_829_156_672
    assert result["gpu_total"] <= 16e9
