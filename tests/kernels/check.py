"""Comparing a kernel's attention with the oracle, every element within a derived bound."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from tests.oracles import attention as oracle
from tests.oracles import blocks

UNIT = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Relative error of rounding an unquantized P to a dtype, by name: half a unit in the last place
for numbers at the lower end of a binade."""


def low_mass(result: oracle.Result, p_format: str) -> np.ndarray:
    """What an online softmax may change beyond rounding, per element of the output.

    The running integer M scales P by powers of two, which E4M3 scales (and FP8 elements) follow
    exactly while they are normal numbers: for block maxima (elements) of at least 2^-14 · 2^M of
    the final M. What lies below is quantized as finely as the M of its own tile allows, or becomes
    zero: it may be off by all of itself.
    """
    if p_format == "none":
        return np.zeros_like(result.out)
    size = blocks.block_maxima(result.p) if p_format == "nvfp4" else result.p
    mass = np.where(size < 2.0**-14, result.p + result.p_quantized, 0.0)
    total = result.p.sum(-1)
    moved = np.einsum("bhqk,bhkd->bhqd", mass, np.abs(result.v))
    return np.asarray(moved / np.where(total == 0, 1.0, total)[..., None])


def assert_within_bound(
    out: Tensor,
    lse: Tensor,
    result: oracle.Result,
    bound: oracle.Bound,
    p_format: str,
    p_rounding: float = 0.0,
) -> None:
    """Output [heads, queries, width] and LSE [heads, queries] against an oracle of batch 1.

    The bound is that of `oracle.float32_bound`, plus `low_mass`, plus `p_rounding` times
    sum P |V| / sum P: what rounding an unquantized P to the model's dtype may change.
    """
    assert oracle.reference_margin(result) > 1e-5, "M itself is undecided: choose another seed"
    got = out.double().cpu().numpy()[None]
    got_lse = lse.double().cpu().numpy()[None]
    total = result.p.sum(-1)
    mass = np.einsum("bhqk,bhkd->bhqd", result.p, np.abs(result.v))
    rounding = p_rounding * mass / np.where(total == 0, 1.0, total)[..., None]
    allowed = bound.out + low_mass(result, p_format) + rounding
    error = np.abs(got - result.out)
    assert not np.isnan(got).any()
    worst = np.unravel_index(np.argmax(error - allowed), error.shape)
    assert (error <= allowed).all(), (
        f"out{[int(i) for i in worst]}: got {got[worst]}, want {result.out[worst]}, "
        f"bound {allowed[worst]}"
    )
    empty = np.isneginf(result.lse)
    np.testing.assert_array_equal(np.isneginf(got_lse), empty)
    assert (got[empty] == 0).all()
    lse_error = np.abs(np.where(empty, 0, got_lse) - np.where(empty, 0, result.lse))
    assert (lse_error <= bound.lse).all(), (lse_error.max(), bound.lse.max())
    # The bound says something: almost all decisions are forced, what fp32 adds is small.
    assert bound.open_decisions <= max(4, 0.005 * bound.elements)
    assert np.median(allowed - rounding) < 1e-3
    assert bound.lse.max() < 1e-3
