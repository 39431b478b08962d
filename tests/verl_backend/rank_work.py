"""What a data-parallel rank does in test_ranks.py, in a process of its own."""

import os
from typing import Any

os.environ.setdefault("VERL_PLATFORM", "cpu")

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed  # noqa: E402
from verl.trainer.config import CheckpointConfig  # noqa: E402
from verl.workers.config import FSDPOptimizerConfig, HFModelConfig  # noqa: E402
from verl.workers.engine import EngineRegistry  # noqa: E402

from megatrain_verl.verl_backend.config import MegaTrainEngineConfig  # noqa: E402
from tests.verl_backend import cases  # noqa: E402

ROWS, STEPS = 6, 3


def train(rank: int, size: int, store: str, model: str, shares: list[list[int]], checkpoint: str) -> dict[str, Any]:
    """Steps on this rank's share of the rows, and a checkpoint; losses, norms, weights and scores by the reference."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("cpu:gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    contents = ["model", "optimizer", "extra", "hf_model"]
    engine = EngineRegistry.new(
        model_type="language_model",
        backend="megatrain",
        model_config=HFModelConfig(path=model),
        engine_config=MegaTrainEngineConfig(dtype="float32", optimizer_backend="torch", ref_in_actor=True),
        optimizer_config=FSDPOptimizerConfig(lr=1e-4, total_training_steps=10),
        checkpoint_config=CheckpointConfig(save_contents=contents, load_contents=contents),
    )
    engine.initialize()
    results = []
    for step in range(STEPS):
        batch = cases.rl_batch(len(engine.model_config.tokenizer), rows=ROWS, seed=step)
        batch = cases.tu.index_select_tensor_dict(batch, shares[rank])
        cases.tu.assign_non_tensor(batch, micro_batch_size_per_gpu=len(batch))
        output = cases.train(engine, batch, cases.actor_loss())
        loss = torch.tensor(sum(output["loss"]))
        torch.distributed.all_reduce(loss, op=torch.distributed.ReduceOp.AVG)  # as verl's worker does
        results.append((loss.item(), output["metrics"]["grad_norm"], output["lr"]))
    first = cases.rl_batch(len(engine.model_config.tokenizer), rows=ROWS)
    scores = cases.score(engine, first, reference=True)["log_probs"].values().numpy()
    engine.save_checkpoint(checkpoint, global_step=STEPS)
    weights = {name: weight.numpy().copy() for name, weight in engine.get_per_tensor_param()[0]}
    engine.load_checkpoint(checkpoint)
    resumed = {name: weight.numpy() for name, weight in engine.get_per_tensor_param()[0]}
    assert all(np.array_equal(resumed[name], weights[name]) for name in weights)
    ranks = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
    engine.streaming.close()
    torch.distributed.destroy_process_group()
    return {"results": results, "weights": weights, "ranks": ranks, "scores": scores}
