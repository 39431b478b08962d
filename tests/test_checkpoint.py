"""Checkpoints: exact, whole or not at all, refused for another model; and the export to Hugging Face files."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from megatrain_verl.config import StreamingConfig
from megatrain_verl.streaming import atomic_folder as atomic
from megatrain_verl.streaming.atomic_folder import atomic_folder, check_disk_space
from megatrain_verl.streaming.checkpoint import export_pretrained, load_state, save_state
from megatrain_verl.streaming.host_store import ParameterState, UnitState
from megatrain_verl.streaming.model_plan import ModelPlan, plan_model
from megatrain_verl.streaming.weight_files import load_into
from tests.oracle import plain_model, tiny_config

MASTER_AND_MOMENTS = ("weight", "low", "exp_avg", "exp_avg_sq")


def no_wait(unit: UnitState) -> None:
    pass


def make_state(plan: ModelPlan, seed: int | None = None, **settings: object) -> ParameterState:
    """Arenas with random masters, moments and gradients, or zeros without a seed."""
    config = StreamingConfig(**settings)
    state = ParameterState.allocate(plan, config, trainable=True, reference=True, register=False)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        for unit, span in state.parameters():
            unit.write(span, torch.randn(span.shape, generator=generator))
            for arena in (unit.exp_avg, unit.exp_avg_sq, unit.grad):
                unit.view(arena, span).copy_(torch.randn(span.shape, generator=generator))
    return state


def arenas(state: ParameterState, kinds: tuple[str, ...] = MASTER_AND_MOMENTS) -> list[Tensor]:
    return [getattr(unit, kind).clone() for unit in state.units for kind in kinds if getattr(unit, kind) is not None]


def all_equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) > 0 and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.fixture
def plan() -> ModelPlan:
    return plan_model(tiny_config("qwen2"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_state_and_meta_come_back_bit_for_bit(plan: ModelPlan, tmp_path: Path, dtype: str) -> None:
    saved, loaded = make_state(plan, seed=0, dtype=dtype), make_state(plan, seed=1, dtype=dtype)
    meta = {"step_count": 7, "lr": 0.1 + 0.2, "rng": [1, 2**62]}
    save_state(tmp_path / "actor", plan, saved, meta, no_wait)
    grads = arenas(loaded, ("grad",))
    assert load_state(tmp_path / "actor", plan, loaded) == meta
    assert all_equal(arenas(saved), arenas(loaded))
    assert all_equal(grads, arenas(loaded, ("grad",)))
    assert [path.name for path in tmp_path.iterdir()] == ["actor"]


@pytest.mark.parametrize(("there", "here"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_masters_change_their_form_exactly(plan: ModelPlan, tmp_path: Path, there: str, here: str) -> None:
    saved, loaded = make_state(plan, seed=0, dtype=there), make_state(plan, seed=1, dtype=here)
    save_state(tmp_path / "actor", plan, saved, {}, no_wait)
    load_state(tmp_path / "actor", plan, loaded)
    masters = [[unit.master() for unit in state.units] for state in (saved, loaded)]
    assert all_equal(*masters)
    assert all_equal(arenas(saved, ("exp_avg", "exp_avg_sq")), arenas(loaded, ("exp_avg", "exp_avg_sq")))
    expected = make_state(plan, seed=0, dtype=here)
    assert all_equal(arenas(expected), arenas(loaded))


def test_forward_only_state_takes_the_streamed_weights(plan: ModelPlan, tmp_path: Path) -> None:
    saved = make_state(plan, seed=0)
    save_state(tmp_path / "actor", plan, saved, {}, no_wait)
    frozen = ParameterState.allocate(plan, StreamingConfig(), trainable=False, reference=False, register=False)
    load_state(tmp_path / "actor", plan, frozen)
    assert all_equal(arenas(saved, ("weight",)), arenas(frozen, ("weight",)))


def test_each_unit_is_waited_for_before_it_is_read(plan: ModelPlan, tmp_path: Path) -> None:
    """A pending AdamW changes a unit until it has been waited for; the file must hold what it is then."""
    state = make_state(plan, seed=0)
    waited = []

    def finish_update(unit: UnitState) -> None:
        waited.append(unit.plan.name)
        unit.weight.fill_(len(waited))

    save_state(tmp_path / "actor", plan, state, {}, finish_update)
    assert waited == [unit.name for unit in plan.units]
    loaded = make_state(plan)
    load_state(tmp_path / "actor", plan, loaded)
    assert [unit.weight.unique().tolist() for unit in loaded.units] == [[n] for n in range(1, len(waited) + 1)]


def test_a_long_save_leaves_no_bar_in_a_log(plan: ModelPlan, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The bar appears after two seconds; here the output is no terminal."""
    save_state(tmp_path / "engine", plan, make_state(plan), {}, lambda unit: time.sleep(2.5 / len(plan.units)))
    assert "saving" not in capfd.readouterr().err


def test_reference_is_kept_before_weights_are_overwritten(plan: ModelPlan, tmp_path: Path) -> None:
    saved, loaded = make_state(plan, seed=0), make_state(plan, seed=1)
    before = arenas(loaded, ("weight",))
    save_state(tmp_path / "actor", plan, saved, {}, no_wait)
    load_state(tmp_path / "actor", plan, loaded)
    assert all_equal([unit.source(reference=True) for unit in loaded.units], before)
    assert all_equal([unit.source(reference=False) for unit in loaded.units], arenas(saved, ("weight",)))


def test_parts_are_saved_and_loaded_alone(plan: ModelPlan, tmp_path: Path) -> None:
    saved = make_state(plan, seed=0)
    for contents in (["model"], ["optimizer"]):
        save_state(tmp_path / contents[0], plan, saved, {}, no_wait, contents)
    loaded = make_state(plan, seed=1)
    moments = arenas(loaded, ("exp_avg", "exp_avg_sq"))
    with pytest.raises(ValueError, match="model holds no optimizer state, only model; load only what was saved"):
        load_state(tmp_path / "model", plan, loaded)
    load_state(tmp_path / "model", plan, loaded, ["model"])
    assert all_equal(arenas(loaded, ("weight", "low")), arenas(saved, ("weight", "low")))
    assert all_equal(arenas(loaded, ("exp_avg", "exp_avg_sq")), moments)
    load_state(tmp_path / "optimizer", plan, loaded, ["optimizer"])
    assert all_equal(arenas(loaded), arenas(saved))
    sizes = [
        sum(path.stat().st_size for path in (tmp_path / part).glob("*.safetensors")) for part in ("model", "optimizer")
    ]
    assert sizes[0] == pytest.approx(sizes[1] / 2, rel=0.05)  # 4 and 8 bytes per parameter
    with pytest.raises(ValueError, match="contents must be some of model, optimizer, got \\['extra'\\]"):
        save_state(tmp_path / "extra", plan, saved, {}, no_wait, ["extra"])


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("llama", {}, "it holds llama with [0-9,]+ parameters, the engine runs qwen2 with"),
        ("qwen2", {"layers": 4}, "model.layers.3.* is .* in the checkpoint and absent in the engine"),
        ("qwen2", {"layers": 2}, "model.layers.2.* is absent in the checkpoint and .* in the engine"),
        (
            "qwen2",
            {"vocab_size": 96},
            r"model.embed_tokens.weight is \(96, 32\) at 0 in the checkpoint and \(97, 32\) at 0",
        ),
        ("qwen2", {"tied": True}, r"model.norm.weight is \(32,\) at 3200 in the checkpoint and \(32,\) at 0"),
    ],
)
def test_checkpoint_of_another_model_is_refused_untouched(
    tmp_path: Path, plan: ModelPlan, family: str, settings: dict, message: str
) -> None:
    other = plan_model(tiny_config(family, **settings))
    save_state(tmp_path / "actor", other, make_state(other, seed=0), {}, no_wait)
    state = make_state(plan, seed=1)
    before = arenas(state)
    with pytest.raises(ValueError, match=f"is a checkpoint of another model: .*{message}"):
        load_state(tmp_path / "actor", plan, state)
    assert all_equal(arenas(state), before)


def damage(folder: Path, fault: str) -> None:
    last, state_file = folder / "head.safetensors", folder / "state.json"
    if fault == "missing file":
        last.unlink()
    elif fault == "truncated file":
        os.truncate(last, last.stat().st_size - 1)
    elif fault == "file of another unit":
        last.write_bytes((folder / "layers.0.safetensors").read_bytes())
    elif fault == "no state":
        state_file.unlink()
    elif fault == "half a state":
        state_file.write_text(state_file.read_text()[:100])
    elif fault == "format":
        state_file.write_text(json.dumps(json.loads(state_file.read_text()) | {"format_version": 99}))


FAULTS = {
    "missing file": "actor is incomplete: head.safetensors is missing",
    "truncated file": "head.safetensors is damaged",
    "file of another unit": r"head.safetensors is damaged: weight has shape \[\d+\] instead of \[\d+\]",
    "no state": "actor is not a checkpoint of this engine: it has no state.json",
    "half a state": "state.json is damaged",
    "format": "has checkpoint format 99; this version reads 1",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_damaged_checkpoint_is_refused_untouched(plan: ModelPlan, tmp_path: Path, fault: str) -> None:
    save_state(tmp_path / "actor", plan, make_state(plan, seed=0), {}, no_wait)
    damage(tmp_path / "actor", fault)
    state = make_state(plan, seed=1)
    before = arenas(state)
    with pytest.raises(ValueError, match=FAULTS[fault]):
        load_state(tmp_path / "actor", plan, state)
    assert all_equal(arenas(state), before)


KILLED_SAVE = """
import os, signal, sys
from tests.test_checkpoint import *
plan = plan_model(tiny_config("qwen2"))
kill_at = int(sys.argv[2])

def kill(unit):
    if unit.plan.name == plan.units[kill_at].name:
        os.kill(os.getpid(), signal.SIGKILL)

save_state(sys.argv[1], plan, make_state(plan, seed=1), {"step_count": 2}, kill)
"""


def test_save_killed_in_the_middle_leaves_the_previous_one(plan: ModelPlan, tmp_path: Path) -> None:
    folder, previous = tmp_path / "actor", make_state(plan, seed=0)
    save_state(folder, plan, previous, {"step_count": 1}, no_wait)
    command = [sys.executable, "-c", KILLED_SAVE, str(folder), str(len(plan.units) - 1)]
    killed = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, timeout=300)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    partial = tmp_path / ".actor.partial"
    assert len(list(partial.glob("*.safetensors"))) == len(plan.units) - 1

    loaded = make_state(plan)
    assert load_state(folder, plan, loaded) == {"step_count": 1}
    assert all_equal(arenas(loaded), arenas(previous))
    with pytest.raises(ValueError, match="not a checkpoint"):
        load_state(partial, plan, loaded)

    following, files = make_state(plan, seed=2), {path.name for path in folder.iterdir()}
    (partial / "stray").touch()
    save_state(folder, plan, following, {"step_count": 3}, no_wait)
    assert [path.name for path in tmp_path.iterdir()] == ["actor"]
    assert {path.name for path in folder.iterdir()} == files
    assert load_state(folder, plan, loaded) == {"step_count": 3}
    assert all_equal(arenas(loaded), arenas(following))


def write_folder(path: Path, text: str) -> None:
    with atomic_folder(path) as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "file").write_text(text)


@pytest.mark.parametrize("file_system_swaps", [True, False])
def test_existing_folder_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_system_swaps: bool) -> None:
    if not file_system_swaps:  # as on NFS
        monkeypatch.setattr(atomic, "_exchange", lambda first, second: False)
    for text in ("first", "second"):
        write_folder(tmp_path / "a" / "b", text)
        assert (tmp_path / "a" / "b" / "inner" / "file").read_text() == text
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]


def test_swap_is_one_step_here(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    assert atomic._exchange(tmp_path / "one", tmp_path / "two")
    assert (tmp_path / "one" / "two").exists() and (tmp_path / "two" / "one").exists()
    with pytest.raises(FileNotFoundError):
        atomic._exchange(tmp_path / "one", tmp_path / "nowhere")


def test_kill_between_the_two_renames_is_undone_by_the_reader(plan: ModelPlan, tmp_path: Path) -> None:
    """What a file system without swap leaves: no folder, the old one under `.replaced`, the new one `.partial`."""
    folder, old = tmp_path / "actor", make_state(plan, seed=0)
    save_state(folder, plan, make_state(plan, seed=1), {"step_count": 2}, no_wait)
    folder.rename(tmp_path / ".actor.partial")
    save_state(tmp_path / "other", plan, old, {"step_count": 1}, no_wait)
    (tmp_path / "other").rename(tmp_path / ".actor.replaced")
    loaded = make_state(plan)
    assert load_state(folder, plan, loaded) == {"step_count": 1}
    assert all_equal(arenas(loaded), arenas(old))


def test_kill_after_the_two_renames_does_not_stop_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic, "_exchange", lambda first, second: False)
    for name in ("folder", ".folder.replaced"):
        write_folder(tmp_path / name, "old")
    write_folder(tmp_path / "folder", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert (tmp_path / "folder" / "inner" / "file").read_text() == "new"


@pytest.mark.parametrize("existing", [True, False])
def test_failed_write_leaves_everything_as_it_was(tmp_path: Path, existing: bool) -> None:
    path = tmp_path / "folder"
    if existing:
        write_folder(path, "old")
    with pytest.raises(RuntimeError, match="failed half-way"), atomic_folder(path) as folder:
        (folder / "file").write_text("new")
        raise RuntimeError("failed half-way")
    assert [entry.name for entry in tmp_path.iterdir()] == (["folder"] if existing else [])
    assert not existing or (path / "inner" / "file").read_text() == "old"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting a tmpfs needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_full_disk_leaves_the_previous_one(small_disk: Path) -> None:
    write_folder(small_disk / "folder", "old")
    with pytest.raises(OSError, match="No space left"), atomic_folder(small_disk / "folder") as folder:
        (folder / "file").write_bytes(b"x" * (2 << 20))
    assert (small_disk / "folder" / "inner" / "file").read_text() == "old"
    assert [entry.name for entry in small_disk.iterdir()] == ["folder"]


def test_checkpoint_that_cannot_fit_is_not_begun(plan: ModelPlan, small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(b"x" * (900 << 10))
    with pytest.raises(ValueError, match=r"saving to .*/a/b takes 0.00 GiB, the file system has 0.00 GiB free"):
        save_state(small_disk / "a" / "b", plan, make_state(plan), {}, no_wait)
    check_disk_space(small_disk / "a" / "b", 64 << 10)
    assert [entry.name for entry in small_disk.iterdir()] == ["filler"]


def named_weights(state: ParameterState) -> Iterator[tuple[str, Tensor]]:
    for unit, span in state.parameters():
        yield span.name, unit.view(unit.weight, span)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("max_shard_bytes", [5_000_000_000, 10_000])
def test_export_loads_with_transformers_bit_equal(tmp_path: Path, dtype: str, tied: bool, max_shard_bytes: int) -> None:
    plan = plan_model(tiny_config("qwen2", tied=tied))
    state = make_state(plan, seed=0, dtype=dtype)
    size = sum(span.numel for _, span in state.parameters()) * state.units[0].weight.itemsize
    export_pretrained(tmp_path / "hf", named_weights(state), plan.config, size, max_shard_bytes)

    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    loaded = dict(model.named_parameters())
    assert loaded.keys() == {span.name for _, span in state.parameters()}
    for name, weight in named_weights(state):
        assert loaded[name].dtype == weight.dtype and torch.equal(loaded[name], weight), name
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied

    files = sorted(path.name for path in (tmp_path / "hf").iterdir())
    if max_shard_bytes > size:
        assert files == ["config.json", "model.safetensors"]
    else:
        index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == size
        assert len(set(index["weight_map"].values())) == len(files) - 2 > 2
        assert ("lm_head.weight" in index["weight_map"]) == (not tied)


def test_exported_config_is_the_models_own(tmp_path: Path) -> None:
    plan = plan_model(tiny_config("mistral"))
    state = make_state(plan, seed=0)
    export_pretrained(tmp_path / "hf", named_weights(state), plan.config, 0)
    text = (tmp_path / "hf" / "config.json").read_text()
    assert "megatrain" not in text
    written, original = AutoConfig.from_pretrained(tmp_path / "hf"), tiny_config("mistral")
    assert (written.architectures, written.dtype) == (["MistralForCausalLM"], torch.bfloat16)
    ignored = ("architectures", "dtype", "transformers_version", "_name_or_path")
    own, theirs = (
        {key: value for key, value in config.to_dict().items() if key not in ignored} for config in (written, original)
    )
    assert own == theirs
    assert plan.config.architectures is None  # the engine's config is left as it is


def test_export_loads_back_into_the_engine(tmp_path: Path) -> None:
    config = tiny_config("qwen3", tied=True)
    plan, model = plan_model(config), plain_model(config)
    first, second = make_state(plan), make_state(plan)
    load_into(first, plan, model.state_dict().items())
    export_pretrained(tmp_path / "hf", named_weights(first), plan.config, 0, max_shard_bytes=20_000)
    load_into(second, plan, tmp_path / "hf")
    assert all_equal(arenas(first, ("weight",)), arenas(second, ("weight",)))
