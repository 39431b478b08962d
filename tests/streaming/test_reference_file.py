"""A reference policy in a file: the same bits as in host memory, as much memory as planned, faults by name."""

import copy
import os
import resource
import signal
from collections.abc import Callable, Iterator
from functools import partialmethod
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatrain_verl.config import AdamWConfig, LoraSettings, StreamingConfig
from megatrain_verl.resources import GIB, HostPlan, check_host_memory
from megatrain_verl.streaming import unnamed_file
from megatrain_verl.streaming.engine import StreamingEngine
from megatrain_verl.streaming.host_store import ParameterState
from megatrain_verl.streaming.layer_major import LayerMajorPass
from megatrain_verl.streaming.model_plan import plan_model
from megatrain_verl.streaming.simulated_streams import SimulatedStreams
from megatrain_verl.streaming.unnamed_file import UnnamedFile
from tests import oracle
from tests.families.configs import family_config
from tests.vision import cases

BATCHES = oracle.split_micro_batches(oracle.random_rows([9, 14, 5]), 1)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that even units of the tiny models are read by several threads."""
    monkeypatch.setattr(unnamed_file, "PART_BYTES", 1000)


def scores(engine: StreamingEngine) -> Tensor:
    return torch.cat([output.log_probs for output in engine.forward(BATCHES)])


def reference(engine: StreamingEngine) -> Tensor:
    with engine.reference_weights():
        return scores(engine)


def train(engine: StreamingEngine) -> None:
    engine.zero_grad()
    engine.forward_backward(BATCHES, lambda m, outputs: -outputs.log_probs.sum() / 16)
    engine.optimizer_step()


def make(config: object, folder: Path | None, **settings: object) -> StreamingEngine:
    where = {} if folder is None else {"reference_folder": str(folder)}
    model = oracle.plain_model(config)
    return oracle.make_engine(model, config, AdamWConfig(lr=1e-2), keep_reference=True, **where, **settings)


CONFIGS = {
    "dense": oracle.tiny_config("qwen2", layers=4),
    "tied": oracle.tiny_config("qwen3", tied=True),
    "mixture": family_config("Mixtral-8x7B", num_local_experts=3, hidden_size=16),
}
SETTINGS = [
    *((name, {}) for name in CONFIGS),
    ("dense", {"dtype": "bfloat16"}),
    ("dense", {"freeze": ["model.layers.1.*", "*.norm.weight", "model.embed_tokens.*"]}),
    ("dense", {"resident_layers": 0}),
]


@pytest.mark.parametrize(("name", "settings"), SETTINGS, ids=str)
def test_scores_are_those_of_a_reference_in_host_memory(name: str, settings: dict, tmp_path: Path) -> None:
    config, folder = CONFIGS[name], tmp_path / "made"
    in_memory, in_file = make(config, None, **settings), make(config, folder, **settings)
    start = scores(in_file)
    assert torch.equal(reference(in_file), start)
    for _ in range(2):
        for engine in (in_memory, in_file):
            train(engine)
        for _ in range(2):
            assert torch.equal(reference(in_file), start) and torch.equal(reference(in_memory), start)
    trained = scores(in_file)
    assert torch.equal(trained, scores(in_memory)) and not torch.equal(trained, start)
    assert os.listdir(folder) == []
    in_memory.close(), in_file.close()


def test_each_unit_is_read_once_in_a_pass_and_ahead_of_its_turn(tmp_path: Path) -> None:
    engine = make(CONFIGS["dense"], tmp_path)
    read = engine.streams.reader.spans
    for number in range(1, 4):
        reference(engine)
        engine.streams.reader.record().synchronize()
        assert len(read) == number * len(engine.plan.units) + 1  # and the first one for the next pass
    engine.close()


def test_loading_and_saving_leave_the_reference_as_it_is(tmp_path: Path) -> None:
    config = CONFIGS["dense"]
    engine = make(config, tmp_path)
    start = scores(engine)
    train(engine)
    engine.save(tmp_path / "state")
    engine.close()
    resumed = make(config, tmp_path)
    resumed.load(tmp_path / "state")
    assert torch.equal(reference(resumed), start)
    resumed.load_weights(oracle.plain_model(config, seed=5).state_dict().items())
    assert torch.equal(reference(resumed), start) and not torch.equal(scores(resumed), start)
    resumed.close()


def test_passes_with_and_without_images_take_turns(tmp_path: Path) -> None:
    config = cases.tiny_config("llava_next")
    model = cases.plain_model(copy.deepcopy(config))
    engine = oracle.make_engine(model, config, keep_reference=True, reference_folder=str(tmp_path))
    batches = [[cases.pack(cases.rows("llava_next", [2]))], BATCHES]
    expected = [torch.cat([output.log_probs for output in engine.forward(batch)]) for batch in batches]
    train(engine)
    with engine.reference_weights():
        for _ in range(2):
            for batch, scored in zip(batches, expected, strict=True):
                assert torch.equal(torch.cat([output.log_probs for output in engine.forward(batch)]), scored)
    engine.close()


def fail_at(
    run: LayerMajorPass, do_layer: Callable[..., None], failing: int, m: int, layer: int, *rest: object
) -> None:
    if layer == failing:
        raise ZeroDivisionError
    do_layer(run, m, layer, *rest)


@pytest.mark.parametrize("seed", range(2))
def test_pass_after_a_failed_one_reads_what_it_needs(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(CONFIGS["dense"], tmp_path, streams=SimulatedStreams(seed))
    start = reference(engine)
    for failing in range(3):
        train(engine)
        with monkeypatch.context() as context:
            context.setattr(LayerMajorPass, "_do_layer", partialmethod(fail_at, LayerMajorPass._do_layer, failing))
            with pytest.raises(ZeroDivisionError):
                reference(engine)
        assert torch.equal(reference(engine), start)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("freeze", [[], ["model.embed_tokens.*"]])
def test_plan_counts_two_buffers_and_no_arena(dtype: str, freeze: list[str], tmp_path: Path) -> None:
    plan, itemsize = plan_model(CONFIGS["dense"], freeze), {"float32": 4, "bfloat16": 2}[dtype]
    sizes = plan.unit_sizes[len(freeze) :]  # what is never trained is its own reference
    plain, in_file = (
        HostPlan.of(plan, StreamingConfig(dtype=dtype, reference_folder=folder), trainable=True, reference=wanted)
        for folder, wanted in ((None, False), (str(tmp_path), True))
    )
    assert in_file.bytes_by_kind.keys() == plain.bytes_by_kind.keys()
    assert in_file.total - plain.total == 2 * itemsize * max(sizes)
    assert in_file.file_bytes == itemsize * sum(sizes)
    config = StreamingConfig(dtype=dtype, reference_folder=str(tmp_path))
    state = ParameterState.allocate(plan, config, trainable=True, reference=True, register=False)
    buffers = sum(staged.memory.nbytes for staged in state.reference_file._buffers)
    assert buffers == in_file.total - plain.total and state.reference_file._file.nbytes == in_file.file_bytes
    state.close()


def test_too_little_host_memory_names_the_folder_as_a_remedy() -> None:
    config = StreamingConfig(host_memory_gb=0.001)
    plan = HostPlan({"weight": GIB, "reference": GIB, "grad": GIB, "staging": 0}, parameters=GIB)
    with pytest.raises(ValueError, match="reference_folder=<folder .* reads 1.00 GiB from the disk"):
        check_host_memory(plan, config)


@pytest.fixture
def largest_file() -> Iterator[None]:
    """The kernel refuses to write a file beyond 64 KiB, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_file_that_cannot_be_written_is_named(tmp_path: Path, largest_file: None) -> None:
    with pytest.raises(ValueError, match=f"reference_folder={tmp_path}: byte 65536 of [0-9]+ cannot be written"):
        make(CONFIGS["dense"], tmp_path)


def test_unusable_folders_are_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder, why in ((tmp_path / "file", "no file can be made there"), ("/dev/shm", r"in memory \(tmpfs\)")):
        with pytest.raises(ValueError, match=f"reference_folder={folder}: .*{why}.*name a folder on a fast disk"):
            make(CONFIGS["dense"], folder)
    with pytest.raises(ValueError, match=r"takes 1048576.00 GiB, [0-9.]+ GiB are free there"):
        UnnamedFile(str(tmp_path), 1 << 50, "reference_folder")


def test_file_that_is_too_short_ends_the_pass(tmp_path: Path) -> None:
    engine = make(CONFIGS["dense"], tmp_path)
    os.ftruncate(engine.state.reference_file._file._file.fileno(), 5000)
    with pytest.raises(RuntimeError, match=f"reference reader.*reference_folder={tmp_path}.*ends at byte 5000 of"):
        reference(engine)
    engine.close()


def test_settings_that_exclude_each_other_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="reference_folder reads whole layers, expert_parts"):
        StreamingConfig(expert_parts=2, reference_folder=str(tmp_path))
    config = StreamingConfig(reference_folder=str(tmp_path))
    with pytest.raises(ValueError, match="reference_folder works with one GPU, not with 2"):
        HostPlan.of(plan_model(CONFIGS["dense"]), config, trainable=True, reference=True, ranks=2)


def test_adapters_need_no_file(tmp_path: Path) -> None:
    engine = make(CONFIGS["dense"], tmp_path, lora=LoraSettings(2))
    start = scores(engine)
    train(engine)
    assert engine.state.reference_file is None and torch.equal(reference(engine), start)
    engine.close()


def test_killed_process_leaves_no_file(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        try:
            UnnamedFile(str(tmp_path), 10, "reference_folder").write(memoryview(bytes(10)), 0)
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert os.listdir(tmp_path) == []
