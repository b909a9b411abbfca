"""Fixtures that all tests share: a quartet, and the tiny models of tests/models.py, each made once."""

import atexit
import gc
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

from tests.crashes import pytest_sessionfinish, pytest_terminal_summary  # noqa: F401
from tests.division import (  # noqa: F401
    pytest_collection_modifyitems,
    pytest_ignore_collect,
    pytest_runtest_setup,
    pytest_xdist_make_scheduler,
)
from tests.running import shared_quartet  # noqa: F401

if "PYTEST_XDIST_WORKER" not in os.environ:  # else inherited
    # Before Ray is imported, here and in every process that the tests start: it listens on 127.0.0.1 only, asks for
    # a token, and writes to a folder of the tests, whose path is short, as sockets lie there.
    os.environ |= {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_TMPDIR": tempfile.mkdtemp(prefix="qt-", dir="/tmp"),
        # The first worker of a kind waits until what its forks share has been imported (tests/preloaded).
        "RAY_worker_register_timeout_seconds": "240",
        # Serve's controller looks at its replicas every 0.1 s, which takes 4 % of a core.
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.3",
    }
    atexit.register(shutil.rmtree, os.environ["RAY_TMPDIR"], ignore_errors=True)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in the background of a script: the programs that the tests start would inherit it, and not end where they are
    # interrupted.
    signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # while the tests are imported


def pytest_collection_finish() -> None:
    """Keeps what has been imported out of every later search for garbage, of which DeepSpeed begins two with each
    update of a learner whose state goes away between updates: they take 0.3 s each otherwise."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Lets Python end as it does otherwise: libraries complain of objects that are left then."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with untied embeddings."""
    # Imported here, as the process that divides the tests makes no model and would wait for transformers.
    from tests.models import make_policy

    return make_policy(tmp_path_factory.mktemp("models") / "policy", kind="llama", tied=False)


@pytest.fixture(scope="session")
def reward_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model of one label."""
    from tests.models import make_reward

    return make_reward(tmp_path_factory.mktemp("models") / "reward")
