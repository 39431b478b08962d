"""A checkpoint in verl's layout: the engine's state, verl's "extra", and a Hugging Face folder.

    <path>/engine/             masters, Adam moments and step count, bit for bit        (model, optimizer)
    <path>/extra_state.json    learning-rate schedule and random generators             (extra)
    <path>/huggingface/        config, tokenizer, generation config; weights too with   (hf_model)
    <path>/lora_adapter/       with `save_lora_only` peft's files in place of merged weights
    and the files of `CheckpointStore.attached`

`<path>` is `<default_local_dir>/global_step_N/actor` in RL and `<default_local_dir>/global_step_N` in SFT.
"""

import logging
import shutil
from pathlib import Path
from typing import Protocol

from verl.trainer.config import CheckpointConfig
from verl.workers.config import HFModelConfig

from megatrain_verl.streaming.atomic_folder import atomic_folder, restore_replaced
from megatrain_verl.streaming.checkpoint import export_pretrained
from megatrain_verl.streaming.engine import StreamingEngine
from megatrain_verl.streaming.host_store import DTYPES
from megatrain_verl.streaming.quantised_weights import without_quantization
from megatrain_verl.verl_backend import extra_state
from megatrain_verl.verl_backend.optimizer import LearningRate
from megatrain_verl.verl_backend.options import check_checkpoint_contents
from megatrain_verl.verl_backend.retention import Retention

logger = logging.getLogger(__name__)

ENGINE, HUGGINGFACE, ADAPTER = "engine", "huggingface", "lora_adapter"
LOADER_STATE = "data_*.pt"  # which verl's SFT trainer writes into the checkpoint when it is complete


class Attachment(Protocol):
    """Further files of each checkpoint, that a trainer adds."""

    def write(self, folder: Path) -> None:
        """Write them into a checkpoint that is being made."""

    def read(self, folder: Path) -> None:
        """Go on from what `write` wrote; raises ValueError if it cannot."""


class CheckpointStore:
    """Saves and loads one engine's checkpoints with the contents that verl's configuration names.

    Raises:
        ValueError: contents that cannot be saved or loaded apart.
    """

    def __init__(self, model: HFModelConfig, config: CheckpointConfig) -> None:
        check_checkpoint_contents(config)
        self._model = model
        self._lora_only = config.save_lora_only
        self._save_contents, self._load_contents = set(config.save_contents), set(config.load_contents)
        self._retention = Retention()
        self.attached: list[Attachment] = []

    def save(self, path: str, engine: StreamingEngine, learning_rate: LearningRate, limit: int | None) -> None:
        """Write `path` in full or not at all, then delete checkpoints of this run beyond `limit`.

        The first rank does; every rank calls it.
        """
        with engine.group.by_first("the checkpoint") as mine:
            if mine:
                self._write(path, engine, learning_rate)
                self._retention.register(Path(path), limit)
            elif "model" in self._save_contents:
                engine.save(path)  # where the first rank writes the arenas

    def load(self, path: str, engine: StreamingEngine, learning_rate: LearningRate) -> None:
        """Go on from `path`.

        Raises:
            ValueError: no such checkpoint, contents it does not have, or another model's; before anything changes.
        """
        folder = Path(path)
        with engine.group.by_first("the checkpoint's folder") as mine:
            if mine:
                restore_replaced(folder)
        if not folder.is_dir():
            raise ValueError(f"there is no checkpoint at {folder}")
        extra = extra_state.read(folder) if "extra" in self._load_contents else None
        for attachment in self.attached:
            attachment.read(folder)
        if "model" in self._load_contents:
            if not (folder / ENGINE).is_dir():
                raise ValueError(f"checkpoint {folder} was saved without model and optimizer; it cannot be resumed")
            engine.load(folder / ENGINE)
        if extra is not None:
            extra_state.restore(extra, learning_rate)
        logger.info("resumed from checkpoint %s", path)

    def _write(self, path: str, engine: StreamingEngine, learning_rate: LearningRate) -> None:
        with atomic_folder(path) as folder:
            if "model" in self._save_contents:
                engine.save(folder / ENGINE)
            if "extra" in self._save_contents:
                extra_state.write(folder, learning_rate)
            self._write_pretrained(folder / HUGGINGFACE, engine)
            for attachment in self.attached:
                attachment.write(folder)
            for state in Path(path).glob(LOADER_STATE):  # of an earlier run that saved this step: verl replaces it next
                shutil.copy(state, folder)
        logger.info("saved checkpoint %s", path)

    def _write_pretrained(self, folder: Path, engine: StreamingEngine) -> None:
        config, lora = self._model.hf_config, engine.plan.lora if self._lora_only else None
        if "hf_model" in self._save_contents and lora is not None:
            lora.write(folder.parent / ADAPTER, dict(engine.named_adapters()), self._model.path)
        if "hf_model" in self._save_contents and lora is None:
            num_bytes = engine.plan.num_parameters * DTYPES[engine.config.dtype].itemsize
            # Merged weights are copies, held until their file is written.
            shard = 500_000_000 if engine.plan.lora else 5_000_000_000
            export_pretrained(folder, engine.named_weights(), config, num_bytes, shard)
        else:
            without_quantization(config).save_pretrained(folder)
        for part in (self._model.generation_config, self._model.get_processor()):
            if part is not None:
                part.save_pretrained(folder)
