"""Compile every kernel launch of the package for a GPU that need not be there.

    python -m tests.kernels.ahead_of_time 90        # compute capability 9.0
    python -m tests.kernels.ahead_of_time 90 records  # those of records alone
    python -m tests.kernels.ahead_of_time variants  # how many of each kernel one model needs

The host functions run on the CPU with their launches caught, so what is compiled is what they
would launch. Every target gets every kernel with the tilings that its GPU would use; what costs
long to compile (other formats, sparsity, fp32, odd widths) is spread over the targets. Prints one
JSON object a kernel; a compiler error ends it. Must not run under TRITON_INTERPRET.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from mla_quant.kernels import decode, operand_cache, prefill, record_decode, record_store
from mla_quant.kernels.devices import shared_bytes
from mla_quant.kernels.merge import merge_attention
from mla_quant.kernels.record_store import norm_rotate_store, store_records
from mla_quant.records import RECORDS, RecordCache
from mla_quant.reference import Sparsity

POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}


def capture(call: Callable[[], object]) -> list[tuple[JITFunction, dict[str, Any], dict[str, Any]]]:
    """Kernel, arguments and options of every launch of a host function."""
    launches = []
    original = JITFunction.run

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        names = self.arg_names
        arguments = dict(zip(names, args, strict=False))
        arguments |= {k: v for k, v in kwargs.items() if k in names}
        options = {k: v for k, v in kwargs.items() if k not in names}
        for parameter in self.params:
            if parameter.name not in arguments:
                arguments[parameter.name] = parameter.default
        launches.append((self, arguments, options))

    JITFunction.run = run
    try:
        call()
    finally:
        JITFunction.run = original
    return launches


Specialization = tuple[
    dict[str, str], dict[tuple[int, ...], Any], dict[tuple[int, ...], list[list[Any]]]
]


def specialization(kernel: JITFunction, arguments: dict[str, Any]) -> Specialization:
    """Signature, constants and attributes that the launcher compiles a kernel for."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for i, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[(i,)] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
            if not parameter.do_not_specialize_on_alignment:
                attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        elif parameter.do_not_specialize:
            signature[parameter.name] = "i32"
        elif value == 1:
            signature[parameter.name] = "constexpr"
            constants[(i,)] = 1
        else:
            signature[parameter.name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
    assert list(signature) == kernel.arg_names
    return signature, constants, attributes


def compile_launch(
    kernel: JITFunction, arguments: dict[str, Any], options: dict[str, Any], capability: int
) -> Any:
    """Compile one launch, specialized as the launcher would."""
    signature, constants, attributes = specialization(kernel, arguments)
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        source = GluonASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    else:
        source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def prefill_calls(capability: tuple[int, int]) -> Iterator[Callable[[], object]]:
    cu = torch.tensor([0, 8], dtype=torch.int32)
    amax = torch.ones(4)

    def call(width: int, v_width: int, dtype: torch.dtype, config: Any, **kwargs: Any) -> object:
        q, v = torch.zeros(8, 2, width, dtype=dtype), torch.zeros(8, 2, v_width, dtype=dtype)
        return prefill.prefill_attention(
            q, q, v, cu, cu, 8, 8, scale=0.1, amax=amax, config=config, **kwargs
        )

    formats = ["q_format", "k_format", "p_format", "v_format"]
    nvfp4 = dict.fromkeys(formats, "nvfp4")
    number = 10 * capability[0] + capability[1]
    first, *others = prefill.prefill_configs(capability, 192, 128)
    yield lambda: call(192, 128, torch.bfloat16, first, **nvfp4)
    for fmt in ("none", "fp8") if number in (80, 90) else ():
        kwargs = dict.fromkeys(formats, fmt)
        yield lambda k=kwargs: call(192, 128, torch.bfloat16, first, **k)
    for config in others if number in (80, 90) else ():
        yield lambda c=config: call(192, 128, torch.bfloat16, c, **nvfp4)
    sparsity = {90: Sparsity(2, 4), 120: Sparsity(4, 8)}.get(number)
    if sparsity is not None:
        yield lambda: call(192, 128, torch.bfloat16, first, sparsity=sparsity, **nvfp4)
    widths = {90: (192, 256), 120: (192, 256), 100: (96, 64)}.get(number)
    if widths is not None:
        config = prefill.prefill_configs(capability, *widths)[0]
        yield lambda: call(*widths, torch.float16, config, **nvfp4)
    if number == 80:
        config = prefill.prefill_configs(capability, 192, 128, 4)[0]
        yield lambda: call(192, 128, torch.float32, config)


def decode_calls(capability: tuple[int, int]) -> Iterator[Callable[[], object]]:
    number = 10 * capability[0] + capability[1]
    latent, rope, page = 512, 64, 64
    lengths = torch.tensor([100], dtype=torch.int32)
    table = torch.zeros(1, 2, dtype=torch.int32)
    amax = torch.ones(6)

    def call(
        formats: decode.OperandFormats,
        layout: operand_cache.OperandLayout | None = None,
        heads: int = 16,
        dtype: torch.dtype = torch.bfloat16,
        **kwargs: Any,
    ) -> None:
        cache = torch.zeros(2, page, latent + rope, dtype=dtype)
        records = None
        if layout is not None:
            records = operand_cache.allocate(2, page, layout, "cpu")
            # A decode step, speculative tokens, a prefill: a tiling each.
            for new in (1, 4, 100):
                starts = torch.tensor([0, new], dtype=torch.int32)
                operand_cache.write_operands(
                    cache, records, layout, table, lengths, amax,
                    cu_seqlens_new=starts if new > 1 else None, max_new_tokens=new,
                )  # fmt: skip
        original = decode._device_properties
        decode._device_properties = lambda device: (number, 8)  # type: ignore[assignment]
        try:
            decode.decode_attention(
                torch.zeros(1, heads, latent + rope, dtype=dtype),
                cache,
                table,
                lengths,
                amax,
                latent_width=latent,
                scale=0.1,
                formats=formats,
                records=records,
                layout=layout,
                **kwargs,
            )
        finally:
            decode._device_properties = original

    none, fp8, nvfp4 = (decode.OperandFormats(*[fmt] * 4) for fmt in ("none", "fp8", "nvfp4"))
    stored_fp8 = operand_cache.OperandLayout(latent, rope, "fp8", "fp8")
    stored = operand_cache.OperandLayout(latent, rope)
    cases = [("raw", none, None), ("stored", nvfp4, stored), ("read", nvfp4, None)]
    if number == 100:
        cases.append(("stored", fp8, stored_fp8))
    if number in (80, 120):
        # Records of V alone beside raw K: the largest tiles of all.
        v_fp8 = decode.OperandFormats("fp8", "none", "fp8", "fp8")
        cases.append(("partial", v_fp8, operand_cache.OperandLayout(latent, rope, "none", "fp8")))
    # The kernel that combines ranges takes another shape for each of these but 1.
    splits = itertools.cycle((1, 2, 7, 33, 128))
    for source, formats, layout in cases:
        chosen = decode.configurations(number, source)
        # 10.0 has the tilings of 9.0, and another matrix unit: one of each does.
        for configuration in chosen[:1] if number == 100 else chosen:
            kwargs = {"num_splits": next(splits), "configuration": configuration}
            heads = configuration.block_rows
            yield lambda f=formats, a=layout, h=heads, k=kwargs: call(f, a, h, **k)
    if number == 90:
        yield lambda: call(nvfp4, stored, 128, num_splits=6)
        yield lambda: call(none, None, 128, num_splits=6)
    # Models in fp32: raw tiles of twice the size, whatever dtype the products have.
    fp32 = {"dtype": torch.float32, "num_splits": 1}
    if number == 120:
        yield lambda: call(none, **fp32)
    if number == 80:
        yield lambda: call(nvfp4, **fp32)
    rope_format = {100: "fp8", 120: "none"}.get(number)
    if rope_format is not None:
        formats = decode.OperandFormats(q_rope=rope_format, k_rope=rope_format)
        layout = operand_cache.OperandLayout(latent, rope, k_rope_format=rope_format)
        yield lambda f=formats, a=layout: call(f, a, num_splits=1)
    sparsity = {80: Sparsity(2, 4), 100: Sparsity(4, 8)}.get(number)
    if sparsity is not None:
        yield lambda: call(nvfp4, stored, num_splits=1, sparsity=sparsity)


def other_calls() -> Iterator[Callable[[], object]]:
    from mla_quant.formats import NVFP4
    from mla_quant.observers import Observer, _collect_in_one_pass

    out, lse = torch.zeros(4, 2, 128, dtype=torch.bfloat16), torch.zeros(2, 4)
    yield lambda: merge_attention(out, lse, out, lse)
    for axis in (-1, -2):
        observer = Observer("k", NVFP4, axis, "max", 99.9, torch.device("cpu"))
        x = torch.zeros(1, 2, 128, 192, dtype=torch.bfloat16)
        valid = torch.ones(1, 1, 128, 1, dtype=torch.bool)
        yield lambda o=observer, x=x: _collect_in_one_pass(o, x, None)
        yield lambda o=observer, x=x, v=valid: _collect_in_one_pass(o, x, v)


# Formats by target: all of them for all would take too long.
RECORD_FORMATS = {
    80: ("fp8_ds_mla_656",),
    90: ("nvfp4_fp8rope_352",),
    100: ("dsv4_fp8_584",),
    120: ("nvfp4_outer_304", "dsv4_nvfp4_384"),
}


# Quantized attention over records by target: record, formats of operands, heads, dtype. The most
# shared memory is taken where V is not quantized, the most registers where everything is.
UNQUANTIZED = decode.OperandFormats(*["none"] * 4)
ALL_NVFP4 = decode.OperandFormats()
NVFP4_P = decode.OperandFormats("none", "none", "nvfp4", "none")
NVFP4_BUT_P = decode.OperandFormats("nvfp4", "nvfp4", "none", "nvfp4", "fp8", "fp8")
ALL_FP8 = decode.OperandFormats(*["fp8"] * 4)
FP8_BUT_V = decode.OperandFormats("fp8", "fp8", "fp8", "none")
OVER_RECORDS: dict[int, list[tuple[str, decode.OperandFormats, int, torch.dtype]]] = {
    80: [
        ("fp8_ds_mla_656", FP8_BUT_V, 32, torch.bfloat16),
        ("nvfp4_ds_mla_432", ALL_FP8, 16, torch.bfloat16),
        ("fp8_ds_mla_656", NVFP4_P, 16, torch.float32),
    ],
    90: [
        ("fp8_ds_mla_656", ALL_NVFP4, 16, torch.bfloat16),
        ("fp8_ds_mla_656", ALL_NVFP4, 32, torch.bfloat16),
        ("fp8_ds_mla_656", NVFP4_P, 16, torch.bfloat16),
        ("fp8_ds_mla_656", NVFP4_P, 32, torch.bfloat16),
        ("nvfp4_ds_mla_368", NVFP4_BUT_P, 16, torch.bfloat16),
    ],
    100: [
        ("nvfp4_fp8rope_352", ALL_NVFP4, 32, torch.bfloat16),
        ("fp8_ds_mla_656", UNQUANTIZED, 16, torch.bfloat16),
    ],
    120: [
        ("fp8_ds_mla_656", UNQUANTIZED, 32, torch.bfloat16),
        ("nvfp4_ds_mla_368", NVFP4_P, 16, torch.bfloat16),
        ("nvfp4_ds_mla_432", NVFP4_BUT_P, 16, torch.bfloat16),
        ("nvfp4_fp8rope_352", NVFP4_P, 16, torch.float32),
    ],
}


def quantized_record_calls(number: int) -> Iterator[Callable[[], object]]:
    decode._device_properties = lambda device: (number, 8)  # type: ignore[assignment]
    table, lengths = torch.zeros(1, 2, dtype=torch.int32), torch.tensor([100], dtype=torch.int32)

    def call(name: str, formats: decode.OperandFormats, heads: int, dtype: torch.dtype) -> None:
        fmt = RECORDS[name]
        decode.decode_attention(
            torch.zeros(1, heads, fmt.width, dtype=dtype), RecordCache.allocate(fmt, 2, 64), table,
            lengths, torch.ones(6), latent_width=fmt.latent.width, scale=0.1, formats=formats,
            num_splits=1,
        )  # fmt: skip

    for launch in OVER_RECORDS[number]:
        yield lambda a=launch: call(*a)


def record_calls(number: int) -> Iterator[Callable[[], object]]:
    record_decode.device_properties = lambda device: (number, 8)
    record_store.device_properties = lambda device: (number, 8)
    slots = torch.zeros(8, dtype=torch.int64)
    table, lengths = torch.zeros(1, 4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    for name in RECORD_FORMATS[number]:
        fmt = RECORDS[name]
        cache = RecordCache.allocate(fmt, 4)
        latent = torch.zeros(8, fmt.latent.width, dtype=torch.bfloat16)
        rope = torch.zeros(8, fmt.rope_width, dtype=torch.bfloat16) if fmt.rope else None
        if fmt.rope is None:
            yield lambda c=cache, x=latent: store_records(c, x, None, slots, unique_slots=True)
        else:
            yield lambda c=cache, x=latent, y=rope: norm_rotate_store(
                c, x, y, slots, weight=x[0], epsilon=1e-6, positions=slots,
                cos_sin=torch.zeros(8, y.shape[1]),
                rope_style="pairs" if number != 80 else "halves", unique_slots=True,
            )  # fmt: skip
        out = torch.zeros(8, fmt.width, dtype=torch.bfloat16)
        yield lambda c=cache, o=out: record_decode.gather(c, table, lengths, 8, out=o)

        def attend(
            cache: RecordCache, heads: int, dtype: torch.dtype, sparse: bool, width: int = fmt.width
        ) -> None:
            q = torch.zeros(1, 1, heads, width, dtype=dtype)
            if sparse:
                keys = record_decode.KeyList(cache, torch.zeros(1, 1, 100, dtype=torch.int32))
                record_decode.sparse_decode(q, keys, scale=1.0, sink=torch.zeros(heads))
            else:
                record_decode.dense_decode(q, cache, table, lengths[:1], scale=1.0)

        yield lambda c=cache, f=attend: f(c, 16, torch.bfloat16, False)
        yield lambda c=cache, f=attend: f(c, 32, torch.bfloat16, True)
        outer = 0.5 if fmt.outer_scale == "per layer" else 1.0
        scaled = RecordCache.allocate(fmt, 4, outer_scale=outer)
        yield lambda c=scaled, f=attend: f(c, 128, torch.bfloat16, False)
        # Hopper GPUs have another kernel for the rest.
        if name == "nvfp4_outer_304" or number == 90:
            yield lambda c=cache, f=attend: f(c, 16, torch.float32, False)


def count_variants() -> dict[str, int]:
    """How many variants of each kernel calls need that differ in lengths and in the batch alone."""
    variants: dict[str, set[str]] = {}
    formats = dict.fromkeys(["q_format", "k_format", "p_format", "v_format"], "nvfp4")
    layout = operand_cache.OperandLayout(512, 64)
    cache = torch.zeros(2, 64, 576, dtype=torch.bfloat16)
    records = operand_cache.allocate(2, 64, layout, "cpu")
    amax = torch.ones(6)
    stored = RecordCache.allocate(RECORDS["nvfp4_fp8rope_352"], 4)
    rows = torch.zeros(640, 576, dtype=torch.bfloat16)

    def step(batch: int, tokens: int) -> None:
        lengths = torch.full((batch,), tokens, dtype=torch.int32)
        starts = torch.arange(batch + 1, dtype=torch.int32) * tokens
        table = torch.zeros(batch, 32, dtype=torch.int32)
        q = torch.zeros(batch * tokens, 2, 192, dtype=torch.bfloat16)
        kv = torch.zeros(batch * tokens, 2, 256, dtype=torch.bfloat16)
        prefill.prefill_attention(
            q, q, kv[..., 128:], starts, starts, tokens, tokens, scale=0.1, amax=amax[:4],
            qk_segments=(128, 64), key_starts=lengths, **formats,
        )  # fmt: skip
        operand_cache.write_operands(
            cache, records, layout, table, lengths, amax, cu_seqlens_new=starts,
            max_new_tokens=100,
        )  # fmt: skip
        decode.decode_attention(
            torch.zeros(batch, 2, 576, dtype=torch.bfloat16), cache, table, lengths, amax,
            latent_width=512, scale=0.1, formats=decode.OperandFormats(), records=records,
            layout=layout, num_splits=4,
        )  # fmt: skip
        slots = torch.zeros(batch, dtype=torch.int64)
        latent, rope = cache[0, :1, :512].expand(batch, -1), cache[0, :1, 512:].expand(batch, -1)
        store_records(stored, latent, rope, slots, unique_slots=True)
        record_decode.gather(stored, table, starts, tokens, starts=lengths, out=rows)
        record_decode.dense_decode(
            q[:batch, :1].new_zeros(batch, 1, 2, 576), stored, table, lengths, scale=0.1,
        )  # fmt: skip
        indices = torch.zeros(batch, 1, 100 * tokens, dtype=torch.int32)
        record_decode.sparse_decode(
            q.new_zeros(batch, 1, 2, 576), record_decode.KeyList(stored, indices, lengths),
            scale=0.1, num_splits=4,
        )  # fmt: skip

    for batch, tokens in ((1, 17), (2, 16), (3, 1), (16, 40)):
        for kernel, arguments, options in capture(lambda b=batch, t=tokens: step(b, t)):
            # Tensors of the batch come as parts of larger ones.
            key = str((specialization(kernel, arguments), options))
            variants.setdefault(kernel.__name__, set()).add(key)
            flexible = {p.name for p in kernel.params if p.do_not_specialize_on_alignment}
            sliced = {"cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_new", "starts",
                      "key_starts", "query_starts", "seq_lens", "block_table", "cu_lengths",
                      "keys", "lengths"}  # fmt: skip
            assert sliced & set(kernel.arg_names) <= flexible, kernel.__name__
    return {name: len(keys) for name, keys in variants.items()}


def main() -> None:
    if sys.argv[1] == "variants":
        print(json.dumps(count_variants()))
        return
    number = int(sys.argv[1])
    capability = divmod(number, 10)
    seen = set()
    calls = [prefill_calls(capability), decode_calls(capability), other_calls()]
    records = [record_calls(number), quantized_record_calls(number)]
    calls = records if len(sys.argv) > 2 else calls + records
    for call in itertools.chain(*calls):
        for kernel, arguments, options in capture(call):
            shown = {
                k: (str(v.dtype) if isinstance(v, torch.Tensor) else v)
                for k, v in arguments.items()
            }
            key = json.dumps([kernel.__name__, shown, options], sort_keys=True, default=str)
            if key in seen:
                continue
            seen.add(key)
            start = time.monotonic()
            compiled = compile_launch(kernel, arguments, options, number)
            constants = {k: v for k, v in shown.items() if k.isupper()}
            result = {
                "kernel": kernel.__name__,
                "constants": constants,
                "options": options,
                "seconds": round(time.monotonic() - start, 1),
                "shared_bytes": compiled.metadata.shared,
                "limit_bytes": shared_bytes(capability),
            }
            print(json.dumps(result, default=str), flush=True)


if __name__ == "__main__":
    main()
