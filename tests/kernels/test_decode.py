"""Decode attention against the float64 oracle, every element within its float32 bound.

Unreadable slots hold NaN and unused block ids are garbage in every call (see `paged`).
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mla_quant import reference
from mla_quant.errors import ConfigError
from mla_quant.kernels import decode
from mla_quant.kernels.decode import Configuration, OperandFormats
from tests.kernels.paged import (
    DEVICE,
    NAN,
    SHAPES,
    compare,
    expected,
    paged,
    reference_attention,
)
from tests.oracles import attention as oracle

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CUMULATED = torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE)
ALL = OperandFormats("nvfp4", "nvfp4", "nvfp4", "nvfp4")
FP8 = OperandFormats("fp8", "fp8", "fp8", "fp8")
NONE = OperandFormats("none", "none", "none", "none")
FORMATS = {"nvfp4": ALL, "fp8": FP8, "none": NONE}
MIXED = [
    OperandFormats("nvfp4", "none", "fp8", "nvfp4"),
    OperandFormats("none", "nvfp4", "nvfp4", "none"),
    OperandFormats("fp8", "nvfp4", "none", "fp8"),
    OperandFormats("none", "fp8", "none", "nvfp4"),
    OperandFormats("fp8", "fp8", "nvfp4", "none"),
]


@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize("num_splits", [1, 3, None])
def test_formats(name: str, num_splits: int | None) -> None:
    """One format for all operands; contexts that end inside a block, a page and a tile."""
    call = paged([200, 1, 15, 16, 17, 0, 64], seed=1)
    compare(call.attend(FORMATS[name], num_splits=num_splits), expected(call, FORMATS[name]))


@pytest.mark.parametrize("formats", MIXED, ids=lambda f: f"{f.q}-{f.k}-{f.p}-{f.v}")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_formats(formats: OperandFormats, dtype: torch.dtype) -> None:
    """Any format for each operand; V and K of one latent are quantized independently."""
    call = paged([90, 33], dtype=dtype, seed=2)
    compare(call.attend(formats, num_splits=2), expected(call, formats))


ROPE = [
    OperandFormats("nvfp4", "nvfp4", "nvfp4", "nvfp4", q_rope="fp8", k_rope="fp8"),
    OperandFormats("nvfp4", "nvfp4", "nvfp4", "nvfp4", q_rope="none", k_rope="none"),
    OperandFormats("fp8", "fp8", "fp8", "fp8", q_rope="nvfp4", k_rope="nvfp4"),
    OperandFormats("none", "none", "none", "none", q_rope="fp8", k_rope="nvfp4"),
    OperandFormats("fp8", "none", "none", "fp8", q_rope="none", k_rope="fp8"),
]


@pytest.mark.parametrize("formats", ROPE, ids=lambda f: f"{f.q}-{f.k}-{f.q_rope}-{f.k_rope}")
@pytest.mark.parametrize(
    ("dtype", "q_dtype", "rope_width"),
    [(torch.bfloat16, torch.bfloat16, 16), (torch.float16, torch.float32, 48)],
)
def test_formats_of_rope_parts(
    formats: OperandFormats, dtype: torch.dtype, q_dtype: torch.dtype, rope_width: int
) -> None:
    """Rope parts in formats of their own: each product in the dtype that its formats need."""
    call = paged([90, 33], dtype=dtype, q_dtype=q_dtype, rope_width=rope_width, seed=25)
    compare(call.attend(formats, num_splits=2), expected(call, formats))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["nvfp4", "none"])
def test_dtypes(dtype: torch.dtype, q_dtype: torch.dtype, name: str) -> None:
    """Caches of every dtype; q in its own."""
    call = paged([70, 5], dtype=dtype, q_dtype=q_dtype, seed=3)
    compare(call.attend(FORMATS[name], num_splits=1), expected(call, FORMATS[name]))


@pytest.mark.parametrize("page_size", [1, 13, 16, 64, 128])
def test_page_sizes(page_size: int) -> None:
    """Groups of V and tiles lie at absolute positions, whatever a page holds."""
    call = paged([131, 16, 3], page_size=page_size, seed=4)
    compare(call.attend(ALL, num_splits=2), expected(call, ALL))


@pytest.mark.parametrize(
    ("heads", "latent_width", "rope_width"),
    [(1, 32, 16), (3, 64, 0), (16, 64, 32), (17, 32, 48), (20, 128, 64)],
)
@pytest.mark.parametrize("name", ["nvfp4", "none"])
def test_geometries(heads: int, latent_width: int, rope_width: int, name: str) -> None:
    """Any number of heads; rope parts that are no power of two, or absent."""
    call = paged([50, 17], heads=heads, latent_width=latent_width, rope_width=rope_width, seed=5)
    compare(call.attend(FORMATS[name], num_splits=1), expected(call, FORMATS[name]))


@pytest.mark.parametrize("name", ["nvfp4", "fp8", "none"])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_query_lengths(name: str, num_splits: int) -> None:
    """Causal limits per token: contexts 2, 3, 17, 64 with query length 3, a padding request, a
    sequence shorter than its queries, one without queries, and tokens of no sequence.

    V's groups hold all tokens present, not those a row sees.
    """
    call = paged(
        [2, 3, 17, 64, 0, 70, 90],
        query_lengths=[3, 3, 3, 3, 1, 0, 2],
        heads=6,
        padding_tokens=2,
        seed=24,
    )
    got = call.attend(FORMATS[name], num_splits=num_splits)
    compare(got, expected(call, FORMATS[name]), tokens=17)


def test_query_lengths_one_and_three_agree() -> None:
    """A token's result does not depend on which other tokens are asked for in the call."""
    call = paged([77], query_lengths=[3], seed=7)
    out, lse = call.attend(ALL, num_splits=1)
    single = paged([77], query_lengths=[3], seed=7)
    single.q, single.cu_seqlens_q, single.max_query_len = call.q[2:], None, 1
    last_out, last_lse = single.attend(ALL, num_splits=1)
    torch.testing.assert_close(out[2:], last_out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse[2:], last_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("length", [1, 16, 200])
def test_split_invariance(length: int) -> None:
    """Splits 1, 2, 3, 7, 32: fp32 accumulation apart, the same; each within the bound."""
    call = paged([length], spare_tokens=1000, seed=8)
    want = expected(call, ALL)
    first = None
    for num_splits in (1, 2, 3, 7, 32):
        got = call.attend(ALL, num_splits=num_splits)
        compare(got, want)
        if first is None:
            first = got
        for a, b in zip(got, first, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.block_tokens}-{s.inner}-{s.across}")
@pytest.mark.parametrize("name", ["nvfp4", "fp8"])
def test_tile_invariance(shape: Configuration, name: str) -> None:
    """Every order and number of tokens in a tile gives the same within the bound."""
    call = paged([150, 31], heads=5, seed=9)
    got = call.attend(FORMATS[name], num_splits=2, configuration=shape)
    compare(got, expected(call, FORMATS[name]))


@pytest.mark.parametrize("name", ["nvfp4", "fp8"])
@pytest.mark.parametrize("sink", [6.0, 20.0])
def test_outlier_sink(name: str, sink: float) -> None:
    """A first key far above the rest: the bound adds the mass that flushes or not by split."""
    call = paged([180], spread=0.3, sink=sink, seed=10)
    want = expected(call, FORMATS[name])
    for num_splits in (1, 3, 7):
        compare(call.attend(FORMATS[name], num_splits=num_splits), want)


@pytest.mark.parametrize(("n", "m", "sink", "recent"), [(2, 4, 0, 0), (4, 8, 5, 20)])
def test_sparsity(n: int, m: int, sink: int, recent: int) -> None:
    """N:M after the causal mask, groups cut by it, sink and recent window kept in addition."""
    call = paged([130, 3, 17], query_lengths=[3, 1, 2], seed=11)
    rule = reference.Sparsity(n, m, dense_sink_tokens=sink, dense_recent_tokens=recent)
    dense = expected(call, ALL)
    for scores in dense.scores:
        assert oracle.nm_margin(scores[None], np.isfinite(scores[None]), n, m) > 2e-5
    want = expected(call, ALL, oracle.Sparsity(n, m, sink, recent))
    assert any(
        (np.isfinite(a) != np.isfinite(b)).any()
        for a, b in zip(want.scores, dense.scores, strict=True)
    )
    for num_splits in (1, 3):
        compare(call.attend(ALL, num_splits=num_splits, sparsity=rule), want)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.block_tokens}-{s.inner}-{s.across}")
@pytest.mark.parametrize("m", [4, 8])
def test_sparsity_in_every_order_of_tokens(shape: Configuration, m: int) -> None:
    """Groups are found whichever way a tile orders its tokens; equal scores keep the first."""
    rule = reference.Sparsity(m // 2, m, dense_recent_tokens=0)
    call = paged([100], heads=2, seed=12)
    # Keys from few values and a q of one feature: scores tie often and exactly.
    rng = np.random.default_rng(12)
    latent = torch.from_numpy(rng.integers(-2, 3, size=(100, 48)).astype(np.float32))
    call.latents = [latent]
    for token in range(100):
        page = int(call.block_table[0, token // 16])
        call.cache[page, token % 16] = latent[token].to(call.cache)
    call.q[:] = 0
    call.q[..., 3] = 1.5
    call.queries = [call.q.float().cpu()]
    got = call.attend(NONE, num_splits=1, configuration=shape, sparsity=rule)
    want = expected(call, NONE, oracle.Sparsity(m // 2, m, 0, 0))
    compare(got, want)


@pytest.mark.parametrize(("amax", "lengths"), [(0.7, [30, 16]), (1.3, [140, 20])])
def test_calibrated_p(amax: float, lengths: list[int]) -> None:
    """A calibrated amax of P, against the reference (whose P is tested against the oracle).

    Below 1 the largest p saturate. A tile saturates by the reference point it has then, the CPU
    path by the final one: only a context of one tile compares.
    """
    call = paged(lengths, seed=13)
    call.amax[5] = amax
    for name in ("nvfp4", "fp8"):
        out, lse = call.attend(FORMATS[name], num_splits=1)
        want_out, want_lse = reference_attention(call, FORMATS[name])
        torch.testing.assert_close(out.cpu(), want_out, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(lse.cpu(), want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("formats", [ALL, *MIXED], ids=lambda f: f"{f.q}-{f.k}-{f.p}-{f.v}")
def test_reference(formats: OperandFormats) -> None:
    """The package's own CPU path, whose P and sums are fp32."""
    call = paged([100, 7], query_lengths=[2, 1], dtype=torch.float32, seed=14)
    out, lse = call.attend(formats, num_splits=2)
    want_out, want_lse = reference_attention(call, formats)
    torch.testing.assert_close(out.cpu(), want_out, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse.cpu(), want_lse, rtol=1e-5, atol=1e-5)


def test_amax_zero_negative_and_nan() -> None:
    """amax 0 gives a zero operand, a negative or NaN one NaN; nothing plausible."""
    call = paged([40], seed=15)
    call.amax[4] = 0.0
    out, _ = call.attend(ALL, num_splits=1)
    assert (out == 0).all()
    call.amax[4], call.amax[2], call.amax[3] = 4.0, 0.0, 0.0
    _, lse = call.attend(ALL, num_splits=1)
    torch.testing.assert_close(lse.cpu(), torch.full((1, 4), math.log(40.0)))
    for bad in (-1.0, NAN):
        call.amax[2] = bad
        out, lse = call.attend(ALL, num_splits=1)
        assert out.isnan().all()
        assert lse.isnan().all()


@pytest.mark.parametrize("name", ["nvfp4", "fp8", "none"])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_nan_stays_in_its_row(name: str, num_splits: int) -> None:
    """A NaN in one query is NaN in that head's output and LSE, and nowhere else."""
    call = paged([100, 20], heads=3, seed=16)
    call.q[0, 1, 4] = NAN
    out, lse = call.attend(FORMATS[name], num_splits=num_splits)
    assert out[0, 1].isnan().all()
    assert lse[0, 1].isnan()
    assert int(out.isnan().any(-1).sum()) == 1
    assert int(lse.isnan().sum()) == 1


@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize(
    "sparsity", [None, *(reference.Sparsity(n, m, 0, 0) for n, m in reference.RANKED_PATTERNS)]
)
def test_nan_in_a_readable_slot(offset: int, sparsity: reference.Sparsity | None) -> None:
    """A NaN latent poisons the sequence that holds it: never a silently dropped key."""
    call = paged([40, 40], seed=17)
    call.cache[int(call.block_table[1, 1]), offset, 5] = NAN
    for formats in (ALL, FP8, NONE):
        out, lse = call.attend(formats, num_splits=1, sparsity=sparsity)
        assert out[1].isnan().all()
        assert lse[1].isnan().all()
        assert not out[0].isnan().any()


def test_large_absorbed_query() -> None:
    """An absorbed q past fp16's range stays finite and right over an fp16 cache."""
    call = paged([30], dtype=torch.float16, seed=18)
    call.q[0, :, 0] = 76800.0
    call.queries = [call.q.float().cpu()]
    call.amax[0] = 76800.0
    call.scale = 1e-5
    compare(call.attend(ALL, num_splits=1), expected(call, ALL))


def test_offsets_past_32_bits() -> None:
    """Page ids whose product with the page stride passes 2^31: strides do, without the memory."""
    call = paged([20], page_size=16, seed=19)
    width = call.q.shape[-1]
    stride = (1 << 31) + 64 if DEVICE == "cuda" else 1 << 24
    pages = 2 if DEVICE == "cuda" else 130
    if DEVICE == "cuda" and torch.cuda.mem_get_info()[0] < 6 << 30:
        pytest.skip("needs 6 GiB of GPU memory")
    # On the CPU untouched pages of this allocation are never backed by memory.
    storage = torch.empty((pages - 1) * stride + 16 * width, dtype=torch.bfloat16, device=DEVICE)
    cache = storage.as_strided((pages, 16, width), (stride, width, 1))
    first, second = (int(i) for i in call.block_table[0, :2])
    cache[0] = call.cache[first]
    cache[pages - 1] = call.cache[second]
    want = call.attend(ALL, num_splits=1)
    call.cache = cache
    call.block_table[0, :2] = torch.tensor([0, pages - 1], dtype=torch.int32)
    got = call.attend(ALL, num_splits=1)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def test_output_dtype() -> None:
    """The output is rounded once to the dtype asked for; LSE stays fp32."""
    call = paged([60], seed=20)
    out, lse = call.attend(ALL, num_splits=2)
    rounded, same = call.attend(ALL, num_splits=2, out_dtype=torch.bfloat16)
    assert torch.equal(rounded.cpu(), out.cpu().to(torch.bfloat16))
    assert torch.equal(lse, same)


def test_nothing_to_do() -> None:
    """No token, no sequence, no page: shapes are right and nothing fails."""
    call = paged([20, 0], seed=21)
    call.q = call.q[:0]
    call.cu_seqlens_q = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    out, lse = call.attend(ALL)
    assert out.shape == (0, 4, 32)
    assert lse.shape == (0, 4)
    call = paged([0, 0], seed=21)
    call.block_table = call.block_table[:, :0]
    out, lse = call.attend(ALL)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


def test_reruns_are_equal() -> None:
    """Nothing depends on the order in which programs run."""
    call = paged([150, 20], seed=22)
    first = call.attend(ALL, num_splits=3)
    for _ in range(20 if DEVICE == "cuda" else 2):
        again = call.attend(ALL, num_splits=3)
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])


def test_choice_of_splits() -> None:
    """Long contexts of few sequences are split, full waves are not; never more than tiles."""
    assert decode.choose_splits(programs=1, tiles=1, multiprocessors=132) == 1
    assert decode.choose_splits(programs=1, tiles=512, multiprocessors=132) > 30
    assert decode.choose_splits(programs=132, tiles=128, multiprocessors=132) == 1
    for programs in (1, 3, 8, 32, 128, 1000):
        for tiles in (1, 2, 7, 128, 512):
            assert 1 <= decode.choose_splits(programs, tiles, 132) <= tiles


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"latent_width": 24}, "power of two"),
        ({"latent_width": 16}, "at least 32"),
        ({"cu_seqlens_q": None, "max_query_len": 3}, "cu_seqlens_q"),
        ({"cu_seqlens_q": torch.zeros(2, dtype=torch.int64, device=DEVICE)}, "int32"),
        ({"block_table": torch.zeros(2, 2, dtype=torch.int64, device=DEVICE)}, "block_table"),
        ({"block_table": torch.zeros(3, 2, dtype=torch.int32, device=DEVICE)}, "one per sequence"),
        ({"seq_lens": torch.zeros(2, dtype=torch.int64, device=DEVICE)}, "seq_lens"),
        ({"amax": torch.ones(5, device=DEVICE)}, "amax"),
        ({"q": torch.ones(2, 4, 40, device=DEVICE)}, "multiple of 16"),
        ({"q": torch.ones(2, 4, 64, device=DEVICE)}, "add up"),
        ({"q": torch.ones(2, 48, 4, device=DEVICE).transpose(1, 2)}, "contiguous"),
        ({"num_splits": 0}, "num_splits"),
        ({"sparsity": reference.Sparsity(2, 8)}, "2:4 and 4:8"),
        ({"scale": 0.0}, "scale"),
        ({"scale": NAN}, "scale"),
        ({"out_dtype": torch.float64}, "out_dtype"),
        ({"cu_seqlens_q": CUMULATED, "max_query_len": 0}, "max_query_len"),
        ({"cu_seqlens_q": CUMULATED[:2]}, "cu_seqlens_q"),
        ({"cache": torch.zeros(4, 0, 48, device=DEVICE)}, "no token"),
        ({"records": torch.zeros(1, device=DEVICE)}, "together"),
        ({"cache": torch.zeros(4, 16, 48, dtype=torch.int8, device=DEVICE)}, "bf16"),
    ],
)
def test_bad_arguments(change: dict[str, object], message: str) -> None:
    """Named, with what was found and what is allowed."""
    call = paged([20, 3], seed=23)
    arguments: dict[str, object] = {
        "q": call.q,
        "cache": call.cache,
        "block_table": call.block_table,
        "seq_lens": call.seq_lens,
        "amax": call.amax,
        "latent_width": 32,
        "scale": 0.1,
        "formats": ALL,
    }
    with pytest.raises(ConfigError, match=message):
        decode.decode_attention(**(arguments | change))  # type: ignore[arg-type]


@pytest.mark.parametrize("operand", ["q", "k", "p", "v", "q_rope", "k_rope"])
def test_bad_formats(operand: str) -> None:
    with pytest.raises(ConfigError, match=f"{operand} is 'nvfp5'"):
        OperandFormats(**{operand: "nvfp5"})


@pytest.mark.parametrize(
    "shape", [(8, 64, 2, 4, 4, 2), (16, 48, 2, 4, 4, 2), (16, 64, 1, 4, 4, 2), (16, 64, 2, 4, 4, 0)]
)
def test_bad_configurations(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="no shape of a program"):
        Configuration(*shape)
