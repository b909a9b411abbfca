"""An engine that takes pushes and is asked for responses meanwhile."""

import time

from protos import rollout_pb2 as pb
from services.common.wire.codec import Ints
from services.common.wire.errors import Unavailable
from services.rollout.sample import Sample, Sampling
from tests.pushing import EngineHost, Phases


class Replica(EngineHost, Phases):
    """An engine in this process that takes pushes."""

    def __init__(self) -> None:
        super().__init__()
        self._paused = 0.0
        self.pauses: list[float] = []
        """Seconds of each push from its first phase, which pauses, to its commit."""

    async def sample(self, prompt: Ints, sampling: Sampling, seed: int) -> Sample:
        """A response; asks again if a push has ended it."""
        while True:
            try:
                return await self._engine.generate(0, prompt, sampling, seed)
            except Unavailable:
                continue

    async def _carry_out(self, phase: bytes) -> bytes:
        name = pb.WeightPhase.FromString(phase).WhichOneof("phase")
        if name == "prepare":
            self._paused = time.perf_counter()
        report = await self.carry_out(phase)
        if name == "commit":
            self.pauses.append(time.perf_counter() - self._paused)
        return report
