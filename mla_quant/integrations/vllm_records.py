"""vLLM's TRITON_MLA attention over a KV cache of records. Importing this imports vLLM.

A layer's KV cache becomes `uint8 [blocks, block_size, record bytes]`: new tokens are stored as
records, cached context is read back and projected for prefill, and decode attends to the records
themselves. Prefill attends to the new tokens as they are.

With quantized attention a record stands for the latent that it reads as, which is quantized again
whenever it is read: the same as over a KV cache of these latents, but for the order of sums where
an operand is not quantized.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.v1.attention.backends.mla.triton_mla import (
    TritonMLABackend,
    TritonMLAImpl,
    TritonMLAMetadataBuilder,
)

from mla_quant.integrations import vllm_attention
from mla_quant.integrations.vllm import LayerPlan, RecordPlan
from mla_quant.integrations.vllm_attention import (
    QuantTritonMLAImpl,
    StepScratch,
    decode_query_len,
    in_halves,
    reserve_scratch,
    token_capacity,
    tokens_of_a_request,
)
from mla_quant.kernels.merge import merge_attention
from mla_quant.kernels.record_decode import dense_decode, gather, scratch_shapes
from mla_quant.kernels.record_store import store_records
from mla_quant.records import RecordCache


class RecordState(StepScratch):
    """What a layer needs at run time."""

    def __init__(self, planned: RecordPlan, dtype: torch.dtype, max_model_len: int) -> None:
        self.plan = planned
        self.rope_dtype = torch.float16 if dtype == torch.float16 else torch.bfloat16
        self.max_model_len = max_model_len

    def records(self, cache: Tensor) -> RecordCache:
        """vLLM's cache [blocks, block_size, record bytes] as a cache of records."""
        return RecordCache(
            # A view or an error: what is stored into a copy would be lost.
            cache.view(len(cache), -1),
            self.plan.format,
            cache.shape[1],
            self.plan.outer_scale,
            self.rope_dtype,
        )

    def empty_cache(self, block_size: int, device: torch.device) -> Tensor:
        """vLLM's cache of one block."""
        shape = (1, block_size, self.plan.format.record_bytes)
        return torch.zeros(shape, dtype=torch.uint8, device=device)


class _Context(NamedTuple):
    """A part of the cached context of some prefill requests.

    Attributes:
        tokens: Of the part, in all.
        longest: At least the tokens of any request.
        block_table: [requests, pages].
        cu_lengths: int32 [requests + 1].
        starts: int32 [requests], first position of each.
        rows: Which query tokens attend to it.
        arguments: What the prefill backend is told of it.
    """

    tokens: int
    longest: int
    block_table: Tensor
    cu_lengths: Tensor
    starts: Tensor
    rows: slice
    arguments: dict[str, Any]


def _context_parts(prefill: Any) -> Iterator[_Context]:
    """0.26 has parts of all requests and numbers them, 0.33 parts of some, as objects."""
    context = prefill.chunked_context
    if hasattr(context, "chunks"):
        for chunk in context.chunks:
            yield _Context(
                chunk.num_context_tokens,
                chunk.max_seq_len,
                prefill.block_table[chunk.request_slice],
                chunk.cu_seq_lens,
                chunk.starts,
                chunk.token_slice,
                {"chunk": chunk},
            )
        return
    for i, tokens in enumerate(context.seq_tot):
        yield _Context(
            tokens,
            context.max_seq_lens[i],
            prefill.block_table,
            context.cu_seq_lens[i],
            context.starts[i],
            slice(None),
            {"chunk_idx": i},
        )


class _OverRecords(TritonMLAImpl):
    """Stores new tokens as records and reads the context of prefill from them."""

    mla_records: RecordState

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Store new tokens as records."""
        if not kv_cache.numel():
            return
        slots = slot_mapping.flatten()
        # Graphs pad batches: there are as many slots as tokens to store, or fewer.
        store_records(
            self.mla_records.records(kv_cache),
            kv_c_normed[: len(slots)],
            k_pe.reshape(len(k_pe), -1)[: len(slots)],
            slots,
            unique_slots=True,
        )

    def compile_access(self, block_size: int, dtype: torch.dtype) -> None:
        """Store a token and read it, so that the first requests do not wait for the compiler."""
        state, device = self.mla_records, next(self.kv_b_proj.parameters()).device
        cache = state.records(state.empty_cache(block_size, device))
        new = torch.zeros(1, state.plan.format.width, dtype=dtype, device=device)
        latent, rope = new.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        slots = torch.zeros(1, dtype=torch.int64, device=device)
        store_records(cache, latent, rope, slots, unique_slots=True)
        pages = -(-state.max_model_len // block_size)
        table = torch.zeros(1, pages, dtype=torch.int32, device=device)
        ranges = torch.tensor([0, 1], dtype=torch.int32, device=device)
        gather(cache, table, ranges, 1, starts=ranges[:1], out=new)

    def _compute_prefill_context(
        self, q: Tensor, kv_c_and_k_pe_cache: Tensor, attn_metadata: Any, k_scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Attention of new tokens to cached ones, which are read and projected part by part."""
        prefill = attn_metadata.prefill
        cache = self.mla_records.records(kv_c_and_k_pe_cache)
        out: Tensor | None = None
        lse = torch.full(
            (self.num_heads, len(q)), float("-inf"), dtype=torch.float32, device=q.device
        )
        for part in _context_parts(prefill):
            rows = prefill.chunked_context.workspace[: part.tokens]
            gather(
                cache,
                part.block_table,
                part.cu_lengths,
                part.longest,
                starts=part.starts,
                out=rows,
            )
            latent, rope = rows.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
            projected = self.kv_b_proj(latent.to(q.dtype).contiguous())[0].unflatten(
                -1, (self.num_heads, self.qk_nope_head_dim + self.v_head_dim)
            )
            k_nope, v = projected.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
            shared = rope.to(q.dtype).unsqueeze(1).expand(-1, self.num_heads, -1)
            attended, attended_lse = prefill.prefill_backend.run_prefill_context_chunk(
                q=q[part.rows], k=torch.cat([k_nope, shared], dim=-1), v=v, **part.arguments
            )
            attended_lse = attended_lse.float()
            queries = getattr(part.arguments.get("chunk"), "query_start_loc", None)
            if queries is None:
                queries = prefill.query_start_loc
            # What a backend returns for requests without context is not defined.
            lengths = part.cu_lengths.diff()
            row = torch.arange(attended_lse.shape[1], device=q.device)
            request = torch.bucketize(row, queries[1:].long(), right=True)
            without = lengths[request.clamp(max=len(lengths) - 1)] == 0
            attended_lse = attended_lse.masked_fill(without, float("-inf"))
            if out is None:
                # vLLM merges it with a result of the same backend, whose rows may be padded.
                padded = attended.stride(1)
                out = attended.new_zeros(len(q), self.num_heads, padded)[..., : self.v_head_dim]
            merged, merged_lse = merge_attention(
                out[part.rows], lse[:, part.rows], attended, attended_lse
            )
            out[part.rows], lse[:, part.rows] = merged, merged_lse
        assert out is not None, "called without context"
        return out, lse


class RecordMLAImpl(_OverRecords):
    """Unquantized attention over records; made by `reclass`, never constructed."""

    def reserve_workspace(self) -> None:
        """What 0.33 calls while it profiles memory; 0.26 is served by `reclass` alone."""
        super().reserve_workspace()
        self.reserve_scratch(self._vllm_config, decode_query_len(self._vllm_config))

    def reserve_scratch(
        self, vllm_config: Any, query_len: int, block_size: int | None = None
    ) -> Any:
        """Make vLLM's workspace as large as any decode step needs it; returns its manager."""
        block_size = block_size or vllm_config.cache_config.block_size or 1
        return reserve_scratch(
            vllm_config,
            query_len,
            scratch_shapes,
            self.num_heads,
            self.mla_records.plan.format.v_width,
            token_capacity(vllm_config, block_size),
            next(self.kv_b_proj.parameters()).device,
        )

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Outputs are not quantized by the kernels."""
        return False

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[Tensor, Tensor]:
        """Decode: attend to the records."""
        state, decode = self.mla_records, attn_metadata.decode
        if isinstance(q, tuple):
            q = torch.cat(q, dim=-1)
        query_len = tokens_of_a_request(len(q), attn_metadata)
        # Columns past the longest context would change how it is split, and what scratch it takes.
        pages = -(-state.max_model_len // kv_c_and_k_pe_cache.shape[1])
        out, lse = dense_decode(
            q.unflatten(0, (-1, query_len)),
            state.records(kv_c_and_k_pe_cache),
            decode.block_table[:, :pages],
            decode.seq_lens,
            scale=self.scale,
            allocate=state.allocate,
        )
        return out.flatten(0, 1), lse.flatten(0, 1)

    def compile_kernels(self, block_size: int, dtype: torch.dtype, query_len: int) -> None:
        """Run every kernel once, so that the first requests do not wait for the compiler."""
        state, device = self.mla_records, next(self.kv_b_proj.parameters()).device
        self.compile_access(block_size, dtype)
        cache = state.records(state.empty_cache(block_size, device))
        pages = -(-state.max_model_len // block_size)
        table = torch.zeros(1, pages, dtype=torch.int32, device=device)
        length = torch.ones(1, dtype=torch.int32, device=device)
        width = state.plan.format.width
        for tokens in {1, query_len}:
            q = torch.zeros(1, tokens, self.num_heads, width, dtype=dtype, device=device)
            dense_decode(q, cache, table, length, scale=self.scale, allocate=state.allocate)


class QuantRecordMLAImpl(_OverRecords, QuantTritonMLAImpl):
    """Quantized attention over records; made by `reclass`, never constructed."""

    def do_kv_cache_update(
        self, kv_c_normed: Tensor, k_pe: Tensor, *args: Any, **kwargs: Any
    ) -> None:
        """Store new tokens, their rope parts in the order that they are quantized in."""
        if self.mla_quant.plan.rope_in_halves:
            k_pe = in_halves(k_pe)
        super().do_kv_cache_update(kv_c_normed, k_pe, *args, **kwargs)

    def stored_latents(self, cache: Tensor) -> Tensor:
        """All of the KV cache."""
        return cache

    def readable_latents(self, cache: Tensor) -> RecordCache:
        """The KV cache as records."""
        return self.mla_records.records(cache)

    def empty_cache(self, block_size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A KV cache of one block."""
        return self.mla_records.empty_cache(block_size, device)

    def compile_kernels(self, block_size: int, dtype: torch.dtype, query_len: int) -> None:
        """Those of quantized attention, and those that store and read records."""
        super().compile_kernels(block_size, dtype, query_len)
        self.compile_access(block_size, dtype)


class RecordMLAMetadataBuilder(TritonMLAMetadataBuilder):
    """Reserves scratch, and compiles kernels, once the KV cache's block size is known."""

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = vllm_config.compilation_config.static_forward_context
        compiled = False
        for name in layer_names:
            impl = layers[name].impl
            query_len = self.reorder_batch_threshold
            impl.mla_records.workspace = impl.reserve_scratch(
                vllm_config, query_len, kv_cache_spec.block_size
            )
            if torch.device(device).type == "cuda" and not compiled:
                dtype = vllm_config.model_config.dtype
                impl.compile_kernels(kv_cache_spec.block_size, dtype, query_len)
                compiled = True


class RecordMLABackend(TritonMLABackend):
    """`TritonMLABackend` with the builder above; it keeps its name."""

    @staticmethod
    def get_impl_cls() -> type[TritonMLAImpl]:
        """Class of the implementation."""
        return RecordMLAImpl

    @staticmethod
    def get_builder_cls() -> type[TritonMLAMetadataBuilder]:
        """Class of the builder."""
        return RecordMLAMetadataBuilder


def reclass(
    layer: Any,
    planned: RecordPlan,
    quantized: LayerPlan | None,
    vllm_config: Any,
    undo: list[Callable[[], None]],
) -> None:
    """Change one layer; how to change it back is added to `undo` first, step by step.

    `quantized`: what its attention computes over the records, if it is quantized.
    """
    impl = layer.impl
    config = vllm_config.model_config
    if quantized is not None:
        vllm_attention.reclass(layer, quantized, vllm_config, undo)
    original, backend = type(impl), layer.attn_backend
    undo.append(lambda: setattr(impl, "__class__", original))
    impl.__class__ = RecordMLAImpl if quantized is None else QuantRecordMLAImpl
    undo.append(lambda: impl.__dict__.pop("mla_records", None))
    impl.mla_records = RecordState(planned, config.dtype, config.max_model_len)
    undo.append(lambda: layer.__dict__.pop("get_kv_cache_spec", None))
    layer.get_kv_cache_spec = types.MethodType(_kv_cache_spec, layer)
    if quantized is None:
        undo.append(lambda: setattr(layer, "attn_backend", backend))
        layer.attn_backend = RecordMLABackend
        impl.reserve_scratch(vllm_config, decode_query_len(vllm_config))


def _kv_cache_spec(layer: Any, vllm_config: Any) -> Any:
    spec = type(layer).get_kv_cache_spec(layer, vllm_config)
    fmt = layer.impl.mla_records.plan.format
    return dataclasses.replace(spec, head_size=fmt.record_bytes, dtype=torch.uint8)
