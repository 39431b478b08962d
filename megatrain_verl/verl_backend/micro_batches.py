"""verl's jagged tensors to the engine's packed micro-batches, and scores back to jagged tensors."""

from collections.abc import Mapping

import torch
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorData
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode

from megatrain_verl.streaming.batch import MicroBatch, TokenOutputs
from megatrain_verl.streaming.images import IMAGE_INPUTS, join_images

LEAST_TEMPERATURE = 1e-8  # verl's FSDP engine clamps there
# What follows from `IMAGE_INPUTS` and from the token ids, which the engine computes itself.
FOLLOWING_INPUTS = ("images_seqlens", "mm_token_type_ids", "token_type_ids")


def check_batch(data: TensorDict) -> None:
    """Refuse what would be trained wrongly.

    Raises:
        ValueError: a padded batch, or distillation.
    """
    pad_mode = tu.get_non_tensor_data(data, "pad_mode", DatasetPadMode.NO_PADDING)
    if pad_mode != DatasetPadMode.NO_PADDING or not data["input_ids"].is_nested:
        raise ValueError(f"megatrain takes batches without padding (pad_mode=no_padding), got {pad_mode}")
    for option in ("distillation_use_topk", "distillation_only"):
        if tu.get_non_tensor_data(data, option, False):
            raise ValueError(f"top-k distillation ({option}) is not supported by megatrain")


def to_micro_batch(data: TensorDict) -> MicroBatch:
    """The packed rows of `data`: `input_ids` are jagged (B, j), `position_ids` too, or (B, 4, j) with M-RoPE.

    Raises:
        ValueError: an empty row, or a row with video or audio.
    """
    input_ids, temperature = data["input_ids"], data["temperature"]
    if isinstance(temperature, Tensor):
        temperature = temperature.float().clamp_min(LEAST_TEMPERATURE)
    return MicroBatch(
        input_ids=input_ids.values(),
        position_ids=data["position_ids"].values(),
        row_lengths=row_lengths(data),
        temperature=temperature,
        score_mask=score_mask(data),
        images=join_images([row_images(row) for row in data.get("multi_modal_inputs", [])]),
    )


def row_images(inputs: NonTensorData | Mapping[str, Tensor] | None) -> dict[str, Tensor] | None:
    """What the model takes of the images of one row, out of what verl's `multi_modal_inputs` has; None without images.

    Raises:
        ValueError: video or audio.
    """
    inputs = inputs.data if isinstance(inputs, NonTensorData) else inputs
    given = {name: value for name, value in (inputs or {}).items() if value is not None}
    if other := sorted(given.keys() - {*IMAGE_INPUTS, *FOLLOWING_INPUTS}):
        raise ValueError(f"megatrain takes images beside text, no video or audio; multi_modal_inputs has {other}")
    images = {name: given[name] for name in IMAGE_INPUTS if name in given}
    return images if "pixel_values" in images else None


def row_lengths(data: TensorDict) -> list[int]:
    """Tokens of each row in `data`. Where positions start at 0 again, a row of the batch is several, packed.

    Raises:
        ValueError: an empty row.
    """
    offsets, positions = data["input_ids"].offsets(), data["position_ids"].values()
    positions = positions if positions.dim() == 1 else positions[0]  # of the text, in M-RoPE's four
    if empty := (offsets.diff() == 0).nonzero().flatten().tolist():
        raise ValueError(f"rows {empty} of the batch have no tokens")
    begins = positions == 0
    begins[offsets[:-1]] = True
    return torch.cat([begins.nonzero().flatten(), offsets[-1:]]).diff().tolist()


def score_mask(data: TensorDict) -> Tensor | None:
    """(T,) bool: the positions whose scores verl's losses use; None where that is not known (all are scored).

    Position t scores token t + 1, so a mask over tokens moves one to the left. In RL `response_mask` is jagged over
    the response, in SFT `loss_mask` over the whole row.
    """
    offsets = data["input_ids"].offsets()
    tokens = data["input_ids"].values().shape[0]
    response_mask, loss_mask = data.get("response_mask", None), data.get("loss_mask", None)
    if _is_jagged(response_mask) and "responses" in data:
        wanted = torch.zeros(tokens, dtype=torch.bool)
        for end, mask in zip(offsets[1:].tolist(), response_mask.unbind(), strict=True):
            wanted[end - 1 - mask.shape[0] : end - 1] = mask.bool()
        return wanted
    if _is_jagged(loss_mask) and loss_mask.values().shape[0] == tokens:
        return loss_mask.values().bool().roll(-1)
    return None


def to_model_output(outputs: TokenOutputs, input_ids: Tensor) -> dict[str, Tensor]:
    """verl's `model_output`: each score of `outputs` as a jagged (B, j) tensor with the rows of `input_ids`."""
    scores: Mapping[str, Tensor | None] = {
        "log_probs": outputs.log_probs,
        "entropy": outputs.entropy,
        "sum_pi_squared": outputs.sum_pi_squared,
    }
    offsets = input_ids.offsets().to(outputs.log_probs.device)
    return {
        name: torch.nested.nested_tensor_from_jagged(score, offsets)
        for name, score in scores.items()
        if score is not None
    }


def _is_jagged(tensor: object) -> bool:
    return isinstance(tensor, Tensor) and tensor.is_nested
