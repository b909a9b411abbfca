"""Fuzzes four services of its own, with tiny models, and prints what they answered.

With --door only the port of Serve's proxy, in this process: recording replicas, which answer with an empty message,
stand behind it instead of services, so that a million requests take minutes. With --http the reward service's HTTP
door, in this process too, with scorers behind it.
"""

import argparse
import asyncio
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import psutil
from rich.console import Console
from rich.table import Table

from quartet.security.port import CALLBACK, CALLBACK_VARIABLE, Port
from tests.cluster import running_quartet
from tests.fuzz.fuzzer import Verdict, fuzz
from tests.fuzz.generator import requests
from tests.fuzz.processes import replica_processes
from tests.models import make_policy, make_reward
from tests.unit.front_door import front_door


async def main(count: int, seed: int, console: Console) -> int:
    """Exit status: 0 if every reply kept the promise and no process was replaced."""
    with tempfile.TemporaryDirectory() as folder:
        policy = make_policy(Path(folder) / "policy", kind="llama", tied=False)
        reward = make_reward(Path(folder) / "reward")
        (Path(folder) / "quartet").mkdir()
        async with running_quartet(Path(folder) / "quartet", policy, reward) as quartet:
            return await _judged(quartet.channel, count, seed, console, lambda: replica_processes(quartet))


async def door(count: int, seed: int, console: Console) -> int:
    """Exit status: 0 if every reply of the port kept the promise."""
    logging.disable()  # Serve's, of each request that fails
    async with front_door(Port(local="open")) as (target, _), grpc.aio.insecure_channel(target) as channel:
        return await _judged(channel, count, seed, console, dict)


async def http(count: int, seed: int, console: Console) -> int:
    """Exit status: 0 if every answer of the reward's HTTP door kept the promise and memory stayed."""
    from tests.fuzz.http import fuzz as fuzz_http
    from tests.fuzz.http import requests as http_requests
    from tests.http_requests import ask
    from tests.unit.reward_door import GO_ON, reward_door, scorers_of_all_kinds

    logging.disable()
    GO_ON.set()  # some ids that are drawn are those of w18, at which the function would wait until it counts as hung
    os.environ.setdefault(CALLBACK_VARIABLE, CALLBACK)  # replicas that Serve does not start refuse to be unguarded
    sizes: dict[int, int] = {}

    def look(number: int) -> None:
        if number % max(count // 10, 1) == 0:
            sizes[number] = psutil.Process().memory_info().rss >> 20

    with tempfile.TemporaryDirectory() as folder:
        policy = make_policy(Path(folder) / "policy", kind="llama", tied=False)
        reward = make_reward(Path(folder) / "reward")
        async with reward_door(scorers_of_all_kinds(str(reward), str(policy))) as port:
            page = (await ask(port, "/reward/openapi.json")).json
            began = time.monotonic()
            verdict = await fuzz_http(port, http_requests(page, seed, count), look)
            seconds = time.monotonic() - began
    table = Table("measure", "value", title=f"{count} requests over HTTP, seed {seed}")
    for status, times in verdict.statuses.most_common():
        table.add_row(str(status), str(times))
    table.add_row("broken promises", str(len(verdict.faults)))
    table.add_row("MiB by request", ", ".join(f"{number}: {size}" for number, size in sorted(sizes.items())))
    table.add_row("requests/s", f"{count / seconds:.0f}")
    table.add_row("slowest", f"{verdict.slowest_s:.2f} s")
    console.print(table)
    for fault in verdict.faults[:40]:
        console.print(fault, markup=False)
    return 1 if verdict.faults else 0


async def _judged(
    channel: grpc.aio.Channel, count: int, seed: int, console: Console, processes: Callable[[], dict[str, int]]
) -> int:
    before, began = processes(), time.monotonic()
    verdict = await fuzz(channel, requests(seed, count))
    seconds, after = time.monotonic() - began, processes()
    restarts = sorted(before.items() ^ after.items())
    console.print(_table(verdict, count, seed, seconds, len(restarts)))
    for fault in [*verdict.faults[:40], *(f"replaced: {name} {pid}" for name, pid in restarts)]:
        console.print(fault, markup=False)
    return 1 if verdict.faults or restarts else 0


def _table(verdict: Verdict, count: int, seed: int, seconds: float, restarts: int) -> Table:
    table = Table("measure", "value", title=f"{count} requests, seed {seed}")
    for code, times in verdict.codes.most_common():
        table.add_row(code, str(times))
    table.add_row("broken promises", str(len(verdict.faults)))
    table.add_row("restarts", str(restarts))
    table.add_row("requests/s", f"{count / seconds:.0f}")
    table.add_row("slowest", f"{verdict.slowest_s:.2f} s {verdict.slowest}")
    return table


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--door", action="store_true", help="the port alone")
    parser.add_argument("--http", action="store_true", help="the reward service's HTTP door alone")
    given = parser.parse_args()
    chosen = door if given.door else http if given.http else main
    sys.exit(asyncio.run(chosen(given.requests, given.seed, Console())))
