"""The rollout service beside `LLM.generate` on a GPU, as benchmarks.rollout, with models that are made for it. Three
minutes.

    python -m benchmarks.gpu.service [--size 1.5B] [--prompts 256] [--prompt 128] [--new 256] [--rounds 3]
                                     [--device cuda]

The service is that of `deploy/ppo-1gpu.yaml`; both engines are on the GPU and take turns.
"""

import tempfile
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
import yaml

from benchmarks.gpu.results import Cell, Results
from benchmarks.gpu.step import configured, models
from benchmarks.rollout import IN_PROCESS, SERVICE, speeds


def main(
    size: str = "1.5B",
    prompts: int = 256,
    prompt: Annotated[int, typer.Option(help="tokens of a prompt")] = 128,
    new: Annotated[int, typer.Option(help="tokens of a response")] = 256,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    device: str = "cuda",
    out: Path = Path("runs/gpu"),
) -> None:
    """Runs the benchmark and prints its results."""
    results = Results("service", out)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        models(folder, size, prompts, prompt, device)
        file = folder / "service.yaml"
        file.write_text(yaml.safe_dump(configured(folder, batch=prompts, prompt=prompt, new=new, device=device)))
        results.attempt(f"{size} service", lambda: compared(speeds(file, rounds, prompts)))
    results.show()


def compared(measured: dict[str, list[float]]) -> dict[str, Cell]:
    """Median tokens/s of both sides, and their ratio."""
    service, in_process = median(measured[SERVICE]), median(measured[IN_PROCESS])
    return {"service_tokens_s": service, "generate_tokens_s": in_process, "ratio": service / in_process}


if __name__ == "__main__":
    typer.run(main)
