"""Hostile requests to the reward service's HTTP door. `python -m tests.fuzz --http` sends as many as one likes."""

from pathlib import Path

import psutil
import pytest

from tests.fuzz.http import HttpVerdict, faults, fuzz, requests
from tests.http_requests import ask
from tests.unit.reward_door import reward_door, scorers_of_all_kinds

COUNTS = [1000, pytest.param(100_000, marks=[pytest.mark.exhaustive, pytest.mark.timeout(3600)])]
GROWTH_MIB = 96
"""Most that this process may grow, which answers and asks. The pools of its allocator take a part of it."""


@pytest.mark.parametrize("count", COUNTS)
async def test_answers_are_right_or_name_the_mistake_and_memory_stays(
    count: int, policy_folder: Path, reward_folder: Path
) -> None:
    async with reward_door(scorers_of_all_kinds(str(reward_folder), str(policy_folder))) as port:
        page = (await ask(port, "/reward/openapi.json")).json
        await fuzz(port, requests(page, seed=2, count=500))
        before = psutil.Process().memory_info().rss
        verdict = await fuzz(port, requests(page, seed=1, count=count))
        grown = psutil.Process().memory_info().rss - before
        print(dict(verdict.statuses), f"slowest {verdict.slowest_s:.1f} s, {grown >> 20} MiB more")
        assert verdict.faults == []
        assert verdict.statuses[200] > count / 20, "hardly any request got through: it only knocks at the door"
        assert verdict.statuses[503] > 0
        assert grown < GROWTH_MIB << 20
        assert (await ask(port, "/reward/health")).status == 200


async def test_the_same_seed_gives_the_same_requests_to_every_path(policy_folder: Path, reward_folder: Path) -> None:
    async with reward_door(scorers_of_all_kinds(str(reward_folder), str(policy_folder))) as port:
        page = (await ask(port, "/reward/openapi.json")).json
    first, again = list(requests(page, 3, 2000)), list(requests(page, 3, 2000))
    assert first == again
    for path in page["paths"]:
        assert any(request.path == f"/reward{path}" for request in first)


@pytest.mark.parametrize(
    ("status", "body", "fault"),
    [
        (200, b'{"results": [{"outcome": "scored", "scores": {"score": 1.0}}]}', None),
        (200, b'{"results": [{"outcome": "failed", "scores": {"score": 0.0}}]}', "failed has"),
        (200, b'{"results": [{"outcome": "scored", "scores": NaN}]}', "holds NaN"),
        (400, b'{"error": {"message": "pairs: empty"}}', None),
        (400, b'{"error": {"message": ""}}', "without a message"),
        (404, b'{"error": {"message": "no such file: /home/me/x"}}', "a path"),
        (400, b'{"error": {"message": "Traceback"}}', "a traceback"),
        (500, b'{"error": {"message": "internal error"}}', "internal error"),
        (503, b'{"error": {"message": "input[1]: failed: it raised"}}', None),
        (503, b'{"error": {"message": "no replica"}}', "no replica"),
    ],
)
def test_an_answer_is_judged(status: int, body: bytes, fault: str | None) -> None:
    verdict = HttpVerdict()
    request = next(requests({"paths": {"/v1/rewards": {"post": {}}}, "components": {"schemas": {}}}, 0, 1))
    found = [*faults(request, status, "application/json", body)]
    verdict.add(request, status, "application/json", body, 0.1)
    assert len(verdict.faults) == len(found) == (fault is not None)
    assert fault is None or fault in found[0]
