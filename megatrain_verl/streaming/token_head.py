"""Final norm, output matrix and scores, over chunks of tokens: tokens x vocabulary is never held.

With logits z = W norm(h) / temperature, p = softmax(z) and H the entropy of p:

    log_prob = z[label] - logsumexp(z)              d log_prob / dz = onehot(label) - p
    entropy  = logsumexp(z) - sum(p z)              d entropy  / dz = -p (log p + entropy)

The backward pass goes over the chunks again and uses these closed forms, so it holds one chunk of logits too.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatrain_verl.streaming.batch import TokenOutputs


@dataclass
class ScoredTokens:
    """Which tokens of a micro-batch are scored: S of T, all tensors on the device.

    `positions` (S,) int64 in the packed rows, `labels` (S,) int64 next tokens, `temperature` (S,) float32.
    """

    positions: Tensor
    labels: Tensor
    temperature: Tensor

    def chunks(self, size: int) -> Iterator["ScoredTokens"]:
        """Parts of at most `size` tokens."""
        parts = (self.positions.split(size), self.labels.split(size), self.temperature.split(size))
        for positions, labels, temperature in zip(*parts, strict=True):
            yield ScoredTokens(positions, labels, temperature)

    def select(self, wanted: Tensor) -> "ScoredTokens":
        """Those for which `wanted` (S,) bool is True."""
        return ScoredTokens(self.positions[wanted], self.labels[wanted], self.temperature[wanted])


class TokenHead:
    """Scores of hidden states, and their gradient.

    Args:
        norm: final norm, its weight a view into the device slot.
        weight: (V, H) output matrix, a view into the device slot.
        chunk_tokens: tokens per chunk.
    """

    def __init__(self, norm: nn.Module, weight: Tensor, chunk_tokens: int) -> None:
        self.norm, self.weight, self._chunk_tokens = norm, weight, chunk_tokens

    @torch.no_grad()
    def score(self, hidden: Tensor, tokens: ScoredTokens, *, entropy: bool, sum_pi_squared: bool) -> TokenOutputs:
        """Scores of `hidden` (T, H), each (T,) float32 and 0 where `tokens` names no position."""

        def zeros(wanted: bool) -> Tensor | None:
            return torch.zeros(hidden.shape[0], device=hidden.device) if wanted else None

        outputs = TokenOutputs(zeros(True), zeros(entropy), zeros(sum_pi_squared))
        for chunk in tokens.chunks(self._chunk_tokens):
            log_p = self._log_softmax(self.norm(hidden[chunk.positions]), chunk)
            outputs.log_probs[chunk.positions] = log_p.gather(1, chunk.labels[:, None]).squeeze(1)
            if outputs.sum_pi_squared is not None:
                outputs.sum_pi_squared[chunk.positions] = (2 * log_p).exp_().sum(1)
            if outputs.entropy is not None:
                outputs.entropy[chunk.positions] = _entropy(log_p.exp(), log_p)
        return outputs

    def backward(
        self,
        hidden: Tensor,
        tokens: ScoredTokens,
        grad_log_probs: Tensor,
        grad_entropy: Tensor | None,
        grad_norm_weight: Tensor,
        grad_weight: Tensor,
    ) -> Tensor:
        """Gradient of `hidden` (T, H); those of the norm weight (H,) and of the matrix (V, H) are added in float32.

        `grad_log_probs` and `grad_entropy` are (T,) float32 gradients of the outputs of `score`.
        """
        grad_hidden = torch.zeros_like(hidden)
        needed = grad_log_probs[tokens.positions] != 0
        if grad_entropy is not None:
            needed |= grad_entropy[tokens.positions] != 0
        # Most tokens of an RL batch are prompts: their gradient is 0 and they cost nothing here.
        for chunk in tokens.select(needed).chunks(self._chunk_tokens):
            inputs = hidden[chunk.positions].detach().requires_grad_()
            with torch.enable_grad():
                normed = self.norm(inputs)
            with torch.no_grad():
                entropy_part = None if grad_entropy is None else grad_entropy[chunk.positions]
                grad_logits = self._grad_logits(normed, chunk, grad_log_probs[chunk.positions], entropy_part)
                add_matmul(grad_weight, grad_logits.t(), normed.detach())
                grad_normed = grad_logits @ self.weight
            grad_inputs, norm_part = torch.autograd.grad(normed, [inputs, self.norm.weight], grad_normed)
            grad_hidden[chunk.positions] = grad_inputs
            grad_norm_weight.add_(norm_part)
        return grad_hidden

    def _log_softmax(self, normed: Tensor, chunk: ScoredTokens) -> Tensor:
        """(C, V) float32 log-probabilities of a chunk."""
        logits = matmul_float32(normed, self.weight.t())
        return torch.log_softmax(logits.div_(chunk.temperature[:, None]), dim=1)

    def _grad_logits(
        self, normed: Tensor, chunk: ScoredTokens, grad_log_probs: Tensor, grad_entropy: Tensor | None
    ) -> Tensor:
        """(C, V) gradient of the unscaled logits, in the compute dtype."""
        log_p = self._log_softmax(normed, chunk)
        p = log_p.exp()
        if grad_entropy is None:
            grad = p.mul_(-grad_log_probs[:, None])
        else:
            weighted = log_p.add_(_entropy(p, log_p)[:, None]).mul_(grad_entropy[:, None])
            grad = weighted.add_(grad_log_probs[:, None]).mul_(p).neg_()
        grad.scatter_add_(1, chunk.labels[:, None], grad_log_probs[:, None])
        return grad.div_(chunk.temperature[:, None]).to(normed.dtype)


def _entropy(p: Tensor, log_p: Tensor) -> Tensor:
    return -torch.linalg.vecdot(p, log_p)


def matmul_float32(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right` with a float32 result; on CUDA the tensor cores' float32 sums are not rounded to bfloat16."""
    if left.is_cuda and left.dtype is torch.bfloat16:
        return torch.mm(left, right, out_dtype=torch.float32)
    return (left @ right).float()


def add_matmul(total: Tensor, left: Tensor, right: Tensor) -> None:
    """`total += left @ right` with `total` in float32."""
    if left.is_cuda and left.dtype is torch.bfloat16:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    elif left.dtype is torch.float32:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)
