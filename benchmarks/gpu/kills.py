"""Members of a push that are killed or frozen while they have the learner's memory open. One minute.

    python -m benchmarks.gpu.kills [--backend cuda-ipc] [--mib 1024] [--stall-s 3] [--device cuda]

The members are those of benchmarks.push. One is lost in each push, early in its transfer or as it loads what it has
open; the other has to have the new weights all the same. Then the lost one is replaced, and a push goes to both.
`held_gib` is what the GPU holds in all after each push: it should not grow.
"""

import asyncio
import signal
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.gpu.results import Cell, Results
from orchestrator.config.weights import WeightsConfig
from orchestrator.push.pusher import WeightPusher
from tests.members import Fleet, weights
from tests.sources import LocalSource

EARLY_S = 0.002
"""Time after which a transfer has begun on a member."""
LOSSES = {
    "a member that is killed in its transfer": ("transfer", EARLY_S, signal.SIGKILL),
    "a member that is killed as it loads": ("commit", 0.0, signal.SIGKILL),
    "a member that is frozen as it loads": ("commit", 0.0, signal.SIGSTOP),
}


def main(
    backend: str = "cuda-ipc",
    mib: int = 1024,
    stall_s: Annotated[float, typer.Option(help="deadline of what takes no work")] = 3.0,
    device: str = "cuda",
    out: Path = Path("runs/gpu"),
) -> None:
    """Runs the benchmark and prints its results."""
    asyncio.run(measured(Results("kills", out), backend, mib, stall_s, torch.device(device)))


async def measured(results: Results, backend: str, mib: int, stall_s: float, where: torch.device) -> None:
    """Adds a row for each loss, and for the push after it."""
    tensors = {name: tensor.to(where) for name, tensor in weights(0, mib).items()}
    source = LocalSource(tensors, bucket_bytes=mib << 17, stall_s=stall_s, backend=backend)
    fleet = Fleet(backend, where.type)
    config = WeightsConfig(timeout_s=60, stall_s=stall_s, control_s=stall_s, commit_s=2 * stall_s, attempts=3)
    pushes = Pushes(fleet, WeightPusher(fleet, source, backend, config), where)  # type: ignore[arg-type]
    try:
        await fleet.add("stays", "0")
        results.add("two members", **await pushes.next())
        for number, (what, (phase, after_s, how)) in enumerate(LOSSES.items(), 1):
            results.add(what, **await pushes.losing(str(number - 1), phase, after_s, how))
            await fleet.add(str(number))
            results.add("afterwards", **await pushes.next())
    finally:
        await fleet.end()
    results.show()


class Pushes:
    """Pushes of one version after the other."""

    def __init__(self, fleet: Fleet, pusher: WeightPusher, where: torch.device) -> None:
        self._fleet, self._pusher, self._where, self._version = fleet, pusher, where, 0

    async def next(self) -> dict[str, Cell]:
        """A push: its seconds and attempts, the members that have its version, and what the GPU holds then."""
        self._version += 1
        report = await self._pusher.push(self._version)
        have = [name for name, version in (await self._fleet.versions()).items() if version == self._version]
        held = 0.0
        if self._where.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._where)
            held = (total - free) / 2**30
        figures: dict[str, Cell] = {"push_s": report.seconds, "attempts": report.attempts}
        return figures | {"members": len(report.replicas), "have_it": len(have), "held_gib": held}

    async def losing(self, name: str, phase: str, after_s: float, how: signal.Signals) -> dict[str, Cell]:
        """A push in which a member is lost some time after this phase was sent to it."""
        member = self._fleet.members[name]

        async def lose() -> None:
            if after_s:
                asyncio.get_running_loop().call_later(after_s, member.signal, how)
            else:
                member.signal(how)

        self._fleet.before = {phase: lose}
        try:
            return await self.next()
        finally:
            await self._fleet.members.pop(name).end()


if __name__ == "__main__":
    typer.run(main)
