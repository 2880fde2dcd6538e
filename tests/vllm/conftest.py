"""The fixture `vllm`: a real vLLM in its own environment and process, for each version."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.vllm import environments
from tests.vllm.client import Vllm, entry_points


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(environments.HERE):
            item.add_marker(pytest.mark.vllm)
            # Tests of a file and a version share what a vLLM computed: one worker runs them.
            version = item.callspec.params.get("vllm") if hasattr(item, "callspec") else None
            item.add_marker(pytest.mark.xdist_group(f"{item.path.stem}-{version}"))


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, Path], Vllm]]:
    """Imports a vLLM once, though its tests and those of another version may take turns."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def started(version: str, python: Path) -> Vllm:
            scratch = tmp_path_factory.mktemp(f"vllm-{version}")
            metadata = tmp_path_factory.mktemp(f"metadata-{version}")
            found = Vllm(version, python, scratch, entry_points(metadata))
            return stack.enter_context(found.forking())

        yield started


@pytest.fixture(scope="session", params=environments.VERSIONS)
def vllm(request: pytest.FixtureRequest, start: Callable[[str, Path], Vllm]) -> Vllm:
    version = request.param
    if not environments.supported():
        pytest.skip("vLLM needs Python {}.{} or newer".format(*environments.OLDEST_PYTHON))
    python = environments.interpreter(version)
    if python is None:
        message = f"no environment with vLLM {version} in {environments.folder(version)}"
        if "CI" in os.environ or environments.VARIABLE in os.environ:
            pytest.fail(message, pytrace=False)
        pytest.skip(f"{message}: `make vllm-envs` creates it")
    return start(version, python)
