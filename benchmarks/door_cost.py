"""Cost of the door of the gRPC port for a call: Serve's server class without it, with it, with TLS, with a
token.

    python -m benchmarks.door_cost [--rounds 20]

No Ray and no model: client and server are this process, and calls are answered with an empty message. Processor time,
so that a busy machine says the same as a quiet one.
"""

import asyncio
import logging
import tempfile
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Annotated
from unittest.mock import Mock

import grpc
import typer
from ray.serve._private.grpc_util import gRPCGenericServer
from rich.console import Console
from rich.table import Table

from protos.reward_pb2 import ScoreRequest
from protos.reward_pb2_grpc import add_RewardServicer_to_server
from quartet.security.keys.folder import Keys
from quartet.security.port import Port
from tests.unit.front_door import Replicas, ask, channel_of, front_door

SIZES = {"10 B": (10, 200), "1 MiB": (1 << 20, 20)}
"""Bytes of a request, and calls in a round."""
console = Console()


def main(rounds: Annotated[int, typer.Option(min=1)] = 20) -> None:
    """Runs the benchmark and prints its results."""
    logging.disable()
    asyncio.run(_measure(rounds))


async def _measure(rounds: int) -> None:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        plain, _ = await stack.enter_async_context(front_door(Port(local="open")))
        channels = {
            "without the door": grpc.aio.insecure_channel(await _bare(stack)),
            "door": grpc.aio.insecure_channel(plain),
        }
        for name, tokens in (("door, TLS, certificates", False), ("door, TLS, tokens", True)):
            keys = Keys(folder / name, days=1)
            keys.make(["127.0.0.1"], {"run-a": "trainer"}, tokens=tokens)
            target, _ = await stack.enter_async_context(front_door(Port(policy=keys.policy)))
            channels[name] = channel_of(keys, "run-a", target)
        for channel in channels.values():
            stack.push_async_callback(channel.close)
        await _print(channels, rounds)


async def _bare(stack: AsyncExitStack) -> str:
    """Target of Serve's server class as Serve opens it."""
    server = gRPCGenericServer(Replicas(None).make)
    number = server.add_insecure_port("127.0.0.1:0")
    add_RewardServicer_to_server(Mock(), server)  # type: ignore[no-untyped-call]
    await server.start()
    stack.push_async_callback(server.stop, 0)
    return f"127.0.0.1:{number}"


async def _print(channels: Mapping[str, grpc.aio.Channel], rounds: int) -> None:
    table = Table("", *SIZES, title="processor time of a call, client and server, ms", title_justify="left")
    rows: dict[str, list[str]] = {name: [] for name in channels}
    for size, calls in SIZES.values():
        request = ScoreRequest(labels=["x" * size]).SerializeToString()
        spent: dict[str, list[float]] = {name: [] for name in channels}
        for round_ in range(-2, rounds):
            for name, channel in channels.items():
                began = time.process_time()
                for _ in range(calls):
                    await ask(channel, "Reward/Score", request=request)
                if round_ >= 0:
                    spent[name].append((time.process_time() - began) / calls * 1e3)
        for name, values in spent.items():
            rows[name].append(f"{median(values):.2f}")
    for name, cells in rows.items():
        table.add_row(name, *cells)
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
