"""The plain way to do what the engine does: a resident transformers model and torch.optim.AdamW.

Weights with more than one dimension are multiplied by 8 after initialisation: with the default 0.02 attention is
nearly uniform, and tests of what a token may attend to pass whatever the mask.
"""

import copy

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from megatrain_verl.config import AdamWConfig, LoraSettings, StreamingConfig
from megatrain_verl.streaming.batch import MicroBatch, TokenOutputs
from megatrain_verl.streaming.engine import StreamingEngine
from megatrain_verl.streaming.pass_plan import PassPlan, PassPlanner
from megatrain_verl.streaming.streams import Streams

VOCAB = 97
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def tiny_config(family: str, *, layers: int = 3, tied: bool = False, **settings: object) -> PretrainedConfig:
    """A tiny config of "qwen2", "qwen3", "llama" or "mistral" (with a window of 8 tokens)."""
    kinds = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig, "mistral": MistralConfig}
    extra = {"qwen3": {"head_dim": 8}, "mistral": {"sliding_window": 8}}.get(family, {})
    settings = {**SIZES, "num_hidden_layers": layers, "tie_word_embeddings": tied, **extra, **settings}
    return kinds[family](**settings)


def plain_model(config: PretrainedConfig, seed: int = 0, attn_implementation: str = "eager") -> nn.Module:
    """A float32 transformers model with weights large enough for attention to matter."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attn_implementation)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
            else:  # norms and biases away from 1 and 0, so that forgetting one shows
                parameter.add_(0.1 * torch.randn_like(parameter))
        trained = dict(model.named_parameters(remove_duplicate=False))
        for name in (name for name in model.state_dict() if name not in trained):
            model.get_buffer(name).add_(0.1 * torch.randn_like(model.get_buffer(name)))
    return model.float()


def make_engine(
    model: nn.Module,
    config: PretrainedConfig,
    adamw: AdamWConfig | None = None,
    *,
    streams: Streams | None = None,
    device: str = "cpu",
    keep_reference: bool = False,
    forward_only: bool = False,
    lora: LoraSettings | None = None,
    **settings: object,
) -> StreamingEngine:
    """A float32 engine on torch's AdamW with the weights of `model`."""
    settings = {"dtype": "float32", "optimizer_backend": "torch", "head_chunk_tokens": 7, "cpu_threads": 1, **settings}
    optimizer = None if forward_only else adamw or AdamWConfig(lr=1e-4)
    engine = StreamingEngine(
        config,
        StreamingConfig(**settings),
        optimizer,
        device=device,
        keep_reference=keep_reference,
        streams=streams,
        lora=lora,
    )
    engine.load_weights(model.state_dict().items())
    return engine


class FixedPlanner(PassPlanner):
    """A planner that was told what to choose."""

    def __init__(self, plan: PassPlan) -> None:
        self.fixed = plan

    def plan(self, micro_batches: list[MicroBatch], own_bytes: int) -> PassPlan:
        return self.fixed


def random_rows(lengths: list[int], seed: int = 1) -> list[Tensor]:
    """Rows of random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (length,), generator=generator) for length in lengths]


def pack(rows: list[Tensor], **settings: object) -> MicroBatch:
    """One micro-batch of `rows`."""
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    return MicroBatch(torch.cat(rows), positions, [len(row) for row in rows], **settings)


def split_micro_batches(rows: list[Tensor], size: int) -> list[MicroBatch]:
    """Micro-batches of `size` rows each."""
    return [pack(rows[start : start + size]) for start in range(0, len(rows), size)]


def plain_log_probs(model: nn.Module, row: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """(L - 1,) log-probs of the next tokens and (L - 1,) entropies of one row, float32, with gradient."""
    logits = model(row[None].to(model.device)).logits[0, :-1].float() / temperature
    log_p = torch.log_softmax(logits, dim=-1)
    labels = row[1:, None].to(model.device)
    return log_p.gather(1, labels).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def engine_log_probs(outputs: list, micro_batches: list[MicroBatch], field: str = "log_probs") -> list[Tensor]:
    """Per row, the (L - 1,) scores of the next tokens."""
    rows = []
    for output, batch in zip(outputs, micro_batches, strict=True):
        rows += [row[:-1].cpu() for row in getattr(output, field).split(batch.row_lengths)]
    return rows


def plain_adamw(model: nn.Module, settings: AdamWConfig) -> torch.optim.AdamW:
    """torch's AdamW with the same settings."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": settings.weight_decay if settings.decay_norms_and_biases else 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps)


def engine_pass(engine: StreamingEngine, micro_batches: list[MicroBatch]) -> float:
    """Gradients of the mean of -log-prob over all next tokens in one engine pass; returns that mean."""
    tokens = sum(batch.num_tokens - len(batch.row_lengths) for batch in micro_batches)
    losses = []

    def loss_fn(index: int, outputs: TokenOutputs) -> Tensor:
        losses.append(-outputs.log_probs.sum() / tokens)
        return losses[-1]

    engine.zero_grad()
    engine.forward_backward(micro_batches, loss_fn)
    return sum(loss.item() for loss in losses)


def engine_gradients(engine: StreamingEngine) -> dict[str, Tensor]:
    """Every gradient on the host, by Hugging Face name; frozen parameters have none."""
    engine._gradients.wait_landed()
    trained = [(unit, span) for unit, span in engine.state.parameters() if span.trainable]
    return {span.name: unit.view(unit.grad, span).clone() for unit, span in trained}


def masters(engine: StreamingEngine) -> dict[str, Tensor]:
    """Every FP32 master weight, by Hugging Face name."""
    for unit in engine.state.units:
        engine._updates.wait(unit, "reading")
    return {
        span.name: unit.master(span.offset, span.offset + span.numel).view(span.shape)
        for unit, span in engine.state.parameters()
    }
