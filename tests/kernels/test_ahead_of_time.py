"""Every kernel compiles for every GPU it claims, none of which need be there, and fits into it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.kernels.ahead_of_time import OVER_RECORDS


def run(*arguments: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.ahead_of_time", *arguments],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_lengths_compile_nothing_new() -> None:
    """An engine's users would wait for the compiler whenever a batch has another size."""
    variants = json.loads(run("variants"))
    # Whole programs of these need no masks.
    assert variants.pop("_quantize_features_kernel") <= 3
    # Dense and sparse.
    assert variants.pop("split_hopper") == 2
    assert set(variants.values()) == {1}, variants


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_compiles_and_fits(capability) -> None:
    """One GPU for each instruction set and size of shared memory; 8.9 has those of 8.0 and 12.0."""
    kernels = [json.loads(line) for line in run(str(capability)).splitlines()]
    assert {k["kernel"] for k in kernels} >= {
        "_prefill_kernel", "_quantize_features_kernel", "_quantize_tokens_kernel", "_merge_kernel",
        "_observe_kernel", "split_portable", "combine_ranges", "quantize_queries", "_write",
        "_store_kernel", "_gather_kernel", "split", "combine",
    }  # fmt: skip
    hopper = {"split_records", "split_raw", "split_hopper"} & {k["kernel"] for k in kernels}
    assert len(hopper) == (3 if capability == 90 else 0)
    combined = {k["constants"]["SPLITS"] for k in kernels if k["kernel"] == "combine_ranges"}
    # Splits of decode: all of them where every tiling is compiled.
    assert combined == {2, 8, 64, 128} or (capability == 100 and len(combined) > 1)
    decode = [k for k in kernels if k["kernel"] == "split_portable"]
    over_records = [k for k in decode if k["constants"]["FIELDS"] is not None]
    assert len(over_records) == len(OVER_RECORDS[capability])
    for kernel in kernels:
        assert kernel["shared_bytes"] <= kernel["limit_bytes"], kernel
