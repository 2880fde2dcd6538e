"""Statistics of one attention operand, gathered over calibration data.

The amax is exact: every valid value counts. Histograms are taken on an evenly spaced sample of
the tokens of each call, so that observing costs little beside the forward pass. They count |x|
in bins of the fp32 exponent and its top mantissa bits: integers, independent of the range, so
that sums over batches, resumed runs and processes are exact.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mla_quant.formats import NVFP4, OperandFormat
from mla_quant.reference import attention, quantize_dequantize

LOG2_LOWER = -32
"""Lower edge of the first bin, log2. Smaller magnitudes count as `zeros`."""
OCTAVES = 64
"""Octaves covered; larger magnitudes count in the last bin."""
BINS_PER_OCTAVE = 32
BINS = OCTAVES * BINS_PER_OCTAVE

_SUB_BITS = BINS_PER_OCTAVE.bit_length() - 1
_SHIFT = 23 - _SUB_BITS
_BASE = (127 + LOG2_LOWER) << _SUB_BITS

SAMPLE_TOKENS = 64
"""Tokens of each sequence and head that a call adds to the histograms, at most."""

OBSERVED_P_ROWS = 16
"""Query rows of a call whose probabilities are observed; all would cost O(tokens^2) memory."""

_HEAD_CHUNK_VALUES = 1 << 25
"""Absorbed Q is observed some heads at a time, to bound its fp32 memory to 128 MiB."""

MSE_CANDIDATES = tuple(2.0 ** (-i / 8) for i in range(25))
"""Fractions of the observed maximum that the "mse" observer tries: down to an eighth."""


def log2_histograms(samples: Sequence[Tensor]) -> Tensor:
    """Count magnitudes by log2.

    Args:
        samples: Tensors [n] of any lengths, floating point; non-finite values are not counted.

    Returns:
        int64 [len(samples), BINS + 1]: magnitudes below 2^LOG2_LOWER (zero included), then the
        bins.
    """
    width = BINS + 2  # the last one takes what is not finite
    values = torch.cat([s.float() for s in samples])
    bits = values.view(torch.int32) & 0x7FFFFFFF
    key = ((bits >> _SHIFT) - (_BASE - 1)).clamp_(0, BINS)
    key.masked_fill_(bits >= 0x7F800000, BINS + 1)
    for i, part in enumerate(key.split([len(s) for s in samples])):
        part += i * width
    counts = torch.bincount(key, minlength=len(samples) * width)
    rows: Tensor = counts.view(len(samples), width)[:, : BINS + 1]
    return rows


def bin_edges() -> Tensor:
    """fp64 [BINS + 1]: lower edges of the bins, and the upper edge of the last."""
    steps = torch.arange(BINS + 1, dtype=torch.float64)
    octave, sub = steps.div(BINS_PER_OCTAVE, rounding_mode="floor"), steps % BINS_PER_OCTAVE
    return torch.exp2(octave + LOG2_LOWER) * (1 + sub / BINS_PER_OCTAVE)


def _count_above(histogram: Tensor, threshold: float) -> int:
    """Magnitudes in bins that start at a threshold or above."""
    return int(histogram[1:][bin_edges()[:-1] >= threshold].sum())


@dataclass
class Observer:
    """Statistics of one operand of one layer.

    Attributes:
        operand: Name of the operand.
        fmt: Its format, for saturation and flushing.
        axis: Contraction axis of the tensors given to `collect`: -1 or -2.
        method: "max", "percentile" or "mse".
        percentile: In percent of the nonzero magnitudes.
        device: Where the running statistics live.
    """

    operand: str
    fmt: OperandFormat
    axis: int
    method: str
    percentile: float
    device: torch.device

    def __post_init__(self) -> None:
        self.maximum = torch.zeros((), device=self.device)
        self.values = torch.zeros((), dtype=torch.int64, device=self.device)
        self.nonfinite = torch.zeros((), dtype=torch.int64, device=self.device)
        self.histogram, self.block_histogram = torch.zeros(
            2, BINS + 1, dtype=torch.int64, device=self.device
        )
        self.errors: Tensor | None = None
        """float64 [candidates]: squared errors, during the second pass of "mse"."""

    _STATE = ("maximum", "histogram", "block_histogram", "values", "nonfinite", "errors")

    @property
    def seen(self) -> bool:
        """Whether any value was collected."""
        return bool(self.values > 0)

    def start_second_pass(self) -> None:
        """Begin to gather squared errors of the candidate amax values."""
        self.errors = torch.zeros(len(MSE_CANDIDATES), dtype=torch.float64, device=self.device)

    def collect(self, x: Tensor, valid: Tensor | None = None) -> None:
        """Add a call's values.

        Args:
            x: [..., tokens, features], any leading dimensions.
            valid: bool, as many dimensions as `x` and broadcastable to it: values that count.
                None: all do.
        """
        collect_together([(self, x, valid)])

    def _collect_errors(self, x: Tensor) -> None:
        assert self.errors is not None
        x = x.float().nan_to_num(nan=0.0)
        for i, fraction in enumerate(MSE_CANDIDATES):
            rounded = quantize_dequantize(
                x, self.fmt, self.maximum * fraction, axis=self.axis, reciprocal=self.operand == "p"
            )
            self.errors[i] += (rounded - x).double().square().sum().to(self.device)

    def amax(self) -> Tensor | None:
        """0-dim fp32 amax by the chosen method; None if nothing was collected."""
        if not self.seen:
            return None
        if self.method == "percentile":
            return self._percentile().clamp(max=self.maximum)
        if self.method == "mse" and self.errors is not None:
            best: Tensor = self.maximum * MSE_CANDIDATES[int(self.errors.argmin())]
            return best
        return self.maximum.clone()

    def _percentile(self) -> Tensor:
        counts = self.histogram.cpu().double()
        counts[0] = 0  # an operand of mostly zeros must not lose the rest
        cumulative = counts.cumsum(0)
        target = cumulative[-1] * self.percentile / 100
        index = int((cumulative < target).sum())
        if index == 0:
            return self.maximum.new_zeros(())
        edges = bin_edges()
        inside = (target - cumulative[index - 1]) / counts[index]
        value = edges[index - 1] + (edges[index] - edges[index - 1]) * inside
        result: Tensor = value.to(torch.float32).to(self.maximum.device)
        return result

    def state(self) -> dict[str, Tensor]:
        """Everything `collect` changes, to save and restore."""
        return {k: v for k in self._STATE if (v := getattr(self, k)) is not None}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a saved state."""
        for key in self._STATE:
            if key in state:
                setattr(self, key, state[key].to(self.device))

    def summary(self, amax: float | None) -> dict[str, Any]:
        """Statistics as plain data.

        Args:
            amax: The amax in use, for the shares of saturated values and flushed blocks.
        """
        histogram, blocks = self.histogram.cpu(), self.block_histogram.cpu()
        result: dict[str, Any] = {
            "format": self.fmt.name,
            "amax": amax,
            "observed_max": float(self.maximum),
            "values": int(self.values),
            "nonfinite": int(self.nonfinite),
            "sampled_values": int(histogram.sum()),
            "saturated_share": None,
            "flushed_block_share": None,
            "histogram": _histogram_dict(histogram),
            "block_histogram": _histogram_dict(blocks),
        }
        if amax is not None and self.fmt.is_quantized:
            observed = float(self.maximum)
            result["saturated_share"] = 0.0
            if observed > amax:
                total = max(1, int(histogram.sum()))
                result["saturated_share"] = _count_above(histogram, amax) / total
            if self.fmt.scale is not None:
                nonzero = int(blocks[1:].sum())
                flushed = nonzero - _count_above(blocks, flush_threshold(self.fmt, amax))
                result["flushed_block_share"] = flushed / nonzero if nonzero else 0.0
        return result


def collect_together(items: Sequence[tuple[Observer, Tensor, Tensor | None]]) -> None:
    """Add several operands of one call.

    On CUDA one kernel reads each operand once and nothing waits for the host: the forward pass
    that is observed keeps the device busy meanwhile. Elsewhere plain torch gives the same numbers.

    Args:
        items: Observer, values and valid mask of each, as for `Observer.collect`. An observer may
            occur more than once.
    """
    rest: list[tuple[Observer, Tensor, Tensor | None]] = []
    for observer, x, valid in items:
        if not x.numel():
            continue
        if observer.errors is not None:
            observer._collect_errors(sample_tokens(_blanked(x, valid), observer.axis))
        elif x.is_cuda and x.device == observer.device and x.dim() <= 4 and _has_triton():
            _collect_in_one_pass(observer, x, valid)
        else:
            rest.append((observer, _blanked(x, valid), valid))
    if rest:
        _collect_in_torch(rest)


def _collect_in_torch(items: Sequence[tuple[Observer, Tensor, Tensor | None]]) -> None:
    samples: list[Tensor] = []
    for observer, x, valid in items:
        device = observer.device
        largest, nonfinite = _finite_maximum(x)
        torch.maximum(observer.maximum, largest.to(device), out=observer.maximum)
        if nonfinite is not None:
            observer.nonfinite += nonfinite.to(device)
        sample = sample_tokens(x, observer.axis)
        maxima = block_maxima(sample, observer.axis)
        if valid is None:
            observer.values += x.numel()
        else:
            observer.values += valid.expand_as(x).sum().to(device)
            chosen = sample_tokens(valid.expand_as(x), observer.axis)
            some = block_maxima(chosen.to(sample.dtype), observer.axis) > 0
            # NaN is not counted.
            sample = sample.masked_fill(~chosen, math.nan)
            maxima = maxima.masked_fill(~some, math.nan)
        samples += [sample.flatten().to(device), maxima.flatten().to(device)]
    counts = log2_histograms(samples)
    for i, (observer, _, _) in enumerate(items):
        observer.histogram += counts[2 * i]
        observer.block_histogram += counts[2 * i + 1]


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _scratch(device: torch.device) -> Tensor:
    from mla_quant.kernels.observe import new_scratch

    return new_scratch(BINS, device)


def _collect_in_one_pass(observer: Observer, x: Tensor, valid: Tensor | None) -> None:
    from mla_quant.kernels.observe import observe

    lead = (None,) * (4 - x.dim())
    observe(
        x[lead],
        None if valid is None else valid[lead],
        maximum=observer.maximum,
        values=observer.values,
        nonfinite=observer.nonfinite,
        histogram=observer.histogram,
        block_histogram=observer.block_histogram,
        scratch=_scratch(x.device),
        axis=observer.axis,
        step=sample_step(x.shape[-2], observer.axis),
        shift=_SHIFT,
        base=_BASE,
    )


def _finite_maximum(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Largest finite magnitude, fp32, and the number of NaN and Inf; None if there are none."""
    lowest, highest = x.aminmax()
    largest = torch.maximum(highest, -lowest).float()
    if bool(largest.isfinite()):
        return largest, None
    finite = x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    lowest, highest = finite.aminmax()
    return torch.maximum(highest, -lowest).float(), (finite != x).sum()


def _blanked(x: Tensor, valid: Tensor | None) -> Tensor:
    """Zeros for what does not count; a block of nothing else is left out of the histogram."""
    return x if valid is None else torch.where(valid, x, torch.zeros_like(x))


def head_chunks(query: Tensor, width: int) -> Iterator[slice]:
    """Some heads of a query [batch, heads, queries, ...] at a time, to observe absorbed Q."""
    batch, heads, queries, _ = query.shape
    size = max(1, _HEAD_CHUNK_VALUES // max(1, batch * queries * width))
    for start in range(0, heads, size):
        yield slice(start, start + size)


def observed_probabilities(
    query: Tensor,
    key: Tensor,
    scale: float,
    *,
    positions: Tensor | None = None,
    allowed: Tensor | None = None,
    bias: Tensor | None = None,
    real: Tensor | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Probabilities of an evenly spaced choice of a call's rows, the last row among them.

    Args:
        query: [batch, heads, queries, width].
        key: [batch, heads or 1, keys, width].
        scale: Softmax scale.
        positions: int64 [batch, 1, queries]: of the queries; None: the last keys' positions.
        allowed: bool, broadcastable to [batch, heads, queries, keys]; None: causal.
        bias: Added to the scores, or None.
        real: bool [batch, queries]: queries that are no padding; None: all.

    Yields:
        P [batch, heads, rows, keys] before quantization, and which of it counts.
    """
    queries, keys = query.shape[2], key.shape[2]
    step = max(1, -(-queries // OBSERVED_P_ROWS))
    rows = torch.arange(queries - 1, -1, -step, device=query.device).flip(0)
    at = rows + (keys - queries) if positions is None else positions[..., rows]
    readable = torch.arange(keys, device=query.device) <= at[..., None]
    if allowed is not None:
        readable = allowed[:, :, rows] if allowed.shape[2] > 1 else readable
    if real is not None:
        readable = readable & real[:, None, rows, None]
    collected: list[Tensor] = []

    def keep(p: Tensor) -> Tensor:
        collected.append(p)
        return p

    attention(
        [query[:, :, rows]],
        [key],
        key[..., :1],
        scale=scale,
        allowed=readable,
        bias=None if bias is None else bias[:, :, rows],
        quantize_p=keep,
    )
    valid = readable if readable.dim() == 4 else readable.expand(1, 1, -1, -1)
    done = 0
    for p in collected:
        count = p.shape[2]
        yield p, valid[:, :, done : done + count]
        done += count


def flush_threshold(fmt: OperandFormat, amax: float) -> float:
    """Largest block maximum that still becomes zeros: half the smallest scale rounds to even."""
    assert fmt.scale is not None
    return amax * fmt.scale.smallest / 2 / fmt.scale.max


def _histogram_dict(histogram: Tensor) -> dict[str, Any]:
    """Without the empty bins at both ends."""
    counts = histogram[1:]
    used = counts.nonzero().flatten()
    first, last = (int(used[0]), int(used[-1]) + 1) if used.numel() else (0, 0)
    first -= first % BINS_PER_OCTAVE
    return {
        "log2_lower": LOG2_LOWER + first // BINS_PER_OCTAVE,
        "bins_per_octave": BINS_PER_OCTAVE,
        "zeros": int(histogram[0]),
        "counts": counts[first:last].tolist(),
    }


def sample_step(tokens: int, axis: int) -> int:
    """Every how manieth token (axis -1) or block of tokens (axis -2) is sampled; 0: all tokens."""
    if tokens <= SAMPLE_TOKENS:
        return 0
    if axis == -1:
        return math.ceil(tokens / SAMPLE_TOKENS)
    block = NVFP4.block_size
    assert block is not None
    return math.ceil(tokens // block / (SAMPLE_TOKENS // block))


def sample_tokens(x: Tensor, axis: int) -> Tensor:
    """An evenly spaced sample of at most SAMPLE_TOKENS tokens.

    Args:
        x: [..., tokens, features].
        axis: Contraction axis: along tokens, whole blocks of tokens are taken.

    Returns:
        [..., sampled tokens, features]
    """
    step = sample_step(x.shape[-2], axis)
    if step == 0:
        return x
    if axis == -1:
        return x[..., ::step, :]
    block = NVFP4.block_size
    assert block is not None
    groups = x.shape[-2] // block
    whole = x[..., : groups * block, :].unflatten(-2, (groups, block))
    sampled: Tensor = whole[..., ::step, :, :].flatten(-3, -2)
    return sampled


def block_maxima(x: Tensor, axis: int) -> Tensor:
    """Largest magnitude of every block of 16 along an axis; NaN where a block holds NaN."""
    block = NVFP4.block_size
    assert block is not None
    magnitude = x.abs()
    padding = -x.shape[axis] % block
    if padding:
        pad = [0, padding] if axis == -1 else [0, 0, 0, padding]
        magnitude = torch.nn.functional.pad(magnitude, pad)
    blocks = magnitude.unflatten(axis, (-1, block))
    maxima: Tensor = blocks.amax(axis)
    return maxima
