"""The Python API against running services: the example of docs/python.md, and a run that is left and resumed."""

import os
import re
import subprocess
from pathlib import Path

import yaml

from orchestrator.monitoring.metrics import read_metrics
from tests.cluster import Quartet
from tests.commands import PATIENCE_S
from tests.configuration import REPO
from tests.preloaded import program

LEFT = """
import quartet
from quartet.config.base import ConfigError

with quartet.Training("FILE", overwrite=True) as training:
    for step in training:
        if step.number == 2:
            break
try:
    next(quartet.Training("FILE"))
except ConfigError as error:
    print("refused:", error)
with quartet.Training("FILE", resume=True) as training:
    print("resumed:", [step.number for step in training])
with quartet.Training("FILE", resume=True) as training:
    print("finished:", [step.number for step in training])
"""


def _ran(quartet: Quartet, name: str, code: str) -> str:
    """Output of a script that uses the running services under a run's name of its own."""
    raw = quartet.raw | {"orchestrator": quartet.raw["orchestrator"] | {"name": name}}
    (quartet.folder / f"{name}.yaml").write_text(yaml.safe_dump(raw))
    script = quartet.folder / f"{name}.py"
    script.write_text(code)
    # With vLLM imported, for the engine of an evaluation.
    python = program("rollout", Path(os.environ["RAY_TMPDIR"]))
    done = subprocess.run(
        [str(python), str(script)],
        cwd=quartet.folder,
        env=os.environ | {"VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_pages_example_trains_evaluates_and_reads(quartet: Quartet) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (REPO / "docs/python.md").read_text(), re.DOTALL)
    [code] = [block for block in blocks if "Training" in block]
    told = _ran(quartet, "scripted", code.replace("ppo.yaml", "scripted.yaml"))
    steps = int(quartet.raw["orchestrator"]["steps"])
    first = [line.split()[0] for line in told.splitlines() if re.match(r"\d+ -?\d", line)]
    assert first == [str(number) for number in range(1, steps + 1)]
    assert f"{steps} steps; held-out score" in told
    assert (Path(quartet.folder) / "runs/scripted/policy/model.safetensors").exists()


def test_a_run_that_is_left_is_kept_and_resumed(quartet: Quartet) -> None:
    told = _ran(quartet, "left", LEFT.replace("FILE", "left.yaml"))
    steps = int(quartet.raw["orchestrator"]["steps"])
    assert re.search(r"refused: \S*runs/left\S* already holds", told)
    resumed, finished = re.findall(r"(?:resumed|finished): \[(.*)\]", told)
    assert resumed.split(", ")[-1] == str(steps)
    assert finished == ""
    lines = read_metrics(quartet.folder / "runs/left/metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(steps + 1))
