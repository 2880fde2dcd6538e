"""The reference computes the same numbers on CUDA as on the CPU."""

from __future__ import annotations

import math

import pytest
import torch

from mla_quant.formats import E2M1, E4M3, FP8, NVFP4
from mla_quant.reference import (
    attention,
    encode,
    global_scale,
    quantize_dequantize,
    quantize_dequantize_p,
    round_to,
)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = a.cpu(), b.cpu()
    nan = a.isnan()
    return bool((nan == b.isnan()).all()) and torch.equal(
        a.masked_fill(nan, 0).view(torch.int32), b.masked_fill(nan, 0).view(torch.int32)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("element", [E2M1, E4M3], ids=lambda e: e.name)
def test_every_16_bit_input_rounds_alike(element, dtype) -> None:
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    assert same_bits(round_to(x, element), round_to(x.cuda(), element))
    finite = x[~x.isnan()]
    assert torch.equal(encode(finite, element), encode(finite.cuda(), element).cpu())


@pytest.mark.parametrize("fmt", [NVFP4, FP8], ids=lambda f: f.name)
def test_global_scales_are_correctly_rounded(fmt) -> None:
    # torch on CUDA multiplies by the reciprocal of a Python number; that differs for a quarter
    # of these.
    amax = torch.rand(100_000) * 100
    expected = amax.double() / fmt.quant_max
    assert torch.equal(global_scale(amax.cuda(), fmt).cpu(), expected.float())


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("fmt", [NVFP4, FP8], ids=lambda f: f.name)
def test_quantize_dequantize_is_bit_equal(fmt, axis) -> None:
    for seed, amax in enumerate((0.1, 3.7, 57.77, 1000.0)):
        generator = torch.Generator().manual_seed(seed)
        x = (torch.randn(7, 83, 192, generator=generator) * amax / 4).bfloat16()
        x[0, 0, 0], x[0, 1, 0] = math.inf, math.nan
        value = torch.tensor(amax)
        segments = (128, 64) if axis == -1 else None
        want = quantize_dequantize(x, fmt, value, axis=axis, segments=segments)
        got = quantize_dequantize(x.cuda(), fmt, value.cuda(), axis=axis, segments=segments)
        assert same_bits(want, got)


@pytest.mark.parametrize("fmt", [NVFP4, FP8], ids=lambda f: f.name)
@pytest.mark.parametrize("amax", [1.0, 0.8151375651359558])
def test_probabilities_are_bit_equal(fmt, amax) -> None:
    p = torch.rand(64, 1000).square()
    want = quantize_dequantize_p(p, fmt, torch.tensor(amax))
    assert same_bits(want, quantize_dequantize_p(p.cuda(), fmt, torch.tensor(amax).cuda()))


def test_attention_agrees_with_float64_even_if_tf32_is_allowed() -> None:
    """Without quantization: fp32 accumulation over 192 features and 500 keys, nothing coarser."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 4, 500, 192, generator=generator).bfloat16() for _ in range(2))
    v = torch.randn(2, 4, 500, 128, generator=generator).bfloat16()
    scale = 192**-0.5
    scores = q.double() @ k.double().mT * scale
    scores.masked_fill_(~torch.ones(500, 500, dtype=torch.bool).tril(), -math.inf)
    want = scores.softmax(-1) @ v.double()
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        out, lse, _ = attention([q.cuda()], [k.cuda()], v.cuda(), scale=scale, causal=True)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    # Scores of magnitude up to 8 with relative error 2^-24·sqrt(192) move P by 1e-5 at most;
    # TF32 products would be off by 1e-3.
    assert float((out.cpu().double() - want).abs().max()) < 2e-5
    assert float((lse.cpu().double() - scores.logsumexp(-1)).abs().max()) < 1e-5
