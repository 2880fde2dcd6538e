"""Speed of the record kernels beside their peers, in one run on one CUDA device.

    python -m benchmarks.record_kernels                      # about two minutes
    python -m benchmarks.record_kernels --only store dense
    python -m benchmarks.record_kernels --readme             # write the results into the manual

Peers from an installed vLLM: `concat_and_cache_mla` (`auto` and `fp8_ds_mla`), FlashMLA (dense,
and sparse over FP8 records) and `decode_attention_fwd`; a device-to-device copy. A peer that is
not installed is left out. Times are medians of replayed CUDA graphs with the L2 cache flushed
before each run. Inputs are random. Results are checked first: records against `pack_into`, dense
attention against attention over what the records read as, sparse attention over 656-byte records
against FlashMLA. Slots are declared unique, as engines assign them; what finding duplicates costs
is measured apart. Results go to `benchmarks/results/record_kernels.json`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.attention_kernels import (
    DECODE_SHAPES,
    copy_bandwidth,
    decode_peers,
    graph_us,
    require_close,
    row,
    try_import,
    version_of,
)
from benchmarks.calibration_overhead import RESULTS, hardware
from benchmarks.readme import insert

RESULT = RESULTS / "record_kernels.json"
STORED = 65536
"""Tokens stored in a call."""
PAGE, SCALE = 64, 0.05
DENSE_FORMATS = (
    "nvfp4_fp8rope_352",
    "nvfp4_ds_mla_432",
    "nvfp4_ds_mla_368",
    "fp8_ds_mla_656",
)
EVERY_FORMAT_AT = (128, 128, 4096)
"""Shape at which dense decode is measured for all formats."""
TOP_K = 2048
SPARSE_SHAPES = ((128, 64), (128, 128), (1, 64))
"""Batch, heads."""
Rows = Iterator[dict[str, Any]]


def latents(fmt: Any, tokens: int, seed: int = 0) -> tuple[Any, Any]:
    """Random bfloat16 latents and rope parts (None without a rope segment)."""
    import torch

    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(tokens, fmt.width, device="cuda", generator=generator).bfloat16()
    return x[:, : fmt.latent.width], x[:, fmt.latent.width :] if fmt.rope else None


def filled(fmt: Any, tokens: int) -> Any:
    """A cache with random tokens in every slot."""
    import torch

    from mla_quant.kernels.record_store import store_records
    from mla_quant.records import RecordCache

    cache = RecordCache.allocate(fmt, -(-tokens // PAGE), PAGE, device="cuda")
    step = 1 << 20
    for first in range(0, cache.num_slots, step):
        count = min(step, cache.num_slots - first)
        slots = torch.arange(first, first + count, device="cuda")
        store_records(cache, *latents(fmt, count, first), slots, unique_slots=True)
    return cache


def store() -> Rows:
    """Storing tokens, alone and fused with norm and rotation."""
    import torch

    from mla_quant.kernels.record_store import norm_rotate_store, store_records
    from mla_quant.records import RECORDS, RecordCache, pack_into

    shape = (STORED,)
    slots = torch.randperm(STORED, device="cuda")
    for fmt in RECORDS.values():
        cache = RecordCache.allocate(fmt, STORED // PAGE, PAGE, device="cuda")
        latent, rope = latents(fmt, STORED)
        latent = latent.contiguous()
        rope = None if rope is None else rope.contiguous()
        want = RecordCache(torch.zeros_like(cache.data), fmt, PAGE)
        pack_into(want, latent, rope, slots)

        def ours(unique: bool = True, c: Any = cache, x: Any = latent, y: Any = rope) -> None:
            store_records(c, x, y, slots, unique_slots=unique)

        ours()
        if not torch.equal(cache.data, want.data):
            raise SystemExit(f"{fmt.name}: stored records differ from packed ones")
        moved = STORED * (2 * fmt.width + fmt.record_bytes)
        yield row("store", shape, fmt.name, graph_us(ours), bytes=moved)
        if fmt.name == "nvfp4_fp8rope_352":
            us = graph_us(lambda call=ours: call(False))
            yield row("store", shape, f"{fmt.name}, duplicates found", us, bytes=moved)
        if fmt.rope is None or fmt.v_width > fmt.latent.width:
            continue
        weight = torch.ones(fmt.latent.width, device="cuda", dtype=torch.bfloat16)
        positions = torch.arange(STORED, device="cuda") % 4096
        cos_sin = torch.randn(4096, fmt.rope_width, device="cuda").bfloat16()

        def fused(c: Any = cache, x: Any = latent, y: Any = rope, w: Any = weight,
                  p: Any = positions, t: Any = cos_sin) -> None:  # fmt: skip
            norm_rotate_store(
                c, x, y, slots, weight=w, epsilon=1e-6, positions=p, cos_sin=t, unique_slots=True
            )

        def separate(c: Any = cache, x: Any = latent, y: Any = rope, w: Any = weight,
                     p: Any = positions, t: Any = cos_sin) -> None:  # fmt: skip
            normed = torch.nn.functional.rms_norm(x, (x.shape[1],), w, 1e-6)
            cos, sin = t[p].chunk(2, dim=-1)
            even, odd = y[:, 0::2], y[:, 1::2]
            rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(1)
            store_records(c, normed, rotated, slots, unique_slots=True)

        yield row("fused", shape, fmt.name, graph_us(fused), bytes=moved)
        yield row("fused", shape, f"{fmt.name}, torch steps", graph_us(separate), bytes=moved)
        operations = (
            try_import("vllm._custom_ops.rms_norm"),
            try_import("vllm._custom_ops.rotary_embedding"),
        )
        if None not in operations:
            norm, rotary = operations
            normed, rotated = torch.empty_like(latent), rope.clone()

            def kernels(c: Any = cache, x: Any = latent, w: Any = weight, p: Any = positions,
                        t: Any = cos_sin, n: Any = normed, r: Any = rotated,
                        norm: Any = norm, rotary: Any = rotary) -> None:  # fmt: skip
                norm(n, x, w, 1e-6)
                rotary(p, r.unsqueeze(1), None, r.shape[1], t, False)
                store_records(c, n, r, slots, unique_slots=True)

            yield row("fused", shape, f"{fmt.name}, vLLM's steps", graph_us(kernels), bytes=moved)
    peer = try_import("vllm._custom_ops.concat_and_cache_mla")
    if peer is None:
        return
    latent, rope = latents(RECORDS["fp8_ds_mla_656"], STORED)
    latent, rope, one = latent.contiguous(), rope.contiguous(), torch.ones((), device="cuda")
    for kind, width, dtype in (("auto", 576, torch.bfloat16), ("fp8_ds_mla", 656, torch.uint8)):
        data = torch.zeros(STORED // PAGE, PAGE, width, device="cuda", dtype=dtype)

        def theirs(data: Any = data, kind: str = kind) -> None:
            peer(latent, rope, data, slots, kind, one)

        moved = STORED * (1152 + width * data.element_size())
        yield row("store", shape, f"vLLM {kind}", graph_us(theirs), bytes=moved)


def dense() -> Rows:
    """Dense decode over the caches of a whole batch."""
    import torch

    from mla_quant.kernels.decode import OperandFormats, decode_attention
    from mla_quant.kernels.record_decode import dense_decode, gather
    from mla_quant.records import RECORDS

    for shape in DECODE_SHAPES:
        batch, heads, context = shape
        generator = torch.Generator("cuda").manual_seed(1)
        q = torch.randn(batch, heads, 576, device="cuda", generator=generator).bfloat16()
        pages = context // PAGE
        table = torch.randperm(batch * pages, device="cuda").int().view(batch, pages)
        lengths = torch.full((batch,), context, device="cuda", dtype=torch.int32)
        starts = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * context
        flops = 2.0 * batch * heads * context * (576 + 512)
        paged = None
        for name in RECORDS if shape == EVERY_FORMAT_AT else DENSE_FORMATS:
            width = RECORDS[name].width
            cache = filled(RECORDS[name], batch * context)
            values = torch.empty(batch * context, width, device="cuda", dtype=torch.bfloat16)
            gather(cache, table, starts, context, out=values)
            raw = values.view(batch * pages, PAGE, width)
            q_of = q[..., :width].contiguous()
            order = torch.arange(batch * pages, device="cuda").int().view(batch, pages)
            want, _ = decode_attention(
                q_of, raw, order, lengths, torch.ones(6, device="cuda"), latent_width=512,
                scale=SCALE, formats=OperandFormats("none", "none", "none", "none"),
            )  # fmt: skip

            def ours(c: Any = cache, q: Any = q_of, t: Any = table, n: Any = lengths) -> Any:
                return dense_decode(q.unsqueeze(1), c, t, n, scale=SCALE)[0]

            require_close(ours()[:, 0], want)
            moved = batch * context * RECORDS[name].record_bytes
            yield row("dense", shape, name, graph_us(ours), flops=flops, bytes=moved)
            if width == 576:
                paged = SimpleNamespace(
                    q=q, cache=raw, block_table=order, seq_lens=lengths, scale=SCALE, page=PAGE
                )
                last = want
        for measured in decode_peers(paged, shape, last, flops, batch * context * 1152):
            yield {**measured, "kind": "dense"}


def sparse() -> Rows:
    """Sparse decode over top-k lists."""
    import torch

    from mla_quant.kernels.record_decode import KeyList, sparse_decode
    from mla_quant.records import RECORDS

    flash = try_import("vllm.third_party.flashmla.flash_mla_interface.flash_mla_with_kvcache")
    metadata = try_import("vllm.third_party.flashmla.flash_mla_interface.get_mla_metadata")
    tokens = 1 << 20
    caches = {name: filled(RECORDS[name], tokens) for name in DENSE_FORMATS}
    for batch, heads in SPARSE_SHAPES:
        shape = (batch, heads, TOP_K)
        generator = torch.Generator("cuda").manual_seed(2)
        q = torch.randn(batch, 1, heads, 576, device="cuda", generator=generator).bfloat16()
        indices = torch.randint(
            0, tokens, (batch, 1, TOP_K), device="cuda", dtype=torch.int32, generator=generator
        )
        flops = 2.0 * batch * heads * TOP_K * (576 + 512)
        for name, cache in caches.items():

            def ours(c: Any = cache, q: Any = q, i: Any = indices) -> Any:
                return sparse_decode(q, KeyList(c, i), scale=SCALE)[0]

            moved = batch * TOP_K * RECORDS[name].record_bytes
            yield row("sparse", shape, name, graph_us(ours), flops=flops, bytes=moved)
        if flash is None or metadata is None:
            continue
        plan, _ = metadata()
        data = caches["fp8_ds_mla_656"].data.view(-1, PAGE, 1, 656)

        def theirs(q: Any = q, i: Any = indices, d: Any = data, plan: Any = plan) -> Any:
            return flash(
                q, d, None, None, 512, plan, softmax_scale=SCALE, is_fp8_kvcache=True, indices=i
            )[0]

        result = sparse_decode(q, KeyList(caches["fp8_ds_mla_656"], indices), scale=SCALE)[0]
        require_close(theirs(), result)
        moved = batch * TOP_K * 656
        yield row("sparse", shape, "FlashMLA FP8", graph_us(theirs), flops=flops, bytes=moved)


SECTIONS = {"store": store, "dense": dense, "sparse": sparse}


def markdown(result: dict[str, Any]) -> str:
    """The results as tables."""
    lines = [
        f"{result['hardware']}, torch {result['torch']}, Triton {result['triton']}, vLLM "
        f"{result['vllm']}, {result['date']}. Copying reaches {result['copy_tb_per_s']:.2f} TB/s."
    ]
    titles = {
        "store": f"storing {STORED:,} tokens",
        "fused": f"norm, rotation and storing {STORED:,} tokens",
        "dense": "dense decode, batch × heads × context",
        "sparse": "sparse decode, batch × heads × top-k",
    }
    for kind, title in titles.items():
        part = [r for r in result["rows"] if r["kind"] == kind]
        if not part:
            continue
        shapes = list(dict.fromkeys(tuple(r["shape"]) for r in part))
        heads = [" × ".join(map(str, shape)) for shape in shapes]
        lines += ["", f"{title}: µs (TB/s)", "", "| | " + " | ".join(heads) + " |"]
        lines.append("|" + "---|" * (len(shapes) + 1))
        for name in dict.fromkeys(r["name"] for r in part):
            found = {tuple(r["shape"]): r for r in part if r["name"] == name}
            cells = [
                f"{found[s]['us']:.0f} ({found[s]['tb_per_s']:.2f})" if s in found else ""
                for s in shapes
            ]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=tuple(SECTIONS), default=tuple(SECTIONS))
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--readme", action="store_true", help="render the results, run nothing")
    args = parser.parse_args()
    if args.readme:
        insert("record-kernels", markdown(json.loads(args.out.read_text(encoding="utf-8"))))
        return
    result: dict[str, Any] = {
        **hardware("cuda"),
        "triton": version_of("triton"),
        "vllm": version_of("vllm"),
        "copy_tb_per_s": copy_bandwidth() / 1e12,
        "rows": [],
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for name in args.only:
        for measured in SECTIONS[name]():
            result["rows"].append(measured)
            args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(markdown(result))


if __name__ == "__main__":
    main()
