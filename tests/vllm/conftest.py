"""The fixture `vllm`: a real vLLM in its own environment and process, for each version."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

import pytest

from tests.vllm import environments
from tests.vllm.client import Vllm


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(environments.HERE):
            item.add_marker(pytest.mark.vllm)


def _metadata(parent: Path) -> Path:
    """Make vLLM find the entry points of this project, which is not installed beside it."""
    distribution = importlib.metadata.distribution("mla-quant")
    folder = parent / f"mla_quant-{distribution.version}.dist-info"
    folder.mkdir()
    for name in ("METADATA", "entry_points.txt"):
        (folder / name).write_text(distribution.read_text(name) or "")
    return parent


@pytest.fixture(scope="session", params=environments.VERSIONS)
def vllm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Vllm:
    version = request.param
    if not environments.supported():
        pytest.skip("vLLM needs Python {}.{} or newer".format(*environments.OLDEST_PYTHON))
    python = environments.interpreter(version)
    if python is None:
        message = f"no environment with vLLM {version} in {environments.folder(version)}"
        if "CI" in os.environ or environments.VARIABLE in os.environ:
            pytest.fail(message, pytrace=False)
        pytest.skip(f"{message}: `make vllm-envs` creates it")
    scratch = tmp_path_factory.mktemp(f"vllm-{version}")
    metadata = tmp_path_factory.mktemp(f"metadata-{version}")
    return Vllm(version, python, scratch, _metadata(metadata))
