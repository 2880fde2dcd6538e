"""Dense and sparse decode over records, and reading them, against a float64 oracle.

Caches are filled with bytes that read as NaN first: a kernel that looks at a slot it should not
gives NaN. The cases are those that FlashMLA's and FlashInfer's tests have, and more.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mla_quant.errors import ConfigError, RecordError
from mla_quant.kernels.decode import OperandFormats, decode_attention
from mla_quant.kernels.decode_shapes import choose_configuration, device_properties
from mla_quant.kernels.numerics import INTERPRETED
from mla_quant.kernels.operand_cache import OperandLayout, allocate
from mla_quant.kernels.record_decode import (
    KeyList,
    dense_decode,
    gather,
    scratch_shapes,
    sparse_decode,
)
from mla_quant.records import (
    RECORDS,
    RecordCache,
    RecordFormat,
    outer_scale,
    pack_into,
    unpack_from,
)
from tests.kernels.paged import Paged, compare_wide, expected
from tests.oracles.record_attention import UNIT_BFLOAT16, UNIT_FLOAT32, attend

every_format = pytest.mark.parametrize("name", RECORDS)
PER_LAYER = [name for name, fmt in RECORDS.items() if fmt.outer_scale == "per layer"]
FP32_SCALES = ["fp8_ds_mla_656", "nvfp4_outer_304", "nvfp4_ds_mla_368"]
INF = float("inf")


def exact_in_bfloat16(name: str, outer: float = 1.0) -> bool:
    """Whether products take what records read as without rounding, all of latent and rope part."""
    return name not in FP32_SCALES and outer == 1.0


def filled(
    fmt: RecordFormat, device: torch.device, tokens: int, page_size: int, *, sigma: float = 1.0,
    seed: int = 0, **options: Any,
) -> tuple[RecordCache, Tensor]:  # fmt: skip
    """A cache of shuffled slots with `tokens` rows, NaN elsewhere; and the slots."""
    generator = torch.Generator().manual_seed(seed)
    pages = -(-tokens // page_size) + 2
    data = torch.full((pages, fmt.page_bytes(page_size)), 0xFF, dtype=torch.uint8, device=device)
    cache = RecordCache(data, fmt, page_size, **options)
    x = torch.randn(tokens, fmt.width, generator=generator)
    x[:, : fmt.latent.width] *= sigma
    order = torch.randperm(pages, generator=generator)[:, None] * page_size
    slots = (order + torch.arange(page_size)).flatten()[:tokens].to(device)
    x = x.bfloat16().to(device)
    rope = None if fmt.rope is None else x[:, fmt.latent.width :]
    pack_into(cache, x[:, : fmt.latent.width], rope, slots)
    return cache, slots


def queries(fmt: RecordFormat, shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> Tensor:
    generator = torch.Generator().manual_seed(9)
    return torch.randn(*shape, fmt.width, generator=generator).to(dtype).to(device)


def values(cache: RecordCache, slots: Tensor) -> np.ndarray:
    return torch.cat(unpack_from(cache, slots), dim=1).double().cpu().numpy()


@dataclasses.dataclass
class Expectation:
    """What a kernel's output is compared with, every element within its bound."""

    q: Tensor
    scale: float
    sink: Tensor | None = None
    outer: bool = False

    def check(
        self, out: Tensor, lse: Tensor, keys: dict[tuple[int, int], np.ndarray], v_width: int,
        exact: bool,
    ) -> None:  # fmt: skip
        """`keys` by sequence and query token."""
        unit = UNIT_FLOAT32 if self.q.dtype == torch.float32 else UNIT_BFLOAT16
        out_unit = {torch.float32: 0.0, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-11}[out.dtype]
        batch, query_len, heads, _ = self.q.shape
        q, got, got_lse = self.q.double().cpu().numpy(), out.double().cpu(), lse.double().cpu()
        assert not got.isnan().any()
        for b in range(batch):
            for t in range(query_len):
                for h in range(heads):
                    sink = None if self.sink is None else float(self.sink[h])
                    row = attend(
                        q[b, t, h], keys[b, t], v_width, self.scale, sink, product_unit=unit,
                        exact_values=exact,
                        exact_queries=self.q.dtype != torch.float16 and not self.outer,
                    )  # fmt: skip
                    want = row.out * row.share
                    error = np.abs(got[b, t, h].numpy() - want)
                    # The share of the sink moves with LSE by at most a quarter of its error.
                    bound = row.out_bound * row.share + np.abs(row.out) * row.lse_bound
                    bound = bound + np.abs(want) * out_unit + 1e-7 * np.abs(row.out)
                    worst = (error / (bound + 1e-30)).max()
                    assert worst <= 1, (b, t, h, worst)
                    if np.isinf(row.lse):
                        assert got_lse[b, t, h] == row.lse
                    else:
                        assert abs(got_lse[b, t, h] - row.lse) <= row.lse_bound


def check_dense(
    name: str, device: torch.device, *, lengths: tuple[int, ...] = (0, 5, 37), heads: int = 3,
    query_len: int = 1, page_size: int = 16, dtype: torch.dtype = torch.float32,
    num_splits: int | None = None, sigma: float = 1.0, outer: float = 1.0, causal: bool = True,
    sink: Tensor | None = None, **options: Any,
) -> None:  # fmt: skip
    fmt = RECORDS[name]
    pages = [-(-length // page_size) for length in lengths]
    cache, slots = filled(
        fmt, device, max(sum(pages), 1) * page_size, page_size, sigma=sigma, outer_scale=outer
    )
    # Tokens after a sequence's last one hold NaN.
    table = torch.full((len(lengths), max(max(pages), 1) + 1), -1, dtype=torch.int32, device=device)
    first, own = 0, []
    for b, (length, count) in enumerate(zip(lengths, pages, strict=True)):
        mine = slots[first * page_size : (first + count) * page_size]
        table[b, :count] = (mine[::page_size] // page_size).int()
        own.append(mine[:length])
        areas = cache.areas()
        for slot in mine[length:].tolist():
            for area in areas:
                area[slot // page_size, slot % page_size] = 0xFF
        first += count
    q = queries(fmt, (len(lengths), query_len, heads), dtype, device)
    scale = 0.08 / sigma if outer != 1.0 else 0.08
    out, lse = dense_decode(
        q, cache, table, torch.tensor(lengths, dtype=torch.int32, device=device), scale=scale,
        num_splits=num_splits, causal=causal, sink=sink, **options,
    )  # fmt: skip
    keys = {}
    for b, length in enumerate(lengths):
        for t in range(query_len):
            seen = max(length - (query_len - 1 - t), 0) if causal else length
            keys[b, t] = values(cache, own[b][:seen])
    joint = fmt.v_width > fmt.latent.width
    Expectation(q, scale, sink, outer != 1.0 and joint).check(
        out, lse, keys, fmt.v_width, exact_in_bfloat16(name, outer)
    )


@every_format
@pytest.mark.parametrize("num_splits", [1, 3])
def test_dense(device, name, num_splits) -> None:
    check_dense(name, device, num_splits=num_splits)


@every_format
def test_dense_in_bfloat16(device, name) -> None:
    check_dense(name, device, dtype=torch.bfloat16, lengths=(70, 1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_queries_and_outputs_of_other_dtypes(device, dtype) -> None:
    check_dense("nvfp4_fp8rope_352", device, dtype=dtype, out_dtype=torch.float32)


@pytest.mark.parametrize("name", ["nvfp4_fp8rope_352", "dsv4_fp8_584"])
@pytest.mark.parametrize("causal", [True, False])
def test_several_query_tokens(device, name, causal) -> None:
    check_dense(name, device, query_len=3, causal=causal, lengths=(2, 40), num_splits=2)


@pytest.mark.parametrize("name", PER_LAYER)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outer_scale(device, name, dtype) -> None:
    outer = outer_scale(0.004, RECORDS[name])
    check_dense(name, device, sigma=1e-3, outer=outer, dtype=dtype)


@pytest.mark.parametrize("heads", [1, 8, 17, 64, 128])
def test_head_counts(device, heads) -> None:
    check_dense("nvfp4_fp8rope_352", device, heads=heads, lengths=(9, 33), dtype=torch.bfloat16)


@pytest.mark.parametrize("name", ["nvfp4_fp8rope_352", "dsv4_fp8_584"])
@pytest.mark.parametrize("page_size", [1, 2, 48, 576])
def test_page_sizes(device, name, page_size) -> None:
    check_dense(name, device, page_size=page_size, lengths=(65, 3), heads=2)


def test_splits_by_shape_alone(device) -> None:
    check_dense("nvfp4_ds_mla_432", device, lengths=(200, 1, 0), num_splits=None, page_size=64)


def test_no_sequences_and_no_heads(device) -> None:
    fmt = RECORDS["nvfp4_ds_mla_432"]
    cache, _ = filled(fmt, device, 16, 16)
    table = torch.zeros(0, 1, dtype=torch.int32, device=device)
    lengths = torch.zeros(0, dtype=torch.int32, device=device)
    out, lse = dense_decode(queries(fmt, (0, 1, 4), torch.float32, device), cache, table, lengths,
                            scale=1.0)  # fmt: skip
    assert out.shape == (0, 1, 4, 512) and lse.shape == (0, 1, 4)


# --- sparse


ExtraLists = tuple[str, list[list[int]], list[int] | None]
"""Format of an extra cache, lists of rows in it, and their lengths."""


def check_sparse(
    device: torch.device, name: str, *, lists: list[list[int]], query_len: int = 1,
    lengths: list[int] | None = None, extra: ExtraLists | None = None,
    heads: int = 2, dtype: torch.dtype = torch.float32, sink: Tensor | None = None,
    lse_convention: Any = "natural", num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Lists hold numbers of stored rows, or what is no slot; one a query token."""
    given, keys, exact = [], {}, True
    batch = len(lists) // query_len
    for number, (fmt_name, rows, counts) in enumerate(
        [(name, lists, lengths)] + ([extra] if extra else [])
    ):
        fmt = RECORDS[fmt_name]
        cache, slots = filled(fmt, device, 40, 16, seed=number)
        wide = max(map(len, rows))
        indices = torch.full((len(rows), wide), -1, dtype=torch.int32)
        for i, row in enumerate(rows):
            named = [int(slots[r]) if 0 <= r < 40 else r for r in row]
            indices[i, : len(row)] = torch.tensor(named, dtype=torch.int32)
            count = len(row) if counts is None else counts[i // query_len]
            seen = [r for r in row[:count] if 0 <= r < 40]
            found = values(cache, slots[torch.tensor(seen, dtype=torch.int64)])
            place = divmod(i, query_len)
            keys[place] = np.concatenate([keys[place], found]) if place in keys else found
        counted = None
        if counts is not None:
            counted = torch.tensor(counts, dtype=torch.int32, device=device)
        indices = indices.view(batch, query_len, wide).to(device)
        given.append(KeyList(cache, indices, counted))
        exact = exact and exact_in_bfloat16(fmt_name)
    q = queries(RECORDS[name], (batch, query_len, heads), dtype, device)
    out, lse = sparse_decode(
        q, *given, scale=0.08, sink=sink, lse_convention=lse_convention, num_splits=num_splits
    )
    if lse_convention == "natural":
        width = RECORDS[name].v_width
        Expectation(q, 0.08, sink).check(out, lse, keys, width, exact)
    return q, out, lse


NO_SLOT = [-1, -7, 10**6, 2**31 - 1]


@every_format
def test_sparse(device, name) -> None:
    """Invalid ones between valid ones, at the end, and nothing else."""
    check_sparse(device, name, lists=[[3, *NO_SLOT, 39, 0], NO_SLOT, list(range(40))[::-1]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_splits", [1, 2, 5])
def test_sparse_lengths(device, dtype, num_splits) -> None:
    lists = [list(range(30)), [5, -1, 6], [1, 2, 3], [4]]
    check_sparse(device, "fp8_ds_mla_656", lists=lists, lengths=[7, 2, 0, 99], dtype=dtype,
                 num_splits=num_splits)  # fmt: skip


def test_sparse_with_several_query_tokens(device) -> None:
    lists = [[1, 2, 3], [4, -1, 5], [6, 7, 8], [9, 10, -1]]
    check_sparse(device, "nvfp4_fp8rope_352", lists=lists, query_len=2, lengths=[2, 3])


@pytest.mark.parametrize("name", ["dsv4_fp8_584", "dsv4_nvfp4_384", "dsv41_fp8_528"])
def test_extra_cache(device, name) -> None:
    """Another format of the same widths; lists of other lengths, and one with neither."""
    extra = ("dsv41_fp4_288", [[0, 1, -1, 30], [-1], [-1]], [3, 1, 0])
    check_sparse(device, name, lists=[[5, 6], [7, 8, 9], [-1]], extra=extra)


SINKS = torch.tensor([INF, -INF, 0.7, -3.0])


def test_sink(device) -> None:
    lists = [[0, 1, 2], [-1], list(range(20))]
    _, out, _ = check_sparse(device, "dsv4_fp8_584", lists=lists, heads=4, sink=SINKS.to(device))
    assert (out[:, :, 0] == 0).all()
    check_dense("nvfp4_fp8rope_352", device, heads=4, sink=SINKS.to(device))


def test_lse_conventions(device) -> None:
    lists, sink = [[0, 1, 2], [-1]], SINKS.to(device)
    options: dict[str, Any] = {"lists": lists, "heads": 4, "sink": sink}
    _, out, natural = check_sparse(device, "dsv4_fp8_584", **options)
    _, other, lse = check_sparse(device, "dsv4_fp8_584", **options, lse_convention="flashmla")
    assert torch.equal(out, other)
    assert torch.equal(lse[0], natural[0]) and (lse[1] == INF).all()
    _, other, lse = check_sparse(device, "dsv4_fp8_584", **options, lse_convention="flashinfer")
    assert torch.equal(out, other)
    want = torch.logaddexp(natural.double(), sink.double()) / np.log(2.0)
    torch.testing.assert_close(lse.double(), want, rtol=1e-6, atol=1e-6)


# --- reading ranges


@every_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gather(device, name, dtype) -> None:
    fmt = RECORDS[name]
    outer = outer_scale(3.0, fmt) if fmt.outer_scale == "per layer" else 1.0
    cache, slots = filled(fmt, device, 48, 8, outer_scale=outer)
    table = (slots[::8] // 8).int().view(2, 3)
    table[1, 2] = -1
    cu_lengths = torch.tensor([0, 17, 17 + 11], dtype=torch.int32, device=device)
    starts = torch.tensor([5, 9], dtype=torch.int32, device=device)
    out = torch.full((30, fmt.width), 7.0, dtype=dtype, device=device)
    assert gather(cache, table, cu_lengths, 17, starts=starts, out=out) is out
    wanted = torch.cat([slots[5:22], slots[24 + 9 : 24 + 16], torch.full((4,), -1, device=device)])
    want = torch.cat(unpack_from(cache, wanted), dim=1).to(dtype)
    assert torch.equal(out[:28], want)
    assert (out[28:] == 7).all()


def test_gather_from_the_start_and_nothing(device) -> None:
    fmt = RECORDS["nvfp4_fp8rope_352"]
    cache, slots = filled(fmt, device, 16, 8)
    table = (slots[::8] // 8).int().view(1, 2)
    lengths = torch.tensor([0, 16], dtype=torch.int32, device=device)
    out = torch.empty(16, 576, device=device)
    gather(cache, table, lengths, 16, out=out)
    assert torch.equal(out, torch.cat(unpack_from(cache, slots), dim=1))
    gather(cache, table[:0], lengths[:1], 0, out=out)


# --- quantized operands over records


@pytest.mark.parametrize(
    "name", ["fp8_ds_mla_656", "nvfp4_fp8rope_352", "nvfp4_ds_mla_432", "nvfp4_ds_mla_368"]
)
@pytest.mark.parametrize(
    "formats",
    [
        OperandFormats(),
        OperandFormats("fp8", "fp8", "fp8", "fp8"),
        OperandFormats("none", "none", "nvfp4", "none", "none", "none"),
        OperandFormats("nvfp4", "nvfp4", "none", "nvfp4", "fp8", "fp8"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_quantized_over_records(device, name, formats, dtype) -> None:
    """What a cache gives that holds what the records read as, and what the oracle says.

    The same bits, but on a GPU where an operand is not quantized: codes reach the matrix unit in
    another order of features and tokens than raw latents do, and sums of their products round.
    """
    fmt = RECORDS[name]
    outer = outer_scale(3.0, fmt) if fmt.outer_scale == "per layer" else 1.0
    cache, slots = filled(fmt, device, 64, 16, outer_scale=outer)
    raw = torch.full((cache.data.shape[0], 16, 576), float("nan"), dtype=dtype, device=device)
    read = torch.cat(unpack_from(cache, slots), dim=1).to(dtype)
    raw.view(-1, 576)[slots] = read
    q = queries(fmt, (3, 2), dtype, device)
    call = Paged(
        q=q,
        cache=raw,
        block_table=(slots[::16] // 16).int().view(2, 2),
        seq_lens=torch.tensor([29, 18], dtype=torch.int32, device=device),
        cu_seqlens_q=torch.tensor([0, 2, 3], dtype=torch.int32, device=device),
        max_query_len=2,
        latent_width=512,
        scale=0.08,
        latents=[part.float().cpu() for part in (read[:29], read[32 : 32 + 18])],
        queries=[part.float().cpu() for part in (q[:2], q[2:])],
        amax=torch.tensor([4.0, 4.0, 3.5, 4.0, 3.5, 1.0], device=device),
    )
    # Raw latents may be taken in larger tiles where nothing of them is quantized.
    capability, _ = device_properties(device)
    tiles = choose_configuration(4, capability, "unpacked", dtype.itemsize)
    want = call.attend(formats, num_splits=2, configuration=tiles)
    got = dataclasses.replace(call, cache=cache).attend(formats, num_splits=2)
    compare_wide(got, expected(call, formats))
    names = (formats.q, formats.rope_q, formats.k, formats.rope_k, formats.p, formats.v)
    if INTERPRETED or "none" not in names:
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_quantized_over_records_that_cannot_be_read_so() -> None:
    lengths, table = torch.ones(1, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    options: dict[str, Any] = {"latent_width": 512, "scale": 1.0, "formats": OperandFormats()}
    cache = RecordCache.allocate(RECORDS["dsv4_fp8_584"], 2)
    with pytest.raises(ConfigError, match="without page footer"):
        decode_attention(torch.zeros(1, 1, 576), cache, table, lengths, torch.ones(6), **options)
    cache = RecordCache.allocate(RECORDS["nvfp4_ds_mla_432"], 2)
    layout = OperandLayout(512, 64)
    side = allocate(2, 64, layout, "cpu")
    with pytest.raises(ConfigError, match="no operand cache beside it"):
        decode_attention(
            torch.zeros(1, 1, 576), cache, table, lengths, torch.ones(6), records=side,
            layout=layout, **options,
        )  # fmt: skip


# --- scratch and errors


def test_scratch_is_what_was_announced(device) -> None:
    fmt = RECORDS["nvfp4_fp8rope_352"]
    cache, slots = filled(fmt, device, 64, 16)
    table = (slots[::16] // 16).int().view(2, 2)
    taken = []

    def allocate(shapes: Any, where: torch.device) -> list[Tensor]:
        taken.extend(shapes)
        return [torch.empty(s, dtype=d, device=where) for s, d in shapes]

    q = queries(fmt, (2, 1, 4), torch.bfloat16, device)
    lengths = torch.tensor([30, 3], dtype=torch.int32, device=device)
    out, _ = dense_decode(q, cache, table, lengths, scale=0.1, allocate=allocate)
    plain, _ = dense_decode(q, cache, table, lengths, scale=0.1)
    assert torch.equal(out, plain)
    announced = scratch_shapes(2, 1, 4, 512, 32, q.device)
    for (shape, dtype), (most, same) in zip(taken, announced, strict=True):
        assert dtype == same and np.prod(shape) <= np.prod(most)


def dense(**changes: Any) -> None:
    fmt = RECORDS["nvfp4_ds_mla_432"]
    given: dict[str, Any] = {
        "q": torch.zeros(2, 1, 4, 576), "cache": RecordCache.allocate(fmt, 2),
        "block_table": torch.zeros(2, 2, dtype=torch.int32),
        "seq_lens": torch.ones(2, dtype=torch.int32), "scale": 1.0,
    }  # fmt: skip
    dense_decode(**(given | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(2, 4, 576)}, r"must be \[batch, query_len, heads, 576\]"),
        ({"q": torch.zeros(2, 1, 4, 512)}, r"512\+64"),
        ({"q": torch.zeros(2, 1, 4, 576, dtype=torch.float64)}, "found float64"),
        ({"q": torch.zeros(2, 1, 4, 1152)[..., ::2]}, "features must be consecutive"),
        ({"block_table": torch.zeros(3, 2, dtype=torch.int32)}, r"block_table must be int32 \[2"),
        ({"block_table": torch.zeros(2, 2)}, "found float32"),
        ({"seq_lens": torch.ones(2, dtype=torch.int64)}, "seq_lens must be int32"),
        ({"sink": torch.zeros(3)}, r"sink must be \[4\]"),
        ({"lse_convention": "log2"}, "give one of natural, flashmla, flashinfer"),
        ({"num_splits": 0}, "must be at least 1"),
    ],
)
def test_wrong_dense_arguments(changes, message) -> None:
    with pytest.raises(RecordError, match=message):
        dense(**changes)


def test_wrong_sparse_arguments() -> None:
    cache = RecordCache.allocate(RECORDS["dsv4_fp8_584"], 2)
    q, indices = torch.zeros(2, 1, 4, 512), torch.zeros(2, 1, 8, dtype=torch.int32)
    with pytest.raises(RecordError, match=r"indices must be int32 \[2, 1, \*\]"):
        sparse_decode(q, KeyList(cache, indices[:, 0]), scale=1.0)
    with pytest.raises(RecordError, match=r"lengths of the extra indices"):
        sparse_decode(
            q, KeyList(cache, indices), KeyList(cache, indices, torch.zeros(2)), scale=1.0
        )
    other = RecordCache.allocate(RECORDS["nvfp4_ds_mla_432"], 2)
    with pytest.raises(RecordError, match=r"queries of nvfp4_ds_mla_432"):
        sparse_decode(q, KeyList(cache, indices), KeyList(other, indices), scale=1.0)


def test_wrong_gather_arguments() -> None:
    cache = RecordCache.allocate(RECORDS["dsv4_fp8_584"], 2)
    table, lengths = torch.zeros(2, 1, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    with pytest.raises(RecordError, match=r"out must be \[rows, 512\]"):
        gather(cache, table, lengths, 1, out=torch.zeros(3, 576))
    with pytest.raises(RecordError, match=r"cu_lengths must be int32 \[3\]"):
        gather(cache, table, lengths[:2], 1, out=torch.zeros(3, 512))
    with pytest.raises(RecordError, match=r"starts must be"):
        gather(cache, table, lengths, 1, starts=lengths, out=torch.zeros(3, 512))
