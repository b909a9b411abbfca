"""Cost of a run's spans: processor time, memory and disk.

    python -m benchmarks.spans [--steps 1000] [--samples 128]

Records steps as a run does, four stages for each sample, all of a stage at once, with the shares of each step and the
trace file, but without the work. Prints the microseconds of processor time and the bytes of the file per span, and by
how much the process has grown between step 10 and the last.
"""

import tempfile
import time
from pathlib import Path
from typing import Annotated

import psutil
import typer
from rich.console import Console

from orchestrator.tracing.file import TraceFile
from orchestrator.tracing.samples import TRACKS, SampleStages
from orchestrator.tracing.spans import Spans
from orchestrator.tracing.waits import Waits

WARM_UP = 10
console = Console()


def main(
    steps: Annotated[int, typer.Option(min=WARM_UP + 1)] = 1000, samples: Annotated[int, typer.Option(min=1)] = 128
) -> None:
    """Runs the benchmark and prints its results."""
    process, before, recording = psutil.Process(), 0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with TraceFile(path, console.print) as file, Spans(file.write) as spans:
            stages, waits = SampleStages(spans), Waits(spans)
            waits.begin()
            began = time.process_time()
            for step in range(1, steps + 1):
                if step == WARM_UP:
                    before = process.memory_info().rss
                recorded = time.process_time()
                _step(stages, waits, range(step * samples, (step + 1) * samples))
                recording += time.process_time() - recorded
                waits.step(step)
            spent = time.process_time() - began
        count, size = steps * samples * len(TRACKS), path.stat().st_size
    grown = process.memory_info().rss - before
    console.print(
        f"{recording / count * 1e6:.1f} us a span to record, {spent / count * 1e6:.1f} us with shares and file"
    )
    console.print(
        f"{spent / steps * 1e3:.1f} ms and {size / steps / 1024:.0f} KiB a step, {size / count:.0f} bytes a span"
    )
    console.print(f"memory grew by {grown / 1024:.0f} KiB in {steps - WARM_UP} steps; the file has {size >> 20} MiB")


def _step(stages: SampleStages, waits: Waits, numbers: range) -> None:
    with waits.for_batch() as waited:
        waited.update(numbers)
        for stage in TRACKS:
            with stages(stage, numbers) as finished:
                for number in numbers:
                    finished(number)
    for wait in ("logprobs", "training", "push"):
        with waits(wait):
            pass


if __name__ == "__main__":
    typer.run(main)
