"""Rows that the SFT data set packs into one are trained like the same rows apart."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.utils.dataset.dataset_utils import DatasetPadMode, SFTTensorCollator
from verl.workers.config import HFModelConfig
from verl.workers.utils.losses import sft_loss

from megatrain_verl.sft.dataset import ChatDataset
from tests.sft.cases import alpaca_rows, write_dataset
from tests.verl_backend.cases import score, train, weights, with_options


def chat_dataset(model: HFModelConfig, folder: Path, *, packing: bool) -> ChatDataset:
    config = write_dataset(folder, alpaca_rows(9))
    config.packing, config.max_token_len_per_gpu = packing, 128
    files = OmegaConf.create({"names": ["rows"], "part": "train"})
    return ChatDataset(files, model.tokenizer, config)


def batch_of(dataset: ChatDataset) -> TensorDict:
    rows = [dataset[index] for index in range(len(dataset))]
    return with_options(
        SFTTensorCollator(DatasetPadMode.NO_PADDING)(rows), len(rows), temperature=1.0, global_batch_size=len(rows)
    )


def test_packed_rows_equal_rows_apart(tiny: HFModelConfig, make: Callable, tmp_path: Path) -> None:
    packed, apart = (chat_dataset(tiny, tmp_path, packing=packing) for packing in (True, False))
    assert len(packed) < len(apart) and sorted(sum(packed.packs, [])) == list(range(len(apart)))
    packed_batch, batch = batch_of(packed), batch_of(apart)
    assert packed_batch["input_ids"].offsets().diff().max() <= 128

    expected = score(make(tiny), batch)["log_probs"].unbind()
    found = score(make(tiny), packed_batch)["log_probs"].unbind()
    for pack, scores in zip(packed.packs, found, strict=True):
        lengths = [len(expected[row]) for row in pack]
        for row, part in zip(pack, scores.split(lengths), strict=True):
            torch.testing.assert_close(part[:-1], expected[row][:-1], rtol=1e-5, atol=1e-5)

    # With a large epsilon AdamW's step is the gradient, but for its scale.
    optim = {"lr": 1.0, "override_optimizer_config": {"eps": 1.0}}
    loss, left, right = partial(sft_loss, config=None), make(tiny, optim=optim), make(tiny, optim=optim)
    outputs = train(left, packed_batch, loss), train(right, batch, loss)
    assert outputs[0]["loss"] == pytest.approx(outputs[1]["loss"], rel=1e-6)
    assert outputs[0]["metrics"]["grad_norm"] == pytest.approx(outputs[1]["metrics"]["grad_norm"], rel=1e-5)
    for name, weight in weights(right).items():
        torch.testing.assert_close(weights(left)[name], weight, rtol=0, atol=1e-5)


def test_rows_joined_into_one_would_differ(tiny: HFModelConfig, make: Callable, tmp_path: Path) -> None:
    batch = batch_of(chat_dataset(tiny, tmp_path, packing=True))
    joined = batch.clone()
    lengths = batch["input_ids"].offsets().diff().tolist()
    joined["position_ids"] = torch.nested.as_nested_tensor([torch.arange(n) for n in lengths], layout=torch.jagged)
    found, other = (score(make(tiny), data)["log_probs"].values() for data in (batch, joined))
    assert (found - other).abs().max() > 0.1
