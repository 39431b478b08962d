"""Engines on the CPU platform, in this process, for every test of the verl backend."""

import copy
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch.distributed

os.environ.setdefault("VERL_PLATFORM", "cpu")
pytest.importorskip("verl")

import megatrain_verl.verl_backend.plugin  # noqa: E402, F401, I001  (before verl asks for its platform)
from verl.trainer.config import CheckpointConfig  # noqa: E402
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig  # noqa: E402
from verl.workers.engine import EngineRegistry  # noqa: E402
from verl.workers.engine.fsdp import FSDPEngineWithLMHead  # noqa: E402

from megatrain_verl.verl_backend.config import MegaTrainEngineConfig  # noqa: E402
from megatrain_verl.verl_backend.engine import MegaTrainEngine  # noqa: E402
from tests.verl_backend.cases import save_tiny_model  # noqa: E402

LR = 1e-2
STEPS = 8
# Where a gradient is rounding alone (biases of keys), AdamW without a larger eps makes whole steps of it.
EPS = {"override_optimizer_config": {"eps": 1e-6}}


@pytest.fixture(scope="session")
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    # The name that verl gives it on the CPU platform.
    torch.distributed.init_process_group("cpu:gloo,cpu:gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts, good and bad, in files."""
    folder = tmp_path_factory.mktemp("data")
    prompts = [[{"role": "user", "content": f"What is {i} plus {i}?"}] for i in range(8)]
    prompts[5][0]["content"] *= 3
    pandas.DataFrame({"prompt": prompts}).to_parquet(folder / "train.parquet")
    pandas.DataFrame({"prompt": prompts[:2]}).to_parquet(folder / "test.parquet")
    pandas.DataFrame({"prompt": prompts[:0]}).to_parquet(folder / "empty.parquet")
    pandas.DataFrame({"question": ["2 + 2?"] * 8}).to_parquet(folder / "column.parquet")
    pandas.DataFrame({"prompt": [*prompts[:7], []]}).to_parquet(folder / "no_messages.parquet")
    pandas.DataFrame({"prompt": ["2 + 2?"] * 8}).to_parquet(folder / "text.parquet")
    pandas.DataFrame({"prompt": [prompts[5]] * 8}).to_parquet(folder / "long.parquet")
    images = [[], [{"path": "shape.png"}]] * 4
    pandas.DataFrame({"prompt": prompts, "images": images}).to_parquet(folder / "images.parquet")
    row = json.dumps({"prompt": prompts[0]})
    (folder / "broken.json").write_text(f'{row}\n{{"prompt": [}}\n')
    (folder / "empty.jsonl").touch()
    (folder / "no_rows.json").write_text("[]\n")
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> HFModelConfig:
    return HFModelConfig(path=str(save_tiny_model(tmp_path_factory.mktemp("tiny"))))


@pytest.fixture(scope="session")
def tiny_tied(tmp_path_factory: pytest.TempPathFactory) -> HFModelConfig:
    return HFModelConfig(path=str(save_tiny_model(tmp_path_factory.mktemp("tied"), tied=True)))


@pytest.fixture
def make(process_group: None) -> Iterator[Callable[..., MegaTrainEngine]]:
    """Makes initialised float32 engines and closes them after the test."""
    engines = []

    def make_engine(
        model: HFModelConfig,
        *,
        optim: dict[str, Any] | None = None,
        contents: tuple[str, ...] = ("model", "optimizer", "extra", "hf_model"),
        save_lora_only: bool = False,
        **options: Any,
    ) -> MegaTrainEngine:
        engine = EngineRegistry.new(
            model_type="language_model",
            backend="megatrain",
            model_config=model,
            engine_config=MegaTrainEngineConfig(**{"dtype": "float32", "optimizer_backend": "torch", **options}),
            optimizer_config=FSDPOptimizerConfig(**{"lr": LR, "total_training_steps": STEPS, **(optim or {})}),
            checkpoint_config=CheckpointConfig(
                save_contents=list(contents), load_contents=list(contents), save_lora_only=save_lora_only
            ),
        )
        engine.initialize()
        engines.append(engine)
        return engine

    yield make_engine
    for engine in engines:
        engine.streaming.close()


@pytest.fixture(scope="session")
def make_fsdp(process_group: None) -> Callable[..., FSDPEngineWithLMHead]:
    """Makes verl's own FSDP2 engine in float32 on the CPU. With lr=0 its weights never change and tests share it."""
    shared: dict[str, FSDPEngineWithLMHead] = {}

    def make_engine(model: HFModelConfig, lr: float = 0.0) -> FSDPEngineWithLMHead:
        if lr == 0 and model.path in shared:
            return shared[model.path]
        copied = copy.deepcopy(model)
        copied.hf_config._attn_implementation = "sdpa"
        precision = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
        engine = FSDPEngineWithLMHead(
            model_config=copied,
            engine_config=FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False, mixed_precision=precision),
            optimizer_config=FSDPOptimizerConfig(lr=lr, total_training_steps=STEPS, **EPS),
            checkpoint_config=CheckpointConfig(),
        )
        engine.initialize()
        if lr == 0:
            shared[model.path] = engine
        return engine

    return make_engine
