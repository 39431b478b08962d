"""Greedy generation with the training engine, for a few samples during training.

There is no cache of keys and values: each new token is one forward pass over the rows so far. All rows pass a layer
together, so a token costs one transfer of the weights (2 bytes per parameter in bfloat16) and the arithmetic of the
rows' tokens, whatever their number. A rollout engine is what to use for more than samples.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from megatrain_verl.streaming.batch import MicroBatch
from megatrain_verl.streaming.engine import StreamingEngine

Images = dict[str, Tensor]


def greedy(
    engine: StreamingEngine,
    prompts: list[list[int]],
    max_new_tokens: int,
    stop_tokens: Collection[int] = (),
    images: Sequence[Images | None] | None = None,
) -> list[list[int]]:
    """The most probable continuation of each prompt, token by token.

    A row ends with one of `stop_tokens` (which it then holds), after `max_new_tokens`, or at the model's longest row.

    Args:
        prompts: token ids of each row, at least one.
        images: of each row, as in `MicroBatch`.
    """
    limit = engine.config.max_seq_len or engine.model_config.get_text_config().max_position_embeddings
    images = images or [None] * len(prompts)
    generated: list[list[int]] = [[] for _ in prompts]
    for _ in range(max_new_tokens):
        running = [
            number
            for number, new in enumerate(generated)
            if len(prompts[number]) + len(new) < limit and not (new and new[-1] in stop_tokens)
        ]
        if not running:
            break
        rows = [_row(prompts[number] + generated[number], images[number]) for number in running]
        for number, row, outputs in zip(running, rows, engine.forward(rows, argmax=True), strict=True):
            generated[number].append(int(outputs.argmax[row.num_tokens - 2]))
    return generated


def _row(tokens: list[int], images: Images | None) -> MicroBatch:
    """`tokens` and a place for the next one, which alone is scored; what stands there does not matter."""
    input_ids = torch.tensor([*tokens, 0])
    scored = torch.zeros(len(input_ids), dtype=torch.bool)
    scored[-2] = True
    return MicroBatch(input_ids, torch.arange(len(input_ids)), [len(input_ids)], score_mask=scored, images=images)
