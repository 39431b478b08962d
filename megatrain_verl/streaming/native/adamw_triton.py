"""The native AdamW (adamw.c) as a Triton kernel: the same operations in the same order, so the same bits.

Fused multiply-adds stand where the vector code of adamw.c has them and nowhere else; division and square root are
rounded as IEEE 754 says.
"""

import torch
import triton
import triton.language as tl

from megatrain_verl.streaming.host_store import UnitState
from megatrain_verl.streaming.native_adamw import Settings

BLOCK = 1024


def update(staged: UnitState, length: int, settings: Settings) -> None:
    """Update the first `length` elements of arenas on the device, in place, on the current stream."""
    split = staged.low is not None
    _kernel[(triton.cdiv(length, BLOCK),)](
        staged.weight.view(torch.int16) if split else staged.weight,
        staged.low if split else staged.weight,
        staged.exp_avg,
        staged.exp_avg_sq,
        staged.grad,
        length,
        settings.one_minus_lr_decay,
        settings.one_minus_beta1,
        settings.beta2,
        settings.one_minus_beta2,
        settings.step_size,
        settings.inv_sqrt_bias2,
        settings.eps,
        settings.grad_scale,
        SPLIT=split,
        BLOCK=BLOCK,
        enable_fp_fusion=False,
    )


@triton.jit
def _kernel(
    weight,
    low,
    m,
    v,
    grad,
    length,
    one_minus_lr_decay,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    step_size,
    inv_sqrt_bias2,
    eps,
    grad_scale,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < length
    g = tl.load(grad + i, inside, other=0.0).to(tl.float32) * grad_scale
    if SPLIT:
        upper, lower = tl.load(weight + i, inside, other=0), tl.load(low + i, inside, other=0)
        p = ((upper.to(tl.int32) << 16) + lower.to(tl.int32)).to(tl.float32, bitcast=True)
    else:
        p = tl.load(weight + i, inside, other=0.0)
    p = p * one_minus_lr_decay
    first, second = tl.load(m + i, inside, other=0.0), tl.load(v + i, inside, other=0.0)
    first = tl.fma(g - first, one_minus_beta1, first)
    second = tl.fma(one_minus_beta2 * g, g, second * beta2)
    denominator = tl.fma(tl.sqrt_rn(second), inv_sqrt_bias2, eps)
    p = tl.fma(-step_size, tl.div_rn(first, denominator), p)
    tl.store(m + i, first, inside)
    tl.store(v + i, second, inside)
    if SPLIT:
        bits = p.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x8000) >> 16
        tl.store(weight + i, rounded.to(tl.uint16).to(tl.int16, bitcast=True), inside)
        tl.store(low + i, (bits - (rounded << 16)).to(tl.uint16).to(tl.int16, bitcast=True), inside)
    else:
        tl.store(weight + i, p, inside)
