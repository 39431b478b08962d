"""The preflight: the plan against real arenas, against fake and real memory limits, and against a real small tmpfs."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PretrainedConfig

from megatrain_verl.config import StreamingConfig
from megatrain_verl.model_sizes import ModelSizes
from megatrain_verl.resources import (
    GIB,
    HostPlan,
    available_host_memory,
    check_host_memory,
    check_shared_memory,
)
from megatrain_verl.streaming.chunked_adamw import ChunkedAdamW, TorchKernel
from megatrain_verl.streaming.gradients import SLAB_ELEMENTS
from megatrain_verl.streaming.host_store import ParameterState
from megatrain_verl.streaming.model_plan import ModelPlan, plan_model
from tests.oracle import tiny_config
from tests.vision import cases

MEMINFO = "MemTotal:       1024 kB\nMemFree:         100 kB\nMemAvailable:    {kib} kB\n"


@pytest.fixture(scope="module")
def plan_7b() -> ModelPlan:
    sizes = {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28}
    return plan_model(tiny_config("qwen2", layers=28, num_key_value_heads=4, **sizes))


@pytest.mark.parametrize("settings", [{}, {"grad_dtype": "float32"}, {"dtype": "float32"}])
@pytest.mark.parametrize(("trainable", "reference"), [(True, True), (True, False), (False, False)])
def test_plan_counts_the_arenas_that_are_allocated(settings: dict, trainable: bool, reference: bool) -> None:
    config, plan = StreamingConfig(**settings), plan_model(tiny_config("llama"))
    host_plan = HostPlan.of(plan, config, trainable=trainable, reference=reference)
    state = ParameterState.allocate(plan, config, trainable=trainable, reference=reference, register=False)
    for kind, nbytes in host_plan.bytes_by_kind.items():
        if kind != "staging":
            assert nbytes == sum(getattr(unit, kind).nbytes for unit in state.units), kind
    assert host_plan.total - host_plan.bytes_by_kind.get("staging", 0) == state.nbytes
    assert host_plan.parameters == plan.num_parameters


@pytest.mark.parametrize(
    "config", [tiny_config("qwen2"), tiny_config("qwen2", tied=True), cases.tiny_config("qwen3_vl")]
)
def test_spares_of_head_and_decoder_layers_are_counted(config: PretrainedConfig) -> None:
    settings, plan = StreamingConfig(speculative_adamw_gb=1.0), plan_model(config)
    host_plan = HostPlan.of(plan, settings, trainable=True, reference=False)
    state = ParameterState.allocate(plan, settings, trainable=True, reference=False, register=False)
    spared = [unit.plan for unit in state.units if unit.spare is not None]
    assert spared == [*plan.layers, *([] if plan.tied else [plan.head])]
    assert host_plan.total - host_plan.bytes_by_kind["staging"] == state.nbytes
    if plan.vision is None:
        counted = HostPlan.of(ModelSizes.of(config), settings, trainable=True, reference=False)
        assert counted.bytes_by_kind["spare"] == 12 * sum(span.numel for unit in spared for span in unit.spans)
    state.close()


def test_plan_counts_the_scratch_and_the_slabs(plan_7b: ModelPlan) -> None:
    scratch = sum(
        part.nbytes for part in vars(ChunkedAdamW(TorchKernel(), threads=3)).values() if torch.is_tensor(part)
    )
    narrow = StreamingConfig(cpu_threads=3)
    assert HostPlan.of(plan_7b, narrow, trainable=True, reference=False).bytes_by_kind["staging"] == scratch
    wide = StreamingConfig(cpu_threads=3, grad_dtype="float32", num_grad_slabs=5)
    staging = HostPlan.of(plan_7b, wide, trainable=True, reference=False).bytes_by_kind["staging"]
    assert staging == scratch + 5 * 4 * SLAB_ELEMENTS


def test_7b_model_takes_14_bytes_per_parameter_and_2_for_the_reference(plan_7b: ModelPlan) -> None:
    config = StreamingConfig()
    plain = HostPlan.of(plan_7b, config, trainable=True, reference=False)
    with_reference = HostPlan.of(plan_7b, config, trainable=True, reference=True)
    assert plain.parameters == 7_615_616_512
    assert plain.bytes_per_parameter == pytest.approx(14, abs=0.01)
    assert with_reference.bytes_per_parameter == pytest.approx(16, abs=0.01)


def test_too_little_memory_is_refused_with_the_plan_and_the_remedies(plan_7b: ModelPlan) -> None:
    config = StreamingConfig(host_memory_gb=100, grad_dtype="float32", cpu_threads=2)
    with pytest.raises(ValueError) as refusal:
        check_host_memory(HostPlan.of(plan_7b, config, trainable=True, reference=True), config)
    message = str(refusal.value)
    assert "7,615,616,512 parameters need 134.31 GiB" in message
    assert "100.00 GiB are available (host_memory_gb)" in message
    table = {line.split()[0]: float(line.split()[1]) for line in message.splitlines() if line.endswith("GiB")}
    assert table == {
        "weight": 14.19,
        "low": 14.19,
        "exp_avg": 28.37,
        "exp_avg_sq": 28.37,
        "grad": 28.37,
        "reference": 14.19,
        "staging": 0.25,
    }
    assert "without a reference policy: 14.19 GiB less" in message
    assert "grad_dtype=auto without wave_tokens: 14.4" in message


def test_remedies_name_only_what_can_be_lowered(plan_7b: ModelPlan) -> None:
    config = StreamingConfig(host_memory_gb=1)
    with pytest.raises(ValueError) as refusal:
        check_host_memory(HostPlan.of(plan_7b, config, trainable=False, reference=False), config)
    assert "KL" not in str(refusal.value) and "grad_dtype" not in str(refusal.value)
    with pytest.raises(ValueError, match="dtype=bfloat16, which keeps"):
        config = StreamingConfig(host_memory_gb=1, dtype="float32")
        check_host_memory(HostPlan.of(plan_7b, config, trainable=True, reference=False), config)


def test_memory_for_adamw_ahead_of_the_norm_is_named_first(plan_7b: ModelPlan) -> None:
    config = StreamingConfig(host_memory_gb=100, speculative_adamw_gb=30)
    host_plan = HostPlan.of(plan_7b, config, trainable=True, reference=True)
    with pytest.raises(ValueError) as refusal:
        check_host_memory(host_plan, config)
    spare = host_plan.bytes_by_kind["spare"] / GIB
    first = str(refusal.value).split("What helps:\n")[1].splitlines()[0]
    assert 27 < spare < 30 and "speculative_adamw_gb=0" in first and first.endswith(f": {spare:.2f} GiB less")


def test_this_machine_is_asked_unless_told_otherwise(plan_7b: ModelPlan) -> None:
    huge = HostPlan({"weight": 1 << 60}, parameters=1 << 59)
    with pytest.raises(ValueError, match=r"\((MemAvailable in /proc/meminfo|limit of .* in /sys/fs/cgroup.*)\)"):
        check_host_memory(huge, StreamingConfig())
    check_host_memory(huge, StreamingConfig(host_memory_gb=2**31))
    tiny = HostPlan.of(plan_model(tiny_config("qwen2")), StreamingConfig(), trainable=True, reference=True)
    check_host_memory(tiny, StreamingConfig())


def test_five_percent_are_left_for_the_process() -> None:
    plan = HostPlan({"weight": GIB}, parameters=GIB // 2)
    check_host_memory(plan, StreamingConfig(host_memory_gb=1.051))
    with pytest.raises(ValueError, match="need 1.05 GiB"):
        check_host_memory(plan, StreamingConfig(host_memory_gb=1.049))


def make_cgroup(folder: Path, *, v1: bool, limit: str, usage: int, cache: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    prefix = "total_" if v1 else ""
    (folder / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(f"{limit}\n")
    (folder / ("memory.usage_in_bytes" if v1 else "memory.current")).write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 7\n{prefix}inactive_file {cache}\n{prefix}active_file 1\n")


@pytest.fixture
def asked(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Arguments for `available_host_memory` that point to files of this test; MemAvailable is 1 GiB."""
    (tmp_path / "meminfo").write_text(MEMINFO.format(kib=1 << 20))
    (tmp_path / "own").write_text("0::/pod/container\n")
    yield {name: str(tmp_path / file) for name, file in ASKED.items()}


ASKED = {"meminfo": "meminfo", "cgroup_root": "cgroup", "own_cgroup": "own"}


def test_mem_available_counts_without_a_limit(asked: dict, tmp_path: Path) -> None:
    assert available_host_memory(**asked) == (GIB, f"MemAvailable in {tmp_path}/meminfo")
    make_cgroup(tmp_path / "cgroup/pod/container", v1=False, limit="max", usage=1, cache=0)
    assert available_host_memory(**asked)[0] == GIB


@pytest.mark.parametrize("place", ["cgroup/pod/container", "cgroup/pod", "cgroup"])
def test_tightest_cgroup_v2_limit_counts(asked: dict, tmp_path: Path, place: str) -> None:
    for folder in ("cgroup", "cgroup/pod", "cgroup/pod/container"):
        make_cgroup(tmp_path / folder, v1=False, limit=str(1 << 40), usage=1 << 20, cache=0)
    make_cgroup(tmp_path / place, v1=False, limit=str(1 << 29), usage=300, cache=99)
    available, source = available_host_memory(**asked)
    assert available == (1 << 29) - 200  # page cache can be dropped
    assert source == f"limit of 0.50 GiB in {tmp_path}/{place}/memory.max"


def test_cgroup_v1_limit_counts(asked: dict, tmp_path: Path) -> None:
    (tmp_path / "own").write_text("5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n")
    make_cgroup(tmp_path / "cgroup/memory", v1=True, limit=str(9223372036854771712), usage=300, cache=99)
    assert available_host_memory(**asked)[0] == GIB
    # Inside a container its own group is mounted at the root, whatever /proc/self/cgroup says.
    make_cgroup(tmp_path / "cgroup/memory", v1=True, limit=str(1 << 28), usage=300, cache=99)
    available, source = available_host_memory(**asked)
    assert (available, source) == (
        (1 << 28) - 200,
        f"limit of 0.25 GiB in {tmp_path}/cgroup/memory/memory.limit_in_bytes",
    )


@pytest.fixture
def small_mount(tmp_path: Path) -> Iterator[Path]:
    """A real tmpfs of 64 MiB, the size of /dev/shm in a container."""
    folder = tmp_path / "shm"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting a tmpfs needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_small_shared_memory_is_refused(small_mount: Path) -> None:
    check_shared_memory(64 << 20, str(small_mount))
    with pytest.raises(ValueError, match=r"needs 65 MiB of shared memory, .* has 64 MiB free: .*--shm-size"):
        check_shared_memory(65 << 20, str(small_mount))
    (small_mount / "left").write_bytes(b"x" * (32 << 20))
    with pytest.raises(ValueError, match="has 32 MiB free"):
        check_shared_memory(33 << 20, str(small_mount))


def test_shared_memory_of_any_folder(tmp_path: Path) -> None:
    usage = os.statvfs(tmp_path)
    check_shared_memory(1, str(tmp_path))
    with pytest.raises(ValueError, match="MiB free"):
        check_shared_memory(2 * usage.f_blocks * usage.f_frsize, str(tmp_path))
    with pytest.raises(ValueError, match="does not exist"):
        check_shared_memory(1, str(tmp_path / "nowhere"))
