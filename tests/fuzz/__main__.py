"""Fuzzes four services of its own, with tiny models, and prints what they answered.

With --door only the port of Serve's proxy, in this process: recording replicas, which answer with an empty message,
stand behind it instead of services, so that a million requests take minutes.
"""

import argparse
import asyncio
import logging
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import grpc
from rich.console import Console
from rich.table import Table

from quartet.security.port import Port
from tests.cluster import Quartet, running_quartet
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
            return await _round(quartet, count, seed, console)


async def door(count: int, seed: int, console: Console) -> int:
    """Exit status: 0 if every reply of the port kept the promise."""
    logging.disable()  # Serve's, of each request that fails
    async with front_door(Port(local="open")) as (target, _), grpc.aio.insecure_channel(target) as channel:
        return await _judged(channel, count, seed, console, dict)


async def _round(quartet: Quartet, count: int, seed: int, console: Console) -> int:
    return await _judged(quartet.channel, count, seed, console, lambda: replica_processes(quartet))


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
    given = parser.parse_args()
    sys.exit(asyncio.run((door if given.door else main)(given.requests, given.seed, Console())))
