"""Generation without a service: a model in a folder, prompts in, samples out, through the same engine.

    python -m services.rollout.offline REQUEST SAMPLES

`quartet evaluate --model PATH` runs this in a separate process, so that its engine does not affect the deployed ones.
REQUEST and SAMPLES are msgpack files.
"""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from quartet.wire.codec import Ints
from services.rollout.config import RolloutConfig
from services.rollout.engines import start
from services.rollout.sample import FinishReason, Sample, Sampling


def pack_request(config: RolloutConfig, prompts: Sequence[Ints], sampling: Sampling, seeds: Sequence[int]) -> bytes:
    """Packs a request for the file REQUEST."""
    fields = {
        name: getattr(sampling, name)
        for name in ("max_new_tokens", "min_new_tokens", "temperature", "stop_token_ids")
    }
    request = {
        "config": config.model_dump(),
        "sampling": fields,
        "prompts": [prompt.tolist() for prompt in prompts],
        "seeds": list(seeds),
    }
    return bytes(msgpack.packb(request))


def unpack_samples(data: bytes) -> list[Sample]:
    """Reads the file SAMPLES; returns the samples in the order of the prompts."""
    return [
        Sample(
            index=index,
            response_ids=np.asarray(entry["ids"], np.int32),
            logprobs=np.frombuffer(entry["logprobs"], "<f4"),
            finish_reason=FinishReason(entry["finish_reason"]),
            spans=((0, 0, len(entry["ids"])),),
        )
        for index, entry in enumerate(msgpack.unpackb(data))
    ]


async def generate(request: dict[str, Any]) -> list[Sample]:
    """Starts an engine, generates everything and ends it."""
    engine = await start(RolloutConfig.parse(request["config"], "offline"))
    try:
        given = request["sampling"]
        sampling = Sampling(**given | {"stop_token_ids": tuple(given["stop_token_ids"])})
        calls = [
            engine.generate(index, np.asarray(prompt, np.int32), sampling, seed)
            for index, (prompt, seed) in enumerate(zip(request["prompts"], request["seeds"], strict=True))
        ]
        return list(await asyncio.gather(*calls))
    finally:
        engine.shutdown()


def main() -> None:
    """Reads REQUEST, generates, and writes SAMPLES."""
    source, target = sys.argv[1:]
    samples = asyncio.run(generate(msgpack.unpackb(Path(source).read_bytes())))
    packed = [
        {
            "ids": sample.response_ids.tolist(),
            "logprobs": sample.logprobs.astype("<f4").tobytes(),
            "finish_reason": str(sample.finish_reason),
        }
        for sample in samples
    ]
    Path(target).write_bytes(msgpack.packb(packed))


if __name__ == "__main__":
    main()
