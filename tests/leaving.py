"""Callers that leave the rollout service's streams early, in every way a caller can."""

import asyncio
import itertools
from collections.abc import Sequence

import grpc

from protos import rollout_pb2
from protos.rollout_pb2_grpc import RolloutStub
from quartet.wire.client import OPTIONS, Metadata
from quartet.wire.codec import Ints, pack_sequences

TOGETHER = 16
"""Streams that are open at a time."""
WAYS = ("at once", "after a message", "by deadline", "by closing the channel")


async def leave_streams(
    target: str, count: int, prompts: Sequence[Ints], tokens: int, proof: Metadata = ()
) -> dict[str, int]:
    """Opens `count` streams and leaves each; how often each status came back. What is seen of a dead proxy is
    UNAVAILABLE. `proof` is metadata of each call."""
    seen: dict[str, int] = {}
    numbers = itertools.count()

    async def caller() -> None:
        async with grpc.aio.insecure_channel(target, options=OPTIONS) as channel:
            while (number := next(numbers)) < count:
                way = WAYS[number % len(WAYS)]
                status = await _leave(target, channel, way, prompts, tokens, proof)
                seen[status] = seen.get(status, 0) + 1

    await asyncio.gather(*(caller() for _ in range(TOGETHER)))
    return seen


async def _leave(
    target: str, shared: grpc.aio.Channel, way: str, prompts: Sequence[Ints], tokens: int, proof: Metadata
) -> str:
    sampling = rollout_pb2.SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    request = rollout_pb2.GenerateRequest(prompts=pack_sequences(prompts), sampling=sampling)
    own = [("grpc.use_local_subchannel_pool", 1)]
    channel = grpc.aio.insecure_channel(target, options=own) if way == "by closing the channel" else shared
    timeout = 0.1 if way == "by deadline" else 60.0
    stub = RolloutStub(channel)  # type: ignore[no-untyped-call]
    call = stub.Generate(request, metadata=(("application", "rollout"), *proof), timeout=timeout)
    reading = asyncio.create_task(_read(call, way == "after a message"))
    if way in ("at once", "by closing the channel"):
        await asyncio.sleep(0.03)
        await channel.close() if channel is not shared else call.cancel()
    status = await reading
    if channel is not shared:
        await channel.close()
    return status


async def _read(call: grpc.aio.UnaryStreamCall, one_message: bool) -> str:
    try:
        async for _ in call:
            if one_message:
                call.cancel()
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    except (asyncio.CancelledError, grpc.aio.UsageError):
        return "CANCELLED"
    return "OK"
