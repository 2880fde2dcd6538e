"""Carriers of Q, K and V equal the oracle's codes times scales bit for bit, ties included."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from mla_quant.kernels.quantize import quantize_features, quantize_tokens
from tests.oracles import blocks

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def every_bfloat16() -> Tensor:
    """All 2^16 patterns, shuffled, so that blocks mix magnitudes; specials included."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    order = torch.randperm(1 << 16, generator=torch.Generator().manual_seed(0))
    x = bits[order].view(torch.bfloat16)
    # The interpreter reads subnormal bfloat16 as 0.
    return torch.where(x.abs() < torch.finfo(torch.bfloat16).smallest_normal, 0.0, x)


def want(x: Tensor, fmt: str, amax: float, axis: int = -1, segments=None) -> np.ndarray:
    q = blocks.quantize(x.float().numpy(), fmt, amax, axis=axis, segments=segments)
    nan = np.isnan(x.float().numpy())
    return np.where(nan, np.nan, q.codes * q.scales)


def assert_same(got: Tensor, expected: np.ndarray) -> None:
    values = got.double().cpu().numpy()
    np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize("fmt", ["fp8", "nvfp4"])
@pytest.mark.parametrize("amax", [0.0, 1e-37, 2e-30, 0.01, 3.7, 448.0, 60000.0, 3e38])
def test_every_bfloat16(fmt, amax, device) -> None:
    x = every_bfloat16().view(256, 1, 256)
    bound = torch.tensor([amax], device=device)
    assert_same(quantize_features(x.to(device), fmt, bound, torch.bfloat16), want(x, fmt, amax))


@pytest.mark.parametrize("fmt", ["fp8", "nvfp4"])
def test_ties(fmt, device) -> None:
    """Quotients that lie exactly between two values of the grid, under scales of all mantissas."""
    grid = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    scales = torch.arange(8, 16) * 2.0 ** torch.arange(-6, 2).view(-1, 1)
    x = (grid.repeat(2) * scales.view(-1, 1, 1)).float()
    amax = 448 * 6.0 if fmt == "nvfp4" else 448.0
    got = quantize_features(x.to(device), fmt, torch.tensor([amax], device=device), torch.float32)
    assert_same(got, want(x, fmt, amax))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("segments", [None, (24, 8), (20, 12), (32, 0)])
def test_segments_heads_and_strides(dtype, segments, device) -> None:
    x = torch.randn(7, 3, 40)[..., :32]
    got = quantize_features(
        x.to(device), "nvfp4", torch.tensor([4.0], device=device), dtype, segments=segments
    )
    assert got.dtype == dtype
    assert got.is_contiguous()
    assert_same(got, want(x, "nvfp4", 4.0, segments=segments))
    turned = x.transpose(0, 1)
    got = quantize_features(
        turned.to(device), "fp8", torch.tensor([4.0], device=device), dtype, segments=segments
    )
    assert_same(got, want(turned, "fp8", 4.0))


@pytest.mark.parametrize("fmt", ["fp8", "nvfp4"])
@pytest.mark.parametrize("amax", [(3.0, 0.02), (3.0, 1e-33), (0.0, 2.0)])
def test_an_amax_for_each_segment(fmt, amax, device) -> None:
    x = torch.randn(5, 2, 48)
    x[..., 32:] *= 0.01
    got = quantize_features(
        x.to(device), fmt, torch.tensor(amax, device=device), torch.bfloat16,
        segments=(32, 16), separate_amax=True,
    )  # fmt: skip
    assert_same(got[..., :32], want(x[..., :32], fmt, amax[0]))
    assert_same(got[..., 32:], want(x[..., 32:], fmt, amax[1]))


@pytest.mark.parametrize("fmt", ["fp8", "nvfp4"])
@pytest.mark.parametrize("starts", [None, [0, 5, 16, 31]])
def test_tokens_of_several_sequences(fmt, starts, device) -> None:
    lengths = [40, 0, 16, 23]
    cu = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    x = torch.randn(int(cu[-1]), 3, 24)
    x[3, 1, 2] = math.nan
    first = None if starts is None else torch.tensor(starts, dtype=torch.int32, device=device)
    got = quantize_tokens(
        x.to(device), fmt, torch.tensor([4.0], device=device), torch.bfloat16, cu.to(device),
        max(lengths), first,
    )  # fmt: skip
    for i, length in enumerate(lengths):
        part = x[cu[i] : cu[i + 1]]
        lead = starts[i] % 16 if starts else 0
        padded = torch.cat([torch.zeros(lead, 3, 24), part])
        expected = want(padded, fmt, 4.0, axis=0)[lead:]
        assert_same(got[cu[i] : cu[i + 1]], expected.reshape(length, 3, 24))


@pytest.mark.parametrize("fmt", ["fp8", "nvfp4"])
def test_whole_groups_of_wide_tokens(fmt, device) -> None:
    """Groups inside a sequence and columns that fill a tile take a path without masks."""
    x = torch.randn(40, 3, 128)
    cu = torch.tensor([0, 40], dtype=torch.int32, device=device)
    amax = torch.tensor([4.0], device=device)
    got = quantize_tokens(x.to(device), fmt, amax, torch.bfloat16, cu, 40)
    assert_same(got, want(x, fmt, 4.0, axis=0))


def test_token_strides(device) -> None:
    x = torch.randn(3, 20, 40)[..., :32].transpose(0, 1)
    cu = torch.tensor([0, 20], dtype=torch.int32, device=device)
    got = quantize_tokens(
        x.to(device), "nvfp4", torch.tensor([4.0], device=device), torch.float16, cu, 20
    )
    assert_same(got, want(x, "nvfp4", 4.0, axis=0))


def test_a_bad_amax_gives_nan(device) -> None:
    x = torch.randn(2, 1, 16, device=device)
    for amax in (-1.0, math.nan):
        got = quantize_features(x, "nvfp4", torch.tensor([amax], device=device), torch.bfloat16)
        assert got.isnan().all()
