"""Attention of one query row over values read from records, in float64, and what rounding may do.

Facts: FlashMLA's and FlashInfer's documented conventions for sink and LSE. Imports nothing of the
package.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
UNIT_BFLOAT16 = 2.0**-9
UNIT_FLOAT32 = 2.0**-24


class Row(NamedTuple):
    """Result of a row: output [width of V], natural LSE without the sink, share left by the sink,
    and bounds of what rounding may change."""

    out: F64
    lse: float
    share: float
    out_bound: F64
    lse_bound: float


def attend(
    q: Any, keys: Any, v_width: int, scale: float, sink: float | None = None,
    *, product_unit: float = UNIT_FLOAT32, exact_values: bool = True, exact_queries: bool = True,
) -> Row:  # fmt: skip
    """Softmax attention of one query row.

    Args:
        q: [width].
        keys: [n, width], of which the first `v_width` are V.
        v_width: Leading values of a key that are V.
        scale: Softmax scale.
        sink: A score without a value.
        product_unit: Relative rounding of operands of products that are not exact in their dtype.
        exact_values: Whether keys are exact in that dtype.
        exact_queries: Whether queries are.

    Returns:
        The row; n = 0 gives 0, -inf and bounds of 0.
    """
    q, keys = np.asarray(q, np.float64), np.asarray(keys, np.float64)
    if not len(keys):
        return Row(np.zeros(v_width), -np.inf, 1.0, np.zeros(v_width), 0.0)
    score = keys @ q * scale
    size = np.abs(keys) @ np.abs(q) * abs(scale)
    top = score.max()
    p = np.exp(score - top)
    total = p.sum()
    v = keys[:, :v_width]
    out, spread = p @ v / total, p @ np.abs(v) / total
    lse = top + np.log(total)
    # An error of a score: sums of `width` products in fp32, operands that were rounded before.
    operands = 2 * UNIT_FLOAT32 * (len(q) + 8)
    operands += product_unit * (int(not exact_values) + int(not exact_queries))
    # exp2 of a reduced argument, and the reference point, in fp32.
    score_error = float((size * operands).max() + np.abs(score).max() * 4 * UNIT_FLOAT32 + 4e-7)
    relative = 2 * np.expm1(score_error) + (len(keys) + 8) * 2 * UNIT_FLOAT32
    values = product_unit * (1 + int(not exact_values))
    bound = spread * (relative + values) + 1e-30
    share = 1.0
    if sink is not None:
        difference = sink - lse
        share = 0.0 if difference == np.inf else 1 / (1 + np.exp(min(difference, 700.0)))
    sum_error = score_error + (len(keys) + 8) * UNIT_FLOAT32 + abs(lse) * 2 * UNIT_FLOAT32
    return Row(out, float(lse), share, bound, float(sum_error))
