"""The kernels as operators: schemas, fake tensors, torch.compile, CUDA graphs, bad arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mla_quant import kernels
from mla_quant.errors import ConfigError
from mla_quant.kernels import ops
from mla_quant.reference import Sparsity

FORMATS = {"q_format": "nvfp4", "k_format": "nvfp4", "p_format": "nvfp4", "v_format": "nvfp4"}
# Autograd is not offered: nothing here has a gradient.
CHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")


def prefill_inputs(device: torch.device, lengths: list[int], dtype: Any = torch.float32) -> Any:
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=device)
    tokens = int(cu[-1])
    q, k = (torch.randn(tokens, 2, 40, dtype=dtype).to(device) for _ in range(2))
    v = torch.randn(tokens, 2, 24, dtype=dtype).to(device)
    return q, k, v, cu, torch.tensor([4.5, 4.5, 4.5, 1.0], device=device)


def run(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    return kernels.prefill_attention(
        q, k, v, cu, cu, 48, 48, scale=0.2, amax=amax, sparsity=Sparsity(2, 4), **FORMATS
    )


def test_opcheck(device) -> None:
    q, k, v, cu, amax = prefill_inputs(device, [20, 13])
    fmt = tuple(FORMATS.values())
    torch.library.opcheck(
        ops.prefill_attention,
        (q, k, v, cu, cu, amax, None, None, 20, 20, 0.2, *fmt, True, [2, 4, 0, 8], [24, 16],
         torch.bfloat16),
        test_utils=CHECKS,
    )  # fmt: skip
    out, lse = torch.randn(5, 2, 16, device=device), torch.randn(2, 5, device=device)
    torch.library.opcheck(
        ops.merge_attention, (out, lse, out + 1, lse, True, torch.float32), test_utils=CHECKS
    )
    torch.library.opcheck(
        ops.quantize_features, (q, "nvfp4", amax[:1], torch.bfloat16, [24, 16], False),
        test_utils=CHECKS,
    )  # fmt: skip
    torch.library.opcheck(
        ops.quantize_tokens, (v, "nvfp4", amax[:1], torch.float16, cu, 20, None), test_utils=CHECKS
    )


class Step:
    """A decode step over a paged cache with a side cache; 32 + 16 features."""

    def __init__(self, device: torch.device, lengths: list[int], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).bfloat16().to(device)

        self.q, self.cache = normal(2, 4, 48), normal(20, 8, 48)
        self.block_table = torch.randperm(20, generator=generator).int().view(2, 10).to(device)
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.amax = torch.tensor([4.0, 4.0, 4.0, 4.0, 4.0, 1.0], device=device)
        self.layout = kernels.OperandLayout(32, 16, "nvfp4", "nvfp4")
        self.records = kernels.allocate(20, 8, self.layout, device)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.q, self.cache, self.block_table, self.seq_lens, self.amax, self.records

    buffers = tensors

    def run(self, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        q, cache, block_table, seq_lens, amax, records = tensors or self.tensors
        kernels.write_operands(
            cache, records, self.layout, block_table, seq_lens, amax, max_new_tokens=80,
            cu_seqlens_new=torch.nn.functional.pad(seq_lens.cumsum(0), (1, 0)).int(),
        )  # fmt: skip
        return kernels.decode_attention(
            q, cache, block_table, seq_lens, amax, latent_width=32, scale=0.2,
            formats=kernels.OperandFormats(), records=records, layout=self.layout, num_splits=3,
        )  # fmt: skip


def test_opcheck_decode(device) -> None:
    step = Step(device, [70, 13])
    formats, stored = ops.pack_formats(kernels.OperandFormats()), ops.pack_layout(step.layout)
    assert ops.unpack_layout(32, 16, stored) == step.layout
    assert ops.unpack_formats(formats) == kernels.OperandFormats()
    torch.library.opcheck(
        ops.write_operands,
        (step.cache, step.records, step.block_table, step.seq_lens, step.amax, None, 1, 32, stored),
        test_utils=CHECKS,
    )
    for records in (None, step.records):
        torch.library.opcheck(
            ops.decode_attention,
            (step.q, step.cache, step.block_table, step.seq_lens, step.amax, None, records, 1, 32,
             0.2, formats, stored, [], 2, torch.float32),
            test_utils=CHECKS,
        )  # fmt: skip


def test_compile_decode_fullgraph(device) -> None:
    step = Step(device, [70, 13])
    compiled = torch.compile(step.run, fullgraph=True, backend="aot_eager")
    want = step.run()
    step.records.zero_()
    for got, expected in zip(compiled(*step.tensors), want, strict=True):
        assert torch.equal(got, expected)


def check_graph_replay(device: torch.device, new_step: Any) -> None:
    """Captured once, replayed with longer and shorter contexts, an empty one among them.

    `new_step`: by device, lengths and seed, what has `buffers` to be filled and `run`.
    """
    if device.type != "cuda":
        pytest.skip("CUDA graphs need a CUDA device")
    step = new_step(device, [40, 40])
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step.run()
    for seed, lengths in enumerate(([40, 40], [80, 1], [0, 33])):
        fresh = new_step(device, lengths, seed)
        for buffer, new in zip(step.buffers, fresh.buffers, strict=True):
            buffer.copy_(new)
        for x in captured:
            x.fill_(float("nan"))
        graph.replay()
        for got, want in zip(captured, fresh.run(), strict=True):
            assert torch.equal(got, want)
        for got, want in zip(step.buffers, fresh.buffers, strict=True):
            assert torch.equal(got, want)


def test_decode_cuda_graph_replay(device) -> None:
    check_graph_replay(device, Step)


def test_compile_fullgraph(device) -> None:
    inputs = prefill_inputs(device, [20, 13])

    def two(*x: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = run(*x)
        return kernels.merge_attention(out, lse, out * 2, lse)

    compiled = torch.compile(two, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(*inputs), two(*inputs), strict=True):
        assert torch.equal(got, want)


def test_cuda_graph_replay(device) -> None:
    """Captured once, replayed with other lengths and numbers in the same buffers."""
    if device.type != "cuda":
        pytest.skip("CUDA graphs need a CUDA device")
    inputs = prefill_inputs(device, [20, 13], torch.bfloat16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(*inputs)
    for lengths in ([20, 13], [1, 32], [33, 0]):
        fresh = prefill_inputs(device, lengths, torch.bfloat16)
        for buffer, new in zip(inputs, fresh, strict=True):
            buffer.copy_(new)
        for x in captured:
            x.fill_(float("nan"))
        graph.replay()
        for got, want in zip(captured, run(*fresh), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_format": "int4"}, "q_format is 'int4'; it must be one of none, fp8, nvfp4"),
        ({"scale": 0.0}, "scale is 0.0"),
        ({"sparsity": Sparsity(1, 4)}, "sparsity is 1:4; it must be 2:4 or 4:8"),
        ({"qk_segments": (24, 8)}, "sum of qk_segments is 32; it must be the width of q, 40"),
        ({"amax": torch.ones(3)}, "amax is"),
        ({"v": torch.zeros(5, 2, 24)}, r"\[tokens, heads\] of v is \(5, 2\)"),
        ({"k": torch.zeros(20, 2, 32)}, "width of k is 32"),
        ({"k": torch.zeros(20, 2, 40, dtype=torch.float64)}, "dtype of k is torch.float64"),
        ({"cu_seqlens_k": torch.tensor([0, 20])}, "cu_seqlens_k is torch.int64"),
        ({"key_starts": torch.zeros(2, dtype=torch.int32)}, r"key_starts is torch.int32 \(2,\)"),
        ({"q": torch.zeros(20, 40, 2).transpose(1, 2)}, "stride of q's last dimension is 2"),
        ({"q": torch.zeros(20, 3, 40)}, "heads of k is 2; it must be a divisor of q's, 3"),
    ],
)
def test_bad_arguments_are_named(change, message) -> None:
    q, k, v, cu, amax = prefill_inputs(torch.device("cpu"), [20])
    arguments: dict[str, Any] = {
        "q": q, "k": k, "v": v, "cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 20,
        "max_seqlen_k": 20, "scale": 0.2, "amax": amax, **FORMATS,
    }  # fmt: skip
    with pytest.raises(ConfigError, match=message):
        kernels.prefill_attention(**arguments | change)
