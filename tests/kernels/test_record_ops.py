"""The record kernels as operators: schemas, fake tensors, torch.compile, CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mla_quant import kernels
from mla_quant.kernels import record_ops
from mla_quant.kernels.record_store import store_records
from mla_quant.records import RECORDS, UNROUNDED, RecordCache, outer_scale
from tests.kernels.test_ops import CHECKS, check_graph_replay

FORMAT = RECORDS["nvfp4_ds_mla_432"]


@pytest.mark.parametrize("name", RECORDS)
def test_formats_survive_packing(name) -> None:
    fmt = RECORDS[name]
    assert record_ops.unpack_format(record_ops.pack_format(fmt)) == fmt
    other = RECORDS["fp8_ds_mla_656"].with_writer(UNROUNDED)
    assert record_ops.unpack_format(record_ops.pack_format(other)) == other


class Step:
    """Store the newest tokens of two sequences and attend, with pages of 8."""

    def __init__(self, device: torch.device, lengths: list[int], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).bfloat16().to(device)

        self.cache = RecordCache.allocate(
            FORMAT, 20, 8, outer_scale=outer_scale(4.0, FORMAT), device=device
        )
        slots = torch.arange(160, device=device)
        store_records(self.cache, normal(160, 512), normal(160, 64), slots)
        self.table = torch.randperm(20, generator=generator).int().view(2, 10).to(device)
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.q, self.latent, self.rope = normal(2, 1, 4, 576), normal(2, 512), normal(2, 64)
        self.indices = torch.randint(-1, 160, (2, 1, 30), generator=generator).int().to(device)

    def slots(self) -> Tensor:
        last = self.lengths - 1
        page = self.table.gather(1, (last // 8).clamp(min=0).long()[:, None])[:, 0]
        return torch.where(last >= 0, page * 8 + last % 8, -1)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.q, self.latent, self.rope, self.table, self.lengths, self.indices

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        return (*self.tensors, self.cache.data)

    def run(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        q, latent, rope, table, lengths, indices = tensors or self.tensors
        kernels.store_records(self.cache, latent, rope, self.slots(), unique_slots=True)
        keys = kernels.KeyList(self.cache, indices)
        read = kernels.gather_records(
            self.cache, table, torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int(), 80,
            out=latent.new_zeros(160, 576),
        )  # fmt: skip
        return (
            *kernels.dense_decode(q, self.cache, table, lengths, scale=0.1),
            *kernels.sparse_decode(q, keys, keys, scale=0.1, num_splits=2),
            read,
        )


def test_opcheck(device) -> None:
    step = Step(device, [70, 13])
    packed = record_ops.pack_cache(step.cache)
    torch.library.opcheck(
        record_ops._store_records, (*packed, step.latent, step.rope, step.slots(), True),
        test_utils=CHECKS,
    )  # fmt: skip
    normed, rotated = torch.empty_like(step.latent), torch.empty_like(step.rope)
    angles = torch.randn(9, 64, device=device)
    torch.library.opcheck(
        record_ops._norm_rotate_store,
        (*packed, step.latent, step.rope, step.slots(), step.latent[0], 1e-6,
         torch.arange(2, device=device), angles, "pairs", normed, rotated, True),
        test_utils=CHECKS,
    )  # fmt: skip
    torch.library.opcheck(
        record_ops._dense_decode,
        (step.q, *packed, step.table, step.lengths, 0.1, True, None, "natural", 2, torch.float32),
        test_utils=CHECKS,
    )
    torch.library.opcheck(
        record_ops._sparse_decode,
        (step.q, *packed, step.indices, None, None, *packed[1:], None, None, 0.1, None, "natural",
         2, torch.bfloat16),
        test_utils=CHECKS,
    )  # fmt: skip
    starts = torch.tensor([0, 3, 5], dtype=torch.int32, device=device)
    out = torch.zeros(5, 576, device=device)
    torch.library.opcheck(
        record_ops._gather_records, (*packed, step.table, starts, 3, None, out), test_utils=CHECKS
    )


def test_compile_fullgraph(device) -> None:
    step = Step(device, [70, 13])
    before = step.cache.data.clone()
    want = step.run()
    step.cache.data.copy_(before)
    compiled = torch.compile(step.run, fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(*step.tensors), want, strict=True):
        assert torch.equal(got, expected)


def test_cuda_graph_replay(device) -> None:
    check_graph_replay(device, Step)
