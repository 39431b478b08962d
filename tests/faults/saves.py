"""verl's two ways to save, RL's and SFT's, with a fault at every change of a file: `python -m tests.faults.saves ...`

Started by `test_saves.py` with the library of `write_points.py` preloaded. Prints a JSON line per point.
"""

import json
import re
import shutil
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import hydra
import torch
import torch.distributed
from omegaconf import OmegaConf
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.trainer.config import CheckpointConfig
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.checkpoint.checkpoint_handler import CheckpointHandler
from verl.workers.config import FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry

import megatrain_verl.verl_backend.plugin  # noqa: F401, I001  (before verl asks for its platform)
from megatrain_verl.sft import saved_files, search_path
from megatrain_verl.sft.run_state import RunState
from megatrain_verl.sft.trainer import SFTTrainer
from megatrain_verl.verl_backend.config import MegaTrainEngineConfig
from megatrain_verl.verl_backend.engine import MegaTrainEngine
from tests.faults.write_points import FULL, KILL, WritePoints

CONTENTS = ["model", "optimizer", "extra", "hf_model"]
BATCH, ROWS, KEEP = 4, 64, 1


def process_group() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


def make_engine(model: str) -> MegaTrainEngine:
    """An initialised engine. The process group has threads, which a fork does not keep, and so ends before it."""
    process_group()
    engine = EngineRegistry.new(
        model_type="language_model",
        backend="megatrain",
        model_config=HFModelConfig(path=model),
        engine_config=MegaTrainEngineConfig(optimizer_backend="torch", cpu_threads=1),
        optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=8),
        checkpoint_config=CheckpointConfig(save_contents=CONTENTS, load_contents=CONTENTS),
    )
    engine.initialize()
    torch.distributed.destroy_process_group()
    return engine


def set_state(engine: MegaTrainEngine, step: int, run: int) -> None:
    """Arenas, step count and learning rate that only this `step` of this `run` has."""
    for number, unit in enumerate(engine.streaming.state.units):
        for kind in ("weight", "low", "exp_avg", "exp_avg_sq"):
            getattr(unit, kind).fill_(100 * run + 10 * step + number)
    engine.streaming.step_count = step
    engine.learning_rate.load_state_dict({**engine.learning_rate.state_dict(), "last_epoch": step})


def state_of(engine: MegaTrainEngine) -> set[tuple[int, int]]:
    """The (run, step) of which the arenas, the count and the rate are; one if all are of the same save."""
    found = set()
    for number, unit in enumerate(engine.streaming.state.units):
        for kind in ("weight", "low", "exp_avg", "exp_avg_sq"):
            found |= {divmod(int(value) - number, 100) for value in getattr(unit, kind).unique()}
    run = min(found)[0]
    return {(r, rest // 10) for r, rest in found} | {
        (run, engine.streaming.step_count),
        (run, engine.learning_rate.state_dict()["last_epoch"]),
    }


def batches(step: int) -> StatefulDataLoader:
    """verl's data loader after `step` batches."""
    loader = StatefulDataLoader(list(range(ROWS)), batch_size=BATCH)
    iterator = iter(loader)
    for _ in range(step):
        next(iterator)
    return loader


class RL:
    """`_save_checkpoint` and `_load_checkpoint` of verl's V1 trainer, whose worker is the engine in this process."""

    def __init__(self, engine: MegaTrainEngine, root: Path) -> None:
        self.engine, self.root = engine, root

    def _trainer(self) -> PPOTrainerSync:
        trainer = PPOTrainerSync.__new__(PPOTrainerSync)
        settings = {
            "default_local_dir": str(self.root),
            "default_hdfs_dir": None,
            "max_actor_ckpt_to_keep": KEEP,
            "resume_mode": "auto",
            "del_local_ckpt_after_load": False,
        }
        trainer.config = OmegaConf.create({"trainer": settings, "actor_rollout_ref": {"actor": {}}})
        trainer.actor_rollout_wg, trainer.use_critic, trainer.trainer_mode = self.engine, False, "sync"
        trainer.checkpoint_callback = SimpleNamespace(on_save=lambda **_: None)  # verl's default does nothing either
        return trainer

    def save(self, step: int) -> None:
        trainer = self._trainer()
        trainer.global_steps, trainer.train_dataloader = step, batches(step)
        trainer._save_checkpoint()

    def load(self) -> tuple[int, StatefulDataLoader]:
        trainer = self._trainer()
        trainer.train_dataloader = StatefulDataLoader(list(range(ROWS)), batch_size=BATCH)
        trainer._load_checkpoint()
        return trainer.global_steps, trainer.train_dataloader


class SFT:
    """verl's `CheckpointHandler`, through which the SFT trainer saves and resumes, with the trainer's own files."""

    def __init__(self, engine: MegaTrainEngine, root: Path) -> None:
        self.engine, self.root = engine, root
        self.trainer = SFTTrainer.__new__(SFTTrainer)
        self.trainer.state, self.trainer.engine, self.trainer.train_dataset = RunState(), engine, None
        self.trainer.total_training_steps = 8
        search_path.register()
        with hydra.initialize_config_module("megatrain_verl.sft.conf", version_base=None):
            self.trainer.config = hydra.compose("megatrain_sft", [f"model.path={engine.model_config.path}"])
        engine.checkpoints.attached.append(self.trainer)

    def _handler(self, loader: StatefulDataLoader) -> CheckpointHandler:
        process_group()
        return CheckpointHandler(self.engine, loader, default_local_dir=str(self.root), max_ckpt_to_keep=KEEP)

    def save(self, step: int) -> None:
        handler = self._handler(batches(step))
        self.trainer.state.trained(step, 100, 1.0, 1.0)
        handler.save_checkpoint(step)
        torch.distributed.destroy_process_group()

    def load(self) -> tuple[int, StatefulDataLoader]:
        loader = StatefulDataLoader(list(range(ROWS)), batch_size=BATCH)
        saved_files.check_tracker(self.root)
        step = self._handler(loader).load_checkpoint()
        assert self.trainer.state.step == step
        card = (self.root / f"global_step_{step}" / "huggingface" / "README.md").read_text()
        assert f"| steps | {step} of 8 |" in card and card.endswith("\n")
        torch.distributed.destroy_process_group()
        return step, loader


class Case:
    """A folder with the checkpoints of earlier steps, and the save of one more, to be disturbed.

    `again`: that step is in the folder already, saved by an earlier run, and its tracker names it.
    """

    def __init__(self, kind: str, model: str, folder: Path, *, again: bool) -> None:
        self.engine, self.root, self.before = make_engine(model), folder / "run", folder / "before"
        self.saver = {"rl": RL, "sft": SFT}[kind](self.engine, self.root)
        self.earlier, self.step = ([3] if again else [1, 2]), 3
        self.run = 1 if again else 0
        for step in self.earlier:
            set_state(self.engine, step, run=0)
            self.saver.save(step)
        saved = self.engine.checkpoints._retention._saved
        self.known = [] if again else list(saved)  # in "again" another process has saved them
        saved[:] = self.known
        self.root.rename(self.before)

    def restore(self) -> None:
        """The folder as it was before the save."""
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.copytree(self.before, self.root)

    def save(self) -> None:
        set_state(self.engine, self.step, self.run)
        self.saver.save(self.step)

    def check(self) -> str | None:
        """Resume as verl does: from the save or the one before, all of it; then save again, and leave nothing over.

        Returns what went wrong.
        """
        try:
            self._check_resume([(0, self.earlier[-1]), (self.run, self.step)])
            self.save()
            self._check_resume([(self.run, self.step)])
            left = [str(path) for path in self.root.rglob("*") if re.search(r"^\.|\.(new|tmp)$", path.name)]
            assert not left, left
        except Exception:
            return traceback.format_exc()[-1500:]
        finally:
            self.engine.checkpoints._retention._saved[:] = self.known
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
        return None

    def _check_resume(self, allowed: list[tuple[int, int]]) -> None:
        set_state(self.engine, 9, run=9)
        step, loader = self.saver.load()
        (found,) = state_of(self.engine)
        assert found in allowed and found[1] == step, (found, step, allowed)
        tracked = (self.root / "latest_checkpointed_iteration.txt").read_text()
        assert tracked == str(step), (tracked, step)
        first = next(iter(loader)).tolist()
        assert first == list(range(BATCH * step, BATCH * (step + 1))), (first, step)


def walk(case: Case, *, swaps: bool) -> Iterator[dict[str, object]]:
    """A fault of each kind at every point; one report each, with "error" None where all was as it should be."""
    points = WritePoints()
    case.restore()
    names = points.list(case.root, case.save, swaps=swaps)
    for action in (KILL, FULL):
        for number, name in enumerate(names, start=1):
            if name.startswith("fsync") if action == KILL else "+" not in name.split()[0]:
                continue  # it changes nothing, or takes no space
            case.restore()
            status, printed = points.fail(case.root, case.save, action, number, swaps=swaps)
            expected = -signal.SIGKILL if action == KILL else 1
            error = None if status == expected else f"status {status}: {printed[-1500:]}"
            if error is None:
                error = case.check()
            yield {"action": "kill" if action == KILL else "full disk", "point": number, "name": name, "error": error}


def main(kind: str, model: str, folder: Path, again: str, swaps: str) -> None:
    torch.set_num_threads(1)
    for report in walk(Case(kind, model, folder, again=again == "again"), swaps=swaps == "swaps"):
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4], sys.argv[5])
