"""Seconds of a step whose responses an agent asks for by OpenAI's protocol, over those of a step without an agent.

    python -m benchmarks.agents [--case demo] [--rounds 3] [--steps 6]

Both runs are `quartet train` by the file that `quartet init` writes, at lock-step, with the same services; they take
turns. The agent asks for one response to each prompt, of as many tokens, and does nothing else: what it costs is what
sessions, HTTP and a client cost. The client is in the process of the run, as agents are.
"""

import tempfile
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from openai import AsyncOpenAI
from rich.console import Console

from benchmarks.arguments import check_known
from benchmarks.ended import heed_sigterm
from benchmarks.figures import keep
from benchmarks.vs_trl.cases import CASES
from benchmarks.vs_trl.sides import Quartet, configured
from orchestrator.deployment.listeners import free_ports
from orchestrator.environments.agent import Task

console = Console()
MODEL = AsyncOpenAI(base_url="http://127.0.0.1", api_key="of each task", max_retries=10)
WARM_UP = 2
"""First steps of a run, which are left out."""
EQUAL = [name for name, case in CASES.items() if case.equal]
"""Cases whose responses have the same length, as the agent's have."""


async def ask(task: Task) -> None:
    """The agent."""
    model = MODEL.with_options(base_url=task.base_url, api_key=task.api_key)
    await model.completions.create(
        model=task.model, prompt=task.prompt, max_tokens=1 << 20, extra_body={"ignore_eos": True}
    )


def main(
    case: Annotated[str, typer.Option(help=f"One of {', '.join(EQUAL)}.")] = "demo",
    rounds: Annotated[int, typer.Option(min=1, help="of both runs")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="of a run, besides the first two")] = 6,
) -> None:
    """Measures and prints the ratio."""
    check_known([case], EQUAL, "--case")
    heed_sigterm()
    sides: dict[str, list[dict[str, float]]] = {"alone": [], "by the agent": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        CASES[case].make(folder)
        raw = configured(folder, CASES[case])
        [raw["http_options"]["port"]] = free_ports(1)
        raw["security"] = {**raw.get("security", {}), "http": True}
        alone: dict[str, Any] = raw["orchestrator"]
        response = CASES[case].response
        agent = {"kind": f"{Path(__file__).parent.name}.{Path(__file__).stem}:ask", "max_tokens": response}
        by_agent = alone | {"agent": agent, "sampling": alone["sampling"] | {"min_new_tokens": 0}}
        quartet = Quartet(folder, raw)
        with quartet.served():
            for _ in range(rounds):
                for name, section in zip(sides, (alone, by_agent), strict=True):
                    raw["orchestrator"] = section
                    lines = quartet.updates(WARM_UP + steps)[WARM_UP:]
                    assert all(line["length"] == response for line in lines), lines
                    sides[name] += lines
                    shown = {stage: median(line[stage] for line in lines) for stage in ("step", "generate")}
                    console.print(f"{name}: a step {shown['step']:.3f} s, of it generation {shown['generate']:.3f} s")
    ratios = {
        stage: median(line[stage] for line in sides["by the agent"]) / median(line[stage] for line in sides["alone"])
        for stage in ("step", "generate")
    }
    console.print(f"by the agent, of alone: a step {ratios['step']:.3f}, generation {ratios['generate']:.3f}")
    keep("agents", ratios)


if __name__ == "__main__":
    typer.run(main)
