"""The benchmark's own arithmetic, and that every system does the same work."""

import dataclasses
import re
from pathlib import Path

import bfloat16_probabilities
import pytest
from ceilings import Bound, Ceilings
from grpo.inputs import make_tokenizer
from processes import ANY_DEVICE, run_system
from report import finish, table
from several_gpus import MEMORY, predict
from shared_reads import CHUNK_BYTES, Readers
from timeline import device_spans
from workload import Workload

from megatrain_verl.model_sizes import ModelSizes
from tests import oracle

TINY = Workload("tiny", 2, rows=4, seq_len=32, steps=1, device="cpu")
CEILINGS = Ceilings(50e9, 50e9, 40e9, 800e12, 700e12, {"native": 5e9})


def _spec(system: str, workload: Workload = TINY) -> dict:
    fields = {"system": system, "workload": dataclasses.asdict(workload), "micro_batch": 2, "options": {}}
    return fields | {"trace": None, "devices": [ANY_DEVICE], "reads": "measured"}


def _sizes(layers: int, edge: int) -> ModelSizes:
    total = layers + 2 * edge
    trained = {"trained_layer_sizes": (layers,), "trained_edge_sizes": (edge, edge)}
    trained |= {"expert_sizes": (0,), "trained_expert_sizes": (0,), "separable_experts": 0}
    return ModelSizes(total, total, layers, (layers,), (edge, edge), edge, 1, 1, 0, 1, tied=False, **trained)


def test_bound_is_the_larger_of_arithmetic_and_transfers() -> None:
    sizes = _sizes(6_000_000_000, 500_000_000)
    many = Bound.of(sizes, 100_000, CEILINGS, "native")
    forward, backward = 2 * 6.5e9 * 1e5 / 700e12, (6 * 6e9 + 4 * 0.5e9) * 1e5 / 700e12
    assert many.adamw_behind_forward == pytest.approx(forward + backward)  # AdamW takes 1.4 s, the forward pass 1.9
    few = Bound.of(sizes, 1, CEILINGS, "native")
    assert few.adamw_behind_forward == pytest.approx(7e9 / 5e9 + 14e9 / 40e9)
    assert few.adamw_hidden == pytest.approx(7e9 / 5e9)


def test_a_row_counts_tokens_and_operations() -> None:
    sizes = ModelSizes.of(TINY.config)
    row = finish({"step_s": 0.5, "host_bytes": 14 * sizes.num_parameters}, TINY, sizes, CEILINGS)
    assert row["tokens_per_s"] == 256
    assert row["tflops"] == pytest.approx(6 * sizes.num_parameters * 256 / 1e12)
    assert row["tflops_without_embedding"] == pytest.approx(6 * (sizes.num_parameters - 512 * 64) * 256 / 1e12)
    assert row["host_bytes_per_parameter"] == 14


def test_several_gpus_are_limited_by_what_they_share() -> None:
    sizes = _sizes(6_000_000_000, 500_000_000)
    plenty = predict(sizes, 800_000, 4, 4 * MEMORY)
    assert plenty.speedup == pytest.approx(4) and plenty.saturated is None
    scarce = predict(sizes, 8_000, 8, MEMORY)  # hardly any arithmetic: weights in 8 ranks, AdamW at the rate of one
    weights, adamw = 14e9, 7e9 * 26
    assert scarce.seconds == pytest.approx((8 * weights + adamw) / MEMORY + 9 * weights / MEMORY)
    assert scarce.saturated == "host memory" and scarce.speedup < 1
    once = predict(sizes, 8_000, 8, MEMORY, once=True)
    assert once.seconds == pytest.approx((weights + adamw) / MEMORY + 2 * weights / MEMORY)
    ample = predict(sizes, 8_000, 8, 1e15)
    assert ample.seconds == pytest.approx(weights / 55.1e9 + weights / 48.6e9) and ample.saturated == "PCIe"


def test_each_way_of_reading_gives_every_device_the_whole_unit() -> None:
    readers = Readers(["cpu"] * 3, 4 * CHUNK_BYTES // 3 * 3)  # the last chunk of each part is shorter
    readers.check(readers.full)
    readers.check(readers.once)

    def nothing(rank: int) -> None:
        assert rank < 3

    with pytest.raises(RuntimeError, match="copies of 'nothing' lose data"):
        readers.check(nothing)
    readers.close()


def test_streams_are_named_by_what_they_carry() -> None:
    def event(category: str, name: str, stream: int, nbytes: int) -> dict:
        return {"cat": category, "name": name, "ts": 1, "dur": 2, "args": {"stream": stream, "bytes": nbytes}}

    events = [
        event("kernel", "gemm", 7, 0),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 13, 100),
        event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 7, 8),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 17, 100),
        event("gpu_memset", "Memset (Device)", 20, 4),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 21, 900),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 21, 900),
    ]
    rows = [row for row, *_ in device_spans(events)]
    lane = ["AdamW lane 0"] * 2
    assert rows == ["compute stream", "weight stream", "compute stream", "grad stream", "stream 20", *lane]


def test_a_system_that_fails_is_a_row_with_its_error() -> None:
    broken = run_system(_spec("fsdp2", dataclasses.replace(TINY, model="no such model")), 200, None)
    assert "unknown model 'no such model'" in broken["error"]
    assert "fsdp2 failed: ValueError" in table([{"system": "fsdp2"} | broken])


def test_a_system_over_its_time_is_ended() -> None:
    assert run_system(_spec("fsdp2"), 0.5, None) == {"error": "no result within 0.5 s"}


@pytest.mark.slow
def test_the_engine_and_fsdp2_do_the_same_work() -> None:
    ours, fsdp2 = (run_system(_spec(system), 250, None) for system in ("megatrain", "fsdp2"))
    assert ours["loss"] == pytest.approx(fsdp2["loss"], abs=1e-5)


def test_the_engine_rounds_as_plain_transformers_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = oracle.plain_model(oracle.tiny_config("qwen2", vocab_size=300))
    model.save_pretrained(tmp_path)
    make_tokenizer(300).save_pretrained(tmp_path)
    monkeypatch.setattr("sys.argv", ["", "--model", str(tmp_path), "--rows", "3", "--length", "5"])
    bfloat16_probabilities.main()
    printed = capsys.readouterr().out
    plain, engine = (float(mean) for mean in re.findall(r"mean ([\d.e-]+)", printed))
    assert "15 tokens of 3 answers" in printed
    assert 0 < engine < 2 * plain and plain < 2 * engine
