"""Tiny models, batches in the shapes that verl's V1 trainer sends, and the calls that verl's workers make."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorData
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from verl.utils import tensordict_utils as tu
from verl.workers.engine import BaseEngine
from verl.workers.utils.losses import ppo_loss

from megatrain_verl.verl_backend.config import MegaTrainActorConfig

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPERATURE = 0.8


def save_tiny_model(folder: Path, *, tied: bool = False, layers: int = 2, seed: int = 0) -> Path:
    """A random float32 Qwen2 with a byte tokenizer, in `folder`. The vocabulary is the tokenizer's."""
    tokenizer = _byte_tokenizer()
    tokenizer.save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,  # in two heads of 32, the least that vLLM's CPU attention takes
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # the default init makes attention nearly uniform, and errors in it invisible
                parameter.mul_(8)
    model.save_pretrained(folder)
    return folder


def rl_batch(vocab_size: int, *, rows: int = 6, seed: int = 0, per_row_temperature: bool = False) -> TensorDict:
    """What `update_actor` sends: `rows` prompts with responses of different lengths; the longer ones are two turns."""
    generator = torch.Generator().manual_seed(seed)

    def whole(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape or (1,), generator=generator)

    prompts = [whole(0, vocab_size, int(whole(3, 9))) for _ in range(rows)]
    responses = [whole(0, vocab_size, int(whole(2, 12))) for _ in range(rows)]
    masks = [torch.ones(len(response), dtype=torch.int64) for response in responses]
    for mask in masks:
        if len(mask) > 6:
            mask[2:4] = 0  # a tool's answer between two turns
    scores = {
        name: jagged([torch.randn(len(response), generator=generator) * 0.3 + mean for response in responses])
        for name, mean in (("old_log_probs", -6.0), ("ref_log_prob", -6.0), ("advantages", 0.0))
    }
    rows_ids = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    tensors = {
        "input_ids": jagged(rows_ids),
        "position_ids": jagged([torch.arange(len(row)) for row in rows_ids]),
        "prompts": jagged(prompts),
        "responses": jagged(responses),
        "response_mask": jagged(masks),
        "loss_mask": jagged(masks),
        **scores,
    }
    if per_row_temperature:
        tensors["temperature"] = torch.rand(rows, generator=generator) + 0.5
        return with_options(tensors, rows, global_batch_size=rows)
    return with_options(tensors, rows, temperature=TEMPERATURE, global_batch_size=rows)


def sft_batch(vocab_size: int, *, rows: int = 5, seed: int = 0) -> TensorDict:
    """What verl's SFT trainer sends: a mask over each whole row, 0 at its start."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 14, (rows,), generator=generator).tolist()
    tensors = {
        "input_ids": jagged([torch.randint(0, vocab_size, (length,), generator=generator) for length in lengths]),
        "position_ids": jagged([torch.arange(length) for length in lengths]),
        "loss_mask": jagged([(torch.arange(length) > 1).long() for length in lengths]),
    }
    return with_options(tensors, rows, temperature=1.0, global_batch_size=rows)


def with_options(tensors: dict[str, Tensor], rows: int, **options: object) -> TensorDict:
    """A batch with verl's non-tensor options; one micro-batch of everything unless they say otherwise."""
    lengths = tensors["input_ids"].offsets().diff().tolist()
    defaults = {
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": rows,
        "use_remove_padding": False,
        "pad_token_id": 0,
        "global_token_num": NonTensorData(lengths),
    }
    return tu.get_tensordict(tensors, {**defaults, **options})


def jagged(rows: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def actor_loss(**options: Any) -> Callable[..., Any]:
    """verl's PPO loss with the options of an actor."""
    return partial(
        ppo_loss, config=MegaTrainActorConfig(**{"ppo_micro_batch_size_per_gpu": 1, "rollout_n": 1, **options})
    )


def train(engine: BaseEngine, batch: TensorDict, loss: Callable[..., Any]) -> dict[str, Any]:
    """One optimizer step as verl's TrainingWorker does it; `lr` is the rate after it."""
    with engine.train_mode():
        output = engine.train_batch(batch.clone(), loss_function=loss)
    output["lr"] = engine.lr_scheduler_step()
    return output


def score(engine: BaseEngine, batch: TensorDict, *, reference: bool = False, **options: Any) -> dict[str, Tensor]:
    """Jagged log-probs and entropy as verl's TrainingWorker asks for them, of the policy or of its reference."""
    batch = batch.clone()
    tu.assign_non_tensor(batch, calculate_entropy=True, **options)
    with engine.eval_mode(), engine.disable_adapter() if reference else nullcontext():
        return engine.infer_batch(batch)["model_output"]


def weights(engine: BaseEngine) -> dict[str, Tensor]:
    """A copy of what the rollout would be sent."""
    return {name: weight.clone() for name, weight in engine.get_per_tensor_param()[0]}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Bit-equal tensors under the same names."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {token: index for index, token in enumerate(specials + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens(specials)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT,
        model_max_length=128,
    )
