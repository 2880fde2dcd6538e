"""The Hopper kernel over records against the float64 oracle, every element, as the portable one.

Slots that must not be read hold NaN; see `tests.kernels.test_record_decode`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mla_quant.kernels import record_decode
from mla_quant.kernels.devices import hopper_module
from mla_quant.records import RECORDS, outer_scale
from tests.kernels.test_record_decode import (
    NO_SLOT,
    PER_LAYER,
    SINKS,
    check_dense,
    check_sparse,
    every_format,
    filled,
    queries,
)

BF16 = torch.bfloat16


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda")


@pytest.fixture(autouse=True)
def launched(monkeypatch) -> list[dict[str, Any]]:
    """Constants of the Hopper kernel's launches; that there are any is asserted after each test."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    module, launches = hopper_module("record_hopper", 90), []
    assert module is not None
    kernel = module.split_hopper

    class Spy:
        def __getitem__(self, grid):
            def launch(**arguments):
                launches.append({k: v for k, v in arguments.items() if k.isupper()})
                return kernel[grid](**arguments)

            return launch

    monkeypatch.setattr(module, "split_hopper", Spy())
    return launches


@every_format
@pytest.mark.parametrize("heads", [1, 16, 23, 32, 33, 80])
def test_formats_and_heads(device, launched, name, heads) -> None:
    check_dense(name, device, dtype=BF16, heads=heads, lengths=(130, 1, 0, 64))
    rows = (
        16 if heads <= 16 else 32 if heads <= 32 and RECORDS[name].latent.element.bits == 4 else 64
    )
    assert [each["ROWS"] for each in launched] == [rows]


@every_format
@pytest.mark.parametrize("page_size", [1, 16, 64, 192])
def test_page_sizes_and_ranges(device, launched, name, page_size) -> None:
    check_dense(name, device, dtype=BF16, heads=20, page_size=page_size, lengths=(333, 65, 63),
                num_splits=3)  # fmt: skip
    assert launched


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("query_len", [2, 5])
@pytest.mark.parametrize("name", ["nvfp4_fp8rope_352", "fp8_ds_mla_656", "dsv4_nvfp4_384"])
def test_several_query_tokens(device, launched, name, query_len, causal) -> None:
    check_dense(name, device, dtype=BF16, heads=7, query_len=query_len, causal=causal,
                lengths=(70, query_len, 129))  # fmt: skip
    assert launched


@pytest.mark.parametrize("name", PER_LAYER)
@pytest.mark.parametrize("heads", [4, 64])
def test_outer_scale(device, launched, name, heads) -> None:
    outer = outer_scale(0.004, RECORDS[name])
    check_dense(name, device, sigma=1e-3, outer=outer, dtype=BF16, heads=heads, lengths=(100, 7))
    assert launched


@pytest.mark.parametrize("heads", [4, 64])
@every_format
def test_sparse(device, launched, name, heads) -> None:
    lists = [[3, *NO_SLOT, 39, 0], NO_SLOT, list(range(40))[::-1] * 3]
    check_sparse(device, name, lists=lists, dtype=BF16, heads=heads)
    check_sparse(device, name, lists=lists, dtype=BF16, heads=heads, lengths=[2, 3, 97],
                 num_splits=2)  # fmt: skip
    assert len(launched) == 2


def test_extra_cache_and_sink(device, launched) -> None:
    extra = ("dsv41_fp4_288", [[0, 1, -1, 30], [-1], [-1]], [3, 1, 0])
    lists = [[5, 6], [7, 8, 9], [-1]]
    check_sparse(device, "dsv4_fp8_584", lists=lists, extra=extra, dtype=BF16)
    check_sparse(device, "dsv4_fp8_584", lists=lists, heads=4, sink=SINKS.cuda(), dtype=BF16)
    assert len(launched) == 3


def test_reruns_and_graphs_are_bit_equal(device, launched) -> None:
    fmt = RECORDS["nvfp4_ds_mla_432"]
    cache, slots = filled(fmt, device, 1024, 64)
    table = (slots[::64] // 64).int().view(2, 8)
    lengths = torch.tensor([512, 100], dtype=torch.int32, device=device)
    q = queries(fmt, (2, 1, 40), BF16, device)

    def call():
        return record_decode.dense_decode(q, cache, table, lengths, scale=0.1)

    first = call()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(call(), first, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call()
    lengths.copy_(torch.tensor([65, 512]))
    graph.replay()
    want = call()
    assert torch.equal(out, want[0]) and torch.equal(lse, want[1])
    assert launched


def test_nan_in_scales_and_codes(device, launched) -> None:
    """A poisoned key makes the rows that see it NaN, and no others."""
    for name in ("nvfp4_fp8rope_352", "fp8_ds_mla_656", "dsv41_fp8_528"):
        fmt = RECORDS[name]
        cache, slots = filled(fmt, device, 128, 64)
        table = (slots[::64] // 64).int().view(2, 1)
        lengths = torch.tensor([64, 64], dtype=torch.int32, device=device)
        bad = slots[70]
        for place in (fmt.latent.scale.offset, fmt.latent.offset):
            if place == fmt.latent.offset and name == "nvfp4_fp8rope_352":
                continue  # E2M1 has no NaN.
            data = cache.data.clone()
            width = fmt.latent.scale.bytes_each if place == fmt.latent.scale.offset else 1
            row = cache.areas()[0][bad // 64, bad % 64]
            row[place : place + width] = 0x7F if width == 1 and "528" not in name else 0xFF
            out, _ = record_decode.dense_decode(
                queries(fmt, (2, 1, 5), BF16, device), cache, table, lengths, scale=0.05
            )
            assert not out[0].isnan().any() and out[1].isnan().all(), (name, place)
            cache.data.copy_(data)
    assert launched
