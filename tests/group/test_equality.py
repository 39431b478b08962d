"""Several ranks on one set of arenas compute what one rank computes on the same rows."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3MoeConfig

from megatrain_verl.config import AdamWConfig, LoraSettings, StreamingConfig
from megatrain_verl.streaming.adapters import DOWN, UP
from megatrain_verl.streaming.engine import StreamingEngine
from megatrain_verl.streaming.group.group import Group
from tests import oracle
from tests.families.configs import family_config
from tests.families.test_experts import plain_router_loss
from tests.group import ranks
from tests.group.ranks import Task
from tests.sft.faults import small_shared_memory

ROUTER_LOSS = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
TASKS = {
    "even": Task(),
    "uneven shares of a tied model": Task(tied=True, shares=[[0, 1, 2, 3, 5], [4]]),
    "different micro-batches": Task(family="qwen3", shares=[[0, 2, 4, 5], [1, 3]], sizes=[1, 2]),
    "three ranks": Task(shares=[[5, 0], [1, 2], [3, 4]]),
    # The first rank runs in waves of one row, the others in one wave: they add zeros to its waves.
    "different waves": Task(
        shares=[[0, 1, 2, 3], [4, 5]], settings={"wave_tokens": 40}, own_settings={0: {"wave_tokens": 20}}
    ),
}


def close(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    """Whether all weights agree to 1e-6."""
    return all(np.allclose(left[name], right[name], rtol=1e-6, atol=1e-6) for name in right)


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS.keys())
def test_loss_norm_and_weights_equal_those_of_one_rank(task: Task) -> None:
    alone = ranks.train(ranks.ALONE, task)
    together = [ended.result for ended in ranks.run(ranks.train, len(task.shares), task)]
    losses = np.array([[loss for loss, _ in rank["results"]] for rank in together]).sum(0)
    norms = np.array([[norm for _, norm in rank["results"]] for rank in together])
    assert np.allclose(losses, [loss for loss, _ in alone["results"]], rtol=1e-6)
    assert np.allclose(norms, [norm for _, norm in alone["results"]], rtol=1e-6)
    assert (norms == norms[0]).all()  # the same bits: all ranks clip and skip alike
    for rank in together:
        start, after_two_steps, end = rank["weights"]
        assert close(after_two_steps, alone["weights"][1]) and close(end, alone["weights"][2])
        assert not any(np.array_equal(start[name], after_two_steps[name]) for name in start)
        assert all(np.array_equal(end[name], together[0]["weights"][2][name]) for name in end)


def router_step(group: Group, shares: list[list[Tensor]]) -> tuple[float, float]:
    """(this rank's part of the router loss, norm of its gradient) of a mixture of experts; there is no other loss."""
    config = family_config("Mixtral-8x7B", **ROUTER_LOSS)
    settings = StreamingConfig(dtype="float32", optimizer_backend="torch", cpu_threads=1)
    engine = StreamingEngine(config, settings, AdamWConfig(), device="cpu", group=group)
    engine.load_weights(oracle.plain_model(config).state_dict().items())
    batch = oracle.pack(shares[group.rank])
    engine.forward_backward([batch], lambda index, outputs: 0.0 * outputs.log_probs.sum())
    return engine.router_loss.item(), engine.optimizer_step()


def test_each_rank_has_a_router_loss_weighted_by_its_tokens() -> None:
    model = oracle.plain_model(family_config("Mixtral-8x7B", **ROUTER_LOSS))
    shares = [oracle.random_rows([11, 24], seed=1), oracle.random_rows([5, 9], seed=2)]
    parts = (35 / 49, 14 / 49)
    losses = [0.5 * part * plain_router_loss(model, rows) for part, rows in zip(parts, shares, strict=True)]
    sum(losses).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm().item()
    for rank, loss in zip(ranks.run(router_step, 2, shares), losses, strict=True):
        assert rank.error is None, rank
        assert rank.result == pytest.approx((loss.item(), norm), rel=1e-5)


def dropout_losses(group: Group) -> list[float]:
    """Losses of the same row in two steps, in which dropout hides much."""
    made = ranks.engine(Task(dropout=0.5), group)
    return [ranks.train_step(made, 0, 1, [2])[0] for _ in range(2)]


def test_ranks_and_steps_draw_dropout_masks_of_their_own() -> None:
    (first, second), (other_first, other_second) = [rank.result for rank in ranks.run(dropout_losses, 2)]
    assert len({first, second, other_first, other_second}) == 4
    assert abs(first - other_first) > 1e-3 * abs(first)


def test_lora_adapters_equal_those_of_one_rank() -> None:
    task = Task(lora=LoraSettings(rank=4), keep_reference=True)
    alone = ranks.train(ranks.ALONE, task)
    together = [ended.result for ended in ranks.run(ranks.train, 2, task)]
    assert np.allclose([norm for _, norm in together[1]["results"]], [norm for _, norm in alone["results"]], rtol=1e-6)
    start, _, end = alone["weights"]
    trained = [name for name in start if not np.array_equal(start[name], end[name])]
    assert len(trained) == 3 * 7 * 2 and all(name.endswith((DOWN, UP)) for name in trained)
    for rank in together:
        assert close(rank["weights"][2], end) and "reference" not in rank["planned"]


def test_two_runs_have_the_same_bits_and_arenas_are_there_once() -> None:
    task = Task(settings={"dtype": "bfloat16", "optimizer_backend": "native"})
    first, second = ([ended.result for ended in ranks.run(ranks.train, 2, task)] for _ in range(2))
    for left, right in zip(first, second, strict=True):
        assert left["results"] == right["results"]
        assert all(np.array_equal(left["weights"][2][name], right["weights"][2][name]) for name in left["weights"][2])
    planned = sum(nbytes for kind, nbytes in first[0]["planned"].items() if kind != "staging")
    assert planned <= first[0]["shared"] <= planned + 4096 * 5 * 5  # five units of five kinds, in whole pages


def train_beside_small_shared_memory(group: Group) -> int:
    """Bytes of the arenas of a run in which /dev/shm has room for 4 KiB."""
    small_shared_memory("4k")
    return ranks.train(group, Task(), steps=2)["shared"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it mounts a file system for one process")
def test_arenas_take_nothing_of_dev_shm() -> None:
    for rank in ranks.run(train_beside_small_shared_memory, 2):
        assert rank.error is None and rank.result > 100 * 4096, rank


@pytest.mark.parametrize(("saves", "resumes"), [(1, 2), (2, 3)])
def test_a_checkpoint_is_written_once_and_resumed_by_another_number_of_ranks(
    saves: int, resumes: int, tmp_path: Path
) -> None:
    shares = {1: [[0, 1, 2, 3, 4, 5]], 2: [[0, 1, 2], [3, 4, 5]], 3: [[0, 1], [2, 3], [4, 5]]}
    folder = str(tmp_path / "checkpoint")

    def run(size: int, action: str) -> list[dict]:
        task = Task(shares=shares[size], keep_reference=True)
        if size == 1:
            return [ranks.checkpointed(ranks.ALONE, task, folder, action)]
        return [ended.result for ended in ranks.run(ranks.checkpointed, size, task, folder, action)]

    saved = run(saves, "save")
    alone = ranks.train(ranks.ALONE, Task(shares=shares[1]))
    resumed = run(resumes, "resume")
    for rank in resumed:
        assert rank["step_count"] == ranks.STEPS
        assert close(rank["weights"], alone["weights"][2])
        # The reference is still what was loaded first, in every rank, before and after the resume.
        assert np.allclose(rank["reference"], saved[0]["reference"], atol=1e-6)
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == sorted(
        ["state.json", *(f"{name}.safetensors" for name in ("embedding", "layers.0", "layers.1", "layers.2", "head"))]
    )


def test_all_ranks_export_under_the_names_of_the_folder(tmp_path: Path) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    config = Qwen3MoeConfig(**oracle.SIZES, num_hidden_layers=1, **sizes)
    # With merged experts; transformers saves them apart.
    state = {name: value.contiguous() for name, value in oracle.plain_model(config).state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    names = [ended.result for ended in ranks.run(ranks.exported_names, 2, config, str(tmp_path))]
    assert sorted(names[0]) == sorted(state) and names[1] == names[0]
