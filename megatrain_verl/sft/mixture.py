"""Which rows of the data sets are trained on, how often, and which are held out."""

import datasets
import numpy as np
from omegaconf import DictConfig

from megatrain_verl.sft.known import check_known
from megatrain_verl.sft.registry import DatasetEntry

STOPPING = {"interleave_under": "first_exhausted", "interleave_over": "all_exhausted"}
STRATEGIES = ("concat", *STOPPING)


def held_out_rows(rows: int, val_size: float, batch_size: int) -> range:
    """Which of `rows` are held out: `val_size` of them (below 1 a share), evenly spaced.

    Their number is a multiple of `batch_size`, since verl evaluates whole batches only.

    Raises:
        ValueError: not even one batch would be left to train on.
    """
    wanted = val_size if val_size >= 1 else val_size * rows
    count = -(-round(wanted) // batch_size) * batch_size or batch_size
    if rows - count < batch_size:
        raise ValueError(
            f"data.val_size={val_size} of {rows} usable rows holds out {count}, a multiple of "
            f"data.train_batch_size={batch_size}; less than one batch is left to train on"
        )
    return range(0, rows, rows // count)[:count]


def split(parts: list[datasets.Dataset], held_out: range, *, taken: bool) -> list[datasets.Dataset]:
    """Of each data set the rows that `held_out` (positions in all of them, one after the other) takes, or leaves."""
    chosen, start = [], 0
    for rows in parts:
        positions = range(start, start + len(rows))
        chosen.append(rows.select([place - start for place in positions if (place in held_out) == taken]))
        start += len(rows)
    return chosen


def mix(parts: list[datasets.Dataset], entries: list[DatasetEntry], config: DictConfig) -> datasets.Dataset:
    """One data set of several, as `config` ("mix_strategy", "interleave_probs", "seed") says.

    "concat" takes each row once. "interleave_under" draws rows of data sets with these weights until one has no more,
    "interleave_over" until each has been used up, starting a shorter one again. Before that an entry with `num_samples`
    is brought to that number: rows drawn without repetition while there are any.

    Raises:
        ValueError: an unknown strategy, or weights that do not fit the data sets.
    """
    check_known(config.mix_strategy, STRATEGIES, "value of data.mix_strategy")
    parts = [
        rows if entry.num_samples is None else rows.select(_sample(len(rows), entry.num_samples, config.seed))
        for rows, entry in zip(parts, entries, strict=True)
    ]
    weights = _weights(config, len(parts))
    if config.mix_strategy == "concat":
        return datasets.concatenate_datasets(parts)
    return datasets.interleave_datasets(
        parts, probabilities=weights, seed=config.seed, stopping_strategy=STOPPING[config.mix_strategy]
    )


def _sample(rows: int, count: int, seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    drawn = generator.permutation(rows)[:count]
    return np.concatenate([drawn, generator.integers(0, rows, count - len(drawn))])


def _weights(config: DictConfig, count: int) -> list[float] | None:
    """Probabilities that sum to 1; None: the data sets take turns."""
    weights = config.interleave_probs
    if weights is None:
        return None
    if config.mix_strategy == "concat":
        raise ValueError("data.interleave_probs needs data.mix_strategy=interleave_under or interleave_over")
    if len(weights) != count or not all(weight > 0 for weight in weights):
        raise ValueError(f"data.interleave_probs must be {count} positive weights, one per data set, got {weights}")
    return [weight / sum(weights) for weight in weights]
