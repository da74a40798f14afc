"""Quantize a small matrix, look at what is stored, and decode it by hand.

Run: python examples/python/quantize_and_inspect.py
"""

from __future__ import annotations

import blockscale as bs
import torch

# bs.explain gives the reason where this build cannot run on a GPU here.
GPU = torch.cuda.is_available() and not bs.explain("nvfp4", device="cuda")
DEVICE = "cuda" if GPU else "cpu"
# The magnitudes of E2M1, by the low three bits of a code; bit 3 is the sign.
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=DEVICE)


def decode(q: bs.QuantizedTensor) -> torch.Tensor:
    """What NVFP4 means, step by step (docs/specification.md, sections 1 to 4)."""
    assert q.outer is not None
    low, high = q.codes & 0xF, q.codes >> 4  # two codes a byte, the first in the low nibble
    codes = torch.stack((low, high), -1).flatten(-2).int()
    values = E2M1[codes & 7] * torch.where(codes & 8 != 0, -1.0, 1.0)
    block_scales = q.outer * q.scales.float()  # each the scale of 16 codes
    values = block_scales.repeat_interleave(16, -1) * values
    values = values[:, : q.shape[q.axis]]  # codes are padded to whole blocks
    return values if q.axis == -1 else values.t()  # along axis -2 they are stored transposed


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 40, device=DEVICE)
    q = bs.quantize(x, "nvfp4")  # blocks of 1x16 along the rows: 16 + 16 + 8 elements
    print(q)
    print("outer scale", q.outer)
    print("block scales, E4M3 [3, 3]\n", q.scales.float())
    print("codes of row 0, two to a byte:", q.codes[0].cpu().numpy().tobytes().hex(" "))
    print("x[0, :8]      ", x[0, :8])
    print("dequantized   ", bs.dequantize(q, torch.float32)[0, :8])
    assert torch.equal(decode(q), bs.dequantize(q, torch.float32))

    # Both directions from one read: rows for a product over columns, and the other way round.
    row, column = bs.quantize_dual(x, "nvfp4", "nvfp4")
    print("\nalong rows  ", row)
    print("down columns", column)
    assert torch.equal(row.codes, q.codes)
    assert torch.equal(decode(column), bs.dequantize(column, torch.float32))

    # Layouts say where codes and scales lie; the values are the same. Of nv_128x4, which cuBLASLt
    # reads, the scale of row r and block s lies at (r%32)·16 + ((r%128)/32)·4 + s%4 of a tile.
    tiled = bs.relayout(q, "nv_128x4")
    print("\n", tiled)
    flat = tiled.scales.float()
    for r in range(3):
        for s in range(3):
            assert flat[(r % 32) * 16 + (r % 128) // 32 * 4 + s % 4] == q.scales[r, s].float()
    assert torch.equal(bs.dequantize(tiled), bs.dequantize(q))

    # What else a spec may say: its block, its rounding, and the random bits that this needs.
    for spec, rng in (
        ("nvfp4[block=16x16]", None),
        ("nvfp4[rounding=stochastic]", bs.Rng(seed=1, offset=0)),
        ("mxfp4", None),
        ("mxfp8", None),
        ("fp8_1x128", None),
    ):
        stored = bs.quantize(x, spec, rng=rng)
        error = (bs.dequantize(stored, torch.float32) - x).norm() / x.norm()
        print(f"{spec:28s} relative error {error:.4f}")


if __name__ == "__main__":
    main()
