"""Requests that no client would send. `python -m tests.fuzz` sends as many as one likes."""

import pytest

from tests.cluster import Quartet
from tests.fuzz.fuzzer import fuzz
from tests.fuzz.generator import requests
from tests.fuzz.processes import replica_processes

COUNTS = [1000, pytest.param(100_000, marks=[pytest.mark.exhaustive, pytest.mark.timeout(3600)])]  # more of the same


@pytest.mark.parametrize("count", COUNTS)
async def test_replies_are_ok_or_name_the_mistake_and_no_process_is_replaced(quartet: Quartet, count: int) -> None:
    before = replica_processes(quartet)
    verdict = await fuzz(quartet.channel, requests(seed=1, count=count))
    print(dict(verdict.codes), f"slowest {verdict.slowest_s:.1f} s: {verdict.slowest}")
    assert verdict.faults == []
    assert replica_processes(quartet) == before
    assert verdict.codes["OK"] > count / 20, "hardly any request got through: the fuzzer only knocks at the door"
