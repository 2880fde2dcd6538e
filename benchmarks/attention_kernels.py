"""Speed of the attention kernels beside their peers, in one run on one CUDA device.

    python -m benchmarks.attention_kernels                     # everything: about two minutes
    python -m benchmarks.attention_kernels --only decode
    python -m benchmarks.attention_kernels --readme            # write the results into README.md

Peers: FlashAttention-3, `decode_attention_fwd`, FlashMLA (dense, SM90) and `merge_attn_states` from
an installed vLLM, ModelOpt's `triton_fa`, and a device-to-device copy. A peer that is not installed
is left out. Times are medians by CUDA events with the L2 cache flushed before each run; inputs are
random, outputs are poisoned and checked first. A prefill's time includes the quantization of Q, K
and V; a decode step with a side cache does not write it (`--only write` measures that). Results go
to `benchmarks/results/attention_kernels.json`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from benchmarks.calibration_overhead import RESULTS

RESULT = RESULTS / "attention_kernels.json"
PREFILL_SHAPES = ((1, 16384, 16), (2, 8192, 128))
DECODE_SHAPES = (
    (1, 16, 8192), (8, 16, 8192), (32, 16, 8192), (128, 16, 8192),
    (64, 16, 32768), (1, 128, 32768), (32, 128, 8192), (128, 128, 4096),
)  # fmt: skip
"""Batch, heads, context."""
FORMATS = ("q", "k", "p", "v")


def median_us(call: Callable[[], object], rep_ms: int = 40) -> float:
    """Median time in µs."""
    from triton.testing import do_bench

    return float(do_bench(call, warmup=10, rep=rep_ms, return_mode="median")) * 1e3


def try_import(path: str) -> Any:
    """An object by its dotted path, or None where its package is missing."""
    import importlib

    module, name = path.rsplit(".", 1)
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return None


def copy_bandwidth() -> float:
    """Bytes read plus written per second of a large copy."""
    import torch

    x = torch.randint(0, 255, (1 << 30,), dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    return 2 * x.numel() / (median_us(lambda: y.copy_(x)) * 1e-6)


def row(kind: str, shape: tuple[int, ...], name: str, us: float, **work: float) -> dict[str, Any]:
    """One measurement with what it achieved."""
    result: dict[str, Any] = {"kind": kind, "shape": list(shape), "name": name, "us": us}
    if "flops" in work:
        result["tflops"] = work["flops"] / us / 1e6
    if "bytes" in work:
        result["tb_per_s"] = work["bytes"] / us / 1e6
    print(json.dumps(result), flush=True)
    return result


def prefill() -> list[dict[str, Any]]:
    """Causal prefill, 192/128, quantization of Q, K and V included."""
    import torch

    from mla_quant.kernels import prefill_attention
    from mla_quant.reference import Sparsity

    results = []
    flash = try_import("vllm.vllm_flash_attn.flash_attn_varlen_func")
    modelopt = try_import("modelopt.torch.kernels.common.attention.triton_fa.attention")
    for shape in PREFILL_SHAPES:
        batch, length, heads = shape
        generator = torch.Generator(device="cuda").manual_seed(0)

        def normal(width: int, shape=shape, generator=generator) -> torch.Tensor:
            return torch.randn(
                shape[0] * shape[1], shape[2], width, device="cuda", dtype=torch.bfloat16,
                generator=generator,
            )  # fmt: skip

        q, k, v = normal(192), normal(192), normal(128)
        cu = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * length
        amax = torch.stack(
            [x.abs().max().float() for x in (q, k, v)] + [torch.ones((), device="cuda")]
        )
        pairs = batch * heads * length * (length + 1) / 2
        flops, scale = 2 * pairs * 320, 192**-0.5

        def ours(fmt: str, sparsity: Any = None, q=q, k=k, v=v, cu=cu, n=length, a=amax, s=scale):
            return prefill_attention(
                q, k, v, cu, cu, n, n, scale=s, amax=a, sparsity=sparsity,
                **{f"{x}_format": fmt for x in FORMATS},
            )  # fmt: skip

        for name, fmt, sparsity in (
            ("unquantized", "none", None),
            ("FP8", "fp8", None),
            ("NVFP4", "nvfp4", None),
            ("NVFP4 + 2:4", "nvfp4", Sparsity(2, 4)),
        ):
            out, _ = ours(fmt, sparsity)
            assert out.isfinite().all()
            us = median_us(lambda f=fmt, s=sparsity, call=ours: call(f, s))
            results.append(row("prefill", shape, name, us, flops=flops))
        if flash is not None:

            def fa3(q=q, k=k, v=v, cu=cu, n=length, s=scale):
                return flash(
                    q, k, v, max_seqlen_q=n, cu_seqlens_q=cu, max_seqlen_k=n, cu_seqlens_k=cu,
                    softmax_scale=s, causal=True, fa_version=3, return_softmax_lse=True,
                )  # fmt: skip

            torch.testing.assert_close(fa3()[0], ours("none")[0], rtol=0, atol=0.03)
            results.append(row("prefill", shape, "FlashAttention-3", median_us(fa3), flops=flops))
        if modelopt is not None:
            # It has one width for Q, K and V.
            square = [normal(128) for _ in range(3)]
            starts = cu[:-1].contiguous()
            lengths = torch.full((batch,), length, device="cuda", dtype=torch.int32)

            def peer(x=square, starts=starts, lengths=lengths, n=length):
                return modelopt(
                    *x, starts, lengths, n, is_causal=True, p_qdq="nvfp4", v_qdq="nvfp4"
                )

            peer()
            us = median_us(peer, rep_ms=1)
            name = "ModelOpt triton_fa 128/128, NVFP4 P and V"
            results.append(row("prefill", shape, name, us, flops=2 * pairs * 256))
    return results


def operands() -> list[dict[str, Any]]:
    """Quantization of operands and merging: bound by memory."""
    import torch

    from mla_quant.kernels import merge_attention, quantize_features, quantize_tokens

    results = []
    for tokens, heads in ((16384, 16), (16384, 128)):
        k = torch.randn(tokens, heads, 192, device="cuda", dtype=torch.bfloat16)
        v = torch.randn(tokens, heads, 128, device="cuda", dtype=torch.bfloat16)
        cu = torch.tensor([0, tokens], device="cuda", dtype=torch.int32)
        amax = torch.full((1,), 5.5, device="cuda")
        shape = (tokens, heads)
        for fmt in ("fp8", "nvfp4"):
            us = median_us(lambda k=k, f=fmt, a=amax: quantize_features(k, f, a, torch.bfloat16))
            results.append(row("quantize", shape, f"K {fmt}", us, bytes=4 * k.numel()))
            us = median_us(
                lambda v=v, f=fmt, a=amax, cu=cu, n=tokens: quantize_tokens(
                    v, f, a, torch.bfloat16, cu, n
                )
            )
            results.append(row("quantize", shape, f"V {fmt}", us, bytes=4 * v.numel()))
        lse = torch.randn(heads, tokens, device="cuda")
        work = 3 * 2 * v.numel() + 3 * 4 * lse.numel()
        other = torch.randn_like(v)
        us = median_us(lambda a=v, b=other, s=lse: merge_attention(a, s, b, s))
        results.append(row("merge", shape, "ours", us, bytes=work))
        peer = try_import("vllm.v1.attention.ops.merge_attn_states.merge_attn_states")
        if peer is not None:
            inputs = (torch.empty_like(v), v, lse, other, lse, torch.empty_like(lse))
            us = median_us(lambda f=peer, x=inputs: f(*x))
            results.append(row("merge", shape, "vLLM merge_attn_states", us, bytes=work))
    return results


class Paged:
    """A paged latent cache of random numbers, larger than L2, with a shuffled block table."""

    def __init__(self, batch: int, heads: int, context: int, page: int = 64) -> None:
        import torch

        pages = math.ceil(context / page)
        generator = torch.Generator(device="cuda").manual_seed(0)
        self.page, self.scale = page, 192**-0.5
        self.cache = torch.randn(
            batch * pages, page, 576, device="cuda", dtype=torch.bfloat16, generator=generator
        )
        order = torch.randperm(batch * pages, device="cuda", generator=generator)
        self.block_table = order.to(torch.int32).view(batch, pages)
        self.seq_lens = torch.full((batch,), context, device="cuda", dtype=torch.int32)
        self.q = torch.randn(
            batch, heads, 576, device="cuda", dtype=torch.bfloat16, generator=generator
        ) * 0.5  # fmt: skip
        self.amax = torch.tensor([3.0, 3.0, 5.5, 5.5, 5.5, 1.0], device="cuda")


def decode_flops(batch: int, heads: int, context: int) -> float:
    """Of both products."""
    return 2.0 * batch * heads * context * (576 + 512)
