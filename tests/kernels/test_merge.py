"""Merging partial attention equals one pass; empty sides are not read."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mla_quant import reference
from mla_quant.errors import MlaQuantError
from mla_quant.kernels.merge import merge_attention
from tests.oracles import attention as oracle


@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize("width", [128, 40, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_the_oracle(heads_first, width, dtype, device) -> None:
    tokens, heads = 33, 3
    outs = [torch.randn(tokens, heads, width).to(dtype) for _ in range(2)]
    lses = [torch.randn(heads, tokens) * 20 for _ in range(2)]
    lses[0][0, 3] = lses[1][1, 5] = -math.inf
    lses[0][2, 7] = lses[1][2, 7] = -math.inf
    outs[0][3, 0] = outs[1][5, 1] = math.nan
    outs[0][7, 2] = outs[1][7, 2] = math.nan
    laid = [x if heads_first else x.T.contiguous() for x in lses]
    out, lse = merge_attention(
        outs[0].to(device), laid[0].to(device), outs[1].to(device), laid[1].to(device),
        heads_first=heads_first, dtype=torch.float32,
    )  # fmt: skip
    lse = lse if heads_first else lse.T
    sides = [
        (np.where(np.isneginf(s.T)[..., None], 0.0, o.double().numpy()), s.T)
        for o, s in zip(outs, [x.double().numpy() for x in lses], strict=True)
    ]
    want_out, want_lse = oracle.merge(sides)
    # exp2 and log2 are within 2^-22, their arguments within 2^-24 of up to 60 log2 units.
    bound = (60 * 2.0**-23 + 2.0**-20) * sum(np.abs(o) for o, _ in sides)
    assert (np.abs(out.double().cpu().numpy() - want_out) <= bound + 1e-38).all()
    np.testing.assert_allclose(lse.T.double().cpu().numpy(), want_lse, rtol=2.0**-20, atol=2.0**-20)
    assert torch.equal(out[7, 2].cpu(), torch.zeros(width))


def test_two_halves_are_the_whole(device) -> None:
    q, k, v = torch.randn(1, 4, 9, 32), torch.randn(1, 4, 50, 32), torch.randn(1, 4, 50, 16)
    whole, lse, _ = reference.attention([q], [k], v, scale=0.2)
    sides = []
    for part in (slice(0, 16), slice(16, 50)):
        o, s, _ = reference.attention([q], [k[:, :, part]], v[:, :, part], scale=0.2)
        sides += [o[0].transpose(0, 1).to(device), s[0].to(device)]
    out, merged = merge_attention(*sides)
    torch.testing.assert_close(out.cpu(), whole[0].transpose(0, 1), rtol=0, atol=1e-5)
    torch.testing.assert_close(merged.cpu(), lse[0], rtol=0, atol=1e-5)


def test_non_contiguous_and_nothing(device) -> None:
    a = torch.randn(4, 6, 32, device=device)
    lse = torch.randn(2, 6, device=device)
    out, _ = merge_attention(a.transpose(0, 1)[:, :2], lse, a.transpose(0, 1)[:, 2:], lse)
    torch.testing.assert_close(out, (a[:2] + a[2:]).transpose(0, 1) / 2)
    empty = torch.empty(0, 2, 32, device=device)
    none = torch.empty(2, 0, device=device)
    assert merge_attention(empty, none, empty, none)[0].shape == (0, 2, 32)


def test_a_nan_lse_reaches_the_output(device) -> None:
    a = torch.ones(1, 1, 16, device=device)
    out, lse = merge_attention(
        a, torch.full((1, 1), math.nan, device=device), a, torch.zeros(1, 1, device=device)
    )
    assert out.isnan().all()
    assert lse.isnan().all()


def test_shapes_must_fit(device) -> None:
    a, lse = torch.ones(3, 2, 16, device=device), torch.zeros(3, 2, device=device)
    with pytest.raises(MlaQuantError, match=r"LSE must be \(2, 3\)"):
        merge_attention(a, lse, a, lse)
