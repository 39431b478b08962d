"""What goes into the engine and what comes out: packed micro-batches and per-token outputs."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class MicroBatch:
    """Rows packed one behind the other, without padding. T tokens in R rows.

    Attributes:
        input_ids: (T,) int64.
        position_ids: (T,) int64, honoured as given; (4, T) of a model with M-RoPE: text positions, and those in time,
            height and width (with (T,) they come from the model's own function).
        row_lengths: tokens per row; they sum to T.
        temperature: logits are divided by it; one number, or one per row (R,).
        score_mask: (T,) bool, True where the log-prob of the next token of the same row is wanted. None: everywhere
            but at each row's last token, which has no next token and is never scored.
        images: what the model's `get_image_features` takes of the images of all rows, in the order of their tokens:
            "pixel_values" and, by family, "image_grid_thw" or "image_sizes". None: no images.

    Raises:
        ValueError: shapes that do not agree, an empty row, or a temperature that is not positive.
    """

    input_ids: Tensor
    position_ids: Tensor
    row_lengths: list[int]
    temperature: float | Tensor = 1.0
    score_mask: Tensor | None = None
    images: dict[str, Tensor] | None = None

    def __post_init__(self) -> None:
        tokens = self.input_ids.shape[0]
        if self.input_ids.dim() != 1 or self.position_ids.shape not in ((tokens,), (4, tokens)):
            raise ValueError(
                f"input_ids must be (T,), position_ids (T,) or (4, T), got {tuple(self.input_ids.shape)} and "
                f"{tuple(self.position_ids.shape)}"
            )
        if sum(self.row_lengths) != tokens or min(self.row_lengths, default=0) < 1:
            raise ValueError(f"row_lengths must be positive and sum to {tokens} tokens, got {self.row_lengths}")
        if self.score_mask is not None and self.score_mask.shape != self.input_ids.shape:
            raise ValueError(f"score_mask must be ({tokens},), got {tuple(self.score_mask.shape)}")
        if isinstance(self.temperature, Tensor) and self.temperature.shape != (len(self.row_lengths),):
            raise ValueError(f"temperature must be one number per row, got shape {tuple(self.temperature.shape)}")
        if not bool((torch.as_tensor(self.temperature) > 0).all()):
            raise ValueError(f"temperature must be positive, got {self.temperature}")

    @classmethod
    def from_padded(
        cls,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor | None = None,
        temperature: float | Tensor = 1.0,
    ) -> "MicroBatch":
        """Pack (B, L) rows padded on either side; positions count real tokens from 0 unless `position_ids` is given."""
        mask = attention_mask.bool()
        if position_ids is None:
            position_ids = (mask.long().cumsum(1) - 1).clamp_min(0)
        return cls(input_ids[mask], position_ids[mask], mask.sum(1).tolist(), temperature)

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]

    def scored_positions(self) -> Tensor:
        """(S,) int64 positions whose next token is to be scored, ascending."""
        every = self.score_mask is None
        wanted = torch.ones(self.num_tokens, dtype=torch.bool) if every else self.score_mask.cpu().clone()
        wanted[torch.tensor(self.row_lengths).cumsum(0) - 1] = False
        return wanted.nonzero().squeeze(1)

    def token_temperature(self) -> Tensor:
        """(T,) float32 temperature of each token."""
        if isinstance(self.temperature, Tensor):
            return self.temperature.cpu().float().repeat_interleave(torch.tensor(self.row_lengths))
        return torch.full((self.num_tokens,), float(self.temperature))


@dataclass
class TokenOutputs:
    """Scores of one micro-batch. Position t speaks of token t + 1 of the same row; 0 where nothing was scored.

    Attributes:
        log_probs: (T,) float32, log-probability of the next token under logits / temperature.
        entropy: (T,) float32 entropy of the same distribution in nats, or None if not asked for.
        sum_pi_squared: (T,) float32 sum of its squared probabilities, or None if not asked for.
        argmax: (T,) int64 most probable next token, or None if not asked for.
    """

    log_probs: Tensor
    entropy: Tensor | None = None
    sum_pi_squared: Tensor | None = None
    argmax: Tensor | None = None


def check_micro_batches(micro_batches: list[MicroBatch], max_seq_len: int, vocab_size: int) -> None:
    """Refuse what the model cannot take.

    Raises:
        ValueError: no micro-batch, a row longer than `max_seq_len`, or a token id outside the vocabulary.
    """
    if not micro_batches:
        raise ValueError("there are no micro-batches")
    for batch in micro_batches:
        longest = max(batch.row_lengths)
        if longest > max_seq_len:
            raise ValueError(
                f"a row of {longest} tokens is longer than max_seq_len ({max_seq_len}); shorten it or raise it"
            )
        low, high = batch.input_ids.min().item(), batch.input_ids.max().item()
        if low < 0 or high >= vocab_size:
            raise ValueError(f"token ids {low} .. {high} lie outside the vocabulary of {vocab_size}")


def waves(micro_batches: list[MicroBatch], tokens: int | None) -> list[list[MicroBatch]]:
    """Consecutive groups of micro-batches of at most `tokens` tokens each; one group if that is None.

    Raises:
        ValueError: one micro-batch alone has more.
    """
    if tokens is None:
        return [micro_batches]
    groups: list[list[MicroBatch]] = []
    room = 0
    for batch in micro_batches:
        if batch.num_tokens > tokens:
            raise ValueError(
                f"a micro-batch of {batch.num_tokens} tokens exceeds wave_tokens={tokens}; make it smaller"
            )
        if batch.num_tokens > room:
            groups.append([])
            room = tokens
        groups[-1].append(batch)
        room -= batch.num_tokens
    return groups
