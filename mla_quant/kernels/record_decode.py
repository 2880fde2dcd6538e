"""Attention over records: dense over block tables, sparse over lists of slots; and reading them.

One portable kernel for all formats. A program attends some query rows to a range of keys, which it
dequantizes tile by tile; a second launch combines ranges, of an extra cache too, and applies the
attention sink. Values are rounded to the dtype of the products (bfloat16; fp32 for fp32 queries):
exact for E2M1 and E4M3 with E4M3 or power-of-two scales.

An outer scale per layer multiplies Q·K of the latent part and, once, the latent columns of the
output; the rope part is outside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_quant.errors import RecordError
from mla_quant.kernels.decode_shapes import MAX_SPLITS, ProgramShape, device_properties
from mla_quant.kernels.devices import hopper_module, shared_bytes
from mla_quant.kernels.numerics import dot, round_to_dtype
from mla_quant.kernels.record_fields import (
    TRITON_DTYPES,
    describe,
    half_features,
    load_halves,
    load_rope,
    token_offset,
)
from mla_quant.kernels.scratch import Allocate, allocate_scratch, partial_shapes
from mla_quant.records import RecordCache
from mla_quant.reference import LOG2_E

LseConvention = Literal["natural", "flashmla", "flashinfer"]
"""natural: base e, without the sink, -inf without keys. flashmla: the same, +inf without keys.
flashinfer: base 2, with the sink."""

_LSE = {"natural": 0, "flashmla": 1, "flashinfer": 2}
_FLASHMLA = tl.constexpr(_LSE["flashmla"])
_FLASHINFER = tl.constexpr(_LSE["flashinfer"])
_LOG2_E = tl.constexpr(LOG2_E)
_LN_2 = tl.constexpr(1 / LOG2_E)


@triton.jit
def _keys(
    keys,
    position,
    end,
    num_slots,
    page_stride,
    SPARSE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """Which positions hold a key, the offsets of their pages, int64, and places in them."""
    present = position < end
    if SPARSE:
        slot = tl.load(keys + position, mask=present, other=-1).to(tl.int64)
    else:
        page = tl.load(keys + position // PAGE_SIZE, mask=present, other=-1).to(tl.int64)
        slot = page * PAGE_SIZE + position % PAGE_SIZE
    present = present & (slot >= 0) & (slot < num_slots)
    start, place = token_offset(tl.where(present, slot, 0), page_stride, PAGE_SIZE)
    return present, start, place


@triton.jit(
    do_not_specialize=[
        "num_splits",
        "row_blocks",
        "first_range",
        "partial_rows",
        "query_len",
        "most",
        "num_slots",
        "key_stride",
    ],
    do_not_specialize_on_alignment=["keys", "lengths"],
)
def split(
    q,
    cache,
    keys,
    lengths,
    partial_out,
    partial_top,
    partial_total,
    scale_log2,
    outer,
    num_splits,
    row_blocks,
    first_range,
    partial_rows,
    query_len,
    most,
    num_slots,
    q_token_stride,
    q_head_stride,
    key_stride,
    page_stride,
    HEADS: tl.constexpr,
    FIELDS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    STORED_DTYPE: tl.constexpr,
    SPARSE: tl.constexpr,
    CAUSAL: tl.constexpr,
    SCALED: tl.constexpr,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One range of keys of one list, for ROWS of its query rows.

    A list is a sequence's block table, or the slots of one query token; `query_len` tokens share
    it. `lengths` may be None: every list has `most` keys. Sums are left undivided, by the feature
    of V they belong to; `partial_top` is their reference point in log 2.
    """
    program = tl.program_id(0)
    row_block = program % row_blocks
    split_number = program // row_blocks % num_splits
    number = program // row_blocks // num_splits
    LATENT: tl.constexpr = FIELDS.latent
    ROPE: tl.constexpr = FIELDS.rope
    JOINT: tl.constexpr = FIELDS.v_width > LATENT.width
    HALF: tl.constexpr = FIELDS.v_width // 2

    row = row_block * ROWS + tl.arange(0, ROWS)
    token, head = row // HEADS, row % HEADS
    inside = token < query_len
    flat_token = (number * query_len + token).to(tl.int64)
    at = q + (flat_token * q_token_stride + head.to(tl.int64) * q_head_stride)[:, None]
    first_feature, second_feature = half_features(FIELDS)
    q_first = tl.load(at + first_feature[None, :], mask=inside[:, None], other=0.0)
    q_second = tl.load(at + second_feature[None, :], mask=inside[:, None], other=0.0)
    latent_factor = scale_log2
    if SCALED:
        if JOINT:
            # One product covers both parts: the outer scale goes into Q's latent columns.
            first_factor = tl.where(first_feature < LATENT.width, outer, 1.0)
            second_factor = tl.where(second_feature < LATENT.width, outer, 1.0)
            q_first = q_first.to(tl.float32) * first_factor[None, :]
            q_second = q_second.to(tl.float32) * second_factor[None, :]
        else:
            latent_factor = scale_log2 * outer
    q_first = round_to_dtype(q_first.to(tl.float32), DTYPE)
    q_second = round_to_dtype(q_second.to(tl.float32), DTYPE)
    if ROPE is not None and not JOINT:
        feature = tl.arange(0, triton.next_power_of_2(ROPE.width))
        mask = inside[:, None] & (feature < ROPE.width)[None, :]
        q_rope = tl.load(at + LATENT.width + feature[None, :], mask=mask, other=0.0)
        q_rope = round_to_dtype(q_rope.to(tl.float32), DTYPE)

    length = most
    if lengths is not None:
        length = tl.minimum(tl.load(lengths + number), most)
    limit = length + tl.zeros([ROWS], tl.int32)
    if CAUSAL:
        limit = length - (query_len - 1 - token)
    tiles = tl.cdiv(length, TOKENS)
    per_split = tl.cdiv(tiles, num_splits)
    first_tile = split_number * per_split
    last_tile = tl.minimum(first_tile + per_split, tiles)

    keys += number.to(tl.int64) * key_stride
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    first_sum = tl.zeros([ROWS, HALF], tl.float32)
    second_sum = tl.zeros([ROWS, HALF], tl.float32)
    for tile in tl.range(first_tile, last_tile):
        position = tile * TOKENS + tl.arange(0, TOKENS)
        present, start, place = _keys(
            keys, position, length, num_slots, page_stride, SPARSE, PAGE_SIZE
        )
        base = cache + start
        first, second = load_halves(base, place, present, FIELDS, STORED_DTYPE)
        first, second = round_to_dtype(first, DTYPE), round_to_dtype(second, DTYPE)
        score = dot(q_first, tl.trans(first), tl.zeros([ROWS, TOKENS], tl.float32))
        score = dot(q_second, tl.trans(second), score) * latent_factor
        if ROPE is not None and not JOINT:
            rope = round_to_dtype(load_rope(base, place, present, FIELDS, STORED_DTYPE), DTYPE)
            part = dot(q_rope, tl.trans(rope), tl.zeros([ROWS, TOKENS], tl.float32))
            score += part * scale_log2
        visible = present[None, :] & (position[None, :] < limit[:, None])
        score = tl.where(visible, score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        reference = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(score - reference[:, None])
        shrink = tl.exp2(top - reference)
        total = total * shrink + tl.sum(p, 1)
        p = round_to_dtype(p, DTYPE)
        first_sum = dot(p, first, first_sum * shrink[:, None])
        second_sum = dot(p, second, second_sum * shrink[:, None])
        top = new_top

    if SCALED:
        first_sum *= tl.where(first_feature < LATENT.width, outer, 1.0)[None, :]
        second_sum *= tl.where(second_feature < LATENT.width, outer, 1.0)[None, :]
    flat = (first_range + split_number).to(tl.int64) * partial_rows + flat_token * HEADS + head
    tl.store(partial_top + flat, top, mask=inside)
    tl.store(partial_total + flat, total, mask=inside)
    # Sums of an empty range are neither written nor read.
    if first_tile < last_tile:
        target = partial_out + (flat * FIELDS.v_width)[:, None]
        tl.store(target + first_feature[None, :], first_sum, mask=inside[:, None])
        tl.store(target + second_feature[None, :], second_sum, mask=inside[:, None])


@triton.jit(do_not_specialize=["ranges", "partial_rows"])
def combine(
    partial_out,
    partial_top,
    partial_total,
    sink,
    out,
    lse,
    ranges,
    partial_rows,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    RANGES: tl.constexpr,
    CONVENTION: tl.constexpr,
):
    """One query row from its ranges; RANGES is their number padded to a power of two."""
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, RANGES)
    at = number.to(tl.int64) * partial_rows + row
    totals = tl.load(partial_total + at, mask=number < ranges, other=0.0)
    filled = totals != 0
    tops = tl.load(partial_top + at, mask=(number < ranges) & filled, other=float("-inf"))
    # max() may drop a NaN, which the sum below keeps.
    top = tl.max(tops, 0)
    reference = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(totals * tl.where(filled, tl.exp2(tops - reference), 0.0), 0)
    feature = tl.arange(0, WIDTH)
    acc = tl.zeros([WIDTH], tl.float32)
    for i in tl.range(0, ranges):
        part_total = tl.load(partial_total + i * partial_rows + row)
        if part_total != 0:
            weight = tl.exp2(tl.load(partial_top + i * partial_rows + row) - reference)
            acc += tl.load(partial_out + (i * partial_rows + row) * WIDTH + feature) * weight
    empty = total == 0
    divisor = tl.where(empty, 1.0, total)
    log2_total = tl.where(empty, float("-inf"), reference + tl.log2(divisor))
    factor = tl.where(empty, 0.0, 1.0 / divisor)
    result = log2_total
    if sink is not None:
        log2_sink = tl.load(sink + row % HEADS).to(tl.float32) * _LOG2_E
        # Without a key the output is 0 whatever the sink.
        shift = tl.exp2(log2_sink - tl.where(empty, 0.0, log2_total))
        share = tl.where(log2_sink == float("inf"), 0.0, 1.0 / (1.0 + shift))
        factor = factor * share
        if CONVENTION == _FLASHINFER:
            high = tl.maximum(log2_total, log2_sink)
            safe = tl.where(tl.abs(high) == float("inf"), 0.0, high)
            both = tl.log2(tl.exp2(log2_total - safe) + tl.exp2(log2_sink - safe)) + safe
            result = tl.where(tl.abs(high) == float("inf"), high, both)
    tl.store(out + row * WIDTH + feature, round_to_dtype(acc * factor, out.dtype.element_ty))
    if CONVENTION != _FLASHINFER:
        result = result * _LN_2
    if CONVENTION == _FLASHMLA:
        result = tl.where(empty, float("inf"), result)
    tl.store(lse + row, result)


@dataclass(frozen=True)
class KeyList:
    """Slots of one cache to attend to.

    Attributes:
        cache: Where they are.
        indices: int32 [batch, query_len, most], slots; those that are negative or beyond the cache
            are no keys. One list a query token.
        lengths: int32 [batch]: how many leading entries of its lists count; None: all.
    """

    cache: RecordCache
    indices: Tensor
    lengths: Tensor | None = None


@dataclass(frozen=True)
class _Part:
    """What a launch of `split` attends to: `number` lists for `query_len` tokens each."""

    cache: RecordCache
    keys: Tensor
    lengths: Tensor | None
    most: int
    sparse: bool
    causal: bool
    number: int
    query_len: int


def dense_decode(
    q: Tensor,
    cache: RecordCache,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    causal: bool = True,
    sink: Tensor | None = None,
    lse_convention: LseConvention = "natural",
    num_splits: int | None = None,
    out_dtype: torch.dtype | None = None,
    allocate: Allocate = allocate_scratch,
) -> tuple[Tensor, Tensor]:
    """Attend to the tokens of sequences in a paged cache of records.

    Args:
        q: [batch, query_len, heads, width], bfloat16, float16 or float32; width is that of latent
            and rope part together, features consecutive.
        cache: Latents and rope parts of the keys.
        block_table: int32 [batch, pages]: the sequence's pages in order. Entries past its length
            are not read.
        seq_lens: int32 [batch], the new tokens included; at most `pages · page_size` count.
        scale: Softmax scale.
        causal: Whether a query token sees none after itself; the queries are the last ones.
        sink: [heads], in units of scores: another key without a value; +inf leaves output 0.
        lse_convention: See `LseConvention`.
        num_splits: Ranges that a sequence is cut into; None: by shapes alone, so that a captured
            graph holds for any lengths.
        out_dtype: None: that of q.
        allocate: Hands out scratch; `scratch_shapes` says how much is needed.

    Returns:
        Output [batch, query_len, heads, v_width] and LSE fp32 [batch, query_len, heads].

    Raises:
        RecordError: Shapes, dtypes or devices do not fit.
    """
    batch, query_len = _check_queries(q, cache)
    _check_keys("block_table", block_table, (batch, None), q.device)
    _check_keys("seq_lens", seq_lens, (batch,), q.device)
    part = _Part(
        cache,
        block_table,
        seq_lens,
        block_table.shape[1] * cache.page_size,
        sparse=False,
        causal=causal,
        number=batch,
        query_len=query_len,
    )
    return _attend(q, [part], scale, sink, lse_convention, num_splits, out_dtype, allocate)


def sparse_decode(
    q: Tensor,
    keys: KeyList,
    extra: KeyList | None = None,
    *,
    scale: float,
    sink: Tensor | None = None,
    lse_convention: LseConvention = "natural",
    num_splits: int | None = None,
    out_dtype: torch.dtype | None = None,
    allocate: Allocate = allocate_scratch,
) -> tuple[Tensor, Tensor]:
    """Attend to chosen tokens, each query token to its own.

    Args:
        q: As for `dense_decode`.
        keys: Slots to attend to.
        extra: More of them in another cache, whose records may have another format of the same
            widths.
        scale: Softmax scale.
        sink: As for `dense_decode`.
        lse_convention: As for `dense_decode`.
        num_splits: Ranges that each list is cut into.
        out_dtype: None: that of q.
        allocate: As for `dense_decode`.

    Returns:
        As `dense_decode`.

    Raises:
        RecordError: Shapes, dtypes or devices do not fit, or the caches hold other widths.
    """
    parts = []
    for name, given in (("indices", keys), ("extra indices", extra)):
        if given is None:
            continue
        batch, query_len = _check_queries(q, given.cache)
        _check_keys(name, given.indices, (batch, query_len, None), q.device)
        lengths = given.lengths
        if lengths is not None:
            _check_keys(f"lengths of the {name}", lengths, (batch,), q.device)
            # A list a query token.
            lengths = lengths.repeat_interleave(query_len) if query_len > 1 else lengths
        parts.append(
            _Part(
                given.cache,
                given.indices.reshape(batch * query_len, -1),
                lengths,
                given.indices.shape[2],
                sparse=True,
                causal=False,
                number=batch * query_len,
                query_len=1,
            )
        )
    if extra is not None and extra.cache.format.v_width != keys.cache.format.v_width:
        raise RecordError(
            f"{keys.cache.format.name} and {extra.cache.format.name} have V of "
            f"{keys.cache.format.v_width} and {extra.cache.format.v_width} values; give caches "
            "with equal widths"
        )
    return _attend(q, parts, scale, sink, lse_convention, num_splits, out_dtype, allocate)


def scratch_shapes(
    batch: int,
    query_len: int,
    heads: int,
    v_width: int,
    capacity: int,
    device: torch.device,
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Scratch that no `dense_decode` of these sizes exceeds.

    Args:
        batch: Sequences.
        query_len: Query tokens of each.
        heads: Query heads.
        v_width: Of the record format.
        capacity: Tokens that a row of the block table can hold.
        device: Where it runs.
    """
    rows = query_len * heads
    capability, multiprocessors = device_properties(device)
    splits = [
        _shape(rows, device, size).splits(batch, rows, capacity, multiprocessors) for size in (2, 4)
    ]
    hopper = hopper_module("record_hopper", capability)
    if hopper is not None:
        for four_bit in (True, False):
            shape = hopper.configuration(rows, four_bit).shape
            splits.append(shape.splits(batch, rows, capacity, multiprocessors))
    return partial_shapes(max(splits), batch * rows, v_width)


def _shape(rows: int, device: torch.device, element_bytes: int) -> ProgramShape:
    """Rows and tokens of a program; few registers and little shared memory for wide elements."""
    shared = _shared(device)
    small, large = shared < 163 << 10, shared >= 227 << 10
    if element_bytes > 2:
        return ProgramShape(16, 16 if small else 32)
    return ProgramShape(
        16 if rows <= 16 else 64 if rows > 32 and large else 32, 32 if small else 64
    )


def _stages(device: torch.device) -> int:
    """Of the software pipeline."""
    return 1 if _shared(device) < 227 << 10 else 2


def _shared(device: torch.device) -> int:
    return shared_bytes(divmod(device_properties(device)[0], 10))


def _attend(
    q: Tensor,
    parts: list[_Part],
    scale: float,
    sink: Tensor | None,
    lse_convention: LseConvention,
    num_splits: int | None,
    out_dtype: torch.dtype | None,
    allocate: Allocate,
) -> tuple[Tensor, Tensor]:
    batch, query_len, heads, _ = q.shape
    width = parts[0].cache.format.v_width
    if lse_convention not in _LSE:
        raise RecordError(f"lse_convention is {lse_convention!r}; give one of {', '.join(_LSE)}")
    if sink is not None and (sink.shape != (heads,) or sink.device != q.device):
        raise RecordError(
            f"sink must be [{heads}] on {q.device}, found {list(sink.shape)} on {sink.device}"
        )
    if num_splits is not None and num_splits < 1:
        raise RecordError(f"num_splits is {num_splits}; it must be at least 1")
    out = torch.empty(batch, query_len, heads, width, dtype=out_dtype or q.dtype, device=q.device)
    lse = torch.empty(batch, query_len, heads, dtype=torch.float32, device=q.device)
    rows = batch * query_len * heads
    if not rows:
        return out, lse
    capability, multiprocessors = device_properties(q.device)
    # bfloat16 holds every code times its scale; float16 does not.
    dtype = torch.float32 if q.dtype == torch.float32 else torch.bfloat16
    plans = []
    for part in parts:
        own = part.query_len * heads
        fields = describe(part.cache.format, part.cache.page_size)
        hopper = None
        if dtype == torch.bfloat16:
            hopper = hopper_module("record_hopper", capability)
        chosen = None
        if hopper is not None and hopper.serves(part.cache, fields):
            chosen = hopper.configuration(own, hopper.has_four_bits(fields))
            shape = chosen.shape
        else:
            hopper, shape = None, _shape(own, q.device, dtype.itemsize)
        most = max(part.most, 1)
        splits = num_splits or shape.splits(part.number, own, most, multiprocessors)
        plans.append((part, fields, hopper, chosen, shape, splits))
    ranges = sum(splits for *_, splits in plans)
    wanted = partial_shapes(ranges, rows, width)
    partial_out, partial_top, partial_total = allocate(wanted, q.device)
    flat = q.flatten(0, 1)
    first = 0
    for part, fields, hopper, chosen, shape, splits in plans:
        cache = part.cache
        row_blocks = triton.cdiv(part.query_len * heads, shape.rows)
        arguments: dict[str, object] = {
            "q": flat,
            "keys": part.keys,
            "lengths": part.lengths,
            "partial_out": partial_out,
            "partial_top": partial_top,
            "partial_total": partial_total,
            "scale_log2": scale * math.log2(math.e),
            "outer": cache.outer_scale,
            "num_splits": splits,
            "row_blocks": row_blocks,
            "first_range": first,
            "partial_rows": rows,
            "query_len": part.query_len,
            "most": part.most,
            "num_slots": cache.num_slots,
            "q_token_stride": flat.stride(0),
            "q_head_stride": flat.stride(1),
            "key_stride": part.keys.stride(0),
            "HEADS": heads,
            "FIELDS": fields,
            "PAGE_SIZE": cache.page_size,
            "SPARSE": part.sparse,
            "CAUSAL": part.causal and part.query_len > 1,
            "SCALED": cache.outer_scale != 1.0,
        }
        grid = (row_blocks * splits * part.number,)
        if hopper is not None and chosen is not None:
            words = cache.data.view(torch.int32)
            hopper.split_hopper[grid](
                **arguments, **chosen.launch(), words=words, page_words=words.stride(0)
            )
        else:
            split[grid](
                **arguments,
                cache=cache.data,
                page_stride=cache.data.stride(0),
                STORED_DTYPE=TRITON_DTYPES[cache.rope_dtype],
                DTYPE=TRITON_DTYPES[dtype],
                ROWS=shape.rows,
                TOKENS=shape.tokens,
                num_warps=8 if shape.rows > 16 else 4,
                num_stages=_stages(q.device),
            )
        first += splits
    combine[(rows,)](
        partial_out,
        partial_top,
        partial_total,
        sink,
        out,
        lse,
        ranges,
        rows,
        HEADS=heads,
        WIDTH=width,
        # One variant for every number that is chosen by shapes.
        RANGES=max(2 * MAX_SPLITS, triton.next_power_of_2(ranges)),
        CONVENTION=_LSE[lse_convention],
        num_warps=4,
    )
    return out, lse


def _check_queries(q: Tensor, cache: RecordCache) -> tuple[int, int]:
    fmt = cache.format
    if q.dim() != 4 or q.shape[3] != fmt.width or q.dtype not in TRITON_DTYPES:
        raise RecordError(
            f"queries of {fmt.name} ({fmt.geometry}) must be [batch, query_len, heads, "
            f"{fmt.width}] in bfloat16, float16 or float32, found "
            f"{str(q.dtype).removeprefix('torch.')} {list(q.shape)}"
        )
    if q.numel() and (q.stride(3) != 1 or q.stride(0) != q.shape[1] * q.stride(1)):
        raise RecordError(
            f"queries have strides {list(q.stride())}: features must be consecutive and tokens "
            "evenly spaced; make them contiguous"
        )
    if q.device != cache.data.device:
        raise RecordError(
            f"queries are on {q.device}, the cache on {cache.data.device}; move one of them"
        )
    return q.shape[0], q.shape[1]


def _check_keys(name: str, x: Tensor, shape: tuple[int | None, ...], device: torch.device) -> None:
    fits = x.dim() == len(shape) and all(
        wanted is None or wanted == found for wanted, found in zip(shape, x.shape, strict=True)
    )
    if not fits or x.dtype != torch.int32 or x.device != device:
        wanted = ", ".join("*" if n is None else str(n) for n in shape)
        raise RecordError(
            f"{name} must be int32 [{wanted}] on {device}, found "
            f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)} on {x.device}"
        )
    if x.numel() and x.stride(-1) != 1:
        raise RecordError(f"{name} has strides {list(x.stride())}; its rows must be consecutive")


# --- reading a range of every sequence


@triton.jit(
    do_not_specialize=["num_slots", "most_pages", "table_stride"],
    do_not_specialize_on_alignment=["block_table", "starts", "cu_lengths"],
)
def _gather_kernel(
    cache,
    block_table,
    starts,
    cu_lengths,
    out,
    outer,
    num_slots,
    most_pages,
    table_stride,
    page_stride,
    out_stride,
    FIELDS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    STORED_DTYPE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One program: TOKENS tokens of one sequence."""
    number = tl.program_id(1)
    first_row = tl.load(cu_lengths + number)
    length = tl.load(cu_lengths + number + 1) - first_row
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    exists = token < length
    position = token
    if starts is not None:
        position += tl.load(starts + number)
    present, start, place = _keys(
        block_table + number.to(tl.int64) * table_stride,
        position,
        tl.where(exists, most_pages * PAGE_SIZE, 0),
        num_slots,
        page_stride,
        False,
        PAGE_SIZE,
    )
    base = cache + start
    LATENT: tl.constexpr = FIELDS.latent
    ROPE: tl.constexpr = FIELDS.rope
    first, second = load_halves(base, place, present, FIELDS, STORED_DTYPE)
    first_feature, second_feature = half_features(FIELDS)
    first *= tl.where(first_feature < LATENT.width, outer, 1.0)[None, :]
    second *= tl.where(second_feature < LATENT.width, outer, 1.0)[None, :]
    target = out + ((first_row + token).to(tl.int64) * out_stride)[:, None]
    DTYPE: tl.constexpr = out.dtype.element_ty
    tl.store(target + first_feature[None, :], round_to_dtype(first, DTYPE), mask=exists[:, None])
    tl.store(target + second_feature[None, :], round_to_dtype(second, DTYPE), mask=exists[:, None])
    if ROPE is not None and FIELDS.v_width == LATENT.width:
        rope = load_rope(base, place, present, FIELDS, STORED_DTYPE)
        feature = tl.arange(0, triton.next_power_of_2(ROPE.width))
        mask = exists[:, None] & (feature < ROPE.width)[None, :]
        tl.store(target + LATENT.width + feature[None, :], round_to_dtype(rope, DTYPE), mask=mask)


def gather(
    cache: RecordCache,
    block_table: Tensor,
    cu_lengths: Tensor,
    max_length: int,
    *,
    starts: Tensor | None = None,
    out: Tensor,
) -> Tensor:
    """Read a range of every sequence from the cache, dequantized, for example for prefill.

    Args:
        cache: Where to read.
        block_table: int32 [batch, pages].
        cu_lengths: int32 [batch + 1]: rows of `out` where each sequence's range begins and ends.
        max_length: At least the length of the longest range.
        starts: int32 [batch], first position of each range; None: 0.
        out: [rows, width], latent and rope part side by side, of any floating-point dtype; rows
            beyond the last range stay. Positions that no page of the cache holds give zeros.

    Returns:
        `out`.

    Raises:
        RecordError: Shapes, dtypes or devices do not fit.
    """
    fmt = cache.format
    batch = block_table.shape[0]
    _check_keys("block_table", block_table, (batch, None), cache.data.device)
    _check_keys("cu_lengths", cu_lengths, (batch + 1,), cache.data.device)
    if starts is not None:
        _check_keys("starts", starts, (batch,), cache.data.device)
    if (
        out.dim() != 2
        or out.shape[1] != fmt.width
        or out.dtype not in TRITON_DTYPES
        or out.device != cache.data.device
        or (out.numel() and out.stride(1) != 1)
    ):
        raise RecordError(
            f"out must be [rows, {fmt.width}] in bfloat16, float16 or float32 on "
            f"{cache.data.device}, features consecutive, found "
            f"{str(out.dtype).removeprefix('torch.')} {list(out.shape)} on {out.device}, strides "
            f"{list(out.stride())}"
        )
    if max_length > 0 and batch:
        tokens = 16
        _gather_kernel[(triton.cdiv(max_length, tokens), batch)](
            cache.data,
            block_table,
            starts,
            cu_lengths,
            out,
            cache.outer_scale,
            cache.num_slots,
            block_table.shape[1],
            block_table.stride(0),
            cache.data.stride(0),
            out.stride(0),
            FIELDS=describe(fmt, cache.page_size),
            PAGE_SIZE=cache.page_size,
            STORED_DTYPE=TRITON_DTYPES[cache.rope_dtype],
            TOKENS=tokens,
            num_warps=4,
        )
    return out


__all__ = [
    "KeyList",
    "LseConvention",
    "dense_decode",
    "gather",
    "scratch_shapes",
    "sparse_decode",
]
