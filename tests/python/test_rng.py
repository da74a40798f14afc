"""Which random bits a key gives (docs/rng.md): seeds, offsets, coordinates of shards."""

from __future__ import annotations

import hashlib

import blockscale as bs
import pytest
import torch
import torch.multiprocessing  # its pickler shares memory
from bits import raw
from blockscale.rng import layer_seed

STOCHASTIC = (
    "nvfp4[rounding=stochastic]",
    "amdfp4[rounding=stochastic,block=16x16]",
    "mxfp4[rounding=stochastic,scale_rule=rceil]",
    "mxfp8[rounding=stochastic]",
    "fp8_1x128[rounding=stochastic]",
    "nvfp4[rounding=stochastic,hadamard=16]",
)
GOLDEN = 0x9E3779B97F4A7C15


def same(a: bs.QuantizedTensor, b: bs.QuantizedTensor) -> bool:
    return torch.equal(raw(a.codes), raw(b.codes)) and torch.equal(raw(a.scales), raw(b.scales))


def test_role_seeds() -> None:
    for seed in (0, 1, -1, 2**63, 2**64 - 1):
        for k, role in enumerate(("x", "w", "dy"), start=1):
            want = (seed + k * GOLDEN) % 2**64
            assert int(bs.Rng(seed).role(role).seed) % 2**64 == want
            signed = torch.tensor(seed - 2**64 if seed >= 2**63 else seed)
            assert int(bs.Rng(signed).role(role).seed) % 2**64 == want
    assert bs.Rng(1, 5).role("x").offset == 5
    assert bs.Rng(1) == bs.Rng(1, 0)


def test_layer_seeds_are_the_documented_hash() -> None:
    digest = hashlib.sha256(b"42:model.layers.0.q_proj").digest()
    base = int.from_bytes(digest[:8], "little")
    assert layer_seed(42, "model.layers.0.q_proj") == base
    layer = bs.nn.Linear(4, 4, seed=42)
    layer.configure(layer.recipe, layer._rng_state, "model.layers.0.q_proj")
    assert int(layer._seed) % 2**64 == base
    for made in (bs.nn.Linear(4, 4), bs.nn.GroupedLinear(2, 4, 4)):
        assert bs.rng_state(made)["seed"] == 0


@pytest.mark.parametrize("spec", STOCHASTIC)
def test_bits_depend_on_seed_and_offset_only(spec: str) -> None:
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    base = bs.quantize(x, spec, rng=bs.Rng(1, 2))
    assert same(base, bs.quantize(x, spec, rng=bs.Rng(1, 2)))
    tensors = bs.Rng(torch.tensor(1), torch.tensor([2]))
    assert same(base, bs.quantize(x, spec, rng=tensors))
    assert not same(base, bs.quantize(x, spec, rng=bs.Rng(2, 2)))
    assert not same(base, bs.quantize(x, spec, rng=bs.Rng(1, 3)))
    assert not same(base, bs.quantize(x, spec, rng=bs.Rng(1 + 2**32, 2)))
    assert not same(base, bs.quantize(x, spec, rng=bs.Rng(1, 2 + 2**32)))
    # Seeds count modulo 2^64, and bit 63 of the offset is ignored.
    halves = [bs.quantize(x, spec, rng=bs.Rng(seed)) for seed in (2**63, -(2**63))]
    assert same(*halves)
    assert same(base, bs.quantize(x, spec, rng=bs.Rng(1 + 2**64, 2 + 2**63)))


@pytest.mark.parametrize("spec", STOCHASTIC)
def test_bits_do_not_depend_on_threads(spec: str) -> None:
    x = torch.randn(129, 257, generator=torch.Generator().manual_seed(0))
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            pair = bs.quantize_dual(x, spec, spec, rng=bs.Rng(1, 2))
            results.append((*pair, bs.quantize(x, spec, axis=-2, rng=bs.Rng(1, 2))))
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:
        assert all(same(a, b) for a, b in zip(results[0], result, strict=True))
    assert all(same(r[1], r[2]) for r in results)


def amaxes(x: torch.Tensor, spec: str) -> dict[int, torch.Tensor | None]:
    outer = bs.spec(spec).outer
    return {axis: bs.amax(x, spec, axis) if outer else None for axis in (-1, -2)}


@pytest.mark.parametrize("spec", STOCHASTIC)
@pytest.mark.parametrize("where", [(0, 0), (128, 0), (0, 128), (128, 256)])
def test_a_shard_is_a_slice_of_the_whole(spec: str, where: tuple[int, int]) -> None:
    """With its origin and the whole tensor's amax, bit for bit: rows, columns, both at once."""
    x = torch.randn(300, 500, generator=torch.Generator().manual_seed(3))
    rng, s, (row, col) = bs.Rng(11, 12), bs.spec(spec), where
    amax = amaxes(x, spec)
    shard = x[row : row + 128, col : col + 128]
    whole = {a: bs.quantize(x, spec, a, amax=amax[a], rng=rng) for a in (-1, -2)}
    part = {a: bs.quantize(shard, spec, a, amax=amax[a], rng=rng, origin=where) for a in (-1, -2)}
    dual = bs.quantize_dual(
        shard, spec, spec, row_amax=amax[-1], col_amax=amax[-2], rng=rng, origin=where
    )
    lines, block = s.block
    for axis, both in zip((-1, -2), dual, strict=True):
        line, pos = (row, col) if axis == -1 else (col, row)
        assert same(part[axis], both)
        per, q = s.codes_per_byte, whole[axis]
        codes = q.codes[line : line + 128, pos // per : (pos + 128) // per]
        assert torch.equal(part[axis].codes.view(torch.uint8), codes.view(torch.uint8))
        scales = q.scales[
            line // lines : -(-(line + 128) // lines), pos // block : (pos + 128) // block
        ]
        assert torch.equal(part[axis].scales.float(), scales.float())


def test_a_shard_without_its_origin_draws_other_bits() -> None:
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(3))
    spec, rng = STOCHASTIC[0], bs.Rng(1)
    amax = bs.amax(x, spec)
    whole = bs.quantize(x, spec, amax=amax, rng=rng)
    part = bs.quantize(x[128:], spec, amax=amax, rng=rng)
    assert torch.equal(part.scales.float(), whole.scales[128:].float())
    assert not torch.equal(part.codes, whole.codes[128:])


def test_a_batch_counts_its_lines_through() -> None:
    """Slice e of a batch draws what the same matrix draws e · lines further down."""
    x = torch.randn(3, 32, 48, generator=torch.Generator().manual_seed(3))
    spec, rng = STOCHASTIC[0], bs.Rng(1)
    batch = bs.quantize(x, spec, rng=rng, batch_dims=1)
    assert batch.outer is not None
    assert batch.outer.shape == (3,)
    for e in range(3):
        one = bs.quantize(x[e], spec, rng=rng, origin=(32 * e, 0))
        assert torch.equal(batch.codes[e], one.codes)
        assert torch.equal(batch.scales[e].float(), one.scales.float())


def test_keys_are_equal_by_value_or_by_tensor() -> None:
    seed = torch.tensor(1)
    assert bs.Rng(1, 2) == bs.Rng(1, 2)
    assert bs.Rng(seed, 2) == bs.Rng(seed, 2)
    assert len({bs.Rng(1, 2), bs.Rng(1, 2), bs.Rng(2, 2), bs.Rng(seed, 2)}) == 3
    assert bs.Rng(seed, 2) != bs.Rng(seed.clone(), 2)
    assert bs.Rng(1) != 1
