"""vLLM as its users run it, with its Triton MLA backend, on a machine without a GPU.

The wheel of vLLM is built for CUDA: its own CPU platform finds no kernels in it and would choose
another attention backend. This package is an out-of-tree platform that keeps the backend, the
scheduler and the cache which a GPU would get, runs Triton kernels under Triton's interpreter and
replaces the few compiled operators on the way by torch. It takes effect where the folder above is
on PYTHONPATH: each process of vLLM finds the entry points in the `.dist-info` there.

It says nothing about compiled Triton kernels, FlashAttention or CUDA graphs.
"""

from __future__ import annotations

from collections import Counter

# How often each replaced piece ran in this process: tests ask whether they reached it.
calls: Counter[str] = Counter()


def platform() -> str:
    """Entry point of `vllm.platform_plugins`: the platform's class, for vLLM to import later."""
    return "vllm_cpu_triton.platform.CpuTritonPlatform"


def prepare() -> None:
    """Entry point of `vllm.general_plugins`: each process calls it before it loads a model."""
    from vllm_cpu_triton import interpreter, operators, patches, prefill

    interpreter.apply()
    operators.register()
    patches.apply()
    prefill.register()
