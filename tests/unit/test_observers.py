"""Statistics of operands, against direct counts in numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from mla_quant.formats import FP8, NVFP4, OperandFormat
from mla_quant.observers import (
    BINS,
    BINS_PER_OCTAVE,
    LOG2_LOWER,
    MSE_CANDIDATES,
    OCTAVES,
    SAMPLE_TOKENS,
    Observer,
    bin_edges,
    block_maxima,
    flush_threshold,
    log2_histograms,
    sample_tokens,
)
from tests.oracles import blocks


def log2_histogram(x: torch.Tensor) -> torch.Tensor:
    return log2_histograms([x.flatten()])[0]


def observer(
    fmt: OperandFormat = NVFP4, *, axis: int = -1, method: str = "max", percentile: float = 99.0
) -> Observer:
    operand = "k" if axis == -1 else "v"
    return Observer(operand, fmt, axis, method, percentile, torch.device("cpu"))


def wide(*shape: int, seed: int = 0) -> Tensor:
    """Magnitudes over many octaves, both signs."""
    generator = torch.Generator().manual_seed(seed)
    sign = torch.randint(0, 2, shape, generator=generator) * 2.0 - 1
    return sign * torch.exp2(torch.empty(shape).uniform_(-20, 12, generator=generator))


def counted(x: Tensor) -> np.ndarray:
    """The histogram by numpy, on edges written out here."""
    edges = [
        2.0 ** (LOG2_LOWER + octave) * (1 + step / BINS_PER_OCTAVE)
        for octave in range(OCTAVES)
        for step in range(BINS_PER_OCTAVE)
    ]
    magnitude = np.abs(x.double().numpy().ravel())
    magnitude = magnitude[np.isfinite(magnitude)]
    counts, _ = np.histogram(magnitude, [0.0, *edges, np.inf])
    return counts


def test_histogram_equals_numpy() -> None:
    assert (log2_histogram(wide(64, 48)).numpy() == counted(wide(64, 48))).all()


def test_histogram_at_every_edge() -> None:
    edges = bin_edges()[:-1].float()
    assert edges.double().equal(bin_edges()[:-1]), "edges are exact in fp32"
    counts = log2_histogram(edges)
    assert counts[0] == 0
    assert (counts[1:] == 1).all(), "an edge belongs to the bin that it begins"
    below = torch.nextafter(edges, torch.zeros(()))
    assert (log2_histogram(below)[:-1] == 1).all(), "what lies below it belongs to the one before"


def test_histogram_of_extremes() -> None:
    x = torch.tensor([0.0, -0.0, 2.0**-33, -(2.0**-32), 3e38, -3e38, math.inf, -math.inf, math.nan])
    counts = log2_histogram(x)
    assert counts[0] == 3
    assert counts[1] == 1
    assert counts[BINS] == 2
    assert counts.sum() == 6, "NaN and Inf are not counted"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_histogram_of_half_precision(dtype: torch.dtype) -> None:
    x = wide(32, 16).clamp(-6e4, 6e4).to(dtype)
    assert (log2_histogram(x).numpy() == counted(x)).all()


def test_maximum_is_exact_over_calls_and_unsampled() -> None:
    """Histograms sample tokens; the maximum does not."""
    watch = observer()
    x = torch.ones(1, 2, 1000, 16)
    x[0, 1, 501, 7] = -77.25
    chosen = sample_tokens(x, -1)
    assert chosen.shape[-2] <= SAMPLE_TOKENS
    assert float(chosen.abs().max()) == 1.0, "the sample must miss the outlier"
    watch.collect(x)
    watch.collect(torch.full((1, 2, 3, 16), 5.0))
    assert float(watch.amax() or 0) == 77.25
    assert int(watch.values) == 1000 * 32 + 96


def test_invalid_values_count_nowhere() -> None:
    x = torch.full((2, 1, 8, 16), 2.0)
    x[1, :, 5:] = 1e6
    valid = torch.ones(2, 1, 8, 1, dtype=torch.bool)
    valid[1, :, 5:] = False
    watch = observer()
    watch.collect(x, valid)
    assert float(watch.maximum) == 2.0
    assert int(watch.values) == 13 * 16
    assert int(watch.histogram.sum()) == 13 * 16
    assert int(watch.histogram[0]) == 0, "padding is left out, not counted as zeros"
    assert int(watch.block_histogram.sum()) == 13


def test_valid_zero_blocks_are_counted() -> None:
    watch = observer()
    watch.collect(torch.zeros(1, 1, 4, 32), torch.ones(1, 1, 4, 1, dtype=torch.bool))
    assert int(watch.block_histogram[0]) == 8
    assert float(watch.amax() if watch.seen else -1) == 0.0


def test_nothing_collected_has_no_amax() -> None:
    watch = observer()
    watch.collect(torch.zeros(1, 1, 0, 16))
    watch.collect(torch.ones(1, 1, 4, 16), torch.zeros(1, 1, 4, 1, dtype=torch.bool))
    assert not watch.seen
    assert watch.amax() is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_values_never_set_the_amax(bad: float) -> None:
    watch = observer()
    x = torch.linspace(-3, 2.5, 64).view(1, 1, 4, 16).clone()
    x[0, 0, 1, 3] = bad
    watch.collect(x)
    assert float(watch.amax() or 0) == 3.0
    assert int(watch.nonfinite) == 1
    assert watch.summary(3.0)["nonfinite"] == 1


@pytest.mark.parametrize("percentile", [60.0, 90.0, 99.0, 99.9])
def test_percentile_is_within_a_bin_of_numpy(percentile: float) -> None:
    """A bin is 1/32 octave wide at least: 1/32 of the value at its lower edge."""
    x = torch.randn(1, 1, 64, 256, generator=torch.Generator().manual_seed(3))
    watch = observer(method="percentile", percentile=percentile)
    watch.collect(x)
    exact = float(np.percentile(x.abs().numpy(), percentile))
    found = float(watch.amax() or 0)
    assert abs(found - exact) <= exact / BINS_PER_OCTAVE
    assert found <= float(watch.maximum)


def test_percentile_hundred_is_the_maximum_and_zeros_do_not_count() -> None:
    watch = observer(method="percentile", percentile=100.0)
    watch.collect(wide(1, 1, 32, 16))
    assert float(watch.amax() or 0) == float(watch.maximum)
    sparse = observer(method="percentile", percentile=60.0)
    x = torch.zeros(1, 1, 16, 16)
    x[0, 0, 0, 0] = 9.0
    sparse.collect(x)
    amax = sparse.amax()
    assert amax is not None and float(amax) == 9.0, "zeros do not count"


@pytest.mark.parametrize("fmt", [NVFP4, FP8], ids=lambda f: f.name)
@pytest.mark.parametrize("axis", [-1, -2])
def test_mse_takes_the_candidate_with_least_error(fmt: OperandFormat, axis: int) -> None:
    """Errors of every candidate by the oracle; two batches add up."""
    batches = [
        torch.randn(1, 2, 32, 16, generator=torch.Generator().manual_seed(s)) for s in (0, 1)
    ]
    batches[1][0, 0, 3, 3] = 40.0
    watch = observer(fmt, axis=axis, method="mse")
    for x in batches:
        watch.collect(x)
    largest = float(watch.maximum)
    assert largest == 40.0
    watch.start_second_pass()
    for x in batches:
        watch.collect(x)
    errors = [
        sum(
            float(
                np.square(
                    blocks.quantize(x.numpy(), fmt.name, largest * f, axis=axis).values.astype(
                        np.float64
                    )
                    - x.double().numpy()
                ).sum()
            )
            for x in batches
        )
        for f in MSE_CANDIDATES
    ]
    assert watch.errors is not None
    assert np.allclose(watch.errors.numpy(), errors, rtol=1e-6)
    best = int(np.argmin(errors))
    assert float(watch.amax() or 0) == pytest.approx(largest * MSE_CANDIDATES[best], rel=1e-7)


def test_mse_counts_once() -> None:
    """The second pass leaves maximum and histograms of the first alone."""
    watch = observer(method="mse")
    x = wide(1, 1, 32, 16)
    watch.collect(x)
    before = {k: v.clone() for k, v in watch.state().items()}
    watch.start_second_pass()
    watch.collect(x * 100)
    for key, value in before.items():
        assert watch.state()[key].equal(value), key


def test_block_maxima_and_samples_follow_the_axis() -> None:
    x = wide(1, 2, 40, 24)
    rows, columns = block_maxima(x, -1), block_maxima(x, -2)
    magnitude = x.abs().numpy()
    assert rows.shape == (1, 2, 40, 2)
    assert (rows[..., 1].numpy() == magnitude[..., 16:24].max(-1)).all()
    assert columns.shape == (1, 2, 3, 24)
    assert (columns[:, :, 2].numpy() == magnitude[:, :, 32:40].max(2)).all()
    long = torch.arange(400.0)[None, None, :, None]
    sampled = sample_tokens(long, -2).flatten().long()
    assert len(sampled) <= SAMPLE_TOKENS
    groups = sampled.view(-1, 16)
    assert (groups[:, 0] % 16 == 0).all() and (groups.diff(dim=1) == 1).all()


def test_summary_shares_equal_direct_counts() -> None:
    """amax and the flush threshold are put on bin edges, where counting by bins is exact."""
    amax = 64.0
    # 2^-10 is half of E4M3's smallest value: scales at or below it round to zero.
    threshold = flush_threshold(NVFP4, amax)
    assert threshold == amax / 448 * 2.0**-10
    x = wide(1, 1, 64, 64)
    x[0, 0, ::3, :16] *= 2.0**-22
    maxima = block_maxima(x, -1)
    near = (maxima / threshold).log2().abs() < 2 / BINS_PER_OCTAVE
    assert not bool((near & (maxima > 0)).any()), "no block so near the threshold that bins differ"
    watch = observer()
    watch.collect(x)
    summary = watch.summary(amax)
    assert summary["saturated_share"] == pytest.approx(float((x.abs() >= amax).double().mean()))
    quantized = blocks.quantize(x.numpy(), "nvfp4", amax)
    scales = quantized.scales.reshape(64, 4, 16)[..., 0]
    assert (scales == 0).any()
    assert summary["flushed_block_share"] == pytest.approx(float((scales == 0).mean()))
    assert summary["observed_max"] == float(x.abs().max())
    assert summary["values"] == summary["sampled_values"] == x.numel()
    shown = summary["histogram"]
    assert sum(shown["counts"]) + shown["zeros"] == x.numel()
    start = (shown["log2_lower"] - LOG2_LOWER) * BINS_PER_OCTAVE
    assert (np.array(shown["counts"]) == counted(x)[1:][start : start + len(shown["counts"])]).all()


def test_summary_of_the_own_maximum_saturates_nothing() -> None:
    watch = observer(FP8)
    watch.collect(wide(1, 1, 8, 16))
    summary = watch.summary(float(watch.maximum))
    assert summary["saturated_share"] == 0.0
    assert summary["flushed_block_share"] is None, "FP8 has no blocks"


@pytest.mark.parametrize("second_pass", [False, True])
def test_state_round_trip_continues_where_it_stopped(second_pass: bool) -> None:
    batches = [wide(1, 1, 20, 32, seed=s) for s in range(3)]
    whole, first = observer(method="mse"), observer(method="mse")
    for x in batches:
        whole.collect(x)
    if second_pass:
        whole.start_second_pass()
        for x in batches:
            first.collect(x)
        first.start_second_pass()
        for x in batches:
            whole.collect(x)
    first.collect(batches[0])
    state = {key: value.clone() for key, value in first.state().items()}
    resumed = observer(method="mse")
    resumed.load_state(state)
    for x in batches[1:]:
        resumed.collect(x)
    assert set(whole.state()) == set(resumed.state())
    for key, value in whole.state().items():
        assert resumed.state()[key].equal(value), key
    assert float(whole.amax() or 0) == float(resumed.amax() or 0)
