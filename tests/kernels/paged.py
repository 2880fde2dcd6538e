"""Paged decode calls with poison wherever nothing may be read, and their oracle."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mla_quant import formats as number_formats
from mla_quant import reference
from mla_quant.kernels import operand_cache
from mla_quant.kernels.decode import Configuration, OperandFormats, decode_attention
from tests.oracles import attention as oracle
from tests.oracles import blocks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN = float("nan")
# q latent, q rope, k latent, k rope, v, p
AMAX = (5.0, 7.0, 4.5, 11.0, 4.0, 1.0)
U = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 0.0}


@dataclasses.dataclass
class Paged:
    """One call. `latents` and `queries` hold each sequence as fp32 on the CPU, unquantized."""

    q: Tensor
    cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor | None
    max_query_len: int
    latent_width: int
    scale: float
    latents: list[Tensor]
    queries: list[Tensor]
    amax: Tensor

    @property
    def rope_width(self) -> int:
        return self.q.shape[-1] - self.latent_width

    def attend(self, formats: OperandFormats, **kwargs: object) -> tuple[Tensor, Tensor]:
        """The kernel."""
        return decode_attention(
            self.q,
            self.cache,
            self.block_table,
            self.seq_lens,
            self.amax,
            latent_width=self.latent_width,
            scale=self.scale,
            formats=formats,
            cu_seqlens_q=self.cu_seqlens_q,
            max_query_len=self.max_query_len,
            **kwargs,  # type: ignore[arg-type]
        )

    def layout(
        self, k: str = "nvfp4", v: str = "nvfp4", k_rope: str | None = None
    ) -> operand_cache.OperandLayout:
        return operand_cache.OperandLayout(self.latent_width, self.rope_width, k, v, k_rope)

    def records(
        self, layout: operand_cache.OperandLayout, steps: Sequence[Sequence[int]] | None = None
    ) -> Tensor:
        """A side cache written in steps: numbers of new tokens of each sequence."""
        pages, page_size = self.cache.shape[:2]
        records = operand_cache.allocate(pages, page_size, layout, DEVICE)
        records.fill_(0xA5)  # nothing unwritten may be read
        totals = self.seq_lens.tolist()
        done = [0] * len(totals)
        for new in steps or [totals]:
            done = [a + b for a, b in zip(done, new, strict=True)]
            operand_cache.write_operands(
                self.cache,
                records,
                layout,
                self.block_table,
                torch.tensor(done, dtype=torch.int32, device=DEVICE),
                self.amax,
                cu_seqlens_new=cumulated(new),
                max_new_tokens=max(new),
            )
        assert done == totals
        return records


def cumulated(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32, device=DEVICE)


def paged(
    lengths: Sequence[int],
    *,
    query_lengths: Sequence[int] | None = None,
    heads: int = 4,
    latent_width: int = 32,
    rope_width: int = 16,
    page_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    q_dtype: torch.dtype = torch.float32,
    spread: float = 1.0,
    sink: float | None = None,
    spare_tokens: int = 0,
    padding_tokens: int = 0,
    seed: int = 0,
) -> Paged:
    """A call whose unreadable slots hold NaN and whose unused block ids are garbage.

    Args:
        lengths: Tokens of each sequence.
        query_lengths: None: one each, without cu_seqlens_q.
        heads: Query heads.
        latent_width: Features of the latent.
        rope_width: Features of the rope part.
        page_size: Slots of a page.
        dtype: Of the cache.
        q_dtype: Of q.
        spread: Factor of q.
        sink: The score of the first key, in log2 units above the others.
        spare_tokens: Room in the block table past the longest sequence.
        padding_tokens: Query tokens past the last sequence's.
        seed: Of everything random.
    """
    rng = np.random.default_rng(seed)
    width = latent_width + rope_width
    scale = width**-0.5
    pages_of = [-(-length // page_size) for length in lengths]
    max_pages = max(1, *pages_of, -(-(max(lengths) + spare_tokens) // page_size))
    total_pages = sum(pages_of) + 3
    # A wider buffer: strides that are not those of a contiguous cache.
    buffer = torch.full((total_pages, page_size + 1, width + 16), NAN, dtype=dtype)
    cache = buffer[:, :page_size, :width]
    ids = rng.permutation(total_pages)
    table = rng.choice(np.array([2**31 - 1, -7, total_pages + 5]), size=(len(lengths), max_pages))
    latents: list[Tensor] = []
    used = 0
    for row, length in enumerate(lengths):
        x = rng.normal(size=(length, width)).astype(np.float32)
        x[:, latent_width:] *= 3
        x[:, :latent_width] += rng.normal(size=latent_width).astype(np.float32) * 0.5
        latent = torch.from_numpy(x).to(dtype)
        latents.append(latent)
        mine = ids[used : used + pages_of[row]]
        used += pages_of[row]
        table[row, : pages_of[row]] = mine
        for token in range(length):
            cache[mine[token // page_size], token % page_size] = latent[token]
    counts = [1] * len(lengths) if query_lengths is None else list(query_lengths)
    queries = [
        torch.from_numpy(rng.normal(size=(count, heads, width)).astype(np.float32) * spread)
        for count in counts
    ]
    if sink is not None:
        for query, latent in zip(queries, latents, strict=True):
            if len(latent):
                # Move each query along the first key until that key's score is `sink` up.
                key = latent[0].float()
                query += key * (sink / 1.4426950408889634 / scale / float(key @ key))
    queries = [query.to(q_dtype) for query in queries]
    q = torch.cat(queries)
    if padding_tokens:
        q = torch.cat([q, torch.full((padding_tokens, heads, width), NAN, dtype=q_dtype)])
    wide = torch.full((q.shape[0], heads + 1, width + 8), NAN, dtype=q_dtype)
    wide[:, :heads, :width] = q
    device_buffer = buffer.to(DEVICE)
    return Paged(
        wide.to(DEVICE)[:, :heads, :width],
        device_buffer[:, :page_size, :width],
        torch.from_numpy(table.astype(np.int32)).to(DEVICE),
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        None if query_lengths is None else cumulated(counts),
        max(counts),
        latent_width,
        scale,
        [latent.float() for latent in latents],
        [query.float() for query in queries],
        torch.tensor(AMAX, dtype=torch.float32, device=DEVICE),
    )


@dataclasses.dataclass
class Expected:
    out: np.ndarray
    lse: np.ndarray
    out_bound: np.ndarray
    lse_bound: np.ndarray
    open_decisions: int
    elements: int
    scores: list[np.ndarray]


def below_normal(result: oracle.Result, p_format: str) -> np.ndarray:
    """What a reference point that rises from tile to tile may change: error times denominator.

    NVFP4: blocks whose maximum is below 2^-14 of 2^M have a subnormal scale at the final M only;
    their whole mass counts. FP8: an element below 2^-14 is a subnormal E4M3 number at the final M;
    half a step of that range is 2^-10 / 448. Twice each: with one M and with another.
    """
    v = np.abs(result.v)
    if p_format == "nvfp4":
        keys = result.p.shape[-1]
        low = blocks.block_maxima(result.p) < 2.0**-14
        mass = np.where(low, result.p, 0.0) if keys else result.p
        return np.einsum("bhqk,bhkd->bhqd", 2 * mass, v)
    if p_format == "fp8":
        low = ((result.p < 2.0**-14) & (result.p > 0)).astype(np.float64)
        return np.einsum("bhqk,bhkd->bhqd", low * 2.0**-9 / 448, v)
    return np.zeros(result.out.shape)


def expected(
    call: Paged, formats: OperandFormats, sparsity: oracle.Sparsity | None = None
) -> Expected:
    """The oracle, sequence by sequence, and the error that float32 arithmetic may cause.

    Format "none" means rounded to the dtype of the cache; P's rounding to it adds half an ulp of
    each p.
    """
    parts = []
    width = call.latent_width
    amax = call.amax.tolist()
    dtype = call.cache.dtype

    def parts_of(x: np.ndarray, latent: str, rope: str, amax: Sequence[float]) -> np.ndarray:
        """Latent and rope part, each in its own format with its own amax."""
        ways = [oracle.Operand(fmt, (a,)) for fmt, a in zip((latent, rope), amax, strict=True)]
        sides = (x[..., :width], x[..., width:]) if call.rope_width else (x,)
        rounded = [oracle.quantize_features(part, how) for part, how in zip(sides, ways)]  # noqa: B905
        return np.concatenate(rounded, axis=-1)

    for latent, query in zip(call.latents, call.queries, strict=True):
        queries, keys = query.shape[0], latent.shape[0]
        heads = query.shape[1]
        if not queries:
            continue
        if not keys:
            zero = np.zeros((queries, heads, call.latent_width))
            empty = np.full((queries, heads), -np.inf)
            parts.append((zero, empty, zero, np.zeros_like(empty), 0, 0, np.zeros((heads, 0))))
            continue
        query = in_cache_dtype(call, query, formats)
        raw = latent[None, None].numpy()
        q = parts_of(query.permute(1, 0, 2)[None].numpy(), formats.q, formats.rope_q, amax[0:2])
        k = parts_of(raw, formats.k, formats.rope_k, amax[2:4])
        result = oracle.attention(
            q,
            k,
            raw[..., :width],
            scale=call.scale,
            causal=True,
            offsets=[keys - queries],
            v_how=oracle.Operand(formats.v, (amax[4],)),
            p_format=formats.p,
            sparsity=sparsity,
        )
        bound = oracle.float32_bound(
            result,
            q,
            k,
            call.scale,
            formats.p,
        )
        denominator = result.p.sum(-1)
        denominator = np.where(denominator == 0, 1.0, denominator)[..., None]
        extra = below_normal(result, formats.p)
        if formats.p == "none":
            tiny = 2.0**-25 if dtype == torch.float16 else 0.0
            lost = np.where(result.p > 0, U[dtype] * result.p + tiny, 0.0)
            extra = extra + np.einsum("bhqk,bhkd->bhqd", lost, np.abs(result.v))
        out_bound = bound.out + extra / denominator
        parts.append(
            (
                result.out[0].transpose(1, 0, 2),
                result.lse[0].T,
                out_bound[0].transpose(1, 0, 2),
                bound.lse[0].T,
                bound.open_decisions,
                bound.elements,
                result.scores[0],
            )
        )
    columns = list(zip(*parts, strict=True))
    return Expected(
        *(np.concatenate(column) for column in columns[:4]),
        sum(columns[4]),
        sum(columns[5]),
        list(columns[6]),
    )


def in_cache_dtype(call: Paged, query: Tensor, formats: OperandFormats) -> Tensor:
    """Parts of a query that are not quantized, rounded to the dtype of the cache."""
    query = query.clone()
    parts = (slice(None, call.latent_width), slice(call.latent_width, None))
    for part, fmt in zip(parts, (formats.q, formats.rope_q), strict=True):
        if fmt == "none":
            query[..., part] = query[..., part].to(call.cache.dtype).float()
    return query


def compare(
    got: tuple[Tensor, Tensor],
    want: Expected,
    tokens: int | None = None,
    open_share: float = 0.005,
) -> None:
    """Every element within its bound; nothing more than the expected tokens is 0 / -inf.

    At most `open_share` of the decisions on P may be ones that float32 arithmetic can turn; the
    worst case of a sum, and with it the share, grows with the width.
    """
    out, lse = (x.detach().double().cpu().numpy() for x in got)
    count = want.out.shape[0]
    assert out.shape == (tokens or count, *want.out.shape[1:])
    assert lse.shape == out.shape[:2]
    assert (out[count:] == 0).all()
    assert np.isneginf(lse[count:]).all()
    out, lse = out[:count], lse[:count]
    assert np.isfinite(out).all(), "something was read that must not be"
    error = np.abs(out - want.out)
    worst = np.unravel_index(np.argmax(error - want.out_bound), error.shape)
    assert (error <= want.out_bound).all(), (
        f"out{[int(i) for i in worst]}: got {out[worst]}, want {want.out[worst]}, "
        f"bound {want.out_bound[worst]}; {int((error > want.out_bound).sum())} of {error.size} off"
    )
    empty = np.isneginf(want.lse)
    np.testing.assert_array_equal(np.isneginf(lse), empty)
    assert (out[empty] == 0).all()
    lse_error = np.abs(np.where(empty, 0, lse) - np.where(empty, 0, want.lse))
    assert (lse_error <= want.lse_bound).all(), (lse_error.max(), want.lse_bound.max())
    # The bound says something: almost all decisions on P are forced.
    assert want.open_decisions <= max(4, open_share * want.elements)


# The worst case of a sum grows with the width: 512 + 64 features are twelve times those of `paged`.
compare_wide = functools.partial(compare, open_share=12 * 0.005)


def reference_attention(
    call: Paged, formats: OperandFormats, sparsity: reference.Sparsity | None = None
) -> tuple[Tensor, Tensor]:
    """`mla_quant.reference` sequence by sequence, with a calibrated amax of P too."""
    known = number_formats.FORMATS
    amax = call.amax.cpu()
    latent_width = call.latent_width
    outs, lses = [], []
    for latent, query in zip(call.latents, call.queries, strict=True):
        query = in_cache_dtype(call, query, formats)
        q, k = query.permute(1, 0, 2)[None], latent[None, None]
        parts = [slice(0, latent_width), slice(latent_width, None)][: 1 + bool(call.rope_width)]
        out, lse, _ = reference.attention(
            [
                reference.quantize_dequantize(q[..., part], known[fmt], amax[i])
                for i, (part, fmt) in enumerate(zip(parts, (formats.q, formats.rope_q)))  # noqa: B905
            ],
            [
                reference.quantize_dequantize(k[..., part], known[fmt], amax[2 + i])
                for i, (part, fmt) in enumerate(zip(parts, (formats.k, formats.rope_k)))  # noqa: B905
            ],
            reference.quantize_dequantize(
                k[..., :latent_width], known[formats.v], amax[4], axis=-2
            ),
            scale=call.scale,
            causal=True,
            quantize_p=None
            if formats.p == "none"
            else lambda p: reference.quantize_dequantize_p(p, known[formats.p], amax[5]),
            sparsity=sparsity,
        )
        outs.append(out[0].permute(1, 0, 2))
        lses.append(lse[0].T)
    return torch.cat(outs), torch.cat(lses)


# Shapes that differ in everything that depends on the order of tokens in a tile.
SHAPES = [
    Configuration(16, 64, 2, 4, 4, 2),
    Configuration(16, 64, 4, 2, 4, 2),
    Configuration(16, 64, 8, 4, 4, 2),
    Configuration(32, 32, 2, 2, 4, 2),
    Configuration(16, 16, 2, 1, 4, 2),
]
