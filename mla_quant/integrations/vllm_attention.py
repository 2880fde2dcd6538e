"""vLLM's TRITON_MLA attention with quantized operands. Importing this imports vLLM.

A layer is changed in place: its implementation, its attention backend (for the builder of metadata
and the shape of the KV cache) and, with a side cache, what a token takes in the KV cache. A page
then holds, token by token, the raw latent and the record of quantized operands:

    | latent + rope, model dtype | record (see `kernels.operand_cache`) |

The raw latent is what context is projected from, and what is quantized where a record has nothing.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.mla.triton_mla import (
    TritonMLABackend,
    TritonMLAImpl,
    TritonMLAMetadataBuilder,
)
from vllm.v1.worker.workspace import current_workspace_manager, is_workspace_manager_initialized

from mla_quant.fused import ABSORBED, PROJECTED
from mla_quant.integrations.vllm import LayerPlan
from mla_quant.kernels.decode import OperandFormats, decode_attention, scratch_shapes
from mla_quant.kernels.operand_cache import OperandLayout, write_operands
from mla_quant.kernels.prefill import prefill_attention
from mla_quant.kernels.scratch import Shapes, allocate_scratch
from mla_quant.records import RecordCache


class StepScratch:
    """Hands a layer the scratch of its decode steps.

    Attributes:
        workspace: vLLM's manager of the memory that was reserved for it; None: torch allocates.
            That of the layer's engine: vLLM has one manager a process, which a second engine in it
            replaces, while graphs of the first one still write where it reserved scratch.
    """

    workspace: Any = None

    def allocate(self, shapes: Shapes, device: torch.device) -> list[Tensor]:
        """Scratch of a decode step, from the workspace, which is reserved before profiling."""
        if self.workspace is not None:
            return list(self.workspace.get_simultaneous(*shapes))
        return allocate_scratch(shapes, device)


class LayerState(StepScratch):
    """What a layer needs at run time."""

    def __init__(
        self, planned: LayerPlan, impl: TritonMLAImpl, device: torch.device, max_model_len: int
    ) -> None:
        self.plan = planned
        self.max_model_len = max_model_len
        self.width = impl.kv_lora_rank + impl.qk_rope_head_dim
        q, k, v, p = planned.formats(PROJECTED)
        self.prefill_formats: dict[str, Any] = {
            "q_format": q,
            "k_format": k,
            "v_format": v,
            "p_format": p,
        }
        q, q_rope, k, k_rope, v, p = planned.formats(ABSORBED)
        self.decode_formats = OperandFormats(q=q, k=k, p=p, v=v, q_rope=q_rope, k_rope=k_rope)
        new = functools.partial(torch.tensor, dtype=torch.float32, device=device)
        self.prefill_amax = new(planned.amax(PROJECTED))
        self.decode_amax = new(planned.amax(ABSORBED))
        self.segments = tuple(w for w in (impl.qk_nope_head_dim, impl.qk_rope_head_dim) if w)
        self.layout: OperandLayout | None = None
        if planned.side_cache:
            self.layout = OperandLayout(impl.kv_lora_rank, impl.qk_rope_head_dim, k, v, k_rope)

    def kind(self) -> tuple[Any, ...]:
        """What kernels are compiled for; layers with equal ones share them."""
        formats = (*self.prefill_formats.values(), self.decode_formats)
        return (*formats, self.plan.sparsity, self.plan.sparse_decode, self.layout)

    def raw(self, cache: Tensor) -> Tensor:
        """The latents in a KV cache, [pages, page_size, latent + rope]."""
        return cache[..., : self.width]

    def records(self, cache: Tensor) -> Tensor | None:
        """The records in it, uint8 [pages, page_size, record_bytes]."""
        if self.layout is None:
            return None
        start = self.width * cache.element_size()
        return cache.view(torch.uint8)[..., start : start + self.layout.record_bytes]

    def head_size(self, dtype: torch.dtype) -> int:
        """What a token takes in the KV cache, in elements of its dtype."""
        extra = self.layout.record_bytes if self.layout else 0
        size: int = self.width + extra // dtype.itemsize
        return size

    def write(
        self, cache: Tensor, block_table: Tensor, seq_lens: Tensor, starts: Tensor | None, most: int
    ) -> None:
        """Quantize new tokens, the last ones of each sequence, into the records."""
        records = self.records(cache)
        if records is not None:
            assert self.layout is not None
            write_operands(
                self.raw(cache),
                records,
                self.layout,
                block_table,
                seq_lens,
                self.decode_amax,
                cu_seqlens_new=starts,
                max_new_tokens=most,
            )


def in_halves(rope: Tensor) -> Tensor:
    """A rope part whose features were rotated in neighbouring pairs, with first ones first."""
    halves: Tensor = rope.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return halves


def tokens_of_a_request(rows: int, attn_metadata: Any) -> int:
    """Query tokens that each request of a decode step has.

    Raises:
        NotImplementedError: Not all have as many, or they see each other.
    """
    requests = int(attn_metadata.decode.seq_lens.shape[0])
    query_len, rest = divmod(rows, max(requests, 1))
    if rest:
        raise NotImplementedError(
            f"mla_quant: {rows} decode rows over {requests} requests; each must have as many query "
            "tokens as the others"
        )
    if query_len > 1 and not getattr(attn_metadata, "causal", True):
        raise NotImplementedError(
            "mla_quant: decode steps whose tokens see each other are not supported; turn the "
            "speculative method off that drafts in blocks"
        )
    return query_len


class QuantizedPrefill:
    """Takes the place of vLLM's prefill backend for one call of one layer.

    vLLM shares a backend between layers; this one belongs to a copy of the metadata instead.
    """

    def __init__(self, state: LayerState, scale: float, prefill: Any) -> None:
        self.state, self.scale, self.prefill = state, scale, prefill

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return prefill_attention(
            q,
            k,
            v,
            scale=self.scale,
            amax=self.state.prefill_amax,
            sparsity=self.state.plan.sparsity,
            qk_segments=self.state.segments if len(self.state.segments) == 2 else None,
            **self.state.prefill_formats,
            **kwargs,
        )

    def run_prefill_new_tokens(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        return_softmax_lse: bool,
        out: Tensor | None = None,
        output_scale: Tensor | None = None,
    ) -> Any:
        """Causal attention of new tokens among themselves."""
        assert output_scale is None, "fused output quantization was declared unsupported"
        starts = self.prefill.query_start_loc
        result, lse = self._attend(
            q,
            k,
            v,
            cu_seqlens_q=starts,
            cu_seqlens_k=starts,
            max_seqlen_q=self.prefill.max_query_len,
            max_seqlen_k=self.prefill.max_query_len,
            key_starts=self.prefill.mla_quant_context,
        )
        return (result, lse) if return_softmax_lse else result

    def run_prefill_context_chunk(
        self,
        chunk_idx: int | None = None,
        q: Tensor | None = None,
        k: Tensor | None = None,
        v: Tensor | None = None,
        chunk: Any = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attention of new tokens to cached ones; 0.26 numbers chunks, 0.33 hands one over."""
        assert q is not None and k is not None and v is not None
        context = self.prefill.mla_quant_context
        if chunk is not None:
            cu_q, cu_k, starts = chunk.query_start_loc, chunk.cu_seq_lens, chunk.starts
            most_q, most_k = chunk.max_query_len, chunk.max_seq_len
            context = context[chunk.request_slice]
        else:
            chunks = self.prefill.chunked_context
            cu_q, cu_k = self.prefill.query_start_loc, chunks.cu_seq_lens[chunk_idx]
            starts = chunks.starts[chunk_idx]
            most_q, most_k = self.prefill.max_query_len, chunks.max_seq_lens[chunk_idx]
        # The rows of a chunk without context are 0 / -inf here, what vLLM would mask.
        result, lse = self._attend(
            q,
            k,
            v,
            cu_seqlens_q=cu_q,
            cu_seqlens_k=cu_k,
            max_seqlen_q=most_q,
            max_seqlen_k=most_k,
            causal=False,
            key_starts=starts,
            query_starts=context,
        )
        if out is not None:
            out.copy_(result)
            result = out
        return result, lse


class QuantTritonMLAImpl(TritonMLAImpl):
    """`TritonMLAImpl` with quantized operands; made by `reclass`, never constructed."""

    mla_quant: LayerState

    def reserve_workspace(self) -> None:
        """What 0.33 calls while it profiles memory; 0.26 is served by `reclass` alone."""
        super().reserve_workspace()
        self.reserve_scratch(self._vllm_config)

    def reserve_scratch(self, vllm_config: Any) -> None:
        """Make vLLM's workspace as large as a decode step needs it, before memory is profiled."""
        # Where the block size is not chosen yet the builder, which knows it, reserves the rest.
        _reserve(
            vllm_config,
            self.num_heads,
            self.kv_lora_rank,
            self.qk_rope_head_dim,
            vllm_config.cache_config.block_size or 1,
            decode_query_len(vllm_config),
            self.mla_quant.decode_amax.device,
        )

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Outputs are not quantized by the kernels."""
        return False

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Store raw latents."""
        if kv_cache.numel():
            kv_cache = self.mla_quant.raw(kv_cache)
        if self.mla_quant.plan.rope_in_halves:
            k_pe = in_halves(k_pe)
        super().do_kv_cache_update(kv_c_normed, k_pe, kv_cache, *args, **kwargs)

    def stored_latents(self, cache: Tensor) -> Tensor:
        """The part of the KV cache that vLLM gathers context from."""
        return self.mla_quant.raw(cache)

    def readable_latents(self, cache: Tensor) -> Tensor | RecordCache:
        """The KV cache as the decode kernel takes it."""
        return self.mla_quant.raw(cache)

    def empty_cache(self, block_size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A KV cache of one block."""
        shape = (1, block_size, self.mla_quant.head_size(dtype))
        return torch.zeros(shape, dtype=dtype, device=device)

    def forward_mha(
        self,
        q: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Prefill: as vLLM does it, with this layer's own prefill backend in copied metadata."""
        state, prefill = self.mla_quant, attn_metadata.prefill
        if not hasattr(prefill, "mla_quant_context"):
            # Installed when the engine ran already: stock metadata, enough for whole prompts.
            if prefill.chunked_context is not None or state.layout is not None:
                raise RuntimeError(
                    "mla_quant was installed after the KV cache: without a side cache prompts that "
                    "are run in one part can be served, others not"
                )
            prefill.mla_quant_context = None
        if state.plan.rope_in_halves:
            nope, rope = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
            q, k_pe = torch.cat([nope, in_halves(rope)], dim=-1), in_halves(k_pe)
        if state.layout is not None:
            state.write(
                kv_c_and_k_pe_cache,
                prefill.block_table,
                prefill.mla_quant_seq_lens,
                prefill.query_start_loc,
                prefill.max_query_len,
            )
        metadata, own = copy.copy(attn_metadata), copy.copy(prefill)
        own.prefill_backend = QuantizedPrefill(state, self.scale, own)
        # Quantized operands are carried in the model's dtype.
        own.q_data_type = q.dtype
        metadata.prefill = own
        raw = self.stored_latents(kv_c_and_k_pe_cache)
        super().forward_mha(q, kv_c_normed, k_pe, raw, metadata, *args, **kwargs)

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Decode: quantize the new tokens, then attend."""
        state, decode = self.mla_quant, attn_metadata.decode
        if not isinstance(q, tuple):
            q = q.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        latent, rope = q
        q = torch.cat([latent, in_halves(rope) if state.plan.rope_in_halves else rope], dim=-1)
        # Columns past the longest context would change how it is split, and what scratch it takes.
        pages = -(-state.max_model_len // kv_c_and_k_pe_cache.shape[1])
        query_len = tokens_of_a_request(q.shape[0], attn_metadata)
        table = decode.block_table[:, :pages]
        return self._decode(q, kv_c_and_k_pe_cache, table, decode.seq_lens, query_len)

    def _decode(
        self, q: Tensor, cache: Tensor, block_table: Tensor, seq_lens: Tensor, query_len: int
    ) -> tuple[Tensor, Tensor | None]:
        """Quantize the newest tokens and attend, `query_len` rows of Q a request."""
        state = self.mla_quant
        starts = None
        if query_len > 1:
            starts = torch.arange(0, q.shape[0] + 1, query_len, dtype=torch.int32, device=q.device)
        state.write(cache, block_table, seq_lens, starts, query_len)
        return decode_attention(
            q,
            self.readable_latents(cache),
            block_table,
            seq_lens,
            state.decode_amax,
            latent_width=self.kv_lora_rank,
            scale=self.scale,
            formats=state.decode_formats,
            cu_seqlens_q=starts,
            max_query_len=query_len,
            sparsity=state.plan.sparsity if state.plan.sparse_decode else None,
            records=state.records(cache),
            layout=state.layout,
            out_dtype=q.dtype,
            allocate=state.allocate,
        )

    def compile_kernels(self, block_size: int, dtype: torch.dtype, query_len: int) -> None:
        """Run every kernel once on zeros: vLLM's own warm-up runs none of prefill's.

        Otherwise the first requests would wait for the compiler.
        """
        state, device = self.mla_quant, self.mla_quant.decode_amax.device
        new = functools.partial(torch.zeros, dtype=dtype, device=device)
        integers = functools.partial(torch.tensor, dtype=torch.int32, device=device)
        width, rope, heads = self.qk_nope_head_dim, self.qk_rope_head_dim, self.num_heads
        # Whole programs of the quantizing kernels, and such that are not.
        for tokens in (64, 63):
            k_nope, v = new(tokens, heads, width + self.v_head_dim).split(
                [width, self.v_head_dim], dim=-1
            )
            k = torch.cat([k_nope, new(tokens, heads, rope)], dim=-1)
            starts, none = integers([0, tokens]), integers([0])
            prefill = types.SimpleNamespace(
                query_start_loc=starts, max_query_len=tokens, mla_quant_context=none
            )
            chunk = types.SimpleNamespace(
                query_start_loc=starts,
                cu_seq_lens=starts,
                starts=none,
                max_query_len=tokens,
                max_seq_len=tokens,
                request_slice=slice(None),
            )
            backend = QuantizedPrefill(state, self.scale, prefill)
            backend.run_prefill_new_tokens(k, k, v, True)
            backend.run_prefill_context_chunk(q=k, k=k, v=v, chunk=chunk)
        length = integers([64])
        pages = -(-max(state.max_model_len, 64) // block_size)
        table = torch.zeros(1, pages, dtype=torch.int32, device=device)
        cache = self.empty_cache(block_size, dtype, device)
        # A token, a part of a group of 16, more than that: a way of writing each.
        for most in {1, query_len, 8, 17}:
            state.write(cache, table, length, integers([0, most]) if most > 1 else None, most)
        for rows in {1, query_len}:
            self._decode(new(rows, heads, self.kv_lora_rank + rope), cache, table, length, rows)


def decode_query_len(vllm_config: Any) -> int:
    """Most tokens of a request in a decode step."""
    try:
        from vllm.v1.attention.backend import max_decode_query_len
    except ImportError:  # Before 0.33 a decode step has one token.
        return 1
    return int(max_decode_query_len(vllm_config))


def _reserve(
    vllm_config: Any,
    heads: int,
    latent_width: int,
    rope_width: int,
    block_size: int,
    query_len: int,
    device: torch.device,
) -> Any:
    """Make vLLM's workspace as large as any decode step will need it; returns its manager."""
    return reserve_scratch(
        vllm_config,
        query_len,
        scratch_shapes,
        heads,
        latent_width,
        rope_width,
        token_capacity(vllm_config, block_size),
        device,
        vllm_config.model_config.dtype.itemsize,
    )


def token_capacity(vllm_config: Any, block_size: int) -> int:
    """Tokens that the block table of the longest request holds."""
    return int(-(-vllm_config.model_config.max_model_len // block_size) * block_size)


def reserve_scratch(
    vllm_config: Any, query_len: int, shapes: Callable[..., Any], *sizes: Any
) -> Any:
    """Make vLLM's workspace as large as any decode step will need it; returns its manager.

    Args:
        vllm_config: vLLM's.
        query_len: Most tokens of a request in a step.
        shapes: Scratch by sequences, tokens of each, and `sizes`.
        sizes: Hashable.
    """
    if not is_workspace_manager_initialized():
        return None
    most = vllm_config.scheduler_config.max_num_seqs
    largest = _largest_scratch(shapes, most, query_len, *sizes)
    manager = current_workspace_manager()
    if manager.is_locked():
        # Installed in an engine that runs: then a step allocates what it needs.
        return None
    manager.get_simultaneous(*largest)
    return manager


@functools.lru_cache(maxsize=16)
def _largest_scratch(
    shapes: Callable[..., Any], max_num_seqs: int, query_len: int, *sizes: Any
) -> Any:
    """What takes most of the scratch of all batches: ranges times sequences has no simple bound."""
    steps = ((b, q) for b in range(1, max_num_seqs + 1) for q in {1, query_len})
    return max((shapes(*step, *sizes) for step in steps), key=_aligned_bytes)


def _aligned_bytes(shapes: Shapes) -> int:
    """What the workspace takes for them: each begins at a multiple of 256 bytes."""
    return sum(-(-math.prod(shape) * dtype.itemsize // 256) * 256 for shape, dtype in shapes)


class QuantTritonMLAMetadataBuilder(TritonMLAMetadataBuilder):
    """Adds what quantizing new tokens needs to know of prefill requests, and reserves scratch."""

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        manager = _reserve(
            vllm_config,
            self.num_heads,
            self.mla_dims.kv_lora_rank,
            self.mla_dims.qk_rope_head_dim,
            kv_cache_spec.block_size,
            self.reorder_batch_threshold,
            torch.device(device),
        )
        layers = vllm_config.compilation_config.static_forward_context
        different: dict[Any, QuantTritonMLAImpl] = {}
        for name in layer_names:
            impl = layers[name].impl
            impl.mla_quant.workspace = manager
            different.setdefault(impl.mla_quant.kind(), impl)
        if torch.device(device).type == "cuda":
            for impl in different.values():
                impl.compile_kernels(
                    kv_cache_spec.block_size,
                    vllm_config.model_config.dtype,
                    self.reorder_batch_threshold,
                )

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """As vLLM does, with sequence and context lengths of prefill requests on the device."""
        metadata = super().build(common_prefix_len, common_attn_metadata, *args, **kwargs)
        if metadata.prefill is not None:
            starts = metadata.prefill.query_start_loc
            seq_lens = common_attn_metadata.seq_lens[metadata.num_decodes : metadata.num_reqs]
            metadata.prefill.mla_quant_seq_lens = seq_lens
            metadata.prefill.mla_quant_context = seq_lens - (starts[1:] - starts[:-1])
        return metadata


class QuantTritonMLABackend(TritonMLABackend):
    """`TritonMLABackend` with the builder above; it keeps its name."""

    @staticmethod
    def get_impl_cls() -> type[TritonMLAImpl]:
        """Class of the implementation."""
        return QuantTritonMLAImpl

    @staticmethod
    def get_builder_cls() -> type[TritonMLAMetadataBuilder]:
        """Class of the builder."""
        return QuantTritonMLAMetadataBuilder


def reclass(
    layer: Any, planned: LayerPlan, vllm_config: Any, undo: list[Callable[[], None]]
) -> None:
    """Change one layer; how to change it back is added to `undo` first, step by step."""
    impl = layer.impl
    device = next(impl.kv_b_proj.parameters()).device
    state = LayerState(planned, impl, device, vllm_config.model_config.max_model_len)
    original = type(impl)
    undo.append(lambda: setattr(impl, "__class__", original))
    impl.__class__ = QuantTritonMLAImpl
    undo.append(lambda: impl.__dict__.pop("mla_quant", None))
    impl.mla_quant = state
    backend = layer.attn_backend
    undo.append(lambda: setattr(layer, "attn_backend", backend))
    layer.attn_backend = QuantTritonMLABackend
    if state.layout is not None:
        undo.append(lambda: layer.__dict__.pop("get_kv_cache_spec", None))
        layer.get_kv_cache_spec = types.MethodType(_kv_cache_spec, layer)
    impl.reserve_scratch(vllm_config)


def _kv_cache_spec(layer: Any, vllm_config: Any) -> Any:
    spec = type(layer).get_kv_cache_spec(layer, vllm_config)
    return dataclasses.replace(spec, head_size=layer.impl.mla_quant.head_size(spec.dtype))
