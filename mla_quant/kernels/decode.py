"""Absorbed MLA decode over a paged latent cache, split along the context: the host function.

The kernels are in `decode_kernels` (portable Triton) and `decode_hopper` (Gluon), their shapes in
`decode_shapes`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from types import ModuleType

import torch
import triton
from torch import Tensor

from mla_quant.errors import ConfigError
from mla_quant.formats import NVFP4
from mla_quant.kernels.decode_kernels import combine_ranges, quantize_queries, split_portable
from mla_quant.kernels.decode_shapes import (
    MAX_ROWS_STORED,
    SOURCES,
    Configuration,
    OperandFormats,
    ProgramShape,
    choose_configuration,
    choose_splits,
    configurations,
    operand_dtypes,
    operand_source,
)
from mla_quant.kernels.decode_shapes import device_properties as _device_properties
from mla_quant.kernels.devices import hopper_module
from mla_quant.kernels.numerics import BLOCK, FORMAT_CODES
from mla_quant.kernels.operand_cache import (
    OperandLayout,
    check_amax,
    check_cache,
    check_cumulated,
    check_records,
    check_sequences,
    check_widths,
)
from mla_quant.kernels.record_fields import TRITON_DTYPES, describe
from mla_quant.kernels.scratch import Allocate, allocate_scratch, partial_shapes
from mla_quant.records import RecordCache
from mla_quant.reference import RANKED_PATTERNS, Sparsity

AMAX_ENTRIES = ("q_latent", "q_rope", "k_latent", "k_rope", "v", "p")
"""Order of the amax table."""


def _check(
    q: Tensor,
    cache: Tensor | RecordCache,
    block_table: Tensor,
    seq_lens: Tensor,
    amax: Tensor,
    latent_width: int,
    scale: float,
    cu_seqlens_q: Tensor | None,
    max_query_len: int,
    sparsity: Sparsity | None,
    num_splits: int | None,
    out_dtype: torch.dtype,
) -> None:
    if q.dim() != 3 or q.stride(-1) != 1 or q.dtype not in TRITON_DTYPES:
        raise ConfigError(
            "q must be bf16, fp16 or fp32 [tokens, heads, width] with a contiguous last dimension; "
            f"got {q.dtype} {list(q.shape)}, strides {list(q.stride())}"
        )
    rope_width = q.shape[-1] - latent_width
    check_widths(latent_width, rope_width)
    if isinstance(cache, RecordCache):
        fmt = cache.format
        if fmt.footer_bytes or not fmt.holds(latent_width, rope_width) or fmt.rope_inside:
            raise ConfigError(
                f"{fmt.name} records cannot be quantized on read for latent_width {latent_width} "
                f"and rope_width {rope_width}; give whole records of these widths, without page "
                "footer and with a rope part of their own"
            )
        cache = cache.data
        check_sequences(block_table, seq_lens, cache.device)
    else:
        check_cache(cache, block_table, seq_lens, latent_width, rope_width)
    check_amax(amax, cache)
    if q.device != cache.device:
        raise ConfigError(f"q is on {q.device}, the latent cache on {cache.device}")
    batch = seq_lens.shape[0]
    if cu_seqlens_q is None:
        if q.shape[0] != batch or max_query_len != 1:
            raise ConfigError(
                f"without cu_seqlens_q each of the {batch} sequences has one query token; got "
                f"{q.shape[0]} and max_query_len {max_query_len}; pass cu_seqlens_q"
            )
    else:
        check_cumulated("cu_seqlens_q", cu_seqlens_q, batch, cache.device)
        if max_query_len < 1 and q.shape[0]:
            raise ConfigError(
                f"max_query_len is {max_query_len} and there are {q.shape[0]} query tokens; it "
                "must be the largest number of query tokens of a sequence"
            )
    if not (math.isfinite(scale) and scale > 0):
        raise ConfigError(f"scale is {scale}; it must be a finite number above 0")
    if out_dtype not in TRITON_DTYPES:
        raise ConfigError(f"out_dtype is {out_dtype}; it must be bf16, fp16 or fp32")
    if sparsity is not None and (sparsity.n, sparsity.m) not in RANKED_PATTERNS:
        allowed = " and ".join(f"{n}:{m}" for n, m in RANKED_PATTERNS)
        raise ConfigError(
            f"sparsity {sparsity.n}:{sparsity.m} is not supported by the decode kernel; allowed "
            f"are {allowed}"
        )
    if num_splits is not None and num_splits < 1:
        raise ConfigError(f"num_splits is {num_splits}; it must be at least 1, or None")


def _carried_shapes(
    tokens: int, heads: int, latent: int, rope: int, dtype: torch.dtype, rope_dtype: torch.dtype
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Of Q as it enters the products."""
    parts = [(latent, dtype), (rope, rope_dtype)] if rope else [(latent, dtype)]
    return [((tokens, heads, width), dtype) for width, dtype in parts]


def scratch_shapes(
    batch: int,
    query_len: int,
    heads: int,
    latent_width: int,
    rope_width: int,
    capacity: int,
    device: torch.device,
    element_bytes: int = 2,
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Scratch that no `decode_attention` of these sizes exceeds, whatever its formats.

    Args:
        batch: Sequences.
        query_len: Query tokens of each.
        heads: Query heads.
        latent_width: Features of the latent.
        rope_width: Features of the rope part.
        capacity: Tokens that a row of the block table can hold.
        device: Where it runs.
        element_bytes: Of the model's dtype.
    """
    capability, multiprocessors = _device_properties(device)
    rows = query_len * heads
    shapes = [
        ProgramShape(c.block_rows, c.block_tokens)
        for source in SOURCES
        # Products of quantized operands are bf16 in a model of any dtype.
        for size in {2, element_bytes}
        for c in (choose_configuration(rows, capability, source, size),)
    ]
    ranges = [shape.splits(batch, rows, capacity, multiprocessors) for shape in shapes]
    hopper = hopper_module("decode_hopper", capability)
    if hopper is not None:
        ranges.append(hopper.SHAPE.splits(batch, rows, capacity, multiprocessors) + 1)
    dtype = {2: torch.bfloat16, 4: torch.float32}[element_bytes]
    tokens = batch * query_len
    carried = _carried_shapes(tokens, heads, latent_width, rope_width, dtype, dtype)
    return carried + partial_shapes(max(ranges), tokens * heads, latent_width)


def decode_attention(
    q: Tensor,
    cache: Tensor | RecordCache,
    block_table: Tensor,
    seq_lens: Tensor,
    amax: Tensor,
    *,
    latent_width: int,
    scale: float,
    formats: OperandFormats,
    cu_seqlens_q: Tensor | None = None,
    max_query_len: int = 1,
    sparsity: Sparsity | None = None,
    num_splits: int | None = None,
    records: Tensor | None = None,
    layout: OperandLayout | None = None,
    out_dtype: torch.dtype = torch.float32,
    configuration: Configuration | None = None,
    allocate: Allocate = allocate_scratch,
) -> tuple[Tensor, Tensor]:
    """Attention of few query tokens a sequence over a paged latent cache, in the absorbed form.

    K is the whole latent with its rope part, V the latent part. Query token i of L of a sequence
    sees its first `seq_len - L + i + 1` tokens. Slots past `seq_len` are never read, nor are
    entries of the block table past it. Nothing synchronizes with the host; grids and allocations
    depend on shapes and host numbers only. Therefore a `seq_lens` beyond the capacity of its row of
    `block_table`, max_pages · page_size, cannot be noticed: block ids past the end of the row are
    read then, and whatever they point to. The same holds for block ids that are no page.

    P is quantized against a reference point that rises by powers of two as larger scores are met,
    which changes nothing but blocks far below the row's maximum, as long as no p saturates. With an
    amax of P of at least 1 none does. With one below 1, p above it saturate under the reference
    point of their time, which depends on the tiles before them: results then depend on
    `block_tokens` and `num_splits`, beyond the order of sums.

    Args:
        q: [tokens, heads, latent + rope], absorbed, bf16, fp16 or fp32, last dimension contiguous.
        cache: [pages, page_size, latent + rope], bf16, fp16 or fp32, last dimension contiguous. Or
            records, which stand for what they read as, rounded to q's dtype: their values are
            quantized again, on read. Results are those over a raw cache of these values, the same
            but for the order of sums where an operand is not quantized.
        block_table: int32 [batch, max_pages].
        seq_lens: int32 [batch], tokens in the cache, the query's own included; may be 0.
        amax: fp32 [6] on the device, in the order of `AMAX_ENTRIES`; entries of operands that are
            not quantized are ignored.
        latent_width: Features of the latent part.
        scale: Softmax scale.
        formats: Of the operands; those of rope parts may differ from those of latent parts. "none"
            means rounded to the dtype of the cache.
        cu_seqlens_q: int32 [batch + 1], cumulated query lengths; None: one query token each.
        max_query_len: Largest query length; tokens beyond it in a sequence are not computed.
        sparsity: N:M sparsity of the scores, 2:4 or 4:8, applied to every row (whether a decode
            step is sparse at all is the caller's choice).
        num_splits: Ranges into which the context is split; None chooses.
        records: Side cache of operands (see `operand_cache`), or None to quantize on read. What it
            does not hold is read from `cache`, and quantized if its format is not "none".
        layout: What `records` holds.
        out_dtype: Of the output.
        configuration: Of the portable kernel; None chooses, the kernel too. With `records`, at most
            32 rows.
        allocate: Hands out scratch: shapes and dtypes, then the device, to tensors of any content
            that may be reused after the call. `scratch_shapes` says how much is needed.

    Returns:
        Output [tokens, heads, latent] and natural-log LSE fp32 [tokens, heads] (of unquantized P),
        contiguous. Rows that see no token, and tokens of no sequence, are 0 / -inf.

    Raises:
        ConfigError: An argument does not fit.
    """
    _check(
        q,
        cache,
        block_table,
        seq_lens,
        amax,
        latent_width,
        scale,
        cu_seqlens_q,
        max_query_len,
        sparsity,
        num_splits,
        out_dtype,
    )
    if (records is None) != (layout is None):
        raise ConfigError("records and layout of an operand cache must be given together")
    packed: dict[str, object] = {}
    cache_dtype, token_stride, outer = q.dtype, 0, 1.0
    if isinstance(cache, RecordCache):
        if records is not None:
            raise ConfigError("a cache of records has no operand cache beside it; leave it out")
        packed = {
            "FIELDS": describe(cache.format, cache.page_size),
            "STORED_DTYPE": TRITON_DTYPES[cache.rope_dtype],
            "RAW_DTYPE": TRITON_DTYPES[q.dtype],
        }
        page_size, token_stride = cache.page_size, cache.format.record_bytes
        outer, cache = cache.outer_scale, cache.data
    else:
        cache_dtype, page_size, token_stride = cache.dtype, cache.shape[1], cache.stride(1)
    rope_width = q.shape[-1] - latent_width
    k_stored = k_rope_stored = v_stored = False
    if records is not None and layout is not None:
        if (layout.latent_width, layout.rope_width) != (latent_width, rope_width):
            raise ConfigError(
                f"the layout of the operand cache has latent_width {layout.latent_width} and "
                f"rope_width {layout.rope_width}, q and the latent cache {latent_width} and "
                f"{rope_width}; they must be equal"
            )
        check_records(records, cache, layout)
        k_stored, v_stored = layout.k_format != "none", layout.v_format != "none"
        k_rope_stored = rope_width > 0 and layout.rope_format != "none"
        for operand, stored, held, asked in (
            ("k", k_stored, layout.k_format, formats.k),
            ("k_rope", k_rope_stored, layout.rope_format, formats.rope_k),
            ("v", v_stored, layout.v_format, formats.v),
        ):
            if stored and held != asked:
                raise ConfigError(
                    f"the operand cache holds {operand} in {held}, asked for is {asked}; write it "
                    "in the format that is read"
                )
    tokens, heads, _ = q.shape
    batch = seq_lens.shape[0]
    new = functools.partial(torch.empty, device=q.device)
    # Where every token belongs to a sequence each result is written.
    covered = cu_seqlens_q is None
    out = new(tokens, heads, latent_width, dtype=out_dtype)
    lse = new(tokens, heads, dtype=torch.float32)
    rows_per_sequence = max_query_len * heads
    if tokens == 0 or batch == 0 or rows_per_sequence <= 0 or block_table.shape[1] == 0:
        return out.zero_(), lse.fill_(-math.inf)

    latent_dtype, rope_dtype, pv_dtype = operand_dtypes(formats, cache_dtype)
    if not rope_width:
        rope_dtype = latent_dtype
    q_formats = {formats.q, formats.rope_q} if rope_width else {formats.q}
    carries = q_formats != {"none"} or {latent_dtype, rope_dtype} != {q.dtype}
    capability, multiprocessors = _device_properties(q.device)
    hopper = None
    if configuration is None:
        q_dtype = latent_dtype if carries else q.dtype
        if not packed:
            hopper = _hopper(
                q_dtype,
                cache,
                latent_width,
                rope_width,
                layout,
                formats,
                rows_per_sequence,
                capability,
            )
        rope_as_latent = k_stored if not rope_width else k_rope_stored
        source = "unpacked"
        if not packed:
            source = operand_source(formats, k_stored, v_stored, rope_as_latent)
        staged = [latent_dtype, rope_dtype, pv_dtype]
        if source != "stored":
            staged.append(cache_dtype)
        element_bytes = max(d.itemsize for d in staged)
        configuration = choose_configuration(rows_per_sequence, capability, source, element_bytes)
    elif records is not None and (
        configuration.block_rows > MAX_ROWS_STORED
        or (v_stored and formats.v == "nvfp4" and configuration.block_tokens < 2 * BLOCK.value)
    ):
        raise ConfigError(
            f"a configuration of {configuration.block_rows} rows and {configuration.block_tokens} "
            f"tokens cannot be used with an operand cache; at most {MAX_ROWS_STORED} rows and, "
            f"for NVFP4 V, at least {2 * BLOCK.value} tokens can"
        )
    shape = (
        hopper.SHAPE
        if hopper
        else ProgramShape(configuration.block_rows, configuration.block_tokens)
    )
    if num_splits is None:
        capacity = block_table.shape[1] * page_size
        num_splits = shape.splits(batch, rows_per_sequence, capacity, multiprocessors)
    # Hopper kernels always leave ranges to be combined. Groups of V that are not closed they leave
    # to the portable kernel, as one more.
    has_tail = hopper is not None and records is not None
    ranges = num_splits + 1 if has_tail else num_splits
    direct = hopper is None and num_splits == 1

    wanted: list[tuple[tuple[int, ...], torch.dtype]] = []
    if carries:
        wanted += _carried_shapes(tokens, heads, latent_width, rope_width, latent_dtype, rope_dtype)
    if not direct:
        wanted += partial_shapes(ranges, tokens * heads, latent_width)
    scratch = allocate(wanted, q.device) if wanted else []
    partial_out = partial_top = partial_total = None
    if not direct:
        partial_out, partial_top, partial_total = scratch[-3:]
        if not covered:
            partial_total.zero_()
    elif not covered:
        out.zero_()
        lse.fill_(-math.inf)
    # An empty view would have no address.
    rope_q = q[..., latent_width:] if rope_width else q
    if carries:
        carried, rope_carried = scratch[0], scratch[1 if rope_width else 0]
        rows_per_program = 4
        quantize_queries[(triton.cdiv(tokens * heads, rows_per_program),)](
            q,
            carried,
            rope_carried,
            amax,
            tokens * heads,
            q.stride(0),
            q.stride(1),
            HEADS=heads,
            LATENT=latent_width,
            ROPE=rope_width,
            ROPE_PADDED=_padded(rope_width),
            FORMAT=FORMAT_CODES[formats.q],
            ROPE_FORMAT=FORMAT_CODES[formats.rope_q],
            ROWS=rows_per_program,
            num_warps=4,
        )
        q, rope_q = carried, rope_carried

    value_constants: dict[str, object] = {
        "P_FORMAT": FORMAT_CODES[formats.p],
        "V_FORMAT": FORMAT_CODES[formats.v],
        "V_STORED": v_stored,
    }
    # What both kernels are told.
    arguments: dict[str, object] = {
        "q": q,
        "rope_q": rope_q,
        "block_table": block_table,
        "seq_lens": seq_lens,
        "cu_seqlens_q": cu_seqlens_q,
        "amax": amax,
        "partial_out": partial_out,
        "partial_top": partial_top,
        "partial_total": partial_total,
        "scale_log2": scale * math.log2(math.e),
        "partial_rows": tokens * heads,
        "sink": sparsity.dense_sink_tokens if sparsity else 0,
        "recent": sparsity.dense_recent_tokens if sparsity else 0,
        "q_token_stride": q.stride(0),
        "q_head_stride": q.stride(1),
        "rope_q_token_stride": rope_q.stride(0),
        "rope_q_head_stride": rope_q.stride(1),
        "table_stride": block_table.stride(0),
        "HEADS": heads,
        "PAGE_SIZE": page_size,
        "Q_FORMAT": FORMAT_CODES[formats.q],
        "Q_ROPE_FORMAT": FORMAT_CODES[formats.rope_q],
        "K_FORMAT": FORMAT_CODES[formats.k],
        "K_ROPE_FORMAT": FORMAT_CODES[formats.rope_k],
        "P_FORMAT": FORMAT_CODES[formats.p],
        "M": sparsity.m if sparsity else 0,
    }
    places = (layout or OperandLayout(latent_width, rope_width)).kernel_constants()
    if hopper:
        row_blocks = triton.cdiv(rows_per_sequence, shape.rows)
        grid = (row_blocks * num_splits * batch,)
        launch: dict[str, object] = {
            "row_blocks": row_blocks,
            "num_splits": num_splits,
            "num_warps": hopper.WARPS.value,
        }
        if records is None:
            hopper.split_raw[grid](
                **arguments,
                **launch,
                cache=cache,
                cache_page_stride=cache.stride(0),
                cache_token_stride=cache.stride(1),
            )
        else:
            words = records.view(torch.int32)
            hopper.split_records[grid](
                **arguments,
                **launch,
                **places,
                record_words=words,
                record_page_words=words.stride(0),
                TOKEN_WORDS=words.stride(1),
            )
    if not hopper or has_tail:
        row_blocks = triton.cdiv(rows_per_sequence, configuration.block_rows)
        portable_splits = 1 if hopper else num_splits
        split_portable[(row_blocks * portable_splits * batch,)](
            **arguments,
            **places,
            cache=cache,
            records=records,
            out=out,
            lse=lse,
            row_blocks=row_blocks,
            num_splits=portable_splits,
            first_partial=ranges - portable_splits,
            cache_outer=outer,
            cache_page_stride=cache.stride(0),
            cache_token_stride=token_stride,
            record_page_stride=records.stride(0) if records is not None else 0,
            record_token_stride=records.stride(1) if records is not None else 0,
            LATENT=latent_width,
            ROPE=rope_width,
            ROPE_PADDED=_padded(rope_width),
            K_STORED=k_stored,
            K_ROPE_STORED=k_rope_stored,
            V_FORMAT=FORMAT_CODES[formats.v],
            V_STORED=v_stored,
            PV_DTYPE=TRITON_DTYPES[pv_dtype],
            DIRECT=direct,
            TAIL_ONLY=hopper is not None,
            **packed,
            **configuration.kernel_constants(),
        )
    if not direct:
        # Few ranges: whole rows, so that there are not more programs than needed.
        features = latent_width if ranges <= _FEW_RANGES else min(latent_width, _COMBINE_FEATURES)
        combine_ranges[(tokens * heads * (latent_width // features),)](
            partial_out,
            partial_top,
            partial_total,
            amax,
            out,
            lse,
            ranges,
            tokens * heads,
            LATENT=latent_width,
            FEATURES=features,
            SPLITS=triton.next_power_of_2(ranges),
            CHUNK=min(triton.next_power_of_2(ranges), _COMBINE_CHUNK),
            **value_constants,
            num_warps=4,
        )
    return out, lse


def _hopper(
    q_dtype: torch.dtype,
    cache: Tensor,
    latent_width: int,
    rope_width: int,
    layout: OperandLayout | None,
    formats: OperandFormats,
    rows: int,
    capability: int,
) -> ModuleType | None:
    """`decode_hopper` where it serves these operands and is the faster one.

    `q_dtype` is that of the product, `rows` are query tokens × heads of a sequence.
    """
    hopper = hopper_module("decode_hopper", capability)
    if hopper is None or rows <= _HOPPER_MORE_THAN_ROWS:
        return None
    if q_dtype != torch.bfloat16 or cache.dtype != torch.bfloat16:
        return None
    if (latent_width, rope_width) != (hopper.LATENT.value, hopper.ROPE.value):
        return None
    if layout is None:
        places = (cache.data_ptr() // cache.element_size(), *cache.stride()[:2])
        aligned = all(place % _COPIED_ELEMENTS == 0 for place in places)
        serves = aligned and (formats.k, formats.rope_k, formats.v) == ("none",) * 3
    else:
        serves = (layout.k_format, layout.rope_format, layout.v_format) == ("nvfp4",) * 3
    return hopper if serves else None


# With 16 rows the portable kernel's tiles are full, and a quarter of these would be (H200, 128
# sequences of 16 heads and 8192 tokens: 610 µs against 679).
_HOPPER_MORE_THAN_ROWS = 16
# Copies to shared memory take 16 bytes.
_COPIED_ELEMENTS = 8


_COMBINE_FEATURES = 128
_FEW_RANGES = 4
_COMBINE_CHUNK = 32


def _padded(width: int) -> int:
    return int(triton.next_power_of_2(max(width, NVFP4.block_size or 1)))


__all__: Sequence[str] = (
    "AMAX_ENTRIES",
    "SOURCES",
    "Configuration",
    "OperandFormats",
    "ProgramShape",
    "choose_configuration",
    "choose_splits",
    "configurations",
    "decode_attention",
    "operand_dtypes",
    "operand_source",
    "scratch_shapes",
)
