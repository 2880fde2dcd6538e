"""Plain torch definitions: quantize-dequantize, attention and merging.

This is the CPU path and what kernels are compared with. All arithmetic is fp32 whatever the input
dtype; every rounding that the numerics prescribe is an explicit operation here and nothing else
rounds. Nothing synchronizes with the host, so the same code runs on CUDA.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from mla_quant.errors import MlaQuantError
from mla_quant.formats import ElementFormat, OperandFormat

LOG2_E = math.log2(math.e)
_FP32_MANTISSA_BITS = 23
_FP32_EXPONENT_MASK = 0x7F800000
_FP32_BIAS = 127
_SMALLEST_NORMAL = torch.finfo(torch.float32).smallest_normal
_MAX_SCORES_PER_CHUNK = 1 << 24
"""Scores computed at a time: bounds the fp32 temporaries of `attention` to a few 64 MiB tensors."""


def round_to(x: Tensor, element: ElementFormat) -> Tensor:
    """Round to the values of an element format, saturating.

    Args:
        x: Any shape, floating point.
        element: Target format.

    Returns:
        fp32 tensor of `x`'s shape on the grid of `element`. NaN stays NaN, ±Inf saturates, the
        sign of zero is kept. An unsigned format (UE8M0) gets its smallest value for x <= 0.
    """
    x = x.float()
    if element.rounding == "up":
        mantissa, exponent = torch.frexp(x.clamp(element.smallest, element.max))
        # frexp gives mantissa in [0.5, 1): exactly 0.5 means a power of two already.
        exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
        return torch.where(x.isnan(), x, torch.ldexp(torch.ones_like(x), exponent))
    magnitude = x.abs().clamp(max=element.max)
    # Adding a power of two that is 2^(23 - mantissa_bits) times the value's binade leaves room
    # for exactly `mantissa_bits` bits, so the fp32 addition itself rounds to nearest even.
    binade = magnitude.clamp(min=2.0**element.min_exponent).view(torch.int32)
    shift = (_FP32_MANTISSA_BITS - element.mantissa_bits) << _FP32_MANTISSA_BITS
    carry = ((binade & _FP32_EXPONENT_MASK) + shift).view(torch.float32)
    return torch.copysign((magnitude + carry) - carry, x)


def encode(x: Tensor, element: ElementFormat) -> Tensor:
    """Codes of `x` rounded to an element format.

    Args:
        x: Any shape, floating point.
        element: Target format.

    Returns:
        uint8 tensor of `x`'s shape, one code a byte.

    Raises:
        MlaQuantError: `x` holds NaN and the format has no code for it.
    """
    value = round_to(x, element)
    nan = value.isnan()
    if element.nan_code is None and bool(nan.any()):
        raise MlaQuantError(
            f"cannot encode NaN: {int(nan.sum())} of {x.numel()} values are NaN and {element.name} "
            "has no NaN code; remove them or use a format that has one"
        )
    magnitude = torch.where(nan, torch.zeros_like(value), value.abs())
    if element.subnormals:
        step = 2.0 ** (element.min_exponent - element.mantissa_bits)
        bits = magnitude.view(torch.int32) >> (_FP32_MANTISSA_BITS - element.mantissa_bits)
        normal = bits - ((_FP32_BIAS - element.bias) << element.mantissa_bits)
        code = torch.where(
            magnitude < 2.0**element.min_exponent, (magnitude / step).to(torch.int32), normal
        )
    else:
        code = torch.frexp(magnitude).exponent.to(torch.int32) - 1 + element.bias
    if element.nan_code is not None:
        code = torch.where(nan, torch.full_like(code, element.nan_code), code)
    if element.signed:
        code = code | (torch.signbit(value).to(torch.int32) << (element.bits - 1))
    return code.to(torch.uint8)


def decode(codes: Tensor, element: ElementFormat) -> Tensor:
    """Values of codes.

    Args:
        codes: Any shape, integer, one code an entry.
        element: Their format.

    Returns:
        fp32 tensor of the same shape.

    Raises:
        MlaQuantError: A code does not fit the format's width.
    """
    count = 1 << element.bits
    index = codes.to(torch.int64)
    if index.numel() and (int(index.min()) < 0 or int(index.max()) >= count):
        raise MlaQuantError(
            f"{element.name} codes are 0 to {count - 1}, found "
            f"{int(index.min())} to {int(index.max())}"
        )
    positive = element.values() + [math.nan] * (
        (1 << (element.bits - int(element.signed))) - element.largest_code - 1
    )
    table = positive + [-value for value in positive] if element.signed else positive
    return torch.tensor(table, dtype=torch.float32, device=codes.device)[index]


def global_scale(amax: Tensor | float, fmt: OperandFormat) -> Tensor:
    """`amax / quant_max` in fp32, at least the smallest normal number."""
    amax = torch.as_tensor(amax, dtype=torch.float32)
    return _divide(amax, fmt.quant_max).clamp(min=_SMALLEST_NORMAL)


def _divide(x: Tensor, divisor: float) -> Tensor:
    """Correctly rounded `x / divisor`: on CUDA torch multiplies by a Python number's reciprocal."""
    return x / torch.full_like(x, divisor)


@dataclass(frozen=True)
class Quantized:
    """A quantized operand, still in blocks.

    Attributes:
        elements: fp32 values on the element grid; the blocked axis is split into
            [blocks, block_size] and padded with zeros.
        block_scale: fp32 values on the scale grid, size 1 in place of block_size; None if the
            format has no blocks.
        global_scale: 0-dim fp32.
        axis: Position of the blocks dimension; negative.
        width: Length of the axis before padding.
        amax: 0-dim fp32, as given.
    """

    elements: Tensor
    block_scale: Tensor | None
    global_scale: Tensor
    axis: int
    width: int
    amax: Tensor

    def dequantize(self) -> Tensor:
        """fp32 values `(element · block_scale) · global_scale`.

        An amax of 0 gives zeros, a negative or NaN one NaN.
        """
        value = self.elements
        if self.block_scale is not None:
            value = (value * self.block_scale).flatten(self.axis - 1, self.axis)
            value = value.narrow(self.axis, 0, self.width)
        return value * self.global_scale * torch.where(self.amax < 0, math.nan, self.amax.sign())


def quantize(
    x: Tensor,
    fmt: OperandFormat,
    amax: Tensor | float,
    *,
    axis: int = -1,
    reciprocal: bool = False,
) -> Quantized:
    """Quantize along one axis.

    Elements are divided by the *stored* scale: the divisor is fp32(block_scale · global_scale)
    and the quotient is correctly rounded, so ties are decided as by exact arithmetic on it.

    Args:
        x: Any shape, floating point.
        fmt: A quantized operand format.
        amax: Largest magnitude the scales are made for; 0 gives zeros.
        axis: Contraction axis, along which blocks lie.
        reciprocal: Scale by fp32(quant_max / amax) instead of dividing by the global scale: the
            rule for probabilities, where amax 1 makes every scaling exact.

    Returns:
        The quantized operand.

    Raises:
        ValueError: A format that does not quantize, or an amax that is no finite number >= 0
            (checked for Python numbers; a tensor would cost a synchronization and gives NaN).
    """
    if fmt.element is None:
        raise ValueError(f"format {fmt.name!r} does not quantize")
    if not isinstance(amax, Tensor) and not (math.isfinite(amax) and amax >= 0):
        raise ValueError(f"amax must be a finite number, 0 or more; got {amax!r}")
    x = x.float()
    axis = axis if axis < 0 else axis - x.dim()
    amax = torch.as_tensor(amax, dtype=torch.float32, device=x.device)
    width = x.shape[axis]
    if reciprocal:
        floored = amax.clamp(min=_SMALLEST_NORMAL * fmt.quant_max)
        inverse = torch.full_like(floored, fmt.quant_max) / floored
        scale = torch.ones_like(inverse) / inverse
    else:
        scale = global_scale(amax, fmt)
    if fmt.block_size is None or fmt.scale is None:
        scaled = x * inverse if reciprocal else x / scale
        return Quantized(round_to(scaled, fmt.element), None, scale, axis, width, amax)

    padding = -width % fmt.block_size
    if padding:
        x = functional.pad(x, [0, 0] * (-axis - 1) + [0, padding])
    x = x.unflatten(axis, (-1, fmt.block_size))
    block_amax = x.abs().nan_to_num(nan=0.0, posinf=math.inf).amax(axis, keepdim=True)
    if reciprocal:
        block_scale = block_amax * _divide(inverse, fmt.element.max)
    else:
        block_scale = block_amax / (fmt.element.max * scale)
    block_scale = round_to(block_scale, fmt.scale)
    if reciprocal:
        x = x * inverse
        divisor = block_scale
    else:
        divisor = block_scale * scale
    # A block whose scale underflows becomes zeros: x / inf is 0 for every finite x.
    divisor = torch.where(block_scale == 0, torch.full_like(divisor, math.inf), divisor)
    return Quantized(round_to(x / divisor, fmt.element), block_scale, scale, axis, width, amax)


def quantize_dequantize(
    x: Tensor,
    fmt: OperandFormat,
    amax: Tensor | float | None,
    *,
    axis: int = -1,
    segments: Sequence[int] | None = None,
    reciprocal: bool = False,
) -> Tensor:
    """Round an operand to what its format can store.

    Args:
        x: Any shape, floating point.
        fmt: Operand format; "none" returns `x` in fp32 unchanged.
        amax: Largest magnitude the scales are made for; ignored by "none".
        axis: Contraction axis.
        segments: Widths along `axis` that blocks never cross (nope part, rope part); a width that
            the block size does not divide ends in a shorter block. None: one segment.
        reciprocal: As in `quantize`.

    Returns:
        fp32 tensor of `x`'s shape.

    Raises:
        ValueError: Segments do not add up to the width of the axis.
    """
    if not fmt.is_quantized:
        return x.float()
    if amax is None:
        raise ValueError(f"format {fmt.name!r} needs an amax")
    parts = [
        quantize(part, fmt, amax, axis=axis, reciprocal=reciprocal).dequantize()
        for part in split_segments(x, fmt, axis, segments)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=axis)


def split_segments(
    x: Tensor, fmt: OperandFormat, axis: int, segments: Sequence[int] | None
) -> Sequence[Tensor]:
    """The parts of `x` that are blocked on their own; one if no block would straddle a border.

    Raises:
        ValueError: Segments do not add up to the width of the axis.
    """
    if segments is None:
        return [x]
    if sum(segments) != x.shape[axis]:
        raise ValueError(f"segments {list(segments)} do not add up to width {x.shape[axis]}")
    if fmt.block_size is None or all(width % fmt.block_size == 0 for width in segments[:-1]):
        return [x]
    parts: Sequence[Tensor] = x.split(list(segments), dim=axis)
    return parts


def quantize_dequantize_p(p: Tensor, fmt: OperandFormat, amax: Tensor | float = 1.0) -> Tensor:
    """Round probabilities to what their format can store, along key tokens.

    Args:
        p: [..., key_tokens], unnormalized probabilities in [0, 1].
        fmt: Operand format.
        amax: 1 unless calibrated.

    Returns:
        fp32 tensor of `p`'s shape.
    """
    return quantize_dequantize(p, fmt, amax, axis=-1, reciprocal=True)


def nm_keep(
    scores: Tensor, valid: Tensor, n: int, m: int, *, dense: Tensor | None = None
) -> Tensor:
    """Which scores N:M sparsity keeps.

    In every group of `m` consecutive keys at absolute positions the `n` largest signed valid
    scores stay, ties going to the lower index. Dense keys compete in their group like all others
    and are kept in addition.

    Args:
        scores: [..., queries, keys].
        valid: bool, broadcastable to `scores`: True where the query may attend to the key.
        n: Scores kept in a group.
        m: Keys in a group.
        dense: bool, broadcastable to `scores`: keys that are never dropped.

    Returns:
        bool tensor of `scores`' shape; False for every invalid score.
    """
    valid = valid.expand_as(scores)
    # A valid score of -inf still ranks before an invalid key.
    lowest = torch.finfo(scores.dtype).min
    ranked = torch.where(valid, scores.clamp(min=lowest), torch.full_like(scores, -math.inf))
    keys = scores.shape[-1]
    padding = -keys % m
    if padding:
        ranked = functional.pad(ranked, (0, padding), value=-math.inf)
    groups = ranked.unflatten(-1, (-1, m))
    order = groups.argsort(dim=-1, descending=True, stable=True)
    kept = torch.zeros_like(groups, dtype=torch.bool)
    kept.scatter_(-1, order[..., :n], True)
    kept = kept.flatten(-2)[..., :keys]
    if dense is not None:
        kept = kept | dense
    return kept & valid


@dataclass(frozen=True)
class Sparsity:
    """N:M sparsity of attention scores.

    Attributes:
        n: Scores kept in a group.
        m: Consecutive key tokens in a group.
        dense_sink_tokens: First keys of the sequence that are always kept.
        dense_recent_tokens: Keys with 0 <= query position - key position < this are always kept.
        sparse_decode: Whether a decode step (query length 1) is sparse too.
    """

    n: int = 2
    m: int = 4
    dense_sink_tokens: int = 0
    dense_recent_tokens: int = 64
    sparse_decode: bool = False

    def dense(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """Keys that are always kept, bool [..., queries, keys]."""
        distance = query_positions[..., :, None] - key_positions[..., None, :]
        recent = (distance >= 0) & (distance < self.dense_recent_tokens)
        return recent | (key_positions[..., None, :] < self.dense_sink_tokens)


RANKED_PATTERNS = ((2, 4), (4, 8))
"""N:M patterns that the fused kernels rank; others are computed in plain torch."""


@contextmanager
def full_precision_matmul() -> Iterator[None]:
    """Keep fp32 products out of TF32, whatever the process has set."""
    previous = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(previous)


def matmul_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """[batch, heads, rows, n] @ [heads, n, m], accumulated and returned in fp32."""
    if x.device.type == "cuda" and x.dtype == weight.dtype and x.dtype != torch.float32:
        batch, heads, rows, width = x.shape
        flat = x.transpose(0, 1).reshape(heads, batch * rows, width)
        out = torch.bmm(flat, weight, out_dtype=torch.float32)
        return out.view(heads, batch, rows, -1).transpose(0, 1)
    with full_precision_matmul():
        return x.float() @ weight.float()


def saturating_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in a dtype; what does not fit becomes its largest value, not Inf."""
    if x.dtype == dtype:
        return x
    limit = torch.finfo(dtype).max
    return x.to(dtype).clamp(-limit, limit)


def attention(
    q_parts: Sequence[Tensor],
    k_parts: Sequence[Tensor],
    v: Tensor,
    *,
    scale: float,
    allowed: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    query_positions: Tensor | None = None,
    quantize_p: Callable[[Tensor], Tensor] | None = None,
    p_tile_tokens: int | None = None,
    sparsity: Sparsity | None = None,
    return_probabilities: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Softmax attention over operands that are quantized already.

    Scores are the sum of one product per part: projected attention has one part, absorbed
    attention two (latent and rope), each quantized with its own scale. P is
    `2^(score·log2 e - M)` with M the row maximum rounded up to an integer, is quantized along
    keys in blocks at absolute positions, and is divided by the sum of *unquantized* P at the end.

    Args:
        q_parts: Tensors [batch, heads, queries, width].
        k_parts: Tensors [batch, heads or 1, keys, width], as many as `q_parts`.
        v: [batch, heads or 1, keys, v_width]. Keys that no query may read can hold anything.
        scale: Softmax scale.
        allowed: bool, broadcastable to [batch, heads, queries, keys]; None allows all.
        bias: Added to the scaled scores, broadcastable likewise.
        causal: Also mask keys after the query.
        query_positions: Positions of the queries among the keys, int64 [queries] or
            [batch, 1, queries]; default: the last ones (bottom-right alignment).
        quantize_p: Applied to P [batch, heads, queries, keys].
        p_tile_tokens: None: M is the integer bound above. A number: M is the running maximum of
            an online softmax over tiles of that many keys, to predict a kernel that works so.
        sparsity: N:M sparsity of the scores.
        return_probabilities: Also return normalized P as used.

    Returns:
        Output fp32 [batch, heads, queries, v_width]; natural-log LSE fp32
        [batch, heads, queries]; P fp32 [batch, heads, queries, keys] or None. Rows without an
        allowed key give output 0 and LSE -inf.
    """
    batch, heads, queries, _ = q_parts[0].shape
    keys = v.shape[-2]
    device = v.device
    if allowed is not None:
        allowed = allowed[(None,) * (4 - allowed.dim())]
        # P is 0 there, but 0 · NaN would not be.
        readable = allowed.any(dim=-2).expand(-1, -1, keys)
        if readable.shape[1] != v.shape[1]:
            readable = readable.any(dim=1, keepdim=True)
        v = torch.where(readable[..., None], v, torch.zeros_like(v))
    bias = None if bias is None else bias[(None,) * (4 - bias.dim())]
    key_positions = torch.arange(keys, device=device)
    if query_positions is None:
        query_positions = torch.arange(keys - queries, keys, device=device)
    rows_per_chunk = max(1, _MAX_SCORES_PER_CHUNK // max(1, batch * heads * keys))
    outputs, lses, probabilities = [], [], []
    for start in range(0, queries, rows_per_chunk):
        rows = slice(start, min(start + rows_per_chunk, queries))

        def take(x: Tensor | None, rows: slice = rows) -> Tensor | None:
            return x if x is None or x.shape[-2] == 1 else x[..., rows, :]

        positions = query_positions[..., rows]
        mask = take(allowed)
        if causal:
            reachable = key_positions <= positions[..., None]
            mask = reachable if mask is None else mask & reachable
        out, lse, p = _attend(
            [part[:, :, rows].float() for part in q_parts],
            k_parts,
            v,
            scale,
            mask,
            take(bias),
            sparsity.dense(positions, key_positions) if sparsity else None,
            quantize_p,
            p_tile_tokens,
            sparsity,
        )
        outputs.append(out)
        lses.append(lse)
        if return_probabilities:
            probabilities.append(p)
    return (
        torch.cat(outputs, dim=2) if outputs else v.new_zeros(batch, heads, 0, v.shape[-1]).float(),
        torch.cat(lses, dim=2) if lses else v.new_zeros(batch, heads, 0).float(),
        torch.cat(probabilities, dim=2) if probabilities else None,
    )


def _matmul_heads(x: Tensor, y: Tensor) -> Tensor:
    """`x @ y` where `y` may have one head shared by all of `x`'s, without expanding it."""
    if y.shape[1] == x.shape[1]:
        return x @ y
    batch, heads, rows, width = x.shape
    if y.shape[1] != 1:
        return x @ y.repeat_interleave(heads // y.shape[1], dim=1)
    return (x.reshape(batch, 1, heads * rows, width) @ y).reshape(batch, heads, rows, y.shape[-1])


def _attend(
    q_parts: Sequence[Tensor],
    k_parts: Sequence[Tensor],
    v: Tensor,
    scale: float,
    allowed: Tensor | None,
    bias: Tensor | None,
    dense: Tensor | None,
    quantize_p: Callable[[Tensor], Tensor] | None,
    p_tile_tokens: int | None,
    sparsity: Sparsity | None,
) -> tuple[Tensor, Tensor, Tensor]:
    with full_precision_matmul():
        score = _matmul_heads(q_parts[0], k_parts[0].float().mT)
        for q, k in zip(q_parts[1:], k_parts[1:], strict=True):
            score += _matmul_heads(q, k.float().mT)
        score *= scale * LOG2_E
        if bias is not None:
            score += bias.float() * LOG2_E
        if allowed is not None:
            score.masked_fill_(~allowed, -math.inf)
        if sparsity is not None:
            kept = nm_keep(score, score != -math.inf, sparsity.n, sparsity.m, dense=dense)
            score.masked_fill_(~kept, -math.inf)
        final, reference = _reference_point(score, p_tile_tokens)
        p = torch.exp2(score - reference)
        rescale = None if p_tile_tokens is None else torch.exp2(reference - final)
        denominator = (p if rescale is None else p * rescale).sum(-1, keepdim=True)
        if quantize_p is not None:
            p = quantize_p(p)
        if rescale is not None:
            p = p * rescale
        weights = torch.where(denominator > 0, p / denominator, torch.zeros_like(p))
        # Dividing the product, not P, is what kernels do and keeps P's products exact.
        out = _matmul_heads(p, v.float())
        out = torch.where(denominator > 0, out / denominator, torch.zeros_like(out))
        # A NaN score must reach the output: NaN > 0 is False above.
        out = torch.where(denominator.isnan(), denominator, out)
    lse = (final + torch.log2(denominator)).squeeze(-1) / LOG2_E
    return out, lse, weights


def _reference_point(score: Tensor, p_tile_tokens: int | None) -> tuple[Tensor, Tensor]:
    """Final M [..., 1] and M per key (the same tensor unless tiled); 0 for empty rows."""
    if score.shape[-1] == 0:
        final = score.new_zeros(*score.shape[:-1], 1)
        return final, final
    if p_tile_tokens is None:
        final = score.amax(-1, keepdim=True).ceil()
        final = final.masked_fill(final == -math.inf, 0.0)
        return final, final
    keys = score.shape[-1]
    padded = functional.pad(score, (0, -keys % p_tile_tokens), value=-math.inf)
    tiles = padded.unflatten(-1, (-1, p_tile_tokens)).amax(-1)
    running = tiles.cummax(-1).values
    running = running.masked_fill(running == -math.inf, 0.0)
    return running[..., -1:], running.repeat_interleave(p_tile_tokens, dim=-1)[..., :keys]


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Combine attention over two disjoint sets of keys.

    Args:
        out_a: [..., v_width], normalized output over the first set.
        lse_a: [...], its natural-log LSE; -inf marks an empty set, whose output is ignored.
        out_b: Likewise for the second set.
        lse_b: Likewise.

    Returns:
        fp32 output and LSE over the union.
    """
    lse_a, lse_b = lse_a.float(), lse_b.float()
    lse = torch.logaddexp(lse_a, lse_b)
    safe = lse.masked_fill(lse == -math.inf, 0.0)
    result = torch.zeros_like(out_a, dtype=torch.float32)
    for out, part in ((out_a, lse_a), (out_b, lse_b)):
        weighted = out.float() * torch.exp(part - safe).unsqueeze(-1)
        result += torch.where((part == -math.inf).unsqueeze(-1), torch.zeros_like(result), weighted)
    return result, lse
