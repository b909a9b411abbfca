"""An engine that takes pushes and is asked for responses meanwhile."""

import time

import numpy as np

from protos import rollout_pb2 as pb
from quartet.wire.codec import Ints
from quartet.wire.errors import Unavailable
from services.rollout.sample import Part, Sample, Sampling, following
from tests.pushing import EngineHost, Phases


class Replica(EngineHost, Phases):
    """An engine in this process that takes pushes."""

    def __init__(self) -> None:
        super().__init__()
        self._paused = 0.0
        self.pauses: list[float] = []
        """Seconds of each push from its first phase, which pauses, to its commit."""

    async def sample(self, prompt: Ints, sampling: Sampling, seed: int) -> Sample:
        """A response; goes on after the tokens that have come if a push ends it, as the service's client does."""
        made = Part(0, np.empty(0, np.int32), np.empty(0, np.float32), ())

        def add(part: Part) -> None:
            nonlocal made
            made = following(made, part)

        while True:
            before = made
            try:
                rest = await self._engine.generate(0, prompt, sampling, seed, before.response_ids, add)
            except Unavailable:
                continue
            return following(before, rest)

    async def _carry_out(self, phase: bytes) -> bytes:
        name = pb.WeightPhase.FromString(phase).WhichOneof("phase")
        if name == "prepare":
            self._paused = time.perf_counter()
        report = await self.carry_out(phase)
        if name == "commit":
            self.pauses.append(time.perf_counter() - self._paused)
        return report
