"""The platform: vLLM's CPU platform without what that one changes for its own kernels."""

from __future__ import annotations

from typing import Any

from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import CpuArchEnum


class CpuTritonPlatform(CpuPlatform):
    """A CPU that runs the Triton MLA backend and schedules like a GPU."""

    # For small helpers, such as counting ranks: they are not worth a C++ compiler here.
    simple_compile_backend = "eager"

    @classmethod
    def import_kernels(cls) -> None:
        """Load no compiled operators: those of the wheel need the libraries of CUDA."""

    @classmethod
    def get_cpu_architecture(cls) -> CpuArchEnum:
        """Claim none, so that vLLM looks for no operators written for one."""
        return CpuArchEnum.OTHER

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        """Say four, whatever the number of threads: it limits the splits of a decode step."""
        return 4

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        """Take the MLA backend that was asked for, if any; the CPU platform knows only its own."""
        if not attn_selector_config.use_mla:
            return super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)
        if selected_backend is not None:
            return selected_backend.get_path()
        return "vllm.v1.attention.backends.mla.triton_mla.TritonMLABackend"

    @classmethod
    def get_mla_prefill_backend_cls(cls, mla_selector_config: Any) -> Any:
        """Choose the prefill in torch. Versions before this method existed look in a registry."""
        from vllm_cpu_triton.prefill import TorchPrefill

        return TorchPrefill

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Keep the scheduling asked for: with MLA the CPU platform turns off what is tested."""
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        chunked, tokens = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens
        prefix_caching, block_size = cache.enable_prefix_caching, cache.block_size
        super().check_and_update_config(vllm_config)
        scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens = chunked, tokens
        cache.enable_prefix_caching = prefix_caching
        if cache.user_specified_block_size:
            cache.block_size = block_size
