"""Compiled operators of vLLM that this way through it calls, in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vllm_cpu_triton import calls

# Definitions last as long as the object that made them.
_LIBRARIES: list[torch.library.Library] = []


def register() -> None:
    """Define the operators, once in a process."""
    if _LIBRARIES:
        return
    _define("_C::init_cpu_memory_env(int[] nodes) -> ()", lambda nodes: None)
    _define("_C::init_cpu_threads_env(str ids) -> str", lambda ids: "")
    _define("_C::silu_and_mul(Tensor(a!) out, Tensor x) -> ()", _silu_and_mul)
    _define("_C::prepack_moe_weight(Tensor weight, Tensor(a!) out, str isa) -> ()", _copy_weight)
    _define(
        "_C::cpu_fused_moe(Tensor(a!) out, Tensor x, Tensor w13, Tensor w2, Tensor? bias13,"
        " Tensor? bias2, Tensor weights, Tensor experts, bool unweighted, str act, str isa) -> ()",
        _mixture_of_experts,
    )
    _define(
        "_C_cache_ops::concat_and_cache_mla(Tensor latent, Tensor rope, Tensor(a!) cache,"
        " Tensor slots, str dtype, Tensor scale, bool skip_scale=False) -> ()",
        _write_cache,
    )
    _define(
        "_C_cache_ops::gather_and_maybe_dequant_cache(Tensor cache, Tensor(a!) out, Tensor blocks,"
        " Tensor offsets, Tensor requests, int tokens, str dtype, Tensor scale, Tensor? starts)"
        " -> ()",
        _read_cache,
    )


def _define(signature: str, function: Callable[..., Any]) -> None:
    namespace, schema = signature.split("::", 1)
    name = schema[: schema.index("(")]
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define(schema)

    def counted(*args: Any) -> Any:
        calls[name] += 1
        return function(*args)

    library.impl(name, counted, "CompositeExplicitAutograd")
    _LIBRARIES.append(library)


def _silu_and_mul(out: Tensor, x: Tensor) -> None:
    gate, up = x.chunk(2, dim=-1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def _copy_weight(weight: Tensor, out: Tensor, isa: str) -> None:
    out.copy_(weight)


def _mixture_of_experts(
    out: Tensor,
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    bias13: Tensor | None,
    bias2: Tensor | None,
    weights: Tensor,
    experts: Tensor,
    unweighted: bool,
    act: str,
    isa: str,
) -> None:
    if act != "silu" or bias13 is not None or bias2 is not None:
        raise NotImplementedError(f"experts with activation {act} or a bias")
    total = torch.zeros(x.shape, dtype=torch.float32)
    for expert in range(w13.shape[0]):
        rows, places = torch.nonzero(experts == expert, as_tuple=True)
        hidden = x[rows] @ w13[expert].T
        gated = hidden.new_empty(len(rows), hidden.shape[1] // 2)
        _silu_and_mul(gated, hidden)
        part = gated @ w2[expert].T
        factors = 1.0 if unweighted else weights[rows, places, None]
        total.index_add_(0, rows, part.float() * factors)
    out.copy_(total)


def _write_cache(
    latent: Tensor,
    rope: Tensor,
    cache: Tensor,
    slots: Tensor,
    dtype: str,
    scale: Tensor,
    skip_scale: bool = False,
) -> None:
    if dtype not in ("auto", "float16", "bfloat16"):
        raise NotImplementedError(f"a cache of {dtype}")
    # Padding has slot -1.
    present = slots >= 0
    tokens = torch.cat([latent, rope], dim=-1)[: len(slots)][present]
    block, place = slots[present] // cache.shape[1], slots[present] % cache.shape[1]
    cache[block, place] = tokens.to(cache.dtype)


def _read_cache(
    cache: Tensor,
    out: Tensor,
    blocks: Tensor,
    offsets: Tensor,
    requests: Tensor,
    tokens: int,
    dtype: str,
    scale: Tensor,
    starts: Tensor | None,
) -> None:
    if dtype not in ("auto", "float16", "bfloat16"):
        raise NotImplementedError(f"a cache of {dtype}")
    page = cache.shape[1]
    bounds = offsets.tolist()
    firsts = [0] * (len(bounds) - 1) if starts is None else starts.tolist()
    for request, first in enumerate(firsts):
        begin, end = bounds[request], bounds[request + 1]
        positions = torch.arange(first, first + end - begin)
        block = blocks[request, positions // page].long()
        out[begin:end] = cache[block, positions % page].to(out.dtype)
