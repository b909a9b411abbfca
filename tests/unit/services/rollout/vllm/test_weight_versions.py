"""Both vLLM versions, by the methods that each has: 0.32's were read there, 0.26's recorded from its source."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.async_llm import AsyncLLM

from services.common.wire.errors import Unavailable
from services.rollout.vllm.versions import WeightVersions

CALLS = ("update_weight_version", "get_weight_version", "finish_weight_update", "is_sleeping")


class Old:
    """vLLM 0.26."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    async def finish_weight_update(self) -> None:
        self.calls.append("finish")

    async def is_sleeping(self) -> bool:
        self.calls.append("is_sleeping")
        return False


class New:
    """vLLM 0.32."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    async def update_weight_version(self, new_version: str) -> None:
        self.calls.append(("update", new_version))

    async def get_weight_version(self) -> str:
        self.calls.append("get")
        return "0"

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append(("finish", weight_version))


async def test_the_engine_that_counts_is_told_and_asked() -> None:
    llm = New()
    versions = WeightVersions(llm)
    await versions.begin()
    await versions.answer()
    await versions.finish(4)
    assert llm.calls == [("update", "0"), "get", ("finish", "4")]
    spans = [SimpleNamespace(version="3", start=0, end=2), SimpleNamespace(version="4", start=2, end=5)]
    # Its own note, whatever served when the request came.
    assert versions.spans(SimpleNamespace(weight_versions=spans), begun=3) == ((3, 0, 2), (4, 2, 5))
    assert versions.spans(SimpleNamespace(weight_versions=None), begun=3) == ()


async def test_for_the_engine_that_does_not_count_we_do() -> None:
    llm = Old()
    versions = WeightVersions(llm)
    await versions.begin()
    await versions.answer()
    output = SimpleNamespace(token_ids=[5, 6, 7])
    assert versions.spans(output, begun=0) == ((0, 0, 3),)
    await versions.finish(4)
    assert llm.calls == ["is_sleeping", "finish"]
    assert versions.spans(output, begun=4) == ((4, 0, 3),)
    with pytest.raises(Unavailable, match="the weights changed while this was sampled"):
        versions.spans(output, begun=0)


@pytest.mark.parametrize("name", CALLS)
def test_what_is_recorded_of_this_version_is_so(name: str) -> None:
    recorded = getattr(New, name, None) or getattr(Old, name)
    ours, theirs = (list(inspect.signature(call).parameters) for call in (recorded, getattr(AsyncLLM, name)))
    assert ours == theirs
