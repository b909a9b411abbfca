"""One Generate call: its prompts in the engine, and what is sent back of them."""

from collections.abc import AsyncGenerator, Callable, Collection

import numpy as np

from protos import rollout_pb2 as pb
from quartet.serving.share import Share
from quartet.serving.slots import EngineSlots
from quartet.wire.codec import unpack_longs
from quartet.wire.errors import InvalidArgument
from quartet.wire.ragged import Ragged
from services.rollout.interface import Engine
from services.rollout.sample import Sample, Sampling

HEARTBEAT_S = 2.0
"""Seconds after which a stream without a finished sample sends a message all the same, so that callers can tell busy
replicas from stuck ones."""
LINGER_S = 0.2
"""Seconds that a finished sample waits for others to share its message, unless it is the last. Each message through
Serve costs milliseconds whatever its size, and so do the calls for its samples' scores, log-probs and values; small
models finish a sample with every engine step."""


class Call:
    """The rows of one call, a prompt each."""

    def __init__(self, engine: Engine, prompts: Ragged, sampling: Sampling, seeds: bytes, begun: Ragged) -> None:
        """
        Args:
            engine: samples the responses.
            prompts: token ids, B sequences.
            sampling: sampling parameters.
            seeds: int64, one per prompt, or empty: unseeded.
            begun: tokens that the responses have already, B sequences, or none.

        Raises:
            InvalidArgument: a number of seeds or sequences is wrong, or a response has all of its tokens.
        """
        self._engine, self._prompts, self._sampling = engine, prompts, sampling
        self._seeds = _seeds(seeds, len(prompts))
        self._begun = _begun(begun, len(prompts), sampling.max_new_tokens)
        self._parts: list[Sample] = []

    async def answers(
        self,
        slots: EngineSlots,
        share: Share,
        beat: Callable[[], None] = lambda: None,
        *,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Yields every sample once, in messages with those that finished since the last: at most one per LINGER_S,
        and one without samples after `heartbeat_s`. Each has all parts that came meanwhile. `beat` is called before a
        message that holds nothing; if it raises, no such message is sent, and the call ends.

        When the generator ends (exhausted, cancelled or failed), none of its requests is left in the engine.
        """
        costs = self._prompts.lengths + np.int32(self._sampling.max_new_tokens)
        running = slots.enter(
            share,
            costs,
            lambda row: self._engine.generate(
                row, self._prompts[row], self._sampling, self._seeds[row], self._begun[row], self._parts.append
            ),
        )
        try:
            while running.left:
                done = await running.finished(heartbeat_s)
                if done and running.left:
                    done += await running.finished(min(LINGER_S, heartbeat_s), all_of_them=True)
                failed = [error for task in done if (error := task.exception())]
                answer = self._answer([task.result() for task in done if not task.exception()])
                if not (done or answer.segments):
                    beat()
                if answer.segments or not done:
                    yield answer  # even if another row failed: what is sampled need not be sampled again
                if failed:
                    raise failed[0]
        finally:
            await running.close()

    def _answer(self, samples: Collection[Sample]) -> pb.GenerateResponse:
        """A message with these samples and the parts of all others."""
        whole = {sample.index for sample in samples}
        parts = [part.to_wire() for part in self._parts if part.index not in whole]
        self._parts.clear()
        return pb.GenerateResponse(segments=[*parts, *(sample.to_wire() for sample in samples)])


def _seeds(data: bytes, prompts: int) -> list[int | None]:
    if not data:
        return [None] * prompts
    seeds = unpack_longs(data, "seeds").tolist()
    if len(seeds) != prompts:
        raise InvalidArgument(f"seeds: {len(seeds)} for {prompts} prompts; send one each, or none")
    if negative := [index for index, seed in enumerate(seeds) if seed < 0]:
        # The engine would treat -1 as "no seed".
        raise InvalidArgument(f"seeds[{negative[0]}]: {seeds[negative[0]]}; must be 0 or more")
    return list(seeds)


def _begun(begun: Ragged, prompts: int, most: int) -> Ragged:
    if not len(begun):
        return Ragged(np.empty(0, np.int32), np.zeros(prompts, np.int32))
    if len(begun) != prompts:
        raise InvalidArgument(f"begun: {len(begun)} sequences for {prompts} prompts; send one each, or none")
    long = begun.lengths >= most
    if long.any():
        index = int(long.argmax())
        raise InvalidArgument(
            f"begun[{index}]: {len(begun[index])} tokens; must be fewer than sampling.max_new_tokens, {most}"
        )
    return begun
