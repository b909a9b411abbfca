"""Fixtures of the integration tests: this process on the cluster, and rollout replicas in a known state."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from tests import plain
from tests.cluster import Quartet
from tests.pushing import push_model


@pytest.fixture(scope="package")
def on_ray(quartet: Quartet) -> Iterator[None]:
    """Connects this process as a driver to the quartet's cluster."""
    # All else that a process needs that joins it is in tests/conftest.py, for the other heads of the tests too.
    os.environ["RAY_AUTH_TOKEN_PATH"] = quartet.cluster.token
    ray.init(address=quartet.cluster.address, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
async def base(quartet: Quartet) -> Any:
    """The reference's model, whose weights every rollout replica serves when this module begins."""
    model = plain.language_model(quartet.policy)
    await push_model(quartet.services.rollout, model)
    return model
