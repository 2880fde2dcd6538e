"""The Hopper decode kernels against the float64 oracle, element by element, as the portable one."""

from __future__ import annotations

import pytest
import torch

from mla_quant.kernels import decode
from mla_quant.kernels.decode import Configuration, OperandFormats
from mla_quant.kernels.devices import hopper_module
from mla_quant.reference import Sparsity
from tests.kernels.paged import Paged, expected, paged
from tests.kernels.paged import compare_wide as compare
from tests.oracles import attention as oracle

NVFP4 = OperandFormats()
RAW = OperandFormats("none", "none", "nvfp4", "none")
UNQUANTIZED = OperandFormats("none", "none", "none", "none")
SOURCES = pytest.mark.parametrize("formats", [NVFP4, RAW], ids=["records", "raw"])
PORTABLE = Configuration(16, 64, 2, 4, 8, 2)


@pytest.fixture(autouse=True)
def _needs_hopper() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    assert hopper_module("decode_hopper", 90) is not None


@pytest.fixture
def launched(monkeypatch) -> list[int]:
    """Grids of the Hopper kernels' launches: a test that it is them that run."""
    module, launches = hopper_module("decode_hopper", 90), []

    class Spy:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            launches.append(grid[0])
            return self.kernel[grid]

    for name in ("split_records", "split_raw"):
        monkeypatch.setattr(module, name, Spy(getattr(module, name)))
    monkeypatch.setattr(decode, "_HOPPER_MORE_THAN_ROWS", 0)
    return launches


def call_of(lengths: list[int], **kwargs) -> Paged:
    return paged(lengths, latent_width=512, rope_width=64, **kwargs)


def attend(call: Paged, formats: OperandFormats = NVFP4, **kwargs) -> tuple:
    """From a side cache where K and V are quantized, else from the raw cache."""
    if formats.k == "none":
        return call.attend(formats, **kwargs)
    layout = call.layout()
    return call.attend(formats, records=call.records(layout), layout=layout, **kwargs)


@pytest.mark.parametrize("heads", [1, 16, 40, 64, 128])
@pytest.mark.parametrize("page_size", [1, 13, 64, 128])
@SOURCES
def test_heads_and_pages(heads: int, page_size: int, formats: OperandFormats, launched) -> None:
    call = call_of([300, 64, 17], heads=heads, page_size=page_size, seed=1)
    compare(attend(call, formats), expected(call, formats))
    assert launched


@pytest.mark.parametrize("num_splits", [None, 1, 2, 5, 33])
@SOURCES
def test_lengths(num_splits: int | None, formats: OperandFormats, launched) -> None:
    """Lengths around tiles and groups, empty sequences, ranges without tokens."""
    lengths = [0, 1, 15, 16, 17, 63, 64, 65, 79, 80, 128, 129, 640]
    call = call_of(lengths, heads=16, page_size=64, seed=2, spare_tokens=200)
    compare(attend(call, formats, num_splits=num_splits), expected(call, formats))
    assert launched


@pytest.mark.parametrize("queries", [[1, 1], [2, 3], [7, 16], [0, 5]])
@pytest.mark.parametrize("heads", [5, 16, 64])
@SOURCES
def test_several_queries(queries: list[int], heads: int, formats: OperandFormats, launched) -> None:
    """Causal limits a token; padding tokens give 0 / -inf."""
    call = call_of(
        [100, 37], query_lengths=queries, heads=heads, page_size=16, padding_tokens=3, seed=3
    )
    compare(attend(call, formats), expected(call, formats), tokens=sum(queries) + 3)
    assert launched


@pytest.mark.parametrize("p", ["none", "fp8", "nvfp4"])
@pytest.mark.parametrize("q", ["none", "fp8", "nvfp4"])
@pytest.mark.parametrize("kv", ["none", "nvfp4"])
def test_formats(p: str, q: str, kv: str, launched) -> None:
    formats = OperandFormats(q=q, k=kv, p=p, v=kv)
    call = call_of([200, 31], heads=32, seed=4)
    compare(attend(call, formats), expected(call, formats))
    assert launched


@pytest.mark.parametrize("pattern", [(2, 4), (4, 8)])
@pytest.mark.parametrize(("sink", "recent"), [(0, 0), (5, 20)])
@SOURCES
def test_sparsity(
    pattern: tuple[int, int], sink: int, recent: int, formats: OperandFormats, launched
) -> None:
    call = call_of([200, 77], heads=16, seed=5)
    got = attend(call, formats, sparsity=Sparsity(*pattern, sink, recent))
    compare(got, expected(call, formats, oracle.Sparsity(*pattern, sink, recent)))
    assert launched


@SOURCES
def test_reference_point_that_rises(formats: OperandFormats, launched) -> None:
    """Scores that grow along the context, and a first key far above all others."""
    for kwargs in ({"sink": 24.0}, {"spread": 4.0}):
        call = call_of([500, 90], heads=16, seed=6, **kwargs)
        compare(attend(call, formats, num_splits=1), expected(call, formats))
    assert launched


@pytest.mark.parametrize("formats", [NVFP4, UNQUANTIZED], ids=["records", "raw"])
def test_many_runs_are_bitwise_equal(formats: OperandFormats, launched) -> None:
    call = call_of([700, 512, 33], heads=128, seed=7)
    layout = call.layout()
    kwargs = {} if formats.k == "none" else {"records": call.records(layout), "layout": layout}
    first = call.attend(formats, **kwargs)
    for _ in range(20):
        again = call.attend(formats, **kwargs)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    want = expected(call, formats)
    compare(first, want)
    compare(call.attend(formats, configuration=PORTABLE, **kwargs), want)
    assert launched


def test_records_that_are_part_of_a_cache(launched) -> None:
    """Records and latents of a token side by side in one page, as an engine may keep them."""
    call = call_of([300, 65], heads=64, page_size=64, seed=9)
    layout = call.layout()
    records = call.records(layout)
    pages, page_size, width = call.cache.shape
    both = torch.zeros(
        pages, page_size, 2 * width + layout.record_bytes, dtype=torch.uint8, device="cuda"
    )
    cache = both[..., : 2 * width].view(torch.bfloat16)
    cache.copy_(call.cache)
    both[..., 2 * width :] = records
    call.cache = cache
    got = call.attend(NVFP4, records=both[..., 2 * width :], layout=layout)
    compare(got, expected(call, NVFP4))
    assert launched


def test_graph_replay_with_other_lengths(launched) -> None:
    call = call_of([640, 300], heads=64, seed=8)
    layout = call.layout()
    records = call.records(layout)
    shorter = call_of([640, 300], heads=64, seed=8)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call.attend(NVFP4, records=records, layout=layout)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call.attend(NVFP4, records=records, layout=layout)
    for lengths in ([640, 300], [64, 48], [1, 300]):
        call.seq_lens.copy_(torch.tensor(lengths))
        shorter.seq_lens.copy_(call.seq_lens)
        out.fill_(float("nan"))
        graph.replay()
        shorter.latents = [x[:n] for x, n in zip(call.latents, lengths, strict=True)]
        compare((out, lse), expected(shorter, NVFP4))
    assert launched
