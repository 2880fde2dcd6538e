"""Prefill attention against the float64 oracle, each element within the derived fp32 bound."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from mla_quant import reference
from mla_quant.kernels.merge import merge_attention
from mla_quant.kernels.prefill import PrefillConfig, prefill_attention, prefill_configs
from mla_quant.reference import Sparsity
from tests.kernels.check import UNIT, assert_within_bound
from tests.oracles import attention as oracle

SMALL = PrefillConfig(32, 32, 4, 1)
FORMATS = ["none", "fp8", "nvfp4"]
AMAX = (4.5, 4.0, 4.0, 1.0)


class Case:
    """Packed sequences, and what the oracle says about each."""

    def __init__(
        self,
        lengths: list[tuple[int, int]],
        *,
        width: tuple[int, int] = (24, 16),
        v_width: int = 24,
        heads: int = 2,
        kv_heads: int | None = None,
        dtype: torch.dtype = torch.float32,
        spread: float = 1.0,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(tokens: int, h: int, w: int) -> Tensor:
            return torch.randn(tokens, h, w, generator=generator).to(dtype)

        self.lengths, self.segments = lengths, width
        queries, keys = (sum(n) for n in zip(*lengths, strict=True))
        self.q = normal(queries, heads, sum(width)) * spread
        self.k = normal(keys, kv_heads or heads, sum(width))
        self.v = normal(keys, kv_heads or heads, v_width) + normal(1, 1, v_width)
        self.cu_q, self.cu_k = (
            torch.tensor([0, *np.cumsum(n)], dtype=torch.int32) for n in zip(*lengths, strict=True)
        )
        self.scale = sum(width) ** -0.5
        self.amax = AMAX
        if sum(width) >= 64:
            # Global scales that are powers of two and block maxima close to amax: Q.K is exact in
            # fp32, and the bound stays tight at real widths.
            self.amax = (5.25, 5.25, *AMAX[2:])
            for x in (self.q, self.k):
                x[:] = (2 * torch.rand(x.shape, generator=generator) - 1) ** 3 * 5.25
                peaks = torch.tensor([-5.25, 4.0, 5.25])
                x[..., ::16] = peaks[torch.randint(3, x[..., ::16].shape, generator=generator)]

    def run(
        self, device: torch.device, formats: tuple[str, ...], **kwargs
    ) -> tuple[Tensor, Tensor]:
        arguments = {
            "scale": self.scale,
            "amax": torch.tensor(self.amax, device=device),
            "qk_segments": self.segments,
            "config": SMALL,
            "dtype": torch.float32,
        }
        arguments |= {f"{n}_format": f for n, f in zip("qkpv", formats, strict=True)}
        return prefill_attention(
            *(x.to(device) for x in (self.q, self.k, self.v, self.cu_q, self.cu_k)),
            *(max(n) for n in zip(*self.lengths, strict=True)),
            **arguments | kwargs,
        )

    def check(
        self,
        device: torch.device,
        formats: tuple[str, ...],
        *,
        causal: bool = True,
        sparsity: Sparsity | None = None,
        margin: float = 1e-5,
        **kwargs,
    ) -> None:
        out, lse = self.run(device, formats, causal=causal, sparsity=sparsity, **kwargs)
        how = [
            oracle.Operand(formats[0], (self.amax[0],), self.segments),
            oracle.Operand(formats[1], (self.amax[1],), self.segments),
            oracle.Operand(formats[3], (self.amax[2],)),
        ]
        sparse = sparsity and oracle.Sparsity(
            sparsity.n, sparsity.m, sparsity.dense_sink_tokens, sparsity.dense_recent_tokens
        )
        p_rounding = UNIT[str(self.q.dtype).removeprefix("torch.")] if formats[2] == "none" else 0.0
        for i, (queries, keys) in enumerate(self.lengths):
            rows, columns = (slice(c[i], c[i + 1]) for c in (self.cu_q, self.cu_k))
            if not queries:
                continue
            if not keys:
                assert (out[rows] == 0).all()
                assert torch.isneginf(lse[:, rows]).all()
                continue
            q, k, v = (
                x.float().transpose(0, 1)[None].numpy()
                for x in (self.q[rows], self.k[columns], self.v[columns])
            )
            result = oracle.attention(
                q, k, v, scale=self.scale, causal=causal, q_how=how[0], k_how=how[1], v_how=how[2],
                p_format=formats[2], sparsity=sparse,
            )  # fmt: skip
            q64, k64 = oracle.quantize_features(q, how[0]), oracle.quantize_features(k, how[1])
            bound = oracle.float32_bound(result, q64, k64, self.scale, formats[2])
            if sparsity is not None:
                seen = oracle.visibility(
                    [keys - queries], queries, present=np.ones((1, keys), bool), causal=causal
                )
                scores = oracle.raw_scores(q64, k64, self.scale)
                assert oracle.nm_margin(scores, seen, sparsity.n, sparsity.m) > margin
            assert_within_bound(
                out[rows].transpose(0, 1), lse[:, rows], result, bound, formats[2], p_rounding
            )


MIXED_LENGTHS = [(5, 40), (33, 33), (0, 3), (20, 70), (3, 0), (1, 17)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "formats",
    [
        *((f,) * 4 for f in FORMATS),
        ("nvfp4", "fp8", "nvfp4", "none"),
        ("none", "nvfp4", "fp8", "nvfp4"),
    ],
)
def test_lengths_and_formats(formats, causal, device) -> None:
    Case(MIXED_LENGTHS, seed=1).check(device, formats, causal=causal)


@pytest.mark.parametrize(
    ("width", "v_width"),
    [
        ((128, 64), 128),
        ((128, 64), 256),
        ((64, 32), 64),
        ((64, 64), 128),
        ((7, 6), 5),
        ((20, 8), 48),
    ],
)
def test_widths(width, v_width, device) -> None:
    Case([(20, 40)], width=width, v_width=v_width, seed=2).check(device, ("nvfp4",) * 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("formats", [("none",) * 4, ("nvfp4",) * 4, ("none", "fp8", "fp8", "none")])
def test_model_dtypes(formats, dtype, device) -> None:
    Case([(20, 70)], dtype=dtype, seed=3).check(device, formats)


@pytest.mark.parametrize("p_format", FORMATS)
@pytest.mark.parametrize("m", [4, 8])
@pytest.mark.parametrize("tokens", [32, 64])
def test_sparsity(p_format, m, tokens, device) -> None:
    sparsity = Sparsity(m // 2, m, dense_sink_tokens=3, dense_recent_tokens=10)
    formats = ("nvfp4", "nvfp4", p_format, "nvfp4")
    config = PrefillConfig(32, tokens, 4, 1)
    # Exact ties are likely in quantized scores; the oracle resolves them as the kernel must.
    case = Case([(70, 100), (3, 50)], heads=1, seed=4)
    case.check(device, formats, sparsity=sparsity, config=config, margin=-1)


def test_sparsity_resolves_ties_to_the_lower_index(device) -> None:
    """Equal scores everywhere: the first two of each four keys stay."""
    case = Case([(64, 64)], heads=1, seed=0)
    case.q.zero_()
    sparsity = Sparsity(2, 4, 0, 0)
    out, lse = case.run(device, ("none",) * 4, sparsity=sparsity, causal=False)
    kept = case.v.view(16, 4, 1, -1)[:, :2].flatten(0, 1).mean(0)
    torch.testing.assert_close(out.cpu(), kept.expand(64, 1, -1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.cpu(), torch.full((1, 64), math.log(32.0)))


@pytest.mark.parametrize("m", [4, 8])
def test_sparsity_does_not_hide_nan(m, device) -> None:
    """A NaN key reaches every query that may read it, wherever it stands in its group."""
    for place in range(16, 16 + m):
        case = Case([(64, 64)], heads=1, seed=0)
        case.k[place, 0, 0] = math.nan
        out, _ = case.run(device, ("none",) * 4, sparsity=Sparsity(m // 2, m, 0, 0))
        assert out[place:].isnan().all()
        assert not out[:place].isnan().any()


def test_sparsity_ranks_valid_keys_only(device) -> None:
    """A group cut by the causal edge keeps its valid keys though later ones score higher."""
    case = Case([(8, 8)], heads=1, width=(16, 0), v_width=16, seed=0)
    case.q.fill_(1.0)
    case.k[:] = torch.arange(8.0)[:, None, None]
    case.segments = None
    out, _ = case.run(device, ("none",) * 4, sparsity=Sparsity(2, 4, 0, 0))
    torch.testing.assert_close(out[0, 0].cpu(), case.v[0, 0])


@pytest.mark.parametrize("formats", [("nvfp4",) * 4, ("fp8",) * 4])
@pytest.mark.parametrize("spread", [1.0, 3.0])
def test_tiling_does_not_change_results(formats, spread, device) -> None:
    """Tile sizes change the result by fp32 accumulation only: M is an integer."""
    case = Case([(20, 150)], seed=5, spread=spread, heads=1)
    for rows, tokens in itertools.product((16, 32), (32, 64, 128)):
        case.check(device, formats, config=PrefillConfig(rows, tokens, 4, 1))


def test_grouped_heads_and_strides(device) -> None:
    case = Case([(10, 40)], heads=4, kv_heads=2, seed=6)
    out, lse = case.run(device, ("nvfp4",) * 4)
    wide = Case([(10, 40)], heads=4, kv_heads=2, seed=6)
    wide.k = torch.stack([case.k, torch.full_like(case.k, math.nan)], 1)[:, 0]
    wide.v = case.v.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(wide.run(device, ("nvfp4",) * 4)[0], out)
    repeated = Case([(10, 40)], heads=4, seed=6)
    repeated.q = case.q
    repeated.k, repeated.v = (x.repeat_interleave(2, 1) for x in (case.k, case.v))
    again, lse_again = repeated.run(device, ("nvfp4",) * 4)
    assert torch.equal(again, out)
    assert torch.equal(lse_again, lse)


def test_context_at_an_absolute_position(device) -> None:
    """Cached context and new tokens, merged, at a border of blocks: equal to one pass."""
    case = Case([(24, 72)], seed=7)
    whole, whole_lse = case.run(device, ("nvfp4",) * 4)
    parts = []
    for first, last, causal in ((0, 48, False), (48, 72, True)):
        part = Case([(24, last - first)], seed=0)
        part.q, part.k, part.v = case.q, case.k[first:last], case.v[first:last]
        start = torch.tensor([first], dtype=torch.int32, device=device)
        query_start = torch.tensor([48], dtype=torch.int32, device=device)
        parts += part.run(
            device, ("nvfp4",) * 4, causal=causal, key_starts=start, query_starts=query_start
        )
    out, lse = merge_attention(*parts)
    torch.testing.assert_close(out, whole, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse, whole_lse, rtol=0, atol=1e-5)


def test_blocks_lie_at_absolute_positions(device) -> None:
    """Keys that begin at position 5: their first block is three tokens short of one at 8."""
    case = Case([(30, 30)], seed=8, heads=1)
    start = torch.tensor([5], dtype=torch.int32, device=device)
    out, lse = case.run(device, ("nvfp4",) * 4, key_starts=start)
    lead = [torch.zeros(5, 1, x.shape[-1]) for x in (case.q, case.k, case.v)]
    q, k, v = (torch.cat([z, x]) for z, x in zip(lead, (case.q, case.k, case.v), strict=True))
    fmt = reference.quantize_dequantize
    from mla_quant.formats import NVFP4

    keys = fmt(k, NVFP4, AMAX[1], segments=case.segments).transpose(0, 1)[None]
    queries = fmt(q, NVFP4, AMAX[0], segments=case.segments).transpose(0, 1)[None]
    values = fmt(v, NVFP4, AMAX[2], axis=0).transpose(0, 1)[None]
    allowed = torch.ones(35, 35, dtype=torch.bool).tril()
    allowed[:, :5] = False
    want, want_lse, _ = reference.attention(
        [queries], [keys], values, scale=case.scale, allowed=allowed,
        quantize_p=lambda p: reference.quantize_dequantize_p(p, NVFP4),
    )  # fmt: skip
    torch.testing.assert_close(out[:, 0].cpu(), want[0, 0, 5:], rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.cpu(), want_lse[0, :, 5:], rtol=0, atol=1e-5)


def test_calibrated_p(device) -> None:
    """P with an amax other than 1: below it saturates, above it wastes range."""
    from mla_quant.formats import NVFP4

    case = Case([(40, 40)], seed=9, heads=1)
    for amax in (0.3, 2.0):
        bounds = torch.tensor([*AMAX[:3], amax], device=device)
        out, _ = case.run(device, ("none", "none", "nvfp4", "none"), amax=bounds)
        q, k, v = (x.transpose(0, 1)[None] for x in (case.q, case.k, case.v))
        want, _, _ = reference.attention(
            [q], [k], v, scale=case.scale, causal=True,
            quantize_p=lambda p, a=amax: reference.quantize_dequantize_p(p, NVFP4, a),
        )  # fmt: skip
        torch.testing.assert_close(out[:, 0].cpu(), want[0, 0], rtol=0, atol=1e-5)


def test_nan_of_a_neighbour_stays_there(device) -> None:
    """The last tile of a sequence reaches into the next one, whose numbers must not show."""
    case = Case([(20, 20), (20, 20)], seed=10)
    out, _ = case.run(device, ("none",) * 4)
    case.k[20:] = math.nan
    case.v[20:] = math.nan
    poisoned, _ = case.run(device, ("none",) * 4)
    assert torch.equal(poisoned[:20], out[:20])
    assert poisoned[20:].isnan().all()


def test_nothing_to_do(device) -> None:
    case = Case([(0, 4)], seed=0)
    out, lse = case.run(device, ("nvfp4",) * 4)
    assert out.shape == (0, 2, 24)
    assert lse.shape == (2, 0)
    empty = Case([(4, 0)], seed=0)
    out, lse = empty.run(device, ("nvfp4",) * 4)
    assert (out == 0).all()
    assert torch.isneginf(lse).all()


def test_reruns_are_bitwise_equal(device) -> None:
    case = Case([(40, 90)], seed=11)
    first = case.run(device, ("nvfp4",) * 4)
    for _ in range(20 if device.type == "cuda" else 2):
        again = case.run(device, ("nvfp4",) * 4)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_every_tiling(device) -> None:
    """Each tiling that some GPU may use gives the right numbers (those this one can hold)."""
    case = Case([(70, 130)], width=(128, 64), v_width=128, heads=1, seed=12)
    capability = torch.cuda.get_device_capability() if device.type == "cuda" else (9, 0)
    for config in prefill_configs(capability, 192, 128):
        case.check(device, ("nvfp4",) * 4, config=config)
