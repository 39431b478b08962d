"""Final norm, output matrix and scores, over chunks of tokens: tokens x vocabulary is never held in float32.

With logits z = W norm(h) / temperature, p = softmax(z) and H the entropy of p:

    log_prob = z[label] - logsumexp(z)              d log_prob / dz = onehot(label) - p
    entropy  = logsumexp(z) - sum(p z)              d entropy  / dz = -p (log p + entropy)

The gradient of the loss for a log-prob is one number per token, by which a row of (onehot - p) / temperature is
multiplied. That matrix does not depend on the loss: it may be kept in the compute dtype from the scores to the backward
pass (`keep`: 2 bytes x tokens x vocabulary of one micro-batch in bfloat16). Without it, or with a gradient for the
entropy, the backward pass computes the logits again, a chunk at a time.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatrain_verl.streaming.batch import TokenOutputs
from megatrain_verl.streaming.compiling import MaybeCompiled

ROW_BLOCK = 16


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
        compiled: fuse what is done with the logits with torch.compile.
        softcap: logits z become softcap * tanh(z / softcap) before the temperature; None leaves them.
    """

    def __init__(
        self, norm: nn.Module, weight: Tensor, chunk_tokens: int, compiled: bool = False, softcap: float | None = None
    ) -> None:
        self.norm, self.weight, self._chunk_tokens, self._softcap = norm, weight, chunk_tokens, softcap
        self._score_logits = MaybeCompiled(score_logits, compiled)

    @torch.no_grad()
    def score(
        self,
        hidden: Tensor,
        tokens: ScoredTokens,
        *,
        entropy: bool,
        sum_pi_squared: bool,
        keep: bool = False,
        argmax: bool = False,
    ) -> tuple[TokenOutputs, Tensor | None]:
        """Scores of `hidden` (T, H), each (T,) float32 (`argmax` int64) and 0 where `tokens` names no position.

        With `keep`, also (onehot - p) / temperature (S, V) in the compute dtype, for `backward`.
        """

        def zeros(wanted: bool) -> Tensor | None:
            return torch.zeros(hidden.shape[0], device=hidden.device) if wanted else None

        outputs = TokenOutputs(zeros(True), zeros(entropy), zeros(sum_pi_squared))
        if argmax:
            outputs.argmax = torch.zeros(hidden.shape[0], dtype=torch.int64, device=hidden.device)
        kept = hidden.new_empty(len(tokens.positions), self.weight.shape[0]) if keep else None
        parts = kept.split(self._chunk_tokens) if keep else itertools.repeat(None)
        for chunk, part in zip(tokens.chunks(self._chunk_tokens), parts):  # noqa: B905 - `parts` may have no end
            logits = matmul_float32(self.norm(hidden[chunk.positions]), self.weight.t())
            wanted = (entropy, sum_pi_squared, kept.dtype if keep else None)
            log_probs, entropies, squares, gradient = self._score_logits(
                logits, chunk.labels, chunk.temperature, self._softcap, *wanted
            )
            outputs.log_probs[chunk.positions] = log_probs
            if argmax:
                outputs.argmax[chunk.positions] = logits.argmax(1)
            if entropy:
                outputs.entropy[chunk.positions] = entropies
            if sum_pi_squared:
                outputs.sum_pi_squared[chunk.positions] = squares
            if keep:
                part.copy_(gradient)
        return outputs, kept

    def backward(
        self,
        hidden: Tensor,
        tokens: ScoredTokens,
        grad_log_probs: Tensor,
        grad_entropy: Tensor | None,
        grad_norm_weight: Tensor | None,
        grad_weight: Tensor | None,
        kept: Tensor | None = None,
    ) -> Tensor:
        """Gradient of `hidden` (T, H); those of the norm weight (H,) and of the matrix (V, H) are added in float32,
        or not taken where they are None.

        `grad_log_probs` and `grad_entropy` are (T,) float32 gradients of the outputs of `score`, `kept` is its second
        result.
        """
        grad_hidden = torch.zeros_like(hidden)
        for chunk in self._backward_chunks(tokens, grad_log_probs, grad_entropy, kept is not None):
            inputs = hidden[chunk.positions].detach().requires_grad_()
            with torch.enable_grad():
                normed = self.norm(inputs)
            with torch.no_grad():
                entropy_part = None if grad_entropy is None else grad_entropy[chunk.positions]
                grad_logits, scale = self._grad_logits(
                    normed, chunk, grad_log_probs[chunk.positions], entropy_part, kept
                )
                if grad_weight is not None:
                    add_matmul(grad_weight, grad_logits.t(), (normed * scale).to(hidden.dtype))
                grad_normed = (matmul_over_vocabulary(grad_logits, self.weight) * scale).to(hidden.dtype)
            wanted = [inputs] if grad_norm_weight is None else [inputs, self.norm.weight]
            grad_hidden[chunk.positions], *norm_part = torch.autograd.grad(normed, wanted, grad_normed)
            if norm_part:
                grad_norm_weight.add_(*norm_part)
        return grad_hidden

    def _backward_chunks(
        self, tokens: ScoredTokens, grad_log_probs: Tensor, grad_entropy: Tensor | None, kept: bool
    ) -> Iterator[ScoredTokens]:
        if kept and grad_entropy is None:
            yield tokens
            return
        needed = grad_log_probs[tokens.positions] != 0
        if grad_entropy is not None:
            needed |= grad_entropy[tokens.positions] != 0
        # Tokens that the loss leaves out (clipped ones, say) cost nothing here.
        yield from tokens.select(needed).chunks(self._chunk_tokens)

    def _grad_logits(
        self,
        normed: Tensor,
        chunk: ScoredTokens,
        grad_log_probs: Tensor,
        grad_entropy: Tensor | None,
        kept: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """(C, V) in the compute dtype and (C, 1) float32: their product is the gradient of the unscaled logits."""
        if grad_entropy is None and kept is not None:
            return kept, grad_log_probs[:, None]
        logits = matmul_float32(normed, self.weight.t())
        if grad_entropy is None:
            settings = (self._softcap, False, False, normed.dtype)
            *_, gradient = self._score_logits(logits, chunk.labels, chunk.temperature, *settings)
            return gradient, grad_log_probs[:, None]
        slope = None if self._softcap is None else bend(logits, self._softcap)
        log_p = torch.log_softmax(logits.div_(chunk.temperature[:, None]), dim=1)
        p = log_p.exp()
        weighted = log_p.add_(_entropy(p, log_p)[:, None]).mul_(grad_entropy[:, None])
        grad = weighted.add_(grad_log_probs[:, None]).mul_(p).neg_()
        grad.scatter_add_(1, chunk.labels[:, None], grad_log_probs[:, None])
        grad.div_(chunk.temperature[:, None])
        if slope is not None:
            grad.mul_(slope)
        return grad.to(normed.dtype), torch.ones_like(grad_log_probs[:, None])


def score_logits(
    logits: Tensor,
    labels: Tensor,
    temperature: Tensor,
    softcap: float | None,
    entropy: bool,
    sum_pi_squared: bool,
    gradient: torch.dtype | None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """What is wanted of a chunk of `logits` (C, V) float32 before soft-cap and division by `temperature` (C,).

    Log-prob of `labels` (C,), entropy and sum of squared probabilities, each (C,) float32, and with `gradient` in that
    dtype (C, V) the gradient of the log-prob for `logits`.
    """
    slope = None if softcap is None else bend(logits, softcap)
    log_p = torch.log_softmax(logits / temperature[:, None], dim=1)
    log_probs = log_p.gather(1, labels[:, None]).squeeze(1)
    entropies = _entropy(log_p.exp(), log_p) if entropy else None
    squares = (2 * log_p).exp().sum(1) if sum_pi_squared else None
    if gradient is None:
        return log_probs, entropies, squares, None
    grad = (log_p.exp() / -temperature[:, None]).to(gradient)
    # 1 - p of the label from its log-prob: exact where p is close to 1.
    grad.scatter_(1, labels[:, None], (-torch.expm1(log_probs) / temperature)[:, None].to(gradient))
    return log_probs, entropies, squares, grad if slope is None else grad.mul_(slope)


def bend(logits: Tensor, softcap: float) -> Tensor:
    """Soft-cap `logits` in place; returns the derivative, 1 - tanh(z / softcap)^2, of the same shape."""
    bent = logits.div_(softcap).tanh_()
    slope = 1 - bent.square()
    bent.mul_(softcap)
    return slope


def _entropy(p: Tensor, log_p: Tensor) -> Tensor:
    return -(p * log_p).sum(1)


def matmul_float32(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right` with a float32 result; on CUDA the tensor cores' float32 sums are not rounded to bfloat16."""
    if left.is_cuda and left.dtype is torch.bfloat16:
        return torch.mm(left, right, out_dtype=torch.float32)
    return (left @ right).float()


def matmul_over_vocabulary(left: Tensor, right: Tensor) -> Tensor:
    """`left` (C, V) @ `right` (V, H) as exact as float32 sums of V terms can be.

    For fewer rows than a block the CPU's kernels add the V terms one after the other, with a hundred times the error
    (3e-5 instead of 4e-7 for V = 49,152), which a micro-batch with two scored tokens shows: hence zero rows.
    """
    rows = left.shape[0]
    if left.is_cuda or rows >= ROW_BLOCK:
        return left @ right
    return (F.pad(left, (0, 0, 0, ROW_BLOCK - rows)) @ right)[:rows]


def add_matmul(total: Tensor, left: Tensor, right: Tensor) -> None:
    """`total += left @ right` with `total` in float32."""
    if left.is_cuda and left.dtype is torch.bfloat16:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    elif left.dtype is torch.float32:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)
