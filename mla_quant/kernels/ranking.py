"""Which scores N:M sparsity keeps: device functions shared by prefill and decode.

Scores of a group come as separate tensors in the order of their tokens. A score is beaten by a
larger one, and by an equal one of an earlier token.
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
def _not(x):
    return x == 0


@triton.jit
def _at_least_two(x, y, z):
    return (x & y) | (z & (x | y))


@triton.jit
def keep_2_of_4(a, b, c, d):
    """Whether each of four scores is among the two largest: six comparisons, then mask logic."""
    ab = a >= b
    ac = a >= c
    ad = a >= d
    bc = b >= c
    bd = b >= d
    cd = c >= d
    return (
        _at_least_two(ab, ac, ad),
        _at_least_two(_not(ab), bc, bd),
        _at_least_two(_not(ac), _not(bc), cd),
        _at_least_two(_not(ad), _not(bd), _not(cd)),
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
def keep_4_of_8(a, b, c, d, e, f, g, h):
    """Whether each of eight scores is among the four largest."""
    ra, rb, rc, rd = _rank_4(a, b, c, d)
    re, rf, rg, rh = _rank_4(e, f, g, h)
    return (
        ra + _later_above(a, e, f, g, h) < 4,
        rb + _later_above(b, e, f, g, h) < 4,
        rc + _later_above(c, e, f, g, h) < 4,
        rd + _later_above(d, e, f, g, h) < 4,
        re + _earlier_above(e, a, b, c, d) < 4,
        rf + _earlier_above(f, a, b, c, d) < 4,
        rg + _earlier_above(g, a, b, c, d) < 4,
        rh + _earlier_above(h, a, b, c, d) < 4,
    )
