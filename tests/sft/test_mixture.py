"""Several data sets in one: in order, interleaved by weights, brought to a number of rows; packs; held-out rows."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from megatrain_verl.sft.dataset import ChatDataset
from tests.sft.cases import byte_tokenizer, write_dataset


def two_datasets(folder: Path, **entry: Any) -> DictConfig:
    """ "a" has 6 rows, "b" has 30; each answer tells where it is from."""
    for name, count in (("a", 6), ("b", 30)):
        rows = [{"instruction": f"{name}?", "output": f"{name}{number:02d}"} for number in range(count)]
        config = write_dataset(folder, rows, name=name, **(entry if name == "a" else {}))
    return config


def answers(config: DictConfig, part: str = "train", names: tuple[str, ...] = ("a", "b")) -> list[str]:
    tokenizer = byte_tokenizer("chatml")
    dataset = ChatDataset(OmegaConf.create({"names": list(names), "part": part}), tokenizer, config)
    rows = [dataset[index] for index in range(len(dataset))]
    decoded = [tokenizer.decode(row["input_ids"][row["loss_mask"].bool()]) for row in rows]
    return [answer for text in decoded for answer in text.split("<|im_end|>") if answer]


def test_concat_takes_each_row_once_in_order(tmp_path: Path) -> None:
    assert answers(two_datasets(tmp_path)) == [f"a{n:02d}" for n in range(6)] + [f"b{n:02d}" for n in range(30)]


@pytest.mark.parametrize(("strategy", "least", "most"), [("interleave_under", 1, 1), ("interleave_over", 5, 30)])
def test_interleaving_by_weights(tmp_path: Path, strategy: str, least: int, most: int) -> None:
    config = two_datasets(tmp_path)
    config.mix_strategy, config.interleave_probs = strategy, [3, 1]
    drawn = answers(config)
    times = Counter(answer for answer in drawn if answer[0] == "a")
    assert len(times) == 6 and least <= min(times.values()) and max(times.values()) <= most
    share = sum(times.values()) / len(drawn)
    assert 0.5 < share < 0.95
    assert (len({answer for answer in drawn if answer[0] == "b"}) == 30) == (strategy == "interleave_over")
    assert drawn == answers(config)
    config.seed = 2
    assert drawn != answers(config)


def test_interleaving_in_turn_without_weights(tmp_path: Path) -> None:
    config = two_datasets(tmp_path)
    config.mix_strategy = "interleave_under"
    assert answers(config)[:4] == ["a00", "b00", "a01", "b01"]


@pytest.mark.parametrize(("count", "times"), [(4, {1}), (15, {2, 3, 4, 5, 6})])
def test_num_samples_draws_rows_and_repeats_only_when_it_must(tmp_path: Path, count: int, times: set[int]) -> None:
    drawn = Counter(answers(two_datasets(tmp_path, num_samples=count), names=("a",)))
    assert drawn.total() == count and len(drawn) == min(count, 6)
    assert set(drawn.values()) <= {1, *times}


def test_max_samples_reads_the_first_rows_of_each_dataset(tmp_path: Path) -> None:
    config = two_datasets(tmp_path)
    config.max_samples = 2
    assert answers(config) == ["a00", "a01", "b00", "b01"]


def test_held_out_rows_are_never_trained_even_when_rows_are_repeated(tmp_path: Path) -> None:
    config = two_datasets(tmp_path, num_samples=40)
    config.mix_strategy, config.val_size = "interleave_over", 0.25
    trained, held_out = set(answers(config)), answers(config, "held_out")
    assert len(held_out) == 10 and {answer[0] for answer in held_out} == {"a", "b"}
    assert not trained & set(held_out) and len(trained | set(held_out)) == 36


def test_packs_are_full_and_hold_each_row_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = two_datasets(tmp_path)
    apart = answers(config)
    config.packing, config.max_token_len_per_gpu = True, 256
    assert sorted(answers(config)) == sorted(apart) and answers(config) == answers(config)
    assert "packing: 36 rows in 4 packs" in capsys.readouterr().out
    config.val_size = 4
    assert len(answers(config, "held_out")) == 4


WRONG = {
    "strategy": ({"mix_strategy": "interleave"}, "'interleave' is not a value of data.mix_strategy; did you mean"),
    "weights without interleaving": ({"interleave_probs": [1, 1]}, "data.interleave_probs needs data.mix_strategy"),
    "one weight": (
        {"mix_strategy": "interleave_over", "interleave_probs": [1]},
        "must be 2 positive weights, one per data set",
    ),
    "no weight": (
        {"mix_strategy": "interleave_over", "interleave_probs": [1, 0]},
        "must be 2 positive weights, one per data set",
    ),
    "max_samples": ({"max_samples": 0}, "data.max_samples must be a number of rows or null, got 0"),
}


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG.keys())
def test_options_that_cannot_work_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        answers(OmegaConf.merge(two_datasets(tmp_path), options))
