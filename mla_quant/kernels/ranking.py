"""Which scores N:M sparsity keeps: device functions shared by prefill and decode.

Scores of a group come as separate tensors in the order of their tokens, and leave with -inf in the
place of those that are dropped. A score is beaten by a larger one, and by an equal one of an
earlier token. NaN loses comparisons: a caller that must not lose it looks for it itself.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def split_4(x):
    """The four members of the last two axes, both of size 2, in order."""
    even, odd = tl.split(x)
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def join_4(a, b, c, d):
    """Inverse of `split_4`."""
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def largest_2_of_4(a, b, c, d):
    """The two largest of four scores, -inf for the others.

    Of two pairs, both winners stay unless a loser beats the other pair's winner. Exchanges of
    values cost less here than logic on predicates, which compilers turn into many selections.
    """
    ab = a >= b
    cd = c >= d
    first = tl.maximum(a, b)
    first_loser = tl.minimum(a, b)
    second = tl.maximum(c, d)
    second_loser = tl.minimum(c, d)
    both_first = first_loser >= second
    both_second = second_loser > first
    first = tl.where(both_second, float("-inf"), first)
    first_loser = tl.where(both_first, first_loser, float("-inf"))
    second = tl.where(both_first, float("-inf"), second)
    second_loser = tl.where(both_second, second_loser, float("-inf"))
    return (
        tl.where(ab, first, first_loser),
        tl.where(ab, first_loser, first),
        tl.where(cd, second, second_loser),
        tl.where(cd, second_loser, second),
    )


@triton.jit
def _rank_4(a, b, c, d):
    """How many of the other three beat each."""
    ab = (a >= b).to(tl.int32)
    ac = (a >= c).to(tl.int32)
    ad = (a >= d).to(tl.int32)
    bc = (b >= c).to(tl.int32)
    bd = (b >= d).to(tl.int32)
    cd = (c >= d).to(tl.int32)
    return 3 - ab - ac - ad, 2 + ab - bc - bd, 1 + ac + bc - cd, ad + bd + cd


@triton.jit
def _later_above(x, a, b, c, d):
    """How many of four later scores beat `x`."""
    return (a > x).to(tl.int32) + (b > x).to(tl.int32) + (c > x).to(tl.int32) + (d > x).to(tl.int32)


@triton.jit
def _earlier_above(x, a, b, c, d):
    """How many of four earlier scores beat `x`."""
    return (
        (a >= x).to(tl.int32)
        + (b >= x).to(tl.int32)
        + (c >= x).to(tl.int32)
        + (d >= x).to(tl.int32)
    )


@triton.jit
def _below_4(rank, x):
    return tl.where(rank < 4, x, float("-inf"))


@triton.jit
def largest_4_of_8(a, b, c, d, e, f, g, h):
    """The four largest of eight scores, -inf for the others."""
    ra, rb, rc, rd = _rank_4(a, b, c, d)
    re, rf, rg, rh = _rank_4(e, f, g, h)
    return (
        _below_4(ra + _later_above(a, e, f, g, h), a),
        _below_4(rb + _later_above(b, e, f, g, h), b),
        _below_4(rc + _later_above(c, e, f, g, h), c),
        _below_4(rd + _later_above(d, e, f, g, h), d),
        _below_4(re + _earlier_above(e, a, b, c, d), e),
        _below_4(rf + _earlier_above(f, a, b, c, d), f),
        _below_4(rg + _earlier_above(g, a, b, c, d), g),
        _below_4(rh + _earlier_above(h, a, b, c, d), h),
    )
