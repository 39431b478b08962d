"""FP32 master weights as two 16-bit halves: a rounded bfloat16 high half and the exact int16 remainder.

    high = (bits + 0x8000) >> 16        low = bits - (high << 16)        bits = (high << 16) + low

The high half is what the device computes with and what is exported; both halves together are the FP32 value,
bit for bit. `high` rounds half away from zero, which the exactness of the split needs: it differs from torch's
round-half-to-even on exact ties only.
"""

import torch
from torch import Tensor


def split_master(master: Tensor, high: Tensor, low: Tensor) -> None:
    """Write the halves of `master` (float32, n) into `high` (bfloat16, n) and `low` (int16, n)."""
    bits = master.view(torch.int32)
    # int32 -> int16 keeps the low 16 bits, and those of `bits` are what the low half is, as a signed number.
    high.view(torch.int16).copy_((bits + 0x8000).bitwise_right_shift_(16))
    low.copy_(bits)


def join_master(high: Tensor, low: Tensor, out: Tensor | None = None) -> Tensor:
    """The FP32 master (n) of the halves `high` (bfloat16, n) and `low` (int16, n), into `out` if given."""
    out = torch.empty(high.shape, dtype=torch.float32) if out is None else out
    bits = out.view(torch.int32)
    bits.copy_(high.view(torch.int16))
    bits.bitwise_left_shift_(16).add_(low)
    return out
