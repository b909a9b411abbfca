"""The registry, where replicas wait for their answers and a run hears of those that wait."""

import asyncio
from typing import Any

import pytest

from quartet.weight_transfer import registry as module
from quartet.weight_transfer.place import Place
from quartet.weight_transfer.registry import NAMESPACE, Answer, Applicant, Registry, registries, registry_name
from tests.unit.virtual_time import in_virtual_time

ONE, TWO = (Applicant(workers, Place("m")) for workers in (1, 2))


def answer(ttl_s: float = 30) -> Answer:
    return Answer(b"lease", ttl_s, None)


@in_virtual_time
async def test_the_run_hears_at_once_of_a_replica_that_applies_and_of_all_that_wait() -> None:
    registry, loop = Registry(), asyncio.get_running_loop()
    assert await registry.applicants(2) == {}
    assert loop.time() == 2
    asking = asyncio.create_task(registry.applicants(60))
    await asyncio.sleep(1)
    applying = [asyncio.create_task(registry.apply(name, each)) for name, each in (("a", ONE), ("b", TWO))]
    assert await asking == {"a": ONE, "b": TWO}
    await registry.answer({"a": answer(1), "gone": answer(2)})
    assert await applying[0] == answer(1)
    # One still waits, and is told of without a wait.
    assert await registry.applicants(60) == {"b": TWO}
    assert loop.time() == 3
    await registry.answer({"b": answer(3)})
    assert await applying[1] == answer(3)
    assert await registry.applicants(2) == {}
    assert loop.time() == 5


async def test_a_replica_that_applies_again_has_left_its_first_application() -> None:
    registry = Registry()
    first, second = (asyncio.create_task(registry.apply("a", each)) for each in (ONE, TWO))
    await asyncio.sleep(0)
    assert await registry.applicants(0) == {"a": TWO}
    with pytest.raises(asyncio.CancelledError):
        await first
    await registry.answer({"a": answer()})
    assert await second == answer()


async def test_the_answer_to_a_replica_that_is_gone_disturbs_no_other() -> None:
    registry = Registry()
    gone, waiting = (asyncio.create_task(registry.apply(name, ONE)) for name in ("gone", "waiting"))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.sleep(0)
    await registry.answer({"gone": answer(), "waiting": answer()})
    assert await waiting == answer()


def test_actors_of_the_same_name_elsewhere_are_no_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    actors = [
        {"name": registry_name("rollout", number), "namespace": namespace}
        for number, namespace in ((10, NAMESPACE), (9, NAMESPACE), (11, "serve"))
    ]

    def named(**_: Any) -> list[dict[str, str]]:
        return actors

    monkeypatch.setattr(module, "list_named_actors", named)
    assert registries("rollout") == [9, 10]
