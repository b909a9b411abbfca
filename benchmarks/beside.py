"""Seconds of a run's step while a chat client and an evaluation ask the model in training, over those of alone.

    python -m benchmarks.beside [--case demo] [--rounds 8] [--steps 4] [--client chat --client evaluation]

One `quartet train` by the file that `quartet init` writes, at lock-step. Windows of steps alone and windows of steps
with clients at its door take turns, so that a machine that changes speed changes both; the step in which clients come
or go is left out. Each window with clients is compared with the two beside it.

`chat` streams an answer as long as the run's responses, and asks again two seconds after its end, as a person who
reads and writes does. `evaluation` asks as lm-evaluation-harness's `local-completions` does by its defaults: for the
log-probs of a text of token ids, one request after the other without a pause; `--evaluations` has so many at a time,
as its `num_concurrent` does.

Both clients are this process, whose processor time is told apart from that of the run with all of its services.
"""

import asyncio
import json
import random
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated

import aiohttp
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.ended import processor_s
from benchmarks.figures import keep
from benchmarks.vs_trl.cases import CASES, Case
from benchmarks.vs_trl.sides import STAGES, Quartet, configured
from orchestrator.deployment.listeners import free_ports

console = Console()
CHAT, EVALUATION = "chat", "evaluation"
WARM_UP = 3
"""First steps, which are left out."""
PAUSE_S, LOOK_S = 2.0, 0.02
"""Seconds between a chat's answers, and between two looks at the run's metrics."""
ANSWER_S = 60.0
RUN = "runs/race/metrics.jsonl"


@dataclass
class Answers:
    """Requests and tokens that one kind of client was answered."""

    requests: int = 0
    tokens: int = 0
    """Tokens that the engine read or sampled for it."""
    first_s: list[float] = field(default_factory=list)
    """Seconds to the first byte of each answer."""
    refused: int = 0


@dataclass(frozen=True, slots=True)
class Window:
    """Steps alone, or beside clients."""

    steps: range
    seconds: float
    theirs_s: float
    """Processor time of the run and its services."""
    ours_s: float
    """Processor time of the clients."""


class Clients:
    """The clients of the door, which come and go together."""

    def __init__(self, case: Case, address: str, token: Path, kinds: list[str], evaluations: int) -> None:
        self._case, self._address, self._token = case, address, token
        self._kinds = [kind for kind in kinds for _ in range(evaluations if kind == EVALUATION else 1)]
        self._draw = random.Random(0)
        self.answers = {kind: Answers() for kind in kinds}
        self.seconds = 0.0
        """Time for which they have asked."""

    @property
    def named(self) -> str:
        """The kinds of clients, one after the other."""
        return ", ".join(self._kinds)

    async def ask(self) -> None:
        """Asks until it is cancelled."""
        began = time.perf_counter()
        headers = {"Authorization": f"Bearer {self._token.read_text()}"}
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        try:
            async with (
                aiohttp.ClientSession(self._address, headers=headers, timeout=timeout) as session,
                asyncio.TaskGroup() as group,
            ):
                for kind in self._kinds:
                    group.create_task(self._chat(session) if kind == CHAT else self._evaluate(session))
        finally:
            self.seconds += time.perf_counter() - began

    async def _chat(self, session: aiohttp.ClientSession) -> None:
        case = self._case
        while True:
            body = {"prompt": self._ids(case.prompt), "max_tokens": case.response, "ignore_eos": True, "stream": True}
            if await self._answered(session, CHAT, body, case.longest):
                await asyncio.sleep(PAUSE_S)

    async def _evaluate(self, session: aiohttp.ClientSession) -> None:
        length = self._case.longest - 1
        while True:
            given = {"max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True, "temperature": 0}
            await self._answered(session, EVALUATION, {"prompt": [self._ids(length)], **given}, length + 1)

    async def _answered(
        self, session: aiohttp.ClientSession, kind: str, body: dict[str, object], tokens: int
    ) -> bool:
        """Asks once. One that is refused waits as it is told, as lm-evaluation-harness and OpenAI's library do."""
        answers, began = self.answers[kind], time.perf_counter()
        async with session.post("v1/completions", json={"model": "race", **body}) as got:
            if got.status == 429:
                answers.refused += 1
                await asyncio.sleep(float(got.headers.get("Retry-After", 1)))
                return False
            first = await got.content.readany()
            answers.first_s.append(time.perf_counter() - began)
            rest = await got.read()
            assert got.status == 200, first + rest
            assert b'"error"' not in first + rest, first + rest
        answers.requests += 1
        answers.tokens += tokens
        return True

    def _ids(self, count: int) -> list[int]:
        return self._draw.choices(range(4, self._case.vocabulary), k=count)


def main(
    case: Annotated[str, typer.Option(help=f"One of {', '.join(CASES)}.")] = "demo",
    rounds: Annotated[int, typer.Option(min=1, help="windows beside clients")] = 8,
    steps: Annotated[int, typer.Option(min=1, help="of a window")] = 4,
    client: Annotated[list[str], typer.Option(help=f"{CHAT} or {EVALUATION}")] = [CHAT, EVALUATION],  # noqa: B006
    evaluations: Annotated[int, typer.Option(min=1, help="requests of the evaluation at a time")] = 1,
) -> None:
    """Measures and prints the ratio."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        CASES[case].make(folder)
        raw = configured(folder, CASES[case])
        [port] = free_ports(1)
        raw["http_options"]["port"] = port
        raw["security"] = {**raw.get("security", {}), "http": True}
        quartet = Quartet(folder, raw)
        quartet.up()
        try:
            address, token = f"http://127.0.0.1:{port}/rollout/", folder / ".quartet/access/token"
            clients = Clients(CASES[case], address, token, client, evaluations)
            windows, lines = asyncio.run(_windows(folder, quartet, clients, rounds, steps))
        finally:
            quartet.down()
    _tell(CASES[case], windows, lines, clients)


async def _windows(
    folder: Path, quartet: Quartet, clients: Clients, rounds: int, steps: int
) -> tuple[list[Window], list[dict[str, float]]]:
    """The windows, the first and the last of them alone, and the run's steps."""
    count = 2 * rounds + 1
    # Each window has a step before it that is left out.
    run = asyncio.create_task(asyncio.to_thread(quartet.updates, WARM_UP + count * (steps + 1)))
    windows = []
    for index in range(count):
        first = WARM_UP + index * (steps + 1) + 1
        await _reached(folder, first - 1, run)
        asking = asyncio.create_task(clients.ask()) if index % 2 else None
        await _reached(folder, first, run)
        before = time.perf_counter(), processor_s(str(folder)), time.process_time()
        await _reached(folder, first + steps, run)
        after = time.perf_counter(), processor_s(str(folder)), time.process_time()
        windows.append(Window(range(first, first + steps), *(b - a for a, b in zip(before, after, strict=True))))
        if asking:
            if asking.done():
                await asking  # raises why
            asking.cancel()
            with suppress(asyncio.CancelledError):
                await asking
    return windows, await run


async def _reached(folder: Path, step: int, run: "asyncio.Task[list[dict[str, float]]]") -> None:
    """Returns when the run has ended its step of this number."""
    while _step(folder / RUN) < step:
        if run.done():
            await run  # raises why
            return
        await asyncio.sleep(LOOK_S)


def _step(metrics: Path) -> int:
    """The last step of a run; 0 before the first."""
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    return int(json.loads(lines[-1])["step"]) if lines and lines[-1].endswith("\n") else 0


def _tell(case: Case, windows: list[Window], lines: list[dict[str, float]], clients: Clients) -> None:
    """Prints the ratio, the stages, and what the clients were answered and cost."""
    step_s = [median(lines[step - 1]["step"] for step in window.steps) for window in windows]
    ratios = [2 * step_s[at] / (step_s[at - 1] + step_s[at + 1]) for at in range(1, len(windows), 2)]
    beside, alone = windows[1::2], windows[::2]
    seconds = sum(window.seconds for window in beside)
    steps = len(beside[0].steps)
    table = Table("seconds of a step", "wall", *STAGES)
    stages: dict[str, dict[str, float]] = {}
    for name, some in (("alone", alone), ("beside clients", beside)):
        rows = [lines[step - 1] for window in some for step in window.steps]
        stages[name] = {stage: median(row[stage] for row in rows) for stage in ("step", *STAGES)}
        table.add_row(name, *(f"{value:.3f}" for value in stages[name].values()))
    own = case.batch * case.longest / stages["beside clients"]["step"]
    console.print(table)
    for kind, answers in clients.answers.items():
        rates = [count / clients.seconds for count in (answers.requests, answers.tokens)]
        first = f"{median(answers.first_s):.3f} s, at most {max(answers.first_s):.3f}" if answers.first_s else "never"
        console.print(
            f"{kind}: {rates[0]:.2f} requests/s, {rates[1]:.0f} tokens/s, first byte after {first}; "
            f"{answers.refused} refused"
        )
    foreign = sum(answers.tokens for answers in clients.answers.values()) / clients.seconds
    theirs = [median(window.theirs_s / steps for window in some) for some in (alone, beside)]
    client_s = sum(window.ours_s for window in beside) / seconds - sum(w.ours_s for w in alone) / sum(
        w.seconds for w in alone
    )
    ratio = median(ratios)
    console.print(
        f"processor time of a step, run and services: {theirs[0]:.3f} s alone, {theirs[1]:.3f} beside; of the "
        f"clients: {client_s:.3f} s a second"
    )
    share = foreign / own
    console.print(
        f"foreign tokens / own tokens: {share:.3f}; further time of a step for each: {(ratio - 1) / share:.2f}"
        if share
        else "no foreign tokens"
    )
    each = ", ".join(f"{one:.3f}" for one in ratios)
    console.print(f"a step beside clients, of alone: {ratio:.3f} (each window {each})")
    keep(f"beside {clients.named}", {"ratio": ratio, "ratios": ratios, "stages": stages, "share": share})


if __name__ == "__main__":
    typer.run(main)
