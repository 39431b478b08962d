"""Modules that would carry something from one packed row into the next: they get the rows of a pack one by one.

Linear attention keeps a state and a convolution along the sequence, and Llama 4 counts positions by the index of a
token. Such a module is called with its rows as a batch (R, longest row, ...), padded on the right, where it changes
nothing for the tokens before it. Linear attention whose kernels take the boundaries of rows stays packed.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from megatrain_verl.streaming.attention import RowLayout, RowMask
from megatrain_verl.streaming.linear_attention import give_boundaries, is_linear_attention, takes_boundaries

MOST_PADDED = 2  # times the tokens, in a batch of rows; beyond it the rows are called one by one


def install(layer: nn.Module) -> None:
    """Let the modules of `layer` that need it see their rows apart; `layer` is changed."""
    for module in layer.modules():
        if is_linear_attention(module):
            if takes_boundaries(module):
                give_boundaries(module)
            else:
                module.forward = partial(_with_rows_apart, module.forward, True)
        elif getattr(module, "attn_temperature_tuning", False) and not module.use_rope:
            module.forward = partial(_with_rows_apart, module.forward, False)


@torch.compiler.disable  # how the rows lie changes with every micro-batch: nothing here may become part of a graph
def _with_rows_apart(
    forward: Callable[..., Tensor | tuple],
    is_linear: bool,
    hidden_states: Tensor,
    attention_mask: RowMask,
    **named: object,
) -> Tensor | tuple:
    rows, tokens = attention_mask.rows, hidden_states.shape[1]
    if len(rows.lengths) * rows.longest > MOST_PADDED * tokens:
        return _with_single_rows(forward, is_linear, hidden_states, attention_mask, named)

    def apart(value: object) -> object:
        if isinstance(value, tuple):
            return tuple(apart(part) for part in value)
        along_tokens = isinstance(value, Tensor) and value.dim() > 1 and value.shape[:2] == (1, tokens)
        return unpack(value, rows) if along_tokens else value

    mask = None if is_linear else replace(attention_mask, rows=None)
    output = forward(
        hidden_states=unpack(hidden_states, rows),
        attention_mask=mask,
        **{name: apart(value) for name, value in named.items()},
    )
    if isinstance(output, tuple):
        return pack(output[0], rows), *output[1:]
    return pack(output, rows)


def _with_single_rows(
    forward: Callable[..., Tensor | tuple],
    is_linear: bool,
    hidden_states: Tensor,
    attention_mask: RowMask,
    named: dict[str, object],
) -> Tensor | tuple:
    """One call for each row: slower than a batch, but a long row among short ones would be mostly padding there."""
    tokens, lengths = hidden_states.shape[1], attention_mask.rows.lengths
    outputs, start = [], 0

    def row_of(value: object, where: slice) -> object:
        if isinstance(value, tuple):
            return tuple(row_of(part, where) for part in value)
        along_tokens = isinstance(value, Tensor) and value.dim() > 1 and value.shape[:2] == (1, tokens)
        return value[:, where] if along_tokens else value

    for length in lengths:
        where = slice(start, start + length)
        start += length
        outputs.append(
            forward(
                hidden_states=hidden_states[:, where],
                attention_mask=None if is_linear else replace(attention_mask, rows=None),
                **{name: row_of(value, where) for name, value in named.items()},
            )
        )
    if isinstance(outputs[0], tuple):
        return torch.cat([output[0] for output in outputs], dim=1), *outputs[0][1:]
    return torch.cat(outputs, dim=1)


def unpack(packed: Tensor, rows: RowLayout) -> Tensor:
    """(1, T, ...) -> (R, longest, ...), padded with zeros on the right."""
    if rows.equal_rows:
        return packed[0].unflatten(0, (rows.equal_rows, -1))
    return pad_sequence(packed[0].split(rows.lengths), batch_first=True)


def pack(batch: Tensor, rows: RowLayout) -> Tensor:
    """(R, longest, ...) -> (1, T, ...), without the padding."""
    if rows.equal_rows:
        return batch.flatten(0, 1)[None]
    return torch.cat([row[:length] for row, length in zip(batch, rows.lengths, strict=True)])[None]
