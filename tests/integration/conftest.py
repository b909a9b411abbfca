"""Fixtures of the integration tests: this process on the cluster, and rollout replicas in a known state."""

from collections.abc import Iterator
from typing import Any

import pytest
import ray

from tests import plain
from tests.cluster import Quartet
from tests.pushing import EngineHost, push_model


@pytest.fixture(scope="session")
def on_ray(quartet: Quartet) -> Iterator[None]:
    """This process as a driver on the quartet's cluster."""
    ray.init(address=quartet.cluster.address, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def host(on_ray: None) -> Iterator[Any]:
    """A process for engines, one after the other."""
    env = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    actor: Any = ray.remote(EngineHost).options(num_cpus=0, runtime_env={"env_vars": env}).remote()
    yield actor
    ray.kill(actor)


@pytest.fixture(scope="module")
async def base(quartet: Quartet) -> Any:
    """The reference's model, whose weights every rollout replica serves when this module begins."""
    model = plain.language_model(quartet.policy)
    await push_model(quartet.services.rollout, model)
    return model
