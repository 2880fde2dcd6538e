"""Speed of the attention kernels beside their peers, in one run on one CUDA device.

    python -m benchmarks.attention_kernels                      # about three minutes
    python -m benchmarks.attention_kernels --only decode --sweep
    python -m benchmarks.attention_kernels --readme             # write the results into the manual

Peers: FlashAttention-3, `decode_attention_fwd`, FlashMLA (dense, SM90) and `merge_attn_states` from
an installed vLLM, ModelOpt's `triton_fa`, and a device-to-device copy. A peer that is not installed
is left out. Times are medians by CUDA events with the L2 cache flushed before each run, all but
prefill as replayed CUDA graphs; inputs are random, outputs checked first. A prefill includes the
quantization of Q, K and V; a decode step with a side cache does not include writing it, which is
measured apart. `--sweep` also measures tilings that are not the default. Results go to
`benchmarks/results/attention_kernels.json`, each figure as soon as it is there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.calibration_overhead import RESULTS, hardware
from benchmarks.readme import insert

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


def require_close(a: Any, b: Any) -> None:
    """Stop if two results in bfloat16 differ by more than rounding."""
    error = float((a.float() - b.float()).norm() / b.float().norm())
    if not error < 0.01:
        raise SystemExit(f"a peer's result is {error:.2%} off ours: nothing to compare")


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


Rows = Iterator[dict[str, Any]]


def row(
    kind: str,
    shape: tuple[int, ...],
    name: str,
    us: float,
    configuration: Any = None,
    default: bool = True,
    **work: float,
) -> dict[str, Any]:
    """One measurement with what it achieved.

    `configuration`: a tiling, empty for the one that is chosen, None for a peer; `default`: whether
    it is the one in use.
    """
    result: dict[str, Any] = {"kind": kind, "shape": list(shape), "name": name, "us": us}
    if configuration is not None:
        result |= {"configuration": list(configuration), "default": default}
    if "flops" in work:
        result["tflops"] = work["flops"] / us / 1e6
    if "bytes" in work:
        result["tb_per_s"] = work["bytes"] / us / 1e6
    print(json.dumps(result), flush=True)
    return result


def prefill(sweep: bool = False) -> Rows:
    """Causal prefill, 192/128, quantization of Q, K and V included."""
    import torch

    from mla_quant.kernels.prefill import prefill_attention, prefill_configs
    from mla_quant.reference import Sparsity

    configs = prefill_configs(torch.cuda.get_device_capability(), 192, 128)
    flash = try_import("vllm.vllm_flash_attn.flash_attn_varlen_func")
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

        def ours(
            fmt: str, sparsity: Any = None, config: Any = None,
            q=q, k=k, v=v, cu=cu, n=length, a=amax, s=scale,
        ):  # fmt: skip
            return prefill_attention(
                q, k, v, cu, cu, n, n, scale=s, amax=a, sparsity=sparsity, config=config,
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
            for config in configs if sweep else configs[:1]:
                us = median_us(lambda f=fmt, s=sparsity, c=config, call=ours: call(f, s, c))
                yield row("prefill", shape, name, us, config, config == configs[0], flops=flops)
        if flash is not None:

            def fa3(q=q, k=k, v=v, cu=cu, n=length, s=scale):
                return flash(
                    q, k, v, max_seqlen_q=n, cu_seqlens_q=cu, max_seqlen_k=n, cu_seqlens_k=cu,
                    softmax_scale=s, causal=True, fa_version=3, return_softmax_lse=True,
                )  # fmt: skip

            require_close(fa3()[0], ours("none")[0])
            yield row("prefill", shape, "FlashAttention-3", median_us(fa3), flops=flops)


def modelopt(_: bool = False) -> Rows:
    """ModelOpt's prefill with NVFP4 P and V; it has one width for Q, K and V."""
    import torch

    attention = try_import("modelopt.torch.kernels.common.attention.triton_fa.attention")
    for batch, length, heads in PREFILL_SHAPES if attention is not None else ():
        x = torch.randn(3, batch * length, heads, 128, device="cuda", dtype=torch.bfloat16)
        starts = torch.arange(batch, device="cuda", dtype=torch.int32) * length
        lengths = torch.full_like(starts, length)

        def peer(x=x, starts=starts, lengths=lengths, n=length):
            return attention(*x, starts, lengths, n, is_causal=True, p_qdq="nvfp4", v_qdq="nvfp4")

        peer()
        flops = 2 * 256 * batch * heads * length * (length + 1) / 2
        name = "ModelOpt triton_fa 128/128, NVFP4 P and V"
        us = median_us(peer, rep_ms=1)
        yield row("prefill", (batch, length, heads), name, us, flops=flops)


def operands(_: bool = False) -> Rows:
    """Quantization of operands and merging: bound by memory."""
    import torch

    from mla_quant.kernels import merge_attention, quantize_features, quantize_tokens

    for tokens, heads in ((16384, 16), (16384, 128)):
        k = torch.randn(tokens, heads, 192, device="cuda", dtype=torch.bfloat16)
        v = torch.randn(tokens, heads, 128, device="cuda", dtype=torch.bfloat16)
        cu = torch.tensor([0, tokens], device="cuda", dtype=torch.int32)
        amax = torch.full((1,), 5.5, device="cuda")
        shape = (tokens, heads)
        # Tens of µs do not reach the bandwidth of a copy of a gigabyte.
        for name, x in (("K", k), ("V", v)):
            y = torch.empty_like(x)
            us = graph_us(lambda x=x, y=y: y.copy_(x))
            yield row("quantize", shape, f"copy of {name}", us, bytes=4 * x.numel())
        for fmt in ("fp8", "nvfp4"):
            us = graph_us(lambda k=k, f=fmt, a=amax: quantize_features(k, f, a, torch.bfloat16))
            yield row("quantize", shape, f"K {fmt}", us, bytes=4 * k.numel())
            us = graph_us(
                lambda v=v, f=fmt, a=amax, cu=cu, n=tokens: quantize_tokens(
                    v, f, a, torch.bfloat16, cu, n
                )
            )
            yield row("quantize", shape, f"V {fmt}", us, bytes=4 * v.numel())
        lse = torch.randn(heads, tokens, device="cuda")
        work = 3 * 2 * v.numel() + 3 * 4 * lse.numel()
        other = torch.randn_like(v)
        us = graph_us(lambda a=v, b=other, s=lse: merge_attention(a, s, b, s))
        yield row("merge", shape, "ours", us, bytes=work)
        peer = try_import("vllm.v1.attention.ops.merge_attn_states.merge_attn_states")
        if peer is not None:
            inputs = (torch.empty_like(v), v, lse, other, lse, torch.empty_like(lse))
            us = graph_us(lambda f=peer, x=inputs: f(*x))
            yield row("merge", shape, "vLLM merge_attn_states", us, bytes=work)


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
        self.context = context
        self.cu = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * context

    def write(self, records: Any, layout: Any) -> None:
        """Fill a side cache with all tokens."""
        from mla_quant.kernels import operand_cache

        operand_cache.write_operands(
            self.cache, records, layout, self.block_table, self.seq_lens, self.amax,
            cu_seqlens_new=self.cu, max_new_tokens=self.context,
        )  # fmt: skip


def decode_flops(batch: int, heads: int, context: int) -> float:
    """Of both products."""
    return 2.0 * batch * heads * context * (576 + 512)


def graph_us(call: Callable[[], object]) -> float:
    """Median time of a call in µs, replayed as a CUDA graph: what an engine pays."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return median_us(graph.replay)


DECODE_KINDS = {
    "unquantized": ("none", False),
    "NVFP4, side cache": ("nvfp4", True),
    "NVFP4, quantized on read": ("nvfp4", False),
    "FP8, side cache": ("fp8", True),
}
"""Format of all four operands, and whether K and V come from a side cache."""

SWEEP = {
    "raw": ((16, 64, 2, 4, 4, 2), (32, 64, 2, 4, 8, 5), (64, 32, 4, 2, 8, 3)),
    "stored": (
        (16, 64, 2, 4, 4, 2),
        (16, 64, 2, 4, 8, 5),
        (16, 128, 4, 8, 8, 5),
        (32, 64, 2, 4, 4, 2),
    ),
    "read": (),
}
"""Tilings beside the defaults, by source of the operands: see `kernels.decode.Configuration`."""


def decode_candidates(heads: int, kind: str, sweep: bool) -> list[Any]:
    """None, which is what users get, then tilings of the portable kernel."""
    import torch

    from mla_quant.kernels import decode

    if not sweep:
        return [None]
    fmt, stored = DECODE_KINDS[kind]
    formats = decode.OperandFormats(fmt, fmt, fmt, fmt)
    major, minor = torch.cuda.get_device_capability()
    source = decode.operand_source(formats, stored, stored)
    portable = decode.choose_configuration(heads, 10 * major + minor, source)
    others = [decode.Configuration(*c) for c in SWEEP[source] if fmt != "fp8"]
    rows = (16,) if heads <= 16 else (32, 64)
    return [None, portable, *(c for c in others if c.block_rows in rows and c != portable)]


def decode_call(paged: Any, kind: str, configuration: Any) -> Callable[[], Any]:
    """One decode step of ours."""
    from mla_quant.kernels import decode, operand_cache

    fmt, stored = DECODE_KINDS[kind]
    formats = decode.OperandFormats(fmt, fmt, fmt, fmt)
    records = layout = None
    if stored:
        layout = operand_cache.OperandLayout(512, 64, fmt, fmt)
        records = operand_cache.allocate(paged.cache.shape[0], paged.page, layout, "cuda")
        paged.write(records, layout)
    return lambda: decode.decode_attention(
        paged.q, paged.cache, paged.block_table, paged.seq_lens, paged.amax, latent_width=512,
        scale=paged.scale, formats=formats, records=records, layout=layout,
        out_dtype=paged.q.dtype, configuration=configuration,
    )  # fmt: skip


def _compile(job: tuple[int, str, Any]) -> str:
    """Compile one decode kernel, in a process of its own."""
    heads, kind, configuration = job
    try:
        decode_call(Paged(2, heads, 1024), kind, configuration)()
    except Exception as error:
        return f"{heads} heads, {kind}, {configuration}: {error!r}"
    return ""


def decode(sweep: bool = False) -> Rows:
    """The eight shapes."""
    import concurrent.futures
    import multiprocessing
    import os

    import torch

    jobs = [
        (heads, kind, candidate)
        for heads in (16, 128)
        for kind in DECODE_KINDS
        for candidate in decode_candidates(heads, kind, sweep)
    ]
    # Compilation takes seconds a kernel: all cores at once, into Triton's cache.
    workers = min(len(jobs), os.cpu_count() or 1)
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        messages = list(pool.map(_compile, jobs))
    failed = [job for job, message in zip(jobs, messages, strict=True) if message]
    print("\n".join(filter(None, messages)), file=sys.stderr, flush=True)
    for shape in DECODE_SHAPES:
        heads = shape[1]
        paged = Paged(*shape)
        flops = decode_flops(*shape)
        raw = paged.cache.numel() * 2.0
        outputs = {}
        for kind in DECODE_KINDS:
            candidates = decode_candidates(heads, kind, sweep)
            for candidate in candidates:
                if (heads, kind, candidate) in failed:
                    continue
                call = decode_call(paged, kind, candidate)
                out = call()[0]
                assert out.isfinite().all(), (shape, kind, candidate)
                outputs.setdefault(kind, out)
                yield row(
                    "decode", shape, kind, graph_us(call),
                    dataclasses.astuple(candidate) if candidate else (), candidate is None,
                    flops=flops, bytes=raw,
                )  # fmt: skip
        yield from decode_peers(paged, shape, outputs["unquantized"], flops, raw)
        if shape in ((1, 16, 8192), (128, 16, 8192)):
            yield write_time(paged, shape)
        del paged, outputs
        torch.cuda.empty_cache()


def write_time(paged: Any, shape: tuple[int, ...]) -> dict[str, Any]:
    """What a decode step pays for writing one token a sequence into the side cache."""
    from mla_quant.kernels import operand_cache

    layout = operand_cache.OperandLayout(512, 64, "nvfp4", "nvfp4")
    records = operand_cache.allocate(paged.cache.shape[0], paged.page, layout, "cuda")
    us = graph_us(
        lambda: operand_cache.write_operands(
            paged.cache, records, layout, paged.block_table, paged.seq_lens, paged.amax
        )
    )
    return row("decode", shape, "writing one token a sequence into the side cache", us)


def decode_peers(
    paged: Any, shape: tuple[int, int, int], ours: Any, flops: float, raw: float
) -> Rows:
    """vLLM's Triton decode and FlashMLA, unquantized; ours is compared with them."""
    import torch

    batch, heads, context = shape
    vllm = try_import("vllm.v1.attention.ops.triton_decode_attention.decode_attention_fwd")
    splits_of = try_import("vllm.v1.attention.backends.mla.triton_mla._compute_num_kv_splits")
    if vllm is not None and splits_of is not None:
        multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
        splits = splits_of(context, multiprocessors)
        out = torch.empty(batch, heads, 512, device="cuda", dtype=torch.bfloat16)
        lse = torch.empty(batch, heads, device="cuda", dtype=torch.bfloat16)
        scratch = torch.empty(batch, heads, splits, 513, device="cuda")
        one = torch.ones((), device="cuda")
        latent = paged.cache.unsqueeze(2)

        def peer() -> None:
            vllm(
                paged.q, latent, latent[..., :512], out, lse, paged.block_table, paged.seq_lens,
                scratch, splits, paged.scale, paged.page, k_scale=one, v_scale=one, is_mla=True,
            )  # fmt: skip

        peer()
        require_close(out, ours)
        us = graph_us(peer)
        yield row("decode", shape, "vLLM decode_attention_fwd", us, flops=flops, bytes=raw)
    flash = try_import("vllm.third_party.flashmla.flash_mla_interface.flash_mla_with_kvcache")
    metadata = try_import("vllm.third_party.flashmla.flash_mla_interface.get_mla_metadata")
    if flash is not None and metadata is not None:
        plan, _ = metadata()

        def peer_flash() -> Any:
            return flash(
                paged.q.unsqueeze(1), paged.cache.unsqueeze(2), paged.block_table, paged.seq_lens,
                512, plan, softmax_scale=paged.scale,
            )  # fmt: skip

        require_close(peer_flash()[0][:, 0], ours)
        us = graph_us(peer_flash)
        yield row("decode", shape, "FlashMLA dense", us, flops=flops, bytes=raw)


SECTIONS = {"prefill": prefill, "decode": decode, "operands": operands, "modelopt": modelopt}


def markdown(result: dict[str, Any]) -> str:
    """The results as tables."""
    rows = [r for r in result["rows"] if r.get("default", True)]
    lines = [
        f"{result['hardware']}, torch {result['torch']}, Triton {result['triton']}, vLLM "
        f"{result['vllm']}, {result['date']}.",
    ]
    if result.get("copy_tb_per_s"):
        lines.append(f"Copying reaches {result['copy_tb_per_s']:.2f} TB/s.")
    lines += filter(None, [result.get("remark")])
    for kind, unit in (
        ("prefill", "TFLOP/s"),
        ("decode", "µs"),
        ("quantize", "TB/s"),
        ("merge", "TB/s"),
    ):
        part = [r for r in rows if r["kind"] == kind]
        if not part:
            continue
        names = list(dict.fromkeys(r["name"] for r in part))
        shapes = list(dict.fromkeys(tuple(r["shape"]) for r in part))
        head = {
            "prefill": "batch × length × heads", "decode": "batch × heads × context",
            "quantize": "tokens × heads", "merge": "tokens × heads",
        }[kind]  # fmt: skip
        lines += ["", f"{kind}, {unit}", "", f"| {head} | " + " | ".join(names) + " |"]
        lines.append("|" + "---|" * (len(names) + 1))
        field = {"TFLOP/s": "tflops", "µs": "us", "TB/s": "tb_per_s"}[unit]
        for shape in shapes:
            cells = []
            for name in names:
                found = [r for r in part if tuple(r["shape"]) == shape and r["name"] == name]
                digits = 2 if unit == "TB/s" else 0
                cells.append(f"{found[0][field]:.{digits}f}" if found else "")
            lines.append(f"| {' × '.join(map(str, shape))} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def identity(measured: dict[str, Any]) -> tuple[Any, ...]:
    """What a row is of; peers are measured anew in every run."""
    return (*(str(measured.get(k)) for k in ("kind", "shape", "name", "configuration")),)


def version_of(package: str) -> str:
    """Version of an installed package, "none" without it."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def main() -> None:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=tuple(SECTIONS), default=tuple(SECTIONS))
    parser.add_argument("--sweep", action="store_true", help="also tilings that are no default")
    parser.add_argument(
        "--decode-kinds", nargs="*", choices=tuple(DECODE_KINDS), default=tuple(DECODE_KINDS)
    )
    parser.add_argument(
        "--update", action="store_true", help="keep what an earlier run measured and this does not"
    )
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--readme", action="store_true", help="render the results, run nothing")
    args = parser.parse_args()
    if args.readme:
        insert("kernels", markdown(json.loads(args.out.read_text(encoding="utf-8"))))
        return
    for kind in set(DECODE_KINDS) - set(args.decode_kinds):
        del DECODE_KINDS[kind]
    earlier = []
    if args.update:
        earlier = json.loads(args.out.read_text(encoding="utf-8"))["rows"]
    result = {
        **hardware("cuda"),
        "triton": version_of("triton"),
        "vllm": version_of("vllm"),
        "copy_tb_per_s": copy_bandwidth() / 1e12,
        "rows": [],
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    written = result
    for name in args.only:
        section: Any = SECTIONS[name]
        for measured in section(args.sweep):
            result["rows"].append(measured)
            known = {identity(r) for r in result["rows"]}
            written = {**result, "rows": [r for r in earlier if identity(r) not in known]}
            written["rows"] += result["rows"]
            args.out.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    print(markdown(written))


if __name__ == "__main__":
    main()
