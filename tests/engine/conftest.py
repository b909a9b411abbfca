"""Fixture of the tests of one vLLM engine, which need neither Ray nor Serve."""

from collections.abc import Iterator

import pytest

from tests.engine_process import EngineProcess


@pytest.fixture(scope="package")
def engine() -> Iterator[EngineProcess]:
    """A process for engines, one after the other."""
    process = EngineProcess()
    yield process
    process.end()
