"""Records against the software that defined them: vLLM writes them, FlashMLA reads them.

FlashMLA's tolerances are those of its own tests: output within 1e-3 or 2.01/128, LSE within 1e-6
or 8.01/65536, and the outputs as directions within 5e-6.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mla_quant.kernels.record_decode import KeyList, dense_decode, sparse_decode
from mla_quant.kernels.record_store import store_records
from mla_quant.records import RECORDS, UNROUNDED, RecordCache, RecordFormat, unpack_from

vllm = pytest.importorskip("vllm")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

PAGE = 64
OLD = tuple(map(int, vllm.__version__.split("+")[0].split(".")[:2])) < (0, 33)


def random_parts(fmt: RecordFormat, tokens: int, outliers: bool = False) -> tuple[Tensor, Tensor]:
    """With outliers sums cancel further than the tolerances allow, which are for normal values."""
    generator = torch.Generator("cuda").manual_seed(5)
    x = torch.randn(tokens, fmt.width, device="cuda", generator=generator)
    if outliers:
        x[::7, ::50] *= 100
    x = x.bfloat16()
    return x[:, : fmt.latent.width].contiguous(), x[:, fmt.latent.width :].contiguous()


def test_vllm_writes_what_we_write() -> None:
    """Its kernel may take powers of two from an approximation: scales and codes must be equal."""
    from vllm import _custom_ops as ops

    fmt = RECORDS["fp8_ds_mla_656"]
    fmt = fmt.with_writer(UNROUNDED) if OLD else fmt
    latent, rope = random_parts(fmt, 700, outliers=True)
    slots = torch.randperm(16 * PAGE, device="cuda")[:700]
    slots[3], slots[500] = -1, -1
    theirs = torch.full((16, PAGE, 656), 0xA5, dtype=torch.uint8, device="cuda")
    one = torch.ones((), device="cuda")
    ops.concat_and_cache_mla(latent, rope, theirs, slots, "fp8_ds_mla", one)
    ours = RecordCache(torch.full_like(theirs, 0xA5).flatten(1), fmt, PAGE)
    store_records(ours, latent, rope, slots, unique_slots=True)
    different = (ours.data.view(-1, 656) != theirs.view(-1, 656)).nonzero()
    assert not len(different), (len(different), different[:5].tolist())
    read = RecordCache(theirs.flatten(1), fmt, PAGE)
    for a, b in zip(unpack_from(read, slots), unpack_from(ours, slots), strict=True):
        assert torch.equal(a, b)


def flash_mla() -> Any:
    return pytest.importorskip("vllm.third_party.flashmla.flash_mla_interface")


def check(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    a, b = out.double(), other.double()
    assert not a.isnan().any() and not b.isnan().any()
    error = (a - b).abs()
    assert ((error <= 1e-3) | (error <= b.abs() * 2.01 / 128)).all(), error.max()
    cosine = 1 - 2 * (a * b).sum() / (a.square().sum() + b.square().sum())
    assert cosine.abs() < 5e-6, cosine
    finite = other_lse.isfinite()
    assert torch.equal(lse[~finite], other_lse[~finite])
    error = (lse[finite] - other_lse[finite]).abs()
    assert ((error <= 1e-6) | (error <= other_lse[finite].abs() * 8.01 / 65536)).all(), error.max()


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("name", ["fp8_ds_mla_656", "dsv4_fp8_584"])
@pytest.mark.parametrize("sink", [False, True])
def test_flashmla_reads_what_we_write(name, heads, sink) -> None:
    """Lists with invalid entries, and one with nothing else."""
    if OLD and name != "fp8_ds_mla_656":
        pytest.skip("its FlashMLA knows 656 alone")
    fmt = RECORDS[name]
    tokens = 4096
    cache = RecordCache.allocate(fmt, tokens // PAGE, PAGE, device="cuda")
    latent, rope = random_parts(fmt, tokens)
    store_records(cache, latent, rope, torch.arange(tokens, device="cuda"), unique_slots=True)
    generator = torch.Generator("cuda").manual_seed(6)
    q = torch.randn(5, 2, heads, fmt.width, device="cuda", generator=generator).bfloat16()
    indices = torch.randint(0, tokens, (5, 2, 640), device="cuda", generator=generator).int()
    indices[torch.rand(5, 2, 640, device="cuda", generator=generator) < 0.2] = -1
    indices[2] = -1
    sinks = torch.randn(heads, device="cuda", generator=generator) if sink else None
    if sinks is not None:
        sinks[:2] = torch.tensor([float("inf"), float("-inf")])
    shape = (tokens // PAGE, PAGE, 1, fmt.record_bytes)
    strides = (cache.data.stride(0), fmt.record_bytes, fmt.record_bytes, 1)
    plan, _ = flash_mla().get_mla_metadata()
    other, other_lse = flash_mla().flash_mla_with_kvcache(
        q, cache.data.as_strided(shape, strides), None, None, 512, plan, softmax_scale=0.06,
        is_fp8_kvcache=True, indices=indices, attn_sink=sinks,
    )  # fmt: skip
    out, lse = sparse_decode(
        q, KeyList(cache, indices), scale=0.06, sink=sinks, lse_convention="flashmla"
    )
    check(out, lse, other, other_lse.transpose(1, 2))


@pytest.mark.parametrize("heads", [16, 128])
def test_dense_like_flashmla_on_what_the_records_read_as(heads) -> None:
    fmt, batch, context = RECORDS["nvfp4_ds_mla_432"], 3, 1000
    pages = -(-context // PAGE)
    cache = RecordCache.allocate(fmt, batch * pages, PAGE, device="cuda")
    latent, rope = random_parts(fmt, cache.num_slots)
    slots = torch.arange(cache.num_slots, device="cuda")
    store_records(cache, latent, rope, slots, unique_slots=True)
    raw = torch.cat(unpack_from(cache, slots), dim=1).bfloat16().view(-1, PAGE, 1, 576)
    generator = torch.Generator("cuda").manual_seed(7)
    q = torch.randn(batch, 1, heads, 576, device="cuda", generator=generator).bfloat16()
    table = torch.randperm(batch * pages, device="cuda").int().view(batch, pages)
    lengths = torch.tensor([1000, 1, 513], dtype=torch.int32, device="cuda")
    plan, _ = flash_mla().get_mla_metadata()
    other, other_lse = flash_mla().flash_mla_with_kvcache(
        q, raw, table, lengths, 512, plan, softmax_scale=0.06, causal=True
    )
    out, lse = dense_decode(q, cache, table, lengths, scale=0.06, lse_convention="flashmla")
    check(out, lse, other, other_lse.transpose(1, 2))
