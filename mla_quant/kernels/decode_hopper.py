"""Decode for Hopper GPUs in Gluon: from an NVFP4 side cache, or from raw bf16 latents.

The portable kernel keeps decoded operands in registers, which limits it to 32 rows a program. Here
64 rows share what is in shared memory, from where Hopper's matrix unit reads it, asynchronously.
`split_records` decodes K and V into it: V while Q is multiplied by K, the next K while P is
multiplied by V; what is to be decoded next is on its way into registers meanwhile.

    records ─▶ registers ─▶ K ─▶ Q·Kᵀ ─▶ P ─▶ P·V
    records ─▶ registers ─▶ V ──────────────▶ ┘

`split_raw` has two buffers of latents, each K and V at once, that are filled asynchronously.

Only closed groups of V in records are read; the open tail of a sequence is left to the portable
kernel, as one more range. Everything about numbers, ranges and partial results is as in
`kernels.decode_kernels`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mla_quant.kernels.decode_kernels import (
    only_largest,
    power_of_two,
    quantize_p,
    score_factors,
)
from mla_quant.kernels.decode_shapes import ProgramShape
from mla_quant.kernels.numerics import BLOCK, FORMAT_NONE
from mla_quant.kernels.operand_cache import DECODE_HALVES, DECODE_PAIRS, stored_scale

# Triton 3.7 renamed it.
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

ROWS = gl.constexpr(64)
TOKENS = gl.constexpr(64)
LATENT = gl.constexpr(512)
ROPE = gl.constexpr(64)
WARPS = gl.constexpr(8)
SHAPE = ProgramShape(ROWS.value, TOKENS.value, program_cost=2.0, split_cost=0.02)
# Columns of a product belong to threads as an accumulator has them: see `kernels.decode_kernels`. A
# thread owns half a group of 16 tokens, its neighbour the other half.
_INNER = gl.constexpr(4)
_ACROSS = gl.constexpr(2)
_GROUPS = gl.constexpr(TOKENS.value // BLOCK.value)
_SHARE = gl.constexpr(LATENT.value // BLOCK.value)

_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], instr_shape=[16, 32, 16]))
_OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], instr_shape=[16, 256, 16]))
_ROW = gl.constexpr(gl.SliceLayout(1, _SCORES.value))
_OUTPUT_ROW = gl.constexpr(gl.SliceLayout(1, _OUTPUT.value))
_SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
_SWIZZLED_WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
# Who decodes what. Eight neighbouring lanes store 16 bytes each to eight rows of shared memory,
# whose swizzle spreads them over all banks. K: [tokens, blocks of 16 bytes, words], a thread has
# four blocks, so that four scales are one word.
_K = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 2, 0]],
        lane_bases=[[1, 0, 0], [2, 0, 0], [4, 0, 0], [0, 4, 0], [0, 8, 0]],
        warp_bases=[[8, 0, 0], [16, 0, 0], [32, 0, 0]],
        block_bases=[],
        shape=[64, 16, 4],
    )
)
_K_SCALES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2]],
        lane_bases=[[1, 0, 0], [2, 0, 0], [4, 0, 0], [0, 1, 0], [0, 2, 0]],
        warp_bases=[[8, 0, 0], [16, 0, 0], [32, 0, 0]],
        block_bases=[],
        shape=[64, 4, 4],
    )
)
_K_ROPE = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1]],
        lane_bases=[[1, 0, 0], [2, 0, 0], [4, 0, 0], [0, 1, 0], [8, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0], [0, 0, 2]],
        block_bases=[],
        shape=[64, 2, 4],
    )
)
# V: [tokens, features of a share, words].
_V = gl.constexpr(gl.BlockedLayout([1, 1, 2], [1, 32, 1], [8, 1, 1], [2, 1, 0]))
_RAW = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0]))
_RAW_ROPE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))


@gluon.jit
def _token_of_row(row):
    """Token of a row of K in shared memory, which is a column of Q·Kᵀ."""
    element = row % 2
    half = row // 2 % 2
    across = row // 4 % _ACROSS
    inner = row // 8 % _INNER
    outer = row // 32
    return (outer * _ACROSS + across) * BLOCK + half * 8 + inner * 2 + element


@gluon.jit
def _blocks(table, start, tokens, present_end, PAGE_SIZE: gl.constexpr):
    """Block ids of positions `start + tokens`, a scalar where one page holds them all."""
    if PAGE_SIZE % TOKENS == 0:
        return gl.load(table + start // PAGE_SIZE, mask=start < present_end, other=0)
    else:
        positions = start + tokens
        return gl.load(table + positions // PAGE_SIZE, mask=positions < present_end, other=0)


@gluon.jit
def _records(
    words, blocks, start, tokens, page_words, TOKEN_WORDS: gl.constexpr, PAGE_SIZE: gl.constexpr
):
    """Pointers to the records at positions `start + tokens`."""
    if PAGE_SIZE % TOKENS == 0:
        # Only the scalar changes from tile to tile.
        page = words + blocks.to(gl.int64) * page_words + start % PAGE_SIZE * TOKEN_WORDS
        return page + gl.multiple_of(tokens * TOKEN_WORDS, 4)
    else:
        slot = (start + tokens) % PAGE_SIZE * TOKEN_WORDS
        return words + gl.multiple_of(blocks.to(gl.int64) * page_words + slot, 4)


@gluon.jit
def _scale_pairs(scales):
    """bf16 `stored_scale` of bytes, twice in an int32."""
    bits = stored_scale(scales).to(gl.int32, bitcast=True)
    return bits | (bits >> 16)


@gluon.jit
def _load(at, present, MASKED: gl.constexpr):
    if MASKED:
        return gl.load(at, mask=present, other=0)
    else:
        return gl.load(at)


@gluon.jit
def _load_k(records, present, CODES: gl.constexpr, SCALES: gl.constexpr, MASKED: gl.constexpr):
    """Codes of K's latent part, int32 [TOKENS, 16, 4], and scales of each half, int32 [TOKENS, 4].

    `records` and `present` are [TOKENS] in the layout of `_K_SCALES`.
    """
    layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, _K))
    codes_at = gl.convert_layout(records, layout, assert_trivial=True)
    codes_there = gl.convert_layout(present.to(gl.int32), layout, assert_trivial=True) != 0
    block = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, _K)))
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, _K)))
    place = gl.expand_dims((block * 4)[None, :], 2) + word[None, None, :]
    at = gl.expand_dims(codes_at[:, None], 2) + (CODES // 4 + place)
    codes = _load(at, gl.expand_dims(codes_there[:, None], 2), MASKED)
    four = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, _K_SCALES)))
    at = records[:, None] + (SCALES // 4 + four)[None, :]
    lower = _load(at, present[:, None], MASKED)
    upper = _load(at + 4, present[:, None], MASKED)
    return codes, lower, upper


@gluon.jit
def _bytes(word):
    """The four bytes of each int32 of [TOKENS, 4], [TOKENS, 16, 1] in the layout of `_K`."""
    shift = 8 * gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, _K_SCALES)))
    each = (gl.expand_dims(word, 2) >> shift[None, None, :]) & 0xFF
    each = gl.reshape(each, [TOKENS, 16])
    return gl.expand_dims(gl.convert_layout(each, gl.SliceLayout(2, _K), assert_trivial=True), 2)


@gluon.jit
def _store_k(shared, codes, lower_scale, upper_scale, BLOCKS: gl.constexpr):
    """Decode int32 [TOKENS, BLOCKS, 4] into shared memory: bf16 pairs, [TOKENS, 16 · BLOCKS]."""
    a, b, c, d = gl.inline_asm_elementwise(
        DECODE_HALVES,
        "=r,=r,=r,=r,r,r,r",
        [codes, _scale_pairs(lower_scale), _scale_pairs(upper_scale)],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    lower = gl.reshape(gl.join(a, b), [TOKENS, 8 * BLOCKS])
    upper = gl.reshape(gl.join(c, d), [TOKENS, 8 * BLOCKS])
    # A store of each half would not do for the rope part: it lies within one swizzled row.
    halves = gl.permute(gl.join(lower, upper), [0, 2, 1])
    shared.store(gl.reshape(halves, [TOKENS, 16 * BLOCKS]))


@gluon.jit
def _load_k_rope(records, present, CODES: gl.constexpr, SCALES: gl.constexpr, MASKED: gl.constexpr):
    """Codes of K's rope part, int32 [TOKENS, 2, 4], and the four scales, int32 [TOKENS]."""
    block = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, _K_ROPE)))
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, _K_ROPE)))
    place = gl.expand_dims((block * 4)[None, :], 2) + word[None, None, :]
    at = gl.expand_dims(records[:, None], 2) + (CODES // 4 + place)
    codes = _load(at, gl.expand_dims(present[:, None], 2), MASKED)
    return codes, _load(records + SCALES // 4, present, MASKED)


@gluon.jit
def _store_k_rope(shared, codes, scales):
    """As `_store_k`."""
    shift = 8 * gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, _K_ROPE)))
    lower = gl.expand_dims((scales[:, None] >> shift[None, :]) & 0xFF, 2)
    upper = gl.expand_dims((scales[:, None] >> (shift + 16)[None, :]) & 0xFF, 2)
    _store_k(shared, codes, lower, upper, 2)


@gluon.jit
def _load_v(records, present, CODES: gl.constexpr, SCALES: gl.constexpr, MASKED: gl.constexpr):
    """Codes of V, int32 [TOKENS, features of a share, 2], and scale bytes [TOKENS, features]."""
    feature = gl.arange(0, _SHARE, layout=gl.SliceLayout(0, gl.SliceLayout(2, _V)))
    word = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, _V)))
    place = gl.expand_dims((feature * 2)[None, :], 2) + word[None, None, :]
    at = gl.expand_dims(records[:, None], 2) + (CODES // 4 + place)
    codes = _load(at, gl.expand_dims(present[:, None], 2), MASKED)
    scales_at = records.to(gl.pointer_type(gl.uint8), bitcast=True)
    scales_at = scales_at[:, None] + (SCALES + feature)[None, :]
    return codes, _load(scales_at, present[:, None], MASKED)


@gluon.jit
def _store_v(shared, codes, scale):
    """Decode V into shared memory, features by tokens: bf16 pairs, int32 [LATENT, TOKENS / 2]."""
    a, b, c, d = gl.inline_asm_elementwise(
        DECODE_PAIRS,
        "=r,=r,=r,=r,r,r",
        [codes, gl.expand_dims(_scale_pairs(scale), 2)],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    pairs = gl.join(gl.join(a, c), gl.join(b, d))
    pairs = gl.reshape(pairs, [_GROUPS, BLOCK, _SHARE, BLOCK // 2])
    shared.store(gl.reshape(gl.permute(pairs, [1, 2, 0, 3]), [LATENT, TOKENS // 2]))


@gluon.jit
def _sum_of_columns(p):
    """[ROWS, TOKENS] by column to [ROWS, 8], what one thread holds each."""
    p = gl.reshape(p, [ROWS, _GROUPS // _ACROSS, _INNER, 2 * _ACROSS, 2])
    return gl.reshape(gl.sum(gl.sum(p, 4), 2), [ROWS, 2 * _GROUPS])


@gluon.jit
def _program(
    seq_lens,
    cu_seqlens_q,
    row_blocks,
    num_splits,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
):
    """What this program computes, and of which sequence.

    Returns:
        Sequence, range, first query token of the sequence, its length, its query tokens, first row,
        how many positions are there to be read (whole groups), first tile, end of tiles.
    """
    program = gl.program_id(0)
    row_block = program % row_blocks
    split = program // row_blocks % num_splits
    sequence = program // row_blocks // num_splits
    seq_len = gl.load(seq_lens + sequence)
    if cu_seqlens_q is None:
        begin = sequence
        queries = 1
    else:
        begin = gl.load(cu_seqlens_q + sequence)
        queries = gl.load(cu_seqlens_q + sequence + 1) - begin
    first_row = row_block * ROWS
    last_query = gl.minimum((first_row + ROWS - 1) // HEADS, queries - 1)
    # Rows past the last query see nothing.
    inside = first_row < queries * HEADS
    end = gl.where(inside, gl.maximum(seq_len - queries + last_query + 1, 0), 0)
    present_end = seq_len // GROUP * GROUP
    per_split = gl.cdiv(gl.cdiv(seq_len, TOKENS), num_splits)
    first_tile = split * per_split
    last_tile = gl.minimum(first_tile + per_split, gl.cdiv(gl.minimum(end, present_end), TOKENS))
    return sequence, split, begin, seq_len, queries, first_row, present_end, first_tile, last_tile


@gluon.jit
def _load_queries(
    q, shared, begin, first_row, rows, token_stride, head_stride, HEADS: gl.constexpr
):
    """Rows of Q, or of its rope part, into shared memory; 0 past the last."""
    WIDTH: gl.constexpr = shared.shape[1]
    layout: gl.constexpr = _RAW if WIDTH == LATENT else _RAW_ROPE
    row = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    token = (begin + row // HEADS).to(gl.int64)
    at = token * token_stride + (row % HEADS).to(gl.int64) * head_stride
    at = at[:, None] + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))[None, :]
    shared.store(gl.load(q + at, mask=(row < rows)[:, None], other=0.0))


@gluon.jit
def _begin_scores(q_shared, q_rope_shared, k_shared, k_rope_shared):
    """Start both products of Q and K."""
    nothing = gl.zeros([ROWS, TOKENS], gl.float32, layout=_SCORES)
    latent = warpgroup_mma(
        q_shared, k_shared.permute((1, 0)), nothing, use_acc=False, is_async=True
    )
    rope = warpgroup_mma(
        q_rope_shared, k_rope_shared.permute((1, 0)), nothing, use_acc=False, is_async=True
    )
    return latent, rope


@gluon.jit
def _probabilities(
    score,
    start,
    top,
    total,
    query_position,
    limit,
    p_amax,
    sink,
    recent,
    P_FORMAT: gl.constexpr,
    M: gl.constexpr,
):
    """A tile of the online softmax: P by column, what sums so far shrink by, new top and total."""
    positions = start + _token_of_row(gl.arange(0, TOKENS, layout=gl.SliceLayout(0, _SCORES)))
    score = gl.where(positions[None, :] < limit[:, None], score, float("-inf"))
    if M > 0:
        largest = only_largest(score, M, ROWS, TOKENS, _INNER, _ACROSS)
        near = query_position[:, None] - positions[None, :] < recent
        dense = near | (positions < sink)[None, :] | (score != score)
        score = gl.where(dense, score, gl.convert_layout(largest, _SCORES))
    new_top = gl.maximum(top, gl.ceil(gl.max(score, 1)))
    reference = gl.where(new_top == float("-inf"), 0.0, new_top)
    shrink = power_of_two(top - reference)
    p = gl.exp2(score - reference[:, None])
    # Sums by thread, so that no tile waits for another reduction over warps.
    total = total * gl.convert_layout(shrink[:, None], total.type.layout) + _sum_of_columns(p)
    if P_FORMAT != FORMAT_NONE:
        blocks = gl.reshape(p, [ROWS, _GROUPS // _ACROSS, _INNER, _ACROSS, BLOCK // _INNER])
        block_max = gl.max(gl.max(blocks, 4, keep_dims=True), 2, keep_dims=True)
        p = quantize_p(p, block_max, p_amax, P_FORMAT, ROWS, TOKENS, _INNER, _ACROSS)
    return p, shrink, new_top, total


@gluon.jit
def _store_partial(
    partial_out,
    partial_top,
    partial_total,
    first_partial_row,
    first_row,
    rows,
    acc,
    top,
    total,
    filled,
):
    """Write the results of a range as `split_portable` does."""
    row = first_row + gl.arange(0, ROWS, layout=_ROW)
    gl.store(partial_top + first_partial_row + row, top, mask=row < rows)
    totals = gl.convert_layout(gl.sum(total, 1), _ROW)
    gl.store(partial_total + first_partial_row + row, totals, mask=row < rows)
    # Sums of an empty range are neither written nor read.
    if filled:
        out_row = first_row + gl.arange(0, ROWS, layout=_OUTPUT_ROW)
        feature = gl.arange(0, LATENT, layout=gl.SliceLayout(0, _OUTPUT))
        at = ((first_partial_row + out_row) * LATENT)[:, None] + feature[None, :]
        gl.store(partial_out + at, acc, mask=(out_row < rows)[:, None])


_UNSPECIALIZED = [
    "row_blocks",
    "num_splits",
    "partial_rows",
    "sink",
    "recent",
    "table_stride",
]
_UNALIGNED = ["block_table", "seq_lens", "cu_seqlens_q"]


@gluon.jit(do_not_specialize=_UNSPECIALIZED, do_not_specialize_on_alignment=_UNALIGNED)
def split_records(
    q,
    rope_q,
    record_words,
    block_table,
    seq_lens,
    cu_seqlens_q,
    amax,
    partial_out,
    partial_top,
    partial_total,
    scale_log2,
    row_blocks,
    num_splits,
    partial_rows,
    sink,
    recent,
    q_token_stride,
    q_head_stride,
    rope_q_token_stride,
    rope_q_head_stride,
    record_page_words,
    table_stride,
    HEADS: gl.constexpr,
    TOKEN_WORDS: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    Q_FORMAT: gl.constexpr,
    Q_ROPE_FORMAT: gl.constexpr,
    K_FORMAT: gl.constexpr,
    K_ROPE_FORMAT: gl.constexpr,
    P_FORMAT: gl.constexpr,
    M: gl.constexpr,
    K_CODES: gl.constexpr,
    K_ROPE_CODES: gl.constexpr,
    K_SCALES: gl.constexpr,
    K_ROPE_SCALES: gl.constexpr,
    V_CODES: gl.constexpr,
    V_SCALES: gl.constexpr,
):
    """64 rows of one sequence over one range of its closed groups; else as `split_portable`."""
    sequence, split, begin, seq_len, queries, first_row, present_end, first_tile, last_tile = (
        _program(seq_lens, cu_seqlens_q, row_blocks, num_splits, HEADS, BLOCK)
    )
    rows = queries * HEADS
    q_shared = gl.allocate_shared_memory(gl.bfloat16, [ROWS, LATENT], _SWIZZLED)
    q_rope_shared = gl.allocate_shared_memory(gl.bfloat16, [ROWS, ROPE], _SWIZZLED)
    k_shared = gl.allocate_shared_memory(gl.bfloat16, [TOKENS, LATENT], _SWIZZLED)
    k_rope_shared = gl.allocate_shared_memory(gl.bfloat16, [TOKENS, ROPE], _SWIZZLED)
    v_shared = gl.allocate_shared_memory(gl.bfloat16, [LATENT, TOKENS], _SWIZZLED)
    p_shared = gl.allocate_shared_memory(gl.bfloat16, [ROWS, TOKENS], _SWIZZLED)
    k_words = k_shared._reinterpret(gl.int32, [TOKENS, LATENT // 2], _SWIZZLED_WORDS)
    k_rope_words = k_rope_shared._reinterpret(gl.int32, [TOKENS, ROPE // 2], _SWIZZLED_WORDS)
    v_words = v_shared._reinterpret(gl.int32, [LATENT, TOKENS // 2], _SWIZZLED_WORDS)
    _load_queries(q, q_shared, begin, first_row, rows, q_token_stride, q_head_stride, HEADS)
    _load_queries(
        rope_q,
        q_rope_shared,
        begin,
        first_row,
        rows,
        rope_q_token_stride,
        rope_q_head_stride,
        HEADS,
    )
    latent_factor, rope_factor = score_factors(
        amax, scale_log2, Q_FORMAT, Q_ROPE_FORMAT, K_FORMAT, K_ROPE_FORMAT, True, True
    )
    p_amax = gl.load(amax + 5)
    row = first_row + gl.arange(0, ROWS, layout=_ROW)
    query_position = seq_len - queries + row // HEADS
    limit = gl.minimum(gl.where(row < rows, query_position + 1, 0), present_end)
    acc = gl.zeros([ROWS, LATENT], gl.float32, layout=_OUTPUT)
    top = gl.full([ROWS], float("-inf"), gl.float32, layout=_ROW)
    total = _sum_of_columns(gl.zeros([ROWS, TOKENS], gl.float32, layout=_SCORES))

    # K of the first tile into shared memory, V of it into registers.
    table = block_table + sequence.to(gl.int64) * table_stride
    k_tokens = _token_of_row(
        gl.arange(0, TOKENS, layout=gl.SliceLayout(1, gl.SliceLayout(2, _K_SCALES)))
    )
    rope_tokens = _token_of_row(
        gl.arange(0, TOKENS, layout=gl.SliceLayout(1, gl.SliceLayout(2, _K_ROPE)))
    )
    v_tokens = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, gl.SliceLayout(2, _V)))
    start = first_tile * TOKENS
    k_blocks = _blocks(table, start, k_tokens, present_end, PAGE_SIZE)
    rope_blocks = _blocks(table, start, rope_tokens, present_end, PAGE_SIZE)
    v_blocks = _blocks(table, start, v_tokens, present_end, PAGE_SIZE)
    full = start + TOKENS <= present_end
    at = _records(
        record_words, k_blocks, start, k_tokens, record_page_words, TOKEN_WORDS, PAGE_SIZE
    )
    rope_at = _records(
        record_words, rope_blocks, start, rope_tokens, record_page_words, TOKEN_WORDS, PAGE_SIZE
    )
    there = start + k_tokens < present_end
    rope_there = start + rope_tokens < present_end
    if full:
        k, k_lower, k_upper = _load_k(at, there, K_CODES, K_SCALES, False)
        rope, rope_scales = _load_k_rope(rope_at, rope_there, K_ROPE_CODES, K_ROPE_SCALES, False)
    else:
        k, k_lower, k_upper = _load_k(at, there, K_CODES, K_SCALES, True)
        rope, rope_scales = _load_k_rope(rope_at, rope_there, K_ROPE_CODES, K_ROPE_SCALES, True)
    k_blocks = _blocks(table, start + TOKENS, k_tokens, present_end, PAGE_SIZE)
    rope_blocks = _blocks(table, start + TOKENS, rope_tokens, present_end, PAGE_SIZE)
    v_at = _records(
        record_words, v_blocks, start, v_tokens, record_page_words, TOKEN_WORDS, PAGE_SIZE
    )
    v_there = start + v_tokens < present_end
    if full:
        v, v_scales = _load_v(v_at, v_there, V_CODES, V_SCALES, False)
    else:
        v, v_scales = _load_v(v_at, v_there, V_CODES, V_SCALES, True)
    v_blocks = _blocks(table, start + TOKENS, v_tokens, present_end, PAGE_SIZE)
    _store_k(k_words, k, _bytes(k_lower), _bytes(k_upper), 16)
    _store_k_rope(k_rope_words, rope, rope_scales)
    fence_async_shared()
    _barrier()

    for tile in range(first_tile, last_tile):
        latent_score, rope_score = _begin_scores(q_shared, q_rope_shared, k_shared, k_rope_shared)
        # Meanwhile: decode V, ask for the next K.
        _store_v(v_words, v, v_scales)
        start = (tile + 1) * TOKENS
        full = start + TOKENS <= present_end
        at = _records(
            record_words, k_blocks, start, k_tokens, record_page_words, TOKEN_WORDS, PAGE_SIZE
        )
        rope_at = _records(
            record_words, rope_blocks, start, rope_tokens, record_page_words, TOKEN_WORDS, PAGE_SIZE
        )
        there = start + k_tokens < present_end
        rope_there = start + rope_tokens < present_end
        if full:
            k, k_lower, k_upper = _load_k(at, there, K_CODES, K_SCALES, False)
            rope, rope_scales = _load_k_rope(
                rope_at, rope_there, K_ROPE_CODES, K_ROPE_SCALES, False
            )
        else:
            k, k_lower, k_upper = _load_k(at, there, K_CODES, K_SCALES, True)
            rope, rope_scales = _load_k_rope(rope_at, rope_there, K_ROPE_CODES, K_ROPE_SCALES, True)
        k_blocks = _blocks(table, start + TOKENS, k_tokens, present_end, PAGE_SIZE)
        rope_blocks = _blocks(table, start + TOKENS, rope_tokens, present_end, PAGE_SIZE)
        latent_score, rope_score = warpgroup_mma_wait(0, deps=(latent_score, rope_score))
        p, shrink, top, total = _probabilities(
            latent_score * latent_factor + rope_score * rope_factor,
            tile * TOKENS,
            top,
            total,
            query_position,
            limit,
            p_amax,
            sink,
            recent,
            P_FORMAT,
            M,
        )
        # V is in order of tokens.
        PAIR: gl.constexpr = BLOCK // _INNER // 2
        OUTER: gl.constexpr = _GROUPS // _ACROSS
        p = gl.reshape(p.to(gl.bfloat16), [ROWS, OUTER, _INNER, _ACROSS, PAIR, 2])
        p_shared.store(gl.reshape(gl.permute(p, [0, 1, 3, 4, 2, 5]), [ROWS, TOKENS]))
        acc = acc * gl.convert_layout(shrink, _OUTPUT_ROW)[:, None]
        fence_async_shared()
        _barrier()
        acc = warpgroup_mma(p_shared, v_shared.permute((1, 0)), acc, is_async=True)
        # Meanwhile: decode the next K, ask for the next V.
        _store_k(k_words, k, _bytes(k_lower), _bytes(k_upper), 16)
        _store_k_rope(k_rope_words, rope, rope_scales)
        v_at = _records(
            record_words, v_blocks, start, v_tokens, record_page_words, TOKEN_WORDS, PAGE_SIZE
        )
        v_there = start + v_tokens < present_end
        if full:
            v, v_scales = _load_v(v_at, v_there, V_CODES, V_SCALES, False)
        else:
            v, v_scales = _load_v(v_at, v_there, V_CODES, V_SCALES, True)
        v_blocks = _blocks(table, start + TOKENS, v_tokens, present_end, PAGE_SIZE)
        fence_async_shared()
        acc = warpgroup_mma_wait(0, deps=(acc,))
        _barrier()

    _store_partial(
        partial_out,
        partial_top,
        partial_total,
        split.to(gl.int64) * partial_rows + begin.to(gl.int64) * HEADS,
        first_row,
        rows,
        acc,
        top,
        total,
        first_tile < last_tile,
    )


@gluon.jit
def _copy_latents(
    cache,
    k_shared,
    k_rope_shared,
    table,
    start,
    present_end,
    page_stride,
    token_stride,
    PAGE_SIZE: gl.constexpr,
):
    """Start filling a buffer with a tile of latents, rows as `_token_of_row` says; 0 if absent."""
    tokens = _token_of_row(gl.arange(0, TOKENS, layout=gl.SliceLayout(1, _RAW)))
    at = _latents(table, start, tokens, present_end, page_stride, token_stride, PAGE_SIZE)
    feature = gl.arange(0, LATENT, layout=gl.SliceLayout(0, _RAW))
    there = (start + tokens < present_end)[:, None]
    async_copy.async_copy_global_to_shared(
        k_shared, cache + (at[:, None] + feature[None, :]), mask=there
    )
    tokens = _token_of_row(gl.arange(0, TOKENS, layout=gl.SliceLayout(1, _RAW_ROPE)))
    at = _latents(table, start, tokens, present_end, page_stride, token_stride, PAGE_SIZE)
    feature = LATENT + gl.arange(0, ROPE, layout=gl.SliceLayout(0, _RAW_ROPE))
    there = (start + tokens < present_end)[:, None]
    async_copy.async_copy_global_to_shared(
        k_rope_shared, cache + (at[:, None] + feature[None, :]), mask=there
    )
    async_copy.commit_group()


@gluon.jit
def _latents(table, start, tokens, present_end, page_stride, token_stride, PAGE_SIZE: gl.constexpr):
    """Offsets, int64, of the latents at positions `start + tokens`."""
    blocks = _blocks(table, start, tokens, present_end, PAGE_SIZE)
    if PAGE_SIZE % TOKENS == 0:
        slot = start % PAGE_SIZE + tokens
    else:
        slot = (start + tokens) % PAGE_SIZE
    return gl.multiple_of(blocks.to(gl.int64) * page_stride + slot.to(gl.int64) * token_stride, 8)


@gluon.jit(do_not_specialize=_UNSPECIALIZED, do_not_specialize_on_alignment=_UNALIGNED)
def split_raw(
    q,
    rope_q,
    cache,
    block_table,
    seq_lens,
    cu_seqlens_q,
    amax,
    partial_out,
    partial_top,
    partial_total,
    scale_log2,
    row_blocks,
    num_splits,
    partial_rows,
    sink,
    recent,
    q_token_stride,
    q_head_stride,
    rope_q_token_stride,
    rope_q_head_stride,
    cache_page_stride,
    cache_token_stride,
    table_stride,
    HEADS: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    Q_FORMAT: gl.constexpr,
    Q_ROPE_FORMAT: gl.constexpr,
    K_FORMAT: gl.constexpr,
    K_ROPE_FORMAT: gl.constexpr,
    P_FORMAT: gl.constexpr,
    M: gl.constexpr,
):
    """64 rows of one sequence over one range of its context, K and V as they are in the cache."""
    sequence, split, begin, seq_len, queries, first_row, present_end, first_tile, last_tile = (
        _program(seq_lens, cu_seqlens_q, row_blocks, num_splits, HEADS, 1)
    )
    rows = queries * HEADS
    q_shared = gl.allocate_shared_memory(gl.bfloat16, [ROWS, LATENT], _SWIZZLED)
    q_rope_shared = gl.allocate_shared_memory(gl.bfloat16, [ROWS, ROPE], _SWIZZLED)
    k_buffers = gl.allocate_shared_memory(gl.bfloat16, [2, TOKENS, LATENT], _SWIZZLED)
    k_rope_buffers = gl.allocate_shared_memory(gl.bfloat16, [2, TOKENS, ROPE], _SWIZZLED)
    p_shared = gl.allocate_shared_memory(gl.bfloat16, [ROWS, TOKENS], _SWIZZLED)
    _load_queries(q, q_shared, begin, first_row, rows, q_token_stride, q_head_stride, HEADS)
    _load_queries(
        rope_q,
        q_rope_shared,
        begin,
        first_row,
        rows,
        rope_q_token_stride,
        rope_q_head_stride,
        HEADS,
    )
    latent_factor, rope_factor = score_factors(
        amax, scale_log2, Q_FORMAT, Q_ROPE_FORMAT, K_FORMAT, K_ROPE_FORMAT, False, False
    )
    p_amax = gl.load(amax + 5)
    row = first_row + gl.arange(0, ROWS, layout=_ROW)
    query_position = seq_len - queries + row // HEADS
    limit = gl.where(row < rows, query_position + 1, 0)
    acc = gl.zeros([ROWS, LATENT], gl.float32, layout=_OUTPUT)
    top = gl.full([ROWS], float("-inf"), gl.float32, layout=_ROW)
    total = _sum_of_columns(gl.zeros([ROWS, TOKENS], gl.float32, layout=_SCORES))
    table = block_table + sequence.to(gl.int64) * table_stride
    for ahead in gl.static_range(2):
        _copy_latents(
            cache,
            k_buffers.index(ahead),
            k_rope_buffers.index(ahead),
            table,
            (first_tile + ahead) * TOKENS,
            present_end,
            cache_page_stride,
            cache_token_stride,
            PAGE_SIZE,
        )

    for tile in range(first_tile, last_tile):
        buffer = (tile - first_tile) % 2
        k_shared = k_buffers.index(buffer)
        k_rope_shared = k_rope_buffers.index(buffer)
        async_copy.wait_group(1)
        fence_async_shared()
        _barrier()
        latent_score, rope_score = _begin_scores(q_shared, q_rope_shared, k_shared, k_rope_shared)
        latent_score, rope_score = warpgroup_mma_wait(0, deps=(latent_score, rope_score))
        p, shrink, top, total = _probabilities(
            latent_score * latent_factor + rope_score * rope_factor,
            tile * TOKENS,
            top,
            total,
            query_position,
            limit,
            p_amax,
            sink,
            recent,
            P_FORMAT,
            M,
        )
        # V's rows are K's: columns stay as they are.
        p_shared.store(gl.convert_layout(p, _SCORES).to(gl.bfloat16))
        acc = acc * gl.convert_layout(shrink, _OUTPUT_ROW)[:, None]
        fence_async_shared()
        _barrier()
        acc = warpgroup_mma(p_shared, k_shared, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        _barrier()
        _copy_latents(
            cache,
            k_shared,
            k_rope_shared,
            table,
            (tile + 2) * TOKENS,
            present_end,
            cache_page_stride,
            cache_token_stride,
            PAGE_SIZE,
        )
    async_copy.wait_group(0)

    _store_partial(
        partial_out,
        partial_top,
        partial_total,
        split.to(gl.int64) * partial_rows + begin.to(gl.int64) * HEADS,
        first_row,
        rows,
        acc,
        top,
        total,
        first_tile < last_tile,
    )
