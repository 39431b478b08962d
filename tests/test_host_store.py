"""The arenas: their sizes and types, page kinds, and exact master weights."""

import contextlib
import os
import resource
from collections.abc import Iterator

import pytest
import torch

from megatrain_verl.config import StreamingConfig
from megatrain_verl.streaming.group.group import Group
from megatrain_verl.streaming.host_memory import HostBuffer, SharedFile
from megatrain_verl.streaming.host_store import SPLIT_CHUNK, ParameterState, UnitState, arena_dtypes
from megatrain_verl.streaming.master_weights import join_master, split_master
from megatrain_verl.streaming.model_plan import plan_model
from megatrain_verl.streaming.model_units import ParameterSpan, UnitPlan
from tests.oracle import tiny_config


@pytest.mark.parametrize(
    ("settings", "trainable", "reference", "bytes_per_parameter"),
    [
        ({}, True, False, 14),
        ({}, True, True, 16),
        ({"grad_dtype": "float32"}, True, True, 18),
        ({"dtype": "float32"}, True, False, 16),
        ({"dtype": "float32"}, True, True, 20),
        ({}, False, False, 2),
    ],
)
def test_bytes_per_parameter(settings: dict, trainable: bool, reference: bool, bytes_per_parameter: int) -> None:
    config, plan = StreamingConfig(**settings), plan_model(tiny_config("qwen2", tied=True))
    dtypes = arena_dtypes(config, trainable=trainable, reference=reference)
    assert sum(dtype.itemsize for dtype in dtypes.values()) == bytes_per_parameter
    state = ParameterState.allocate(plan, config, trainable=trainable, reference=reference, register=False)
    assert state.nbytes == bytes_per_parameter * sum(unit.numel for unit in plan.units)
    for unit in state.units:
        for kind, dtype in dtypes.items():
            arena = getattr(unit, kind)
            assert (arena.dtype, arena.numel()) == (dtype, unit.plan.numel) and not arena.any(), kind


def test_halves_hold_every_float_exactly() -> None:
    """A million bit patterns over all finite floats, and the corners."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(1 << 31), 1 << 31, (1 << 20,), dtype=torch.int32, generator=generator)
    corners = [0, -(1 << 31), 1, 0x7F7FFFFF, 0x3F808000, 0x3F807FFF, 0x00800000, 0x007FFFFF, -0x00800001]
    bits = torch.cat([bits, torch.tensor(corners, dtype=torch.int32)])
    master = bits.view(torch.float32)[bits.view(torch.float32).isfinite()]
    high, low = torch.empty(len(master), dtype=torch.bfloat16), torch.empty(len(master), dtype=torch.int16)
    split_master(master, high, low)
    assert torch.equal(join_master(high, low).view(torch.int32), master.view(torch.int32))
    # The high half is the nearest bfloat16: off torch's rounding on exact ties only.
    other = high.view(torch.int16) != master.to(torch.bfloat16).view(torch.int16)
    assert ((master.view(torch.int32)[other] & 0xFFFF) == 0x8000).all()


def test_large_parameter_is_written_in_chunks() -> None:
    size = SPLIT_CHUNK + 1000
    span = ParameterSpan("p", "p", torch.Size([2, size // 2]), 128)
    plan = UnitPlan("unit", [span], 128 + -(-size // 128) * 128)
    unit = UnitState(plan, torch.zeros(plan.numel, dtype=torch.bfloat16), torch.zeros(plan.numel, dtype=torch.int16))
    value = torch.randn(span.shape, generator=torch.Generator().manual_seed(0))
    kept = value.clone()
    unit.write(span, value)
    assert torch.equal(unit.master(128, 128 + size).view(span.shape), value)
    assert torch.equal(value, kept)  # the caller's tensor, maybe a mapped file, stays as it is
    assert not unit.master(0, 128).any() and not unit.master(128 + size).any()


def test_reference_equals_the_weights_until_they_change() -> None:
    plan = plan_model(tiny_config("qwen2"))
    state = ParameterState.allocate(plan, StreamingConfig(), trainable=True, reference=True, register=False)
    unit = state.units[1]
    unit.weight.fill_(1.0)
    assert unit.source(reference=True) is unit.weight
    unit.keep_reference()
    unit.weight.fill_(2.0)
    unit.keep_reference()  # only the first call copies
    assert unit.source(reference=True).unique().tolist() == [1.0]
    assert unit.source(reference=False).unique().tolist() == [2.0]


@pytest.fixture
def memfd() -> Iterator[int]:
    descriptor = os.memfd_create("shared arenas")
    yield descriptor
    os.close(descriptor)


def test_blocks_of_a_shared_file_are_the_same_memory_in_every_mapping(memfd: int) -> None:
    files = [SharedFile(memfd, 1 << 20, rank, 2) for rank in range(2)]
    labels = {"first": 100, "empty": 0, "second": 1 << 16}
    blocks = [
        {label: HostBuffer(size, label, register=False, shared=file) for label, size in labels.items()}
        for file in files
    ]
    for number, label in enumerate(labels, start=1):
        assert blocks[0][label].tensor.numel() == labels[label] and not blocks[0][label].tensor.any()
        blocks[0][label].tensor.fill_(number)
    for number, label in enumerate(labels, start=1):
        assert (blocks[1][label].tensor == number).all()
    assert files[0].nbytes == 2 * 4096 + (1 << 16)  # only what was taken has memory
    for buffer in (*blocks[0].values(), *blocks[1].values()):
        buffer.close()
    for file in files:
        file.close()


def test_refused_private_allocation_names_arena_and_size() -> None:
    with pytest.raises(MemoryError, match=r"cannot allocate 1073741824.00 GiB of host memory for layers.7.exp_avg"):
        HostBuffer(1 << 60, "layers.7.exp_avg", register=False)  # beyond the address space


def test_a_shared_file_without_room_names_the_arena(memfd: int) -> None:
    file = SharedFile(memfd, 1 << 16)
    HostBuffer(1 << 15, "layers.7.weight", register=False, shared=file)
    with pytest.raises(MemoryError, match="no room for layers.7.exp_avg"):
        HostBuffer(1 << 16, "layers.7.exp_avg", register=False, shared=file)
    file.close()


class RefusedMemory(Group):
    """A rank that gets no memory, and what it tells the others."""

    reason: BaseException | None = None

    def share_arenas(self, nbytes: int) -> None:
        raise MemoryError(f"no {nbytes} bytes")

    def fail(self, error: BaseException) -> None:
        self.reason = error


def test_a_rank_without_memory_tells_the_others_why() -> None:
    group, plan = RefusedMemory(), plan_model(tiny_config("qwen2"))
    with pytest.raises(MemoryError) as error:
        ParameterState.allocate(plan, StreamingConfig(), trainable=True, reference=False, register=False, group=group)
    assert group.reason is error.value


def descriptors(fd: int) -> int:
    """How many descriptors of this process are open on the file of `fd`."""
    found = 0
    for other in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the one of the listing
            found += os.path.sameopenfile(fd, other)
    return found


def test_a_refused_shared_file_says_its_size_and_stays_closed(memfd: int) -> None:
    # A limit on file sizes refuses a small one. A huge one is no test: it takes no memory until it is touched.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(MemoryError, match="cannot map 0.00 GiB of shared memory"):
            SharedFile(memfd, 4 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert descriptors(memfd) == 1
