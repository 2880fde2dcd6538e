"""Attention over records for Hopper GPUs, in Gluon.

The portable kernel of `record_decode` keeps decoded keys in registers, where each product wants
another layout of them, and decodes them once for each. Here a tile of 64 keys is decoded once, into
shared memory, from where Hopper's matrix unit reads it for both products. Keys are the rows of the
matrix unit's tiles, of which it takes 64 at least, query rows the columns, of which it takes any
multiple of 8: S transposed is K·Qᵀ, O transposed is Vᵀ·P.

    records ─▶ registers ─▶ shared K = V ─▶ K·Qᵀ ─▶ P ─▶ Vᵀ·P

With few query rows two programs share a multiprocessor, one decodes while the other multiplies, and
the next records are on their way meanwhile; many rows share what is decoded. Numbers, ranges and
partial results are as in `record_decode`, but for an outer scale that each record has: it
multiplies scores and P, not keys.

Four-bit elements are decoded in bfloat16, times 2^-8, so that products with scales neither overflow
nor lose a bit. Eight neighbouring lanes read 128 bytes of a record and store what they decode where
it meets no conflict of banks: in an order of their own (`_feature`), which queries are put into and
results taken out of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mla_quant.kernels.decode_shapes import ProgramShape
from mla_quant.kernels.operand_cache import decode_e4m3
from mla_quant.kernels.record_fields import AS_IS, IS_E2M1, IS_E4M3, RecordFields, ue8m0_bits

if TYPE_CHECKING:
    from mla_quant.records import RecordCache

# Triton 3.7 renamed it.
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

TOKENS = gl.constexpr(64)
WIDTH = gl.constexpr(512)
ROPE_WIDTH = gl.constexpr(64)
_SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
_SWIZZLED_WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
_E2M1_UNIT = gl.constexpr(2.0**-8)
# What decoding leaves of an E2M1 element is 2^-126 of it.
_E2M1_SCALE = gl.constexpr(2.0 ** (126 - 8))


@dataclass(frozen=True)
class Configuration:
    """Of programs.

    Attributes:
        rows: Query rows of a program.
        warps: Warps of a program.
        ahead: Tiles whose records are on their way while one is computed.
        programs: How many share a multiprocessor.
    """

    rows: int
    warps: int
    ahead: int
    programs: int

    @property
    def shape(self) -> ProgramShape:
        """What ranges are chosen by."""
        return ProgramShape(self.rows, TOKENS.value, programs=self.programs)

    def launch(self) -> dict[str, int]:
        """Arguments of a launch."""
        return {"ROWS": self.rows, "AHEAD": self.ahead, "num_warps": self.warps}


def configuration(rows: int, four_bit: bool) -> Configuration:
    """For lists that `rows` query rows share, of latents in four or eight bits.

    With few rows two programs share a multiprocessor, one decodes while the other multiplies. Many
    rows share what is decoded, and leave no registers for records on their way, which eight-bit
    codes take twice as many of.
    """
    if rows <= 16:
        return Configuration(16, 4, 2 if four_bit else 1, 2)
    if rows <= 32 and four_bit:
        return Configuration(32, 4, 1, 2)
    return Configuration(64, 8, 0, 1)


def has_four_bits(fields: RecordFields) -> bool:
    """Whether codes of the latent have four bits, not eight."""
    return bool(fields.latent.element == IS_E2M1.value)


def serves(cache: RecordCache, fields: RecordFields) -> bool:
    """Whether this kernel reads such records."""
    latent, rope = fields.latent, fields.rope
    if fields.v_width != WIDTH.value or latent.scale is None:
        return False
    joint = fields.v_width > latent.width
    places = [latent.at, latent.stride, cache.data.stride(0), cache.data.data_ptr()]
    scale = latent.scale
    if has_four_bits(fields):
        whole = scale.interleave == 1 or scale.interleave * 8 == scale.blocks
        if scale.block != 16 or scale.code != IS_E4M3.value or not whole:
            return False
        places += [4 * scale.at, 4 * scale.stride]
    elif scale.block not in (32, 64, 128) or scale.interleave != 1:
        return False
    elif scale.bytes_each == 4:
        places += [4 * scale.at, 4 * scale.stride]
    if rope is not None:
        bf16 = rope.element == AS_IS.value and str(cache.rope_dtype) == "torch.bfloat16"
        e4m3 = rope.element == IS_E4M3.value and not joint
        scaled = rope.scale is not None and (rope.scale.blocks, rope.scale.bytes_each) != (1, 4)
        if rope.width != ROPE_WIDTH.value or not (bf16 or e4m3) or scaled:
            return False
        places += [rope.at, rope.stride]
    elif joint:
        return False
    return all(place % 16 == 0 for place in places)


@gluon.constexpr_function
def _rows(warps):
    """Bases of rows of a tile for warps, then for registers; two are those of lanes."""
    return [4 << i for i in range(4) if 1 << i < warps], [
        4 * warps << i for i in range(4) if 4 * warps << i < 64
    ]


@gluon.constexpr_function
def _layout(words, warps):
    """Of codes in registers, int32 [TOKENS, words]: eight lanes have neighbouring vectors of a row.

    Rows are in the same threads for every segment.
    """
    across, down = _rows(warps)
    vector = min(4, words // 8)
    low = [[0, 1 << i] for i in range(vector.bit_length() - 1)]
    high = [[0, 8 * vector << i] for i in range((words // (8 * vector)).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[*low, *high, *[[row, 0] for row in down]],
        lane_bases=[[0, vector], [0, 2 * vector], [0, 4 * vector], [1, 0], [2, 0]],
        warp_bases=[[row, 0] for row in across],
        block_bases=[],
        shape=[64, words],
    )


@gluon.constexpr_function
def _blocked(shape, warps):
    """The same with words as [blocks, words of a block]."""
    blocks, words = shape
    flat = _layout(blocks * words, warps)

    def split(bases):
        return [[row, word // words, word % words] for row, word in bases]

    return gl.DistributedLinearLayout(
        reg_bases=split(flat.reg_bases),
        lane_bases=split(flat.lane_bases),
        warp_bases=split(flat.warp_bases),
        block_bases=[],
        shape=[64, blocks, words],
    )


@gluon.constexpr_function
def _pairs(segment):
    """How many pairs of values a word of codes has."""
    return {AS_IS.value: 1, IS_E4M3.value: 2, IS_E2M1.value: 4}[segment.element]


@gluon.constexpr_function
def _shape(segment):
    """Blocks, padded, and words of a block of the codes of a segment."""
    per_word = {AS_IS.value: 2, IS_E4M3.value: 4, IS_E2M1.value: 8}[segment.element]
    if segment.width == ROPE_WIDTH.value:
        return 1, segment.width // per_word
    return WIDTH.value // segment.scale.block, segment.scale.block // per_word


@gluon.jit
def _as(x, layout: gl.constexpr):
    """The same registers under another name."""
    if x.dtype == gl.int1:
        return gl.convert_layout(x.to(gl.int32), layout, assert_trivial=True) != 0
    else:
        return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def _slots(keys, start, tokens, end, num_slots, SPARSE: gl.constexpr, PAGE_SIZE: gl.constexpr):
    """Pages and places of the keys at positions `start + tokens`, page -1 where there is none."""
    position = start + tokens
    there = position < end
    if SPARSE:
        slot = gl.load(keys + position, mask=there, other=-1)
        there = there & (slot >= 0) & (slot < num_slots)
        page, place = slot // PAGE_SIZE, slot % PAGE_SIZE
    elif PAGE_SIZE % TOKENS == 0:
        page = gl.load(keys + start // PAGE_SIZE, mask=start < end, other=-1)
        there = there & ((page >= 0) & (page < num_slots // PAGE_SIZE))
        place = start % PAGE_SIZE + tokens
    else:
        page = gl.load(keys + position // PAGE_SIZE, mask=there, other=-1)
        there = there & (page >= 0) & (page < num_slots // PAGE_SIZE)
        place = position % PAGE_SIZE
    return gl.where(there, page, -1), place


@gluon.jit
def _word_at(words, page, place, page_words, AT: gl.constexpr, STRIDE: gl.constexpr):
    """Pointers to the first word of a field, by row."""
    offset = gl.maximum(page, 0).to(gl.int64) * page_words + place * (STRIDE // 4) + AT // 4
    if AT % 16 == 0 and STRIDE % 16 == 0:
        offset = gl.multiple_of(offset, 4)
    return words + offset


@gluon.jit
def _bytes_at(words, page, place, page_words, AT: gl.constexpr, STRIDE: gl.constexpr):
    """Pointers to the first byte of a field, by row."""
    start = words + gl.maximum(page, 0).to(gl.int64) * page_words
    return start.to(gl.pointer_type(gl.uint8), bitcast=True) + place * STRIDE + AT


@gluon.jit
def _load_words(words, page, place, page_words, SEGMENT: gl.constexpr):
    """Codes of a segment, int32 [TOKENS, blocks, words of a block]; 0 if absent."""
    SHAPE: gl.constexpr = _shape(SEGMENT)
    WORDS: gl.constexpr = SHAPE[0] * SHAPE[1]
    HELD: gl.constexpr = SEGMENT.width // (2 * _pairs(SEGMENT))
    layout: gl.constexpr = _layout(WORDS, gl.num_warps())
    at = _word_at(words, page, place, page_words, SEGMENT.at, SEGMENT.stride)
    at = _as(at, gl.SliceLayout(1, layout))[:, None]
    there = _as(page >= 0, gl.SliceLayout(1, layout))[:, None]
    word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, layout))[None, :]
    if HELD < WORDS:
        there = there & (word < HELD)
    codes = gl.load(at + word, mask=there, other=0)
    return _as(gl.reshape(codes, [TOKENS, SHAPE[0], SHAPE[1]]), _blocked(SHAPE, gl.num_warps()))


@gluon.constexpr_function
def _spread(interleave, warps):
    """Of the bytes of E2M1's 32 block scales as words have them, [TOKENS, words, bytes].

    Blocks are numbered 4 · group + part, as threads have their codes. Without interleaving a word
    has the parts of a group, else four groups of a part.
    """
    across, down = _rows(warps)
    if interleave == 1:
        registers, lanes = [[0, 0, 1], [0, 4, 0]], [[0, 0, 2], [0, 1, 0], [0, 2, 0]]
    else:
        registers, lanes = [[0, 1, 0], [0, 2, 0]], [[0, 4, 0], [0, 0, 1], [0, 0, 2]]
    return gl.DistributedLinearLayout(
        reg_bases=[*registers, *[[row, 0, 0] for row in down]],
        lane_bases=[*lanes, [1, 0, 0], [2, 0, 0]],
        warp_bases=[[row, 0, 0] for row in across],
        block_bases=[],
        shape=[64, 8, 4],
    )


@gluon.constexpr_function
def _stored_scales(interleave, shape, words_of_four, warps):
    """How many elements a row's block scales are padded to when loaded, and their layout."""
    if words_of_four:
        return 8, gl.SliceLayout(2, _spread(interleave, warps))
    return shape[0], gl.SliceLayout(2, _blocked(shape, warps))


@gluon.jit
def _load_scales(words, page, place, page_words, SEGMENT: gl.constexpr):
    """What the block scales of a segment are made of by `_scales`; 0 if absent.

    Words of four of E2M1's, else one by one.
    """
    SCALE: gl.constexpr = SEGMENT.scale
    IN_FOURS: gl.constexpr = SEGMENT.element == IS_E2M1
    STORED: gl.constexpr = _stored_scales(
        SCALE.interleave, _shape(SEGMENT), IN_FOURS, gl.num_warps()
    )
    PADDED: gl.constexpr = STORED[0]
    layout: gl.constexpr = STORED[1]
    HELD: gl.constexpr = SCALE.blocks // 4 if IN_FOURS else SCALE.blocks
    if IN_FOURS or SCALE.code == AS_IS:
        at = _word_at(words, page, place, page_words, SCALE.at, SCALE.stride)
    else:
        at = _bytes_at(words, page, place, page_words, SCALE.at, SCALE.stride)
    number = gl.arange(0, PADDED, layout=gl.SliceLayout(0, layout))[None, :]
    there = _as(page >= 0, gl.SliceLayout(1, layout))[:, None]
    if HELD < PADDED:
        there = there & (number < HELD)
    return gl.load(_as(at, gl.SliceLayout(1, layout))[:, None] + number, mask=there, other=0)


@gluon.jit
def _scales(loaded, SEGMENT: gl.constexpr):
    """Block scales [TOKENS, blocks, 1]: of E2M1 pairs of bfloat16, else fp32."""
    SCALE: gl.constexpr = SEGMENT.scale
    SHAPE: gl.constexpr = _shape(SEGMENT)
    if SEGMENT.element == IS_E2M1:
        spread: gl.constexpr = _spread(SCALE.interleave, gl.num_warps())
        shift = 8 * gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, spread)))
        code = gl.expand_dims(loaded, 2) >> shift[None, None, :]
        if SCALE.interleave != 1:
            # [part, half of groups, group of a half] to [group, part].
            code = gl.permute(gl.reshape(code, [TOKENS, 4, 2, 4]), [0, 2, 3, 1])
        scale = gl.inline_asm_elementwise(
            _DECODE_SCALES, "=r,=r,r,r", [code], dtype=gl.int32, is_pure=True, pack=2
        )
        scale = gl.reshape(scale, [TOKENS, SHAPE[0]])
    elif SCALE.code == AS_IS:
        scale = loaded.to(gl.float32, bitcast=True)
    elif SCALE.code == IS_E4M3:
        scale = decode_e4m3(loaded.to(gl.int32))
    else:
        scale = ue8m0_bits(loaded.to(gl.int32)).to(gl.float32, bitcast=True)
    return gl.expand_dims(_as(scale, gl.SliceLayout(2, _blocked(SHAPE, gl.num_warps()))), 2)


@gluon.jit
def _load_records(words, page, place, page_words, LATENT: gl.constexpr, ROPE: gl.constexpr):
    """Codes and stored scales of the latent, codes and scale of the rope part (else 0)."""
    stored = _load_scales(words, page, place, page_words, LATENT)
    codes = _load_words(words, page, place, page_words, LATENT)
    if ROPE is None:
        return codes, stored, 0, 0
    else:
        layout: gl.constexpr = gl.SliceLayout(
            1, gl.SliceLayout(2, _blocked(_shape(ROPE), gl.num_warps()))
        )
        if ROPE.scale is None:
            scale = gl.full([TOKENS], 1.0, gl.float32, layout=layout)
        else:
            at = _word_at(words, page, place, page_words, ROPE.scale.at, ROPE.scale.stride)
            scale = gl.load(_as(at, layout), mask=_as(page >= 0, layout), other=0)
            scale = scale.to(gl.float32, bitcast=True)
        rope = _load_words(words, page, place, page_words, ROPE)
        return codes, stored, rope, gl.expand_dims(scale[:, None], 2)


# The lowest bytes of $2 and $3, E4M3 codes, times `_E2M1_SCALE` to bfloat16, each twice.
_DECODE_SCALES = gl.constexpr(
    "{ .reg .b16 c, a, b; .reg .b32 x; .reg .f32 p, q; prmt.b32 x, $2, $3, 0x0040;"
    "cvt.u16.u32 c, x; cvt.rn.f16x2.e4m3x2 x, c; mov.b32 {a, b}, x;"
    "cvt.f32.f16 p, a; cvt.f32.f16 q, b; mul.f32 p, p, 0f7A800000; mul.f32 q, q, 0f7A800000;"
    "cvt.rn.bf16x2.f32 $0, p, p; cvt.rn.bf16x2.f32 $1, q, q; }"
)
# Eight nibbles of $4 to four pairs of bfloat16, $5 their scale twice: nibble i and i + 4 a pair.
# Multiplying copies a nibble to where a bfloat16 has its sign and, 2^-126 of it, its magnitude.
_DECODE_E2M1 = gl.constexpr(
    "{ .reg .b32 y, t, z; mov.b32 z, 0x80008000; shr.u32 y, $4, 8;"
    + "".join(
        f"and.b32 t, {source}, {mask}; mul.lo.u32 t, t, {factor}; and.b32 t, t, 0x81C081C0;"
        f"fma.rn.bf16x2 ${i}, t, $5, z;"
        for i, (source, mask, factor) in enumerate(
            (source, mask, factor)
            for source in ("$4", "y")
            for mask, factor in (("0x000F000F", 4160), ("0x00F000F0", 260))
        )
    )
    + "}"
)
# Four E4M3 codes of $2 times fp32 $3 to two pairs of bfloat16.
_DECODE_E4M3 = gl.constexpr(
    "{ .reg .b16 l, h, a, b; .reg .b32 x, y; .reg .f32 p, q, r, s; mov.b32 {l, h}, $2;"
    "cvt.rn.f16x2.e4m3x2 x, l; cvt.rn.f16x2.e4m3x2 y, h;"
    "mov.b32 {a, b}, x; cvt.f32.f16 p, a; cvt.f32.f16 q, b;"
    "mov.b32 {a, b}, y; cvt.f32.f16 r, a; cvt.f32.f16 s, b;"
    "mul.f32 p, p, $3; mul.f32 q, q, $3; mul.f32 r, r, $3; mul.f32 s, s, $3;"
    "cvt.rn.bf16x2.f32 $0, q, p; cvt.rn.bf16x2.f32 $1, s, r; }"
)


@gluon.jit
def _decode(codes, scales, SEGMENT: gl.constexpr):
    """Codes [TOKENS, blocks, words] to pairs of bfloat16, int32 [TOKENS, pairs]: see `_feature`."""
    if SEGMENT.element == AS_IS:
        pairs = codes
    elif SEGMENT.element == IS_E2M1:
        a, b, c, d = gl.inline_asm_elementwise(
            _DECODE_E2M1,
            "=r,=r,=r,=r,r,r",
            [codes, scales],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
            is_pure=True,
            pack=1,
        )
        pairs = gl.join(gl.join(a, c), gl.join(b, d))
    else:
        a, b = gl.inline_asm_elementwise(
            _DECODE_E4M3,
            "=r,=r,r,r",
            [codes, scales],
            dtype=(gl.int32, gl.int32),
            is_pure=True,
            pack=1,
        )
        pairs = gl.join(a, b)
    PLACES: gl.constexpr = _places(SEGMENT)
    pairs = gl.reshape(pairs, [TOKENS, PLACES[0], 8, PLACES[1], PLACES[2], _pairs(SEGMENT)])
    return gl.reshape(
        gl.permute(pairs, [0, 1, 3, 2, 4, 5]),
        [TOKENS, PLACES[0] * 8 * PLACES[1] * PLACES[2] * _pairs(SEGMENT)],
    )


@gluon.constexpr_function
def _places(segment):
    """How many times 8 · a vector of words a segment has, and a vector units and a unit words.

    A unit is what makes 16 bytes when decoded.
    """
    per_word = {AS_IS.value: 2, IS_E4M3.value: 4, IS_E2M1.value: 8}[segment.element]
    width = ROPE_WIDTH.value if segment.width == ROPE_WIDTH.value else WIDTH.value
    words, unit = width // per_word, 8 // per_word
    vector = min(4, words // 8)
    return words // (8 * vector), vector // unit, unit


@gluon.jit
def _feature(position, SEGMENT: gl.constexpr):
    """Which feature of a segment is at a position of a row of shared memory.

    From the slowest to the fastest, positions count: vectors of the same lane, units of a vector,
    lanes, words of a unit, pairs of a word, and the two of a pair.
    """
    PLACES: gl.constexpr = _places(SEGMENT)
    PAIRS: gl.constexpr = _pairs(SEGMENT)
    second = position % 2
    pair = position // 2 % PAIRS
    word = position // (2 * PAIRS) % PLACES[2]
    lane = position // 8 % 8
    unit = position // 64 % PLACES[1]
    high = position // (64 * PLACES[1])
    word += ((high * 8 + lane) * PLACES[1] + unit) * PLACES[2]
    if SEGMENT.element == IS_E2M1:
        return word * 8 + pair + 4 * second
    else:
        return (word * PAIRS + pair) * 2 + second


@gluon.jit
def _load_queries(
    q,
    first_token,
    first_row,
    rows,
    token_stride,
    head_stride,
    SEGMENT: gl.constexpr,
    FIRST: gl.constexpr,
    PADDED: gl.constexpr,
    HEADS: gl.constexpr,
    ROWS: gl.constexpr,
):
    """Columns for a segment of K of query rows, bfloat16 [ROWS, PADDED], else 0.

    FIRST is the segment's first column.
    """
    LANES: gl.constexpr = 32 if PADDED == WIDTH else 8
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0]
    )
    row = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    token = first_token + (row // HEADS).to(gl.int64)
    at = token * token_stride + (row % HEADS).to(gl.int64) * head_stride
    feature = _feature(gl.arange(0, PADDED, layout=gl.SliceLayout(0, layout)), SEGMENT)
    inside = (row < rows)[:, None] & (feature < SEGMENT.width)[None, :]
    x = gl.load(q + (at[:, None] + (FIRST + feature)[None, :]), mask=inside, other=0.0)
    return x.to(gl.bfloat16)


@gluon.jit(
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
def split_hopper(
    q,
    words,
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
    page_words,
    HEADS: gl.constexpr,
    FIELDS: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    SPARSE: gl.constexpr,
    CAUSAL: gl.constexpr,
    SCALED: gl.constexpr,
    ROWS: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """As `record_decode.split`; `words` are int32, as is `page_words`, a page's stride."""
    LATENT: gl.constexpr = FIELDS.latent
    ROPE: gl.constexpr = FIELDS.rope
    JOINT: gl.constexpr = FIELDS.v_width > LATENT.width
    WARPS: gl.constexpr = gl.num_warps()
    SHAPE: gl.constexpr = _shape(LATENT)
    row_layout: gl.constexpr = gl.SliceLayout(1, _layout(SHAPE[0] * SHAPE[1], WARPS))
    # Scores have 64 rows, which are those of four warps; four others have other columns.
    scores: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, WARPS // 4], instr_shape=[16, ROWS * 4 // WARPS, 16]
    )
    column: gl.constexpr = gl.SliceLayout(0, scores)
    score_row: gl.constexpr = gl.SliceLayout(1, scores)
    product: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [WARPS, 1], instr_shape=[16, ROWS, 16]
    )
    product_row: gl.constexpr = gl.SliceLayout(1, product)
    product_column: gl.constexpr = gl.SliceLayout(0, product)

    program = gl.program_id(0)
    row_block = program % row_blocks
    split_number = program // row_blocks % num_splits
    number = program // row_blocks // num_splits
    rows = query_len * HEADS
    first_row = row_block * ROWS
    first_token = number.to(gl.int64) * query_len
    q_shared = gl.allocate_shared_memory(gl.bfloat16, [ROWS, WIDTH], _SWIZZLED)
    q_shared.store(
        _load_queries(
            q,
            first_token,
            first_row,
            rows,
            q_token_stride,
            q_head_stride,
            LATENT,
            0,
            WIDTH,
            HEADS,
            ROWS,
        )
    )
    k_shared = gl.allocate_shared_memory(gl.bfloat16, [TOKENS, WIDTH], _SWIZZLED)
    k_words = k_shared._reinterpret(gl.int32, [TOKENS, WIDTH // 2], _SWIZZLED_WORDS)
    if ROPE is not None:
        q_rope_shared = gl.allocate_shared_memory(gl.bfloat16, [ROWS, ROPE_WIDTH], _SWIZZLED)
        q_rope_shared.store(
            _load_queries(
                q,
                first_token,
                first_row,
                rows,
                q_token_stride,
                q_head_stride,
                ROPE,
                LATENT.width,
                ROPE_WIDTH,
                HEADS,
                ROWS,
            )
        )
        rope_shared = gl.allocate_shared_memory(gl.bfloat16, [TOKENS, ROPE_WIDTH], _SWIZZLED)
        rope_words = rope_shared._reinterpret(gl.int32, [TOKENS, ROPE_WIDTH // 2], _SWIZZLED_WORDS)
    top_shared = gl.allocate_shared_memory(
        gl.float32, [4, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    p_shared = gl.allocate_shared_memory(
        gl.bfloat16, [TOKENS, ROWS], gl.NVMMASharedLayout(2 * ROWS, 16, 2)
    )

    unit: gl.constexpr = _E2M1_UNIT if LATENT.element == IS_E2M1 else 1.0
    latent_factor = scale_log2 * (1 / unit)
    if SCALED:
        latent_factor = latent_factor * outer
    length = most
    if lengths is not None:
        length = gl.minimum(gl.load(lengths + number), most)
    row = first_row + gl.arange(0, ROWS, layout=column)
    limit = gl.where(row < rows, length, 0)
    if CAUSAL:
        limit = limit - gl.where(row < rows, query_len - 1 - row // HEADS, 0)
    tiles = gl.cdiv(length, TOKENS)
    per_split = gl.cdiv(tiles, num_splits)
    first_tile = split_number * per_split
    last_tile = gl.minimum(first_tile + per_split, tiles)
    end = gl.minimum(last_tile * TOKENS, length)

    keys += number.to(gl.int64) * key_stride
    top = gl.full([ROWS], float("-inf"), gl.float32, layout=column)
    product_top = gl.full([ROWS], float("-inf"), gl.float32, layout=product_column)
    total = _sum_of_rows(gl.zeros([TOKENS, ROWS], gl.float32, layout=scores))
    out = gl.zeros([WIDTH, ROWS], gl.float32, layout=product)
    rope_out = gl.zeros([ROPE_WIDTH, ROWS], gl.float32, layout=product)
    tokens = gl.arange(0, TOKENS, layout=row_layout)
    score_tokens = gl.arange(0, TOKENS, layout=score_row)

    start = first_tile * TOKENS
    page, place = _slots(keys, start, tokens, end, num_slots, SPARSE, PAGE_SIZE)
    records = _load_records(words, page, place, page_words, LATENT, ROPE)
    if AHEAD > 0:
        start += TOKENS
        page, place = _slots(keys, start, tokens, end, num_slots, SPARSE, PAGE_SIZE)
    if AHEAD == 2:
        next_records = _load_records(words, page, place, page_words, LATENT, ROPE)
        start += TOKENS
        page, place = _slots(keys, start, tokens, end, num_slots, SPARSE, PAGE_SIZE)
    for tile in range(first_tile, last_tile):
        position = tile * TOKENS + score_tokens
        score_page, score_place = _slots(
            keys, tile * TOKENS, score_tokens, end, num_slots, SPARSE, PAGE_SIZE
        )
        if LATENT.outer_at >= 0:
            at = _word_at(
                words, score_page, score_place, page_words, LATENT.outer_at, LATENT.outer_stride
            )
            own = gl.load(at, mask=score_page >= 0, other=0).to(gl.float32, bitcast=True)
        if AHEAD == 0:
            records = _load_records(words, page, place, page_words, LATENT, ROPE)
            start += TOKENS
            page, place = _slots(keys, start, tokens, end, num_slots, SPARSE, PAGE_SIZE)
        codes, stored, rope, rope_scale = records
        k_words.store(_decode(codes, _scales(stored, LATENT), LATENT))
        if ROPE is not None:
            rope_words.store(_decode(rope, rope_scale, ROPE))
        fence_async_shared()
        _barrier()
        score = gl.zeros([TOKENS, ROWS], gl.float32, layout=scores)
        rope_score = score
        score = warpgroup_mma(
            k_shared, q_shared.permute((1, 0)), score, use_acc=False, is_async=True
        )
        if ROPE is not None:
            rope_score = warpgroup_mma(
                rope_shared, q_rope_shared.permute((1, 0)), rope_score, use_acc=False, is_async=True
            )
        if AHEAD == 1:
            # The next records, and where those after them are.
            records = _load_records(words, page, place, page_words, LATENT, ROPE)
            start += TOKENS
            page, place = _slots(keys, start, tokens, end, num_slots, SPARSE, PAGE_SIZE)
        if ROPE is not None:
            score, rope_score = warpgroup_mma_wait(0, deps=(score, rope_score))
        else:
            score = warpgroup_mma_wait(0, deps=(score,))
        score = score * latent_factor
        if LATENT.outer_at >= 0:
            score = score * own[:, None]
        if ROPE is not None:
            score += rope_score * scale_log2
        visible = (score_page >= 0)[:, None] & (position[:, None] < limit[None, :])
        score = gl.where(visible, score, float("-inf"))
        _share_max(score, top_shared)
        new_top = gl.maximum(top, _shared_max(top_shared, _parts(ROWS, WARPS // 4, WARPS), column))
        reference = gl.where(new_top == float("-inf"), 0.0, new_top)
        p = gl.exp2(score - reference[None, :])
        shrink = gl.exp2(top - reference)
        total = total * _as(shrink, gl.SliceLayout(0, total.type.layout))[None, :]
        total += _sum_of_rows(p)
        top = new_top
        # The same for the columns that a thread has of the output.
        new_top = gl.maximum(
            product_top, _shared_max(top_shared, _parts(ROWS, 1, WARPS), product_column)
        )
        reference = gl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = gl.exp2(product_top - reference)
        product_top = new_top
        if LATENT.outer_at >= 0:
            p = p * own[:, None]
        p_shared.store(p.to(gl.bfloat16))
        fence_async_shared()
        _barrier()
        out = warpgroup_mma(
            k_shared.permute((1, 0)), p_shared, out * shrink[None, :], is_async=True
        )
        if JOINT:
            rope_out = warpgroup_mma(
                rope_shared.permute((1, 0)), p_shared, rope_out * shrink[None, :], is_async=True
            )
        if AHEAD == 2:
            # A fence waits for loads: asked for after the last one of a tile, records are there
            # before the first one of the next.
            records = next_records
            next_records = _load_records(words, page, place, page_words, LATENT, ROPE)
            start += TOKENS
            page, place = _slots(keys, start, tokens, end, num_slots, SPARSE, PAGE_SIZE)
        if JOINT:
            out, rope_out = warpgroup_mma_wait(0, deps=(out, rope_out))
        else:
            out = warpgroup_mma_wait(0, deps=(out,))
        _barrier()

    first_partial = (first_range + split_number).to(gl.int64) * partial_rows + first_token * HEADS
    inside = row < rows
    gl.store(partial_top + first_partial + row, top, mask=inside)
    gl.store(
        partial_total + first_partial + row,
        gl.convert_layout(gl.sum(total, 0), column),
        mask=inside,
    )
    # Sums of an empty range are neither written nor read.
    if first_tile < last_tile:
        factor = 1 / unit
        if SCALED:
            factor = factor * outer
        position = gl.arange(0, WIDTH, layout=product_row)
        feature = _feature(position, LATENT)
        out_row = first_row + gl.arange(0, ROWS, layout=product_column)
        at = partial_out + ((first_partial + out_row) * WIDTH)[None, :]
        there = (out_row < rows)[None, :] & (feature < LATENT.width)[:, None]
        gl.store(at + feature[:, None], out * factor, mask=there)
        if JOINT:
            position = gl.arange(0, ROPE_WIDTH, layout=product_row)
            feature = LATENT.width + _feature(position, ROPE)
            gl.store(at + feature[:, None], rope_out, mask=(out_row < rows)[None, :])


@gluon.jit
def _sum_of_rows(p):
    """[TOKENS, ROWS] by row to [TOKENS / 2, ROWS], what one thread holds each."""
    ROWS: gl.constexpr = p.shape[1]
    return gl.reshape(gl.sum(gl.reshape(p, [4, 2, 8, ROWS]), 1), [32, ROWS])


@gluon.constexpr_function
def _parts(rows, shares, warps):
    """Of [4, rows] as threads read it: all parts of the columns that they have of a product.

    Columns are shared by `shares` groups of four warps.
    """
    columns = rows // shares
    more = [[0, 8 << i] for i in range((columns // 8).bit_length() - 1)]
    across = [[0, 0], [0, 0]] + [[0, columns if shares > 1 else 0]] * (warps // 8)
    return gl.DistributedLinearLayout(
        reg_bases=[[1, 0], [2, 0], [0, 1], *more],
        lane_bases=[[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]],
        warp_bases=across,
        block_bases=[],
        shape=[4, rows],
    )


@gluon.jit
def _share_max(score, shared):
    """Put the largest of each column of [TOKENS, ROWS] into `shared`, a part for 16 tokens.

    Nobody may be reading `shared`. Unlike with `gl.max` warps meet once.
    """
    ROWS: gl.constexpr = score.shape[1]
    shared.store(gl.max(gl.reshape(score, [4, TOKENS // 4, ROWS]), 1))
    _barrier()


@gluon.jit
def _shared_max(shared, parts: gl.constexpr, layout: gl.constexpr):
    """The largest of each column, in the layout of columns of a product."""
    return _as(gl.max(shared.load(parts), 0), layout)
