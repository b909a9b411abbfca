"""Processor time and memory of the orchestrator for a step: everything but the models.

    python -m benchmarks.loop_cost [--size 512x1024] [--steps 4]

The real loop, clients, wire and journal, in a process by itself; the services answer at once, over gRPC from another
process, with the numbers that they would send. The learner and the push do nothing. So a step costs what the
orchestrator has to do for it: read samples, send them to three services and read the answers, write the journal,
estimate the advantages, send the batch to the critic.

Prints, for each size (responses x tokens of each), the seconds of the orchestrator's processor per step, those per
million tokens, the bytes of the batch as it is packed, and the most memory that the orchestrator took beyond what it
had after a small batch, as a multiple of these bytes. Wanted: not more than linear in the tokens, and at most 3 times
the bytes.
"""

import asyncio
import json
import os
import re
import resource
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, cast

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.emulated.silent import Silent
from orchestrator.clients import Services
from orchestrator.config.run import OrchestratorConfig
from orchestrator.data.prompts import Prompt, PromptStream
from orchestrator.experience.collector import Collector
from orchestrator.experience.journal import ExperienceJournal
from orchestrator.experience.stream import Stream
from orchestrator.learners import CriticLearner, Update
from orchestrator.loop.state import TrainState
from orchestrator.loop.trainer import Trainer
from orchestrator.monitoring.record import Record
from orchestrator.push.pusher import PushReport
from orchestrator.tracing.spans import UNTRACED
from orchestrator.tracing.waits import Waits
from quartet.columns import Columns
from quartet.config.base import IDLE_THREADS_SLEEP
from quartet.wire.client import open_channel
from quartet.wire.codec import Floats
from services.critic.client import CriticClient
from services.reference.client import ReferenceClient
from services.reward.client import RewardClient
from services.rollout.client import RolloutClient

SIZES = ("16x16", "128x128", "256x512", "512x1024", "1024x4096")
PROMPT = 16
"""Tokens of each prompt."""
WARM_UP = 2
"""Steps of the smallest size before."""
MIB = 1 << 20
console = Console(width=120)


class Idle(Silent):
    """The learner, the push, the log, the display and the checkpoints, which do nothing. The log notes the processor
    time of each step."""

    name = prefix = "policy"

    def __init__(self) -> None:
        self.spent: list[float] = []
        self.packed = 0
        """Bytes of the last batch, as it is packed."""

    async def train(self, update: Update) -> dict[str, float]:
        """Takes down how large the batch is."""
        self.packed = update.columns.nbytes
        return {"loss": 0.0}

    async def logprobs(self, trajectories: Columns) -> Floats:
        """The engine's log-probs."""
        return np.full(trajectories.size("sampled"), -1.0, np.float32)

    async def save(self, folder: Path) -> None:
        """Writes nothing."""

    async def push(self, version: int) -> PushReport:
        """Pushes nothing."""
        return PushReport(version, ("a",), 0.0, 1, "sum")

    async def stage(self, version: int) -> int:
        """Copies nothing."""
        return version

    async def deliver(self, staged: int) -> PushReport:
        """Delivers nothing."""
        return await self.push(staged)

    async def rest(self, at_most_s: float) -> None:
        """Releases nothing."""

    async def complete(self) -> None:
        """Finds no late replica."""

    def write(self, step: int, metrics: Any) -> None:
        """Notes the processor time that this process has had."""
        self.spent.append(time.process_time())

    def note(self, text: str) -> None:
        """Prints what the user would be told."""
        print(text, file=sys.stderr)


async def trained(port: int, folder: Path, responses: int, tokens: int, steps: int) -> Idle:
    """A run of so many steps, and what it noted."""
    section = {
        "name": "cost",
        "data": {"path": "prompts"},
        "policy": {"model": str(folder), "optimizer": {"learning_rate": 1e-4}},
        "batch_size": responses,
        "steps": steps,
        "algorithm": {"kind": "ppo", "minibatch_size": responses},
        "sampling": {"max_new_tokens": tokens},
        "loop": {"mismatch_limit": 1.0},
        "evaluation": {"every": 0},
    }
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    config, idle = OrchestratorConfig.parse(section, "orchestrator"), Idle()
    prompts = [Prompt(row, np.asarray([4 + row] * PROMPT, np.int32), "p", "") for row in range(64)]
    async with open_channel(f"127.0.0.1:{port}") as channel:
        clients = (kind(channel) for kind in (RolloutClient, RewardClient, ReferenceClient, CriticClient))
        services = Services(*cast(Any, clients))
        assert services.critic is not None
        journal = ExperienceJournal(folder / "journal", config, idle.note)
        trainer = Trainer(
            config,
            partial(Stream, config, PromptStream(prompts, config.seed), Collector(services, config), journal),
            cast(Any, idle),
            [cast(Any, idle), CriticLearner(services.critic, config, 0)],
            cast(Any, idle),
            cast(Any, idle),
            None,
            Record(cast(Any, idle), cast(Any, idle), config.steps),
            Waits(UNTRACED),
        )
        state = TrainState(step=0, first_version=1, first_critic_step=0)
        await trainer.run(state, folder / "saved")
    return idle


def measured(responses: int, tokens: int, steps: int) -> dict[str, float]:
    """The figures of one size, in this process."""
    command = [sys.executable, "-m", "benchmarks.emulated.answers"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server,
        TemporaryDirectory() as small,
        TemporaryDirectory() as folder,
    ):
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            asyncio.run(trained(port, Path(small), 16, 16, WARM_UP))
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            idle = asyncio.run(trained(port, Path(folder), responses, tokens, 1 + steps))
        finally:
            server.terminate()
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    return {"seconds": (idle.spent[-1] - idle.spent[0]) / steps, "packed": idle.packed, "peak": peak}


def main(
    size: Annotated[list[str], typer.Option(help="responses x tokens of each; several times for several sizes")] = [  # noqa: B006
        *SIZES
    ],
    steps: Annotated[int, typer.Option(min=1)] = 4,
    alone: Annotated[
        bool, typer.Option(hidden=True, help="Measure the size in this process, and print JSON.")
    ] = False,
) -> None:
    """Measures each size in a process of its own, and prints a table."""
    sizes = {each: _numbers(each) for each in size}
    if alone:
        [(responses, tokens)] = sizes.values()  # the most memory that a process has had holds that of all sizes
        print(json.dumps(measured(responses, tokens, steps)))
        return
    table = Table("responses x tokens", "s a step", "s a million tokens", "packed MiB", "peak / packed")
    for each, (responses, tokens) in sizes.items():
        command = [sys.executable, "-m", "benchmarks.loop_cost", "--alone", "--size", each, "--steps", str(steps)]
        # In the environment of a command of Quartet.
        done = subprocess.run(
            command, env=IDLE_THREADS_SLEEP | os.environ, check=True, stdout=subprocess.PIPE, text=True
        )
        line = json.loads(done.stdout)
        rate, share = line["seconds"] / (responses * tokens / 1e6), line["peak"] / line["packed"]
        table.add_row(each, f"{line['seconds']:.3f}", f"{rate:.2f}", f"{line['packed'] / MIB:.1f}", f"{share:.1f}")
    console.print(table)


def _numbers(size: str) -> tuple[int, int]:
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", size)
    if found is None:
        raise typer.BadParameter(f"{size!r} should be responses x tokens, such as 512x1024", param_hint="--size")
    return int(found[1]), int(found[2])


if __name__ == "__main__":
    typer.run(main)
