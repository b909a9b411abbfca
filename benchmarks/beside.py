"""Seconds of a run's step while a chat client and an evaluation ask the model in training, over those of alone.

    python -m benchmarks.beside [--case demo] [--rounds 4] [--steps 4] [--client chat --client evaluation]

One `quartet train` by the file that `quartet init` writes, at lock-step. Windows of steps alone and windows of steps
with clients at its door take turns, so that a machine that changes speed changes both; the step in which clients come
or go is left out. Each window with clients is compared with the two beside it. In every other one the clients are
foreign, as they are by themselves, and in the others they say that they are an evaluation of the run, which
`foreign_share` does not limit.

`chat` streams an answer as long as the run's responses, and asks again two seconds after its end, as a person who
reads and writes does. `evaluation` asks as lm-evaluation-harness's `local-completions` does by its defaults: for the
log-probs of a text of token ids, one request after the other without a pause; `--evaluations` has so many at a time,
as its `num_concurrent` does.

Both clients are this process, whose processor time is told apart from that of the run with all of its services, and
from that of all other work on the machine, which should be little.
"""

import asyncio
import json
import os
import random
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Annotated

import aiohttp
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.arguments import check_known
from benchmarks.ended import SIDE, end_marked, heed_sigterm, processor_s
from benchmarks.figures import keep
from benchmarks.vs_trl.cases import CASES, Case
from benchmarks.vs_trl.sides import STAGES, Quartet, configured
from orchestrator.deployment.listeners import free_ports
from quartet.wire.callers import PURPOSE, Purpose

console = Console()
CHAT, EVALUATION = "chat", "evaluation"
PURPOSES = (Purpose.FOREIGN, Purpose.EVALUATION)
"""Purposes of the clients, in turns."""
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
    seconds: float = 0.0
    """Time for which it asked."""


@dataclass(frozen=True, slots=True)
class Window:
    """Steps alone, or beside clients."""

    steps: range
    purpose: Purpose
    """Purpose of the clients; training for none."""
    theirs_s: float
    """Processor time of the run and its services."""
    ours_s: float
    """Processor time of the clients."""
    all_s: float
    """Processor time of the machine."""


class Clients:
    """The clients of the door, which come and go together."""

    def __init__(self, case: Case, address: str, token: Path, kinds: list[str], evaluations: int) -> None:
        self._case, self._address, self._token = case, address, token
        self._kinds = [kind for kind in kinds for _ in range(evaluations if kind == EVALUATION else 1)]
        self._draw = random.Random(0)
        self.answers = {(purpose, kind): Answers() for purpose in PURPOSES for kind in kinds}

    @property
    def named(self) -> str:
        """The kinds of clients, one after the other."""
        return ", ".join(self._kinds)

    async def ask(self, purpose: Purpose) -> None:
        """Asks until it is cancelled."""
        began = time.perf_counter()
        headers = {"Authorization": f"Bearer {self._token.read_text()}", PURPOSE: purpose.name.lower()}
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        try:
            async with (
                aiohttp.ClientSession(self._address, headers=headers, timeout=timeout) as session,
                asyncio.TaskGroup() as group,
            ):
                for kind in self._kinds:
                    answers = self.answers[purpose, kind]
                    asking = self._chat if kind == CHAT else self._evaluate
                    group.create_task(asking(session, answers))
        finally:
            for (asked, _), answers in self.answers.items():
                answers.seconds += (time.perf_counter() - began) * (asked == purpose)

    async def _chat(self, session: aiohttp.ClientSession, answers: Answers) -> None:
        case = self._case
        while True:
            body = {"prompt": self._ids(case.prompt), "max_tokens": case.response, "ignore_eos": True, "stream": True}
            if await _answered(session, answers, body, case.longest):
                await asyncio.sleep(PAUSE_S)

    async def _evaluate(self, session: aiohttp.ClientSession, answers: Answers) -> None:
        length = self._case.longest - 1
        while True:
            given = {"max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True, "temperature": 0}
            await _answered(session, answers, {"prompt": [self._ids(length)], **given}, length + 1)

    def _ids(self, count: int) -> list[int]:
        return self._draw.choices(range(4, self._case.vocabulary), k=count)


async def _answered(session: aiohttp.ClientSession, answers: Answers, body: dict[str, object], tokens: int) -> bool:
    """Asks once; False if it was refused, after the wait that it was told."""
    began = time.perf_counter()
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


def main(
    case: Annotated[str, typer.Option(help=f"One of {', '.join(CASES)}.")] = "demo",
    rounds: Annotated[int, typer.Option(min=1, help="windows with clients of each purpose")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="of a window")] = 4,
    client: Annotated[list[str], typer.Option(help=f"{CHAT} or {EVALUATION}")] = [CHAT, EVALUATION],  # noqa: B006
    evaluations: Annotated[int, typer.Option(min=1, help="requests of the evaluation at a time")] = 1,
    share: Annotated[float | None, typer.Option(help="foreign_share of the rollout service")] = None,
) -> None:
    """Measures and prints the ratios."""
    check_known([case], CASES, "--case")
    check_known(client, (CHAT, EVALUATION), "--client")
    heed_sigterm()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        CASES[case].make(folder)
        raw = configured(folder, CASES[case])
        [rollout] = (each["args"] for each in raw["applications"] if each["name"] == "rollout")
        rollout |= {} if share is None else {"foreign_share": share}
        [port] = free_ports(1)
        raw["http_options"]["port"] = port
        raw["security"] = {**raw.get("security", {}), "http": True}
        quartet = Quartet(folder, raw)
        with quartet.served():
            address, token = f"http://127.0.0.1:{port}/rollout/", folder / ".quartet/access/token"
            clients = Clients(CASES[case], address, token, client, evaluations)
            windows, lines = asyncio.run(_measured(folder, quartet, clients, rounds, steps))
    _tell(CASES[case], windows, lines, clients)


async def _measured(
    folder: Path, quartet: Quartet, clients: Clients, rounds: int, steps: int
) -> tuple[list[Window], list[dict[str, float]]]:
    """The windows and the run's steps."""
    count = 2 * len(PURPOSES) * rounds + 1
    # Each window has a step before it that is left out.
    run = asyncio.create_task(asyncio.to_thread(quartet.updates, WARM_UP + count * (steps + 1)))
    try:
        return await windows_of(folder, run, clients, count, steps), await run
    except BaseException:
        # A thread waits for the end of the run, and this process for the thread.
        end_marked(str(folder), SIDE)
        raise


async def windows_of(
    folder: Path, run: "asyncio.Task[list[dict[str, float]]]", clients: Clients, count: int, steps: int
) -> list[Window]:
    """The windows of a run, the first and the last of them alone."""
    windows = []
    for index in range(count):
        first = WARM_UP + index * (steps + 1) + 1
        await _reached(folder, first - 1, run)
        purpose = PURPOSES[index // 2 % len(PURPOSES)] if index % 2 else Purpose.TRAINING
        asking = asyncio.create_task(clients.ask(purpose)) if index % 2 else None
        await _reached(folder, first, run)
        before = processor_s(str(folder)), time.process_time(), _machine_s()
        await _reached(folder, first + steps, run)
        after = processor_s(str(folder)), time.process_time(), _machine_s()
        spent = (b - a for a, b in zip(before, after, strict=True))
        windows.append(Window(range(first + 1, first + 1 + steps), purpose, *spent))
        if asking:
            if asking.done():
                await asking  # raises why
            asking.cancel()
            with suppress(asyncio.CancelledError):
                await asking
    return windows


def _machine_s() -> float:
    """Processor time of everything on this machine so far, in seconds."""
    user, nice, system = map(int, Path("/proc/stat").read_text().split()[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


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
    """Prints the ratios, the stages, and what the clients were answered and cost."""
    table = Table("", "wall", *STAGES, "run", "clients", "others", title="a step, and processor time, in seconds")
    medians: dict[Purpose, dict[str, float]] = {}
    for purpose in (Purpose.TRAINING, *PURPOSES):
        some = [window for window in windows if window.purpose == purpose]
        rows = [lines[step - 1] for window in some for step in window.steps]
        stages = {stage: median(row[stage] for row in rows) for stage in ("step", *STAGES)}
        medians[purpose] = stages | {
            "run": median(window.theirs_s / len(window.steps) for window in some),
            "clients": median(window.ours_s / len(window.steps) for window in some),
            "others": median((w.all_s - w.theirs_s - w.ours_s) / len(w.steps) for w in some),
        }
        name = purpose.name.lower() if purpose in PURPOSES else "alone"
        table.add_row(name, *(f"{value:.2f}" for value in medians[purpose].values()))
    console.print(table)
    for (purpose, kind), answers in clients.answers.items():
        rates = [count / answers.seconds for count in (answers.requests, answers.tokens)]
        first = f"{median(answers.first_s):.3f} s, at most {max(answers.first_s):.3f}" if answers.first_s else "never"
        console.print(
            f"{purpose.name.lower()}, {kind}: {rates[0]:.2f} requests/s, {rates[1]:.0f} tokens/s, first byte after "
            f"{first}; {answers.refused} refused"
        )
    step_s = [median(lines[step - 1]["step"] for step in window.steps) for window in windows]
    for purpose in PURPOSES:
        at = [index for index, window in enumerate(windows) if window.purpose == purpose]
        ratios = [2 * step_s[index] / (step_s[index - 1] + step_s[index + 1]) for index in at]
        foreign = sum(a.tokens / a.seconds for (asked, _), a in clients.answers.items() if asked == purpose)
        lengths = [lines[step - 1]["length"] for index in at for step in windows[index].steps]
        share = foreign * medians[purpose]["step"] / (case.batch * (case.prompt + mean(lengths)))
        each = ", ".join(f"{one:.3f}" for one in ratios)
        console.print(
            f"a step beside {purpose.name.lower()} clients, of alone: {median(ratios):.3f} (each window {each}); "
            f"their tokens / the run's: {share:.3f}"
        )
        figures = {"ratio": median(ratios), "ratios": ratios, "share": share, **medians[purpose]}
        keep(f"beside {purpose.name.lower()} {clients.named}", figures)


if __name__ == "__main__":
    typer.run(main)
