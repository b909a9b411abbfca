"""Fixtures that all tests share: the tiny models of tests/models.py, each built once, and the quartet."""

import atexit
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.crashes import pytest_sessionfinish, pytest_terminal_summary  # noqa: F401
from tests.division import (  # noqa: F401
    pytest_collection_modifyitems,
    pytest_runtest_setup,
    pytest_xdist_make_scheduler,
)
from tests.models import make_policy, make_reward

if "PYTEST_XDIST_WORKER" not in os.environ:  # else inherited
    # Before Ray is imported, here and in every process that the tests start: it listens on 127.0.0.1 only, asks for
    # a token, and writes to a folder of the tests, whose path is short, as sockets lie there.
    os.environ |= {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_TMPDIR": tempfile.mkdtemp(prefix="qt-", dir="/tmp"),
    }
    atexit.register(shutil.rmtree, os.environ["RAY_TMPDIR"], ignore_errors=True)

if TYPE_CHECKING:  # unit tests do without Ray and gRPC
    from tests.cluster import Quartet


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with untied embeddings."""
    return make_policy(tmp_path_factory.mktemp("models") / "policy", kind="llama", tied=False)


@pytest.fixture(scope="session")
def reward_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model of one label."""
    return make_reward(tmp_path_factory.mktemp("models") / "reward")


@pytest.fixture(scope="session")
async def quartet(
    tmp_path_factory: pytest.TempPathFactory, policy_folder: Path, reward_folder: Path
) -> AsyncIterator["Quartet"]:
    """The four services on a Ray head of their own: one for all integration and end-to-end tests."""
    from tests.cluster import running_quartet

    async with running_quartet(tmp_path_factory.mktemp("quartet"), policy_folder, reward_folder) as running:
        yield running
