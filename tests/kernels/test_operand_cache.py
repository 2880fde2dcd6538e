"""The side cache of operands: what is stored equals the oracle bit for bit, and what decode
computes from it is what it computes when it quantizes on read."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mla_quant.errors import ConfigError
from mla_quant.kernels import operand_cache
from mla_quant.kernels.decode import Configuration, OperandFormats, operand_source
from mla_quant.kernels.operand_cache import OperandLayout
from tests.kernels.paged import AMAX, DEVICE, NAN, SHAPES, Paged, compare, expected, paged
from tests.oracles import blocks, codes

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

ALL = OperandFormats("nvfp4", "nvfp4", "nvfp4", "nvfp4")
FP8 = OperandFormats("fp8", "fp8", "fp8", "fp8")
E4M3_NAN = 0x7F
POISON = 0xFF  # also a NaN


def slots(call: Paged, records: torch.Tensor, sequence: int) -> np.ndarray:
    """Records of a sequence's tokens in order, uint8 [tokens, record_bytes]."""
    page_size = call.cache.shape[1]
    length = int(call.seq_lens[sequence])
    table = call.block_table[sequence].cpu().tolist()
    rows = [records[table[t // page_size], t % page_size] for t in range(length)]
    return torch.stack(rows).cpu().numpy() if rows else np.zeros((0, records.shape[-1]), np.uint8)


def nibbles(data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values of the low and of the high nibbles."""
    table = np.concatenate([codes.E2M1_MAGNITUDES, -codes.E2M1_MAGNITUDES])
    return table[data & 15], table[data >> 4]


def e4m3(data: np.ndarray) -> np.ndarray:
    return torch.from_numpy(data.copy()).view(torch.float8_e4m3fn).float().numpy().astype(float)


def stored_k(data: np.ndarray, fmt: str, width: int, at: int, scales_at: int) -> np.ndarray:
    """Elements times block scale of one part of K, read by the documented layout."""
    if fmt == "fp8":
        return e4m3(data[:, at : at + width])
    values = np.concatenate(nibbles(data[:, at : at + width // 2]), axis=1)
    scales = e4m3(data[:, scales_at : scales_at + width // 16])
    return values * np.repeat(scales, 16, axis=1)


def stored_v(data: np.ndarray, layout: OperandLayout) -> np.ndarray:
    """Elements times block scale of V, [tokens of whole groups, features]."""
    width = layout.latent_width
    if layout.v_format == "fp8":
        return e4m3(data[:, layout.v_codes : layout.v_codes + width])
    share = width // 16
    groups = []
    for first in range(0, len(data) // 16 * 16, 16):
        group = np.zeros((16, width))
        for i in range(16):
            record = data[first + i]
            packed = record[layout.v_codes : layout.v_codes + 8 * share].reshape(share, 8)
            even, odd = nibbles(packed)
            scale = e4m3(record[layout.v_scales : layout.v_scales + share])
            features = slice(i * share, (i + 1) * share)
            group[0::2, features] = (even * scale[:, None]).T
            group[1::2, features] = (odd * scale[:, None]).T
        groups.append(group)
    return np.concatenate(groups) if groups else np.zeros((0, width))


def check_records(call: Paged, layout: OperandLayout, records: torch.Tensor) -> None:
    """Every stored number against the oracle, exactly."""
    width = call.latent_width
    for sequence, latent in enumerate(call.latents):
        data = slots(call, records, sequence)
        x = latent.numpy()
        parts = [(x[:, :width], layout.k_format, AMAX[2], layout.k_codes, layout.k_scales)]
        if call.rope_width:
            at, scales_at = layout.k_rope_codes, layout.k_rope_scales
            parts.append((x[:, width:], layout.rope_format, AMAX[3], at, scales_at))
        for part, fmt, amax, at, scales_at in parts:
            if fmt != "none":
                want = blocks.quantize(part, fmt, amax)
                got = stored_k(data, fmt, part.shape[1], at, scales_at)
                np.testing.assert_array_equal(got, want.codes * want.scales)
        if layout.v_format != "none":
            got = stored_v(data, layout)
            want = blocks.quantize(x[:, :width], layout.v_format, AMAX[4], axis=0)
            np.testing.assert_array_equal(got, (want.codes * want.scales)[: len(got)])
            assert len(got) == (len(x) if layout.v_format == "fp8" else len(x) // 16 * 16)


@pytest.mark.parametrize(
    ("latent_width", "rope_width"), [(32, 16), (64, 32), (32, 48), (128, 64), (64, 0)]
)
@pytest.mark.parametrize(("k", "v"), [("nvfp4", "nvfp4"), ("fp8", "fp8")])
def test_stored_numbers(latent_width: int, rope_width: int, k: str, v: str) -> None:
    """K of every token, V of every whole group: the oracle's codes and scales."""
    call = paged([50, 16, 15, 0], latent_width=latent_width, rope_width=rope_width, seed=1)
    layout = call.layout(k, v)
    check_records(call, layout, call.records(layout))


# Formats of the latent and of the rope part of K, and of V.
SEPARATE = [
    ("nvfp4", "fp8", "nvfp4"),
    ("nvfp4", "none", "nvfp4"),
    ("fp8", "nvfp4", "fp8"),
    ("none", "fp8", "nvfp4"),
    ("none", "nvfp4", "none"),
]


@pytest.mark.parametrize(("k", "k_rope", "v"), SEPARATE)
@pytest.mark.parametrize("rope_width", [16, 48, 64])
def test_formats_of_rope_parts(k: str, k_rope: str, v: str, rope_width: int) -> None:
    """The rope part in a format of its own is stored as such, or not at all and read raw."""
    call = paged([50, 16, 0], query_lengths=[2, 1, 1], rope_width=rope_width, heads=2, seed=16)
    layout = call.layout(k, v, k_rope)
    records = call.records(layout)
    check_records(call, layout, records)
    formats = OperandFormats("fp8", k, "nvfp4", v, q_rope="nvfp4", k_rope=k_rope)
    got = call.attend(formats, records=records, layout=layout, num_splits=2)
    compare(got, expected(call, formats))


def test_rope_part_in_a_dtype_of_its_own() -> None:
    """Unquantized fp16 rope beside quantized latents: bf16 would lose bits of it."""
    call = paged([40, 18], dtype=torch.float16, seed=17)
    layout = call.layout("nvfp4", "nvfp4", "none")
    formats = OperandFormats(q_rope="none", k_rope="none")
    got = call.attend(formats, records=call.records(layout), layout=layout)
    compare(got, expected(call, formats))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("page_size", [1, 13, 64])
def test_dtypes_and_page_sizes(dtype: torch.dtype, page_size: int) -> None:
    """A group of V may lie in 16 pages."""
    call = paged([40, 17], dtype=dtype, page_size=page_size, seed=2)
    layout = call.layout()
    check_records(call, layout, call.records(layout))


STEPS = {
    "prefill then tokens": [[30, 0], [1, 5], [1, 1], [1, 10]],
    "one by one": [[16, 15], *[[1, 1]] * 1, [16, 0]],
    "chunks": [[7, 16], [26, 0]],
}


@pytest.mark.parametrize("name", list(STEPS))
def test_steps(name: str) -> None:
    """However tokens arrive, a group is written when its 16th is there."""
    steps = STEPS[name]
    call = paged([33, 16], seed=3)
    layout = call.layout()
    check_records(call, layout, call.records(layout, steps))


def test_single_tokens_without_cu_seqlens() -> None:
    """A decode step: one new token each, no cumulated lengths; padding sequences change nothing."""
    call = paged([32, 20, 0], seed=4)
    layout = call.layout()
    whole = call.records(layout)
    before = call.records(layout, [[31, 20, 0], [1, 0, 0]])
    stepwise = call.records(layout)
    last = int(call.block_table[0, 1])
    stepwise[last, 15] = 0xA5
    operand_cache.write_operands(
        call.cache, stepwise, layout, call.block_table, call.seq_lens, call.amax
    )
    used = layout.used_bytes
    assert torch.equal(slots_of_all(call, stepwise, used), slots_of_all(call, whole, used))
    check_records(call, layout, before)


def slots_of_all(call: Paged, records: torch.Tensor, used: int) -> torch.Tensor:
    """Bytes that hold something: the open group's share of V is not among them."""
    layout = call.layout()
    parts = []
    for sequence, length in enumerate(call.seq_lens.tolist()):
        data = torch.from_numpy(slots(call, records, sequence))[:, :used]
        data[length // 16 * 16 :, layout.v_codes : layout.k_scales] = 0
        parts.append(data)
    return torch.cat(parts)


def test_a_group_that_opens_again() -> None:
    """Rejected tokens are written again: the group is read raw until it is full again."""
    call = paged([34], seed=5)
    layout = call.layout()
    records = call.records(layout)
    # Two tokens are taken back, across the border of a group, and others come.
    page = int(call.block_table[0, 1])
    call.seq_lens[0] = 31
    call.latents[0] = call.latents[0][:31]
    want = expected(call, ALL)
    compare(call.attend(ALL, records=records, layout=layout), want)
    call.cache[page, 15] = 1.0
    call.latents[0] = torch.cat([call.latents[0], torch.ones(1, 48)])
    call.seq_lens[0] = 32
    operand_cache.write_operands(
        call.cache, records, layout, call.block_table, call.seq_lens, call.amax
    )
    check_records(call, layout, records)
    compare(call.attend(ALL, records=records, layout=layout), expected(call, ALL))


@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf")])
def test_nan_and_inf(value: float) -> None:
    """A NaN makes its block's scale NaN and enters no maximum; Inf saturates."""
    call = paged([20], seed=6)
    page = int(call.block_table[0, 0])
    call.cache[page, 5, 3] = value
    call.latents[0][5, 3] = value
    layout = call.layout()
    records = call.records(layout)
    data = slots(call, records, 0)
    k_scale, v_share = data[5, layout.k_scales], data[1, layout.v_scales + 1]
    if value != value:
        assert k_scale == POISON
        # Feature 3 lies with token 3 // 2 of the group.
        assert v_share == POISON
        others = np.delete(data[:, layout.k_scales : layout.k_scales + 2], 5, axis=0)
        assert (others != POISON).all()
    else:
        check_records(call, layout, records)
    fp8 = call.layout("fp8", "fp8")
    data = slots(call, call.records(fp8), 0)
    byte = data[5, 3]
    assert byte & 0x7F == (E4M3_NAN if value != value else 0x7E)
    for formats, held in ((ALL, layout), (FP8, fp8)):
        out, lse = call.attend(formats, records=call.records(held), layout=held)
        read_out, read_lse = call.attend(formats)
        assert torch.equal(out.isnan(), read_out.isnan())
        assert torch.equal(lse.isnan(), read_lse.isnan())


def test_zero_and_flushed_blocks() -> None:
    """Scale 0 and codes 0, never a NaN: a zero block, one far below amax, and amax 0."""
    call = paged([16], seed=7)
    page = int(call.block_table[0, 0])
    call.cache[page, 2, :16] = 0.0
    call.cache[page, 3, :16] = 1e-8
    call.latents[0][2, :16] = 0.0
    call.latents[0][3, :16] = torch.tensor(1e-8, dtype=torch.bfloat16).float()
    layout = call.layout()
    check_records(call, layout, call.records(layout))
    call.amax[2:5] = 0.0
    out, lse = call.attend(ALL, records=call.records(layout), layout=layout)
    assert (out == 0).all()
    assert torch.isfinite(lse).all()


# --- decode from a side cache

HELD = [
    ("nvfp4", "nvfp4"),
    ("fp8", "fp8"),
    ("nvfp4", "none"),
    ("none", "nvfp4"),
    ("fp8", "nvfp4"),
    ("nvfp4", "fp8"),
]


@pytest.mark.parametrize(("k", "v"), HELD)
def test_decode(k: str, v: str) -> None:
    """Within the bound; what is not held is quantized on read; the open tail is read raw."""
    call = paged([100, 16, 15, 17, 0, 64], query_lengths=[3, 1, 2, 1, 1, 2], page_size=13, seed=8)
    layout = call.layout(k, v)
    records = call.records(layout)
    for formats in (
        OperandFormats("nvfp4", k, "nvfp4", v),
        OperandFormats("none", k, "none", v),
    ):
        # One range and several, each with half of the formats.
        num_splits = 1 if formats.p == "none" else 3
        got = call.attend(formats, records=records, layout=layout, num_splits=num_splits)
        compare(got, expected(call, formats))


@pytest.mark.parametrize(
    ("latent_width", "rope_width"), [(64, 64), (128, 128), (32, 48), (64, 0), (32, 32)]
)
def test_decode_geometries(latent_width: int, rope_width: int) -> None:
    """Rope scales that fit one word, that do not, that a half cuts; no rope part."""
    call = paged([70, 20], latent_width=latent_width, rope_width=rope_width, heads=3, seed=9)
    layout = call.layout()
    got = call.attend(ALL, records=call.records(layout), layout=layout)
    compare(got, expected(call, ALL))


@pytest.mark.parametrize(
    "shape",
    [shape for shape in SHAPES if shape.block_tokens >= 32],
    ids=lambda s: f"{s.block_tokens}-{s.inner}-{s.across}",
)
def test_decode_in_every_order_of_tokens(shape: Configuration) -> None:
    call = paged([150, 31], heads=5, seed=10)
    layout = call.layout()
    got = call.attend(
        ALL,
        records=call.records(layout),
        layout=layout,
        configuration=shape,
        num_splits=2,
    )
    compare(got, expected(call, ALL))


@pytest.mark.parametrize("shape", [(64, 64, 4, 2, 8, 2), (16, 16, 2, 1, 4, 2)])
def test_tilings_that_records_do_not_have(shape: tuple[int, ...]) -> None:
    call = paged([31])
    layout = call.layout()
    with pytest.raises(ConfigError, match=r"cannot be used with an operand cache"):
        call.attend(
            ALL, records=call.records(layout), layout=layout, configuration=Configuration(*shape)
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("k", "v"), [("nvfp4", "nvfp4"), ("fp8", "fp8")])
def test_k_is_bit_identical(dtype: torch.dtype, k: str, v: str) -> None:
    """The same bits as on read, in LSE: of one token it is the score.

    q is of small integers, so that the score is exact whatever the order in which a matrix unit
    adds. A wrong element would show.
    """
    formats = OperandFormats("none", k, "none", v)
    call = paged([1] * 6, heads=3, dtype=dtype, seed=11)
    call.q[:] = torch.randint(-2, 3, call.q.shape, device=DEVICE).to(call.q)
    layout = call.layout(k, v)
    _, lse = call.attend(formats, records=call.records(layout), layout=layout, num_splits=1)
    _, read_lse = call.attend(formats, num_splits=1)
    assert torch.equal(lse, read_lse)


@pytest.mark.parametrize(
    ("lengths", "dtype"), [([200, 31, 16], torch.bfloat16), ([15, 17, 1], torch.float16)]
)
def test_v_is_bit_identical(lengths: list[int], dtype: torch.dtype) -> None:
    """The same bits as on read, in the output, where sums are exact: q = 0 makes every p 1.

    V's elements times scales are multiples of 2^-9 below 2^7 then, and so are sums of fewer
    than 2^8 of them: no rounding, so no order of a sum shows. A wrong element would.
    """
    call = paged(lengths, dtype=dtype, spread=0.0, seed=13)
    layout = call.layout()
    out, lse = call.attend(ALL, records=call.records(layout), layout=layout, num_splits=1)
    read_out, read_lse = call.attend(ALL, num_splits=3)
    assert torch.equal(out, read_out)
    assert torch.equal(lse, read_lse)


def test_close_to_reading_with_random_operands() -> None:
    """With arbitrary scores only the order of sums differs from quantizing on read.

    With tiles of the same length, that is: the reference point of P rises by tiles.
    """
    call = paged([150, 47], heads=6, seed=14)
    layout = call.layout()
    records = call.records(layout)
    for num_splits in (1, 4):
        kwargs = {"num_splits": num_splits, "configuration": Configuration(16, 32, 2, 2, 4, 2)}
        out, lse = call.attend(ALL, records=records, layout=layout, **kwargs)
        read_out, read_lse = call.attend(ALL, **kwargs)
        torch.testing.assert_close(out, read_out, rtol=1e-5, atol=3e-6)
        torch.testing.assert_close(lse, read_lse, rtol=1e-6, atol=1e-6)


def test_source() -> None:
    """Which shapes fit depends on how much is read raw beside the records."""
    nvfp4, k_only = OperandFormats(), OperandFormats(v="none")
    assert operand_source(nvfp4, False, False) == "read"
    assert operand_source(nvfp4, True, False) == "read"
    assert operand_source(nvfp4, True, True, False) == "read"
    assert operand_source(nvfp4, True, True) == "stored"
    assert operand_source(OperandFormats(k_rope="none"), True, True, False) == "stored"
    assert operand_source(k_only, True, False) == "partial"
    none = OperandFormats("none", "none", "none", "none")
    assert operand_source(none, False, False) == "raw"


# --- layout and errors


def test_layout_of_deepseek() -> None:
    """612 bytes a token in NVFP4, padded to a multiple of 16; fields follow each other."""
    layout = OperandLayout(512, 64)
    assert layout.used_bytes == 288 + 36 + 256 + 32
    assert layout.record_bytes == 624
    fields = [
        layout.k_codes,
        layout.k_rope_codes,
        layout.v_codes,
        layout.v_scales,
        layout.k_scales,
        layout.k_rope_scales,
    ]
    assert fields == [0, 256, 288, 544, 576, 608]
    assert OperandLayout(512, 64, "fp8", "fp8").record_bytes == 576 + 512
    assert OperandLayout(512, 64, k_rope_format="fp8").used_bytes == 256 + 64 + 32 + 256 + 32
    assert OperandLayout(512, 64, k_rope_format="none").used_bytes == 256 + 32 + 256 + 32
    assert OperandLayout(512, 64, "nvfp4", "none").used_bytes == 288 + 36
    assert OperandLayout(512, 64, "none", "nvfp4").used_bytes == 256 + 32


def test_errors() -> None:
    with pytest.raises(ConfigError, match="nothing"):
        OperandLayout(512, 64, "none", "none")
    with pytest.raises(ConfigError, match="nothing"):
        OperandLayout(512, 0, "none", "none", "fp8")
    with pytest.raises(ConfigError, match=r"k_rope_format .* 'nvfp5'"):
        OperandLayout(512, 64, k_rope_format="nvfp5")
    with pytest.raises(ConfigError, match="nvfp5"):
        OperandLayout(512, 64, "nvfp5")
    with pytest.raises(ConfigError, match="power of two"):
        OperandLayout(96, 64)
    with pytest.raises(ConfigError, match="multiple of 16"):
        OperandLayout(64, 24)
    call = paged([20], seed=15)
    layout = call.layout()
    records = call.records(layout)
    with pytest.raises(ConfigError, match="holds k in nvfp4"):
        call.attend(FP8, records=records, layout=layout)
    with pytest.raises(ConfigError, match="holds k_rope in nvfp4"):
        call.attend(OperandFormats(k_rope="fp8"), records=records, layout=layout)
    with pytest.raises(ConfigError, match="operand cache must be"):
        call.attend(ALL, records=records[:, :, :16], layout=layout)
    with pytest.raises(ConfigError, match=r"latent_width 64 .* 32"):
        call.attend(ALL, records=records, layout=OperandLayout(64, 16))
    shape = Configuration(64, 64, 4, 2, 8, 2)
    with pytest.raises(ConfigError, match="64 rows"):
        call.attend(ALL, records=records, layout=layout, configuration=shape)
    shifted = torch.zeros(records.numel() + 16, dtype=torch.uint8, device=DEVICE)
    shifted = shifted[1 : 1 + records.numel()].view(records.shape)
    with pytest.raises(ConfigError, match="multiples of 16"):
        call.attend(ALL, records=shifted, layout=layout)
    whole = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    for change, message in (
        ({"max_new_tokens": 2}, "cu_seqlens_new"),
        ({"cu_seqlens_new": whole.long()}, "cu_seqlens_new"),
        ({"cu_seqlens_new": whole[:1]}, "cu_seqlens_new"),
        ({"cu_seqlens_new": whole, "max_new_tokens": -1}, "max_new_tokens"),
    ):
        with pytest.raises(ConfigError, match=message):
            operand_cache.write_operands(
                call.cache,
                records,
                layout,
                call.block_table,
                call.seq_lens,
                call.amax,
                **change,
            )
