"""Generation without a service: a model in a folder, prompts in, samples out, through the same engine.

    python -m services.rollout.offline DESCRIPTOR

`quartet evaluate --model PATH` runs this in a separate process, so that its engine does not affect the deployed ones.
DESCRIPTOR is that of a socket, which the process inherits. Through it come values of msgpack: the engine's
configuration, then calls, each with a number; and the samples of each call go back with its number, or the reason why
its prompts cannot be answered. The process ends when the other end closes the socket.
"""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgpack
import numpy as np

from protos import rollout_pb2 as pb
from quartet.wire.codec import Ints
from services.rollout.config import RolloutConfig
from services.rollout.engines import start
from services.rollout.sample import Sample, Sampling, from_wire

SAMPLING = ("max_new_tokens", "min_new_tokens", "temperature", "stop_token_ids")
"""Fields of Sampling that a call has."""
_READ = 1 << 20


def pack_config(config: RolloutConfig) -> bytes:
    """Packs the configuration, the first value that is sent."""
    return bytes(msgpack.packb(config.model_dump()))


def pack_call(number: int, prompts: Sequence[Ints], sampling: Sampling, seeds: Sequence[int]) -> bytes:
    """Packs a call for one sample of each prompt."""
    call = {
        "number": number,
        "sampling": {name: getattr(sampling, name) for name in SAMPLING},
        "prompts": [prompt.tolist() for prompt in prompts],
        "seeds": list(seeds),
    }
    return bytes(msgpack.packb(call))


async def received(reader: asyncio.StreamReader) -> AsyncIterator[Any]:
    """Yields the values that come, until the other end closes the socket."""
    unpacker = msgpack.Unpacker(max_buffer_size=0)  # of any size
    while data := await reader.read(_READ):
        unpacker.feed(data)
        for value in unpacker:
            yield value


def samples_of(answer: dict[str, Any]) -> list[Sample]:
    """The samples of an answer, in the order of the call's prompts."""
    return [from_wire(pb.Segment.FromString(data), index) for index, data in enumerate(answer["samples"])]


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Starts the engine and answers calls, several at the same time; returns when the other end closes the socket.
    The first failure ends it."""
    values = received(reader)
    engine = await start(RolloutConfig.parse(await anext(values), "offline"))

    async def answer(call: dict[str, Any]) -> None:
        sampling = Sampling(**call["sampling"] | {"stop_token_ids": tuple(call["sampling"]["stop_token_ids"])})
        prompts = [np.asarray(prompt, np.int32) for prompt in call["prompts"]]
        longest, at = max((len(prompt), -at) for at, prompt in enumerate(prompts))
        if longest >= engine.max_length:
            fewer = f"must be fewer than {engine.max_length}, to leave room for a response"
            problem = f"prompts[{-at}]: {longest} tokens; {fewer}"
            writer.write(msgpack.packb({"number": call["number"], "problem": problem}))
            await writer.drain()
            return
        asked = enumerate(zip(prompts, call["seeds"], strict=True))
        samples = await asyncio.gather(*(engine.generate(at, prompt, sampling, seed) for at, (prompt, seed) in asked))
        told = [sample.to_wire().SerializeToString() for sample in samples]
        writer.write(msgpack.packb({"number": call["number"], "samples": told}))
        await writer.drain()

    try:
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(answer(call)) async for call in values]
            for each in calls:
                each.cancel()
    finally:
        engine.shutdown()


async def main() -> None:
    """Serves the socket of the given descriptor."""
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        reader, writer = await asyncio.open_connection(sock=connection)
        await serve(reader, writer)


if __name__ == "__main__":
    asyncio.run(main())
